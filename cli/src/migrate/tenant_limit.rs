//! Limits of tenants. A limit without equivalent is refused: it never vanishes.

use drava_api::compatibility::{ResourceTable, Settings};
use drava_api::names::class;
use serde_json::Value;

use super::{Refused, Translated, find_resources};

/// Device classes of the chart, in which a tenant can request GPUs.
const CLASSES: [&str; 4] = [class::GPU, class::VGPU, class::MIG, class::FRACTION];

/// Converts limits of GPUs by number into one limit per device class, and refuses limits of amounts.
pub(super) fn resource_quota(object: &Value, settings: &Settings) -> Result<Translated, Refused> {
    let mut result = object.clone();
    let mut changes = Vec::new();
    let mut refused = Vec::new();
    let Some(hard) = result
        .pointer_mut("/spec/hard")
        .and_then(Value::as_object_mut)
    else {
        return Ok(Translated::unchanged(result));
    };
    for key in hard.keys().cloned().collect::<Vec<_>>() {
        let resource = key
            .strip_prefix("requests.")
            .or_else(|| key.strip_prefix("limits."))
            .unwrap_or(&key);
        if !settings.resources.contains(resource) {
            continue;
        }
        if !is_count(resource, &settings.resources) {
            refused.push(format!(
                "spec.hard[{key}]: a ResourceQuota has no limit of memory or cores of claims; limit the number of \
                 devices, or the amounts with a GpuQuota"
            ));
            continue;
        }
        let Some(value) = hard.remove(&key) else {
            continue;
        };
        for class in CLASSES {
            hard.entry(format!("{class}.deviceclass.resource.k8s.io/devices"))
                .or_insert_with(|| value.clone());
        }
        changes.push(format!(
            "spec.hard[{key}]: becomes a limit of devices of each device class; the sum over the classes is not limited"
        ));
    }
    if refused.is_empty() {
        Ok(Translated {
            objects: vec![result],
            changes,
        })
    } else {
        Err(Refused(refused))
    }
}

fn is_count(resource: &str, table: &ResourceTable) -> bool {
    let mut families = table.families.iter();
    table.mig_profile(resource).is_some() || families.any(|family| family.count == resource)
}

/// Refuses a limit of GPUs without equivalent; an object that limits other resources passes.
pub(super) fn without_equivalent(
    object: &Value,
    settings: &Settings,
) -> Result<Translated, Refused> {
    let mut fields = Vec::new();
    find_resources(object, "", settings, &mut fields);
    named_resources(object, settings, &mut fields);
    let annotations = object["metadata"]["annotations"].as_object();
    // Quota of Volcano's plugin capacity-card.
    let cards = annotations
        .into_iter()
        .flatten()
        .map(|(name, _)| name)
        .filter(|name| name.starts_with("volcano.sh/card."));
    fields.extend(cards.map(|name| format!("metadata.annotations[{name}]")));
    if fields.is_empty() {
        return Ok(Translated::unchanged(object.clone()));
    }
    let way_out = match object["kind"].as_str() {
        Some("LimitRange") => {
            "a LimitRange does not apply to claims; limit each claim with a GpuQuota"
        }
        Some("Queue") => {
            "the queue does not apply to pods of another scheduler; limit the namespace with a ResourceQuota or GpuQuota"
        }
        _ => {
            "map the device classes with deviceClassMappings of Kueue and cover the mapped resource"
        }
    };
    let reason = |field: String| format!("{field}: {way_out}");
    Err(Refused(fields.into_iter().map(reason).collect()))
}

/// Collects resources that are values: `coveredResources` and `name` of Kueue's resource groups.
fn named_resources(object: &Value, settings: &Settings, fields: &mut Vec<String>) {
    let groups = object.pointer("/spec/resourceGroups");
    let groups = groups.and_then(Value::as_array).into_iter().flatten();
    for (index, group) in groups.enumerate() {
        let covered = group["coveredResources"].as_array().into_iter().flatten();
        for resource in covered.filter_map(Value::as_str) {
            if settings.resources.contains(resource) {
                fields.push(format!(
                    "spec.resourceGroups[{index}].coveredResources[{resource}]"
                ));
            }
        }
    }
}
