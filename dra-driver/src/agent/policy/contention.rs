//! Estimate of the part of a share's measured time that is its own, and not the time slice of another share. Pure.
//!
//! With time slicing, a kernel seems to run from its start to its end by wall-clock time. A share that is due 30% of a GPU
//! next to a share that fills the rest is in flight for 60% of the time, because the other share runs in half of that.
//! [`Contention`] predicts this from the parts of the active shares and the durations of their launches, so that a change of
//! the active set needs no time to learn:
//!
//! > a share in flight meets each other share with the probability that the other one is in flight, and both run in turn; but
//! > a launch that ends within one time slice is not interrupted, and waits for its slice before it starts
//!
//! The error of the prediction is learned as a factor per share: its use by NVML over its predicted use, both as fading
//! sums. NVML's first samples of a new active set are late; until then, the launches of the shares are used ([`cold_start`]).

use std::collections::BTreeMap;

use super::token::LONGEST_US;

mod cold_start;

use cold_start::Launches;

/// One, in parts per million.
pub const ALL: u64 = 1_000_000;

/// Active shares from which their average is used instead of their distribution.
const MANY_SHARES: usize = 16;

/// Iterations per update. The next update continues.
const ITERATIONS: usize = 16;

/// Time slice of a context, µs: the default of NVIDIA's driver.
const SLICE_US: u64 = 2_000;

/// Shortest burst of launches that wait for credit, µs: libvgpu's lease.
const LEASE_US: u64 = drava_vgpu_abi::bucket::LEASE_US;

/// Bounds of the learned factor, parts per million.
const FACTOR: std::ops::RangeInclusive<u64> = 200_000..=4_000_000;

/// Lowest own time, parts per million.
const LOWEST: u64 = ALL / 50;

/// Delay of NVML's samples: earlier ones after a change of the active set are of the time before, µs.
const LATE_US: u64 = 300_000;

/// Age of an active set from which its launches are taken as typical, µs.
const TYPICAL_AFTER_US: u64 = 2_000_000;

/// Active sets in which a share counts as new: programs launch something, load for a while, and start.
const NEW_FOR: u8 = 3;

/// The sums fade in the time in which each share has this number of launches or token slices, within these bounds, µs.
const PORTIONS: u64 = 10;
const FADE_US: std::ops::RangeInclusive<u64> = 500_000..=10_000_000;

/// Weight of the previous factor, as one part in this number of that time.
const PRIOR: u64 = 4;

/// How the work of a share reaches the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// The GPU always has work of the share.
    Saturating,
    /// In launches of about this duration, µs, with gaps.
    Launches(u64),
    /// In token slices, in which no other share with a token runs; launches of about this duration, µs.
    TokenSlices(u64),
}

/// An active share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Active<Id> {
    /// The share.
    pub id: Id,
    /// Its part of the GPU, parts per million.
    pub part: u64,
    /// How it uses its part.
    pub workload: Workload,
    /// GPU time charged in this tick, µs.
    pub charged_us: u64,
    /// Launches charged in this tick.
    pub launches: u64,
    /// Whether it used time in this tick, or waited for it.
    pub is_working: bool,
}

#[derive(Debug, Clone)]
struct Share {
    /// Part of the time in which it is in flight, parts per million.
    in_flight: u64,
    /// Its part of the GPU, parts per million.
    part: u64,
    /// Predicted own time, parts per million.
    predicted: u64,
    /// Learned factor of the prediction, parts per million.
    factor: u64,
    /// Own time in its page, parts per million.
    own: u64,
    /// Predicted use since the last sample, without the factor, µs.
    fresh_us: u64,
    /// The same and the observed use over all samples, fading, µs.
    predicted_us: u64,
    seen_us: u64,
    /// Cost of its launches in typical active sets.
    launches: Launches,
    /// New active sets that it was in.
    new_sets: u8,
    is_active: bool,
    is_working: bool,
}

impl Share {
    /// Returns the predicted use, without the factor, for a charge, µs.
    fn predicted_own_us(&self, charged_us: u64) -> u64 {
        let measured_us = charged_us.saturating_mul(ALL) / self.own.max(1);
        measured_us.saturating_mul(self.predicted) / ALL
    }
}

/// Contention between the shares of a GPU.
#[derive(Debug, Clone)]
pub struct Contention<Id> {
    shares: BTreeMap<Id, Share>,
    /// Time of the ticks since the last sample, µs.
    fresh_us: u64,
    /// Time in which samples do not count, µs.
    late_us: u64,
    /// Age of the active set, µs.
    set_age_us: u64,
    /// Whether there is no sample of this active set yet.
    is_unobserved: bool,
    /// Whether a share in it is new.
    has_new_share: bool,
    /// Time in which the sums fade, µs.
    fade_us: u64,
    /// The active set of the learned factors.
    active_set: Vec<Id>,
}

impl<Id> Default for Contention<Id> {
    fn default() -> Self {
        Self {
            shares: BTreeMap::new(),
            fresh_us: 0,
            late_us: 0,
            set_age_us: 0,
            is_unobserved: false,
            has_new_share: false,
            fade_us: *FADE_US.start(),
            active_set: Vec::new(),
        }
    }
}

impl Workload {
    /// Returns the part of its time in flight in which it alternates with other shares in flight, parts per million. In the
    /// rest it is not interrupted.
    fn divisible(self) -> u64 {
        match self {
            Self::Saturating => ALL,
            Self::Launches(us) | Self::TokenSlices(us) => {
                let burst_us = us.max(LEASE_US);
                // The slices that start within the burst, except the first.
                ALL.saturating_sub(ALL * SLICE_US / 2 / burst_us)
            }
        }
    }

    /// Returns the work that reaches the GPU at once, µs.
    fn portion_us(self) -> u64 {
        match self {
            Self::Saturating => 0,
            Self::Launches(us) => us,
            Self::TokenSlices(us) => us.max(LONGEST_US / 2),
        }
    }

    /// Whether both can be in flight at the same time.
    fn overlaps(self, other: Self) -> bool {
        !matches!((self, other), (Self::TokenSlices(_), Self::TokenSlices(_)))
    }
}

impl<Id: Ord + Copy> Contention<Id> {
    /// Drops removed shares.
    pub fn retain(&mut self, is_there: impl Fn(&Id) -> bool) {
        self.shares.retain(|id, _| is_there(id));
    }

    /// Returns the own times of the active shares, parts per million, in their order, `elapsed_us` after the last tick.
    pub fn update(&mut self, elapsed_us: u64, active: &[Active<Id>]) -> Vec<u64> {
        self.fresh_us += elapsed_us;
        self.update_active_set(active);
        self.learn_from_launches(elapsed_us, active);
        for _ in 0..ITERATIONS {
            for share in active {
                let running = self.running(active, share);
                let divisible = share.workload.divisible();
                let predicted = ALL - divisible + divisible * running / ALL;
                if let Some(state) = self.shares.get_mut(&share.id) {
                    state.predicted = predicted;
                    // A single share measures its own use.
                    let factor = if active.len() > 1 { state.factor } else { ALL };
                    let least = share.part.clamp(LOWEST, ALL);
                    state.own = (predicted * factor / ALL).clamp(least, ALL);
                    state.in_flight = (share.part * ALL / state.own).min(ALL);
                }
            }
        }
        active
            .iter()
            .map(|share| self.shares.get(&share.id).map_or(ALL, |state| state.own))
            .collect()
    }

    /// Updates the active set, and the predicted use of its shares under their last own times.
    fn update_active_set(&mut self, active: &[Active<Id>]) {
        let mut is_new = false;
        for (id, state) in &mut self.shares {
            let is_active = active.iter().any(|share| share.id == *id);
            is_new |= is_active != state.is_active;
            state.is_active = is_active;
        }
        for share in active {
            let state = self.shares.entry(share.id).or_insert_with(|| {
                is_new = true;
                Share {
                    in_flight: share.part,
                    part: share.part,
                    predicted: ALL,
                    factor: ALL,
                    own: ALL,
                    fresh_us: 0,
                    predicted_us: 0,
                    seen_us: 0,
                    launches: Launches::default(),
                    new_sets: 0,
                    is_active: true,
                    is_working: true,
                }
            });
            let predicted_us = state.predicted_own_us(share.charged_us);
            state.fresh_us = state.fresh_us.saturating_add(predicted_us);
            state.part = share.part;
            state.is_working = share.is_working;
        }
        let rounds = active
            .iter()
            .map(|share| PORTIONS * share.workload.portion_us() * ALL / share.part.max(1));
        self.fade_us = rounds
            .max()
            .unwrap_or(0)
            .clamp(*FADE_US.start(), *FADE_US.end());
        if is_new {
            self.on_active_set_change(active);
        }
    }

    /// Learns the cost of launches in a typical active set, or the factors from it in a new one.
    fn learn_from_launches(&mut self, elapsed_us: u64, active: &[Active<Id>]) {
        // The tick of a change is partly of the time before.
        let is_half = self.set_age_us == 0;
        self.set_age_us = self.set_age_us.saturating_add(elapsed_us);
        if is_half || elapsed_us == 0 {
            return;
        }
        if active.len() < 2 || self.set_age_us >= TYPICAL_AFTER_US {
            for share in active.iter().filter(|share| share.launches > 0) {
                if let Some(state) = self.shares.get_mut(&share.id) {
                    state.launches.learn(share.charged_us, share.launches);
                }
            }
        } else if self.is_unobserved && self.has_new_share {
            self.start_cold(elapsed_us, active);
        }
    }

    /// Learns from a tick without NVML samples.
    fn start_cold(&mut self, elapsed_us: u64, active: &[Active<Id>]) {
        let before = |share: &Active<Id>| {
            let known = self.shares.get(&share.id).map(|state| state.launches);
            (known.unwrap_or_default(), share.launches)
        };
        let known: Vec<(Launches, u64)> = active.iter().map(before).collect();
        let fills = |share: &Active<Id>| share.workload == Workload::Saturating && share.is_working;
        let used = cold_start::used(elapsed_us, active.iter().any(fills), &known);
        let lengths = active
            .iter()
            .map(|share| share.charged_us / share.launches.max(1));
        let longest_us = lengths.max().unwrap_or(0);
        let at_work = active
            .iter()
            .zip(used)
            .filter(|(share, _)| share.is_working);
        for (share, used_us) in at_work {
            if let (Some(state), Some(used_us)) = (self.shares.get_mut(&share.id), used_us) {
                let predicted_us = state.predicted_own_us(share.charged_us);
                state.predicted_us = state.predicted_us.saturating_add(predicted_us);
                state.seen_us = state.seen_us.saturating_add(used_us);
                state.factor = cold_start::factor(state.predicted_us, state.seen_us, longest_us);
            }
        }
    }

    fn on_active_set_change(&mut self, active: &[Active<Id>]) {
        self.late_us = LATE_US;
        self.set_age_us = 0;
        for state in self.shares.values_mut() {
            (state.predicted_us, state.seen_us) = (0, 0);
        }
        if active.len() < 2 {
            // No contention; the same shares may return.
            return;
        }
        let mut active_set: Vec<Id> = active.iter().map(|share| share.id).collect();
        active_set.sort_unstable();
        if active_set != self.active_set {
            // The factors of another active set are half valid.
            for state in self.shares.values_mut() {
                state.factor = u64::midpoint(state.factor, ALL);
            }
            self.active_set = active_set;
            self.is_unobserved = true;
        }
        self.has_new_share = false;
        for share in active.iter().filter(|_| self.is_unobserved) {
            if let Some(state) = self.shares.get_mut(&share.id) {
                self.has_new_share |= state.new_sets < NEW_FOR;
                state.new_sets = state.new_sets.saturating_add(1);
            }
        }
    }

    /// Returns the part of its alternating time in which a share runs: the mean over the sets of other shares in flight.
    fn running(&self, active: &[Active<Id>], share: &Active<Id>) -> u64 {
        let others: Vec<(u64, u64)> = active
            .iter()
            .filter(|other| other.id != share.id && share.workload.overlaps(other.workload))
            .filter_map(|other| {
                let in_flight = self.shares.get(&other.id)?.in_flight;
                Some((in_flight, in_flight * other.workload.divisible() / ALL))
            })
            .collect();
        if others.len() >= MANY_SHARES {
            let in_flight: u64 = others.iter().map(|(in_flight, _)| in_flight).sum();
            return ALL * ALL / (ALL + in_flight);
        }
        // chance[n]: n others are in flight and alternate with it, and none runs uninterrupted, parts per million.
        let mut chance = vec![0; others.len() + 1];
        if let Some(none) = chance.first_mut() {
            *none = ALL;
        }
        for (in_flight, dividing) in others {
            let mut before = 0;
            for chance in &mut chance {
                let here = *chance;
                *chance = (here * (ALL - in_flight) + before * dividing) / ALL;
                before = here;
            }
        }
        chance
            .iter()
            .zip(1u64..)
            .map(|(chance, turns)| chance / turns)
            .sum()
    }

    /// Applies an NVML sample over `elapsed_us`: the use of each share, µs.
    pub fn observe(&mut self, elapsed_us: u64, seen: &[(Id, u64)]) {
        let is_late = self.late_us > 0;
        self.late_us = self.late_us.saturating_sub(elapsed_us);
        // Ticks and NVML's samples do not cover the same times, but similar ones.
        let steps_us = std::mem::take(&mut self.fresh_us);
        let (fade_us, known_us) = (self.fade_us, self.fade_us / PRIOR);
        let active = self.shares.values().filter(|state| state.is_active);
        let is_alone = active.count() < 2;
        if !is_late && !is_alone && std::mem::take(&mut self.is_unobserved) {
            // The factors of the cold start have no weight against samples.
            for state in self.shares.values_mut() {
                (state.predicted_us, state.seen_us) = (0, 0);
            }
        }
        for (id, state) in &mut self.shares {
            let fresh_us = std::mem::take(&mut state.fresh_us).saturating_mul(elapsed_us);
            // A late sample of a share that has just stopped is of the time before.
            if is_late || is_alone || !state.is_active || !state.is_working {
                continue;
            }
            let Some(fresh_us) = fresh_us.checked_div(steps_us) else {
                continue;
            };
            let seen_us = seen
                .iter()
                .find(|(seen, _)| seen == id)
                .map_or(0, |(_, us)| *us);
            let faded = |us: u64| us.saturating_mul(fade_us) / (fade_us + elapsed_us);
            state.predicted_us = faded(state.predicted_us).saturating_add(fresh_us);
            state.seen_us = faded(state.seen_us).saturating_add(seen_us);
            let known_us = known_us * state.part / ALL;
            let found = (state.seen_us.saturating_mul(ALL) + known_us * state.factor)
                / (state.predicted_us + known_us).max(1);
            state.factor = found.clamp(*FACTOR.start(), *FACTOR.end());
        }
    }
}
