//! Free space that is certain in the memory pools of this process.
//!
//! A pool takes memory from the GPU in chunks and caches freed memory. CUDA defines its reuse: in the stream of the
//! free immediately, in other streams after that stream has completed the free. So the space that a pool can
//! allocate without growth follows from the frees and the later allocations.
//!
//! Small allocations lie side by side in chunks, which begin at multiples of their size in the address space. A
//! larger allocation has a chunk of its own, which fits another allocation of the same size.
//!
//! Invariants:
//! - Space recorded as free is free. Space that exceeds the table is dropped, which costs at most a denial.
//! - A pool returns a chunk to the GPU only if it has no allocation, and does not report which chunk. So after a
//!   pool has shrunk, only free space in chunks with an allocation counts.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::accounts::charge_map::{ChargeMap, record};
use crate::accounts::shared_chunks::Chunk;
use crate::system::guard::Guard;

/// Size of the chunks of pools.
pub(crate) const CHUNK: u64 = 32 << 20;
/// Largest request that shares a chunk.
const LARGEST_SHARING: u64 = CHUNK / 2;
/// Granularity of requests that share a chunk, and of requests with a chunk of their own.
const STEP: u64 = 512;
const LARGE_STEP: u64 = 2 << 20;
/// Size of the table of extents, for all pools together.
const EXTENTS: usize = 128;

/// Stream of an extent that was never used: any stream can use it.
pub(crate) const ANY_STREAM: u64 = 0;

/// Returns the size of an allocation in its chunk, or of its own chunk.
fn rounded(bytes: u64) -> u64 {
    let step = if bytes > LARGEST_SHARING {
        LARGE_STEP
    } else {
        STEP
    };
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// Returns the smallest growth of a pool without free space for `rounded_bytes`.
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

/// Returns the chunk of an allocation from any pool; for a large allocation, the allocation itself.
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

/// Returns whether the range lies in one chunk.
fn is_in_one_chunk(start: u64, bytes: u64) -> bool {
    chunk_of(start) == chunk_of(start.saturating_add(bytes.saturating_sub(1)))
}

/// A free part of a chunk, or a free chunk of one large allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    pool: u64,
    /// Key of the stream in which it was freed.
    stream: u64,
    start: u64,
    bytes: u64,
    is_whole_chunk: bool,
    /// The pool has shrunk since: the extent counts only if its chunk has an allocation.
    is_invalidated: bool,
}

impl Extent {
    fn end(&self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    fn overlaps(&self, start: u64, end: u64) -> bool {
        self.start < end && start < self.end()
    }

    /// Returns the union of both if they are adjacent in one chunk.
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

    /// Returns whether an allocation of `bytes`, rounded, fits.
    fn fits(&self, bytes: u64) -> bool {
        if is_shared(bytes) {
            !self.is_whole_chunk && self.bytes >= bytes
        } else {
            self.is_whole_chunk && self.bytes == bytes
        }
    }
}

/// An [`Extent`] in the table. The last word has its marks.
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

record! {
    /// An allocation from a pool.
    PoolAllocation {
        /// Its size in its chunk, or that of its own chunk.
        bytes,
        /// Index of the GPU's first share.
        gpu,
        pool,
    }
}

/// Allocations from the pools of this process, and the free space between them. All zeroes is none.
pub(crate) struct PoolFreeSpace {
    /// By pointer.
    allocated: ChargeMap<PoolAllocation>,
    guard: AtomicU32,
    count: AtomicU32,
    extents: [ExtentEntry; EXTENTS],
}

/// Size of a pool before and after an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SizeChange {
    /// Charged size before.
    pub(crate) before_bytes: u64,
    /// Reported size after.
    pub(crate) after_bytes: u64,
}

impl PoolFreeSpace {
    /// Records an allocation from a pool, which changed the pool's size by `change`.
    pub(crate) fn allocate(&self, pool: u64, gpu: u8, start: u64, bytes: u64, change: SizeChange) {
        let taken = rounded(bytes);
        let end = start.saturating_add(taken);
        let _guard = Guard::acquire(&self.guard);
        let was_known = self.find(|extent| extent.start <= start && end <= extent.end());
        self.cut(start, end);
        // The pointer was freed by an unhooked function.
        self.allocated.remove(start);
        let grown = change.after_bytes.saturating_sub(change.before_bytes);
        if was_known.is_none() && grown < growth(taken) {
            // The allocation is in space that was dropped from the table, or the pool returned chunks as it grew.
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
        let allocation = PoolAllocation {
            bytes: taken,
            gpu,
            pool,
        };
        self.allocated.insert(start, allocation);
    }

    /// Returns whether the pointer is an allocation of a pool.
    pub(crate) fn is_from_pool(&self, start: u64) -> bool {
        self.allocated.get(start).is_some()
    }

    /// Returns the GPU of an allocation from a pool, and its chunk.
    pub(crate) fn chunk_of(&self, start: u64) -> Option<(u8, Chunk)> {
        let found = self.allocated.get(start)?;
        Some((found.gpu, chunk_around(start, found.bytes)))
    }

    /// Records the free of an allocation in a stream and returns its record. The caller is inside a
    /// [`crate::system::guard::SharedGate`] and about to call libcuda.
    pub(crate) fn free(&self, start: u64, stream: Option<u64>) -> Option<PoolAllocation> {
        let freed = self.allocated.remove(start)?;
        let is_whole_chunk = !is_shared(freed.bytes);
        if let Some(stream) = stream
            && (is_whole_chunk || is_in_one_chunk(start, freed.bytes))
        {
            let _guard = Guard::acquire(&self.guard);
            self.add(Extent {
                pool: freed.pool,
                stream,
                start,
                bytes: freed.bytes,
                is_whole_chunk,
                is_invalidated: false,
            });
        }
        Some(freed)
    }

    /// Reverts [`PoolFreeSpace::free`]: libcuda has not freed the allocation.
    pub(crate) fn restore(&self, start: u64, freed: PoolAllocation) {
        let _guard = Guard::acquire(&self.guard);
        self.cut(start, start.saturating_add(freed.bytes));
        self.allocated.insert(start, freed);
    }

    /// Returns whether the pool can serve an allocation in that stream without growth. `has_passed` returns whether
    /// another stream has completed the frees in it.
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

    /// Records that the pool has shrunk.
    pub(crate) fn invalidate(&self, pool: u64) {
        let _guard = Guard::acquire(&self.guard);
        self.invalidate_all_of(pool);
    }

    /// Drops everything recorded of a pool.
    pub(crate) fn end_pool(&self, pool: u64) {
        self.allocated
            .remove_all(|found| found.pool == pool, |_, _| {});
        self.forget(|extent| extent.pool == pool);
    }

    /// Drops a destroyed stream, whose handle may be reused.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.forget(|extent| extent.stream == stream);
    }

    /// Drops everything: a context was destroyed, with an unknown part of the allocations.
    pub(crate) fn forget_all(&self) {
        self.allocated.remove_all(|_| true, |_, _| {});
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

    /// Adds an extent; in a full table it replaces a smaller one.
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

    /// Adds an extent, joined with adjacent ones.
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

    /// Removes an address range from the extents of all pools: another pool may have used the addresses before.
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

    /// Returns whether the pool has an allocation in the chunk of that address.
    fn is_allocated_in(&self, pool: u64, address: u64) -> bool {
        let mut is_any = false;
        self.allocated.for_each(|start, found| {
            is_any |= found.pool == pool
                && is_shared(found.bytes)
                && chunk_of(start) == chunk_of(address);
        });
        is_any
    }

    /// Returns whether any allocation or extent is known in that chunk.
    fn is_anything_in(&self, chunk: u64) -> bool {
        let mut is_any = self
            .find(|extent| extent.overlaps(chunk, chunk.saturating_add(CHUNK)))
            .is_some();
        self.allocated
            .for_each(|start, _| is_any |= chunk_of(start) == chunk);
        is_any
    }
}
