//! What is charged for memory that the driver keeps for the process where it grows as it is used: in a memory pool, or
//! for the graphs of a device.
//!
//! Before a call the most that it may grow by is reserved, afterwards the charge is made what the driver says. What the
//! driver says has grown by calls that are still under way, too, which have reserved that themselves.
//!
//! Invariants, while no call grows by more than it has reserved:
//! - What is charged and what is reserved are together never less than what the driver has.
//! - They never become more because a call is over.
//! - When no call is under way, what is charged is what the driver said last.

use crate::charge_map::Charge;

/// What is charged of one such place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheCharge {
    /// For what it has.
    pub(crate) charged_bytes: u64,
    /// Reserved by calls that are under way.
    pub(crate) reserved_bytes: u64,
}

/// What has become of the charge and the caller's reservation: they were `from` together and are to be `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settled {
    pub(crate) charge: CacheCharge,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl CacheCharge {
    /// What was remembered.
    pub(crate) fn of(held: &Charge) -> Self {
        Self {
            charged_bytes: held.bytes,
            reserved_bytes: held.context,
        }
    }

    /// To be remembered for a card.
    pub(crate) fn to_charge(self, card: u8) -> Charge {
        Charge {
            bytes: self.charged_bytes,
            card,
            context: self.reserved_bytes,
        }
    }

    /// A call has reserved so much and is about to be made.
    pub(crate) fn add_reservation(self, reserved_bytes: u64) -> Self {
        Self {
            reserved_bytes: self.reserved_bytes.saturating_add(reserved_bytes),
            ..self
        }
    }

    /// A call is about to be made that may need so much, and the driver will never have more than `most_bytes`. As far as
    /// that is covered already, the call needs no reservation of its own: so much of the charge becomes one. Returns how
    /// much.
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

    /// A call that had reserved so much is over, and the driver says what it has now.
    pub(crate) fn settle(self, reserved_bytes: u64, has_bytes: u64) -> Settled {
        let other_reservations = self.reserved_bytes.saturating_sub(reserved_bytes);
        let own = self.charged_bytes.saturating_add(reserved_bytes);
        // What exceeds that has grown by calls of others, if they have reserved so much.
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

    /// What none has paid for of what the driver has.
    pub(crate) fn uncharged_bytes(self, has_bytes: u64) -> u64 {
        has_bytes
            .saturating_sub(self.charged_bytes)
            .saturating_sub(self.reserved_bytes)
    }
}
