//! How the threads of this process keep out of each other's way. All zeroes is free, so a forked child finds everything
//! free.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys;

/// Mutual exclusion of this process's threads.
pub(crate) struct Guard<'a>(&'a AtomicU32);

impl<'a> Guard<'a> {
    /// Waits until `word` is 0.
    pub(crate) fn acquire(word: &'a AtomicU32) -> Self {
        while word
            .compare_exchange_weak(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            sys::yield_now();
        }
        Self(word)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Lets through any number of calls at a time, or one that must be alone.
///
/// The driver is called in between, which may take long or wait for another thread of the program. So none waits here
/// for ever: whoever has waited for long goes on, or does without.
pub(crate) struct SharedGate(AtomicU32);

/// Somebody is alone, or waits until the others are through.
const EXCLUSIVE: u32 = 1 << 31;
/// Looks before a waiting thread sleeps between two.
const YIELDING_CHECKS: u32 = 64;
const SLEEP_US: u64 = 50;
/// Looks before a waiting thread gives up: about a second.
const MAX_CHECKS: u32 = 10_000;

/// A call that is on its way through a [`SharedGate`].
pub(crate) struct GateGuard<'a> {
    gate: &'a SharedGate,
    is_exclusive: bool,
}

impl SharedGate {
    /// Goes through with others, while none is alone.
    pub(crate) fn enter(&self) -> GateGuard<'_> {
        if !wait(|| self.try_enter()) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        GateGuard {
            gate: self,
            is_exclusive: false,
        }
    }

    /// Goes through as the only one. `None` if others take too long.
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

/// Calls under way that have reserved the most that they may need, and will give back what they do not.
///
/// Nothing is refused because of them: before it is, they are waited for.
pub(crate) struct PendingReservations {
    gate: SharedGate,
    begun: AtomicU64,
}

impl PendingReservations {
    /// Begins one, before anything is reserved for it; it ends when that is settled.
    pub(crate) fn begin(&self) -> GateGuard<'_> {
        let guard = self.gate.enter();
        self.begun.fetch_add(1, Ordering::SeqCst);
        guard
    }

    /// Begins one for which `reserve` takes the most that it may need; `None` if that is refused.
    pub(crate) fn begin_reserving(&self, reserve: impl Fn() -> bool) -> Option<GateGuard<'_>> {
        let guard = self.begin();
        if reserve() {
            return Some(guard);
        }
        drop(guard);
        let guard = self.gate.enter_exclusive()?;
        reserve().then_some(guard)
    }

    /// Takes with `reserve` what is is_certain needed; `false` if that is refused.
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

    /// Whether it is so and not because of any that is under way.
    #[inline]
    pub(crate) fn is_certain(&self, is_so: impl Fn() -> bool) -> bool {
        let before = self.settled_count();
        before.is_some() && is_so() && before == self.settled_count()
    }

    /// How many have begun, if all of them are over.
    #[inline]
    fn settled_count(&self) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        (self.gate.0.load(Ordering::SeqCst) == 0).then_some(begun)
    }
}

/// Looks until `is_over`; `false` if that takes too long.
fn wait(is_over: impl Fn() -> bool) -> bool {
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
