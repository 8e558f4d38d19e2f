//! What the process knows about the cost of each kind of launch.
//!
//! An open-addressing table without locks. A kind that finds no place takes that of another one, which then has
//! to be learned anew.

use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::cost::{Cost, LaunchKind};

const BITS: u32 = 12;
const PLACES: usize = 1 << BITS;
const PROBES: usize = 8;

struct Place {
    kind: AtomicU64,
    cost: AtomicU64,
}

/// All zeroes knows nothing.
pub(crate) struct Costs {
    places: [Place; PLACES],
}

impl Costs {
    /// What a launch of that kind costs.
    #[inline]
    pub(crate) fn get(&self, kind: LaunchKind) -> Cost {
        match self.places.get(start_of(kind)) {
            Some(place) if place.kind.load(Ordering::Relaxed) == kind.number() => {
                Cost::from_word(place.cost.load(Ordering::Relaxed))
            }
            _ => self.search(kind),
        }
    }

    #[cold]
    #[inline(never)]
    fn search(&self, kind: LaunchKind) -> Cost {
        self.probe(kind)
            .find(|place| place.kind.load(Ordering::Relaxed) == kind.number())
            .map_or(Cost::UNKNOWN, |place| {
                Cost::from_word(place.cost.load(Ordering::Relaxed))
            })
    }

    /// Changes what is known of a kind.
    pub(crate) fn change(&self, kind: LaunchKind, change: impl Fn(Cost) -> Cost) {
        let Some(place) = self.place(kind) else {
            return;
        };
        let mut seen = place.cost.load(Ordering::Relaxed);
        while let Err(found) = place.cost.compare_exchange_weak(
            seen,
            change(Cost::from_word(seen)).word(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        ) {
            seen = found;
        }
    }

    /// Marks the costs of all kinds as stale.
    pub(crate) fn mark_all_stale(&self) {
        for place in &self.places {
            let stale = |word| Some(Cost::from_word(word).marked_stale().word());
            let _ = place
                .cost
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, stale);
        }
    }

    /// Nothing is known of a kind any more.
    pub(crate) fn forget(&self, kind: LaunchKind) {
        let is_its = |place: &&Place| place.kind.load(Ordering::Relaxed) == kind.number();
        if let Some(place) = self.probe(kind).find(is_its) {
            place.cost.store(Cost::UNKNOWN.word(), Ordering::Relaxed);
        }
    }

    fn place(&self, kind: LaunchKind) -> Option<&Place> {
        for place in self.probe(kind) {
            let found = place.kind.load(Ordering::Relaxed);
            if found == kind.number()
                || (found == 0
                    && place
                        .kind
                        .compare_exchange(0, kind.number(), Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok())
            {
                return Some(place);
            }
        }
        let place = self.probe(kind).next()?;
        place.cost.store(0, Ordering::Relaxed);
        place.kind.store(kind.number(), Ordering::Relaxed);
        Some(place)
    }

    fn probe(&self, kind: LaunchKind) -> impl Iterator<Item = &Place> {
        let (before, after) = self.places.split_at(start_of(kind).min(PLACES));
        after.iter().chain(before).take(PROBES)
    }
}

/// Where a kind's place is if no other one was there before.
#[inline]
fn start_of(kind: LaunchKind) -> usize {
    usize::try_from(kind.number() >> (u64::BITS.wrapping_sub(BITS))).unwrap_or(PLACES)
}
