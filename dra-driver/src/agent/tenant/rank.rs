//! What a share is told about those of other priorities, and what it says to those who give way to it.

use std::io;
use std::path::Path;

use drava_vgpu_abi::snapshot::ShareUsage;

use super::{Tenant, WANTS_FOR_US};
use crate::agent::share::{Glance, Scratch};

/// What a share may have in the card's queues while one of higher priority has processes there, µs of GPU time: about so
/// long does that one wait for the card, or for one kernel.
const WINDOW_US: u32 = 250;

/// How a share stands to others of the card by its priority.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rank {
    /// Others give way to it, so it calls the agent when it begins to use the card.
    pub calls: bool,
    /// It gives way to others.
    pub gives_way: bool,
}

impl Tenant {
    /// Says how it stands to the others.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn set_rank(&mut self, rank: Rank) -> io::Result<()> {
        self.rank = rank;
        let window_us = if rank.gives_way { WINDOW_US } else { 0 };
        self.page.rank(window_us, rank.calls)
    }

    /// Lets it make no launches until then, µs; 0 lets it go on.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn give_way(&mut self, until_us: u64) -> io::Result<()> {
        self.page.give_way(until_us)
    }

    /// Where its region lies.
    #[must_use]
    pub fn usage_dir(&self) -> &Path {
        self.usage.dir()
    }

    /// Until when it says that it is at work, µs; 0 if it says nothing.
    pub fn busy_until_us(&self, now_us: u64, scratch: &mut Scratch) -> u64 {
        let glance = (self.rank.calls && self.is_here()).then(|| self.usage.glance(scratch));
        match glance {
            Some(Ok(Glance { share, .. })) => self.at_work_until_us(&share, now_us),
            Some(Err(_)) | None => 0,
        }
    }

    pub(super) fn at_work_until_us(&self, share: &ShareUsage, now_us: u64) -> u64 {
        // One that has noted its demand after its last launch waits; for the token, which comes only if others are kept
        // from it. What it waits for without turns is its own rate.
        let waits = self.takes_turns() && share.last_demand_us > share.busy_until_us;
        let waits_until_us = share
            .last_demand_us
            .min(now_us)
            .saturating_add(WANTS_FOR_US);
        share
            .busy_until_us
            .max(if waits { waits_until_us } else { 0 })
    }
}
