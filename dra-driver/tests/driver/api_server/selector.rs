//! Field selectors of lists and watches.

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
