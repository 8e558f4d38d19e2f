//! What the memory pools of this process have free for certain.
//!
//! A pool takes memory from the card in chunks and keeps what is freed. CUDA says when it may hand that out again:
//! in the stream in which it was freed at once, in others when that stream has come so far. So what can be allocated
//! without the pool growing follows from what was freed where and not allocated again since.
//!
//! Small allocations lie side by side in chunks, which begin at multiples of their size in the address space. Larger
//! ones have chunks of their own, and what is known of those is that another allocation of the same size fits.
//!
//! Invariants:
//! - Whatever is noted as free is free. What there is no entry to note is forgotten, which costs a refusal at most.
//! - A pool gives chunks back to the card only if nothing in them is allocated. So once it has given some back, which
//!   ones it does not say, only what is free in chunks that something is allocated in counts.

use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::charge_map::{Charge, ChargeMap};
use crate::guard::Guard;
use crate::shared_chunks::Chunk;

/// Chunks in which pools grow.
pub(crate) const CHUNK: u64 = 32 << 20;
/// Largest request that shares a chunk with others.
const LARGEST_SHARING: u64 = CHUNK / 2;
/// What shares a chunk takes multiples of this, and what has its own, of the other.
const STEP: u64 = 512;
const LARGE_STEP: u64 = 2 << 20;
/// Extents that are remembered of all pools together.
const EXTENTS: usize = 128;

/// The stream of what was never used, or can be used in any stream.
pub(crate) const ANY_STREAM: u64 = 0;

/// What an allocation of so many bytes takes of its chunk, or of the card if it has its own.
fn rounded(bytes: u64) -> u64 {
    let step = if bytes > LARGEST_SHARING {
        LARGE_STEP
    } else {
        STEP
    };
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// What a pool grows by at least if it has no room for so many rounded bytes.
fn growth(rounded_bytes: u64) -> u64 {
    if is_shared(rounded_bytes) {
        CHUNK
    } else {
        rounded_bytes
    }
}

fn is_shared(rounded_bytes: u64) -> bool {
    rounded_bytes <= LARGEST_SHARING
}

fn chunk_of(address: u64) -> u64 {
    address & !(CHUNK.saturating_sub(1))
}

/// The chunk that an allocation from any pool lies in, or all of memory that is larger.
pub(crate) fn chunk_around(start: u64, bytes: u64) -> Chunk {
    let taken = rounded(bytes);
    if is_shared(taken) {
        Chunk {
            address: chunk_of(start),
            bytes: CHUNK,
        }
    } else {
        Chunk {
            address: start,
            bytes: taken,
        }
    }
}

/// Whether all of it lies in one chunk.
fn is_in_one_chunk(start: u64, bytes: u64) -> bool {
    chunk_of(start) == chunk_of(start.saturating_add(bytes.saturating_sub(1)))
}

/// The free part of a chunk, or all of a chunk that one allocation had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    pool: u64,
    /// Where it was freed, as the hooks of pools name streams.
    stream: u64,
    start: u64,
    bytes: u64,
    is_whole_chunk: bool,
    /// The pool has given something back since: only a chunk that something is allocated in is certainly there.
    is_invalidated: bool,
}

impl Extent {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end()
    }

    /// Both as one, if they lie side by side in one chunk.
    fn joined(&self, other: &Self) -> Option<Self> {
        let is_near = self.end() == other.start || other.end() == self.start;
        let is_alike = (self.pool, self.stream) == (other.pool, other.stream)
            && !self.is_whole_chunk
            && !other.is_whole_chunk
            && chunk_of(self.start) == chunk_of(other.start);
        (is_near && is_alike).then(|| Self {
            start: self.start.min(other.start),
            bytes: self.bytes.saturating_add(other.bytes),
            is_invalidated: self.is_invalidated || other.is_invalidated,
            ..*self
        })
    }

    /// Whether an allocation of so many rounded bytes fits.
    fn fits(&self, bytes: u64) -> bool {
        if is_shared(bytes) {
            !self.is_whole_chunk && self.bytes >= bytes
        } else {
            self.is_whole_chunk && self.bytes == bytes
        }
    }
}

/// Where an [`Extent`] is remembered. The last word has its marks.
struct ExtentEntry {
    pool: AtomicU64,
    stream: AtomicU64,
    start: AtomicU64,
    bytes: AtomicU64,
    marks: AtomicU32,
}

const WHOLE_CHUNK: u32 = 1;
const INVALIDATED: u32 = 2;

impl ExtentEntry {
    fn load(&self) -> Extent {
        let marks = self.marks.load(Ordering::Relaxed);
        Extent {
            pool: self.pool.load(Ordering::Relaxed),
            stream: self.stream.load(Ordering::Relaxed),
            start: self.start.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            is_whole_chunk: marks & WHOLE_CHUNK != 0,
            is_invalidated: marks & INVALIDATED != 0,
        }
    }

    fn store(&self, extent: Extent) {
        let whole = if extent.is_whole_chunk {
            WHOLE_CHUNK
        } else {
            0
        };
        let invalidated = if extent.is_invalidated {
            INVALIDATED
        } else {
            0
        };
        self.pool.store(extent.pool, Ordering::Relaxed);
        self.stream.store(extent.stream, Ordering::Relaxed);
        self.start.store(extent.start, Ordering::Relaxed);
        self.bytes.store(extent.bytes, Ordering::Relaxed);
        self.marks.store(whole | invalidated, Ordering::Relaxed);
    }
}

/// Allocations from the pools of this process, and what is free between them. All zeroes is nothing.
pub(crate) struct PoolFreeSpace {
    /// By pointer; `context` is the pool.
    allocated: ChargeMap,
    /// Whether anything may be allocated that is not remembered there.
    is_incomplete: AtomicBool,
    guard: AtomicU32,
    count: AtomicU32,
    extents: [ExtentEntry; EXTENTS],
}

/// What a pool has become by an allocation, beside what the allocation took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SizeChange {
    /// What was charged for it before.
    pub(crate) before_bytes: u64,
    /// What it has now.
    pub(crate) after_bytes: u64,
}

impl PoolFreeSpace {
    /// Notes what was allocated from a pool, which thereby changed as `change` says.
    pub(crate) fn allocate(&self, pool: u64, card: u8, start: u64, bytes: u64, change: SizeChange) {
        let taken = rounded(bytes);
        let end = start.saturating_add(taken);
        let _guard = Guard::acquire(&self.guard);
        let was_known = self.find(|extent| extent.start <= start && end <= extent.end());
        self.cut(start, end);
        // Of a pointer that was freed in a way that is not known here.
        self.allocated.remove(start);
        let grown = change.after_bytes.saturating_sub(change.before_bytes);
        if was_known.is_none() && grown < growth(taken) {
            // Either it lies in memory that was forgotten here, or other chunks went as one came.
            self.invalidate_all_of(pool);
        }
        let is_new_chunk = was_known.is_none() && grown == CHUNK && start == chunk_of(start);
        if is_new_chunk && is_shared(taken) && !self.is_anything_in(start) {
            self.push(Extent {
                pool,
                stream: ANY_STREAM,
                start: end,
                bytes: CHUNK.saturating_sub(taken),
                is_whole_chunk: false,
                is_invalidated: false,
            });
        }
        let held = Charge {
            bytes: taken,
            card,
            context: pool,
        };
        self.remember(start, held);
    }

    fn remember(&self, start: u64, held: Charge) {
        if !self.allocated.insert(start, held) {
            self.is_incomplete.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the pointer is what a pool gave.
    pub(crate) fn is_from_pool(&self, start: u64) -> bool {
        self.allocated.get(start).is_some()
    }

    /// The card of an allocation from a pool and the chunk that it lies in.
    pub(crate) fn chunk_of(&self, start: u64) -> Option<(u8, Chunk)> {
        let held = self.allocated.get(start)?;
        Some((held.card, chunk_around(start, held.bytes)))
    }

    /// Notes that an allocation is freed in a stream, and returns what it was. The caller is about to ask the driver
    /// for it, in the passage of a [`crate::guard::SharedGate`].
    pub(crate) fn free(&self, start: u64, stream: Option<u64>) -> Option<Charge> {
        let held = self.allocated.remove(start)?;
        let is_whole_chunk = !is_shared(held.bytes);
        if let Some(stream) = stream
            && (is_whole_chunk || is_in_one_chunk(start, held.bytes))
        {
            let _guard = Guard::acquire(&self.guard);
            self.add(Extent {
                pool: held.context,
                stream,
                start,
                bytes: held.bytes,
                is_whole_chunk,
                is_invalidated: false,
            });
        }
        Some(held)
    }

    /// The driver did not free it after all.
    pub(crate) fn restore(&self, start: u64, held: Charge) {
        let _guard = Guard::acquire(&self.guard);
        self.cut(start, start.saturating_add(held.bytes));
        self.remember(start, held);
    }

    /// Whether the pool has room for an allocation in that stream without growing. `has_passed` says of another stream
    /// whether it has come as far as what was freed in it.
    pub(crate) fn has_space(
        &self,
        pool: u64,
        stream: u64,
        bytes: u64,
        has_passed: impl Fn(u64) -> bool,
    ) -> bool {
        let taken = rounded(bytes);
        let _guard = Guard::acquire(&self.guard);
        let fits = |extent: &Extent| {
            extent.pool == pool
                && extent.fits(taken)
                && (!extent.is_invalidated || self.is_allocated_in(pool, extent.start))
        };
        let is_in_order = |extent: &Extent| [stream, ANY_STREAM].contains(&extent.stream);
        self.find(|extent| is_in_order(extent) && fits(extent))
            .or_else(|| self.find(|extent| fits(extent) && has_passed(extent.stream)))
            .is_some()
    }

    /// The pool has given something back to the card.
    pub(crate) fn invalidate(&self, pool: u64) {
        let _guard = Guard::acquire(&self.guard);
        self.invalidate_all_of(pool);
    }

    /// Nothing is known of the pool any more.
    pub(crate) fn forget_pool(&self, pool: u64) {
        self.is_incomplete.store(true, Ordering::Relaxed);
        self.end_pool(pool, |_| {});
    }

    /// How much is allocated in a pool, of which everything that is allocated is known; else `None`.
    pub(crate) fn allocated_in(&self, pool: u64) -> Option<u64> {
        let mut bytes = 0u64;
        self.allocated.for_each(|_, held| {
            if held.context == pool {
                bytes = bytes.saturating_add(held.bytes);
            }
        });
        (!self.is_incomplete.load(Ordering::Relaxed)).then_some(bytes)
    }

    /// The pool is gone. Hands everything to `each` that is allocated in it.
    pub(crate) fn end_pool(&self, pool: u64, mut each: impl FnMut(u64)) {
        self.allocated
            .remove_all(|held| held.context == pool, |start, _| each(start));
        self.forget(|extent| extent.pool == pool);
    }

    /// The stream is gone; its handle may become another one's.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.forget(|extent| extent.stream == stream);
    }

    /// A context is gone, and whatever went with it.
    pub(crate) fn forget_all(&self) {
        self.allocated.remove_all(
            |_| true,
            |_, _| self.is_incomplete.store(true, Ordering::Relaxed),
        );
        self.forget(|_| true);
    }

    fn forget(&self, is_gone: impl Fn(&Extent) -> bool) {
        let _guard = Guard::acquire(&self.guard);
        while let Some((index, _)) = self.find(&is_gone) {
            self.remove(index);
        }
    }

    fn len(&self) -> usize {
        usize::try_from(self.count.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn find(&self, is_wanted: impl Fn(&Extent) -> bool) -> Option<(usize, Extent)> {
        let extents = self.extents.iter().take(self.len()).map(ExtentEntry::load);
        extents.enumerate().find(|(_, extent)| is_wanted(extent))
    }

    fn remove(&self, index: usize) {
        let last = self.len().saturating_sub(1);
        if let (Some(entry), Some(moved)) = (self.extents.get(index), self.extents.get(last)) {
            entry.store(moved.load());
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Remembers an extent, if need be in the entry of a smaller one.
    fn push(&self, extent: Extent) {
        let index = self.len();
        if let Some(entry) = self.extents.get(index) {
            entry.store(extent);
            self.count.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let smallest = self.extents.iter().min_by_key(|entry| entry.load().bytes);
        if let Some(entry) = smallest.filter(|entry| entry.load().bytes < extent.bytes) {
            entry.store(extent);
        }
    }

    /// Remembers an extent as one with those beside it.
    fn add(&self, extent: Extent) {
        let mut extent = extent;
        while let Some((index, joined)) = self
            .find(|other| extent.joined(other).is_some())
            .and_then(|(index, other)| Some((index, extent.joined(&other)?)))
        {
            self.remove(index);
            extent = joined;
        }
        self.push(extent);
    }

    /// Takes an address range out of all extents, whosever they are: another pool may have been where it is now.
    fn cut(&self, start: u64, end: u64) {
        while let Some((index, extent)) = self.find(|extent| extent.overlaps(start, end)) {
            self.remove(index);
            if extent.is_whole_chunk {
                continue;
            }
            for (from, to) in [(extent.start, start), (end, extent.end())] {
                if from < to {
                    self.push(Extent {
                        start: from,
                        bytes: to.saturating_sub(from),
                        ..extent
                    });
                }
            }
        }
    }

    fn invalidate_all_of(&self, pool: u64) {
        while let Some((index, _)) =
            self.find(|extent| extent.pool == pool && extent.is_whole_chunk)
        {
            self.remove(index);
        }
        for entry in self.extents.iter().take(self.len()) {
            let extent = entry.load();
            if extent.pool == pool {
                entry.store(Extent {
                    is_invalidated: true,
                    ..extent
                });
            }
        }
    }

    /// Whether anything of the pool's is allocated in the chunk of that address.
    fn is_allocated_in(&self, pool: u64, address: u64) -> bool {
        let mut is_any = false;
        self.allocated.for_each(|start, held| {
            is_any |= held.context == pool
                && is_shared(held.bytes)
                && chunk_of(start) == chunk_of(address);
        });
        is_any
    }

    /// Whether anything is known to lie in that chunk.
    fn is_anything_in(&self, chunk: u64) -> bool {
        let mut is_any = self
            .find(|extent| extent.overlaps(chunk, chunk.saturating_add(CHUNK)))
            .is_some();
        self.allocated
            .for_each(|start, _| is_any |= chunk_of(start) == chunk);
        is_any
    }
}
