//! Changes of written objects by the API server, and dry runs of writes.

use std::collections::BTreeSet;

use axum::response::{IntoResponse as _, Response};
use serde_json::{Value, json};

use super::{ApiServer, SLICES};

impl ApiServer {
    /// Returns the names of all devices of which a slice was ever stored without this field.
    pub(crate) fn devices_ever_stored_without(&self, field: &str) -> BTreeSet<String> {
        let objects = self.objects();
        let slices = objects.changes.iter();
        let slices = slices.filter(|change| change.collection == SLICES);
        let devices =
            slices.filter_map(|change| change.event["object"]["spec"]["devices"].as_array());
        let devices = devices.flatten().filter(|device| device[field].is_null());
        let name = |device: &Value| device["name"].as_str().unwrap().to_owned();
        devices.map(name).collect()
    }

    /// Returns the object as it would be stored.
    pub(super) fn dry_run(&self, body: &Value) -> Response {
        let mut object = body.clone();
        admit(&mut object, &self.objects().dropped);
        axum::Json(object).into_response()
    }
}

/// Drops the dropped fields and sets taint times.
pub(super) fn admit(value: &mut Value, dropped: &[&str]) {
    match value {
        Value::Object(fields) => {
            fields.retain(|key, _| !dropped.contains(&key.as_str()));
            if let Some(taints) = fields.get_mut("taints").and_then(Value::as_array_mut) {
                for taint in taints {
                    if taint["timeAdded"].is_null() {
                        taint["timeAdded"] = json!("2026-01-01T00:00:00Z");
                    }
                }
            }
            fields.values_mut().for_each(|field| admit(field, dropped));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| admit(item, dropped)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}
