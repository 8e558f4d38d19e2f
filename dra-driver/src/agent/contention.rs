//! How much of what a share's events measure is its own, and not a neighbour's time slice. Pure.
//!
//! Under time slicing a kernel seems to run for as long as it is under way. A share that shall have 30 % of a card beside
//! one that has the rest is under way for 60 % of the time, because half of that is the neighbour's. [`Contention`]
//! predicts this for the shares that are active, from the parts that they shall have, so that a change of company needs no
//! time to learn:
//!
//! > a share under way meets each other one with the probability that that one is under way, and whoever meets takes turns
//!
//! What the prediction lacks (short queues lose turns, long kernels keep them) is learned once a second from what NVML has
//! seen of each share over what the share measured, as a factor for each share.

use std::collections::BTreeMap;

/// One, in parts per million.
pub const ALL: u64 = 1_000_000;

/// From so many active shares on their average is used instead of their distribution.
const CROWD: usize = 16;

/// Steps of the iteration. It goes on with the next step of the agent.
const STEPS: usize = 16;

/// Less than this in one observation means nothing: NVML gives whole percents of a second. µs.
const MEANS_FROM_US: u64 = 20_000;

/// Bounds of the factor that is learned, parts per million.
const FACTOR: std::ops::RangeInclusive<u64> = 200_000..=4_000_000;

/// For which part of the time a share may be under way: beyond what is predicted, and beyond twice that, parts per
/// million.
const MORE_UNDER_WAY: (u64, u64) = (ALL / 4, ALL / 20);

/// The least that is believed to be a share's own, parts per million.
const LEAST: u64 = ALL / 50;

/// An active share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Active<Id> {
    /// Which.
    pub id: Id,
    /// Its part of the card, parts per million.
    pub part: u64,
    /// Time that it was charged in this step, µs.
    pub charged_us: u64,
}

#[derive(Debug, Clone)]
struct Share {
    /// For which part of the time it is under way, parts per million.
    under_way: u64,
    /// Predicted own part of what it measures, parts per million.
    predicted: u64,
    /// What is known to be wrong with the prediction, parts per million.
    factor: u64,
    /// Own part that it was told, parts per million.
    own: u64,
    /// Measured since the last observation, µs.
    measured_us: u64,
    /// Predicted to be its own of that, without the factor, µs.
    predicted_us: u64,
    is_active: bool,
}

/// The shares of a card.
#[derive(Debug, Clone)]
pub struct Contention<Id> {
    shares: BTreeMap<Id, Share>,
    /// Whether the company was the same since the last observation.
    is_settled: bool,
}

impl<Id> Default for Contention<Id> {
    fn default() -> Self {
        Self {
            shares: BTreeMap::new(),
            is_settled: false,
        }
    }
}

impl<Id: Ord + Copy> Contention<Id> {
    /// Forgets shares that are gone.
    pub fn retain(&mut self, is_there: impl Fn(&Id) -> bool) {
        self.shares.retain(|id, _| is_there(id));
    }

    /// Says which part of what they measure is the active shares' own, parts per million, in their order.
    pub fn step(&mut self, active: &[Active<Id>]) -> Vec<u64> {
        self.arrive(active);
        for _ in 0..STEPS {
            for share in active {
                let predicted = self.meeting(active, share.id);
                if let Some(state) = self.shares.get_mut(&share.id) {
                    state.predicted = predicted;
                    // Who gets too little is helped by holding back who gets too much. Launching all the time helps
                    // only a little, and is too much when the others pause.
                    let predicted_under_way = share.part * ALL / predicted.max(1);
                    let most = (predicted_under_way + MORE_UNDER_WAY.0)
                        .min(2 * predicted_under_way + MORE_UNDER_WAY.1)
                        .min(ALL);
                    let least = (share.part * ALL / most).max(LEAST);
                    let own = (predicted * state.factor / ALL).clamp(least, ALL);
                    state.under_way = (share.part * ALL / own).min(ALL);
                    state.own = own.max(share.part).min(ALL);
                }
            }
        }
        active
            .iter()
            .map(|share| self.shares.get(&share.id).map_or(ALL, |state| state.own))
            .collect()
    }

    /// Notes who is active and what they measured under what they were told before.
    fn arrive(&mut self, active: &[Active<Id>]) {
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
                    under_way: share.part,
                    predicted: ALL,
                    factor: ALL,
                    own: ALL,
                    measured_us: 0,
                    predicted_us: 0,
                    is_active: true,
                }
            });
            let measured_us = share.charged_us.saturating_mul(ALL) / state.own.max(1);
            state.measured_us = state.measured_us.saturating_add(measured_us);
            state.predicted_us = state
                .predicted_us
                .saturating_add(measured_us.saturating_mul(state.predicted) / ALL);
        }
        if is_new {
            self.is_settled = false;
            // What was learned beside others may still be half true.
            for state in self.shares.values_mut() {
                state.factor = u64::midpoint(state.factor, ALL);
            }
        }
    }

    /// The mean of one over the number of shares that are under way when this one is.
    fn meeting(&self, active: &[Active<Id>], id: Id) -> u64 {
        let others = active.iter().filter(|other| other.id != id);
        let under_way: Vec<u64> = others
            .filter_map(|other| Some(self.shares.get(&other.id)?.under_way))
            .collect();
        if under_way.len() >= CROWD {
            return ALL * ALL / (ALL + under_way.iter().sum::<u64>());
        }
        // chance[n]: n others are under way, parts per million.
        let mut chance = vec![0; under_way.len() + 1];
        if let Some(none) = chance.first_mut() {
            *none = ALL;
        }
        for under_way in under_way {
            let mut before = 0;
            for chance in &mut chance {
                let here = *chance;
                *chance = (here * (ALL - under_way) + before * under_way) / ALL;
                before = here;
            }
        }
        chance
            .iter()
            .zip(1u64..)
            .map(|(chance, turns)| chance / turns)
            .sum()
    }

    /// Takes what NVML has seen of each share since the last time, µs.
    pub fn observe(&mut self, seen: &[(Id, u64)]) {
        for (id, state) in &mut self.shares {
            let measured_us = std::mem::take(&mut state.measured_us);
            let predicted_us = std::mem::take(&mut state.predicted_us);
            let seen_us = seen
                .iter()
                .find(|(seen, _)| seen == id)
                .map_or(0, |(_, us)| *us);
            if !self.is_settled
                || seen_us < MEANS_FROM_US
                || measured_us < MEANS_FROM_US
                || predicted_us == 0
            {
                continue;
            }
            let found = seen_us.saturating_mul(ALL) / predicted_us;
            state.factor = u64::midpoint(state.factor, found.clamp(*FACTOR.start(), *FACTOR.end()));
        }
        self.is_settled = true;
    }
}
