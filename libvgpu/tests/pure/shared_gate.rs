//! Calls that go through together, and those that are alone.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;

use crate::guard::{PendingReservations, SharedGate};

fn open_gate() -> SharedGate {
    // SAFETY: all zeroes is free.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[test]
fn excludes_other_threads_from_exclusive_section() {
    let (gate, inside) = (open_gate(), AtomicU32::new(0));
    let rounds = if cfg!(miri) { 5 } else { 300 };
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let _passage = gate.enter();
                    inside.fetch_add(1, Ordering::SeqCst);
                    thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..rounds {
                    // Others are let through if they take long, so nothing is promised then.
                    let Some(_passage) = gate.enter_exclusive() else {
                        continue;
                    };
                    assert_eq!(inside.fetch_add(1 << 16, Ordering::SeqCst), 0);
                    thread::yield_now();
                    assert_eq!(inside.fetch_sub(1 << 16, Ordering::SeqCst), 1 << 16);
                }
            });
        }
    });
    assert!(gate.enter_exclusive().is_some(), "all have left");
}

#[test]
fn admits_shared_holders_concurrently() {
    let gate = open_gate();
    let (first, second) = (gate.enter(), gate.enter());
    drop((first, second));
    assert!(gate.enter_exclusive().is_some());
}

/// Whoever is inside may be waiting for the one outside.
#[test]
#[cfg_attr(miri, ignore = "thousands of looks take Miri minutes")]
fn starves_no_thread() {
    let gate = open_gate();
    let (entered, hear) = mpsc::channel();
    thread::scope(|scope| {
        let (alone, gate) = (gate.enter_exclusive().unwrap(), &gate);
        scope.spawn(move || {
            let passage = gate.enter();
            entered.send(()).unwrap();
            drop(passage);
        });
        hear.recv().unwrap();
        assert!(gate.enter_exclusive().is_none(), "another one is alone");
        drop(alone);
    });
    let passage = gate.enter();
    assert!(gate.enter_exclusive().is_none(), "another one is inside");
    drop(passage);
    assert!(gate.enter_exclusive().is_some());
}

/// Who is refused would not be if others had reserved only what they need.
#[test]
fn retries_denial_caused_by_pending_reservations() {
    // SAFETY: all zeroes is none under way.
    let attempts: PendingReservations = unsafe { MaybeUninit::zeroed().assume_init() };
    let room = AtomicU32::new(1);
    let take = || {
        let less = |room: u32| room.checked_sub(1);
        let taken = room.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        taken.is_ok()
    };
    let give_back = || room.fetch_add(1, Ordering::SeqCst);
    let rounds = if cfg!(miri) { 5 } else { 100 };
    let (is_over, asked) = (AtomicU32::new(0), AtomicU32::new(0));
    // Counted, since the others go on until it is over.
    let refused = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            // Needs nothing, as it turns out once somebody else has asked.
            scope.spawn(|| {
                while is_over.load(Ordering::SeqCst) == 0 {
                    let attempt = attempts.begin();
                    let before = asked.load(Ordering::SeqCst);
                    if take() {
                        let is_asked = || {
                            asked.load(Ordering::SeqCst) != before
                                || is_over.load(Ordering::SeqCst) != 0
                        };
                        // Not for ever: it may have been asked before this was taken.
                        for _ in 0..10 {
                            if is_asked() {
                                break;
                            }
                            thread::yield_now();
                        }
                        thread::yield_now();
                        give_back();
                    }
                    drop(attempt);
                }
            });
        }
        let ask = || {
            while room.load(Ordering::SeqCst) != 0 {
                thread::yield_now();
            }
            asked.fetch_add(1, Ordering::SeqCst);
        };
        for _ in 0..rounds {
            ask();
            if attempts.reserve(take) {
                give_back();
            } else {
                refused.fetch_add(1, Ordering::SeqCst);
            }
            ask();
            let attempt = attempts.begin_reserving(take);
            if attempt.is_some() {
                give_back();
            } else {
                refused.fetch_add(1, Ordering::SeqCst);
            }
        }
        is_over.store(1, Ordering::SeqCst);
    });
    assert_eq!(refused.into_inner(), 0);
    assert!(attempts.reserve(take));
    assert!(!attempts.reserve(take), "there is no more");
    assert!(attempts.begin_reserving(take).is_none());
}

#[test]
fn treats_result_during_pending_call_as_uncertain() {
    // SAFETY: all zeroes is none under way.
    let attempts: PendingReservations = unsafe { MaybeUninit::zeroed().assume_init() };
    assert!(attempts.is_certain(|| true));
    assert!(!attempts.is_certain(|| false));
    let attempt = attempts.begin();
    assert!(!attempts.is_certain(|| true), "one is under way");
    drop(attempt);
    let one_comes_and_goes = || {
        drop(attempts.begin());
        true
    };
    assert!(
        !attempts.is_certain(one_comes_and_goes),
        "one was under way"
    );
    assert!(attempts.is_certain(|| true), "all are over");
}
