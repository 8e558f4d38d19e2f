//! ResourceSlices of this node: its GPUs as one pool.
//!
//! [`desired`] derives the pool from the inventory and [`changes`](diff::changes) the writes from the difference; both
//! are pure. [`writer`] watches and writes. The devices of one GPU consume the same counters, so schedulers cannot
//! allocate the whole GPU and its shares at once.

pub mod profile;

use std::collections::BTreeMap;

use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::{CounterSet, Device, DeviceTaint};

use crate::gpu_health::HealthByGpu;
use crate::gpu_health::state::Fault;
use crate::gpus::capacity::UnavailableReason;
use crate::gpus::gpu_plan::{DeviceKind, PlannedDevice};
use crate::gpus::inventory::NodeInventory;
use crate::node::options::{Scheduling, UnhealthyEffect};

pub mod device;
pub mod diff;
pub mod retained;
mod version;
pub mod writer;

use retained::{PublishedGpu, Reason, Retained};

/// Maximum number of counter sets of one slice (`ResourceSliceMaxCounterSets`).
const MAX_COUNTER_SETS: usize = 8;

/// Maximum number of devices with taints or counters of one slice (`ResourceSliceMaxDevicesWithAdvancedFeatures`).
const MAX_DEVICES: usize = 64;

/// ResourceSlice fields that the API server stores. The API server silently drops fields whose feature gate is off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// Counter sets (DRAPartitionableDevices).
    pub counters: bool,
    /// Shared devices (DRAConsumableCapacity).
    pub sharing: bool,
    /// Taints (DRADeviceTaints).
    pub taints: bool,
}

impl Features {
    /// All fields are stored.
    pub const ALL: Self = Self {
        counters: true,
        sharing: true,
        taints: true,
    };

    /// Returns whether whole GPUs and shares can be published together and still exclude each other.
    #[must_use]
    pub const fn can_share(self) -> bool {
        self.counters && self.sharing
    }

    /// Returns whether a device can be published and still excludes the other devices of its GPU.
    fn can_publish(self, device: &PlannedDevice) -> bool {
        match device.kind {
            DeviceKind::Whole => true,
            DeviceKind::Shares(_) => self.can_share(),
            DeviceKind::Partition { .. } => self.counters,
        }
    }

    /// Returns the fields that both store.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            counters: self.counters && other.counters,
            sharing: self.sharing && other.sharing,
            taints: self.taints && other.taints,
        }
    }
}

/// Content of one slice: counter sets or devices, not both.
#[derive(Debug, Clone, PartialEq)]
pub enum SliceContent {
    /// Counter sets of the pool.
    Counters(Vec<CounterSet>),
    /// Devices.
    Devices(Vec<Device>),
}

/// Desired content of the pool.
#[derive(Debug, Clone, PartialEq)]
pub struct Pool {
    /// Name of the pool.
    pub name: String,
    /// Slices by object name. An empty pool has one slice without devices.
    pub slices: BTreeMap<String, SliceContent>,
    /// Reasons why GPUs or their shares are not published, by UUID.
    pub unavailable: BTreeMap<String, UnavailableReason>,
    /// Reasons why devices are unhealthy, by name.
    pub unhealthy: BTreeMap<String, String>,
}

impl Pool {
    /// Returns the devices of all slices.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.slices.values().flat_map(|content| match content {
            SliceContent::Devices(devices) => devices.as_slice(),
            SliceContent::Counters(_) => &[],
        })
    }
}

/// What decides the taints of devices, besides faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TaintPolicy {
    /// Allocator of the devices.
    pub scheduling: Scheduling,
    /// Effect of the taint of unhealthy and lost GPUs.
    pub unhealthy: UnhealthyEffect,
}

impl TaintPolicy {
    /// Returns whether no device can be published: without its taint, kube-scheduler would allocate devices of the
    /// controller too.
    #[must_use]
    pub fn excludes_all(self, features: Features) -> bool {
        self.scheduling == Scheduling::Managed && !features.taints
    }
}

/// Returns the pool of `node`; without devices if the API server drops the taints of managed mode. Devices in `retained` stay
/// published, with a taint; devices with a fault in `health` have a taint.
#[must_use]
pub fn desired(
    node: &str,
    inventory: &NodeInventory,
    retained: &BTreeMap<GpuUuid, Retained>,
    health: &HealthByGpu,
    policy: TaintPolicy,
    features: Features,
) -> Pool {
    let taints = |reason: Option<(&str, UnhealthyEffect)>| {
        features
            .taints
            .then(|| device::taints(policy.scheduling, reason))
            .flatten()
    };
    if policy.excludes_all(features) {
        return Pool {
            name: names::pool(node),
            slices: slices(node, &[], Vec::new()),
            unavailable: BTreeMap::new(),
            unhealthy: BTreeMap::new(),
        };
    }
    // By number, which is unique among the GPUs of a node.
    let mut gpus: BTreeMap<u32, PublishedGpu> = BTreeMap::new();
    let (mut unavailable, mut unhealthy) = (BTreeMap::new(), BTreeMap::new());
    let fault_of = |gpu: &GpuUuid, device: &PlannedDevice| {
        let health = health.get(gpu)?;
        health.of_device(device.slices())
    };
    for (uuid, retained) in retained {
        let plan = inventory.gpu(uuid.as_str()).map(|gpu| inventory.plan(gpu));
        // A device that the node profile changes works, unless the GPU has a fault.
        let fault = |device: &str, reason: &Reason| {
            let planned = plan.as_ref()?.device(device)?;
            fault_of(uuid, planned).filter(|_| reason.is_of_profile())
        };
        for (device, reason) in &retained.reasons {
            let text = match fault(device, reason) {
                Some(fault) => fault.to_string(),
                None if reason.is_of_profile() => continue,
                None => reason.to_string(),
            };
            unhealthy.insert(device.clone(), text);
        }
        let tainted = |device: &str| {
            let reason = retained.reason(device)?;
            let fault = fault(device, reason).map(Fault::value);
            let (reason, effect) = match (&fault, reason) {
                (Some(fault), _) => (fault.as_str(), policy.unhealthy),
                (None, Reason::Lost) => (reason.as_str(), policy.unhealthy),
                // Programs may use the device until their claim ends.
                (None, Reason::Unavailable(_) | Reason::Amounts(_)) => {
                    (reason.as_str(), UnhealthyEffect::NoSchedule)
                }
            };
            taints(Some((reason, effect)))
        };
        let gpu = retained_devices(&retained.gpu, tainted, features);
        gpus.insert(gpu.number, gpu);
    }
    for gpu in &inventory.nvml.gpus {
        let plan = inventory.plan(gpu);
        if let Some(reason) = plan.unavailable {
            unavailable.insert(gpu.uuid.to_string(), reason);
        }
        let is_retained = |name: &str| {
            let retained = retained.get(&gpu.uuid);
            retained.is_some_and(|retained| retained.reason(name).is_some())
        };
        let devices: Vec<Device> = plan
            .offered()
            .filter(|planned| features.can_publish(planned) && !is_retained(&planned.name))
            .map(|planned| {
                let fault = fault_of(&gpu.uuid, planned);
                if let Some(fault) = fault {
                    unhealthy.insert(planned.name.clone(), fault.to_string());
                }
                let fault = fault.map(Fault::value);
                let blocked = planned.blocked.map(UnavailableReason::as_str);
                let reason = match (&fault, blocked) {
                    (Some(fault), _) => Some((fault.as_str(), policy.unhealthy)),
                    (None, Some(blocked)) => Some((blocked, UnhealthyEffect::NoSchedule)),
                    (None, None) => None,
                };
                device::device(planned, gpu, inventory, taints(reason), features.counters)
            })
            .collect();
        if devices.is_empty() {
            continue;
        }
        let number = inventory.number(gpu);
        let gpu = PublishedGpu {
            number,
            devices,
            counters: features
                .counters
                .then(|| device::counter_set(number, &plan.counters)),
        };
        merge_retained(&mut gpus, gpu);
    }
    let counter_sets: Vec<_> = gpus
        .values()
        .filter_map(|gpu| gpu.counters.clone())
        .collect();
    let devices = gpus.into_values().map(|gpu| gpu.devices).collect();
    Pool {
        name: names::pool(node),
        slices: slices(node, &counter_sets, devices),
        unavailable,
        unhealthy,
    }
}

/// Adds a GPU, with its retained devices after the others. The counter set has the counters of both, because a GPU can have
/// other counters in another mode; a whole GPU and shares consume all of them.
fn merge_retained(gpus: &mut BTreeMap<u32, PublishedGpu>, mut current: PublishedGpu) {
    let Some(retained) = gpus.remove(&current.number) else {
        gpus.insert(current.number, current);
        return;
    };
    current.devices.extend(retained.devices);
    let before = retained.counters.map(|set| set.counters);
    if let Some(set) = &mut current.counters {
        for (name, counter) in before.into_iter().flatten() {
            set.counters.entry(name).or_insert(counter);
        }
    }
    for device in &mut current.devices {
        match &current.counters {
            Some(_) if device::is_partition(device) => {}
            Some(set) => device.consumes_counters = Some(vec![device::consumes(set)]),
            None => device.consumes_counters = None,
        }
    }
    gpus.insert(current.number, current);
}

/// Returns the retained devices of a GPU without fields that the API server drops.
fn retained_devices(
    gpu: &PublishedGpu,
    taints: impl Fn(&str) -> Option<Vec<DeviceTaint>>,
    features: Features,
) -> PublishedGpu {
    let mut gpu = gpu.clone();
    if !features.can_share() {
        gpu.devices
            .retain(|device| device.allow_multiple_allocations != Some(true));
    }
    if !features.counters {
        gpu.devices.retain(|device| !device::is_partition(device));
        gpu.counters = None;
    }
    for device in &mut gpu.devices {
        device.taints = taints(&device.name);
        if gpu.counters.is_none() {
            device.consumes_counters = None;
        }
    }
    gpu
}

/// Splits counter sets and devices into slices. The devices of one GPU stay in one slice.
fn slices(
    node: &str,
    counter_sets: &[CounterSet],
    devices: Vec<Vec<Device>>,
) -> BTreeMap<String, SliceContent> {
    let mut chunks: Vec<Vec<Device>> = vec![Vec::new()];
    for of_gpu in devices {
        match chunks.last_mut() {
            Some(chunk) if chunk.len() + of_gpu.len() <= MAX_DEVICES => chunk.extend(of_gpu),
            _ => chunks.push(of_gpu),
        }
    }
    let counters = counter_sets
        .chunks(MAX_COUNTER_SETS)
        .enumerate()
        .map(|(index, sets)| {
            (
                slice_name(node, "counters", index),
                SliceContent::Counters(sets.to_vec()),
            )
        });
    let devices = chunks.into_iter().enumerate().map(|(index, devices)| {
        (
            slice_name(node, "devices", index),
            SliceContent::Devices(devices),
        )
    });
    counters.chain(devices).collect()
}

/// Returns the object name of a slice. First-fit allocators use the order of names, so names sort like the GPUs.
fn slice_name(node: &str, part: &str, index: usize) -> String {
    /// Longest object name (RFC 1123 subdomain).
    const MAX: usize = 253;
    let suffix = format!("-{}-{part}-{index:03}", names::DRIVER);
    if node.len() + suffix.len() <= MAX {
        return format!("{node}{suffix}");
    }
    let hash = format!("{:08x}", crc32fast::hash(node.as_bytes()));
    let room = MAX - suffix.len() - hash.len() - 1;
    let node = node
        .get(..room)
        .unwrap_or_default()
        .trim_end_matches(['-', '.']);
    format!("{node}-{hash}{suffix}")
}
