//! What the process holds: which pointer or handle was charged how many bytes, to which card, in which context.
//!
//! A map without locks and without an allocator: levels of open-addressing tables, each twice as large as the
//! one before, mapped when the smaller ones are full. Nothing is ever moved, so that threads need not wait for
//! each other.
//!
//! Invariants:
//! - A key is inserted after the driver returned it and removed before the driver is asked to free it, so it
//!   is in the map at most once.
//! - A place that was used never becomes empty again, only reusable; a search that meets an empty place is over.
//! - Of several threads that remove the same key, one succeeds (a program that frees twice is told so by the
//!   driver, and is not paid twice by us).

use core::mem::size_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

use crate::sys;

const LEVELS: usize = 20;
const FIRST_CAPACITY: usize = 1024;
/// Places looked at in one level.
const PROBES: usize = 64;

const EMPTY: u64 = 0;
const REUSABLE: u64 = 1;
const BUSY: u64 = 2;
/// Moves small handles (1, 2, …) away from the marks above.
const KEY_BIT: u64 = 1 << 63;

const BYTES_BITS: u32 = 48;
const BYTES_MASK: u64 = (1 << BYTES_BITS) - 1;

/// One thing that was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    /// How much.
    pub(crate) bytes: u64,
    /// Index of the card's first share.
    pub(crate) card: u8,
    /// The context whose end frees it, 0 if none does.
    pub(crate) context: u64,
}

struct Place {
    key: AtomicU64,
    /// How often it was taken: the same key may come back while somebody reads.
    takings: AtomicU64,
    charge: AtomicU64,
    context: AtomicU64,
}

/// The map. All zeroes is an empty one.
pub(crate) struct HeldMap {
    levels: [AtomicPtr<Place>; LEVELS],
}

impl HeldMap {
    /// Remembers `held` under `key`. `false` if there is no memory for it: then it stays charged until the
    /// process ends.
    pub(crate) fn insert(&self, key: u64, held: Held) -> bool {
        let key = key ^ KEY_BIT;
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(places) = grow(pointer, level) else {
                return false;
            };
            for place in probe(places, key) {
                if place.take(key, held) {
                    return true;
                }
            }
        }
        false
    }

    /// Forgets what is under `key` and returns it.
    pub(crate) fn remove(&self, key: u64) -> Option<Held> {
        let key = key ^ KEY_BIT;
        let place = self.find(key)?;
        place
            .key
            .compare_exchange(key, BUSY, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        // Nobody else changes a busy place.
        let held = place.held();
        place.key.store(REUSABLE, Ordering::Release);
        Some(held)
    }

    /// What is under `key`.
    pub(crate) fn get(&self, key: u64) -> Option<Held> {
        let key = key ^ KEY_BIT;
        let place = self.find(key)?;
        loop {
            let takings = place.takings.load(Ordering::Acquire);
            if place.key.load(Ordering::Acquire) != key {
                return None;
            }
            let held = place.held();
            // What was read is looked at before the place is looked at again: see `Place::take`.
            fence(Ordering::Acquire);
            if place.key.load(Ordering::Relaxed) != key {
                return None;
            }
            if place.takings.load(Ordering::Relaxed) == takings {
                return Some(held);
            }
        }
    }

    /// Forgets everything for which `ends` says yes, and hands it to `each`.
    pub(crate) fn remove_all(&self, ends: impl Fn(&Held) -> bool, mut each: impl FnMut(u64, Held)) {
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(places) = existing(pointer, level) else {
                return;
            };
            for place in places {
                let key = place.key.load(Ordering::Acquire);
                if matches!(key, EMPTY | REUSABLE | BUSY) {
                    continue;
                }
                let held = place.held();
                if ends(&held)
                    && place
                        .key
                        .compare_exchange(key, REUSABLE, Ordering::AcqRel, Ordering::Relaxed)
                        .is_ok()
                {
                    each(key ^ KEY_BIT, held);
                }
            }
        }
    }

    /// Hands everything to `each`.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u64, Held)) {
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(places) = existing(pointer, level) else {
                return;
            };
            for place in places {
                let key = place.key.load(Ordering::Acquire);
                if !matches!(key, EMPTY | REUSABLE | BUSY) {
                    each(key ^ KEY_BIT, place.held());
                }
            }
        }
    }

    fn find(&self, key: u64) -> Option<&Place> {
        for (level, pointer) in self.levels.iter().enumerate() {
            for place in probe(existing(pointer, level)?, key) {
                match place.key.load(Ordering::Acquire) {
                    EMPTY => break,
                    found if found == key => return Some(place),
                    _ => {}
                }
            }
        }
        None
    }
}

impl Place {
    fn take(&self, key: u64, held: Held) -> bool {
        let seen = self.key.load(Ordering::Relaxed);
        if !matches!(seen, EMPTY | REUSABLE)
            || self
                .key
                .compare_exchange(seen, BUSY, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
        {
            return false;
        }
        // Whoever sees any of what follows sees that the place is not the former key's any more.
        self.takings.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        let charge = (u64::from(held.card) << BYTES_BITS) | (held.bytes & BYTES_MASK);
        self.charge.store(charge, Ordering::Relaxed);
        self.context.store(held.context, Ordering::Relaxed);
        self.key.store(key, Ordering::Release);
        true
    }

    fn held(&self) -> Held {
        let charge = self.charge.load(Ordering::Relaxed);
        let [card, ..] = (charge >> BYTES_BITS).to_le_bytes();
        Held {
            bytes: charge & BYTES_MASK,
            card,
            context: self.context.load(Ordering::Relaxed),
        }
    }
}

fn capacity(level: usize) -> usize {
    FIRST_CAPACITY << level
}

/// The places to look at for `key`, in order.
fn probe(places: &[Place], key: u64) -> impl Iterator<Item = &Place> {
    // Fibonacci hashing; capacities are powers of two.
    let bits = places.len().trailing_zeros();
    let hash = key
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_shr(64u32.saturating_sub(bits));
    let start = usize::try_from(hash).unwrap_or(0);
    let (before, after) = places.split_at(start.min(places.len()));
    after.iter().chain(before).take(PROBES)
}

fn existing(pointer: &AtomicPtr<Place>, level: usize) -> Option<&[Place]> {
    let places = NonNull::new(pointer.load(Ordering::Acquire))?;
    // SAFETY: `grow` mapped that many zeroed places, which are never unmapped.
    Some(unsafe { NonNull::slice_from_raw_parts(places, capacity(level)).as_ref() })
}

fn grow(pointer: &AtomicPtr<Place>, level: usize) -> Option<&[Place]> {
    if pointer.load(Ordering::Acquire).is_null() {
        let size = capacity(level).saturating_mul(size_of::<Place>());
        let places = sys::map_zeroes(size)?;
        let null = core::ptr::null_mut();
        let installed = pointer.compare_exchange(
            null,
            places.as_ptr().cast(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        if installed.is_err() {
            sys::unmap(places, size);
        }
    }
    existing(pointer, level)
}
