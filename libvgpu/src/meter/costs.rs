//! Learned costs of the kinds of launches.
//!
//! An open-addressing table without locks. Where all probed entries are in use, a new kind has no entry and costs as
//! much as an average launch of such kinds; it also ages the probed entry with the fewest samples, until that entry can
//! be replaced. So kinds that recur stay, however many kinds occur once, and kinds that no longer recur are replaced.

use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::cost::{Cost, LaunchKind};

const BITS: u32 = 12;
const ENTRIES: usize = 1 << BITS;
const PROBES: usize = 8;

struct Entry {
    kind: AtomicU64,
    cost: AtomicU64,
}

impl Entry {
    fn load(&self) -> Cost {
        Cost::from_word(self.cost.load(Ordering::Relaxed))
    }

    /// Returns how much is known of the kind; of a kind that cannot be measured, everything.
    fn evidence(&self) -> u8 {
        let cost = self.load();
        if cost.is_unmeasurable() {
            u8::MAX
        } else {
            cost.samples()
        }
    }
}

/// The table. All zeroes is empty.
pub(crate) struct Costs {
    entries: [Entry; ENTRIES],
    /// Cost of kinds without an entry.
    others: AtomicU64,
}

impl Costs {
    /// Returns the cost of a kind.
    #[inline]
    pub(crate) fn get(&self, kind: LaunchKind) -> Cost {
        match self.entries.get(start_of(kind)) {
            Some(entry) if entry.kind.load(Ordering::Relaxed) == kind.number() => entry.load(),
            _ => self.search(kind),
        }
    }

    #[cold]
    #[inline(never)]
    fn search(&self, kind: LaunchKind) -> Cost {
        for entry in self.probe(kind) {
            match entry.kind.load(Ordering::Relaxed) {
                0 => return Cost::UNKNOWN,
                found if found == kind.number() => return entry.load(),
                _ => {}
            }
        }
        Cost::from_word(self.others.load(Ordering::Relaxed))
    }

    /// Changes the cost of a kind.
    pub(crate) fn change(&self, kind: LaunchKind, change: impl Fn(Cost) -> Cost) {
        let cost = self.entry(kind).map_or(&self.others, |entry| &entry.cost);
        update(cost, change);
    }

    /// Sets the cost of a kind.
    pub(crate) fn set(&self, kind: LaunchKind, cost: Cost) {
        if let Some(entry) = self.entry(kind) {
            entry.cost.store(cost.word(), Ordering::Relaxed);
        }
    }

    /// Marks the costs of all kinds as stale.
    pub(crate) fn mark_all_stale(&self) {
        for entry in &self.entries {
            update(&entry.cost, Cost::marked_stale);
        }
    }

    /// Drops the cost of a kind.
    pub(crate) fn forget(&self, kind: LaunchKind) {
        let is_its = |entry: &&Entry| entry.kind.load(Ordering::Relaxed) == kind.number();
        if let Some(entry) = self.probe(kind).find(is_its) {
            entry.cost.store(Cost::UNKNOWN.word(), Ordering::Relaxed);
        }
    }

    fn entry(&self, kind: LaunchKind) -> Option<&Entry> {
        for entry in self.probe(kind) {
            let found = entry.kind.load(Ordering::Relaxed);
            if found == kind.number()
                || (found == 0
                    && entry
                        .kind
                        .compare_exchange(0, kind.number(), Ordering::Relaxed, Ordering::Relaxed)
                        .is_ok())
            {
                return Some(entry);
            }
        }
        let entry = self.probe(kind).min_by_key(|entry| entry.evidence())?;
        if entry.evidence() != 0 {
            update(&entry.cost, Cost::aged);
            return None;
        }
        entry.cost.store(0, Ordering::Relaxed);
        entry.kind.store(kind.number(), Ordering::Relaxed);
        Some(entry)
    }

    fn probe(&self, kind: LaunchKind) -> impl Iterator<Item = &Entry> {
        let (before, after) = self.entries.split_at(start_of(kind).min(ENTRIES));
        after.iter().chain(before).take(PROBES)
    }
}

fn update(cost: &AtomicU64, change: impl Fn(Cost) -> Cost) {
    let changed = |word| Some(change(Cost::from_word(word)).word());
    let _ = cost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, changed);
}

/// Returns the index of the first probed entry of a kind.
#[inline]
fn start_of(kind: LaunchKind) -> usize {
    usize::try_from(kind.number() >> (u64::BITS.wrapping_sub(BITS))).unwrap_or(ENTRIES)
}
