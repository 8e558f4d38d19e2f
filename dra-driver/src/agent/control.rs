//! Keeps the tenants of a card at their parts of its time. Pure: measurements in, rates out.
//!
//! - [`allot`] divides the card by who wants how much, and libvgpu's bucket makes sure that no share is charged more than
//!   its rate: a change of who is active takes effect within one step.
//! - [`contention`](super::contention) says how much of what a share is charged it really has, so that rates are true.
//! - What is still missing by what NVML has seen is owed: a share's **lag**, in microseconds of GPU time, is added to its
//!   rate so that it is repaid in [`REPAY_S`] (an integral; the bucket is the proportional part). Anti-windup: only shares
//!   count that wanted more than they got all the time, a full card owes nobody more than others got, and a lag is bounded
//!   and fades when the company changes.
//!
//! All figures are times, so nothing depends on the size of the card.

use std::collections::BTreeMap;

use drava_vgpu_abi::{ComputePolicy, Cores, Priority};

use super::allot::{self, Allotment, CARD, Demand, Spare, Tenant};
use super::contention::{ALL, Active, Contention, Work};

/// Time in which a lag is repaid, seconds.
const REPAY_S: i64 = 4;

/// Time between two looks at what is owed, µs: less than NVML's whole percents mean something in.
const OWED_US: i64 = 900_000;

/// Bounds of what a lag makes of a rate, in tenths.
const TRIM: (i64, i64) = (7, 13);

/// From this busy time on a card is full, percent: NVML's whole percents are rounded down for each process.
const FULL: i64 = 95;

/// A share that would be under way for this part of the time and more, percent, is held back by nothing, if that takes
/// nothing from others; and from then on until it would be for less than that, which takes more than a sample or two of NVML
/// that say too much. One that is held back makes gaps, and seems to need less time for the same.
const FREE_FROM: i64 = 97;
const FREE_UNTIL: i64 = 90;

/// From this part of the time on, percent, what is due to the shares is all that there is.
const ALL_DUE: i64 = 99;

/// Part of a tenant's use that is added to say what it wants, one in so many, and what is added at least.
const HEADROOM: i64 = 8;
const HEADROOM_AT_LEAST: i64 = CARD / 100;

/// A share that waited counts as waiting in the next step too: one that gets nearly what it wants does not wait in each.
const WAITS_FOR: u8 = 2;

/// A share that did nothing for so many steps has left the company. Until then others use its time, but what was learned
/// about who meets whom is kept.
const STAYS_FOR: u8 = 5;

/// Lowest rate that is ever set.
const LOWEST: i64 = 100;

/// Highest: a whole card, at which libvgpu holds nothing back.
const HIGHEST: i64 = CARD;

/// What a share is entitled to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Guarantee.
    pub cores: Cores,
    /// What happens to idle time.
    pub policy: ComputePolicy,
    /// Rank.
    pub priority: Priority,
}

/// What a share did since the last step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measured {
    /// GPU time that it was charged, µs.
    pub used_us: u64,
    /// Whether it waited for time, or waits, or is in debt for kernels that may still run.
    pub waited: bool,
    /// For how many launches.
    pub launches: u64,
    /// Mean length of its last launches, µs.
    pub launch_us: u64,
    /// Whether it is idle now, whatever it did before.
    pub rests: bool,
}

/// What becomes of a share between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It wants back what others use of its time.
    Wakes,
    /// It has woken a short while ago and is idle again.
    Rests,
}

/// A metered share in one step: which, its terms, and what it did.
pub type Step<Id> = (Id, Terms, Measured);

/// State of one tenant.
#[derive(Debug, Clone, Default)]
struct Loop {
    /// Owed to it, µs.
    lag_us: i64,
    /// Its part since the last look at what is owed, µs.
    due_us: i64,
    /// What NVML has seen of it since then, µs.
    seen_us: i64,
    /// Wanted more than it got in all steps since then.
    wanted_throughout: bool,
    /// Wanted more than it got in the last step.
    wanted: bool,
    /// Is held back by nothing.
    is_free: bool,
    /// Steps for which it still counts as waiting.
    waits_for: u8,
    /// Steps for which it still counts as active.
    stays_for: u8,
    /// What it did in the last step, and what it wants since then.
    measured: Measured,
    demand: Demand,
}

/// Controller of one card. `Id` names its shares.
#[derive(Debug, Clone)]
pub struct Controller<Id> {
    loops: BTreeMap<Id, Loop>,
    contention: Contention<Id>,
    /// Since the last look at what is owed, µs, by the steps and by NVML, and for how long the card was busy then.
    stepped_us: i64,
    observed_us: i64,
    busy_us: i64,
}

impl<Id> Default for Controller<Id> {
    fn default() -> Self {
        Self {
            loops: BTreeMap::new(),
            contention: Contention::default(),
            stepped_us: 0,
            observed_us: 0,
            busy_us: 0,
        }
    }
}

/// What a step decided for one share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// µs of GPU time per second.
    pub rate_us_per_s: u32,
    /// How much of what its events measure is its own, parts per million.
    pub own_parts: u32,
    /// Whether others use time that is guaranteed to it: it wants to be watched.
    pub is_lent: bool,
}

impl<Id: Ord + Copy> Controller<Id> {
    /// One step over all metered shares of the card, `elapsed_us` after the last one.
    pub fn step(&mut self, elapsed_us: u64, shares: &[Step<Id>]) -> Vec<(Id, Decision)> {
        let elapsed_us = to_i64(elapsed_us).max(1);
        let is_there = |id: &Id| shares.iter().any(|(present, ..)| present == id);
        self.loops.retain(|id, _| is_there(id));
        self.contention.retain(is_there);
        let (tenants, is_company_new) = self.meet(elapsed_us, shares);
        if is_company_new {
            self.change_company();
        }
        let allotted = allot::allot(&tenants);
        self.stepped_us = self.stepped_us.saturating_add(elapsed_us);
        for ((id, ..), (tenant, allotted)) in shares.iter().zip(tenants.iter().zip(&allotted)) {
            if let Some(state) = self.loops.get_mut(id) {
                state.wanted = match tenant.demand {
                    Demand::Idle => false,
                    Demand::UpTo(rate) => rate.min(CARD) > allotted.part,
                    Demand::All => true,
                };
                state.wanted_throughout &= state.wanted;
                state.due_us = state
                    .due_us
                    .saturating_add(allotted.part * elapsed_us / CARD);
            }
        }
        self.decide(Some(to_u64(elapsed_us)), shares, &tenants, &allotted)
    }

    /// Some of the metered shares of the card wake or rest: what that changes before the next step. Of the others the last
    /// step holds.
    pub fn turn(&mut self, shares: &[(Id, Terms)], turned: &[(Id, Turn)]) -> Vec<(Id, Decision)> {
        let mut is_company_new = false;
        for (id, turn) in turned {
            let state = self.loops.entry(*id).or_default();
            match turn {
                Turn::Wakes => {
                    is_company_new |= state.stays_for == 0;
                    (state.waits_for, state.stays_for) = (WAITS_FOR, STAYS_FOR);
                    state.demand = Demand::All;
                }
                Turn::Rests => {
                    state.demand = Demand::UpTo(HEADROOM_AT_LEAST);
                    (state.measured.rests, state.measured.waited) = (true, false);
                }
            }
        }
        if is_company_new {
            self.change_company();
        }
        let state = |id: &Id| self.loops.get(id).cloned().unwrap_or_default();
        let steps: Vec<Step<Id>> = shares
            .iter()
            .map(|(id, terms)| (*id, *terms, state(id).measured))
            .collect();
        let tenants: Vec<Tenant> = shares
            .iter()
            .map(|(id, terms)| tenant(terms, state(id).demand))
            .collect();
        self.decide(None, &steps, &tenants, &allot::allot(&tenants))
    }

    /// Others than before want something: what is owed is half forgotten.
    fn change_company(&mut self) {
        for state in self.loops.values_mut() {
            state.lag_us /= 2;
            state.wanted_throughout = false;
        }
    }

    /// Who wants how much, and whether others than before want anything.
    fn meet(&mut self, elapsed_us: i64, shares: &[Step<Id>]) -> (Vec<Tenant>, bool) {
        let mut is_company_new = false;
        let tenants = shares.iter().map(|(id, terms, measured)| {
            let state = self.loops.entry(*id).or_default();
            let used = to_i64(measured.used_us).saturating_mul(CARD) / elapsed_us;
            let was_active = state.stays_for > 0;
            let left = |steps: u8, is_renewed: bool, of: u8| {
                if is_renewed {
                    of
                } else {
                    steps.saturating_sub(1)
                }
            };
            state.waits_for = left(state.waits_for, measured.waited, WAITS_FOR);
            state.stays_for = left(state.stays_for, measured.waited || used > 0, STAYS_FOR);
            is_company_new |= was_active != (state.stays_for > 0);
            let demand = match (state.stays_for, state.waits_for) {
                (0, _) => Demand::Idle,
                // One that waits says so at each look, and one in debt may still be running what it launched.
                (_, _) if measured.rests || (used == 0 && !measured.waited) => {
                    Demand::UpTo(HEADROOM_AT_LEAST)
                }
                (_, 0) => {
                    Demand::UpTo(used.saturating_add((used / HEADROOM).max(HEADROOM_AT_LEAST)))
                }
                (_, _) => Demand::All,
            };
            (state.measured, state.demand) = (*measured, demand);
            tenant(terms, demand)
        });
        (tenants.collect(), is_company_new)
    }

    /// What follows from the parts, `elapsed_us` after the last step, or before the next one.
    fn decide(
        &mut self,
        elapsed_us: Option<u64>,
        shares: &[Step<Id>],
        tenants: &[Tenant],
        allotted: &[Allotment],
    ) -> Vec<(Id, Decision)> {
        let given: i64 = allotted.iter().map(|allotted| allotted.part).sum();
        let largest = allotted.iter().map(|allotted| allotted.part).max();
        // On a full card the largest ones fill what the others leave.
        let may_be_free = |tenant: &Tenant, allotted: &Allotment| {
            given * 100 >= CARD * ALL_DUE
                && tenant.spare == Spare::Taken
                && Some(allotted.part) == largest
        };
        let own = self.own_parts(elapsed_us, shares, tenants, allotted, may_be_free);
        let is_lent = allotted.iter().zip(tenants).any(|(allotted, tenant)| {
            allotted.part > i64::from(tenant.cores.percent()) * CARD / 100
        });
        shares
            .iter()
            .zip(tenants.iter().zip(allotted))
            .map(|((id, _, measured), (tenant, allotted))| {
                let own = own.get(id).copied().unwrap_or(ALL);
                let state = self.loops.entry(*id).or_default();
                let lag_us = if state.wanted { state.lag_us } else { 0 };
                let free_from = if state.is_free { FREE_UNTIL } else { FREE_FROM };
                state.is_free =
                    may_be_free(tenant, allotted) && allotted.rate * 100 >= to_i64(own) * free_from;
                let rate = if state.is_free {
                    HIGHEST
                } else {
                    rate(allotted.rate, lag_us)
                };
                let guarantee = i64::from(tenant.cores.percent()) * CARD / 100;
                let decision = Decision {
                    rate_us_per_s: u32::try_from(rate).unwrap_or(u32::MAX),
                    own_parts: u32::try_from(own).unwrap_or(u32::MAX),
                    // One that has its guarantee kept for it need not be watched.
                    is_lent: is_lent
                        && (measured.used_us == 0 || measured.rests)
                        && tenant.demand != Demand::All
                        && allotted.part < guarantee,
                };
                (*id, decision)
            })
            .collect()
    }

    /// Parts per million of what each active share measures that are its own.
    fn own_parts(
        &mut self,
        elapsed_us: Option<u64>,
        shares: &[Step<Id>],
        tenants: &[Tenant],
        allotted: &[Allotment],
        may_be_free: impl Fn(&Tenant, &Allotment) -> bool,
    ) -> BTreeMap<Id, u64> {
        let active: Vec<Active<Id>> = shares
            .iter()
            .zip(tenants.iter().zip(allotted))
            .filter(|(_, (tenant, _))| tenant.demand != Demand::Idle)
            .map(|((id, terms, measured), (tenant, allotted))| Active {
                id: *id,
                // Microseconds a second are parts per million.
                part: to_u64(allotted.part).max(1),
                work: match terms.policy {
                    ComputePolicy::Token => Work::Turns(measured.launch_us),
                    _ if may_be_free(tenant, allotted) => Work::Always,
                    _ => Work::Launches(measured.launch_us),
                },
                charged_us: elapsed_us.map_or(0, |_| measured.used_us),
                launches: elapsed_us.map_or(0, |_| measured.launches),
                is_at_work: !measured.rests && (measured.waited || measured.used_us > 0),
            })
            .collect();
        let own = self.contention.step(elapsed_us.unwrap_or(0), &active);
        active.iter().map(|share| share.id).zip(own).collect()
    }

    /// Takes what NVML has seen of each share, µs, in the `elapsed_us` since the last observation, and of everybody on
    /// the card.
    pub fn observe(&mut self, elapsed_us: u64, busy_us: u64, seen: &[(Id, u64)]) {
        self.contention.observe(elapsed_us, seen);
        for (id, us) in seen {
            if let Some(state) = self.loops.get_mut(id) {
                state.seen_us = state.seen_us.saturating_add(to_i64(*us));
            }
        }
        self.observed_us = self.observed_us.saturating_add(to_i64(elapsed_us));
        self.busy_us = self.busy_us.saturating_add(to_i64(busy_us));
        if self.observed_us >= OWED_US {
            self.owe();
        }
    }

    /// Says what is owed to each share, by what NVML has seen.
    fn owe(&mut self) {
        let counted = || {
            let counted = |state: &&Loop| state.wanted_throughout && state.due_us > 0;
            self.loops.values().filter(counted)
        };
        let due_us: i64 = counted().map(|state| state.due_us).sum();
        let got_us: i64 = counted().map(|state| state.seen_us).sum();
        let is_full = self.busy_us * 100 >= self.observed_us * FULL;
        let is_all_due = due_us * 100 >= self.stepped_us * ALL_DUE;
        (self.stepped_us, self.observed_us, self.busy_us) = (0, 0, 0);
        let mut lags = Vec::new();
        for state in self.loops.values_mut() {
            let part_us = std::mem::take(&mut state.due_us);
            let seen_us = std::mem::take(&mut state.seen_us);
            if state.wanted_throughout && part_us > 0 {
                // A full card has no more to give: each is owed its part of what all of them got.
                let fair_us = if is_full {
                    part_us * got_us.min(due_us) / due_us
                } else {
                    part_us
                };
                // Over one second the part in µs is also the rate.
                let bound = part_us.saturating_mul(REPAY_S * (TRIM.1 - 10)) / 10;
                state.lag_us = (state.lag_us + fair_us - seen_us).clamp(-bound, bound);
                lags.push((part_us, &mut state.lag_us));
            }
            state.wanted_throughout = state.wanted;
        }
        // They cannot all have had too much of a card that is all theirs: that is what NVML's whole percents add.
        let too_much_us = -lags.iter().map(|(_, lag_us)| **lag_us).sum::<i64>();
        if is_full && is_all_due && too_much_us > 0 {
            for (part_us, lag_us) in lags {
                *lag_us += too_much_us * part_us / due_us;
            }
        }
    }
}

fn rate(part: i64, lag_us: i64) -> i64 {
    (part + lag_us / REPAY_S)
        .clamp(part * TRIM.0 / 10, part * TRIM.1 / 10)
        .clamp(LOWEST, HIGHEST)
}

fn tenant(terms: &Terms, demand: Demand) -> Tenant {
    Tenant {
        cores: terms.cores,
        priority: terms.priority,
        spare: match terms.policy {
            ComputePolicy::Fixed => Spare::Left,
            ComputePolicy::Balance | ComputePolicy::Token | ComputePolicy::None => Spare::Taken,
        },
        demand,
    }
}

fn to_i64(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX / CARD)
}

fn to_u64(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}
