//! Memory in pools that is certainly free.

use std::mem::MaybeUninit;

use crate::accounts::pool_free_space::{CHUNK, PoolFreeSpace, SizeChange};

const MIB: u64 = 1 << 20;
const BASE: u64 = 0x3_0200_0000;
const POOL: u64 = 0x10;
const STREAM: u64 = 0x100;
const OTHER_STREAM: u64 = 0x200;

/// The pools of a process, at an arbitrary base address.
struct Pools {
    room: PoolFreeSpace,
    bytes: u64,
}

impl Pools {
    fn new() -> Self {
        // SAFETY: all zeroes is a valid value.
        let room = unsafe { MaybeUninit::zeroed().assume_init() };
        Self { room, bytes: 0 }
    }

    /// Allocates while the pool reports its size as `has_bytes`.
    fn allocate(&mut self, offset: u64, bytes: u64, has_bytes: u64) {
        let change = SizeChange {
            before_bytes: self.bytes,
            after_bytes: has_bytes,
        };
        self.bytes = has_bytes;
        self.room.allocate(POOL, 0, BASE + offset, bytes, change);
    }

    fn free(&self, offset: u64, stream: u64) {
        assert!(self.room.free(BASE + offset, Some(stream)).is_some());
    }

    fn has(&self, bytes: u64) -> bool {
        self.has_in(STREAM, bytes)
    }

    fn has_in(&self, stream: u64, bytes: u64) -> bool {
        self.room.has_space(POOL, stream, bytes, |_| false)
    }

    /// A pool of one full chunk: eight allocations of 4 MiB.
    fn full() -> Self {
        let mut pools = Self::new();
        for index in 0..8 {
            pools.allocate(index * 4 * MIB, 4 * MIB, CHUNK);
        }
        assert!(!pools.has(1));
        pools
    }
}

#[test]
fn assumes_no_free_space_initially() {
    assert!(!Pools::new().has(1));
    assert!(!Pools::new().room.is_from_pool(BASE));
    assert!(Pools::new().room.free(BASE, Some(STREAM)).is_none());
}

#[test]
fn reuses_free_space_in_same_stream() {
    let pools = Pools::full();
    pools.free(8 * MIB, STREAM);
    assert!(pools.has(1) && pools.has(4 * MIB) && !pools.has(4 * MIB + 1));
    assert!(!pools.has_in(OTHER_STREAM, 1));
    assert!(
        pools
            .room
            .has_space(POOL, OTHER_STREAM, 1, |stream| stream == STREAM)
    );
    assert!(
        !pools.room.has_space(POOL + 1, STREAM, 1, |_| true),
        "in another pool"
    );
}

#[test]
fn merges_adjacent_free_ranges() {
    let pools = Pools::full();
    pools.free(0, STREAM);
    pools.free(8 * MIB, STREAM);
    assert!(!pools.has(8 * MIB), "not contiguous");
    pools.free(4 * MIB, STREAM);
    assert!(pools.has(12 * MIB) && !pools.has(13 * MIB));
    let pools = Pools::full();
    pools.free(0, STREAM);
    pools.free(4 * MIB, OTHER_STREAM);
    assert!(!pools.has(8 * MIB), "not contiguous within a stream");
}

#[test]
fn does_not_merge_across_chunks() {
    let mut pools = Pools::full();
    pools.allocate(32 * MIB, 4 * MIB, 2 * CHUNK);
    pools.free(28 * MIB, STREAM);
    pools.free(32 * MIB, STREAM);
    assert!(pools.has(4 * MIB));
    assert!(!pools.room.has_space(POOL, STREAM, 32 * MIB, |_| true));
    let mut pools = Pools::full();
    pools.allocate(32 * MIB, 4 * MIB, 2 * CHUNK);
    for index in 1..8 {
        pools.allocate((32 + index * 4) * MIB, 4 * MIB, 2 * CHUNK);
    }
    pools.free(28 * MIB, STREAM);
    pools.free(32 * MIB, STREAM);
    assert!(!pools.has(8 * MIB), "across a chunk boundary");
}

/// Such a range shows that the driver places chunks differently.
#[test]
fn ignores_range_across_chunk_boundary() {
    let mut pools = Pools::new();
    pools.allocate(30 * MIB, 4 * MIB, 2 * CHUNK);
    pools.free(30 * MIB, STREAM);
    assert!(!pools.has(1));
}

/// An allocation with its own chunk preserves no other chunk, even at the same address.
#[test]
fn discards_ranges_adjacent_to_large_allocation() {
    let mut pools = Pools::full();
    for index in 0..8 {
        pools.free(index * 4 * MIB, STREAM);
    }
    pools.room.invalidate(POOL);
    pools.allocate(0, 20 * MIB, CHUNK + 20 * MIB);
    assert!(!pools.has(4 * MIB));
}

#[test]
fn removes_reallocated_range() {
    let mut pools = Pools::full();
    pools.free(8 * MIB, STREAM);
    pools.allocate(9 * MIB, MIB, CHUNK);
    assert!(pools.has(2 * MIB) && !pools.has(2 * MIB + 512));
    pools.allocate(10 * MIB, 2 * MIB, CHUNK);
    assert!(pools.has(MIB) && !pools.has(MIB + 1));
    // A free that failed in the driver.
    let held = pools.room.free(BASE, Some(STREAM)).unwrap();
    assert!(pools.has(4 * MIB));
    pools.room.restore(BASE, held);
    assert!(!pools.has(2 * MIB) && pools.room.is_from_pool(BASE));
}

#[test]
fn offers_rest_of_new_chunk_to_every_stream() {
    let mut pools = Pools::new();
    pools.allocate(0, MIB, CHUNK);
    assert!(pools.has_in(OTHER_STREAM, 16 * MIB) && pools.has(16 * MIB));
    pools.allocate(MIB, 16 * MIB, CHUNK);
    assert!(pools.has(15 * MIB) && !pools.has(15 * MIB + 512));
    // Not if the pointer is not the beginning of an allocation.
    let mut pools = Pools::new();
    pools.allocate(MIB, MIB, CHUNK);
    assert!(!pools.has(1));
    // Nor if another thread recorded an allocation in it first.
    pools.allocate(0, MIB, 2 * CHUNK);
    assert!(!pools.has(1));
}

#[test]
fn ignores_captured_operations() {
    let pools = Pools::full();
    assert!(pools.room.free(BASE, None).is_some());
    assert!(!pools.has(1));
}

#[test]
fn reuses_large_allocation_of_same_size() {
    let mut pools = Pools::new();
    pools.allocate(0, 40 * MIB - 5, 40 * MIB);
    assert!(!pools.has(1));
    pools.free(0, STREAM);
    assert!(pools.has(40 * MIB) && pools.has(39 * MIB) && pools.has(38 * MIB + 1));
    assert!(!pools.has(38 * MIB) && !pools.has(41 * MIB) && !pools.has(MIB));
    // Part of it is in use for an unknown purpose.
    pools.allocate(MIB, MIB, 40 * MIB);
    assert!(!pools.has(40 * MIB) && !pools.has(38 * MIB));
}

#[test]
fn counts_only_used_chunks_of_trimmed_pool() {
    let mut pools = Pools::full();
    pools.allocate(64 * MIB, 4 * MIB, 2 * CHUNK);
    pools.allocate(128 * MIB, 40 * MIB, 2 * CHUNK + 40 * MIB);
    for offset in [0, 64 * MIB, 128 * MIB] {
        pools.free(offset, STREAM);
    }
    assert!(pools.has(32 * MIB - 8 * MIB - 8 * MIB) && pools.has(40 * MIB));
    pools.room.invalidate(POOL);
    assert!(!pools.has(40 * MIB), "the chunk may be released");
    assert!(pools.has(4 * MIB), "the chunk has other allocations");
    for index in 1..8 {
        pools.free(index * 4 * MIB, STREAM);
        pools.room.invalidate(POOL);
    }
    assert!(!pools.has(4 * MIB), "the chunk has no allocation left");
}

/// A chunk may be released and another one added between two checks: the pool then has the same size as before.
#[test]
fn detects_trimmed_pool_without_growth() {
    for has_bytes in [32 * MIB, 64 * MIB] {
        let mut pools = Pools::new();
        pools.allocate(0, 32 * MIB, 32 * MIB);
        pools.free(0, STREAM);
        assert!(pools.has(32 * MIB));
        pools.allocate(64 * MIB, 32 * MIB, has_bytes);
        assert_eq!(pools.has(32 * MIB), has_bytes == 64 * MIB, "{has_bytes}");
    }
}

#[test]
fn drops_free_space_of_destroyed_objects() {
    let gone: [fn(&PoolFreeSpace); 3] = [
        |room| room.end_pool(POOL),
        |room| room.forget_stream(STREAM),
        PoolFreeSpace::forget_all,
    ];
    for gone in gone {
        let pools = Pools::full();
        pools.free(0, STREAM);
        assert!(pools.has(1));
        gone(&pools.room);
        assert!(!pools.room.has_space(POOL, STREAM, 1, |_| true));
    }
    let pools = Pools::full();
    pools.free(0, STREAM);
    pools.room.end_pool(POOL + 1);
    pools.room.forget_stream(OTHER_STREAM);
    assert!(pools.has(4 * MIB) && pools.room.is_from_pool(BASE + 4 * MIB));
    pools.room.end_pool(POOL);
    assert!(!pools.room.is_from_pool(BASE + 4 * MIB));
}

/// Without a free entry, small ranges are dropped; no range is invented.
#[test]
fn keeps_largest_of_too_many_ranges() {
    let mut pools = Pools::new();
    // More than the list has entries. Miri checks each of them for every range.
    let pieces = if cfg!(miri) { 130 } else { 1000 };
    for index in 0..2 * pieces {
        pools.allocate(index * 4096, 4096, CHUNK);
    }
    pools.allocate(9 * MIB, MIB, CHUNK);
    // Every second one, so that no two are adjacent.
    for index in 0..pieces {
        pools.free(index * 8192, STREAM);
    }
    pools.free(9 * MIB, STREAM);
    // Adjacent to the unused rest of the chunk.
    assert!(pools.has(MIB));
    assert!(!pools.room.has_space(POOL, STREAM, 32 * MIB, |_| true));
}
