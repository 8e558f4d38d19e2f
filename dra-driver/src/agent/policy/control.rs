//! Controller of the shares of one GPU. Pure: measurements in, rates out.
//!
//! - [`allotment`] divides the GPU by demand, and libvgpu's bucket charges no share more than its rate: a change of the active
//!   set takes effect within one control period.
//! - [`contention`] estimates which part of its measured time a share really gets, so that rates are true.
//!
//! All values are times, so nothing depends on the size of the GPU.

use std::collections::BTreeMap;

use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

use super::allotment::{self, Allotment, Borrowing, Demand, GPU, ShareDemand};
use super::contention::{self, ALL, Active, Contention, Workload};

/// A share that needs at least this part of the wall-clock time, percent, is not throttled if that takes nothing from other
/// shares. A throttled share leaves gaps, and seems to need less time for the same work.
const UNTHROTTLED_FROM: i64 = 97;

/// Part of the time from which the parts of the shares use the whole GPU, percent.
const ALL_ALLOTTED: i64 = 99;

/// The same if no share has enough: switches between contexts take the rest.
const ALL_SATURATED: i64 = 90;

/// What a share that has enough may use beyond its peak use until the next tick.
const HEADROOM: i64 = GPU / 100;

/// A share that uses this part of what it could use if it always had work counts as such, percent.
const SATURATED_FROM: i64 = 90;

/// Ticks in which the peak use fades. Kernels of several lengths make the use of single ticks uneven; without the peak other
/// shares would get the difference in each tick of low use, and return nothing in ticks of high use.
const PEAK_TICKS: i64 = 16;

/// Ticks without demand after which a share leaves the active set. Until then other shares use its time, but their kernels
/// count as interrupted by it: a kernel may run for several ticks.
const ACTIVE_TICKS: u8 = 5;

/// Part of its time that a share gets at least, percent: some is lost to switches between contexts. A share whose work seems to
/// be done too early loses its time to others until the next tick.
const PACE: i64 = 75;

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
    /// Remaining ticks in which it counts as active.
    active_ticks: u8,
    /// Last measurement, and the demand since then.
    measured: Measured,
    demand: Demand,
    /// Highest part of the time that it has used lately.
    peak: i64,
    /// Largest possible use alongside the active set of the last tick; 0 if unknown.
    max_use: i64,
}

impl ShareControl {
    /// Whether it used as much as a share that always has work, so that it may demand more.
    fn is_limited_by_others(&self) -> bool {
        self.max_use != 0 && self.peak * 100 >= self.max_use * SATURATED_FROM
    }
}

/// Controller of one GPU. `Id` identifies its shares.
#[derive(Debug, Clone, Default)]
pub struct Controller<Id> {
    shares: BTreeMap<Id, ShareControl>,
}

/// Decision for one share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Rate, µs of GPU time per second.
    pub rate_us_per_s: u32,
    /// How fast the GPU does its work at least, µs per second.
    pub pace_us_per_s: u32,
    /// Which part of the time measured by events is the share's own.
    pub own_time: OwnTime,
    /// Whether other shares use its guaranteed time, so that it is polled.
    pub is_lent: bool,
}

impl<Id: Ord + Copy> Controller<Id> {
    /// Decides for all metered shares of the GPU, `elapsed_us` after the last tick.
    pub fn tick(&mut self, elapsed_us: u64, shares: &[MeasuredShare<Id>]) -> Vec<(Id, Decision)> {
        let elapsed_us = to_i64(elapsed_us).max(1);
        let is_present = |id: &Id| shares.iter().any(|(present, ..)| present == id);
        self.shares.retain(|id, _| is_present(id));
        let demands = self.demands(elapsed_us, shares);
        let allotments = allotment::allot(&demands);
        self.decide(shares, &demands, &allotments)
    }

    /// Decides after some shares have resumed or gone idle. For the other shares, the last tick is valid.
    pub fn on_activity_change(
        &mut self,
        shares: &[(Id, Entitlement)],
        changes: &[(Id, ActivityChange)],
    ) -> Vec<(Id, Decision)> {
        for (id, change) in changes {
            let state = self.shares.entry(*id).or_default();
            match change {
                ActivityChange::Resumed => {
                    state.active_ticks = ACTIVE_TICKS;
                    state.demand = Demand::All;
                }
                ActivityChange::Idle => {
                    state.demand = Demand::UpTo(HEADROOM);
                    (state.measured.is_idle, state.measured.has_waited) = (true, false);
                }
            }
        }
        let (mut measured, mut demands) = (Vec::new(), Vec::new());
        for (id, entitlement) in shares {
            let state = self.shares.get(id).cloned().unwrap_or_default();
            measured.push((*id, *entitlement, state.measured));
            demands.push(share_demand(entitlement, state.demand));
        }
        self.decide(&measured, &demands, &allotment::allot(&demands))
    }

    /// Returns the demands of the shares.
    fn demands(&mut self, elapsed_us: i64, shares: &[MeasuredShare<Id>]) -> Vec<ShareDemand> {
        let demands = shares.iter().map(|(id, entitlement, measured)| {
            let state = self.shares.entry(*id).or_default();
            let used = to_i64(measured.used_us).saturating_mul(GPU) / elapsed_us;
            let is_active = measured.has_waited || used > 0;
            state.measured = *measured;
            state.peak = used.max(state.peak - state.peak / PEAK_TICKS);
            state.active_ticks = match is_active {
                true => ACTIVE_TICKS,
                false => state.active_ticks.saturating_sub(1),
            };
            state.demand = if state.active_ticks == 0 {
                Demand::Idle
            } else if measured.is_idle || !is_active {
                // A waiting share shows demand on each tick, and a share with debt may still run its kernels.
                Demand::UpTo(HEADROOM)
            } else if measured.has_waited || state.is_limited_by_others() {
                Demand::All
            } else {
                Demand::UpTo(state.peak.saturating_add(HEADROOM))
            };
            share_demand(entitlement, state.demand)
        });
        demands.collect()
    }

    /// Returns the decisions for these allotments.
    fn decide(
        &mut self,
        shares: &[MeasuredShare<Id>],
        demands: &[ShareDemand],
        allotments: &[Allotment],
    ) -> Vec<(Id, Decision)> {
        let allotted: i64 = allotments.iter().map(|allotted| allotted.part).sum();
        let largest = allotments.iter().map(|allotted| allotted.part).max();
        // On a full GPU the shares with the largest part fill all gaps.
        let has_enough = |demand: &ShareDemand| matches!(demand.demand, Demand::UpTo(_));
        let full_from = match demands.iter().any(has_enough) {
            true => ALL_ALLOTTED,
            false => ALL_SATURATED,
        };
        let is_full = allotted * 100 >= GPU * full_from;
        let fills_gaps = |allotment: &Allotment| is_full && Some(allotment.part) == largest;
        let contention = estimate_contention(shares, demands, allotments, fills_gaps);
        for (id, state) in &mut self.shares {
            let saturated = contention
                .get(id)
                .map(|contention| contention.saturated_ppm);
            state.max_use = to_i64(saturated.unwrap_or(0));
        }
        let mut both = allotments.iter().zip(demands);
        let is_any_borrowing =
            both.any(|(allotment, demand)| allotment.part > allotment::guarantee(demand.cores));
        let decisions = shares.iter().zip(demands.iter().zip(allotments));
        let decisions = decisions.map(|((id, _, measured), (demand, allotment))| {
            let contention = contention.get(id);
            let mean_own = to_i64(contention.map_or(ALL, |contention| contention.mean_own_ppm));
            let is_unthrottled = fills_gaps(allotment)
                && demand.borrowing == Borrowing::Allowed
                && allotment.rate * 100 >= mean_own * UNTHROTTLED_FROM;
            // All shares lose the same part of their time to switches between contexts, as far as these exceed what no
            // share is allotted.
            let switching = to_i64(contention.map_or(0, |contention| contention.switching_ppm));
            let rate = match is_full && !fills_gaps(allotment) {
                true => allotment.rate * (GPU - switching).min(allotted) / allotted,
                false => allotment.rate,
            };
            let rate = match is_unthrottled {
                true => HIGHEST,
                false => rate.clamp(LOWEST, HIGHEST),
            };
            let decision = Decision {
                rate_us_per_s: u32::try_from(rate).unwrap_or(u32::MAX),
                pace_us_per_s: u32::try_from(rate.min(allotment.part) * PACE / 100).unwrap_or(0),
                own_time: contention.map_or(OwnTime::ALL, |contention| contention.own_time),
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
}

/// Returns the effect of the active shares on each other.
fn estimate_contention<Id: Ord + Copy>(
    shares: &[MeasuredShare<Id>],
    demands: &[ShareDemand],
    allotments: &[Allotment],
    fills_gaps: impl Fn(&Allotment) -> bool,
) -> BTreeMap<Id, Contention> {
    let with_demand = shares
        .iter()
        .zip(demands.iter().zip(allotments))
        .filter(|(_, (demand, _))| demand.demand != Demand::Idle);
    let active = with_demand.map(|((id, _, measured), (_, allotment))| {
        let active = Active {
            // Microseconds per second are parts per million.
            part: to_u64(allotment.part).max(1),
            workload: match fills_gaps(allotment) {
                true => Workload::Saturating,
                false => Workload::Launches(measured.launch_us),
            },
        };
        (*id, active)
    });
    let (ids, active): (Vec<Id>, Vec<Active>) = active.unzip();
    ids.into_iter().zip(contention::estimate(&active)).collect()
}

fn share_demand(entitlement: &Entitlement, demand: Demand) -> ShareDemand {
    ShareDemand {
        cores: entitlement.cores,
        priority: entitlement.priority,
        borrowing: match entitlement.policy {
            ComputePolicy::Fixed => Borrowing::Denied,
            ComputePolicy::Balance | ComputePolicy::None => Borrowing::Allowed,
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
