//! Maps of the process from a pointer or handle to a [`Record`], such as the charge of an allocation.
//!
//! A map without an allocator: levels of open-addressing tables, each twice as large as the previous one, mapped
//! when the smaller ones are full. Entries never move. A writer locks its entry for a few instructions; a reader
//! reads again if the entry was written meanwhile.
//!
//! Invariants:
//! - A key is inserted after libcuda returned it and removed before libcuda is asked to free it, so it is in the
//!   map at most once. A reference count is changed in place, by one thread at a time, so no thread misses the key.
//! - A used entry never becomes empty again, only reusable; a search ends at an empty entry.
//! - Of several threads that remove the same key, one succeeds: libcuda reports a double free to the program, and
//!   the charge is released once.

use core::marker::PhantomData;
use core::mem::size_of;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering, fence};

use crate::system::sys;

const LEVELS: usize = 20;
const FIRST_CAPACITY: usize = 1024;
/// Entries probed per level.
const PROBES: usize = 64;

const EMPTY: u64 = 0;
const REUSABLE: u64 = 1;
/// Separates small handles (1, 2, …) from the marks above.
const KEY_BIT: u64 = 1 << 63;

/// Bits of the small number of a record; larger than any GPU and any address of a GPU.
const SMALL_BITS: u32 = 48;

/// A value of a map, stored in two words.
pub(crate) trait Record: Copy {
    fn to_words(self) -> [u64; 2];
    fn from_words(words: [u64; 2]) -> Self;
}

/// Packs a number of 48 bits and a byte.
pub(crate) const fn pack(small: u64, byte: u8) -> u64 {
    ((byte as u64) << SMALL_BITS) | (small & ((1 << SMALL_BITS) - 1))
}

/// Reverts [`pack`].
pub(crate) const fn unpack(word: u64) -> (u64, u8) {
    let [.., byte, _] = word.to_le_bytes();
    (word & ((1 << SMALL_BITS) - 1), byte)
}

/// Defines a record of a number of 48 bits, the index of a GPU's first share, and a number of 64 bits.
macro_rules! record {
    ($(#[$outer:meta])* $name:ident {
        $(#[$first:meta])* $small:ident,
        $(#[$second:meta])* gpu,
        $(#[$third:meta])* $large:ident $(,)?
    }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name {
            $(#[$first])*
            pub(crate) $small: u64,
            $(#[$second])*
            pub(crate) gpu: u8,
            $(#[$third])*
            pub(crate) $large: u64,
        }

        impl $crate::accounts::charge_map::Record for $name {
            fn to_words(self) -> [u64; 2] {
                [$crate::accounts::charge_map::pack(self.$small, self.gpu), self.$large]
            }

            fn from_words([packed, $large]: [u64; 2]) -> Self {
                let ($small, gpu) = $crate::accounts::charge_map::unpack(packed);
                Self { $small, gpu, $large }
            }
        }
    };
}
pub(crate) use record;

record! {
    /// Charge of an allocation.
    Charge {
        /// Its size.
        bytes,
        /// Index of the GPU's first share.
        gpu,
        /// The context whose end frees it, 0 if none.
        context,
    }
}

struct Entry {
    key: AtomicU64,
    /// Sequence number; odd during a write.
    sequence: AtomicU64,
    words: [AtomicU64; 2],
}

/// The map. All zeroes is empty.
pub(crate) struct ChargeMap<R> {
    levels: [AtomicPtr<Entry>; LEVELS],
    record: PhantomData<R>,
}

impl<R: Record> ChargeMap<R> {
    /// Inserts `record` at `key`. Returns `false` without memory for the entry: then a charge stays until the process
    /// ends.
    pub(crate) fn insert(&self, key: u64, record: R) -> bool {
        let key = key ^ KEY_BIT;
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(entries) = grow(pointer, level) else {
                return false;
            };
            for entry in probe(entries, key) {
                if entry.insert(key, record) {
                    return true;
                }
            }
        }
        false
    }

    /// Removes the record at `key` and returns it.
    pub(crate) fn remove(&self, key: u64) -> Option<R> {
        self.change(key, |_| None)
    }

    /// Replaces the record at `key` by the result of `to`, or removes it, and returns the previous one.
    ///
    /// Other threads that search the key wait meanwhile, so `to` must be fast and must not access the map.
    pub(crate) fn change(&self, key: u64, to: impl FnOnce(&R) -> Option<R>) -> Option<R> {
        let key = key ^ KEY_BIT;
        self.find(key)?.change(|found| found == key, to)
    }

    /// Returns the record at `key`.
    pub(crate) fn get(&self, key: u64) -> Option<R> {
        let key = key ^ KEY_BIT;
        let (found, record) = self.find(key)?.read();
        (found == key).then_some(record)
    }

    /// Removes all records for which `ends` is true and passes them to `each`.
    pub(crate) fn remove_all(&self, ends: impl Fn(&R) -> bool, mut each: impl FnMut(u64, R)) {
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(entries) = existing(pointer, level) else {
                return;
            };
            for entry in entries {
                let (key, record) = entry.read();
                if is_free(key) || !ends(&record) {
                    continue;
                }
                // A record that another thread inserted meanwhile stays unless `ends` is true for it.
                let removed = entry.change(
                    |found| found == key,
                    |record| Some(*record).filter(|record| !ends(record)),
                );
                if let Some(record) = removed.filter(&ends) {
                    each(key ^ KEY_BIT, record);
                }
            }
        }
    }

    /// Passes all records to `each`.
    pub(crate) fn for_each(&self, mut each: impl FnMut(u64, R)) {
        for (level, pointer) in self.levels.iter().enumerate() {
            let Some(entries) = existing(pointer, level) else {
                return;
            };
            for entry in entries {
                let (key, record) = entry.read();
                if !is_free(key) {
                    each(key ^ KEY_BIT, record);
                }
            }
        }
    }

    /// Returns the number of records for which `matches` is true.
    pub(crate) fn count(&self, matches: impl Fn(&R) -> bool) -> usize {
        let mut count = 0usize;
        self.for_each(|_, record| count = count.saturating_add(usize::from(matches(&record))));
        count
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
    /// Stores `record` at `key` if the entry is free.
    fn insert<R: Record>(&self, key: u64, record: R) -> bool {
        if !is_free(self.key.load(Ordering::Relaxed)) {
            return false;
        }
        let _writer = EntryWriter::begin(self);
        // Another thread may have used the entry since.
        if !is_free(self.key.load(Ordering::Relaxed)) {
            return false;
        }
        self.store(record);
        self.key.store(key, Ordering::Release);
        true
    }

    /// Replaces the record by the result of `to`, or removes it, if the key matches. Returns the previous record.
    fn change<R: Record>(
        &self,
        matches: impl FnOnce(u64) -> bool,
        to: impl FnOnce(&R) -> Option<R>,
    ) -> Option<R> {
        let _writer = EntryWriter::begin(self);
        if !matches(self.key.load(Ordering::Relaxed)) {
            return None;
        }
        let before = self.load();
        match to(&before) {
            Some(after) => self.store(after),
            None => self.key.store(REUSABLE, Ordering::Release),
        }
        Some(before)
    }

    /// Returns the key and the record, which is invalid if the key is a mark.
    fn read<R: Record>(&self) -> (u64, R) {
        loop {
            let sequence = self.sequence.load(Ordering::Acquire);
            let read = (self.key.load(Ordering::Relaxed), self.load());
            // The data is read before the sequence number is read again: see `EntryWriter::begin`.
            fence(Ordering::Acquire);
            if sequence.is_multiple_of(2) && self.sequence.load(Ordering::Relaxed) == sequence {
                return read;
            }
            sys::yield_now();
        }
    }

    fn load<R: Record>(&self) -> R {
        let [first, second] = &self.words;
        R::from_words([first, second].map(|word| word.load(Ordering::Relaxed)))
    }

    fn store<R: Record>(&self, record: R) {
        for (word, value) in self.words.iter().zip(record.to_words()) {
            word.store(value, Ordering::Relaxed);
        }
    }
}

/// Write lock of an entry.
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
                // A reader that sees any of the following stores sees the odd sequence number.
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

/// Returns the entries to probe for `key`, in order.
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
