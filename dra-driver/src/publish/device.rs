//! DRA devices of a GPU: attributes, capacities, counters, taints.
//!
//! All device types have the same attribute keys: a CEL selector on a missing attribute fails the pod. What is unknown of a
//! GPU has no placeholder: equal placeholders would satisfy a `matchAttribute`.

use std::collections::BTreeMap;

use drava_api::obstacle::{LimitObstacle, SpatialObstacle};
use drava_api::{DeviceType, Quantity, names};
use drava_nvml::{AddressingMode, Gpu, Memory, MigProfile};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, CounterSet, Device,
    DeviceAttribute, DeviceCapacity, DeviceCounterConsumption, DeviceTaint,
};

use super::version;
use crate::gpus::capacity::{self, ALL_CORES, MIB, ShareOffer, ShareTotals};
use crate::gpus::gpu_plan::{Counters, DeviceKind, PlannedDevice};
use crate::gpus::inventory::NodeInventory;
use crate::node::options::{Scheduling, UnhealthyEffect};

/// Maximum length of a string attribute (`DeviceAttributeMaxValueLength`).
const MAX_ATTRIBUTE_BYTES: usize = 64;

/// Returns a planned device of a GPU.
pub(super) fn device(
    planned: &PlannedDevice,
    gpu: &Gpu,
    node: &NodeInventory,
    taints: Option<Vec<DeviceTaint>>,
    counters: bool,
) -> Device {
    let mut attributes = attributes(planned.kind.device_type(), gpu, node);
    let capacity = match &planned.kind {
        DeviceKind::Whole => whole_capacity(gpu),
        DeviceKind::Shares(offer) => {
            let name = names::attribute::OVERSUBSCRIBED.to_owned();
            attributes.insert(name, boolean(offer.is_oversubscribed));
            share_capacity(*offer)
        }
        DeviceKind::Partition { profile, .. } => {
            let name = names::attribute::PROFILE.to_owned();
            attributes.insert(name, string(&profile.name));
            let name = names::attribute::MEMORY_MIB.to_owned();
            attributes.insert(name, mib(profile.memory_bytes));
            partition_capacity(profile, gpu)
        }
    };
    let is_shared = matches!(planned.kind, DeviceKind::Shares(_));
    Device {
        name: planned.name.clone(),
        attributes: Some(attributes),
        capacity: Some(capacity),
        allow_multiple_allocations: is_shared.then_some(true),
        consumes_counters: counters
            .then(|| vec![consumes(&counter_set(node.number(gpu), &planned.consumes))]),
        taints,
        ..Device::default()
    }
}

fn whole_capacity(gpu: &Gpu) -> BTreeMap<String, DeviceCapacity> {
    let mut capacity = BTreeMap::from([(
        names::capacity::CORES.to_owned(),
        fixed(Quantity::count(ALL_CORES)),
    )]);
    if let Some(memory_bytes) = capacity::usable_memory_bytes(gpu) {
        capacity.insert(
            names::capacity::MEMORY.to_owned(),
            fixed(Quantity::bytes(memory_bytes)),
        );
    }
    capacity
}

fn share_capacity(offer: ShareOffer) -> BTreeMap<String, DeviceCapacity> {
    let ShareOffer {
        totals:
            ShareTotals {
                memory_bytes,
                cores,
                slots,
            },
        max_memory_bytes,
        default_cores,
        is_oversubscribed: _,
    } = offer;
    let memory = DeviceCapacity {
        value: Quantity::bytes(memory_bytes).into(),
        request_policy: policy(
            Quantity::bytes(max_memory_bytes),
            Quantity::bytes(MIB),
            // The API server rejects a step when min + step exceeds the value.
            (memory_bytes >= 2 * MIB).then_some(Quantity::bytes(MIB)),
            Some(Quantity::bytes(max_memory_bytes)),
        ),
    };
    let cores = DeviceCapacity {
        value: Quantity::count(cores).into(),
        request_policy: policy(
            Quantity::count(default_cores),
            Quantity::ZERO,
            Some(Quantity::count(1)),
            Some(Quantity::count(cores.min(ALL_CORES))),
        ),
    };
    let slots = DeviceCapacity {
        value: Quantity::count(slots).into(),
        request_policy: policy(
            Quantity::count(1),
            Quantity::count(1),
            (slots >= 2).then_some(Quantity::count(1)),
            None,
        ),
    };
    BTreeMap::from([
        (names::capacity::MEMORY.to_owned(), memory),
        (names::capacity::CORES.to_owned(), cores),
        (names::capacity::SLOTS.to_owned(), slots),
    ])
}

fn partition_capacity(profile: &MigProfile, gpu: &Gpu) -> BTreeMap<String, DeviceCapacity> {
    use names::capacity as name;
    let multiprocessors = u64::from(profile.multiprocessors);
    let all = gpu.multiprocessors.map_or(multiprocessors, u64::from);
    let cores = (multiprocessors * ALL_CORES)
        .checked_div(all)
        .unwrap_or(ALL_CORES);
    let counts = [
        (name::CORES, cores.min(ALL_CORES)),
        (name::MULTIPROCESSORS, multiprocessors),
        (name::COPY_ENGINES, u64::from(profile.copy_engines)),
        (name::DECODERS, u64::from(profile.decoders)),
        (name::ENCODERS, u64::from(profile.encoders)),
        (name::JPEG_ENGINES, u64::from(profile.jpeg_engines)),
        (name::OFA_ENGINES, u64::from(profile.ofa_engines)),
    ];
    let counts = counts
        .into_iter()
        .map(|(name, count)| (name.to_owned(), fixed(Quantity::count(count))));
    let memory = fixed(Quantity::bytes(profile.memory_bytes));
    counts.chain([(name::MEMORY.to_owned(), memory)]).collect()
}

/// Returns the totals of a published device with shares; `None` for other devices.
pub(super) fn share_totals(device: &Device) -> Option<ShareTotals> {
    if device.allow_multiple_allocations != Some(true) {
        return None;
    }
    let capacity = device.capacity.as_ref()?;
    let amount = |name: &str| {
        let value = Quantity::try_from(&capacity.get(name)?.value).ok()?;
        u64::try_from(value.to_i64()?).ok()
    };
    Some(ShareTotals {
        memory_bytes: amount(names::capacity::MEMORY)?,
        cores: amount(names::capacity::CORES)?,
        slots: amount(names::capacity::SLOTS)?,
    })
}

/// Returns whether the shares of a published device get more memory than the GPU has.
pub(super) fn is_oversubscribed(device: &Device) -> bool {
    let attribute = |attributes: &BTreeMap<String, DeviceAttribute>| {
        attributes.get(names::attribute::OVERSUBSCRIBED)?.bool
    };
    device.attributes.as_ref().and_then(attribute) == Some(true)
}

/// Returns the counter set of a GPU with these amounts.
pub(super) fn counter_set(number: u32, counters: &Counters) -> CounterSet {
    let counter = |(name, amount): (&String, &u64)| {
        let value = Quantity::count(*amount).into();
        (name.clone(), Counter { value })
    };
    CounterSet {
        name: names::gpu_device(number),
        counters: counters.iter().map(counter).collect(),
    }
}

/// Returns the consumption of all counters of a set.
pub(super) fn consumes(set: &CounterSet) -> DeviceCounterConsumption {
    DeviceCounterConsumption {
        counter_set: set.name.clone(),
        counters: set.counters.clone(),
        ..DeviceCounterConsumption::default()
    }
}

/// Returns whether a published device is a MIG partition.
pub(super) fn is_partition(device: &Device) -> bool {
    let attributes = device.attributes.as_ref();
    attributes.and_then(|attributes| attributes.get(names::attribute::TYPE)?.string.as_deref())
        == Some(DeviceType::Mig.as_str())
}

fn attributes(
    kind: DeviceType,
    gpu: &Gpu,
    node: &NodeInventory,
) -> BTreeMap<String, DeviceAttribute> {
    use names::attribute as name;
    let nvml = &node.nvml;
    let settings = node.gpu_settings(gpu.uuid.as_str());
    let cuda = nvml
        .cuda_driver_version
        .map_or_else(|| "0".to_owned(), |version| version.to_string());
    let addressing = match gpu.addressing_mode {
        Some(AddressingMode::Hmm) => "hmm",
        Some(AddressingMode::Ats) => "ats",
        Some(AddressingMode::None) | None => "none",
    };
    let mut attributes = BTreeMap::from([
        (name::TYPE, string(kind.as_str())),
        (name::UUID, string(gpu.uuid.as_str())),
        (name::PROFILE, string("none")),
        (name::PRODUCT_NAME, string(&gpu.name)),
        (name::BRAND, string(&gpu.brand)),
        (name::ARCHITECTURE, string(&gpu.architecture)),
        (
            name::CUDA_COMPUTE_CAPABILITY,
            semver(&gpu.compute_capability.to_string()),
        ),
        (name::DRIVER_VERSION, semver(&nvml.driver_version)),
        (name::CUDA_DRIVER_VERSION, semver(&cuda)),
        (name::ADDRESSING_MODE, string(addressing)),
        (
            name::MEMORY_ENFORCEMENT,
            string(node.memory_enforcement(&gpu.uuid).as_str()),
        ),
        (
            name::MEMORY_ENFORCEMENT_OBSTACLE,
            obstacle(node.driver_limit(&gpu.uuid), LimitObstacle::as_str),
        ),
        (
            name::SPATIAL_OBSTACLE,
            obstacle(node.spatial(gpu), SpatialObstacle::as_str),
        ),
        (name::MODE, string(settings.mode.as_str())),
        (name::MINOR, int(i64::from(gpu.minor))),
        (name::INDEX, int(i64::from(gpu.index))),
        (name::OVERSUBSCRIBED, boolean(false)),
        (name::PCI_BUS_ID, string(&gpu.pci_bus_id)),
    ]);
    if let Some(fabric) = &gpu.fabric {
        let domain = format!("{}.{}", fabric.cluster_uuid, fabric.clique);
        attributes.insert(name::NVLINK_DOMAIN, string(&domain));
    }
    if let Some(numa_node) = gpu.numa_node {
        attributes.insert(name::NUMA_NODE, int(i64::from(numa_node)));
    }
    if let Memory::Dedicated { total_bytes, .. } = gpu.memory {
        attributes.insert(name::MEMORY_MIB, mib(total_bytes));
    }
    // Only shares are suspended.
    if let Some(bytes) = settings
        .suspend_host_memory
        .filter(|_| kind == DeviceType::Vgpu)
    {
        attributes.insert(name::SUSPEND_HOST_MEMORY_MIB, mib(bytes));
    }
    if let Some(root) = node.pcie_roots.get(&gpu.uuid) {
        attributes.insert(name::PCIE_ROOT, string(root));
    }
    attributes
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect()
}

/// Returns the taints of a device: the managed taint in managed mode, and the reason why the device must not be used with
/// its effect.
pub(super) fn taints(
    scheduling: Scheduling,
    unhealthy: Option<(&str, UnhealthyEffect)>,
) -> Option<Vec<DeviceTaint>> {
    let taint = |key: &str, value: &str, effect: UnhealthyEffect| DeviceTaint {
        key: key.to_owned(),
        value: Some(value.to_owned()),
        effect: effect.as_str().to_owned(),
        time_added: None,
    };
    let managed = match scheduling {
        Scheduling::Managed => {
            let effect = UnhealthyEffect::NoSchedule;
            Some(taint(names::MANAGED_TAINT, "true", effect))
        }
        Scheduling::Native => None,
    };
    let unhealthy = unhealthy.map(|(reason, effect)| taint(names::UNHEALTHY_TAINT, reason, effect));
    let taints: Vec<_> = managed.into_iter().chain(unhealthy).collect();
    (!taints.is_empty()).then_some(taints)
}

fn fixed(value: Quantity) -> DeviceCapacity {
    DeviceCapacity {
        value: value.into(),
        request_policy: None,
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the field is optional")]
fn policy(
    default: Quantity,
    min: Quantity,
    step: Option<Quantity>,
    max: Option<Quantity>,
) -> Option<CapacityRequestPolicy> {
    Some(CapacityRequestPolicy {
        default: Some(default.into()),
        valid_range: Some(CapacityRequestPolicyRange {
            min: min.into(),
            step: step.map(Into::into),
            max: max.map(Into::into),
        }),
        valid_values: None,
    })
}

/// Returns the attribute of what a GPU can, or of the obstacle.
fn obstacle<O>(can: Result<(), O>, value: fn(O) -> &'static str) -> DeviceAttribute {
    string(can.map_or_else(value, |()| names::attribute::NO_OBSTACLE))
}

/// Returns a string attribute, truncated at a character boundary to the maximum length.
fn string(value: &str) -> DeviceAttribute {
    let end = value
        .char_indices()
        .map(|(start, char)| start + char.len_utf8())
        .take_while(|&end| end <= MAX_ATTRIBUTE_BYTES)
        .last();
    let value = value.get(..end.unwrap_or(0)).unwrap_or_default();
    DeviceAttribute {
        string: Some(value.to_owned()),
        ..DeviceAttribute::default()
    }
}

fn semver(value: &str) -> DeviceAttribute {
    DeviceAttribute {
        version: Some(version::normalize(value)),
        ..DeviceAttribute::default()
    }
}

fn boolean(value: bool) -> DeviceAttribute {
    DeviceAttribute {
        bool: Some(value),
        ..DeviceAttribute::default()
    }
}

fn mib(bytes: u64) -> DeviceAttribute {
    int(i64::try_from(bytes / MIB).unwrap_or(i64::MAX))
}

fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute {
        int: Some(value),
        ..DeviceAttribute::default()
    }
}
