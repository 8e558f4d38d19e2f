//! Field and label selectors of lists and watches.

use serde_json::{Value, json};

use super::parameter;

/// Returns whether an object matches the field selector of a query.
pub(super) fn is_selected(object: &Value, query: &str) -> bool {
    let selector = parameter(query, "fieldSelector").unwrap_or_default();
    let selector = selector
        .replace("%3D", "=")
        .replace("%2C", ",")
        .replace("%21", "!");
    let mut terms = selector.split(',').filter_map(|term| term.split_once('='));
    terms.all(|(field, value)| {
        let (field, is_wanted) = match field.strip_suffix('!') {
            Some(field) => (field, false),
            None => (field, true),
        };
        let found = object.pointer(&format!("/{}", field.replace('.', "/")));
        (found == Some(&json!(value))) == is_wanted
    })
}

/// Returns whether an object matches the label selector of a query: a name, or a name and a value.
pub(super) fn is_labelled(object: &Value, query: &str) -> bool {
    let selector = parameter(query, "labelSelector").unwrap_or_default();
    let selector = selector.replace("%2F", "/").replace("%3D", "=");
    let (name, value) = match selector.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (selector.as_str(), None),
    };
    let found = object["metadata"]["labels"][name].as_str();
    name.is_empty() || found.is_some_and(|found| value.is_none_or(|value| found == value))
}
