//! Conversion of charges and their corrections into the counter of GPU time, which only rises.

use core::sync::atomic::{AtomicU64, Ordering};

const NS_PER_US: i64 = 1_000;

/// GPU time of one GPU that is not in its counter yet. All zeroes is none.
pub(crate) struct CountedTime {
    /// GPU time that was counted in excess and is subtracted from the next amounts, microseconds.
    excess_us: AtomicU64,
    /// Amounts of less than a microsecond, nanoseconds in two's complement.
    remainder_ns: AtomicU64,
}

impl CountedTime {
    /// Adds `ns` and returns the microseconds by which the counter rises. A negative amount is subtracted from the next
    /// amounts.
    pub(crate) fn add(&self, ns: i64) -> u64 {
        let remainder_ns = self.remainder_ns.swap(0, Ordering::Relaxed).cast_signed();
        let sum = remainder_ns.saturating_add(ns);
        let us = sum / NS_PER_US;
        self.remainder_ns
            .fetch_add((sum % NS_PER_US).cast_unsigned(), Ordering::Relaxed);
        if us < 0 {
            self.excess_us
                .fetch_add(us.unsigned_abs(), Ordering::Relaxed);
            return 0;
        }
        let us = us.unsigned_abs();
        let less = |excess_us: u64| (excess_us != 0).then(|| excess_us.saturating_sub(us));
        let updated = self
            .excess_us
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        us.saturating_sub(updated.unwrap_or(0))
    }
}
