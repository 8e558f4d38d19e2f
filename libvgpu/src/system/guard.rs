//! Synchronization primitives for the threads of one process. All zeroes is unlocked, so they are unlocked in a
//! forked child.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::system::sys;

/// A lock that is held for a short time.
pub(crate) struct Guard<'a>(&'a AtomicU32);

impl<'a> Guard<'a> {
    /// Waits until `word` is 0.
    pub(crate) fn acquire(word: &'a AtomicU32) -> Self {
        loop {
            if let Some(guard) = Self::try_acquire(word) {
                return guard;
            }
            wait(|| word.load(Ordering::Relaxed) == 0);
        }
    }

    /// Acquires the lock unless `word` is not 0.
    pub(crate) fn try_acquire(word: &'a AtomicU32) -> Option<Self> {
        word.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Self(word))
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Admits any number of shared calls at a time, or one exclusive call.
///
/// libcuda is called inside, which may take long or wait for another thread of the program. So every wait is
/// bounded: after it, the thread enters anyway, or goes without.
pub(crate) struct SharedGate(AtomicU32);

/// A thread is exclusive, or waits for the others to leave.
const EXCLUSIVE: u32 = 1 << 31;
/// Checks before a waiting thread sleeps between checks.
const YIELDING_CHECKS: u32 = 64;
const SLEEP_US: u64 = 50;
/// Checks before a waiting thread gives up: about one second.
const MAX_CHECKS: u32 = 10_000;

/// A call inside a [`SharedGate`].
pub(crate) struct GateGuard<'a> {
    gate: &'a SharedGate,
    is_exclusive: bool,
}

impl SharedGate {
    /// Enters shared, while no thread is exclusive.
    pub(crate) fn enter(&self) -> GateGuard<'_> {
        if !wait(|| self.try_enter()) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        GateGuard {
            gate: self,
            is_exclusive: false,
        }
    }

    /// Enters exclusive. Returns `None` if other threads stay too long.
    pub(crate) fn enter_exclusive(&self) -> Option<GateGuard<'_>> {
        if !wait(|| self.0.fetch_or(EXCLUSIVE, Ordering::SeqCst) & EXCLUSIVE == 0) {
            return None;
        }
        let guard = GateGuard {
            gate: self,
            is_exclusive: true,
        };
        wait(|| self.0.load(Ordering::SeqCst) == EXCLUSIVE).then_some(guard)
    }

    /// Enters exclusive, however long other threads stay.
    pub(crate) fn wait_exclusive(&self) -> GateGuard<'_> {
        loop {
            if let Some(guard) = self.enter_exclusive() {
                return guard;
            }
        }
    }

    fn try_enter(&self) -> bool {
        let one_more = |state: u32| (state & EXCLUSIVE == 0).then_some(state.saturating_add(1));
        self.0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more)
            .is_ok()
    }
}

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        if self.is_exclusive {
            self.gate.0.fetch_and(!EXCLUSIVE, Ordering::SeqCst);
        } else {
            self.gate.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Calls in flight that have reserved the most that they may need and will release the rest.
///
/// They never cause a denial: before one, their end is awaited.
pub(crate) struct PendingReservations {
    gate: SharedGate,
    begun: AtomicU64,
}

impl PendingReservations {
    /// Begins a call, before its reservation; the guard is dropped when the reservation is settled.
    pub(crate) fn begin(&self) -> GateGuard<'_> {
        let guard = self.gate.enter();
        self.begun.fetch_add(1, Ordering::SeqCst);
        guard
    }

    /// Begins a call that reserves its largest need with `reserve`; `None` if that is denied.
    pub(crate) fn begin_reserving(&self, reserve: impl Fn() -> bool) -> Option<GateGuard<'_>> {
        let guard = self.begin();
        if reserve() {
            return Some(guard);
        }
        drop(guard);
        let guard = self.gate.enter_exclusive()?;
        reserve().then_some(guard)
    }

    /// Runs `reserve` for a definite need; `false` if it is denied.
    #[inline]
    pub(crate) fn reserve(&self, reserve: impl Fn() -> bool) -> bool {
        let before = self.settled_count();
        if reserve() {
            return true;
        }
        if before.is_some() && before == self.settled_count() {
            return false;
        }
        let _alone = self.gate.enter_exclusive();
        reserve()
    }

    /// Returns whether `is_so` is true, and not because of a pending reservation.
    #[inline]
    pub(crate) fn is_certain(&self, is_so: impl Fn() -> bool) -> bool {
        let before = self.settled_count();
        before.is_some() && is_so() && before == self.settled_count()
    }

    /// Returns the number of calls begun, if all have ended.
    #[inline]
    fn settled_count(&self) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        (self.gate.0.load(Ordering::SeqCst) == 0).then_some(begun)
    }
}

/// Checks `is_over` repeatedly; returns `false` after [`MAX_CHECKS`].
pub(crate) fn wait(is_over: impl Fn() -> bool) -> bool {
    for check in 0..MAX_CHECKS {
        if is_over() {
            return true;
        }
        if check < YIELDING_CHECKS {
            sys::yield_now();
        } else {
            sys::sleep_us(SLEEP_US);
        }
    }
    false
}
