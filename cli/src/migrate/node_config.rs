//! ConfigMap `volcano-vgpu-node-config` and that of HAMi's device plugin: settings of single nodes become GpuNodeProfiles.

use serde_json::{Map, Value, json};

use super::device_config::{is_unset, offer, profile};
use super::{Refused, Translated};

/// Key of the settings per node in the ConfigMap.
const NODE_CONFIG: &str = "config.json";

/// Members of a node, in lower case as the device plugins read them, with the names of the settings of all nodes.
const AMOUNTS: [(&str, &str); 3] = [
    ("devicesplitcount", "deviceSplitCount"),
    ("devicememoryscaling", "deviceMemoryScaling"),
    ("devicecorescaling", "deviceCoreScaling"),
];

/// Adds a profile for each node of the ConfigMap. Returns whether the object is such a ConfigMap.
///
/// # Errors
/// When the settings cannot be read.
pub(super) fn translate(
    object: &Value,
    defaults: &Map<String, Value>,
    translated: &mut Translated,
) -> Result<bool, Refused> {
    let text = object["data"].get(NODE_CONFIG).and_then(Value::as_str);
    let Some(text) = text.filter(|text| text.contains("nodeconfig")) else {
        return Ok(false);
    };
    let config: Value = serde_json::from_str(text).map_err(|error| {
        Refused::one(format!(
            "data[{NODE_CONFIG}]: cannot read the settings: {error}"
        ))
    })?;
    let nodes = config["nodeconfig"].as_array().into_iter().flatten();
    for (index, node) in nodes.enumerate() {
        one_node(index, node, defaults, translated);
    }
    Ok(true)
}

fn one_node(
    index: usize,
    node: &Value,
    defaults: &Map<String, Value>,
    translated: &mut Translated,
) {
    let field = |name: &str| format!("data[{NODE_CONFIG}].nodeconfig[{index}].{name}");
    let members: Map<String, Value> = node
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, value)| (name.to_lowercase(), value.clone()))
        .collect();
    let Some(name) = members.get("name").and_then(Value::as_str) else {
        translated
            .refusals
            .push(format!("{}: the entry names no node", field("name")));
        return;
    };
    let mut amounts = defaults.clone();
    for (old, of_all) in AMOUNTS {
        if let Some(value) = members.get(old).filter(|value| !is_unset(value)) {
            amounts.insert(of_all.to_owned(), value.clone());
        }
    }
    let mut spec = offer(&Value::Object(amounts), &field, translated);
    match members.get("operatingmode").and_then(Value::as_str) {
        None | Some("" | "hami-core") => {}
        Some("mig") => {
            spec.insert("mode".to_owned(), "mig".into());
        }
        Some(mode) => translated.refusals.push(format!(
            "{}: mode {mode} has no equivalent; the profile of node {name} offers whole GPUs and shares",
            field("operatingmode")
        )),
    }
    if let Some(exclude) = members.get("filterdevices").and_then(exclude) {
        spec.insert("exclude".to_owned(), exclude);
    }
    for (member, value) in &members {
        let is_read = matches!(member.as_str(), "name" | "operatingmode" | "filterdevices")
            || AMOUNTS.iter().any(|(old, _)| old == member);
        if !is_read && !is_unset(value) {
            translated.changes.push(format!(
                "{}: has no equivalent and is ignored",
                field(member)
            ));
        }
    }
    let object = format!("migrated-node-{}", name.to_lowercase());
    translated.objects.push(profile(&object, Some(name), spec));
}

/// Returns the GPUs that a node does not offer.
fn exclude(filter: &Value) -> Option<Value> {
    let list = |names: [&str; 2]| {
        let lists = names.iter().filter_map(|name| filter.get(*name));
        let items = lists.filter_map(Value::as_array).flatten();
        items.cloned().collect::<Vec<_>>()
    };
    let (uuids, indices) = (list(["uuid", "uuids"]), list(["index", "indices"]));
    let mut exclude = Map::new();
    if !uuids.is_empty() {
        exclude.insert("uuids".to_owned(), json!(uuids));
    }
    if !indices.is_empty() {
        exclude.insert("indices".to_owned(), json!(indices));
    }
    (!exclude.is_empty()).then_some(Value::Object(exclude))
}
