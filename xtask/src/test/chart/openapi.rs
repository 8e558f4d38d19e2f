//! Checks rendered objects against the OpenAPI schemas of the pinned Kubernetes, which are in its Go module, as
//! `kubectl apply --validate=strict` does with those of the API server: unknown and missing fields, and types.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Groups of custom resources of other projects, whose schemas Kubernetes does not have.
const FOREIGN: [&str; 2] = ["cert-manager.io", "monitoring.coreos.com"];

/// The schemas of a release, read when an object needs them.
pub(super) struct Schemas {
    directory: PathBuf,
    read: RefCell<BTreeMap<String, Rc<Value>>>,
}

impl Schemas {
    /// The schemas of the newest release of Kubernetes.
    pub(super) fn of_kubernetes() -> Result<Self> {
        let module = drava_cluster::kubernetes_source().context("fetch the schemas")?;
        Ok(Self {
            directory: module.join("api/openapi-spec/v3"),
            read: RefCell::default(),
        })
    }

    /// Checks all objects of a rendering.
    pub(super) fn check(&self, rendered: &str) -> Result<()> {
        let objects: Vec<Value> =
            serde_saphyr::from_multiple(rendered).context("read the rendering")?;
        let mut problems = Vec::new();
        for object in objects.iter().filter(|object| !object.is_null()) {
            problems.extend(self.check_object(object)?);
        }
        ensure!(problems.is_empty(), "{}", problems.join("\n"));
        Ok(())
    }

    fn check_object(&self, object: &Value) -> Result<Vec<String>> {
        let text = |name: &str| object[name].as_str().unwrap_or_default();
        let (api_version, kind) = (text("apiVersion"), text("kind"));
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        if FOREIGN.contains(&group) {
            return Ok(Vec::new());
        }
        let document = self.document(group, version)?;
        let mut problems = Problems::of(&document);
        let name = object["metadata"]["name"].as_str().unwrap_or_default();
        let schema = schema_of(&document, group, version, kind)
            .with_context(|| format!("Kubernetes has no {api_version} {kind} ({name})"))?;
        problems.check(schema, object, &format!("{kind} {name}"));
        Ok(problems.found)
    }

    fn document(&self, group: &str, version: &str) -> Result<Rc<Value>> {
        let name = if group.is_empty() {
            format!("api__{version}_openapi.json")
        } else {
            format!("apis__{group}__{version}_openapi.json")
        };
        if let Some(document) = self.read.borrow().get(&name) {
            return Ok(Rc::clone(document));
        }
        let text = fs::read_to_string(self.directory.join(&name))
            .with_context(|| format!("Kubernetes does not serve {group}/{version} ({name})"))?;
        let document: Rc<Value> = Rc::new(serde_json::from_str(&text)?);
        self.read.borrow_mut().insert(name, Rc::clone(&document));
        Ok(document)
    }
}

/// Returns the schema of a kind.
fn schema_of<'d>(document: &'d Value, group: &str, version: &str, kind: &str) -> Option<&'d Value> {
    let wanted = serde_json::json!({"group": group, "kind": kind, "version": version});
    let schemas = document["components"]["schemas"].as_object()?;
    schemas.values().find(|schema| {
        let kinds = schema["x-kubernetes-group-version-kind"].as_array();
        kinds.is_some_and(|kinds| kinds.contains(&wanted))
    })
}

/// What a value has that its schema forbids.
struct Problems<'d> {
    document: &'d Value,
    found: Vec<String>,
}

impl<'d> Problems<'d> {
    fn of(document: &'d Value) -> Self {
        Self {
            document,
            found: Vec::new(),
        }
    }

    fn check(&mut self, schema: &Value, value: &Value, path: &str) {
        // The API server treats null as an absent field.
        if value.is_null() {
            return;
        }
        if let Some(reference) = schema["$ref"].as_str() {
            let target = self.document.pointer(reference.trim_start_matches('#'));
            match target {
                Some(target) => self.check(target, value, path),
                None => self.found.push(format!("{path}: no schema {reference}")),
            }
        }
        for part in items(&schema["allOf"]) {
            self.check(part, value, path);
        }
        let alternatives = items(&schema["oneOf"]).chain(items(&schema["anyOf"]));
        let mut alternatives = alternatives.peekable();
        if alternatives.peek().is_some() && !alternatives.any(|one| self.accepts(one, value)) {
            self.found.push(format!("{path}: {value} has a wrong type"));
        }
        if !schema["enum"].is_null() && !items(&schema["enum"]).any(|one| one == value) {
            self.found
                .push(format!("{path}: {value} is not one of {}", schema["enum"]));
        }
        let is_of_type = match schema["type"].as_str() {
            Some("object") => {
                self.check_fields(schema, value, path);
                value.is_object()
            }
            Some("array") => {
                for (index, item) in items(value).enumerate() {
                    self.check(&schema["items"], item, &format!("{path}[{index}]"));
                }
                value.is_array()
            }
            Some("string") => value.is_string(),
            Some("boolean") => value.is_boolean(),
            Some("integer") => value.is_i64() || value.is_u64(),
            Some("number") => value.is_number(),
            _ => true,
        };
        if !is_of_type {
            self.found
                .push(format!("{path}: {value} is no {}", schema["type"]));
        }
    }

    fn accepts(&self, schema: &Value, value: &Value) -> bool {
        let mut inner = Problems::of(self.document);
        inner.check(schema, value, "");
        inner.found.is_empty()
    }

    fn check_fields(&mut self, schema: &Value, value: &Value, path: &str) {
        for required in items(&schema["required"]).filter_map(Value::as_str) {
            if value[required].is_null() {
                self.found.push(format!("{path}: {required} is missing"));
            }
        }
        let properties = schema["properties"].as_object();
        let others = &schema["additionalProperties"];
        // Objects without a schema for their fields have any, such as the configuration of another program.
        let is_open =
            properties.is_none() || schema["x-kubernetes-preserve-unknown-fields"] == true;
        for (name, field) in value.as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            match properties.and_then(|properties| properties.get(name)) {
                Some(schema) => self.check(schema, field, &path),
                None if others.is_object() => self.check(others, field, &path),
                None if is_open || *others == true => {}
                None => self.found.push(format!("{path}: unknown field")),
            }
        }
    }
}

fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn problems(object: &str) -> Vec<String> {
        let document = json!({"components": {"schemas": {
            "Pod": {
                "type": "object",
                "required": ["spec"],
                "properties": {
                    "apiVersion": {"type": "string"},
                    "kind": {"type": "string"},
                    "spec": {"allOf": [{"$ref": "#/components/schemas/Spec"}]},
                    "parameters": {"type": "object"},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                },
                "x-kubernetes-group-version-kind": [{"group": "", "kind": "Pod", "version": "v1"}],
            },
            "Spec": {
                "type": "object",
                "properties": {
                    "hostPID": {"type": "boolean"},
                    "policy": {"type": "string", "enum": ["Always", "Never"]},
                    "ports": {"type": "array", "items": {"$ref": "#/components/schemas/Port"}},
                },
            },
            "Port": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        }}});
        let object: Value = serde_saphyr::from_str(object).unwrap();
        let schema = schema_of(&document, "", "v1", "Pod").unwrap();
        let mut problems = Problems::of(&document);
        problems.check(schema, &object, "pod");
        problems.found
    }

    #[test]
    fn accepts_what_the_schema_describes() {
        let object = "{apiVersion: v1, kind: Pod, labels: {a: b}, parameters: {any: [1]}, \
             spec: {hostPID: true, policy: Never, ports: [80, http, null]}}";
        assert_eq!(problems(object), [""; 0]);
    }

    #[test]
    fn names_path_of_each_problem() {
        let cases = [
            ("{spec: {hostPid: true}}", "pod.spec.hostPid: unknown field"),
            (
                "{spec: {hostPID: yes please}}",
                "pod.spec.hostPID: \"yes please\" is no \"boolean\"",
            ),
            (
                "{labels: {a: 1}, spec: {}}",
                "pod.labels.a: 1 is no \"string\"",
            ),
            (
                "{spec: {ports: [80, [a]]}}",
                "pod.spec.ports[1]: [\"a\"] has a wrong type",
            ),
            (
                "{spec: {policy: Maybe}}",
                "pod.spec.policy: \"Maybe\" is not one of [\"Always\",\"Never\"]",
            ),
            ("{kind: Pod}", "pod: spec is missing"),
        ];
        for (object, problem) in cases {
            assert_eq!(problems(object), [problem], "{object}");
        }
    }
}
