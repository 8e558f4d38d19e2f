//! Memory that a share lends, or was lent: what it gives away, and whether it is back.

use std::io;

use super::{ReadBuffer, RecordedMemory, TrackedShare};
use crate::agent::policy::burst::{Loan, idle_bytes};
use crate::node::claim::ClaimRef;

/// Time after which an allocation that was admitted before a limit was lowered is charged, µs.
const SETTLED_US: u64 = 250_000;

/// Time for which a share lends nothing after it began, or after one of its processes needed what it had lent, µs.
pub(super) const LENDING_PAUSE_US: u64 = 10_000_000;

/// Age of a demand for memory at which no process waits any more, µs: libvgpu repeats it every few milliseconds.
const DEMAND_AGE_US: u64 = 1_000_000;

/// Time within which a share gets the memory back that it has lent, µs: libvgpu waits for no longer.
const RECALL_US: u64 = 2_000_000;

/// A limit that was lowered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lowered {
    pub(super) at_us: u64,
    /// The limit before, bytes.
    pub(super) from_bytes: u64,
}

/// The order to a share to give back all memory beyond its guarantee.
#[derive(Debug, Clone)]
pub struct Reclaim {
    /// Time of the order, µs.
    pub since_us: u64,
    /// The claim that is guaranteed the memory.
    pub claim: ClaimRef,
    /// When processes were last killed for it, µs.
    pub killed_us: Option<u64>,
}

/// What a share lends of its guarantee.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lending {
    /// It lends nothing until then, µs.
    pub(super) paused_until_us: u64,
    /// When its processes began to need what is lent; `None` if they do not.
    pub(super) recalled_us: Option<u64>,
    /// Whether the recall was counted as missed.
    pub(super) is_missed: bool,
    /// What its processes have by NVML, bytes; `None` before the first list.
    pub(super) observed_bytes: Option<u64>,
}

impl TrackedShare {
    /// Applies what its processes have by NVML.
    pub const fn set_observed_use(&mut self, bytes: u64) {
        self.lending.observed_bytes = Some(bytes);
    }

    /// Returns what it lends and could lend. Its use is the larger of what its region and NVML show: neither a forged region nor a list
    /// that is late lets others use what it has.
    ///
    /// Its guarantee is due when one of its processes says so, when it uses more than its page has, and when it shrinks. A share that has
    /// its guarantee lends nothing, so it cannot ask for anything.
    pub fn loan(&mut self, now_us: u64, buffer: &mut ReadBuffer) -> Loan {
        let lent_bytes = self.page.limits().lent_bytes;
        if !self.memory.lends_idle {
            return Loan::default();
        }
        let region = self.live_use(buffer).map_or(u64::MAX, |live| {
            let excess = self.page.limits().driver_excess_bytes;
            live.bytes.saturating_add(excess)
        });
        let Some(observed) = self.lending.observed_bytes else {
            // What an earlier agent has lent stays.
            return Loan {
                lent_bytes,
                idle_bytes: lent_bytes,
                is_recalled: false,
            };
        };
        let used_bytes = observed.max(region);
        let RecordedMemory {
            held_bytes,
            kept_bytes,
            ..
        } = self.memory;
        if lent_bytes == 0 {
            self.lending.recalled_us = None;
            self.lending.is_missed = false;
        } else {
            let is_over = self
                .usable_bytes()
                .is_some_and(|usable| used_bytes > usable);
            if is_over || kept_bytes < held_bytes || self.demands_memory(now_us, buffer) {
                self.lending.recalled_us.get_or_insert(now_us);
                self.lending.paused_until_us = now_us.saturating_add(LENDING_PAUSE_US);
            }
        }
        let is_paused = now_us < self.lending.paused_until_us
            || kept_bytes < held_bytes
            || self.page.limits().memory_limit_bytes != Some(kept_bytes);
        Loan {
            lent_bytes,
            idle_bytes: match is_paused {
                true => 0,
                false => idle_bytes(kept_bytes, used_bytes),
            },
            is_recalled: self.lending.recalled_us.is_some(),
        }
    }

    /// Returns whether one of its processes says that it waits for memory that is lent.
    fn demands_memory(&self, now_us: u64, buffer: &mut ReadBuffer) -> bool {
        let header = self.region.header(buffer);
        header.is_ok_and(|header| {
            let since_us = now_us.checked_sub(header.share.memory_demand_us);
            since_us.is_some_and(|since_us| since_us < DEMAND_AGE_US)
        })
    }

    /// Returns whether memory that it needs back has become late since the last call.
    pub fn is_newly_missed(&mut self, now_us: u64) -> bool {
        let Lending {
            recalled_us,
            is_missed,
            ..
        } = &mut self.lending;
        let is_late = recalled_us.is_some_and(|since| now_us.saturating_sub(since) >= RECALL_US);
        is_late && !std::mem::replace(is_missed, is_late)
    }

    /// Writes what it lends.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_lent(&mut self, now_us: u64, lent_bytes: u64) -> io::Result<()> {
        let limits = self.page.limits();
        if lent_bytes > limits.lent_bytes {
            // Before the write, which may fail half-way.
            self.lowered.push(Lowered {
                at_us: now_us,
                from_bytes: self.usable_bytes().unwrap_or(u64::MAX),
            });
        }
        self.page.change(|limits| limits.lent_bytes = lent_bytes)
    }

    /// Writes the memory limit of a share that can burst.
    ///
    /// # Errors
    /// If the page cannot be written.
    pub fn set_memory_limit(&mut self, now_us: u64, limit_bytes: u64) -> io::Result<()> {
        let present_bytes = self.page.limits().memory_limit_bytes.unwrap_or(u64::MAX);
        if limit_bytes < present_bytes {
            // Before the write, which may fail half-way.
            self.lowered.push(Lowered {
                at_us: now_us,
                from_bytes: present_bytes,
            });
        }
        self.page
            .change(|limits| limits.memory_limit_bytes = Some(limit_bytes))
    }

    /// Applies that at `observed_us` its use was within the limit of its page.
    pub fn confirm_return(&mut self, observed_us: u64) {
        let is_settled =
            |lowered: &Lowered| lowered.at_us.saturating_add(SETTLED_US) <= observed_us;
        self.lowered.retain(|lowered| !is_settled(lowered));
        if self.lowered.is_empty() {
            self.reclaim = None;
        }
    }
}
