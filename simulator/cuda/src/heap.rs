//! Allocator of small requests: many share one block of GPU memory, as in the real driver. Address
//! bookkeeping only.

use std::collections::{BTreeMap, BTreeSet};

/// Alignment of every allocation.
pub(crate) const ALIGNMENT: u64 = 512;

/// Blocks by base address. Invariants: the free ranges of a block are disjoint, not adjacent, and
/// cover exactly its unallocated part; `by_longest_free` has every block with the length of its
/// longest free range.
#[derive(Debug)]
pub(crate) struct Heap {
    block_bytes: u64,
    blocks: BTreeMap<u64, Block>,
    by_longest_free: BTreeSet<(u64, u64)>,
}

#[derive(Debug)]
struct Block {
    /// Start and length.
    free: BTreeMap<u64, u64>,
    /// Start and length.
    used: BTreeMap<u64, u64>,
}

/// Outcome of [`Heap::free`].
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    Unknown,
    /// The block has other allocations.
    BlockInUse,
    /// The block is empty and was removed from the heap.
    BlockEmpty,
}

impl Heap {
    pub(crate) fn new(block_bytes: u64) -> Self {
        Self {
            block_bytes,
            blocks: BTreeMap::new(),
            by_longest_free: BTreeSet::new(),
        }
    }

    /// Larger requests get memory of their own.
    pub(crate) fn max_allocation_bytes(&self) -> u64 {
        self.block_bytes / 2
    }

    /// Allocates from the fullest block that fits; `None` requests another block.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT)?;
        let (longest, base) = *self.by_longest_free.range((bytes, 0)..).next()?;
        let block = self.blocks.get_mut(&base)?;
        let address = block.allocate(bytes)?;
        self.by_longest_free.remove(&(longest, base));
        self.by_longest_free.insert((block.longest(), base));
        Some(address)
    }

    /// Adds an empty block.
    pub(crate) fn add_block(&mut self, base: u64) {
        let block = Block {
            free: BTreeMap::from([(base, self.block_bytes)]),
            used: BTreeMap::new(),
        };
        self.blocks.insert(base, block);
        self.by_longest_free.insert((self.block_bytes, base));
    }

    /// Frees an allocation.
    pub(crate) fn free(&mut self, address: u64) -> Freed {
        let Some((&base, block)) = self.blocks.range_mut(..=address).next_back() else {
            return Freed::Unknown;
        };
        let longest = block.longest();
        if !block.free(address) {
            return Freed::Unknown;
        }
        self.by_longest_free.remove(&(longest, base));
        if block.used.is_empty() {
            self.blocks.remove(&base);
            return Freed::BlockEmpty;
        }
        self.by_longest_free.insert((block.longest(), base));
        Freed::BlockInUse
    }

    /// Start and length of the allocation that contains an address.
    pub(crate) fn containing(&self, address: u64) -> Option<(u64, u64)> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        let (start, length) = block.used.range(..=address).next_back()?;
        (address - start < *length).then_some((*start, *length))
    }
}

impl Block {
    fn longest(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }

    fn allocate(&mut self, bytes: u64) -> Option<u64> {
        let (start, length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        let (start, length) = (*start, *length);
        self.free.remove(&start);
        if length > bytes {
            self.free.insert(start + bytes, length - bytes);
        }
        self.used.insert(start, bytes);
        Some(start)
    }

    fn free(&mut self, mut start: u64) -> bool {
        let Some(mut length) = self.used.remove(&start) else {
            return false;
        };
        if let Some((before, size)) = self.free.range(..start).next_back() {
            let (before, size) = (*before, *size);
            if before + size == start {
                self.free.remove(&before);
                (start, length) = (before, length + size);
            }
        }
        if let Some(size) = self.free.remove(&(start + length)) {
            length += size;
        }
        self.free.insert(start, length);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: u64 = 0x7000_0000;
    const BLOCK_BYTES: u64 = 2 << 20;

    #[test]
    fn shares_a_block_until_it_is_full() {
        let mut heap = Heap::new(BLOCK_BYTES);
        assert_eq!(heap.allocate(1), None);
        heap.add_block(BASE);
        assert_eq!(heap.allocate(1), Some(BASE));
        assert_eq!(heap.allocate(513), Some(BASE + 512));
        assert_eq!(heap.allocate(BLOCK_BYTES / 2), Some(BASE + 1536));
        assert_eq!(heap.allocate(BLOCK_BYTES / 2), None);
        assert_eq!(heap.containing(BASE + 1000), Some((BASE + 512, 1024)));
        assert_eq!(heap.containing(BASE + BLOCK_BYTES - 1), None);
    }

    #[test]
    fn merges_free_ranges_and_returns_empty_blocks() {
        let mut heap = Heap::new(BLOCK_BYTES);
        heap.add_block(BASE);
        let starts: Vec<u64> = (0..4).map(|_| heap.allocate(512 << 10).unwrap()).collect();
        assert_eq!(heap.allocate(512), None);
        for index in [0, 2, 1] {
            assert_eq!(heap.free(starts[index]), Freed::BlockInUse);
        }
        assert_eq!(heap.free(starts[0]), Freed::Unknown);
        assert_eq!(heap.allocate(1536 << 10), Some(BASE));
        assert_eq!(heap.free(BASE), Freed::BlockInUse);
        assert_eq!(heap.free(starts[3]), Freed::BlockEmpty);
        assert_eq!(heap.allocate(1), None);
    }
}
