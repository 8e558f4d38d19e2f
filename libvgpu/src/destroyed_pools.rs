//! Memory pools that were destroyed with live allocations. CUDA releases such a pool after its last allocation is
//! freed, in stream order.
//!
//! A destroyed pool cannot be queried, so its live allocations are counted. An uncertain free does not count: then
//! the pool stays charged until the process ends.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::charge_map::{Charge, ChargeMap};

/// When an allocation becomes free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreedAt {
    /// Immediately.
    Now,
    /// When the stream with this key has completed its present work.
    InStream(u64),
    /// Unknown.
    Unknown,
}

/// The destroyed pools with live allocations of a process. All zeroes is none.
pub(crate) struct DestroyedPools {
    last_number: AtomicU64,
    /// By number; `context` is the number of live allocations.
    pools: ChargeMap,
    /// By pointer; `context` is the pool's number.
    allocated: ChargeMap,
    /// Freed in a stream, by number; `bytes` is the pool's number, `context` the stream.
    in_flight: ChargeMap,
}

impl DestroyedPools {
    fn next_number(&self) -> u64 {
        self.last_number
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1)
    }

    /// Returns whether the pointer is an allocation of a destroyed pool.
    pub(crate) fn contains(&self, pointer: u64) -> bool {
        self.allocated.get(pointer).is_some()
    }

    /// Adds a pool on `card` that stays charged `bytes` until all allocations that `add_each` passes to it are
    /// freed.
    pub(crate) fn add(&self, card: u8, bytes: u64, parse: impl FnOnce(&mut dyn FnMut(u64))) {
        let number = self.next_number();
        let charge = |bytes, context| Charge {
            bytes,
            card,
            context,
        };
        // One extra reference keeps the pool until all allocations are counted.
        self.pools.insert(number, charge(bytes, 1));
        parse(&mut |pointer| {
            self.change_count(number, |count| count.saturating_add(1));
            self.allocated.insert(pointer, charge(0, number));
        });
        self.change_count(number, |count| count.saturating_sub(1));
    }

    /// Removes an allocation before libcuda is asked to free it. [`DestroyedPools::finish_free`] confirms the free,
    /// [`DestroyedPools::cancel_free`] reverts it.
    pub(crate) fn begin_free(&self, pointer: u64) -> Option<Charge> {
        self.allocated.remove(pointer)
    }

    /// Reverts [`DestroyedPools::begin_free`]: libcuda has not freed the allocation.
    pub(crate) fn cancel_free(&self, pointer: u64, taken: Charge) {
        self.allocated.insert(pointer, taken);
    }

    /// Counts an allocation that libcuda has freed. Passes the pool to `release` after the last one.
    pub(crate) fn finish_free(&self, taken: Charge, when: FreedAt, release: impl FnOnce(Charge)) {
        match when {
            FreedAt::Now => self.release_one(taken.context, release),
            FreedAt::InStream(stream) => {
                let freed = Charge {
                    bytes: taken.context,
                    card: taken.card,
                    context: stream,
                };
                self.in_flight.insert(self.next_number(), freed);
            }
            FreedAt::Unknown => {}
        }
    }

    /// Counts allocations freed in streams for which `has_passed` is true. Passes pools without live allocations to
    /// `release`.
    pub(crate) fn settle(
        &self,
        card: u8,
        has_passed: impl Fn(u64) -> bool,
        mut release: impl FnMut(Charge),
    ) {
        self.in_flight.for_each(|key, freed| {
            // Only the thread that removes the entry counts it.
            if freed.card == card
                && has_passed(freed.context)
                && self.in_flight.remove(key) == Some(freed)
            {
                self.release_one(freed.bytes, &mut release);
            }
        });
    }

    /// Removes the frees in a destroyed stream, which cannot be queried.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.in_flight
            .remove_all(|freed| freed.context == stream, |_, _| {});
    }

    /// Removes everything: a context was destroyed, with its streams and an unknown part of the allocations.
    pub(crate) fn forget_all(&self) {
        self.allocated.remove_all(|_| true, |_, _| {});
        self.in_flight.remove_all(|_| true, |_, _| {});
    }

    fn change_count(&self, number: u64, to: impl FnOnce(u64) -> u64) {
        self.pools.change(number, |pool| {
            Some(Charge {
                context: to(pool.context),
                ..*pool
            })
        });
    }

    /// Removes one allocation of the pool.
    fn release_one(&self, number: u64, release: impl FnOnce(Charge)) {
        let before = self.pools.change(number, |pool| {
            let context = pool.context.saturating_sub(1);
            Some(Charge { context, ..*pool }).filter(|remaining| remaining.context != 0)
        });
        if let Some(pool) = before.filter(|before| before.context <= 1) {
            release(pool);
        }
    }
}
