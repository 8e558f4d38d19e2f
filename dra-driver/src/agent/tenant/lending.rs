//! An idle share whose time others use, and the moment at which it wants that back.

use std::io;

use super::Tenant;
use crate::agent::control::Turn;
use crate::agent::share::Scratch;

/// A share that has woken is looked at for so long whether it goes on, µs.
const WATCHED_US: u64 = 1_000_000;

/// One of those that has wanted nothing for so long is idle again, µs: several times as long as a launch that waits sleeps.
const RESTS_US: u64 = 40_000;

/// Whether others use the time of a share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Lending {
    /// They do not.
    #[default]
    Kept,
    /// They do, while it is idle.
    Lent,
    /// They did until a moment ago. Who works in bursts rests before it is measured again.
    Back {
        /// Until then it is looked at whether it goes on, µs.
        until_us: u64,
    },
}

impl Tenant {
    /// Whether it calls when it wants time, because others use what it has.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.lending == Lending::Lent
    }

    /// Whether it may wake or rest at any moment.
    #[must_use]
    pub fn may_turn(&self, now_us: u64) -> bool {
        match self.lending {
            Lending::Kept => false,
            Lending::Lent => true,
            Lending::Back { until_us } => now_us < until_us,
        }
    }

    /// Says whether others use its time. One without processes cannot want it back at any moment.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn set_lent(&mut self, is_lent: bool) -> io::Result<()> {
        self.lending = match self.lending {
            _ if is_lent && self.is_here() => Lending::Lent,
            Lending::Kept | Lending::Lent => Lending::Kept,
            back @ Lending::Back { .. } => back,
        };
        self.page.lend(self.is_lent())
    }

    /// Whether it has begun to want time, or ceased to, since it was last measured or has turned. What it did meanwhile is
    /// left to the next measurement.
    pub fn turn(&mut self, now_us: u64, scratch: &mut Scratch) -> Option<Turn> {
        if !(self.may_turn(now_us) && self.is_here()) {
            return None;
        }
        let glance = self.usage.glance(scratch).ok()?;
        let wanted_us = glance.share.last_demand_us;
        let has_acted = wanted_us != self.turned_us;
        self.turned_us = wanted_us;
        let is_quiet = now_us.saturating_sub(wanted_us) >= RESTS_US;
        if self.is_lent() {
            let until_us = now_us.saturating_add(WATCHED_US);
            has_acted.then_some(())?;
            self.lending = Lending::Back { until_us };
            Some(Turn::Wakes)
        } else if is_quiet && !self.is_in_debt(&glance, now_us) {
            Some(Turn::Rests)
        } else {
            None
        }
    }
}
