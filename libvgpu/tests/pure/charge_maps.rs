//! The map of charges returns what was inserted, at any size and to every thread.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::accounts::charge_map::{Charge, ChargeMap};

/// Steps of one test; Miri takes a thousand times as long for each.
const STEPS: u64 = if cfg!(miri) { 100 } else { 50_000 };

fn empty() -> ChargeMap<Charge> {
    let map = MaybeUninit::<ChargeMap<Charge>>::zeroed();
    // SAFETY: all zeroes is a valid value.
    unsafe { map.assume_init() }
}

fn held(bytes: u64) -> Charge {
    Charge {
        bytes,
        gpu: u8::try_from(bytes % 64).unwrap(),
        context: bytes * 3,
    }
}

/// Keys with the same first position, so that a few of them fill the first table.
fn colliding() -> impl Iterator<Item = u64> {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    // Each step of Newton's method doubles the number of correct bits, from three.
    let inverse = (0..5).fold(GOLDEN, |inverse, _| {
        inverse.wrapping_mul(2u64.wrapping_sub(GOLDEN.wrapping_mul(inverse)))
    });
    assert_eq!(inverse.wrapping_mul(GOLDEN), 1);
    (0u64..).map(move |index| ((1000 << 54) | index).wrapping_mul(inverse) ^ (1 << 63))
}

#[test]
fn returns_inserted_values() {
    let map = empty();
    let mut model = HashMap::new();
    let mut random = 1u64;
    for step in 0..STEPS {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        // Small handles and addresses; twice as many as the first table has entries.
        let key = match random >> 63 {
            0 => (random >> 40) % 1024,
            _ => 0x7f00_0000_0000 + ((random >> 40) % 1024) * (2 << 20),
        };
        if let Some(before) = model.remove(&key) {
            assert_eq!(map.get(key), Some(before));
            assert_eq!(map.remove(key), Some(before));
            assert_eq!(map.remove(key), None);
        } else {
            assert_eq!(map.get(key), None);
            let held = held(step);
            assert!(map.insert(key, held));
            model.insert(key, held);
        }
    }
    let mut all = HashMap::new();
    map.for_each(|key, held| assert!(all.insert(key, held).is_none()));
    assert_eq!(all, model);
}

#[test]
fn finds_colliding_keys_in_next_tables() {
    let map = empty();
    // More than the 64 entries of a table that are probed; three tables' worth where that is fast.
    let count = if cfg!(miri) { 68 } else { 150 };
    let keys: Vec<u64> = colliding().take(count).collect();
    for (index, key) in keys.iter().enumerate() {
        assert!(map.insert(*key, held(index as u64)));
    }
    // Removing a key keeps the following ones reachable.
    for (index, key) in keys.iter().enumerate() {
        assert_eq!(map.remove(*key), Some(held(index as u64)));
        if let Some(last) = keys.last().filter(|last| *last != key && index % 8 == 0) {
            assert_eq!(map.get(*last), Some(held(count as u64 - 1)));
        }
    }
    map.for_each(|key, _| panic!("{key} was not removed"));
}

#[test]
fn removes_only_entries_of_ended_context() {
    let map = empty();
    for key in 0..30 {
        let context = key % 3;
        assert!(map.insert(
            key,
            Charge {
                context,
                ..held(key)
            }
        ));
    }
    let is_of_context = |held: &Charge| held.context == 1;
    assert_eq!(map.count(is_of_context), 10);
    let mut ended = 0;
    map.remove_all(is_of_context, |key, held| {
        assert_eq!((key % 3, held.bytes), (1, key));
        ended += 1;
    });
    assert_eq!((ended, map.count(is_of_context)), (10, 0));
    let mut left = 0;
    map.for_each(|key, held| {
        assert_eq!(key % 3, held.context);
        assert_ne!(held.context, 1);
        left += 1;
    });
    assert_eq!(left, 20);
}

/// Each thread has its own keys, as each allocates its own pointers; the tables grow concurrently.
#[test]
fn finds_own_entries_from_several_threads() {
    let map = empty();
    let each = if cfg!(miri) { 20 } else { 40 };
    let keys: Vec<u64> = colliding().take(4 * each).collect();
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for mine in keys.chunks(each) {
            let (map, start) = (&map, &start);
            scope.spawn(move || {
                start.wait();
                for round in 0..STEPS / 1_000 + 1 {
                    for key in mine {
                        assert!(map.insert(*key, held(key % 1_000 + round)));
                    }
                    for key in mine {
                        assert_eq!(map.get(*key), Some(held(key % 1_000 + round)));
                        assert_eq!(map.remove(*key), Some(held(key % 1_000 + round)));
                    }
                }
            });
        }
    });
    map.for_each(|key, _| panic!("{key} was not removed"));
}

/// A double free in two threads is refunded once.
#[test]
fn removes_entry_once_among_threads() {
    const KEYS: u64 = 500;
    let map = empty();
    let rounds = STEPS / KEYS;
    let removed = AtomicU64::new(0);
    let turn = Barrier::new(3);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..rounds {
                    turn.wait();
                    for found in (1..=KEYS).filter_map(|key| map.remove(key)) {
                        assert_eq!(found.bytes, round);
                        removed.fetch_add(1, Ordering::Relaxed);
                    }
                    turn.wait();
                }
            });
        }
        for round in 0..rounds {
            for key in 1..=KEYS {
                assert!(map.insert(key, held(round)));
            }
            turn.wait();
            turn.wait();
        }
    });
    assert_eq!(removed.load(Ordering::Relaxed), KEYS * rounds);
}

/// A reader gets one whole entry while other threads remove and insert in its position.
#[test]
fn never_reads_torn_entry() {
    let map = empty();
    let keys: Vec<u64> = colliding().take(3).collect();
    let is_over = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..STEPS {
                let key = keys[usize::try_from(round % 3).unwrap()];
                map.insert(key, held(key.wrapping_mul(7) % 1_000 + 1));
                map.remove(key);
            }
            is_over.store(1, Ordering::Relaxed);
        });
        scope.spawn(|| {
            while is_over.load(Ordering::Relaxed) == 0 {
                for key in &keys {
                    if let Some(found) = map.get(*key) {
                        assert_eq!(found, held(key.wrapping_mul(7) % 1_000 + 1));
                    }
                }
            }
        });
    });
}

/// A key with concurrent updates is always found, and no update is lost.
#[test]
fn finds_entry_during_update() {
    const THREADS: u64 = 3;
    const CHANGES: u64 = STEPS / 50;
    let map = empty();
    let key = colliding().next().unwrap();
    let first = Charge {
        bytes: 0,
        gpu: 1,
        context: 0,
    };
    assert!(map.insert(key, first));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..CHANGES {
                    let more = |held: &Charge| {
                        Some(Charge {
                            bytes: held.bytes + 1,
                            context: held.context + 3,
                            ..*held
                        })
                    };
                    assert!(map.change(key, more).is_some());
                    let found = map.get(key).unwrap();
                    assert_eq!(found.context, found.bytes * 3);
                    let mut count = 0;
                    map.for_each(|_, held| {
                        assert_eq!(held.context, held.bytes * 3);
                        count += 1;
                    });
                    assert_eq!(count, 1);
                }
            });
        }
    });
    assert_eq!(map.get(key).unwrap().bytes, THREADS * CHANGES);
    assert_eq!(map.change(key, |_| None).unwrap().gpu, 1);
    assert_eq!(map.get(key), None);
    assert_eq!(map.change(key, |held| Some(*held)), None);
}

/// A reader waits for an update in progress.
#[test]
fn waits_for_entry_being_updated() {
    let map = empty();
    let (is_changing, is_looked_for) = (Barrier::new(2), AtomicU64::new(0));
    assert!(map.insert(7, held(1)));
    thread::scope(|scope| {
        scope.spawn(|| {
            map.change(7, |_| {
                is_changing.wait();
                while is_looked_for.load(Ordering::SeqCst) == 0 {
                    thread::yield_now();
                }
                for _ in 0..100 {
                    thread::yield_now();
                }
                Some(held(2))
            });
        });
        is_changing.wait();
        is_looked_for.store(1, Ordering::SeqCst);
        assert_eq!(map.get(7), Some(held(2)));
        assert_eq!(map.remove(7), Some(held(2)));
    });
}
