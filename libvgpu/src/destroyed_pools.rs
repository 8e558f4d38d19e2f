//! Memory pools that were destroyed with live allocations. CUDA releases such a pool after its last allocation is
//! freed, in stream order.
//!
//! A destroyed pool cannot be queried, so its live allocations are counted. An uncertain free does not count: then
//! the pool stays charged until the process ends.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::charge_map::{ChargeMap, record};

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

record! {
    /// A destroyed pool.
    DestroyedPool {
        /// Its charge.
        bytes,
        /// Index of the GPU's first share.
        card,
        /// Live allocations.
        allocations,
    }
}

record! {
    /// An allocation of a destroyed pool.
    PoolMember {
        /// Number of the pool.
        pool,
        /// Index of the GPU's first share.
        card,
        /// The stream in which it was freed; 0 before.
        stream,
    }
}

/// The destroyed pools with live allocations of a process. All zeroes is none.
pub(crate) struct DestroyedPools {
    last_number: AtomicU64,
    /// By number.
    pools: ChargeMap<DestroyedPool>,
    /// By pointer.
    allocated: ChargeMap<PoolMember>,
    /// Freed in a stream, by number.
    in_flight: ChargeMap<PoolMember>,
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
        // One extra reference keeps the pool until all allocations are counted.
        let pool = DestroyedPool {
            bytes,
            card,
            allocations: 1,
        };
        self.pools.insert(number, pool);
        parse(&mut |pointer| {
            self.change_count(number, |count| count.saturating_add(1));
            let member = PoolMember {
                pool: number,
                card,
                stream: 0,
            };
            self.allocated.insert(pointer, member);
        });
        self.change_count(number, |count| count.saturating_sub(1));
    }

    /// Removes an allocation before libcuda is asked to free it. [`DestroyedPools::finish_free`] confirms the free,
    /// [`DestroyedPools::cancel_free`] reverts it.
    pub(crate) fn begin_free(&self, pointer: u64) -> Option<PoolMember> {
        self.allocated.remove(pointer)
    }

    /// Reverts [`DestroyedPools::begin_free`]: libcuda has not freed the allocation.
    pub(crate) fn cancel_free(&self, pointer: u64, member: PoolMember) {
        self.allocated.insert(pointer, member);
    }

    /// Counts an allocation that libcuda has freed. Passes the pool to `release` after the last one.
    pub(crate) fn finish_free(
        &self,
        member: PoolMember,
        when: FreedAt,
        release: impl FnOnce(DestroyedPool),
    ) {
        match when {
            FreedAt::Now => self.release_one(member.pool, release),
            FreedAt::InStream(stream) => {
                let freed = PoolMember { stream, ..member };
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
        mut release: impl FnMut(DestroyedPool),
    ) {
        self.in_flight.for_each(|key, freed| {
            // Only the thread that removes the entry counts it.
            if freed.card == card
                && has_passed(freed.stream)
                && self.in_flight.remove(key) == Some(freed)
            {
                self.release_one(freed.pool, &mut release);
            }
        });
    }

    /// Removes the frees in a destroyed stream, which cannot be queried.
    pub(crate) fn forget_stream(&self, stream: u64) {
        self.in_flight
            .remove_all(|freed| freed.stream == stream, |_, _| {});
    }

    /// Removes everything: a context was destroyed, with its streams and an unknown part of the allocations.
    pub(crate) fn forget_all(&self) {
        self.allocated.remove_all(|_| true, |_, _| {});
        self.in_flight.remove_all(|_| true, |_, _| {});
    }

    fn change_count(&self, number: u64, to: impl FnOnce(u64) -> u64) {
        self.pools.change(number, |pool| {
            Some(DestroyedPool {
                allocations: to(pool.allocations),
                ..*pool
            })
        });
    }

    /// Removes one allocation of the pool.
    fn release_one(&self, number: u64, release: impl FnOnce(DestroyedPool)) {
        let before = self.pools.change(number, |pool| {
            let allocations = pool.allocations.saturating_sub(1);
            (allocations != 0).then_some(DestroyedPool {
                allocations,
                ..*pool
            })
        });
        if let Some(pool) = before.filter(|before| before.allocations <= 1) {
            release(pool);
        }
    }
}
