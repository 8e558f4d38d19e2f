//! Activity of one share. Pure: readings of its usage region in, measurements and changes of activity out.
//!
//! libvgpu writes the time of the last demand to the header of the region. Only if that has changed, the slots of the
//! processes are read. A share whose idle time is lent notifies the agent when it resumes; it is polled for a while
//! after that, because a share that works in bursts goes idle again before the next tick.

use drava_vgpu_abi::snapshot::ShareUsage;

use super::control::{ActivityChange, Measured};
use super::usage_counters::UsageDelta;

/// Longest debt that is believed, µs: a kernel of that length may be running.
const MAX_DEBT_US: u64 = 1_000_000;

/// Time for which a resumed share is polled, µs.
const POLLED_US: u64 = 1_000_000;

/// Time without demand after which a polled share is idle, µs: several of the longest sleeps of a waiting launch.
const IDLE_AFTER_US: u64 = 40_000;

/// The header of a usage region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegionHeader {
    /// Values of the share.
    pub share: ShareUsage,
    /// When the credit was last refilled, µs.
    pub refilled_us: u64,
    /// Slots that were ever in use.
    pub slots_in_use: usize,
}

impl RegionHeader {
    /// GPU time of launched kernels that is not repaid, as of the last refill, µs.
    fn debt_us(&self) -> u64 {
        let debt_us = self.share.credit_us.min(0).unsigned_abs();
        debt_us.min(MAX_DEBT_US)
    }

    /// Returns whether debt remains at `now_us` with this rate. Only launches refill the credit.
    #[must_use]
    pub fn is_in_debt(&self, now_us: u64, rate_us_per_s: u32) -> bool {
        let since_us = now_us.saturating_sub(self.refilled_us);
        let repaid_us = since_us.saturating_mul(u64::from(rate_us_per_s)) / 1_000_000;
        self.share.last_demand_us > 0 && self.debt_us() > repaid_us
    }
}

/// Whether other shares use the time of a share.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Lending {
    #[default]
    NotLent,
    /// They do, while it is idle.
    Lent,
    /// They did until it resumed.
    Reclaimed { polled_until_us: u64 },
}

/// A tick's measurement of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Activity {
    /// Input of the controller.
    pub measured: Measured,
    /// Duration of a kernel at least twice as long as any reported before, µs.
    pub long_kernel_us: Option<u64>,
}

/// Follows the activity of one share.
#[derive(Debug, Clone)]
pub struct ActivityTracker {
    lending: Lending,
    /// Last demand at the last measurement, µs.
    demand_us: u64,
    /// Last demand at the last measurement or change of activity, µs.
    seen_demand_us: u64,
    was_idle: bool,
    /// Mean duration of the launches in the last tick that had any, µs.
    launch_us: u64,
    reported_kernel_us: u64,
    /// Refill after which its debt was repaid, µs.
    repaid_us: u64,
}

impl Default for ActivityTracker {
    fn default() -> Self {
        Self {
            lending: Lending::NotLent,
            demand_us: 0,
            seen_demand_us: 0,
            was_idle: true,
            launch_us: 0,
            reported_kernel_us: 0,
            repaid_us: 0,
        }
    }
}

impl ActivityTracker {
    /// Last demand at the last measurement, µs.
    #[must_use]
    pub fn demand_us(&self) -> u64 {
        self.demand_us
    }

    /// Whether other shares use its time, so that it notifies the agent when it resumes.
    #[must_use]
    pub fn is_lent(&self) -> bool {
        self.lending == Lending::Lent
    }

    /// Whether its activity may change before the next tick.
    #[must_use]
    pub fn is_polled(&self, now_us: u64) -> bool {
        match self.lending {
            Lending::NotLent => false,
            Lending::Lent => true,
            Lending::Reclaimed { polled_until_us } => now_us < polled_until_us,
        }
    }

    /// Applies a decision of the controller: whether other shares use its time.
    pub fn set_lent(&mut self, is_lent: bool) {
        self.lending = match self.lending {
            _ if is_lent => Lending::Lent,
            Lending::NotLent | Lending::Lent => Lending::NotLent,
            reclaimed @ Lending::Reclaimed { .. } => reclaimed,
        };
    }

    /// Returns whether the GPU still has work of the share, which it does at about `pace_us_per_s`. Debt that is repaid once
    /// does not return when the share gets less.
    pub fn is_in_debt(&mut self, header: &RegionHeader, now_us: u64, pace_us_per_s: u32) -> bool {
        let is_repaid = header.refilled_us == self.repaid_us;
        if is_repaid || !header.is_in_debt(now_us, pace_us_per_s) {
            self.repaid_us = header.refilled_us;
            return false;
        }
        true
    }

    /// Measures a share without processes.
    pub fn measure_empty(&mut self) -> Activity {
        self.was_idle = true;
        self.unchanged()
    }

    /// Returns the measurement of a share whose region cannot be read: it did nothing.
    #[must_use]
    pub fn unchanged(&self) -> Activity {
        Activity {
            measured: Measured {
                launch_us: self.launch_us,
                ..Measured::default()
            },
            long_kernel_us: None,
        }
    }

    /// Measures a share since the last tick. A share in debt waits before its next launch if it `is_limited`; without demand
    /// since the last tick, its program waits for the GPU. `read_slots` returns the difference of its counters, or `None` if
    /// they cannot be read; it is called only if there was demand.
    pub fn measure(
        &mut self,
        header: &RegionHeader,
        is_in_debt: bool,
        is_limited: bool,
        read_slots: impl FnOnce() -> Option<UsageDelta>,
    ) -> Activity {
        let demand_us = header.share.last_demand_us;
        // A lent share without demand since it went idle has done nothing more.
        let is_idle = self.is_lent() && demand_us == self.seen_demand_us && !is_in_debt;
        self.seen_demand_us = demand_us;
        let unchanged = self.unchanged();
        if std::mem::replace(&mut self.demand_us, demand_us) == demand_us {
            self.was_idle = !is_in_debt;
            let measured = Measured {
                has_waited: is_in_debt,
                is_idle,
                ..unchanged.measured
            };
            return Activity {
                measured,
                ..unchanged
            };
        }
        let Some(delta) = read_slots() else {
            return unchanged;
        };
        let UsageDelta {
            used_us,
            throttled_us,
            launches,
            long_kernel_us,
        } = delta;
        let long_kernel_us = long_kernel_us.filter(|us| us / 2 >= self.reported_kernel_us);
        self.reported_kernel_us = long_kernel_us.unwrap_or(self.reported_kernel_us);
        // The past use of a share that resumes says nothing about its demand. A share with demand and without use waits:
        // libvgpu counts a wait at its end.
        let used_nothing = used_us == 0 && launches == 0;
        let is_limited = is_limited && is_in_debt;
        let has_waited = throttled_us > 0 || is_limited || self.was_idle || used_nothing;
        self.was_idle = is_idle;
        if let Some(mean_us) = used_us.checked_div(launches).filter(|us| *us > 0) {
            self.launch_us = mean_us;
        }
        let measured = Measured {
            used_us,
            has_waited: has_waited && !is_idle,
            launch_us: self.launch_us,
            is_idle,
        };
        Activity {
            measured,
            long_kernel_us,
        }
    }

    /// Returns whether a polled share has resumed or gone idle since the last measurement or change.
    pub fn poll(
        &mut self,
        now_us: u64,
        header: &RegionHeader,
        is_in_debt: bool,
    ) -> Option<ActivityChange> {
        let demand_us = header.share.last_demand_us;
        let has_demand = std::mem::replace(&mut self.seen_demand_us, demand_us) != demand_us;
        if self.is_lent() {
            has_demand.then_some(())?;
            let polled_until_us = now_us.saturating_add(POLLED_US);
            self.lending = Lending::Reclaimed { polled_until_us };
            return Some(ActivityChange::Resumed);
        }
        let is_idle = now_us.saturating_sub(demand_us) >= IDLE_AFTER_US && !is_in_debt;
        is_idle.then_some(ActivityChange::Idle)
    }
}
