//! How the threads of this process keep out of each other's way. All zeroes is free, so a forked child finds everything
//! free.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::sys;

/// Mutual exclusion of this process's threads.
pub(crate) struct Guard<'a>(&'a AtomicU32);

impl<'a> Guard<'a> {
    /// Waits until `word` is 0.
    pub(crate) fn take(word: &'a AtomicU32) -> Self {
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
/// The driver is called in between, which may take long or wait for another thread of the program. So nobody waits here
/// for ever: whoever has waited for long goes on, or does without.
pub(crate) struct Gate(AtomicU32);

/// Somebody is alone, or waits until the others are through.
const ALONE: u32 = 1 << 31;
/// Looks before a waiting thread sleeps between two.
const EAGER_LOOKS: u32 = 64;
const SLEEP_US: u64 = 50;
/// Looks before a waiting thread gives up: about a second.
const LOOKS: u32 = 10_000;

/// A call that is on its way through a [`Gate`].
pub(crate) struct Passage<'a> {
    gate: &'a Gate,
    is_alone: bool,
}

impl Gate {
    /// Goes through with others, while nobody is alone.
    pub(crate) fn pass(&self) -> Passage<'_> {
        if !wait(|| self.enter()) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        Passage {
            gate: self,
            is_alone: false,
        }
    }

    /// Goes through as the only one. `None` if others take too long.
    pub(crate) fn pass_alone(&self) -> Option<Passage<'_>> {
        if !wait(|| self.0.fetch_or(ALONE, Ordering::SeqCst) & ALONE == 0) {
            return None;
        }
        let passage = Passage {
            gate: self,
            is_alone: true,
        };
        wait(|| self.0.load(Ordering::SeqCst) == ALONE).then_some(passage)
    }

    fn enter(&self) -> bool {
        let one_more = |state: u32| (state & ALONE == 0).then_some(state.saturating_add(1));
        self.0
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more)
            .is_ok()
    }
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        if self.is_alone {
            self.gate.0.fetch_and(!ALONE, Ordering::SeqCst);
        } else {
            self.gate.0.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Calls under way that have reserved the most that they may need, and will give back what they do not.
///
/// Nothing is refused because of them: before it is, they are waited for.
pub(crate) struct Attempts {
    gate: Gate,
    begun: AtomicU64,
}

impl Attempts {
    /// Begins one, before anything is reserved for it; it ends when that is settled.
    pub(crate) fn begin(&self) -> Passage<'_> {
        let passage = self.gate.pass();
        self.begun.fetch_add(1, Ordering::SeqCst);
        passage
    }

    /// Begins one for which `reserve` takes the most that it may need; `None` if that is refused.
    pub(crate) fn begin_with(&self, reserve: impl Fn() -> bool) -> Option<Passage<'_>> {
        let passage = self.begin();
        if reserve() {
            return Some(passage);
        }
        drop(passage);
        let alone = self.gate.pass_alone()?;
        reserve().then_some(alone)
    }

    /// Takes with `reserve` what is surely needed; `false` if that is refused.
    #[inline]
    pub(crate) fn take(&self, reserve: impl Fn() -> bool) -> bool {
        let before = self.none_until_now();
        if reserve() {
            return true;
        }
        if before.is_some() && before == self.none_until_now() {
            return false;
        }
        let _alone = self.gate.pass_alone();
        reserve()
    }

    /// Whether it is so and not because of any that is under way.
    #[inline]
    pub(crate) fn surely(&self, is_so: impl Fn() -> bool) -> bool {
        let before = self.none_until_now();
        before.is_some() && is_so() && before == self.none_until_now()
    }

    /// How many have begun, if all of them are over.
    #[inline]
    fn none_until_now(&self) -> Option<u64> {
        let begun = self.begun.load(Ordering::SeqCst);
        (self.gate.0.load(Ordering::SeqCst) == 0).then_some(begun)
    }
}

/// Looks until `is_over`; `false` if that takes too long.
fn wait(is_over: impl Fn() -> bool) -> bool {
    for look in 0..LOOKS {
        if is_over() {
            return true;
        }
        if look < EAGER_LOOKS {
            sys::yield_now();
        } else {
            sys::sleep_us(SLEEP_US);
        }
    }
    false
}
