//! Label selectors of namespaces.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

/// Returns whether the selector selects an object with these labels. A requirement with an unknown operator selects
/// nothing.
#[must_use]
pub fn labels_match(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let equal = selector.match_labels.iter().flatten();
    let requirements = selector.match_expressions.iter().flatten();
    equal
        .into_iter()
        .all(|(key, value)| labels.get(key) == Some(value))
        && requirements
            .into_iter()
            .all(|requirement| holds(requirement, labels.get(&requirement.key)))
}

fn holds(requirement: &LabelSelectorRequirement, value: Option<&String>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_listed = value.is_some_and(|value| values.contains(value));
    match requirement.operator.as_str() {
        "In" => is_listed,
        "NotIn" => !is_listed,
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}
