//! Retained devices: published devices that the node does not offer any longer, or with smaller amounts, because the GPU is
//! missing, its mode changed (MIG, compute mode, confidential computing), or its node profile.
//!
//! Schedulers derive free capacity from published devices, so an allocated device must stay published as it was. Larger
//! amounts take nothing from a claim and are published at once. Retained devices have a taint with the reason. They are
//! withdrawn or changed when the grace period has passed and no claim holds them. Published slices in the API server are
//! the only state, because they outlive the driver. This module decides; [`writer`](super::writer) reads and writes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use super::{Pool, SliceContent, device};
use crate::gpus::capacity::{MIB, ShareTotals, UnavailableReason};
use crate::gpus::gpu_plan::{DeviceKind, GpuPlan};
use crate::gpus::inventory::NodeInventory;

/// Default time between tainting and withdrawal. An allocation that was computed before the taint is written by then.
pub const GRACE: Duration = Duration::from_secs(300);

/// Longest time between tainting and withdrawal or change for a node profile. The device works, and an allocation that is
/// written even later is rejected by prepare at worst.
const PROFILE_GRACE: Duration = Duration::from_secs(10);

/// Minimum and maximum time between two checks of the claims that hold retained devices.
const RECHECK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Published state of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedGpu {
    /// Number in the names of the devices.
    pub number: u32,
    /// Published devices.
    pub devices: Vec<Device>,
    /// Counter set that the devices consume.
    pub counters: Option<CounterSet>,
}

/// Retained devices of one GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Retained {
    /// The retained devices.
    pub gpu: PublishedGpu,
    /// Reasons for the taints, by name of the device.
    pub reasons: BTreeMap<String, Reason>,
}

impl Retained {
    /// Returns the reason for the taint of a device.
    #[must_use]
    pub fn reason(&self, device: &str) -> Option<&Reason> {
        self.reasons.get(device)
    }

    /// Returns the totals of the retained shares.
    #[must_use]
    pub fn share_totals(&self) -> Option<ShareTotals> {
        self.gpu.devices.iter().find_map(device::share_totals)
    }
}

/// Reason why a published device is not offered as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// The GPU is not on the node.
    Lost,
    /// The mode of the GPU or the node profile excludes the device.
    Unavailable(UnavailableReason),
    /// The node profile changes the amounts of the device, as the text says.
    Amounts(String),
}

impl Reason {
    /// Returns the reason as the value of a taint.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Unavailable(reason) => reason.as_str(),
            Self::Amounts(_) => UnavailableReason::ProfileAmounts.as_str(),
        }
    }

    /// Returns whether the node profile is the reason, so that the device itself works.
    #[must_use]
    pub const fn is_of_profile(&self) -> bool {
        match self {
            Self::Lost => false,
            Self::Unavailable(reason) => reason.is_of_profile(),
            Self::Amounts(_) => true,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("the GPU is not on the node"),
            Self::Unavailable(reason) => reason.fmt(f),
            Self::Amounts(change) => write!(f, "{}: {change}", UnavailableReason::ProfileAmounts),
        }
    }
}

/// Published GPUs and the taint times of retained devices.
#[derive(Debug, Default)]
pub struct PublishedGpus {
    gpus: BTreeMap<GpuUuid, PublishedGpu>,
    /// Time of the first taint by device name.
    tainted_since: BTreeMap<String, Tainted>,
}

/// Taint of a retained device.
#[derive(Debug, Clone, Copy)]
struct Tainted {
    since: Instant,
    is_of_profile: bool,
}

impl Tainted {
    /// Returns the end of the grace period.
    fn end(self, grace: Duration) -> Instant {
        let grace = match self.is_of_profile {
            true => grace.min(PROFILE_GRACE),
            false => grace,
        };
        self.since + grace
    }
}

impl PublishedGpus {
    /// Returns the state that an earlier instance of the driver published. If an interrupted update left two generations,
    /// the newer generation wins.
    #[must_use]
    pub fn from_slices(slices: &[ResourceSlice], pool: &str) -> Self {
        let mut of_pool: Vec<_> = slices
            .iter()
            .filter(|slice| slice.spec.pool.name == pool)
            .collect();
        of_pool.sort_by_key(|slice| slice.spec.pool.generation);
        let mut devices: BTreeMap<&str, &Device> = BTreeMap::new();
        let mut counters: BTreeMap<&str, &CounterSet> = BTreeMap::new();
        for slice in of_pool {
            let of_slice = slice.spec.devices.iter().flatten();
            devices.extend(of_slice.map(|device| (device.name.as_str(), device)));
            let of_slice = slice.spec.shared_counters.iter().flatten();
            counters.extend(of_slice.map(|set| (set.name.as_str(), set)));
        }
        Self {
            gpus: gpus(devices.into_values(), &counters),
            tainted_since: BTreeMap::new(),
        }
    }

    /// Returns the published devices that `inventory` does not offer as they are, by GPU. Devices of a missing GPU are
    /// excluded when another GPU has its number, because that GPU uses the same device names.
    #[must_use]
    pub fn retained(&self, inventory: &NodeInventory) -> BTreeMap<GpuUuid, Retained> {
        let gpus = &inventory.nvml.gpus;
        let numbers: BTreeSet<u32> = gpus.iter().map(|gpu| inventory.number(gpu)).collect();
        let of_gpu = |(uuid, gpu): (&GpuUuid, &PublishedGpu)| {
            let present = gpus.iter().find(|present| present.uuid == *uuid);
            let retained = match present {
                Some(present) if inventory.number(present) == gpu.number => {
                    not_offered(gpu, &inventory.plan(present))?
                }
                // The GPU has another number and other device names.
                Some(_) => return None,
                None if numbers.contains(&gpu.number) => return None,
                None => {
                    let names = gpu.devices.iter().map(|device| device.name.clone());
                    Retained {
                        gpu: gpu.clone(),
                        reasons: names.map(|name| (name, Reason::Lost)).collect(),
                    }
                }
            };
            Some((uuid.clone(), retained))
        };
        self.gpus.iter().filter_map(of_gpu).collect()
    }

    /// Returns whether the grace period of all retained devices of a GPU has passed.
    #[must_use]
    pub fn is_grace_over(&self, retained: &Retained, now: Instant, grace: Duration) -> bool {
        retained.gpu.devices.iter().all(|device| {
            let tainted = self.tainted_since.get(&device.name);
            tainted.is_some_and(|tainted| now >= tainted.end(grace))
        })
    }

    /// Stores that `pool` was written with `retained` tainted.
    pub fn set_published(
        &mut self,
        pool: &Pool,
        retained: &BTreeMap<GpuUuid, Retained>,
        now: Instant,
    ) {
        let counters = pool.slices.values().flat_map(|content| match content {
            SliceContent::Counters(sets) => sets.as_slice(),
            SliceContent::Devices(_) => &[],
        });
        let counters = counters.map(|set| (set.name.as_str(), set)).collect();
        self.gpus = gpus(pool.devices(), &counters);
        let reasons = retained.values().flat_map(|retained| &retained.reasons);
        let before = std::mem::take(&mut self.tainted_since);
        self.tainted_since = reasons
            .map(|(device, reason)| {
                let before = before.get(device);
                let tainted = Tainted {
                    since: before.map_or(now, |before| before.since),
                    is_of_profile: reason.is_of_profile(),
                };
                (device.clone(), tainted)
            })
            .collect();
    }

    /// Returns the time of the next check of retained devices; `None` without retained devices.
    #[must_use]
    pub fn next_check(&self, now: Instant, grace: Duration) -> Option<Instant> {
        let (shortest, longest) = RECHECK;
        // A device whose grace period has passed is held by a claim.
        let again = now + grace.clamp(shortest, longest);
        let ends = self
            .tainted_since
            .values()
            .map(|tainted| tainted.end(grace));
        let checks = ends.map(|end| if end > now { end } else { again });
        Some(checks.min()?.max(now + shortest))
    }
}

/// Returns the published devices that the plan does not offer, or with smaller amounts.
fn not_offered(published: &PublishedGpu, plan: &GpuPlan) -> Option<Retained> {
    let mut gpu = published.clone();
    let mut reasons = BTreeMap::new();
    gpu.devices.retain(|device| {
        let reason = match plan.device(&device.name) {
            None => Some(Reason::Unavailable(plan.excluded)),
            Some(planned) => match planned.withheld {
                Some(reason) => Some(Reason::Unavailable(reason)),
                None => reduction(device, &planned.kind).map(Reason::Amounts),
            },
        };
        let is_retained = reason.is_some();
        reasons.extend(reason.map(|reason| (device.name.clone(), reason)));
        is_retained
    });
    (!gpu.devices.is_empty()).then_some(Retained { gpu, reasons })
}

/// Returns what a plan takes from a published device with shares, as text; `None` if it takes nothing.
fn reduction(published: &Device, planned: &DeviceKind) -> Option<String> {
    let DeviceKind::Shares(offer) = planned else {
        return None;
    };
    let before = device::share_totals(published)?;
    let after = offer.totals;
    let amounts = [
        ("memory", Unit::Mib, before.memory_bytes, after.memory_bytes),
        ("cores", Unit::One, before.cores, after.cores),
        ("slots", Unit::One, before.slots, after.slots),
    ];
    let smaller = amounts
        .into_iter()
        .filter(|(.., before, after)| after < before);
    let mut changes: Vec<String> = smaller
        .map(|(name, unit, before, after)| {
            format!("{name} {} to {}", unit.text(before), unit.text(after))
        })
        .collect();
    // Claims may have selected the device by this attribute.
    let was_oversubscribed = device::is_oversubscribed(published);
    if was_oversubscribed != offer.is_oversubscribed {
        let attribute = names::attribute::OVERSUBSCRIBED;
        changes.push(format!(
            "{attribute} {was_oversubscribed} to {}",
            offer.is_oversubscribed
        ));
    }
    (!changes.is_empty()).then(|| changes.join(", "))
}

/// Unit of an amount in a text.
#[derive(Clone, Copy)]
enum Unit {
    Mib,
    One,
}

impl Unit {
    fn text(self, amount: u64) -> String {
        match self {
            Self::Mib => format!("{} MiB", amount / MIB),
            Self::One => amount.to_string(),
        }
    }
}

/// Groups devices by GPU.
fn gpus<'a>(
    devices: impl Iterator<Item = &'a Device>,
    counters: &BTreeMap<&str, &CounterSet>,
) -> BTreeMap<GpuUuid, PublishedGpu> {
    let mut gpus: BTreeMap<GpuUuid, PublishedGpu> = BTreeMap::new();
    for device in devices {
        let attribute = |name| device.attributes.as_ref()?.get(name);
        let uuid = attribute(names::attribute::UUID).and_then(|value| value.string.as_deref());
        // This driver publishes the attribute on every device.
        let (Some(uuid), Some(number)) = (uuid, names::gpu_number(&device.name)) else {
            continue;
        };
        let gpu = gpus
            .entry(GpuUuid::new(uuid))
            .or_insert_with(|| PublishedGpu {
                number,
                devices: Vec::new(),
                counters: counters
                    .get(names::gpu_device(number).as_str())
                    .copied()
                    .cloned(),
            });
        gpu.devices.push(device.clone());
    }
    gpus
}

/// Returns the names of the allocated devices of the pool.
#[must_use]
pub fn allocated(claims: &[ResourceClaim], pool: &str) -> BTreeSet<String> {
    let results = claims
        .iter()
        .filter_map(|claim| claim.status.as_ref()?.allocation.as_ref()?.devices.as_ref())
        .flat_map(|devices| devices.results.iter().flatten());
    results
        .filter(|result| result.driver == names::DRIVER && result.pool == pool)
        .map(|result| result.device.clone())
        .collect()
}
