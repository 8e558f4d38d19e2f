//! Cards that are gone from the node while devices of theirs are still published.
//!
//! Schedulers compute what is free from what is published, so a device that a claim holds must not vanish. A card that
//! is gone stays published as it was, with a taint; when the taint has stood for a while and no claim holds a device of
//! it, it is withdrawn. What the API server has is the memory of it, because that outlives the driver; this module
//! decides, [`writer`](super::writer) asks and writes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_api::names;
use drava_nvml::{GpuUuid, Inventory};
use k8s_openapi::api::resource::v1::{CounterSet, Device, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use super::device::gpu_name;
use super::{Pool, SliceContent};

/// How long the taint of a card that is gone stands before the card is withdrawn: whoever allocated a moment before has
/// written it down by then.
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

/// The cards that are published, and for how long those have been tainted that are gone.
#[derive(Debug, Default)]
pub struct PublishedCards {
    cards: BTreeMap<GpuUuid, PublishedCard>,
    tainted_since: BTreeMap<GpuUuid, Instant>,
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

    /// The cards that are not in the inventory. One whose device file has become another card's is not among them: it is
    /// not coming back, and its devices' names are taken.
    #[must_use]
    pub fn gone(&self, inventory: &Inventory) -> BTreeMap<GpuUuid, PublishedCard> {
        let present: BTreeSet<&GpuUuid> = inventory.cards.iter().map(|card| &card.uuid).collect();
        let minors: BTreeSet<u32> = inventory.cards.iter().map(|card| card.minor).collect();
        self.cards
            .iter()
            .filter(|(uuid, card)| !present.contains(uuid) && !minors.contains(&card.minor))
            .map(|(uuid, card)| (uuid.clone(), card.clone()))
            .collect()
    }

    /// Whether the taint of a card that is gone has stood for `grace`.
    #[must_use]
    pub fn may_go(&self, card: &GpuUuid, now: Instant, grace: Duration) -> bool {
        let since = self.tainted_since.get(card);
        since.is_some_and(|since| now.duration_since(*since) >= grace)
    }

    /// The pool has been written, with these cards tainted as gone.
    pub fn published(
        &mut self,
        pool: &Pool,
        gone: &BTreeMap<GpuUuid, PublishedCard>,
        now: Instant,
    ) {
        let counters = pool.slices.values().flat_map(|content| match content {
            SliceContent::Counters(sets) => sets.as_slice(),
            SliceContent::Devices(_) => &[],
        });
        let counters = counters.map(|set| (set.name.as_str(), set)).collect();
        self.cards = cards(pool.devices(), &counters);
        self.tainted_since.retain(|uuid, _| gone.contains_key(uuid));
        for uuid in gone.keys() {
            self.tainted_since.entry(uuid.clone()).or_insert(now);
        }
    }

    /// When the cards that are gone are to be looked at again; `None` without any.
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
                counters: counters.get(gpu_name(minor).as_str()).copied().cloned(),
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
