//! Limits of tenants become GpuQuotas. A limit without equivalent is refused: it never vanishes.
//!
//! A GpuQuota names the namespaces that it limits. Limits of manifests without a namespace stay ResourceQuotas of device
//! classes, or are refused.

use drava_api::names::{self, class};
use drava_compatibility::{ResourceFamily, ResourceTable, Settings};
use serde_json::{Map, Value, json};

use super::{Refused, Translated, find_resources};

mod limit_range;

pub(super) use limit_range::limit_range;

/// What a resource of the device plugins counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Counted {
    /// GPUs.
    Devices,
    /// MIG partitions of one profile.
    Partitions,
    /// Memory in this number of MiB.
    Memory { factor: u64 },
    /// Percent of GPU time.
    Cores,
    /// Percent of the memory of a GPU, or a priority: a GpuQuota has no such limit.
    Other,
}

fn counted(resource: &str, table: &ResourceTable) -> Counted {
    if table.mig_profile(resource).is_some() {
        return Counted::Partitions;
    }
    let of_family = |family: &ResourceFamily| {
        if family.count == resource {
            Some(Counted::Devices)
        } else if family.memory == resource {
            Some(Counted::Memory {
                factor: family.memory_factor,
            })
        } else if family.cores == resource {
            Some(Counted::Cores)
        } else {
            None
        }
    };
    table
        .families
        .iter()
        .find_map(of_family)
        .unwrap_or(Counted::Other)
}

/// Converts the limits of GPUs of a namespace into GpuQuotas.
pub(super) fn resource_quota(object: &Value, settings: &Settings) -> Result<Translated, Refused> {
    match object["metadata"]["namespace"].as_str() {
        Some(namespace) => quota_of_namespace(object, namespace, settings),
        None => quota_of_classes(object, settings),
    }
}

/// Returns the resource of a key of a ResourceQuota.
fn resource(key: &str) -> &str {
    key.strip_prefix("requests.")
        .or_else(|| key.strip_prefix("limits."))
        .unwrap_or(key)
}

fn quota_of_namespace(
    object: &Value,
    namespace: &str,
    settings: &Settings,
) -> Result<Translated, Refused> {
    let mut rest = object.clone();
    let hard = rest
        .pointer_mut("/spec/hard")
        .and_then(Value::as_object_mut);
    let Some(hard) = hard.filter(|hard| {
        let mut keys = hard.keys();
        keys.any(|key| settings.resources.contains(resource(key)))
    }) else {
        return Ok(Translated::unchanged(object.clone()));
    };
    let (mut limit, mut partitions) = (Map::new(), None);
    let (mut changes, mut refused) = (Vec::new(), Vec::new());
    for key in hard.keys().cloned().collect::<Vec<_>>() {
        let resource = resource(&key);
        if !settings.resources.contains(resource) {
            continue;
        }
        let field = format!("spec.hard[{key}]");
        let Some(amount) = hard.remove(&key).as_ref().and_then(whole_number) else {
            refused.push(format!("{field}: the limit is no whole number"));
            continue;
        };
        match counted(resource, &settings.resources) {
            Counted::Devices => {
                lower(&mut limit, "devices", amount);
                changes.push(format!(
                    "{field}: becomes limit.devices of a GpuQuota, which counts whole GPUs, shares and MIG partitions"
                ));
            }
            Counted::Partitions => {
                *partitions.get_or_insert(0) += amount;
                changes.push(format!(
                    "{field}: becomes limit.devices of a GpuQuota for MIG partitions of any profile"
                ));
            }
            Counted::Memory { factor } => {
                lower_memory(&mut limit, amount.saturating_mul(factor));
                changes.push(format!(
                    "{field}: becomes limit.memory of a GpuQuota, which counts the memory of every GPU of a container, and all \
                     memory of whole GPUs"
                ));
            }
            Counted::Cores => {
                lower(&mut limit, "cores", amount);
                changes.push(format!(
                    "{field}: becomes limit.cores of a GpuQuota, which counts 100 for a whole GPU"
                ));
            }
            Counted::Other => refused.push(format!(
                "{field}: a GpuQuota has no limit of percentages; limit the memory with limit.memory of a GpuQuota"
            )),
        }
    }
    for scope in ["scopes", "scopeSelector"] {
        if object["spec"].get(scope).is_some() {
            refused.push(format!("spec.{scope}: a GpuQuota has no scopes"));
        }
    }
    if !refused.is_empty() {
        return Err(Refused(refused));
    }
    changes.push(
        "a GpuQuota leaves pods beyond the limit pending instead of rejecting them; delete the old ResourceQuota, or remove its \
         limits of GPUs"
            .to_owned(),
    );
    // No namespace has a dot in its name, so that two namespaces have no equal name here.
    let name = object["metadata"]["name"].as_str().unwrap_or("gpus");
    let mut objects = Vec::new();
    if !limit.is_empty() {
        let mut spec = json!({"namespaces": [namespace], "limit": limit});
        if partitions.is_some() {
            // The partitions have a limit of their own.
            spec["deviceSelector"] = json!({"types": ["gpu", "vgpu"]});
        }
        objects.push(quota(&format!("{namespace}.{name}"), &spec));
    }
    if let Some(partitions) = partitions {
        let spec = json!({
            "namespaces": [namespace], "deviceSelector": {"types": ["mig"]}, "limit": {"devices": partitions},
        });
        objects.push(quota(&format!("{namespace}.{name}.mig"), &spec));
    }
    let is_left = rest
        .pointer("/spec/hard")
        .and_then(Value::as_object)
        .is_some_and(|hard| !hard.is_empty());
    objects.extend(is_left.then_some(rest));
    Ok(Translated {
        objects,
        changes,
        ..Translated::default()
    })
}

/// Returns a GpuQuota.
fn quota(name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": names::API_VERSION, "kind": "GpuQuota", "metadata": {"name": name}, "spec": spec,
    })
}

fn whole_number(value: &Value) -> Option<u64> {
    let quantity: drava_api::Quantity = serde_json::from_value(value.clone()).ok()?;
    u64::try_from(quantity.to_i64()?).ok()
}

/// Sets an amount, or lowers it: of two limits the smaller one holds.
fn lower(amounts: &mut Map<String, Value>, name: &str, amount: u64) {
    let present = amounts.get(name).and_then(Value::as_u64);
    let amount = present.map_or(amount, |present| present.min(amount));
    amounts.insert(name.to_owned(), amount.into());
}

fn lower_memory(amounts: &mut Map<String, Value>, mib: u64) {
    let present = amounts
        .get("memory")
        .and_then(Value::as_str)
        .and_then(|memory| memory.strip_suffix("Mi")?.parse().ok());
    let mib = present.map_or(mib, |present: u64| present.min(mib));
    amounts.insert("memory".to_owned(), format!("{mib}Mi").into());
}

/// Converts limits of GPUs by number into one limit per device class, and refuses limits of amounts.
fn quota_of_classes(object: &Value, settings: &Settings) -> Result<Translated, Refused> {
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
        let resource = resource(&key);
        if !settings.resources.contains(resource) {
            continue;
        }
        match counted(resource, &settings.resources) {
            Counted::Devices | Counted::Partitions => {}
            Counted::Memory { .. } | Counted::Cores | Counted::Other => {
                refused.push(format!(
                    "spec.hard[{key}]: a ResourceQuota has no limit of memory or cores of claims; write metadata.namespace, so \
                     that it becomes a GpuQuota"
                ));
                continue;
            }
        }
        let Some(value) = hard.remove(&key) else {
            continue;
        };
        for class in class::ALL {
            hard.entry(format!("{class}.deviceclass.resource.k8s.io/devices"))
                .or_insert_with(|| value.clone());
        }
        changes.push(format!(
            "spec.hard[{key}]: becomes a limit of devices of each device class; the sum over the classes is not limited; with \
             metadata.namespace it becomes a GpuQuota, which limits the sum"
        ));
    }
    if refused.is_empty() {
        Ok(Translated {
            objects: vec![result],
            changes,
            ..Translated::default()
        })
    } else {
        Err(Refused(refused))
    }
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
