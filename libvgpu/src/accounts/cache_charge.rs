//! Charge for memory that libcuda caches for the process and that grows with use: in a memory pool, or for the
//! graphs of a device.
//!
//! A call reserves its largest possible growth first; then the charge is set to the size that libcuda reports. That
//! size includes the growth of concurrent calls, which have their own reservations.
//!
//! Invariants, while no call grows the cache by more than its reservation:
//! - Charge and reservations are together never less than the size of the cache.
//! - The end of a call never increases their sum.
//! - With no call in flight, the charge is the last reported size.

use crate::accounts::charge_map::{Record, record};

record! {
    /// Record of a driver cache.
    Cache {
        /// See [`CacheCharge`].
        charged_bytes,
        /// Index of the GPU's first share; [`u8::MAX`] if the cache is not counted.
        gpu,
        /// See [`CacheCharge`].
        reserved_bytes,
    }
}

/// A size of a cache that libcuda reported.
///
/// Queries of several threads overlap, since libcuda is called without a lock. The growth of a call is in the reports of
/// all queries that begin after the call. So the report of the latest query counts, whichever is recorded last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Number of the query, in the order in which queries begin.
    pub(crate) query: u64,
    pub(crate) bytes: u64,
}

impl Report {
    /// Returns the report of the later query.
    pub(crate) fn latest(self, other: Self) -> Self {
        if other.query > self.query {
            other
        } else {
            self
        }
    }
}

impl Record for Report {
    fn to_words(self) -> [u64; 2] {
        [self.query, self.bytes]
    }

    fn from_words([query, bytes]: [u64; 2]) -> Self {
        Self { query, bytes }
    }
}

/// Charge for one driver cache (memory pool or graph memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheCharge {
    /// For its reported size.
    pub(crate) charged_bytes: u64,
    /// Reserved by calls in flight.
    pub(crate) reserved_bytes: u64,
}

/// The charge after a call. The caller corrects its account from `from` bytes to `to` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settled {
    pub(crate) charge: CacheCharge,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl CacheCharge {
    /// Returns the charge of a cache.
    pub(crate) fn of(cache: &Cache) -> Self {
        Self {
            charged_bytes: cache.charged_bytes,
            reserved_bytes: cache.reserved_bytes,
        }
    }

    /// Returns the record of the cache.
    pub(crate) fn on(self, gpu: u8) -> Cache {
        Cache {
            charged_bytes: self.charged_bytes,
            gpu,
            reserved_bytes: self.reserved_bytes,
        }
    }

    /// Adds the reservation of a call in flight.
    pub(crate) fn add_reservation(self, reserved_bytes: u64) -> Self {
        Self {
            reserved_bytes: self.reserved_bytes.saturating_add(reserved_bytes),
            ..self
        }
    }

    /// Reserves `need_bytes` for a call, of a cache that never exceeds `most_bytes`. The part that the present
    /// charge covers needs no new reservation: it is moved from the charge and returned.
    pub(crate) fn reuse_charge(self, need_bytes: u64, most_bytes: u64) -> (Self, u64) {
        let total = self.charged_bytes.saturating_add(self.reserved_bytes);
        let uncovered = most_bytes.saturating_sub(total);
        let reused = need_bytes.saturating_sub(uncovered).min(self.charged_bytes);
        let charge = Self {
            charged_bytes: self.charged_bytes.saturating_sub(reused),
            reserved_bytes: self.reserved_bytes.saturating_add(reused),
        };
        (charge, reused)
    }

    /// Ends a call that reserved `reserved_bytes`; the latest [`Report`] is `has_bytes`.
    pub(crate) fn settle(self, reserved_bytes: u64, has_bytes: u64) -> Settled {
        let other_reservations = self.reserved_bytes.saturating_sub(reserved_bytes);
        let own = self.charged_bytes.saturating_add(reserved_bytes);
        // The excess is growth of concurrent calls, up to their reservations.
        let charged_bytes = has_bytes
            .min(own)
            .max(has_bytes.saturating_sub(other_reservations));
        Settled {
            charge: Self {
                charged_bytes,
                reserved_bytes: other_reservations,
            },
            from: own,
            to: charged_bytes,
        }
    }

    /// Returns the part of the reported size that is neither charged nor reserved.
    pub(crate) fn uncharged_bytes(self, has_bytes: u64) -> u64 {
        has_bytes
            .saturating_sub(self.charged_bytes)
            .saturating_sub(self.reserved_bytes)
    }
}
