//! ConfigMaps of the vGPU device plugins: names and defaults of the resources, and settings of the GPUs of all nodes.

use drava_compatibility::{CountAlone, ResourceFamily, ResourceTable};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{Translated, manifest};

/// Key of the settings of all nodes in the ConfigMap.
const DEVICE_CONFIG: &str = "device-config.yaml";

/// Name of the GpuNodeProfile of all nodes; it follows those of single nodes, because the first name applies.
const PROFILE: &str = "migrated-others";

/// Settings of `nvidia` that change the meaning of resources.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ResourceSettings {
    resource_count_name: Option<String>,
    resource_memory_name: Option<String>,
    resource_memory_percentage_name: Option<String>,
    resource_core_name: Option<String>,
    resource_priority_name: Option<String>,
    #[serde(alias = "defaultMem")]
    default_memory: Option<u64>,
    default_cores: Option<u64>,
    #[serde(rename = "defaultGPUNum")]
    default_count: Option<u64>,
    #[serde(alias = "gpuMemoryFactor")]
    memory_factor: Option<u64>,
}

/// Members of `nvidia` that [`ResourceSettings`] reads.
const OF_RESOURCES: [&str; 11] = [
    "resourceCountName",
    "resourceMemoryName",
    "resourceMemoryPercentageName",
    "resourceCoreName",
    "resourcePriorityName",
    "defaultMemory",
    "defaultMem",
    "defaultCores",
    "defaultGPUNum",
    "memoryFactor",
    "gpuMemoryFactor",
];

/// Reads the names and defaults of the resources from a ConfigMap of a device plugin, so that the manifests beside it are
/// translated as the cluster understands them. Returns whether the object has such settings.
pub(super) fn read_resources(object: &Value, table: &mut ResourceTable) -> bool {
    let Some(nvidia) = device_config(object) else {
        return false;
    };
    let Ok(settings) = serde_json::from_value::<ResourceSettings>(nvidia) else {
        return false;
    };
    let count = settings.resource_count_name.as_deref().unwrap_or_default();
    let known = table
        .families
        .iter()
        .position(|family| family.count == count);
    let mut family = match known {
        Some(index) => table.families.remove(index),
        None if count.starts_with("volcano.sh/") => ResourceFamily::volcano(),
        // HAMi and names of one's own: as HAMi, whose number alone is a whole GPU.
        None => ResourceFamily {
            count_alone: CountAlone::WholeGpu,
            ..ResourceFamily::nvidia()
        },
    };
    let set = |name: &mut String, value: Option<String>| {
        if let Some(value) = value {
            *name = value;
        }
    };
    set(&mut family.count, settings.resource_count_name);
    set(&mut family.memory, settings.resource_memory_name);
    set(
        &mut family.memory_percentage,
        settings.resource_memory_percentage_name,
    );
    set(&mut family.cores, settings.resource_core_name);
    family.priority = settings.resource_priority_name.or(family.priority);
    family.default_memory = settings.default_memory.unwrap_or(family.default_memory);
    family.default_cores = settings.default_cores.unwrap_or(family.default_cores);
    family.default_count = settings
        .default_count
        .unwrap_or(family.default_count)
        .max(1);
    family.memory_factor = settings
        .memory_factor
        .unwrap_or(family.memory_factor)
        .max(1);
    table.families.insert(0, family);
    true
}

/// Returns the settings of NVIDIA's GPUs.
fn device_config(object: &Value) -> Option<Value> {
    let text = object["data"].get(DEVICE_CONFIG)?.as_str()?;
    let mut config = manifest::parse(text).ok()?.into_iter().next()?;
    config.get_mut("nvidia").map(Value::take)
}

/// Adds the profile of all nodes. Returns whether the object is the ConfigMap of a device plugin.
pub(super) fn translate(object: &Value, translated: &mut Translated) -> bool {
    let Some(nvidia) = device_config(object) else {
        return false;
    };
    let nvidia = &nvidia;
    let field = |name: &str| format!("data[{DEVICE_CONFIG}].nvidia.{name}");
    let mut spec = offer(nvidia, &field, translated);
    let devices = mig_profiles(nvidia, &field, translated);
    if !devices.is_empty() {
        spec.insert("devices".to_owned(), Value::from(devices));
    }
    for (name, value) in nvidia.as_object().into_iter().flatten() {
        let is_read = OF_RESOURCES.contains(&name.as_str()) || OF_PROFILE.contains(&name.as_str());
        if !is_read && !is_unset(value) {
            translated
                .changes
                .push(format!("{}: has no equivalent and is ignored", field(name)));
        }
    }
    translated.changes.push(format!(
        "data[{DEVICE_CONFIG}]: the names and defaults of resources apply to the manifests of this run; for translation by \
         the webhook, write them with --values FILE and give FILE to helm upgrade -f"
    ));
    if !spec.is_empty() {
        translated.objects.push(profile(PROFILE, None, spec));
    }
    true
}

/// Members of `nvidia` that a profile takes.
const OF_PROFILE: [&str; 5] = [
    "deviceSplitCount",
    "deviceMemoryScaling",
    "deviceCoreScaling",
    "knownMigGeometries",
    "migProfileAllowlist",
];

/// Returns whether a setting has the value that leaves the function off.
pub(super) fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty() || text == "none",
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
    }
}

/// Returns the amounts of the shares: number, memory and cores of a GPU.
pub(super) fn offer(
    settings: &Value,
    field: &impl Fn(&str) -> String,
    translated: &mut Translated,
) -> Map<String, Value> {
    let mut spec = Map::new();
    if let Some(count) = settings
        .get("deviceSplitCount")
        .filter(|count| !is_unset(count))
    {
        match count.as_u64() {
            Some(count @ 1..=1024) => {
                spec.insert("splitCount".to_owned(), count.into());
            }
            _ => translated.refusals.push(format!(
                "{}: {count} is no number of shares from 1 to 1024",
                field("deviceSplitCount")
            )),
        }
    }
    for (name, ours) in [
        ("deviceMemoryScaling", "memoryScaling"),
        ("deviceCoreScaling", "coreScaling"),
    ] {
        let Some(scaling) = settings.get(name).filter(|scaling| !is_unset(scaling)) else {
            continue;
        };
        let value = scaling.as_f64().unwrap_or_default();
        if !(0.1..=10.0).contains(&value) {
            translated.refusals.push(format!(
                "{}: {scaling} is no multiple from 0.1 to 10",
                field(name)
            ));
            continue;
        }
        // drava reads steps of 0.01.
        let rounded = (value * 100.0).round() / 100.0;
        if (rounded - 1.0).abs() < f64::EPSILON {
            continue;
        }
        spec.insert(ours.to_owned(), json!(rounded));
        if ours == "memoryScaling" && rounded > 1.0 {
            spec.insert("oversubscription".to_owned(), "spill".into());
            translated.changes.push(format!(
                "{}: shares beyond the memory of a GPU use host memory (oversubscription: spill); one share gets at most the \
                 memory of the GPU",
                field(name)
            ));
        }
    }
    spec
}

/// Returns an entry of `devices` with the MIG profiles of each known model, **by name**: the ConfigMap declares amounts of
/// memory that differ from those of the card.
fn mig_profiles(
    nvidia: &Value,
    field: &impl Fn(&str) -> String,
    translated: &mut Translated,
) -> Vec<Value> {
    let known = nvidia.get("knownMigGeometries").and_then(Value::as_array);
    let mut devices = Vec::new();
    for entry in known.into_iter().flatten() {
        let mut profiles: Vec<String> = Vec::new();
        profile_names(&entry["allowedGeometries"], &mut profiles);
        let models = entry["models"].as_array().into_iter().flatten();
        for model in models.filter_map(Value::as_str) {
            let product = if model.starts_with("NVIDIA ") {
                model.to_owned()
            } else {
                format!("NVIDIA {model}")
            };
            devices.push(json!({"productName": product, "mig": {"profiles": profiles}}));
        }
    }
    let allowed = nvidia
        .get("migProfileAllowlist")
        .filter(|list| !is_unset(list));
    if allowed.is_some() {
        translated.refusals.push(format!(
            "{}: list the profiles in mig.profiles of a GpuNodeProfile",
            field("migProfileAllowlist")
        ));
    }
    if !devices.is_empty() {
        translated.changes.push(format!(
            "{}: becomes a list of MIG profiles by name for each model; drava combines them freely, and takes the amounts of \
             memory from the card; compare productName with kubectl get resourceslices -o yaml",
            field("knownMigGeometries")
        ));
    }
    devices
}

/// Collects the names of profiles, each once, from lists in lists.
fn profile_names(value: &Value, names: &mut Vec<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| profile_names(item, names)),
        Value::Object(members) => match members.get("name").and_then(Value::as_str) {
            Some(name) if !names.iter().any(|known| known == name) => names.push(name.to_owned()),
            Some(_) => {}
            // Newer releases wrap a geometry: {group: …, geometries: […]}.
            None => members
                .values()
                .for_each(|member| profile_names(member, names)),
        },
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// Returns a GpuNodeProfile of one node, or of all.
pub(super) fn profile(name: &str, node: Option<&str>, mut spec: Map<String, Value>) -> Value {
    if let Some(node) = node {
        let selector = json!({"kubernetes.io/hostname": node});
        spec.insert("nodeSelector".to_owned(), selector);
    }
    json!({
        "apiVersion": drava_api::names::API_VERSION,
        "kind": "GpuNodeProfile",
        "metadata": {"name": name},
        "spec": spec,
    })
}

/// Returns the amounts of all nodes, which those of single nodes precede.
pub(super) fn defaults(object: &Value) -> Option<Map<String, Value>> {
    let nvidia = device_config(object)?;
    let members = nvidia.as_object()?.iter();
    let of_nodes = members.filter(|(name, _)| {
        matches!(
            name.as_str(),
            "deviceSplitCount" | "deviceMemoryScaling" | "deviceCoreScaling"
        )
    });
    Some(
        of_nodes
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect(),
    )
}
