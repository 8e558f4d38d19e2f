//! Memory pools that were destroyed while something was allocated in them. CUDA releases what such a pool has once the
//! last of that is freed, which is when the stream in which it was freed has come so far.
//!
//! A destroyed pool cannot be asked any more, so how many of its allocations are left is counted. Whatever is not certain
//! is never counted as freed: then the pool stays charged until the process ends.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::charge_map::{Charge, ChargeMap};

/// When an allocation is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FreedAt {
    /// At once.
    Now,
    /// When that stream, as the hooks of pools name streams, has done what it was told to until now.
    InStream(u64),
    /// Nobody knows.
    Unknown,
}

/// The pools that a process has destroyed before everything in them was freed. All zeroes is none.
pub(crate) struct DestroyedPools {
    last_number: AtomicU64,
    /// By number; `context` is how many allocations are left.
    pools: ChargeMap,
    /// By pointer; `context` is the pool's number.
    allocated: ChargeMap,
    /// What was freed in a stream, by number; `bytes` is the pool's number, `context` the stream.
    in_flight: ChargeMap,
}

impl DestroyedPools {
    fn next_number(&self) -> u64 {
        self.last_number
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1)
    }

    /// Whether the pointer is what a pool gave that was destroyed since.
    pub(crate) fn contains(&self, pointer: u64) -> bool {
        self.allocated.get(pointer).is_some()
    }

    /// Remembers a pool of that card which stays charged `bytes`, until as many allocations as `parse` hands to it are
    /// freed.
    pub(crate) fn add(&self, card: u8, bytes: u64, parse: impl FnOnce(&mut dyn FnMut(u64))) {
        let number = self.next_number();
        let held = |bytes, context| Charge {
            bytes,
            card,
            context,
        };
        // One more, so that it stays until all are known.
        self.pools.insert(number, held(bytes, 1));
        parse(&mut |pointer| {
            self.change_count(number, |count| count.saturating_add(1));
            self.allocated.insert(pointer, held(0, number));
        });
        self.change_count(number, |count| count.saturating_sub(1));
    }

    /// Takes an allocation out that the driver is about to be asked to free. [`DestroyedPools::finish_free`] says that it was,
    /// [`DestroyedPools::cancel_free`] that it was not.
    pub(crate) fn begin_free(&self, pointer: u64) -> Option<Charge> {
        self.allocated.remove(pointer)
    }

    /// The driver has not freed what was taken.
    pub(crate) fn cancel_free(&self, pointer: u64, taken: Charge) {
        self.allocated.insert(pointer, taken);
    }

    /// The driver has freed what was taken. Hands the pool to `release` if it was the last.
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

    /// Counts what was freed in streams that have come so far, as `has_passed` says. Hands pools to `release` of which
    /// nothing is left.
    pub(crate) fn settle(
        &self,
        card: u8,
        has_passed: impl Fn(u64) -> bool,
        mut release: impl FnMut(Charge),
    ) {
        self.in_flight.for_each(|key, freed| {
            // Whoever takes it out counts it.
            if freed.card == card
                && has_passed(freed.context)
                && self.in_flight.remove(key) == Some(freed)
            {
                self.release_one(freed.bytes, &mut release);
            }
        });
    }

    /// A stream is gone, and none can say any more how far it has come.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.in_flight
            .remove_all(|freed| freed.context == stream, |_, _| {});
    }

    /// A context is gone with its streams, and with whatever the driver has freed with it.
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

    /// One allocation of the pool less.
    fn release_one(&self, number: u64, release: impl FnOnce(Charge)) {
        let before = self.pools.change(number, |pool| {
            let context = pool.context.saturating_sub(1);
            Some(Charge { context, ..*pool }).filter(|left| left.context != 0)
        });
        if let Some(pool) = before.filter(|before| before.context <= 1) {
            release(pool);
        }
    }
}
