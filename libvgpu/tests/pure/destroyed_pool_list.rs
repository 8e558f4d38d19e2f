//! Pools destroyed before everything in them was freed: charged until the last allocation is known to be freed.

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::thread;

use crate::destroyed_pools::{DestroyedPools, FreedAt};
use crate::pool_free_space::{CHUNK, PoolFreeSpace, SizeChange};

const STREAM: u64 = 0x100;
const OTHER_STREAM: u64 = 0x200;

fn no_pools() -> DestroyedPools {
    // SAFETY: all zeroes is a valid value.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Pools with the released ones: device and bytes.
struct Pools {
    pools: DestroyedPools,
    released: RefCell<Vec<(u8, u64)>>,
}

impl Pools {
    fn new() -> Self {
        Self {
            pools: no_pools(),
            released: RefCell::default(),
        }
    }

    fn add(&self, card: u8, bytes: u64, pointers: &[u64]) {
        let take_in = |take_in: &mut dyn FnMut(u64)| pointers.iter().copied().for_each(take_in);
        self.pools.add(card, bytes, take_in);
    }

    fn free(&self, pointer: u64, when: FreedAt) {
        let taken = self.pools.begin_free(pointer).unwrap();
        let release = |pool: crate::destroyed_pools::DestroyedPool| {
            self.released.borrow_mut().push((pool.card, pool.bytes));
        };
        self.pools.finish_free(taken, when, release);
    }

    fn settle(&self, card: u8, passed: &[u64]) {
        let has_passed = |stream| passed.contains(&stream);
        self.pools.settle(card, has_passed, |pool| {
            self.released.borrow_mut().push((pool.card, pool.bytes));
        });
    }

    fn released(&self) -> Vec<(u8, u64)> {
        self.released.take()
    }
}

#[test]
fn releases_pool_with_its_last_allocation() {
    let pools = Pools::new();
    pools.add(3, 50, &[1, 2, 3]);
    pools.add(4, 70, &[10]);
    assert!(pools.pools.contains(1) && pools.pools.contains(10) && !pools.pools.contains(4));
    pools.free(2, FreedAt::Now);
    pools.free(1, FreedAt::Now);
    assert_eq!(pools.released(), []);
    pools.free(10, FreedAt::Now);
    assert_eq!(pools.released(), [(4, 70)]);
    pools.free(3, FreedAt::Now);
    assert_eq!(pools.released(), [(3, 50)]);
    assert!(pools.pools.begin_free(3).is_none(), "freed twice");
}

#[test]
fn counts_free_after_stream_reaches_it() {
    let pools = Pools::new();
    pools.add(3, 50, &[1, 2]);
    pools.add(4, 70, &[10]);
    pools.free(1, FreedAt::InStream(STREAM));
    pools.free(2, FreedAt::InStream(OTHER_STREAM));
    pools.free(10, FreedAt::InStream(STREAM));
    pools.settle(3, &[]);
    pools.settle(3, &[STREAM]);
    assert_eq!(
        pools.released(),
        [],
        "on another device or in another stream"
    );
    pools.settle(3, &[OTHER_STREAM]);
    assert_eq!(pools.released(), [(3, 50)]);
    pools.settle(4, &[OTHER_STREAM]);
    assert_eq!(pools.released(), []);
    pools.settle(4, &[STREAM]);
    pools.settle(4, &[STREAM]);
    assert_eq!(pools.released(), [(4, 70)], "once");
}

#[test]
fn never_releases_uncertain_memory() {
    let streams = [STREAM, OTHER_STREAM];
    let pools = Pools::new();
    pools.add(3, 50, &[1, 2]);
    pools.free(1, FreedAt::Unknown);
    pools.free(2, FreedAt::Now);
    pools.add(3, 60, &[3]);
    pools.free(3, FreedAt::InStream(STREAM));
    pools.pools.forget_stream(STREAM);
    pools.settle(3, &streams);
    assert_eq!(pools.released(), []);
    pools.add(3, 70, &[4, 5]);
    pools.free(4, FreedAt::InStream(STREAM));
    pools.pools.forget_all();
    assert!(!pools.pools.contains(5));
    pools.settle(3, &streams);
    assert_eq!(pools.released(), []);
    // A free that failed in the driver.
    pools.add(3, 80, &[6]);
    let taken = pools.pools.begin_free(6).unwrap();
    pools.pools.cancel_free(6, taken);
    pools.settle(3, &streams);
    assert_eq!(pools.released(), []);
    pools.free(6, FreedAt::Now);
    assert_eq!(pools.released(), [(3, 80)]);
}

#[test]
fn releases_once_among_concurrent_threads() {
    let rounds = if cfg!(miri) { 1 } else { 200 };
    let pools = no_pools();
    for round in 0..rounds {
        let pointers: Vec<u64> = (0..8).map(|index| round * 8 + index).collect();
        pools.add(3, 50, |take_in| pointers.iter().copied().for_each(take_in));
        let released: usize = thread::scope(|scope| {
            let threads: Vec<_> = pointers
                .chunks(2)
                .map(|pointers| {
                    let pools = &pools;
                    scope.spawn(move || {
                        let mut released = 0;
                        for (index, pointer) in pointers.iter().enumerate() {
                            let when = [FreedAt::Now, FreedAt::InStream(STREAM)][index];
                            let taken = pools.begin_free(*pointer).unwrap();
                            pools.finish_free(taken, when, |_| released += 1);
                            pools.settle(3, |_| true, |_| released += 1);
                        }
                        released
                    })
                })
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(released, 1);
    }
}

/// The contents of a pool are reported only if they are complete.
#[test]
fn reports_pool_contents_or_unknown() {
    let changes: [fn(&PoolFreeSpace); 3] = [
        |_| {},
        // The driver released memory that was not charged.
        |room| room.forget_pool(9),
        PoolFreeSpace::forget_all,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        // SAFETY: all zeroes is a valid value.
        let room: PoolFreeSpace = unsafe { MaybeUninit::zeroed().assume_init() };
        let allocate = |pool, start, before_bytes| {
            let change = SizeChange {
                before_bytes,
                after_bytes: CHUNK,
            };
            room.allocate(pool, 0, start, 1000, change);
        };
        assert_eq!(room.allocated_in(7), Some(0));
        allocate(7, CHUNK, 0);
        allocate(7, CHUNK + 1024, CHUNK);
        allocate(8, 9 * CHUNK, 0);
        assert_eq!(room.allocated_in(7), Some(2048));
        change(&room);
        assert_eq!(room.allocated_in(7), (index == 0).then_some(2048));
        let mut pointers = Vec::new();
        room.end_pool(7, |pointer| pointers.push(pointer));
        pointers.sort_unstable();
        if index != 2 {
            assert_eq!(pointers, [CHUNK, CHUNK + 1024]);
            assert!(room.is_from_pool(9 * CHUNK));
        }
        assert!(!room.is_from_pool(CHUNK));
    }
}
