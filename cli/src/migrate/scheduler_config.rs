//! ConfigMap `volcano-scheduler-configmap`: the policy of the plugin `deviceshare` becomes a GpuPolicy.

use serde_json::{Value, json};

use super::{Refused, Translated, manifest};

/// Key of the configuration of Volcano's scheduler.
const SCHEDULER_CONFIG: &str = "volcano-scheduler.conf";
/// Name of the GpuPolicy.
const POLICY: &str = "migrated";

/// Adds the policy of the plugin. Returns whether the object configures the plugin.
///
/// # Errors
/// When the configuration cannot be read, or its policy has no equivalent.
pub(super) fn translate(object: &Value, translated: &mut Translated) -> Result<bool, Refused> {
    let text = object["data"].get(SCHEDULER_CONFIG).and_then(Value::as_str);
    let Some(text) = text.filter(|text| text.contains("deviceshare")) else {
        return Ok(false);
    };
    let field = |name: &str| format!("data[{SCHEDULER_CONFIG}].{name}");
    let config = manifest::parse(text).map_err(|error| {
        Refused::one(format!(
            "data[{SCHEDULER_CONFIG}]: cannot read it: {error:#}"
        ))
    })?;
    let plugins = config
        .iter()
        .flat_map(|config| config["tiers"].as_array().into_iter().flatten())
        .flat_map(|tier| tier["plugins"].as_array().into_iter().flatten())
        .filter(|plugin| plugin["name"] == "deviceshare");
    for plugin in plugins {
        for (name, value) in plugin["arguments"].as_object().into_iter().flatten() {
            let policy = value.as_str().unwrap_or_default();
            match (name.as_str(), policy) {
                ("deviceshare.SchedulePolicy", "binpack" | "spread") => {
                    translated.objects.push(json!({
                        "apiVersion": drava_api::names::API_VERSION,
                        "kind": "GpuPolicy",
                        "metadata": {"name": POLICY},
                        "spec": {"gpu": policy},
                    }));
                }
                ("deviceshare.SchedulePolicy", _) => translated.refusals.push(format!(
                    "{}: policy {value} has no equivalent; use binpack, spread or topology in a GpuPolicy",
                    field(name)
                )),
                ("deviceshare.VGPUEnable" | "deviceshare.GPUSharingEnable", _) => {}
                _ => translated
                    .changes
                    .push(format!("{}: has no equivalent and is ignored", field(name))),
            }
        }
    }
    translated.changes.push(format!(
        "data[{SCHEDULER_CONFIG}]: the plugin deviceshare has no GPUs to schedule; remove it from the configuration of Volcano, \
         which is not written again"
    ));
    Ok(true)
}
