//! LimitRanges: maxima and defaults of GPUs become those of the claims of a GpuQuota.

use drava_compatibility::Settings;
use serde_json::{Map, Value, json};

use super::{Counted, counted, lower, quota, whole_number, without_equivalent};
use crate::migrate::{Refused, Translated};

/// Lists of amounts in an item of a LimitRange.
const LISTS: [&str; 5] = [
    "max",
    "min",
    "default",
    "defaultRequest",
    "maxLimitRequestRatio",
];

/// Amounts of GPUs of all items.
#[derive(Default)]
struct Amounts {
    /// `devices`, `cores`, and memory in MiB.
    max: Map<String, Value>,
    /// `cores`, and memory in MiB.
    default: Map<String, Value>,
    changes: Vec<String>,
    refused: Vec<String>,
}

/// Converts maxima and defaults of GPUs into a GpuQuota of the namespace, and keeps the limits of other resources.
pub(in crate::migrate) fn limit_range(
    object: &Value,
    settings: &Settings,
) -> Result<Translated, Refused> {
    let Some(namespace) = object["metadata"]["namespace"].as_str() else {
        // A GpuQuota names the namespaces that it limits.
        return without_equivalent(object, settings);
    };
    let mut rest = object.clone();
    let mut amounts = Amounts::default();
    let items = rest
        .pointer_mut("/spec/limits")
        .and_then(Value::as_array_mut);
    for (index, item) in items.into_iter().flatten().enumerate() {
        amounts.take(index, item, settings);
    }
    let Amounts {
        max,
        default,
        mut changes,
        refused,
    } = amounts;
    if !refused.is_empty() {
        return Err(Refused(refused));
    }
    if changes.is_empty() {
        return Ok(Translated::unchanged(object.clone()));
    }
    changes.push(
        "a GpuQuota limits the claim of a pod, with all its containers, and leaves a pod beyond it pending instead of rejecting it; \
         delete the old LimitRange, or remove its limits of GPUs"
            .to_owned(),
    );
    let mut claim = Map::new();
    for (name, amounts) in [("max", max), ("default", default)] {
        if !amounts.is_empty() {
            claim.insert(name.to_owned(), Value::Object(with_quantity(amounts)));
        }
    }
    let name = object["metadata"]["name"].as_str().unwrap_or("gpus");
    let spec = json!({"namespaces": [namespace], "claim": claim});
    let mut objects = vec![quota(&format!("{namespace}-{name}-claims"), &spec)];
    if let Some(items) = rest
        .pointer_mut("/spec/limits")
        .and_then(Value::as_array_mut)
    {
        items.retain(|item| LISTS.iter().any(|list| item.get(*list).is_some()));
        if !items.is_empty() {
            objects.push(rest);
        }
    }
    Ok(Translated {
        objects,
        changes,
        ..Translated::default()
    })
}

/// Returns the amounts with memory as a quantity.
fn with_quantity(mut amounts: Map<String, Value>) -> Map<String, Value> {
    if let Some(mib) = amounts.get("memory").and_then(Value::as_u64) {
        amounts.insert("memory".to_owned(), format!("{mib}Mi").into());
    }
    amounts
}

impl Amounts {
    /// Takes the amounts of GPUs out of an item.
    fn take(&mut self, index: usize, item: &mut Value, settings: &Settings) {
        let is_of_storage = item["type"] == "PersistentVolumeClaim";
        let mut count = None;
        let mut memory = Vec::new();
        for list in LISTS {
            let Some(of_list) = item.get_mut(list).and_then(Value::as_object_mut) else {
                continue;
            };
            let names: Vec<String> = of_list
                .keys()
                .filter(|name| settings.resources.contains(name))
                .cloned()
                .collect();
            for name in names {
                let field = format!("spec.limits[{index}].{list}[{name}]");
                let Some(amount) = of_list.remove(&name).as_ref().and_then(whole_number) else {
                    self.refused
                        .push(format!("{field}: the limit is no whole number"));
                    continue;
                };
                match (list, counted(&name, &settings.resources)) {
                    _ if is_of_storage => {}
                    ("max", Counted::Devices) => {
                        count = Some(amount);
                        lower(&mut self.max, "devices", amount);
                        self.change(&field, "claim.max.devices");
                    }
                    ("max", Counted::Cores) => {
                        // Of each GPU of a container.
                        lower(&mut self.max, "cores", amount);
                        self.change(&field, "claim.max.cores");
                    }
                    ("max", Counted::Memory { factor }) => {
                        memory.push(amount.saturating_mul(factor));
                        self.change(&field, "claim.max.memory");
                    }
                    ("default", Counted::Cores) => {
                        self.default.insert("cores".to_owned(), amount.into());
                        self.change(&field, "claim.default.cores");
                    }
                    ("default", Counted::Memory { factor }) => {
                        let mib = amount.saturating_mul(factor);
                        self.default.insert("memory".to_owned(), mib.into());
                        self.change(&field, "claim.default.memory");
                    }
                    // The default of the limit is that of the request.
                    ("defaultRequest", Counted::Cores) => {
                        self.default.entry("cores").or_insert(amount.into());
                        self.change(&field, "claim.default.cores");
                    }
                    ("defaultRequest", Counted::Memory { factor }) => {
                        let mib = amount.saturating_mul(factor);
                        self.default.entry("memory").or_insert(mib.into());
                        self.change(&field, "claim.default.memory");
                    }
                    _ => self.refused.push(format!(
                        "{field}: a GpuQuota has no such limit; it has claim.max of memory, cores and devices, and claim.default of \
                         memory and cores"
                    )),
                }
            }
            if of_list.is_empty()
                && let Some(item) = item.as_object_mut()
            {
                item.remove(list);
            }
        }
        // The old maximum is that of one GPU, and the number of GPUs has its own one.
        for mib in memory {
            lower(
                &mut self.max,
                "memory",
                mib.saturating_mul(count.unwrap_or(1).max(1)),
            );
        }
    }

    fn change(&mut self, field: &str, becomes: &str) {
        self.changes
            .push(format!("{field}: becomes {becomes} of a GpuQuota"));
    }
}
