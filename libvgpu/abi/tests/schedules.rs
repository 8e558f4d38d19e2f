//! The ledger's races by exhaustive search: two threads, switched at every choice of two or three steps.
//!
//! Loom (`tests/loom.rs`) prunes schedules that it considers equivalent. This search prunes nothing, so it does not
//! depend on that analysis. All steps are sequentially consistent, as in the product.

#![expect(clippy::unwrap_used, reason = "a test that fails should panic")]

use std::cell::RefCell;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::ledger::{Owner, Rebuild, Region};
use drava_vgpu_abi::region::{Header, Slot, SlotIndex};

/// Steps at which the other thread continues.
type Switches = Vec<u32>;

struct Turn {
    whose: usize,
    step: u32,
    done: [bool; 2],
    switches: Switches,
}

struct Baton {
    turn: Mutex<Turn>,
    passed: Condvar,
}

thread_local! {
    static PLAYER: RefCell<Option<(Arc<Baton>, usize)>> = const { RefCell::new(None) };
}

impl Baton {
    fn wait_for(&self, me: usize) {
        let turn = self.turn.lock().unwrap();
        drop(
            self.passed
                .wait_while(turn, |turn| turn.whose != me)
                .unwrap(),
        );
    }

    fn before_step(&self, me: usize) {
        let mut turn = self.turn.lock().unwrap();
        turn.step += 1;
        if turn.switches.contains(&turn.step) && !turn.done[1 - me] {
            turn.whose = 1 - me;
            self.passed.notify_all();
            drop(
                self.passed
                    .wait_while(turn, |turn| turn.whose != me)
                    .unwrap(),
            );
        }
    }

    fn finish(&self, me: usize) {
        let mut turn = self.turn.lock().unwrap();
        turn.done[me] = true;
        turn.whose = 1 - me;
        self.passed.notify_all();
    }
}

#[derive(Default)]
struct Stepped(AtomicU64);

impl Stepped {
    fn word(&self) -> &AtomicU64 {
        PLAYER.with_borrow(|player| {
            if let Some((baton, me)) = player {
                baton.before_step(*me);
            }
        });
        &self.0
    }
}

impl Word for Stepped {
    fn load(&self) -> u64 {
        self.word().load(SeqCst)
    }

    fn store(&self, value: u64) {
        self.word().store(value, SeqCst);
    }

    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.word().compare_exchange(current, new, SeqCst, SeqCst)
    }

    fn fetch_add(&self, value: u64) -> u64 {
        self.word().fetch_add(value, SeqCst)
    }

    fn fetch_sub(&self, value: u64) -> u64 {
        self.word().fetch_sub(value, SeqCst)
    }
}

struct Share {
    header: Header<Stepped>,
    slots: Vec<Slot<Stepped>>,
}

impl Share {
    fn holding(held: &[u64]) -> Self {
        let share = Self {
            header: Header::from_words(Stepped::default),
            slots: held
                .iter()
                .map(|_| Slot::from_words(Stepped::default))
                .collect(),
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
        share
    }

    fn region(&self) -> Region<'_, Stepped> {
        Region::new(&self.header, &self.slots)
    }
}

fn at(index: usize) -> SlotIndex {
    SlotIndex::new(index).unwrap()
}

type Action = fn(Region<'_, Stepped>);

/// Runs both actions under one schedule and returns the number of steps.
fn play(held: &[u64], limit: u64, actions: [Action; 2], first: usize, switches: &Switches) -> u32 {
    let share = Share::holding(held);
    let baton = Arc::new(Baton {
        turn: Mutex::new(Turn {
            whose: first,
            step: 0,
            done: [false; 2],
            switches: switches.clone(),
        }),
        passed: Condvar::new(),
    });
    std::thread::scope(|scope| {
        for (me, action) in actions.into_iter().enumerate() {
            let (baton, share) = (Arc::clone(&baton), &share);
            scope.spawn(move || {
                baton.wait_for(me);
                PLAYER.set(Some((Arc::clone(&baton), me)));
                action(share.region());
                PLAYER.set(None);
                baton.finish(me);
            });
        }
    });
    let held: u64 = share.slots.iter().map(|slot| slot.used_bytes.load()).sum();
    let total = share.region().total_bytes();
    let schedule = format!("thread {first} first, switched before steps {switches:?}");
    assert!(
        held <= limit,
        "{held} bytes are held of {limit}: {schedule}"
    );
    assert!(
        total <= limit,
        "the total is {total} of {limit}: {schedule}"
    );
    assert!(
        total >= held,
        "the total is {total}, but {held} bytes are held: {schedule}"
    );
    assert_eq!(share.region().rebuild(at(0)), Rebuild::Exact);
    assert_eq!(share.region().total_bytes(), held, "{schedule}");
    baton.turn.lock().unwrap().step
}

/// Tries every choice of up to `most` switches.
fn explore(held: &[u64], limit: u64, actions: [Action; 2], most: usize) {
    for first in 0..2 {
        let mut schedules = vec![Switches::new()];
        while let Some(switches) = schedules.pop() {
            let steps = play(held, limit, actions, first, &switches);
            if switches.len() < most {
                let next = switches.last().map_or(1, |last| last + 1);
                schedules.extend((next..=steps).map(|step| {
                    let mut longer = switches.clone();
                    longer.push(step);
                    longer
                }));
            }
        }
    }
}

const REBUILD: Action = |region| {
    region.rebuild(at(0));
};

#[test]
fn rebuilds_during_release() {
    explore(
        &[3, 6],
        9,
        [REBUILD, |region| assert_eq!(region.release(at(1), 6), 6)],
        3,
    );
}

#[test]
fn rebuilds_during_reservation() {
    explore(
        &[3, 1],
        10,
        [REBUILD, |region| {
            assert!(region.reserve(at(1), 6, 10).is_ok())
        }],
        3,
    );
}

#[test]
fn rebuilds_during_release_and_equal_reservation() {
    let both: Action = |region| {
        assert_eq!(region.release(at(1), 4), 4);
        assert!(region.reserve(at(2), 4, 9).is_ok());
    };
    explore(&[1, 4, 0], 9, [REBUILD, both], 2);
}

#[test]
fn reserves_twice_for_the_same_bytes() {
    explore(
        &[0, 0],
        10,
        [
            |region| {
                let _ = region.reserve_or_rebuild(at(0), 6, 10);
            },
            |region| {
                let _ = region.reserve_or_rebuild(at(1), 6, 10);
            },
        ],
        2,
    );
}

#[test]
fn repairs_during_reservation() {
    // Process 2 is dead; process 0 holds the lock of its slot.
    explore(
        &[0, 2, 7],
        10,
        [
            |region| {
                region.clear(at(2));
                assert!(region.reserve_or_rebuild(at(0), 5, 10).is_ok());
            },
            |region| {
                let _ = region.reserve_or_rebuild(at(1), 3, 10);
            },
        ],
        2,
    );
}
