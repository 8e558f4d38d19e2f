//! Controller of the shares of one GPU. Pure: measurements in, rates out.
//!
//! - [`allotment`] divides the GPU by demand, and libvgpu's bucket charges no share more than its rate: a change of the active
//!   set takes effect within one control period.
//! - [`contention`](super::contention) estimates which part of its charge a share really gets, so that rates are true.
//! - The rest of the error, by NVML, accumulates as a share's **lag**: GPU time due minus received, µs. It is added to the
//!   rate so that it is compensated in [`REPAY_S`] (the integral; the bucket is the proportional part). Anti-windup: only
//!   shares count that demanded more than they got all the time, a full GPU owes no share more than the others got, and a
//!   lag is bounded and halved when the active set changes.
//!
//! All values are times, so nothing depends on the size of the GPU.

use std::collections::BTreeMap;

use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

use super::allotment::{self, Allotment, Borrowing, Demand, GPU, ShareDemand};
use super::contention::{ALL, Active, Contention, Workload};

/// Time in which a lag is compensated, seconds.
const REPAY_S: i64 = 4;

/// Time between two updates of the lags, µs: over less, NVML's whole percents are too coarse.
const LAG_PERIOD_US: i64 = 900_000;

/// Bounds of the effect of a lag on a rate, in tenths.
const TRIM: (i64, i64) = (7, 13);

/// Busy time from which a GPU is full, percent: NVML rounds down for each process.
const FULL: i64 = 95;

/// A share that needs at least this part of the wall-clock time, percent, is not throttled if that takes nothing from other
/// shares; then until it needs less than the second value, which single wrong NVML samples do not reach. A throttled share
/// leaves gaps, and seems to need less time for the same work.
const UNTHROTTLED_FROM: i64 = 97;
const UNTHROTTLED_UNTIL: i64 = 90;

/// Part of the time from which the parts of the shares use the whole GPU, percent.
const ALL_ALLOTTED: i64 = 99;

/// A share's demand exceeds its use by the fraction 1/`HEADROOM`, and at least by `MIN_HEADROOM`.
const HEADROOM: i64 = 8;
const MIN_HEADROOM: i64 = GPU / 100;

/// Ticks after a wait in which a share still counts as waiting: one that gets nearly its demand does not wait in each.
const WAITING_TICKS: u8 = 2;

/// Ticks without demand after which a share leaves the active set. Until then other shares use its time, and what was
/// learned about the active set is kept.
const ACTIVE_TICKS: u8 = 5;

/// Lowest rate.
const LOWEST: i64 = 100;

/// Highest rate: the whole GPU, at which libvgpu throttles nothing.
const HIGHEST: i64 = GPU;

/// What a share is entitled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entitlement {
    /// Guaranteed time.
    pub cores: Cores,
    /// Use of idle time.
    pub policy: ComputePolicy,
    /// Priority for idle time.
    pub priority: Priority,
}

/// What a share did since the last tick.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measured {
    /// GPU time charged, µs.
    pub used_us: u64,
    /// Whether it waited for time, or waits, or has debt for kernels that may still run.
    pub has_waited: bool,
    /// Launches charged.
    pub launches: u64,
    /// Mean duration of its last launches, µs.
    pub launch_us: u64,
    /// Whether it is idle now, whatever it did before.
    pub is_idle: bool,
}

/// Change of a share between two ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ActivityChange {
    /// It demands its lent time.
    Resumed,
    /// It has resumed a short time ago and is idle again.
    Idle,
}

/// A metered share in one tick.
pub type MeasuredShare<Id> = (Id, Entitlement, Measured);

/// State of one share.
#[derive(Debug, Clone, Default)]
struct ShareControl {
    /// Lag: GPU time due minus received, µs.
    lag_us: i64,
    /// Its part since the last update of the lags, µs.
    due_us: i64,
    /// Its use by NVML since then, µs.
    seen_us: i64,
    /// Demanded more than it got in all ticks since then.
    lacked_throughout: bool,
    /// Demanded more than it got in the last tick.
    lacked: bool,
    is_unthrottled: bool,
    /// Remaining ticks in which it counts as waiting.
    waiting_ticks: u8,
    /// Remaining ticks in which it counts as active.
    active_ticks: u8,
    /// Last measurement, and the demand since then.
    measured: Measured,
    demand: Demand,
}

/// Controller of one GPU. `Id` identifies its shares.
#[derive(Debug, Clone)]
pub struct Controller<Id> {
    shares: BTreeMap<Id, ShareControl>,
    contention: Contention<Id>,
    /// Time since the last update of the lags, µs, by ticks and by NVML, and busy time of the GPU.
    ticked_us: i64,
    observed_us: i64,
    busy_us: i64,
}

impl<Id> Default for Controller<Id> {
    fn default() -> Self {
        Self {
            shares: BTreeMap::new(),
            contention: Contention::default(),
            ticked_us: 0,
            observed_us: 0,
            busy_us: 0,
        }
    }
}

/// Decision for one share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Rate, µs of GPU time per second.
    pub rate_us_per_s: u32,
    /// Part of the time measured by events that is the share's own, parts per million.
    pub own_time_ppm: u32,
    /// Whether other shares use its guaranteed time, so that it is polled.
    pub is_lent: bool,
}

impl<Id: Ord + Copy> Controller<Id> {
    /// Decides for all metered shares of the GPU, `elapsed_us` after the last tick.
    pub fn tick(&mut self, elapsed_us: u64, shares: &[MeasuredShare<Id>]) -> Vec<(Id, Decision)> {
        let elapsed_us = to_i64(elapsed_us).max(1);
        let is_present = |id: &Id| shares.iter().any(|(present, ..)| present == id);
        self.shares.retain(|id, _| is_present(id));
        self.contention.retain(is_present);
        let (demands, has_set_changed) = self.demands(elapsed_us, shares);
        if has_set_changed {
            self.on_active_set_change();
        }
        let allotments = allotment::allot(&demands);
        self.ticked_us = self.ticked_us.saturating_add(elapsed_us);
        for ((id, ..), (demand, allotted)) in shares.iter().zip(demands.iter().zip(&allotments)) {
            if let Some(state) = self.shares.get_mut(id) {
                state.lacked = match demand.demand {
                    Demand::Idle => false,
                    Demand::UpTo(rate) => rate.min(GPU) > allotted.part,
                    Demand::All => true,
                };
                state.lacked_throughout &= state.lacked;
                let due_us = allotted.part * elapsed_us / GPU;
                state.due_us = state.due_us.saturating_add(due_us);
            }
        }
        self.decide(Some(to_u64(elapsed_us)), shares, &demands, &allotments)
    }

    /// Decides after some shares have resumed or gone idle. For the other shares, the last tick is valid.
    pub fn on_activity_change(
        &mut self,
        shares: &[(Id, Entitlement)],
        changes: &[(Id, ActivityChange)],
    ) -> Vec<(Id, Decision)> {
        let mut has_set_changed = false;
        for (id, change) in changes {
            let state = self.shares.entry(*id).or_default();
            match change {
                ActivityChange::Resumed => {
                    has_set_changed |= state.active_ticks == 0;
                    (state.waiting_ticks, state.active_ticks) = (WAITING_TICKS, ACTIVE_TICKS);
                    state.demand = Demand::All;
                }
                ActivityChange::Idle => {
                    state.demand = Demand::UpTo(MIN_HEADROOM);
                    (state.measured.is_idle, state.measured.has_waited) = (true, false);
                }
            }
        }
        if has_set_changed {
            self.on_active_set_change();
        }
        let (mut measured, mut demands) = (Vec::new(), Vec::new());
        for (id, entitlement) in shares {
            let state = self.shares.get(id).cloned().unwrap_or_default();
            measured.push((*id, *entitlement, state.measured));
            demands.push(share_demand(entitlement, state.demand));
        }
        self.decide(None, &measured, &demands, &allotment::allot(&demands))
    }

    fn on_active_set_change(&mut self) {
        for state in self.shares.values_mut() {
            state.lag_us /= 2;
            state.lacked_throughout = false;
        }
    }

    /// Returns the demands of the shares, and whether the active set has changed.
    fn demands(
        &mut self,
        elapsed_us: i64,
        shares: &[MeasuredShare<Id>],
    ) -> (Vec<ShareDemand>, bool) {
        let mut has_set_changed = false;
        let demands = shares.iter().map(|(id, entitlement, measured)| {
            let state = self.shares.entry(*id).or_default();
            let used = to_i64(measured.used_us).saturating_mul(GPU) / elapsed_us;
            let was_active = state.active_ticks > 0;
            let remaining = |ticks: u8, is_renewed: bool, all: u8| match is_renewed {
                true => all,
                false => ticks.saturating_sub(1),
            };
            let (has_waited, has_worked) = (measured.has_waited, used > 0);
            state.waiting_ticks = remaining(state.waiting_ticks, has_waited, WAITING_TICKS);
            let is_active = has_waited || has_worked;
            state.active_ticks = remaining(state.active_ticks, is_active, ACTIVE_TICKS);
            has_set_changed |= was_active != (state.active_ticks > 0);
            state.measured = *measured;
            state.demand = match (state.active_ticks, state.waiting_ticks) {
                (0, _) => Demand::Idle,
                // A waiting share shows demand on each tick, and a share with debt may still run its kernels.
                (_, _) if measured.is_idle || !is_active => Demand::UpTo(MIN_HEADROOM),
                (_, 0) => Demand::UpTo(used.saturating_add((used / HEADROOM).max(MIN_HEADROOM))),
                (_, _) => Demand::All,
            };
            share_demand(entitlement, state.demand)
        });
        (demands.collect(), has_set_changed)
    }

    /// Returns the decisions for these allotments: `elapsed_us` after the last tick, or between two ticks.
    fn decide(
        &mut self,
        elapsed_us: Option<u64>,
        shares: &[MeasuredShare<Id>],
        demands: &[ShareDemand],
        allotments: &[Allotment],
    ) -> Vec<(Id, Decision)> {
        let allotted: i64 = allotments.iter().map(|allotted| allotted.part).sum();
        let largest = allotments.iter().map(|allotted| allotted.part).max();
        // On a full GPU the shares with the largest part fill all gaps.
        let may_be_unthrottled = |demand: &ShareDemand, allotment: &Allotment| {
            allotted * 100 >= GPU * ALL_ALLOTTED
                && demand.borrowing == Borrowing::Allowed
                && Some(allotment.part) == largest
        };
        let own = self.own_time(elapsed_us, shares, demands, allotments, may_be_unthrottled);
        let mut both = allotments.iter().zip(demands);
        let is_any_borrowing =
            both.any(|(allotment, demand)| allotment.part > allotment::guarantee(demand.cores));
        let decisions = shares.iter().zip(demands.iter().zip(allotments));
        let decisions = decisions.map(|((id, _, measured), (demand, allotment))| {
            let own = own.get(id).copied().unwrap_or(ALL);
            let state = self.shares.entry(*id).or_default();
            let from = match state.is_unthrottled {
                true => UNTHROTTLED_UNTIL,
                false => UNTHROTTLED_FROM,
            };
            state.is_unthrottled =
                may_be_unthrottled(demand, allotment) && allotment.rate * 100 >= to_i64(own) * from;
            let lag_us = if state.lacked { state.lag_us } else { 0 };
            let rate = match state.is_unthrottled {
                true => HIGHEST,
                false => rate(allotment.rate, lag_us),
            };
            let decision = Decision {
                rate_us_per_s: u32::try_from(rate).unwrap_or(u32::MAX),
                own_time_ppm: u32::try_from(own).unwrap_or(u32::MAX),
                // A share whose guarantee is unused by others need not be polled.
                is_lent: is_any_borrowing
                    && (measured.used_us == 0 || measured.is_idle)
                    && demand.demand != Demand::All
                    && allotment.part < allotment::guarantee(demand.cores),
            };
            (*id, decision)
        });
        decisions.collect()
    }

    /// Returns the own time of the active shares, parts per million.
    fn own_time(
        &mut self,
        elapsed_us: Option<u64>,
        shares: &[MeasuredShare<Id>],
        demands: &[ShareDemand],
        allotments: &[Allotment],
        may_be_unthrottled: impl Fn(&ShareDemand, &Allotment) -> bool,
    ) -> BTreeMap<Id, u64> {
        let active: Vec<Active<Id>> = shares
            .iter()
            .zip(demands.iter().zip(allotments))
            .filter(|(_, (demand, _))| demand.demand != Demand::Idle)
            .map(
                |((id, entitlement, measured), (demand, allotment))| Active {
                    id: *id,
                    // Microseconds per second are parts per million.
                    part: to_u64(allotment.part).max(1),
                    workload: match entitlement.policy {
                        ComputePolicy::Token => Workload::TokenSlices(measured.launch_us),
                        _ if may_be_unthrottled(demand, allotment) => Workload::Saturating,
                        _ => Workload::Launches(measured.launch_us),
                    },
                    charged_us: elapsed_us.map_or(0, |_| measured.used_us),
                    launches: elapsed_us.map_or(0, |_| measured.launches),
                    is_working: !measured.is_idle && (measured.has_waited || measured.used_us > 0),
                },
            )
            .collect();
        let own = self.contention.update(elapsed_us.unwrap_or(0), &active);
        active.iter().map(|share| share.id).zip(own).collect()
    }

    /// Applies an NVML sample over `elapsed_us`: the use of each share and of all processes on the GPU, µs.
    pub fn observe(&mut self, elapsed_us: u64, busy_us: u64, used: &[(Id, u64)]) {
        self.contention.observe(elapsed_us, used);
        for (id, us) in used {
            if let Some(state) = self.shares.get_mut(id) {
                state.seen_us = state.seen_us.saturating_add(to_i64(*us));
            }
        }
        self.observed_us = self.observed_us.saturating_add(to_i64(elapsed_us));
        self.busy_us = self.busy_us.saturating_add(to_i64(busy_us));
        if self.observed_us >= LAG_PERIOD_US {
            self.update_lags();
        }
    }

    /// Updates the lags by NVML's samples since the last update.
    fn update_lags(&mut self) {
        let counted = || {
            let counts = |state: &&ShareControl| state.lacked_throughout && state.due_us > 0;
            self.shares.values().filter(counts)
        };
        let due_us: i64 = counted().map(|state| state.due_us).sum();
        let got_us: i64 = counted().map(|state| state.seen_us).sum();
        let is_full = self.busy_us * 100 >= self.observed_us * FULL;
        let is_all_due = due_us * 100 >= self.ticked_us * ALL_ALLOTTED;
        (self.ticked_us, self.observed_us, self.busy_us) = (0, 0, 0);
        let mut lags = Vec::new();
        for state in self.shares.values_mut() {
            let part_us = std::mem::take(&mut state.due_us);
            let seen_us = std::mem::take(&mut state.seen_us);
            if state.lacked_throughout && part_us > 0 {
                // A full GPU has no more to give: each share is due its part of what all of them got.
                let fair_us = match is_full {
                    true => part_us * got_us.min(due_us) / due_us,
                    false => part_us,
                };
                // Over one second the part in µs is also the rate.
                let bound = part_us.saturating_mul(REPAY_S * (TRIM.1 - 10)) / 10;
                state.lag_us = (state.lag_us + fair_us - seen_us).clamp(-bound, bound);
                lags.push((part_us, &mut state.lag_us));
            }
            state.lacked_throughout = state.lacked;
        }
        // The shares of a GPU that is all theirs cannot all have had too much: NVML's rounding adds that.
        let surplus_us = -lags.iter().map(|(_, lag_us)| **lag_us).sum::<i64>();
        if is_full && is_all_due && surplus_us > 0 {
            for (part_us, lag_us) in lags {
                *lag_us += surplus_us * part_us / due_us;
            }
        }
    }
}

fn rate(part: i64, lag_us: i64) -> i64 {
    (part + lag_us / REPAY_S)
        .clamp(part * TRIM.0 / 10, part * TRIM.1 / 10)
        .clamp(LOWEST, HIGHEST)
}

fn share_demand(entitlement: &Entitlement, demand: Demand) -> ShareDemand {
    ShareDemand {
        cores: entitlement.cores,
        priority: entitlement.priority,
        borrowing: match entitlement.policy {
            ComputePolicy::Fixed => Borrowing::Denied,
            ComputePolicy::Balance | ComputePolicy::Token | ComputePolicy::None => {
                Borrowing::Allowed
            }
        },
        demand,
    }
}

fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX / GPU)
}

fn to_u64(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}
