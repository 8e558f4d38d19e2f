//! The ledger's races in every interleaving (loom, with bounded preemptions).
//!
//! Each model checks two invariants at its end: the total never exceeded the limit nor fell below the used memory, and
//! a rebuild without concurrent operations makes the total exact.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{Bucket, Grant};
use drava_vgpu_abi::ledger::{MAX_BYTES, Owner, Rebuild, Region};
use drava_vgpu_abi::region::{Header, Slot, SlotIndex};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

struct Modelled(AtomicU64);

impl Word for Modelled {
    fn load(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    fn store(&self, value: u64) {
        self.0.store(value, Ordering::SeqCst);
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.0
            .compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
    }

    fn fetch_add(&self, value: u64) -> u64 {
        self.0.fetch_add(value, Ordering::SeqCst)
    }

    fn fetch_sub(&self, value: u64) -> u64 {
        self.0.fetch_sub(value, Ordering::SeqCst)
    }
}

struct Share {
    header: Header<Modelled>,
    slots: Vec<Slot<Modelled>>,
}

impl Share {
    /// Creates a share in which process `i` uses `held[i]` bytes.
    fn holding(held: &[u64]) -> Arc<Self> {
        let zero = || Modelled(AtomicU64::new(0));
        let share = Self {
            header: Header::from_words(zero),
            slots: held.iter().map(|_| Slot::from_words(zero)).collect(),
        };
        for (index, bytes) in held.iter().enumerate() {
            let owner = Owner {
                pid: 1,
                start_time: 1,
                pid_namespace: 1,
            };
            share.region().acquire_slot(at(index), owner).unwrap();
            share.region().charge(at(index), *bytes);
        }
        Arc::new(share)
    }

    fn region(&self) -> Region<'_, Modelled> {
        Region::new(&self.header, &self.slots)
    }

    fn check_at_rest(&self, limit: u64) {
        let held: u64 = self.slots.iter().map(|slot| slot.used_bytes.load()).sum();
        let total = self.region().total_bytes();
        assert!(total <= limit, "total {total} exceeds the limit {limit}");
        assert!(total >= held, "total {total} is below {held} held bytes");
        assert!(held <= limit, "{held} held bytes exceed the limit {limit}");
        assert_eq!(self.region().rebuild(at(0)), Rebuild::Exact);
        assert_eq!(self.region().total_bytes(), held);
    }
}

fn at(index: usize) -> SlotIndex {
    SlotIndex::new(index).unwrap()
}

fn explore(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 10_000;
    builder.check(model);
}

/// Runs a thread concurrently with this one.
fn run_concurrently(
    share: &Arc<Share>,
    there: impl FnOnce(&Share) + Send + 'static,
    here: impl FnOnce(&Share),
) {
    let other = Arc::clone(share);
    let thread = thread::spawn(move || there(&other));
    here(share);
    thread.join().unwrap();
}

#[test]
fn grants_one_of_two_conflicting_reservations() {
    explore(|| {
        let share = Share::holding(&[0, 0]);
        let other = Arc::clone(&share);
        // Their sum exceeds the limit by one byte.
        let thread = thread::spawn(move || other.region().reserve(at(1), 5, 10).is_ok());
        let mine = share.region().reserve(at(0), 6, 10).is_ok();
        let theirs = thread.join().unwrap();
        assert!(mine ^ theirs);
        share.check_at_rest(10);
    });
}

#[test]
fn keeps_concurrent_reservation_in_rebuild() {
    explore(|| {
        let share = Share::holding(&[3, 1]);
        run_concurrently(
            &share,
            |share| assert!(share.region().reserve(at(1), 6, 10).is_ok()),
            |share| {
                share.region().rebuild(at(0));
            },
        );
        share.check_at_rest(10);
    });
}

#[test]
fn keeps_concurrent_release_in_rebuild() {
    explore(|| {
        let share = Share::holding(&[3, 6]);
        run_concurrently(
            &share,
            |share| assert_eq!(share.region().release(at(1), 6), 6),
            |share| {
                share.region().rebuild(at(0));
            },
        );
        share.check_at_rest(9);
    });
}

#[test]
fn keeps_concurrent_reservation_and_release_in_rebuild() {
    explore(|| {
        let share = Share::holding(&[0, 4, 0]);
        let (first, second) = (Arc::clone(&share), Arc::clone(&share));
        let releasing = thread::spawn(move || first.region().release(at(1), 4));
        let reserving = thread::spawn(move || second.region().reserve(at(2), 4, MAX_BYTES));
        share.region().rebuild(at(0));
        releasing.join().unwrap();
        reserving.join().unwrap().unwrap();
        share.check_at_rest(4);
    });
}

#[test]
fn agrees_on_two_repairs_and_a_reservation() {
    explore(|| {
        // Process 2 is dead; process 0 holds the lock of its slot while it clears the slot.
        let share = Share::holding(&[0, 0, 7]);
        let other = Arc::clone(&share);
        let thread = thread::spawn(move || {
            let _ = other.region().reserve_or_rebuild(at(1), 5, 10);
        });
        share.region().clear(at(2));
        assert!(share.region().reserve_or_rebuild(at(0), 5, 10).is_ok());
        thread.join().unwrap();
        share.check_at_rest(10);
    });
}

/// Process 2 exported 7 bytes and is dead. While its slot is reclaimed, process 1 opens them: either process 1 is
/// charged, or they stay charged.
#[test]
fn charges_dead_process_memory_opened_concurrently() {
    explore(|| {
        let share = Share::holding(&[0, 0, 7]);
        share.slots[2].exported_bytes.store(7);
        run_concurrently(
            &share,
            |share| {
                share.slots[1].opened_bytes.store(7);
                if share.region().exported_bytes() < 7 {
                    share.region().charge(at(1), 7);
                    share.slots[1].opened_bytes.store(0);
                }
            },
            |share| {
                share.region().reclaim_slot(at(2));
                share.region().rebuild(at(0));
            },
        );
        let region = share.region();
        assert!(region.total_bytes() >= 7);
        // Closed, it belongs to no process.
        let own = share.slots[1].used_bytes.load();
        region.release(at(1), own);
        share.slots[1].opened_bytes.store(0);
        if region.is_orphaned(at(2)) {
            region.reclaim_slot(at(2));
        }
        assert_eq!(region.rebuild(at(0)), Rebuild::Exact);
        assert_eq!(region.total_bytes(), 0);
    });
}

/// Processes 1 and 2 each exported some bytes and are dead; process 0 has the same number of bytes open. Two processes
/// reclaim one slot each: the open memory stays charged.
#[test]
fn reclaims_two_dead_processes_independently() {
    for (used, exported, opened) in [
        ([5, 5], [5, 5], 5),
        ([9, 9], [5, 5], 8),
        ([5, 9], [5, 2], 6),
    ] {
        explore(move || {
            let share = Share::holding(&[0, used[0], used[1]]);
            share.slots[1].exported_bytes.store(exported[0]);
            share.slots[2].exported_bytes.store(exported[1]);
            share.slots[0].opened_bytes.store(opened);
            run_concurrently(
                &share,
                |share| share.region().reclaim_slot(at(1)),
                |share| share.region().reclaim_slot(at(2)),
            );
            let region = share.region();
            region.rebuild(at(0));
            assert!(region.total_bytes() >= opened);
            // The next reclaim releases the surplus.
            for dead in [1, 2].map(at) {
                if region.is_orphaned(dead) {
                    region.reclaim_slot(dead);
                }
            }
            region.rebuild(at(0));
            assert_eq!(region.total_bytes(), opened);
        });
    }
}

/// As above, while process 0 opens: either process 0 is charged, or the opened memory stays charged.
#[test]
fn charges_memory_opened_between_two_reclaims() {
    explore(|| {
        let share = Share::holding(&[0, 5, 5]);
        for dead in [1, 2] {
            share.slots[dead].exported_bytes.store(5);
        }
        let reclaim_slot = |dead| {
            let share = Arc::clone(&share);
            thread::spawn(move || share.region().reclaim_slot(at(dead)))
        };
        let threads = [reclaim_slot(1), reclaim_slot(2)];
        share.slots[0].opened_bytes.store(5);
        if share.region().exported_bytes() < 5 {
            share.region().charge(at(0), 5);
            share.slots[0].opened_bytes.store(0);
        }
        for thread in threads {
            thread.join().unwrap();
        }
        share.region().rebuild(at(0));
        assert!(share.region().total_bytes() >= 5);
    });
}

/// Two processes refill and take concurrently: together they get the credit and the elapsed time once.
#[test]
fn credits_each_interval_once_in_concurrent_refills() {
    loom::model(|| {
        let header = Arc::new(Header::from_words(|| Modelled(AtomicU64::new(0))));
        let grant = Grant::Rate(500_000);
        header.refilled_us.store(1_000_000);
        header.credit_us.store(3);
        let refill_and_take = |now: u64| {
            let header = Arc::clone(&header);
            move || {
                let bucket = Bucket::new(&*header);
                bucket.refill(grant, now);
                bucket.take(grant, 10, 1, 1).unwrap_or(0)
            }
        };
        let other = thread::spawn(refill_and_take(1_000_020));
        let mine = refill_and_take(1_000_040)();
        let theirs = other.join().unwrap();
        let bucket = Bucket::new(&*header);
        bucket.refill(grant, 1_000_040);
        let taken = i64::try_from(mine + theirs).unwrap();
        assert_eq!(bucket.credit_us() + taken, 3 + 20);
        // The first launch may overdraw; a launch with a debt may not.
        assert!(bucket.credit_us() >= 3 + 20 - 20);
    });
}

/// Only one of two processes can overdraw.
#[test]
fn grants_one_overdraft_at_a_time() {
    loom::model(|| {
        let header = Arc::new(Header::from_words(|| Modelled(AtomicU64::new(0))));
        header.credit_us.store(5);
        let take = || {
            let header = Arc::clone(&header);
            move || {
                Bucket::new(&*header)
                    .take(Grant::Rate(0), 1_000, 1, 1)
                    .is_ok()
            }
        };
        let other = thread::spawn(take());
        let mine = take()();
        let theirs = other.join().unwrap();
        assert!(mine != theirs);
        assert_eq!(Bucket::new(&*header).credit_us(), 5 - 1_000);
    });
}
