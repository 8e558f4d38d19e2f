//! What the process holds: which pointer or handle was charged how many bytes, to which card, in which context.
//!
//! A map without an allocator: levels of open-addressing tables, each twice as large as the one before, mapped when the
//! smaller ones are full. Nothing is ever moved. Whoever writes to a entry keeps others from it for as long, a few
//! instructions; whoever reads one reads again if somebody has written meanwhile.
//!
//! Invariants:
//! - A key is inserted after the driver returned it and removed before the driver is asked to free it, so it
//!   is in the map at most once. What counts how often the driver gave the same key is changed in its entry, by one
//!   thread at a time, so that none finds it missing.
//! - A entry that was used never becomes empty again, only reusable; a search that meets an empty entry is over.
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
/// Moves small handles (1, 2, …) away from the marks above.
const KEY_BIT: u64 = 1 << 63;

const BYTES_BITS: u32 = 48;
const BYTES_MASK: u64 = (1 << BYTES_BITS) - 1;

/// One thing that was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge {
    /// How much.
    pub(crate) bytes: u64,
    /// Index of the card's first share.
    pub(crate) card: u8,
    /// The context whose end frees it, 0 if none does.
    pub(crate) context: u64,
}

struct Entry {
    key: AtomicU64,
    /// How often it was written; odd while somebody writes.
    sequence: AtomicU64,
    packed: AtomicU64,
    context: AtomicU64,
}

/// The map. All zeroes is an empty one.
pub(crate) struct ChargeMap {
    levels: [AtomicPtr<Entry>; LEVELS],
}

impl ChargeMap {
    /// Remembers `held` under `key`. `false` if there is no memory for it: then it stays charged until the
    /// process ends.
    pub(crate) fn insert(&self, key: u64, held: Charge) -> bool {
        let key = key ^ KEY_BIT;
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(entries) = grow(pointer, level) else {
                return false;
            };
            for entry in probe(entries, key) {
                if entry.insert(key, held) {
                    return true;
                }
            }
        }
        false
    }

    /// Forgets what is under `key` and returns it.
    pub(crate) fn remove(&self, key: u64) -> Option<Charge> {
        self.change(key, |_| None)
    }

    /// Makes what is under `key` what `to` says, or forgets it, and returns what it was.
    ///
    /// Whoever looks for the key meanwhile waits, so `to` must not take long, nor look into the map.
    pub(crate) fn change(
        &self,
        key: u64,
        to: impl FnOnce(&Charge) -> Option<Charge>,
    ) -> Option<Charge> {
        let key = key ^ KEY_BIT;
        self.find(key)?.change(|found| found == key, to)
    }

    /// What is under `key`.
    pub(crate) fn get(&self, key: u64) -> Option<Charge> {
        let key = key ^ KEY_BIT;
        let (found, held) = self.find(key)?.read();
        (found == key).then_some(held)
    }

    /// Forgets everything for which `ends` says yes, and hands it to `each`.
    pub(crate) fn remove_all(
        &self,
        ends: impl Fn(&Charge) -> bool,
        mut each: impl FnMut(u64, Charge),
    ) {
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(entries) = existing(pointer, level) else {
                return;
            };
            for entry in entries {
                let (key, held) = entry.read();
                if is_free(key) || !ends(&held) {
                    continue;
                }
                // Another one's by now stays, unless it ends too.
                let removed = entry.change(
                    |found| found == key,
                    |held| Some(*held).filter(|held| !ends(held)),
                );
                if let Some(held) = removed.filter(&ends) {
                    each(key ^ KEY_BIT, held);
                }
            }
        }
    }

    /// Hands everything to `each`.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u64, Charge)) {
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(entries) = existing(pointer, level) else {
                return;
            };
            for entry in entries {
                let (key, held) = entry.read();
                if !is_free(key) {
                    each(key ^ KEY_BIT, held);
                }
            }
        }
    }

    fn find(&self, key: u64) -> Option<&Entry> {
        for (level, pointer) in self.levels.iter().enumerate() {
            for entry in probe(existing(pointer, level)?, key) {
                match entry.key.load(Ordering::Acquire) {
                    EMPTY => break,
                    found if found == key => return Some(entry),
                    _ => {}
                }
            }
        }
        None
    }
}

impl Entry {
    /// Puts `held` there under `key`, if the entry is free.
    fn insert(&self, key: u64, held: Charge) -> bool {
        if !is_free(self.key.load(Ordering::Relaxed)) {
            return false;
        }
        let _writer = EntryWriter::begin(self);
        // It may have been taken since.
        if !is_free(self.key.load(Ordering::Relaxed)) {
            return false;
        }
        self.store(held);
        self.key.store(key, Ordering::Release);
        true
    }

    /// Makes what is there what `to` says, or forgets it, if its key is the right one. Returns what it was.
    fn change(
        &self,
        is_it: impl FnOnce(u64) -> bool,
        to: impl FnOnce(&Charge) -> Option<Charge>,
    ) -> Option<Charge> {
        let _writer = EntryWriter::begin(self);
        if !is_it(self.key.load(Ordering::Relaxed)) {
            return None;
        }
        let before = self.load();
        match to(&before) {
            Some(after) => self.store(after),
            None => self.key.store(REUSABLE, Ordering::Release),
        }
        Some(before)
    }

    /// The key and what is there under it, which means nothing if the key is a mark.
    fn read(&self) -> (u64, Charge) {
        loop {
            let sequence = self.sequence.load(Ordering::Acquire);
            let read = (self.key.load(Ordering::Relaxed), self.load());
            // What was read is looked at before the number is looked at again: see `EntryWriter::begin`.
            fence(Ordering::Acquire);
            if sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence {
                return read;
            }
            sys::yield_now();
        }
    }

    fn load(&self) -> Charge {
        let packed = self.packed.load(Ordering::Relaxed);
        let [card, ..] = (packed >> BYTES_BITS).to_le_bytes();
        Charge {
            bytes: packed & BYTES_MASK,
            card,
            context: self.context.load(Ordering::Relaxed),
        }
    }

    fn store(&self, held: Charge) {
        let packed = (u64::from(held.card) << BYTES_BITS) | (held.bytes & BYTES_MASK);
        self.packed.store(packed, Ordering::Relaxed);
        self.context.store(held.context, Ordering::Relaxed);
    }
}

/// Somebody writes to a entry.
struct EntryWriter<'a>(&'a Entry);

impl<'a> EntryWriter<'a> {
    fn begin(entry: &'a Entry) -> Self {
        loop {
            let sequence = entry.sequence.load(Ordering::Relaxed);
            let odd = sequence.wrapping_add(1);
            let begins = sequence.is_multiple_of(2)
                && entry
                    .sequence
                    .compare_exchange(sequence, odd, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok();
            if begins {
                // Whoever sees any of what follows sees that somebody writes.
                fence(Ordering::Release);
                return Self(entry);
            }
            sys::yield_now();
        }
    }
}

impl Drop for EntryWriter<'_> {
    fn drop(&mut self) {
        self.0.sequence.fetch_add(1, Ordering::Release);
    }
}

fn is_free(key: u64) -> bool {
    matches!(key, EMPTY | REUSABLE)
}

fn capacity(level: usize) -> usize {
    FIRST_CAPACITY << level
}

/// The entries to look at for `key`, in order.
fn probe(entries: &[Entry], key: u64) -> impl Iterator<Item = &Entry> {
    // Fibonacci hashing; capacities are powers of two.
    let bits = entries.len().trailing_zeros();
    let hash = key
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_shr(64u32.saturating_sub(bits));
    let start = usize::try_from(hash).unwrap_or(0);
    let (before, after) = entries.split_at(start.min(entries.len()));
    after.iter().chain(before).take(PROBES)
}

fn existing(pointer: &AtomicPtr<Entry>, level: usize) -> Option<&[Entry]> {
    let entries = NonNull::new(pointer.load(Ordering::Acquire))?;
    // SAFETY: `grow` mapped that many zeroed entries, which are never unmapped.
    Some(unsafe { NonNull::slice_from_raw_parts(entries, capacity(level)).as_ref() })
}

fn grow(pointer: &AtomicPtr<Entry>, level: usize) -> Option<&[Entry]> {
    if pointer.load(Ordering::Acquire).is_null() {
        let size = capacity(level).saturating_mul(size_of::<Entry>());
        let entries = sys::map_zeroes(size)?;
        let null = core::ptr::null_mut();
        let installed = pointer.compare_exchange(
            null,
            entries.as_ptr().cast(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        if installed.is_err() {
            sys::unmap(entries, size);
        }
    }
    existing(pointer, level)
}
