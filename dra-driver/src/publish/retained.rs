//! Retained devices: published devices that the node does not offer any longer, because the GPU is missing or its mode
//! changed (MIG, compute mode, confidential computing).
//!
//! Schedulers derive free capacity from published devices, so an allocated device must stay published. Retained devices
//! have a taint with the reason. They are withdrawn when the grace period has passed and no claim holds them. Published
//! slices in the API server are the only state, because they outlive the driver. This module decides;
//! [`writer`](super::writer) reads and writes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use super::{Pool, SliceContent};
use crate::capacity::UnavailableReason;
use crate::card_plan::CardPlan;
use crate::inventory::NodeInventory;

/// Default time between tainting and withdrawal. An allocation that was computed before the taint is written by then.
pub const GRACE: Duration = Duration::from_secs(300);

/// Minimum and maximum time between two checks of the claims that hold retained devices.
const RECHECK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Published state of a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedCard {
    /// Number of the device file; device names contain it.
    pub minor: u32,
    /// Published devices.
    pub devices: Vec<Device>,
    /// Counter set that the devices consume.
    pub counters: Option<CounterSet>,
}

/// Retained devices of one GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Retained {
    /// The retained devices.
    pub card: PublishedCard,
    /// Reason for the taint.
    pub reason: Reason,
}

/// Reason why published devices are not offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The GPU is not on the node.
    Lost,
    /// The mode of the GPU excludes the device.
    Unavailable(UnavailableReason),
}

impl Reason {
    /// Returns the reason as the value of a taint.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Unavailable(reason) => reason.as_str(),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("the GPU is not on the node"),
            Self::Unavailable(reason) => reason.fmt(f),
        }
    }
}

/// Published GPUs and the taint times of retained devices.
#[derive(Debug, Default)]
pub struct PublishedCards {
    cards: BTreeMap<GpuUuid, PublishedCard>,
    /// Time of the first taint by device name.
    tainted_since: BTreeMap<String, Instant>,
}

impl PublishedCards {
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
            cards: cards(devices.into_values(), &counters),
            tainted_since: BTreeMap::new(),
        }
    }

    /// Returns the published devices that `inventory` does not offer, by GPU. Devices of a missing GPU are excluded when
    /// another GPU has its minor number, because that GPU uses the same device names.
    #[must_use]
    pub fn retained(&self, inventory: &NodeInventory) -> BTreeMap<GpuUuid, Retained> {
        let cards = &inventory.gpus.cards;
        let minors: BTreeSet<u32> = cards.iter().map(|card| card.minor).collect();
        let of_card = |(uuid, card): (&GpuUuid, &PublishedCard)| {
            let present = cards.iter().find(|present| present.uuid == *uuid);
            let retained = match present {
                Some(present) if present.minor == card.minor => {
                    not_offered(card, &inventory.plan(present))?
                }
                // The GPU has another minor number and other device names.
                Some(_) => return None,
                None if minors.contains(&card.minor) => return None,
                None => Retained {
                    card: card.clone(),
                    reason: Reason::Lost,
                },
            };
            Some((uuid.clone(), retained))
        };
        self.cards.iter().filter_map(of_card).collect()
    }

    /// Returns whether the grace period of all retained devices of a GPU has passed.
    #[must_use]
    pub fn is_grace_over(&self, retained: &Retained, now: Instant, grace: Duration) -> bool {
        retained.card.devices.iter().all(|device| {
            let since = self.tainted_since.get(&device.name);
            since.is_some_and(|since| now.duration_since(*since) >= grace)
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
        self.cards = cards(pool.devices(), &counters);
        let devices = retained
            .values()
            .flat_map(|retained| &retained.card.devices);
        let before = std::mem::take(&mut self.tainted_since);
        self.tainted_since = devices
            .map(|device| {
                let since = before.get(&device.name).copied();
                (device.name.clone(), since.unwrap_or(now))
            })
            .collect();
    }

    /// Returns the time of the next check of retained devices; `None` without retained devices.
    #[must_use]
    pub fn next_check(&self, now: Instant, grace: Duration) -> Option<Instant> {
        let (shortest, longest) = RECHECK;
        let first = self
            .tainted_since
            .values()
            .map(|since| *since + grace)
            .min()?;
        Some(first.max(now + grace.clamp(shortest, longest)))
    }
}

/// Returns the published devices that are not in the plan.
fn not_offered(published: &PublishedCard, plan: &CardPlan) -> Option<Retained> {
    let mut card = published.clone();
    card.devices
        .retain(|device| plan.device(&device.name).is_none());
    (!card.devices.is_empty()).then_some(Retained {
        card,
        reason: Reason::Unavailable(plan.excluded),
    })
}

/// Groups devices by GPU.
fn cards<'a>(
    devices: impl Iterator<Item = &'a Device>,
    counters: &BTreeMap<&str, &CounterSet>,
) -> BTreeMap<GpuUuid, PublishedCard> {
    let mut cards: BTreeMap<GpuUuid, PublishedCard> = BTreeMap::new();
    for device in devices {
        let attribute = |name| device.attributes.as_ref()?.get(name);
        let uuid = attribute(names::attribute::UUID).and_then(|value| value.string.as_deref());
        let minor = attribute(names::attribute::MINOR)
            .and_then(|value| value.int)
            .and_then(|minor| u32::try_from(minor).ok());
        // This driver publishes both attributes on every device.
        let (Some(uuid), Some(minor)) = (uuid, minor) else {
            continue;
        };
        let card = cards
            .entry(GpuUuid::new(uuid))
            .or_insert_with(|| PublishedCard {
                minor,
                devices: Vec::new(),
                counters: counters
                    .get(names::gpu_device(minor).as_str())
                    .copied()
                    .cloned(),
            });
        card.devices.push(device.clone());
    }
    cards
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
