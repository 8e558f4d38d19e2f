//! Shared and exclusive calls.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::system::guard::{PendingReservations, SharedGate};

fn open_gate() -> SharedGate {
    // SAFETY: all zeroes is a valid value.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

#[test]
fn excludes_other_threads_from_exclusive_section() {
    /// A thread that gives up has waited longer: 10,000 checks, most of them after a sleep of 50 µs.
    const PATIENCE: Duration = Duration::from_millis(400);
    let (gate, inside) = (open_gate(), AtomicU32::new(0));
    let has_given_up = AtomicBool::new(false);
    let rounds = if cfg!(miri) { 5 } else { 300 };
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let asked = Instant::now();
                    let _passage = gate.enter();
                    // Enters anyway after a time-out, which happens on a busy machine.
                    if asked.elapsed() > PATIENCE {
                        has_given_up.store(true, Ordering::SeqCst);
                    }
                    inside.fetch_add(1, Ordering::SeqCst);
                    thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                }
            });
        }
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..rounds {
                    // Exclusive access is not guaranteed: after a time-out other calls proceed.
                    let Some(_passage) = gate.enter_exclusive() else {
                        continue;
                    };
                    let before = inside.fetch_add(1 << 16, Ordering::SeqCst);
                    thread::yield_now();
                    let after = inside.fetch_sub(1 << 16, Ordering::SeqCst);
                    let is_alone = (before, after) == (0, 1 << 16);
                    assert!(
                        is_alone || has_given_up.load(Ordering::SeqCst),
                        "{before:#x} before, {after:#x} after"
                    );
                }
            });
        }
    });
    assert!(gate.enter_exclusive().is_some(), "no holder remains");
}

#[test]
fn admits_shared_holders_concurrently() {
    let gate = open_gate();
    let (first, second) = (gate.enter(), gate.enter());
    drop((first, second));
    assert!(gate.enter_exclusive().is_some());
}

/// The holder may be waiting for the thread outside.
#[test]
#[cfg_attr(miri, ignore = "thousands of polls take Miri minutes")]
fn starves_no_thread() {
    let gate = open_gate();
    let (entered, receiver) = mpsc::channel();
    thread::scope(|scope| {
        let (alone, gate) = (gate.enter_exclusive().unwrap(), &gate);
        scope.spawn(move || {
            let passage = gate.enter();
            entered.send(()).unwrap();
            drop(passage);
        });
        receiver.recv().unwrap();
        assert!(
            gate.enter_exclusive().is_none(),
            "another thread has exclusive access"
        );
        drop(alone);
    });
    let passage = gate.enter();
    assert!(
        gate.enter_exclusive().is_none(),
        "another thread has shared access"
    );
    drop(passage);
    assert!(gate.enter_exclusive().is_some());
}

/// The request is denied only because of temporary reservations of other threads.
#[test]
fn retries_denial_caused_by_pending_reservations() {
    // SAFETY: all zeroes is a valid value.
    let attempts: PendingReservations = unsafe { MaybeUninit::zeroed().assume_init() };
    let available = AtomicU32::new(1);
    let take = || {
        let less = |available: u32| available.checked_sub(1);
        let taken = available.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        taken.is_ok()
    };
    let give_back = || available.fetch_add(1, Ordering::SeqCst);
    let rounds = if cfg!(miri) { 5 } else { 100 };
    let (is_over, asked) = (AtomicU32::new(0), AtomicU32::new(0));
    // Counted, because the other threads run until this is over.
    let denied = AtomicU32::new(0);
    thread::scope(|scope| {
        for _ in 0..2 {
            // Turns out to need nothing after another request was made.
            scope.spawn(|| {
                while is_over.load(Ordering::SeqCst) == 0 {
                    let attempt = attempts.begin();
                    let before = asked.load(Ordering::SeqCst);
                    if take() {
                        let is_asked = || {
                            asked.load(Ordering::SeqCst) != before
                                || is_over.load(Ordering::SeqCst) != 0
                        };
                        // Limited, because the request may precede the reservation.
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
            while available.load(Ordering::SeqCst) != 0 {
                thread::yield_now();
            }
            asked.fetch_add(1, Ordering::SeqCst);
        };
        for _ in 0..rounds {
            ask();
            if attempts.reserve(take) {
                give_back();
            } else {
                denied.fetch_add(1, Ordering::SeqCst);
            }
            ask();
            let attempt = attempts.begin_reserving(take);
            if attempt.is_some() {
                give_back();
            } else {
                denied.fetch_add(1, Ordering::SeqCst);
            }
        }
        is_over.store(1, Ordering::SeqCst);
    });
    assert_eq!(denied.into_inner(), 0);
    assert!(attempts.reserve(take));
    assert!(!attempts.reserve(take), "nothing is left to reserve");
    assert!(attempts.begin_reserving(take).is_none());
}

#[test]
fn treats_result_during_pending_call_as_uncertain() {
    // SAFETY: all zeroes is a valid value.
    let attempts: PendingReservations = unsafe { MaybeUninit::zeroed().assume_init() };
    assert!(attempts.is_certain(|| true));
    assert!(!attempts.is_certain(|| false));
    let attempt = attempts.begin();
    assert!(!attempts.is_certain(|| true), "a call is pending");
    drop(attempt);
    let begin_and_end = || {
        drop(attempts.begin());
        true
    };
    assert!(!attempts.is_certain(begin_and_end), "a call was pending");
    assert!(attempts.is_certain(|| true), "no call is pending");
}

/// Two threads' first use of a primary context would pay twice if one gave up.
#[test]
fn waits_for_exclusive_entry_without_bound() {
    let (gate, has_entered) = (open_gate(), AtomicBool::new(false));
    thread::scope(|scope| {
        let inside = gate.enter();
        scope.spawn(|| {
            let _alone = gate.wait_exclusive();
            has_entered.store(true, Ordering::SeqCst);
        });
        // Longer than the bound of other entries.
        assert!(gate.enter_exclusive().is_none());
        assert!(gate.enter_exclusive().is_none());
        assert!(!has_entered.load(Ordering::SeqCst));
        drop(inside);
    });
    assert!(has_entered.load(Ordering::SeqCst));
}
