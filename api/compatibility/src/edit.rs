//! Puts the claim into the JSON of the pod.

use serde_json::{Value, json};

use super::Translation;

pub(super) fn apply(translation: &Translation, pod: &mut Value, template: &str) {
    let Some(spec) = pod.get_mut("spec") else {
        return;
    };
    for edit in &translation.containers {
        let Some(container) = spec
            .get_mut(edit.list.field())
            .and_then(|containers| containers.get_mut(edit.index))
        else {
            continue;
        };
        remove(container, &edit.resources);
        if let Some(request) = &edit.request {
            let claim = json!({"name": translation.entry, "request": request});
            if let Some(resources) = member(container, "resources") {
                push(resources, "claims", claim);
            }
        }
    }
    push(
        spec,
        "resourceClaims",
        json!({"name": translation.entry, "resourceClaimTemplateName": template}),
    );
    if translation.replaces_scheduler
        && let Some(spec) = spec.as_object_mut()
    {
        spec.remove("schedulerName");
    }
}

/// Removes resources, and the lists that become empty.
fn remove(container: &mut Value, resources: &[String]) {
    let Some(all) = container
        .get_mut("resources")
        .and_then(Value::as_object_mut)
    else {
        return;
    };
    for list in ["limits", "requests"] {
        let Some(amounts) = all.get_mut(list).and_then(Value::as_object_mut) else {
            continue;
        };
        for resource in resources {
            amounts.remove(resource);
        }
        if amounts.is_empty() {
            all.remove(list);
        }
    }
}

/// Returns a member of an object, created as an object if it is absent or null.
fn member<'v>(object: &'v mut Value, name: &str) -> Option<&'v mut Value> {
    let member = object.as_object_mut()?.entry(name).or_insert(Value::Null);
    if member.is_null() {
        *member = json!({});
    }
    Some(member)
}

/// Appends to a list of an object that may be absent or null.
fn push(object: &mut Value, list: &str, item: Value) {
    let Some(object) = object.as_object_mut() else {
        return;
    };
    match object.entry(list).or_insert(Value::Null) {
        Value::Array(items) => items.push(item),
        other => *other = Value::Array(vec![item]),
    }
}
