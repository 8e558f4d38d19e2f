//! The GPUs that one container requests by extended resources.

use std::collections::BTreeMap;

use serde_json::Value;

use drava_api::Quantity;

use super::finding::{Findings, MAX_DEVICES, RefusalCause, WarningCause};
use super::pod::ContainerRef;
use super::resource_table::{CountAlone, ResourceFamily, ResourceTable};

/// Resources of one container.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct ContainerAmounts {
    /// The requested GPUs.
    pub(super) device: Option<DeviceAmounts>,
    /// Resources of the table in the container.
    pub(super) resources: Vec<String>,
}

/// GPUs that a container requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceAmounts {
    /// Number of GPUs or partitions, at least 1.
    pub(super) count: u64,
    pub(super) kind: DeviceKind,
    /// Priority among the containers of a GPU; 0 is the highest.
    pub(super) priority: u64,
    /// Field that requests the GPUs.
    pub(super) field: String,
}

/// Type of the requested devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum DeviceKind {
    WholeGpu,
    Share {
        memory: Memory,
        /// 0 to 99.
        cores: u64,
        /// Resource with the amount of memory, for messages.
        memory_resource: String,
    },
    Partition {
        profile: String,
    },
}

/// Memory of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Memory {
    /// All memory of the GPU.
    All,
    Mib(u64),
    /// 1 to 99.
    Percent(u8),
}

/// Value of a resource with its field.
struct Amount {
    field: String,
    value: u64,
    /// The value as the pod has it.
    text: String,
}

/// From this amount on it is certainly not counted in MiB: 1 TiB.
const MAX_MEMORY_MIB: u64 = 1 << 20;

/// Reads the resources of a container.
pub(super) fn read(
    container: &ContainerRef<'_>,
    table: &ResourceTable,
    findings: &mut Findings,
) -> ContainerAmounts {
    let amounts = values(container, table, findings);
    let device = device(container, table, &amounts, findings);
    if device.is_some() && container.is_privileged() {
        let field = format!("{container}.securityContext.privileged");
        findings.warn(field, WarningCause::Privileged);
    }
    ContainerAmounts {
        device,
        resources: amounts.into_keys().collect(),
    }
}

/// Returns the resources of the table, each once: limit and request must be equal.
fn values(
    container: &ContainerRef<'_>,
    table: &ResourceTable,
    findings: &mut Findings,
) -> BTreeMap<String, Amount> {
    let mut amounts: BTreeMap<String, Amount> = BTreeMap::new();
    for (list, name, raw) in container.resources() {
        if !table.contains(name) {
            continue;
        }
        let field = format!("{container}.resources.{list}[{name}]");
        let text = match raw {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let Some(value) = whole_number(raw) else {
            findings.refuse(field, RefusalCause::NotCount { value: text });
            continue;
        };
        match amounts.get(name) {
            Some(limit) if limit.value != value => {
                let (limit, request) = (limit.value, value);
                findings.refuse(
                    field,
                    RefusalCause::LimitAndRequestDiffer { limit, request },
                );
            }
            Some(_) => {}
            None => {
                amounts.insert(name.to_owned(), Amount { field, value, text });
            }
        }
    }
    amounts
}

fn whole_number(raw: &Value) -> Option<u64> {
    let quantity: Quantity = serde_json::from_value(raw.clone()).ok()?;
    u64::try_from(quantity.to_i64()?).ok()
}

fn device(
    container: &ContainerRef<'_>,
    table: &ResourceTable,
    amounts: &BTreeMap<String, Amount>,
    findings: &mut Findings,
) -> Option<DeviceAmounts> {
    let mut found = Vec::new();
    for (name, amount) in amounts {
        if table.without_amount.contains(name) && amount.value > 0 {
            let example = table.families.first().map_or("", |family| &family.memory);
            let example = example.to_owned();
            findings.refuse(&amount.field, RefusalCause::WithoutAmount { example });
        }
        if let Some(profile) = table.mig_profile(name).filter(|_| amount.value > 0) {
            let device = DeviceAmounts {
                count: amount.value,
                kind: DeviceKind::Partition { profile },
                priority: 0,
                field: amount.field.clone(),
            };
            found.push((name.clone(), device));
        }
    }
    for family in &table.families {
        found.extend(of_family(container, family, amounts, findings));
    }
    let mut found = found.into_iter();
    let (first, device) = found.next()?;
    let is_partition = |device: &DeviceAmounts| matches!(device.kind, DeviceKind::Partition { .. });
    for (_, next) in found {
        let other = first.clone();
        let cause = match is_partition(&device) && is_partition(&next) {
            true => RefusalCause::SeveralProfiles { other },
            false => RefusalCause::SeveralFamilies { other },
        };
        findings.refuse(next.field, cause);
    }
    if device.count > MAX_DEVICES {
        let count = device.count;
        findings.refuse(&device.field, RefusalCause::TooManyDevices { count });
    }
    Some(device)
}

/// Returns the GPUs that the resources of one family request, with the name of a resource.
fn of_family(
    container: &ContainerRef<'_>,
    family: &ResourceFamily,
    amounts: &BTreeMap<String, Amount>,
    findings: &mut Findings,
) -> Option<(String, DeviceAmounts)> {
    let amount = |name: &str| amounts.get(name);
    let positive = |name: &str| amount(name).filter(|amount| amount.value > 0);
    let count = amount(&family.count);
    // A priority alone requests nothing.
    let (resource, requested) = [
        &family.count,
        &family.memory,
        &family.memory_percentage,
        &family.cores,
    ]
    .into_iter()
    .find_map(|name| Some((name, positive(name)?)))?;
    let count = match count {
        Some(count) if count.value == 0 => return None,
        Some(count) => count.value,
        None => family.default_count,
    };
    if count == 0 {
        return None;
    }
    let is_alone = positive(&family.memory).is_none()
        && positive(&family.memory_percentage).is_none()
        && amount(&family.cores).is_none();
    let kind = if is_alone && family.count_alone == CountAlone::WholeGpu {
        DeviceKind::WholeGpu
    } else {
        share(container, family, amounts, findings)
    };
    let priority = family.priority.as_deref().and_then(amount);
    let priority = match priority {
        Some(priority) => priority.value,
        None => container
            .variable(PRIORITY_VARIABLE)
            .and_then(|value| value.parse().ok())
            .unwrap_or_default(),
    };
    let device = DeviceAmounts {
        count,
        kind,
        priority,
        field: requested.field.clone(),
    };
    Some((resource.clone(), device))
}

/// Environment variable of HAMi for the priority.
const PRIORITY_VARIABLE: &str = "CUDA_TASK_PRIORITY";

fn share(
    container: &ContainerRef<'_>,
    family: &ResourceFamily,
    amounts: &BTreeMap<String, Amount>,
    findings: &mut Findings,
) -> DeviceKind {
    let positive = |name: &str| amounts.get(name).filter(|amount| amount.value > 0);
    let percentage = positive(&family.memory_percentage);
    let memory = match (positive(&family.memory), percentage) {
        (Some(memory), percentage) => {
            if let Some(percentage) = percentage {
                findings.warn(&percentage.field, WarningCause::PercentageIgnored);
            }
            mib(
                &memory.field,
                (memory.value, &memory.text),
                family,
                findings,
            )
        }
        (None, Some(percentage)) => match u8::try_from(percentage.value) {
            Ok(100) => Memory::All,
            Ok(percent @ 1..100) => Memory::Percent(percent),
            _ => {
                let percent = percentage.value;
                findings.refuse(
                    &percentage.field,
                    RefusalCause::PercentageOutOfRange { percent },
                );
                Memory::All
            }
        },
        (None, None) if family.default_memory == 0 => Memory::All,
        (None, None) => {
            let field = format!("{container}.resources.limits[{}]", family.memory);
            let value = family.default_memory;
            mib(&field, (value, &value.to_string()), family, findings)
        }
    };
    let cores = amounts.get(&family.cores);
    let value = cores.map_or(family.default_cores, |cores| cores.value);
    if let Some(cores) = cores.filter(|cores| cores.value > 100) {
        let reduced = WarningCause::CoresReduced { cores: cores.value };
        findings.warn(&cores.field, reduced);
    }
    if value < 100 {
        return DeviceKind::Share {
            memory,
            cores: value,
            memory_resource: family.memory.clone(),
        };
    }
    if memory != Memory::All {
        let field = cores.or(percentage).map(|amount| amount.field.as_str());
        let field = field.map_or_else(|| format!("{container}.resources"), str::to_owned);
        findings.warn(field, WarningCause::WholeGpuWithoutMemoryLimit);
    }
    DeviceKind::WholeGpu
}

/// Returns the memory of an amount and its text. Users who write `16Gi` mean bytes, and the resource counts MiB.
fn mib(
    field: &str,
    (value, text): (u64, &str),
    family: &ResourceFamily,
    findings: &mut Findings,
) -> Memory {
    let mib = value
        .checked_mul(family.memory_factor)
        .filter(|mib| *mib < MAX_MEMORY_MIB);
    match mib {
        Some(mib) => Memory::Mib(mib),
        None => {
            let of_bytes = value.div_ceil(family.memory_factor.max(1) << 20);
            let cause = RefusalCause::MemoryOutOfRange {
                text: text.to_owned(),
                unit_mib: family.memory_factor,
                amount: (of_bytes < MAX_MEMORY_MIB).then_some(of_bytes),
            };
            findings.refuse(field, cause);
            Memory::All
        }
    }
}
