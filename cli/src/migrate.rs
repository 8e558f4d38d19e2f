//! `kubectl drava migrate`: manifests for HAMi, Volcano's vGPU and NVIDIA's device plugin in, manifests for drava out.
//!
//! Works without a cluster. Pods and workloads get a ResourceClaimTemplate ([`drava_compatibility`]); jobs of Volcano
//! become Jobs with gang annotations; limits of tenants are converted or refused, never dropped. An object that is refused is
//! written unchanged, so that nothing is missing from the output; the report names the field and the way out. Objects without
//! GPUs pass through unchanged. Comments are lost.

use std::collections::BTreeSet;
use std::fmt;

use drava_compatibility::Settings;
use drava_explanation::printable;
use serde::Serialize;
use serde_json::{Map, Value, json};

mod config_map;
mod device_config;
pub(crate) mod manifest;
mod node_config;
mod plugin_flags;
mod scheduler_config;
mod tenant_limit;
mod volcano_job;
mod workload;

/// Objects and report of a migration.
#[derive(Debug, Default)]
pub(crate) struct Migration {
    /// The objects to apply, in the order of the input.
    pub(crate) objects: Vec<Value>,
    /// What changed or is refused.
    pub(crate) findings: Vec<Finding>,
    /// Values of the drava chart for the translation by the webhook, if a ConfigMap names the resources.
    pub(crate) values: Option<Value>,
}

/// One line of the report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) outcome: Outcome,
    /// Kind, namespace and name.
    pub(crate) object: String,
    pub(crate) message: String,
}

/// What happened to a field of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// The object is translated, and its meaning changes.
    Changed,
    /// The object cannot be translated and is written unchanged.
    Refused,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = match self.outcome {
            Outcome::Changed => "changed",
            Outcome::Refused => "refused",
        };
        write!(f, "{outcome}: {}: {}", self.object, self.message)
    }
}

/// An object that cannot be translated.
#[derive(Debug, PartialEq, Eq)]
struct Refused(Vec<String>);

impl Refused {
    fn one(reason: impl Into<String>) -> Self {
        Self(vec![reason.into()])
    }
}

/// Translation of one object.
#[derive(Debug, Default)]
struct Translated {
    objects: Vec<Value>,
    changes: Vec<String>,
    /// Settings that the objects lack.
    refusals: Vec<String>,
}

impl Translated {
    /// The object as it is.
    fn unchanged(object: Value) -> Self {
        Self {
            objects: vec![object],
            ..Self::default()
        }
    }
}

/// Translates the objects of one or several files.
pub(crate) fn run(objects: Vec<Value>, settings: &Settings) -> Migration {
    let objects = flatten(objects);
    let mut settings = settings.clone();
    let mut has_config = false;
    let mut defaults = Map::new();
    for object in &objects {
        has_config |= device_config::read_resources(object, &mut settings.resources);
        defaults.extend(device_config::defaults(object).into_iter().flatten());
    }
    let mut migration = Migration {
        values: has_config.then(|| values(&settings)),
        ..Migration::default()
    };
    let mut templates = BTreeSet::new();
    for object in objects {
        let name = describe(&object);
        match translate(&object, &settings, &defaults) {
            Ok(translated) => {
                for object in translated.objects {
                    let is_template = object["kind"] == "ResourceClaimTemplate";
                    if !is_template || templates.insert(describe(&object)) {
                        migration.objects.push(object);
                    }
                }
                migration.report(Outcome::Changed, &name, translated.changes);
                migration.report(Outcome::Refused, &name, translated.refusals);
            }
            Err(Refused(reasons)) => {
                migration.objects.push(object);
                migration.report(Outcome::Refused, &name, reasons);
            }
        }
    }
    migration
}

/// Returns the values of the drava chart with which the webhook translates as this command does.
fn values(settings: &Settings) -> Value {
    json!({"compatibility": {"enabled": true, "settings": {
        "resources": settings.resources,
        "replacedSchedulers": settings.replaced_schedulers,
        "shareClass": settings.share_class,
    }}})
}

fn translate(
    object: &Value,
    settings: &Settings,
    defaults: &Map<String, Value>,
) -> Result<Translated, Refused> {
    let kind = object["kind"].as_str().unwrap_or_default();
    let group = object["apiVersion"]
        .as_str()
        .and_then(|version| version.split_once('/'))
        .map_or("", |(group, _)| group);
    match (group, kind) {
        ("batch.volcano.sh", "Job") => volcano_job::translate(object, settings),
        ("", "ResourceQuota") => tenant_limit::resource_quota(object, settings),
        ("", "LimitRange") => tenant_limit::limit_range(object, settings),
        ("scheduling.volcano.sh", "Queue") | ("kueue.x-k8s.io", "ClusterQueue" | "Cohort") => {
            tenant_limit::without_equivalent(object, settings)
        }
        ("", "ConfigMap") => config_map::translate(object, defaults),
        ("apps", "DaemonSet") if plugin_flags::is_device_plugin(object) => {
            Err(plugin_flags::refusal(object))
        }
        _ => match workload::template_path(group, kind) {
            Some(path) => workload::translate(object, path, settings),
            None => other(object, settings),
        },
    }
}

/// Passes an object of another kind through, unless it requests GPUs in a field that this command does not know.
fn other(object: &Value, settings: &Settings) -> Result<Translated, Refused> {
    let mut fields = Vec::new();
    find_resources(object, "", settings, &mut fields);
    if fields.is_empty() {
        return Ok(Translated::unchanged(object.clone()));
    }
    let reason = |field: String| {
        format!(
            "{field}: GPUs in an object of this kind are not translated; replace the resource by a claim in its pod \
             template"
        )
    };
    Err(Refused(fields.into_iter().map(reason).collect()))
}

/// Collects the paths of members that are named like a translated resource.
fn find_resources(value: &Value, path: &str, settings: &Settings, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            for (name, member) in members {
                if settings.resources.contains(name) {
                    found.push(format!("{path}[{name}]"));
                } else {
                    let separator = if path.is_empty() { "" } else { "." };
                    find_resources(member, &format!("{path}{separator}{name}"), settings, found);
                }
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                find_resources(item, &format!("{path}[{index}]"), settings, found);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Replaces lists by their items.
fn flatten(objects: Vec<Value>) -> Vec<Value> {
    let mut flat = Vec::new();
    for mut object in objects {
        let is_list = object["apiVersion"] == "v1" && object["kind"] == "List";
        match object.get_mut("items").filter(|_| is_list).map(Value::take) {
            Some(Value::Array(items)) => flat.extend(flatten(items)),
            _ => {
                forget_server(&mut object);
                flat.push(object);
            }
        }
    }
    flat
}

/// Removes what the API server has written: with a resource version, `kubectl apply` refuses an object that changed since.
fn forget_server(object: &mut Value) {
    const FIELDS: [&str; 5] = [
        "resourceVersion",
        "uid",
        "generation",
        "creationTimestamp",
        "managedFields",
    ];
    let Some(fields) = object.as_object_mut() else {
        return;
    };
    let of_server = fields.get_mut("metadata").and_then(Value::as_object_mut);
    let Some(metadata) = of_server.filter(|metadata| metadata.contains_key("uid")) else {
        return;
    };
    metadata.retain(|field, _| !FIELDS.contains(&field.as_str()));
    fields.remove("status");
}

/// Returns kind, namespace and name.
fn describe(object: &Value) -> String {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let kind = text(&object["kind"]).unwrap_or_else(|| "object without kind".to_owned());
    let metadata = &object["metadata"];
    let name = text(&metadata["name"]).or_else(|| {
        let prefix = text(&metadata["generateName"])?;
        Some(format!("{prefix}*"))
    });
    let name = name.unwrap_or_else(|| "without name".to_owned());
    match text(&metadata["namespace"]) {
        Some(namespace) => format!("{kind} {namespace}/{name}"),
        None => format!("{kind} {name}"),
    }
}

/// Returns metadata with this name in the namespace of `object`.
fn metadata_beside(object: &Value, name: &str) -> Value {
    let mut metadata = json!({"name": name});
    if let Some(namespace) = object["metadata"].get("namespace") {
        metadata["namespace"] = namespace.clone();
    }
    metadata
}

impl Migration {
    fn report(&mut self, outcome: Outcome, object: &str, messages: Vec<String>) {
        self.findings
            .extend(messages.into_iter().map(|message| Finding {
                outcome,
                object: object.to_owned(),
                message,
            }));
    }

    /// Returns whether an object is refused.
    pub(crate) fn is_refused(&self) -> bool {
        self.findings
            .iter()
            .any(|finding| finding.outcome == Outcome::Refused)
    }

    /// Formats the report.
    pub(crate) fn report_text(&self) -> String {
        let mut text = String::new();
        for finding in &self.findings {
            text.push_str(&printable(&finding.to_string()));
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests;
