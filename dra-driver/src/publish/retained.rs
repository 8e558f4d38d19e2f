//! Devices that the node does not offer any more and that are still published: of a card that is gone, or of one whose
//! mode has been changed (MIG, compute mode, confidential computing).
//!
//! Schedulers compute what is free from what is published, so a device that a claim holds must not vanish. Such devices
//! stay published as they were, with a taint that says why; when the taint has stood for a while and no claim holds one
//! of them, they are withdrawn. What the API server has is the memory of it, because that outlives the driver; this
//! module decides, [`writer`](super::writer) asks and writes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use drava_api::names;
use drava_nvml::{GpuUuid, Inventory};
use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use super::{Pool, SliceContent};
use crate::capacity::{self, PublishMode, UnavailableReason};

/// How long the taint of what is not offered any more stands before that is withdrawn: whoever allocated a moment before
/// has written it down by then.
pub const GRACE: Duration = Duration::from_secs(300);

/// Bounds of the time between two looks at claims that keep a card published.
const RECHECK: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A card as it is published.
#[derive(Debug, Clone, PartialEq)]
pub struct PublishedCard {
    /// Number of its device file, by which its devices are named.
    pub minor: u32,
    /// Its devices.
    pub devices: Vec<Device>,
    /// The set of counters that they consume.
    pub counters: Option<CounterSet>,
}

/// What is published of a card and not offered any more.
#[derive(Debug, Clone, PartialEq)]
pub struct Retained {
    /// Those of its devices.
    pub card: PublishedCard,
    /// Why they are not offered.
    pub reason: Reason,
}

/// Why what is published is not offered any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The card is gone from the node.
    Lost,
    /// The card is there and must not be used in this way.
    Unavailable(UnavailableReason),
}

impl Reason {
    /// In one word, as the value of a taint.
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
            Self::Lost => f.write_str("the card is gone from the node"),
            Self::Unavailable(reason) => reason.fmt(f),
        }
    }
}

/// The cards that are published, and for how long those devices have been tainted that are not offered any more.
#[derive(Debug, Default)]
pub struct PublishedCards {
    cards: BTreeMap<GpuUuid, PublishedCard>,
    /// By name of the device.
    tainted_since: BTreeMap<String, Instant>,
}

impl PublishedCards {
    /// What an earlier instance of the driver has published in the pool. Where two generations of the pool are mixed,
    /// because that instance was interrupted, the newer one counts.
    #[must_use]
    pub fn of_slices(slices: &[ResourceSlice], pool: &str) -> Self {
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

    /// The devices that `inventory` does not offer, by card. Those of a card whose device file has become another card's
    /// are not among them: it is not coming back, and its devices' names are taken.
    #[must_use]
    pub fn retained(&self, inventory: &Inventory) -> BTreeMap<GpuUuid, Retained> {
        let minors: BTreeSet<u32> = inventory.cards.iter().map(|card| card.minor).collect();
        let of_card = |(uuid, card): (&GpuUuid, &PublishedCard)| {
            let present = inventory.cards.iter().find(|present| present.uuid == *uuid);
            let retained = match present {
                Some(present) if present.minor == card.minor => {
                    let offer = capacity::publish_mode(present, inventory.confidential_computing);
                    not_offered(card, &offer)?
                }
                // Its devices have other names now.
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

    /// Whether the taints of all that is retained of a card have stood for `grace`.
    #[must_use]
    pub fn may_go(&self, retained: &Retained, now: Instant, grace: Duration) -> bool {
        retained.card.devices.iter().all(|device| {
            let since = self.tainted_since.get(&device.name);
            since.is_some_and(|since| now.duration_since(*since) >= grace)
        })
    }

    /// The pool has been written, with these devices tainted.
    pub fn published(&mut self, pool: &Pool, retained: &BTreeMap<GpuUuid, Retained>, now: Instant) {
        let counters = pool.slices.values().flat_map(|content| match content {
            SliceContent::Counters(sets) => sets.as_slice(),
            SliceContent::Devices(_) => &[],
        });
        let counters = counters.map(|set| (set.name.as_str(), set)).collect();
        self.cards = cards(pool.devices(), &counters);
        let devices = retained.values().flat_map(|left| &left.card.devices);
        let before = std::mem::take(&mut self.tainted_since);
        self.tainted_since = devices
            .map(|device| {
                let since = before.get(&device.name).copied();
                (device.name.clone(), since.unwrap_or(now))
            })
            .collect();
    }

    /// When what is retained is to be looked at again; `None` without any.
    #[must_use]
    pub fn next_look(&self, now: Instant, grace: Duration) -> Option<Instant> {
        let (shortest, longest) = RECHECK;
        let first = self
            .tainted_since
            .values()
            .map(|since| *since + grace)
            .min()?;
        Some(first.max(now + grace.clamp(shortest, longest)))
    }
}

/// What of a published card its offer does not contain.
fn not_offered(published: &PublishedCard, offer: &PublishMode) -> Option<Retained> {
    let (reason, offered) = match offer {
        PublishMode::WholeAndShares(_) => return None,
        PublishMode::WholeOnly(reason) => (*reason, Some(names::gpu_device(published.minor))),
        PublishMode::Unpublished(reason) => (*reason, None),
    };
    let mut card = published.clone();
    card.devices
        .retain(|device| offered.as_ref() != Some(&device.name));
    (!card.devices.is_empty()).then_some(Retained {
        card,
        reason: Reason::Unavailable(reason),
    })
}

/// Puts devices together by card.
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
        // Whatever lacks them was not published by this driver.
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

/// Names of the devices of the pool that are allocated.
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
