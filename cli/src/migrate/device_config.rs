//! ConfigMaps of the vGPU device plugins: names and defaults of the resources, and settings of the nodes.

use drava_api::compatibility::{CountAlone, ResourceFamily, ResourceTable};
use serde::Deserialize;
use serde_json::Value;

use super::{Refused, Translated, manifest};

/// Key of the settings of all nodes in the ConfigMap.
const DEVICE_CONFIG: &str = "device-config.yaml";
/// Key of the settings per node in the ConfigMap.
const NODE_CONFIG: &str = "config.json";
/// Key of the configuration of Volcano's scheduler.
const SCHEDULER_CONFIG: &str = "volcano-scheduler.conf";

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

/// Reads the names and defaults of the resources from a ConfigMap of a device plugin, so that the manifests beside it are
/// translated as the cluster understands them.
pub(super) fn read_resources(object: &Value, table: &mut ResourceTable) {
    let Some(nvidia) = device_config(object) else {
        return;
    };
    let Ok(settings) = serde_json::from_value::<ResourceSettings>(nvidia) else {
        return;
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
}

/// Returns the settings of NVIDIA's GPUs.
fn device_config(object: &Value) -> Option<Value> {
    let text = object["data"].get(DEVICE_CONFIG)?.as_str()?;
    let mut config = manifest::parse(text).ok()?.into_iter().next()?;
    config.get_mut("nvidia").map(Value::take)
}

/// Refuses ConfigMaps of device plugins and schedulers with the values that replace them; passes other ones.
pub(super) fn translate(object: &Value) -> Result<Translated, Refused> {
    let mut reasons = Vec::new();
    if let Some(nvidia) = device_config(object) {
        reasons.push(format!(
            "data[{DEVICE_CONFIG}]: the names and defaults of resources apply to the manifests of this run; settings of \
             the nodes are not translated: {}",
            members(&nvidia, &NODE_SETTINGS)
        ));
    }
    let data = &object["data"];
    if let Some(nodes) = data.get(NODE_CONFIG).and_then(Value::as_str)
        && nodes.contains("nodeconfig")
    {
        reasons.push(format!(
            "data[{NODE_CONFIG}]: settings of nodes are not translated; write a GpuNodeProfile"
        ));
    }
    if let Some(scheduler) = data.get(SCHEDULER_CONFIG).and_then(Value::as_str)
        && scheduler.contains("deviceshare")
    {
        reasons.push(format!(
            "data[{SCHEDULER_CONFIG}]: the plugin deviceshare has no GPUs to schedule; set scheduling.gpuPolicy of the \
             drava chart for deviceshare.SchedulePolicy"
        ));
    }
    if reasons.is_empty() {
        Ok(Translated::unchanged(object.clone()))
    } else {
        Err(Refused(reasons))
    }
}

/// Settings of the nodes in the settings of all nodes.
const NODE_SETTINGS: [&str; 5] = [
    "deviceSplitCount",
    "deviceMemoryScaling",
    "deviceCoreScaling",
    "knownMigGeometries",
    "migProfileAllowlist",
];

/// Lists the members that are set.
fn members(object: &Value, names: &[&str]) -> String {
    let set = names.iter().filter(|name| object.get(**name).is_some());
    let set: Vec<&str> = set.copied().collect();
    if set.is_empty() {
        "none".to_owned()
    } else {
        set.join(", ")
    }
}
