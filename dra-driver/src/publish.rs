//! What this node publishes: its cards as ResourceSlices of one pool.
//!
//! [`desired`] is a pure function of the inventory; [`changes`](diff::changes) compares it with what is there;
//! [`writer`] is the thin shell that watches, writes and reports. Each card is published as coupled devices
//! that consume the same counters, so the schedulers never hand out the whole card and shares of it at once.

use std::collections::BTreeMap;

use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::{CounterSet, Device, DeviceTaint};

use crate::capacity::{self, PublishMode, UnavailableReason};
use crate::inventory::NodeInventory;
use crate::options::Scheduling;

pub mod device;
pub mod diff;
pub mod retained;
mod version;
pub mod writer;

use retained::{PublishedCard, Retained};

/// Counter sets that one slice takes (`ResourceSliceMaxCounterSets`).
const MAX_COUNTER_SETS: usize = 8;

/// Devices that one slice takes when they have taints or counters (`ResourceSliceMaxDevicesWithAdvancedFeatures`).
const MAX_DEVICES: usize = 64;

/// Fields of ResourceSlices that the API server keeps. A field whose feature gate is off is dropped silently.
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
    /// Nothing is dropped.
    pub const ALL: Self = Self {
        counters: true,
        sharing: true,
        taints: true,
    };

    /// Whether whole cards and shares can be offered together without being handed out together.
    #[must_use]
    pub const fn can_share(self) -> bool {
        self.counters && self.sharing
    }

    /// What both keep.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            counters: self.counters && other.counters,
            sharing: self.sharing && other.sharing,
            taints: self.taints && other.taints,
        }
    }
}

/// Content of one slice: counter sets or devices, never both (Kubernetes 1.35 and later).
#[derive(Debug, Clone, PartialEq)]
pub enum SliceContent {
    /// Counter sets, visible in the whole pool.
    Counters(Vec<CounterSet>),
    /// Devices.
    Devices(Vec<Device>),
}

/// All that this node wants to be published.
#[derive(Debug, Clone, PartialEq)]
pub struct Pool {
    /// Name of the pool.
    pub name: String,
    /// Its slices by object name. Never empty: an empty pool is one slice without devices.
    pub slices: BTreeMap<String, SliceContent>,
    /// Cards that are not offered, or not fully, with the reason: by UUID.
    pub unavailable: BTreeMap<String, UnavailableReason>,
}

impl Pool {
    /// The devices of all slices.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.slices.values().flat_map(|content| match content {
            SliceContent::Devices(devices) => devices.as_slice(),
            SliceContent::Counters(_) => &[],
        })
    }
}

/// Decides what `node` publishes for `inventory`. Devices that are `retained` stay as they were published, with a taint.
#[must_use]
pub fn desired(
    node: &str,
    inventory: &NodeInventory,
    retained: &BTreeMap<GpuUuid, Retained>,
    scheduling: Scheduling,
    features: Features,
) -> Pool {
    let taints = |unhealthy| {
        features
            .taints
            .then(|| device::taints(scheduling, unhealthy))
            .flatten()
    };
    // By minor number, which no two of them share.
    let mut cards: BTreeMap<u32, PublishedCard> = BTreeMap::new();
    let mut unavailable = BTreeMap::new();
    for left in retained.values() {
        let unhealthy = taints(Some(left.reason.as_str()));
        let card = still_published(&left.card, unhealthy.as_ref(), features);
        cards.insert(card.minor, card);
    }
    for card in &inventory.gpus.cards {
        let totals = match capacity::publish_mode(card, inventory.gpus.confidential_computing) {
            PublishMode::WholeAndShares(totals) => Some(totals),
            PublishMode::WholeOnly(reason) => {
                unavailable.insert(card.uuid.to_string(), reason);
                None
            }
            PublishMode::Unpublished(reason) => {
                unavailable.insert(card.uuid.to_string(), reason);
                continue;
            }
        };
        let whole = device::gpu(card, inventory, taints(None), features.counters);
        let shares = totals
            .filter(|_| features.can_share())
            .map(|totals| device::vgpu(card, inventory, taints(None), totals));
        let card = PublishedCard {
            minor: card.minor,
            devices: [whole].into_iter().chain(shares).collect(),
            counters: features.counters.then(|| device::counter_set(card)),
        };
        offer_beside(&mut cards, card);
    }
    let counter_sets: Vec<_> = cards
        .values()
        .filter_map(|card| card.counters.clone())
        .collect();
    let devices = cards.into_values().map(|card| card.devices).collect();
    Pool {
        name: names::pool(node),
        slices: slices(node, &counter_sets, devices),
        unavailable,
    }
}

/// Puts what a card offers in front of those of its devices that are retained. They compete for the same counters.
fn offer_beside(cards: &mut BTreeMap<u32, PublishedCard>, mut offered: PublishedCard) {
    let counters = offered.devices.first();
    let counters = counters.and_then(|device| device.consumes_counters.clone());
    let retained = cards.remove(&offered.minor);
    for mut device in retained.into_iter().flat_map(|card| card.devices) {
        device.consumes_counters.clone_from(&counters);
        offered.devices.push(device);
    }
    cards.insert(offered.minor, offered);
}

/// What is retained of a card, without what the API server does not keep.
fn still_published(
    card: &PublishedCard,
    taints: Option<&Vec<DeviceTaint>>,
    features: Features,
) -> PublishedCard {
    let mut card = card.clone();
    if !features.can_share() {
        card.devices
            .retain(|device| device.allow_multiple_allocations != Some(true));
    }
    if !features.counters {
        card.counters = None;
    }
    for device in &mut card.devices {
        device.taints = taints.cloned();
        if card.counters.is_none() {
            device.consumes_counters = None;
        }
    }
    card
}

/// Cuts counter sets and devices into slices, the devices of one card together.
fn slices(
    node: &str,
    counter_sets: &[CounterSet],
    devices: Vec<Vec<Device>>,
) -> BTreeMap<String, SliceContent> {
    let mut chunks: Vec<Vec<Device>> = vec![Vec::new()];
    for of_card in devices {
        match chunks.last_mut() {
            Some(chunk) if chunk.len() + of_card.len() <= MAX_DEVICES => chunk.extend(of_card),
            _ => chunks.push(of_card),
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

/// Object name of a slice. Allocators that take the first fit go by it, so it sorts like the cards.
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
