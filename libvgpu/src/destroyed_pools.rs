//! Memory pools that were destroyed while something was allocated in them. CUDA releases what such a pool has once the
//! last of that is freed, which is when the stream in which it was freed has come so far.
//!
//! A destroyed pool cannot be asked any more, so how many of its allocations are left is counted. Whatever is not certain
//! is never counted as freed: then the pool stays charged until the process ends.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::held::{Held, HeldMap};

/// When an allocation is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Freed {
    /// At once.
    Now,
    /// When that stream, as the hooks of pools name streams, has done what it was told to until now.
    InOrderOf(u64),
    /// Nobody knows.
    Unknown,
}

/// The pools that a process has destroyed before everything in them was freed. All zeroes is none.
pub(crate) struct DestroyedPools {
    last_number: AtomicU64,
    /// By number; `context` is how many allocations are left.
    pools: HeldMap,
    /// By pointer; `context` is the pool's number.
    allocated: HeldMap,
    /// What was freed in a stream, by number; `bytes` is the pool's number, `context` the stream.
    under_way: HeldMap,
}

impl DestroyedPools {
    fn number(&self) -> u64 {
        self.last_number
            .fetch_add(1, Ordering::Relaxed)
            .saturating_add(1)
    }

    /// Whether the pointer is what a pool gave that was destroyed since.
    pub(crate) fn has(&self, pointer: u64) -> bool {
        self.allocated.get(pointer).is_some()
    }

    /// Remembers a pool of that card which stays charged `bytes`, until as many allocations as `take_in` hands to it are
    /// freed.
    pub(crate) fn add(&self, card: u8, bytes: u64, take_in: impl FnOnce(&mut dyn FnMut(u64))) {
        let number = self.number();
        let held = |bytes, context| Held {
            bytes,
            card,
            context,
        };
        // One more, so that it stays until all are known.
        self.pools.insert(number, held(bytes, 1));
        take_in(&mut |pointer| {
            self.change_count(number, |count| count.saturating_add(1));
            self.allocated.insert(pointer, held(0, number));
        });
        self.change_count(number, |count| count.saturating_sub(1));
    }

    /// Takes an allocation out that the driver is about to be asked to free. [`DestroyedPools::freed`] says that it was,
    /// [`DestroyedPools::keep`] that it was not.
    pub(crate) fn take(&self, pointer: u64) -> Option<Held> {
        self.allocated.remove(pointer)
    }

    /// The driver has not freed what was taken.
    pub(crate) fn keep(&self, pointer: u64, taken: Held) {
        self.allocated.insert(pointer, taken);
    }

    /// The driver has freed what was taken. Hands the pool to `release` if it was the last.
    pub(crate) fn freed(&self, taken: Held, when: Freed, release: impl FnOnce(Held)) {
        match when {
            Freed::Now => self.end(taken.context, release),
            Freed::InOrderOf(stream) => {
                let freed = Held {
                    bytes: taken.context,
                    card: taken.card,
                    context: stream,
                };
                self.under_way.insert(self.number(), freed);
            }
            Freed::Unknown => {}
        }
    }

    /// Counts what was freed in streams that have come so far, as `has_passed` says. Hands pools to `release` of which
    /// nothing is left.
    pub(crate) fn settle(
        &self,
        card: u8,
        has_passed: impl Fn(u64) -> bool,
        mut release: impl FnMut(Held),
    ) {
        self.under_way.for_each(|key, freed| {
            // Whoever takes it out counts it.
            if freed.card == card
                && has_passed(freed.context)
                && self.under_way.remove(key) == Some(freed)
            {
                self.end(freed.bytes, &mut release);
            }
        });
    }

    /// A stream is gone, and nobody can say any more how far it has come.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.under_way
            .remove_all(|freed| freed.context == stream, |_, _| {});
    }

    /// A context is gone with its streams, and with whatever the driver has freed with it.
    pub(crate) fn forget_all(&self) {
        self.allocated.remove_all(|_| true, |_, _| {});
        self.under_way.remove_all(|_| true, |_, _| {});
    }

    fn change_count(&self, number: u64, to: impl FnOnce(u64) -> u64) {
        self.pools.change(number, |pool| {
            Some(Held {
                context: to(pool.context),
                ..*pool
            })
        });
    }

    /// One allocation of the pool less.
    fn end(&self, number: u64, release: impl FnOnce(Held)) {
        let before = self.pools.change(number, |pool| {
            let context = pool.context.saturating_sub(1);
            Some(Held { context, ..*pool }).filter(|left| left.context != 0)
        });
        if let Some(pool) = before.filter(|before| before.context <= 1) {
            release(pool);
        }
    }
}
