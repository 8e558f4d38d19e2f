//! How much of what a share's events measure is its own, and not a neighbour's time slice. Pure.
//!
//! Under time slicing a kernel seems to run for as long as it is under way. A share that shall have 30 % of a card beside
//! one that has the rest is under way for 60 % of the time, because half of that is the neighbour's. [`Contention`]
//! predicts this for the shares that are active, from the parts that they shall have and from the lengths of their
//! launches, so that a change of company needs no time to learn:
//!
//! > a share under way meets each other one with the probability that that one is under way, and whoever meets takes
//! > turns; but what is over within one time slice is interrupted by nobody, and waits for its turn before it begins
//!
//! What the prediction lacks is learned from what NVML has seen of each share over what the share measured, as a factor
//! for each share: both as sums that fade, so fast that some of its launches are always in them. Of those that meet for the
//! first time NVML says nothing for a while; what is known of their launches does ([`meeting`]).

use std::collections::BTreeMap;

use super::token::LONGEST_US;

mod meeting;

use meeting::Launches;

/// One, in parts per million.
pub const ALL: u64 = 1_000_000;

/// From so many active shares on their average is used instead of their distribution.
const CROWD: usize = 16;

/// Steps of the iteration. It goes on with the next step of the agent.
const STEPS: usize = 16;

/// For how long a context runs before another one has its turn, µs: what NVIDIA's driver does unless told otherwise.
const SLICE_US: u64 = 2_000;

/// Launches that wait for credit come in bursts of at least this, µs: libvgpu's lease.
const LEASE_US: u64 = drava_vgpu_abi::bucket::LEASE_US;

/// Bounds of the factor that is learned, parts per million.
const FACTOR: std::ops::RangeInclusive<u64> = 200_000..=4_000_000;

/// For which part of the time a share may be under way: beyond what is predicted, and beyond twice that, parts per
/// million.
const MORE_UNDER_WAY: (u64, u64) = (ALL / 4, ALL / 20);

/// The least that is believed to be a share's own, parts per million.
const LEAST: u64 = ALL / 50;

/// What NVML says for so long after a change of company is of before it, µs: its samples come late.
const LATE_US: u64 = 300_000;

/// Shares that are together for so long are known by what NVML has said, µs.
const ACQUAINTED_US: u64 = 2_000_000;

/// Somebody is new for so many meetings: programs launch something, load for a while, and begin.
const NEW_FOR: u8 = 3;

/// The sums fade in the time in which each share makes so many launches or has so many turns, within these bounds, µs.
const PORTIONS: u64 = 10;
const FADE_US: std::ops::RangeInclusive<u64> = 500_000..=10_000_000;

/// What was known before counts as much as this part of that time.
const KNOWN: u64 = 4;

/// How a share's work comes to the card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Something always waits for the card.
    Always,
    /// In launches of about this length, µs, between which there may be nothing.
    Launches(u64),
    /// In turns with the token, while nobody else who takes turns has one.
    Turns(u64),
}

/// An active share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Active<Id> {
    /// Which.
    pub id: Id,
    /// Its part of the card, parts per million.
    pub part: u64,
    /// How it uses that.
    pub work: Work,
    /// Time that it was charged in this step, µs.
    pub charged_us: u64,
    /// Launches that it was charged for.
    pub launches: u64,
    /// Whether it did anything in this step, or waited to.
    pub is_at_work: bool,
}

#[derive(Debug, Clone)]
struct Share {
    /// For which part of the time it is under way, parts per million.
    under_way: u64,
    /// Its part of the card, parts per million.
    part: u64,
    /// Predicted own part of what it measures, parts per million.
    predicted: u64,
    /// What is known to be wrong with the prediction, parts per million.
    factor: u64,
    /// Own part that it was told, parts per million.
    own: u64,
    /// Predicted to be its own of what it measured since the last observation, without the factor, µs.
    fresh_us: u64,
    /// The same of all observations, and what was seen then, fading, µs.
    predicted_us: u64,
    seen_us: u64,
    /// What its launches were charged in a company that is known.
    launches: Launches,
    /// How often it has met others of whom nothing was known.
    meetings: u8,
    is_active: bool,
    is_at_work: bool,
}

impl Share {
    /// Predicted to be its own, without the factor, of what it measured when it was charged so much, µs.
    fn predicted_own_us(&self, charged_us: u64) -> u64 {
        let measured_us = charged_us.saturating_mul(ALL) / self.own.max(1);
        measured_us.saturating_mul(self.predicted) / ALL
    }
}

/// The shares of a card.
#[derive(Debug, Clone)]
pub struct Contention<Id> {
    shares: BTreeMap<Id, Share>,
    /// Time of the steps since the last observation, µs.
    fresh_us: u64,
    /// For how long observations do not count, µs.
    late_us: u64,
    /// For how long the company is the same, µs.
    together_us: u64,
    /// Whether NVML has said nothing of this company yet.
    is_unheard: bool,
    /// Whether somebody in it hardly met anybody before.
    is_anybody_new: bool,
    /// In which time what was observed fades, µs.
    fade_us: u64,
    /// Who was active together when it was learned how wrong the predictions are.
    company: Vec<Id>,
}

impl<Id> Default for Contention<Id> {
    fn default() -> Self {
        Self {
            shares: BTreeMap::new(),
            fresh_us: 0,
            late_us: 0,
            together_us: 0,
            is_unheard: false,
            is_anybody_new: false,
            fade_us: *FADE_US.start(),
            company: Vec::new(),
        }
    }
}

impl Work {
    /// Of the time in which others are under way too, the part in which it takes turns with them, parts per million. In
    /// the rest it runs and they wait, or they have run before it began.
    fn divisible(self) -> u64 {
        match self {
            Self::Always => ALL,
            Self::Launches(us) | Self::Turns(us) => {
                let burst_us = us.max(LEASE_US);
                // As many slices as begin within it, but for the one that it begins with.
                ALL.saturating_sub(ALL * SLICE_US / 2 / burst_us)
            }
        }
    }

    /// What comes to the card at once, µs.
    fn portion_us(self) -> u64 {
        match self {
            Self::Always => 0,
            Self::Launches(us) => us,
            Self::Turns(us) => us.max(LONGEST_US / 2),
        }
    }

    /// Whether it can be under way when that other one is.
    fn meets(self, other: Self) -> bool {
        !matches!((self, other), (Self::Turns(_), Self::Turns(_)))
    }
}

impl<Id: Ord + Copy> Contention<Id> {
    /// Forgets shares that are gone.
    pub fn retain(&mut self, is_there: impl Fn(&Id) -> bool) {
        self.shares.retain(|id, _| is_there(id));
    }

    /// Says which part of what they measure is the active shares' own, parts per million, in their order, `elapsed_us`
    /// after the last step.
    pub fn step(&mut self, elapsed_us: u64, active: &[Active<Id>]) -> Vec<u64> {
        self.fresh_us += elapsed_us;
        self.arrive(active);
        self.compare(elapsed_us, active);
        for _ in 0..STEPS {
            for share in active {
                let taking_turns = self.taking_turns(active, share);
                let divisible = share.work.divisible();
                let predicted = ALL - divisible + divisible * taking_turns / ALL;
                if let Some(state) = self.shares.get_mut(&share.id) {
                    state.predicted = predicted;
                    // Who gets too little is helped by holding back who gets too much. Launching all the time helps
                    // only a little, and is too much when the others pause.
                    let predicted_under_way = share.part * ALL / taking_turns.max(1);
                    let most = (predicted_under_way + MORE_UNDER_WAY.0)
                        .min(2 * predicted_under_way + MORE_UNDER_WAY.1)
                        .min(ALL);
                    let least = (share.part * ALL / most).max(LEAST);
                    // Who is alone measures what it uses.
                    let factor = if active.len() > 1 { state.factor } else { ALL };
                    let own = (predicted * factor / ALL).clamp(least, ALL);
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
                    part: share.part,
                    predicted: ALL,
                    factor: ALL,
                    own: ALL,
                    fresh_us: 0,
                    predicted_us: 0,
                    seen_us: 0,
                    launches: Launches::default(),
                    meetings: 0,
                    is_active: true,
                    is_at_work: true,
                }
            });
            let predicted_us = state.predicted_own_us(share.charged_us);
            state.fresh_us = state.fresh_us.saturating_add(predicted_us);
            state.part = share.part;
            state.is_at_work = share.is_at_work;
        }
        let rounds = active
            .iter()
            .map(|share| PORTIONS * share.work.portion_us() * ALL / share.part.max(1));
        self.fade_us = rounds
            .max()
            .unwrap_or(0)
            .clamp(*FADE_US.start(), *FADE_US.end());
        if is_new {
            self.change_company(active);
        }
    }

    /// Notes what launches of the active shares cost, or compares that with what they did before those met.
    fn compare(&mut self, elapsed_us: u64, active: &[Active<Id>]) {
        // A step in which somebody came is half of before.
        let is_half = self.together_us == 0;
        self.together_us = self.together_us.saturating_add(elapsed_us);
        if is_half || elapsed_us == 0 {
            return;
        }
        if active.len() < 2 || self.together_us >= ACQUAINTED_US {
            for share in active.iter().filter(|share| share.launches > 0) {
                if let Some(state) = self.shares.get_mut(&share.id) {
                    state.launches.learn(share.charged_us, share.launches);
                }
            }
        } else if self.is_unheard && self.is_anybody_new {
            self.meet(elapsed_us, active);
        }
    }

    /// Learns from a step of which NVML says nothing yet.
    fn meet(&mut self, elapsed_us: u64, active: &[Active<Id>]) {
        let before = |share: &Active<Id>| {
            let known = self.shares.get(&share.id).map(|state| state.launches);
            (known.unwrap_or_default(), share.launches)
        };
        let met: Vec<(Launches, u64)> = active.iter().map(before).collect();
        let fills = |share: &Active<Id>| share.work == Work::Always && share.is_at_work;
        let had = meeting::had(elapsed_us, active.iter().any(fills), &met);
        let lengths = active
            .iter()
            .map(|share| share.charged_us / share.launches.max(1));
        let longest_us = lengths.max().unwrap_or(0);
        let at_work = active.iter().zip(had).filter(|(share, _)| share.is_at_work);
        for (share, had_us) in at_work {
            if let (Some(state), Some(had_us)) = (self.shares.get_mut(&share.id), had_us) {
                let predicted_us = state.predicted_own_us(share.charged_us);
                state.predicted_us = state.predicted_us.saturating_add(predicted_us);
                state.seen_us = state.seen_us.saturating_add(had_us);
                state.factor = meeting::factor(state.predicted_us, state.seen_us, longest_us);
            }
        }
    }

    fn change_company(&mut self, active: &[Active<Id>]) {
        self.late_us = LATE_US;
        self.together_us = 0;
        for state in self.shares.values_mut() {
            (state.predicted_us, state.seen_us) = (0, 0);
        }
        if active.len() < 2 {
            // Nobody meets anybody, and the same ones may come back.
            return;
        }
        let mut company: Vec<Id> = active.iter().map(|share| share.id).collect();
        company.sort_unstable();
        if company != self.company {
            // What was learned beside others may still be half true.
            for state in self.shares.values_mut() {
                state.factor = u64::midpoint(state.factor, ALL);
            }
            self.company = company;
            self.is_unheard = true;
        }
        self.is_anybody_new = false;
        for share in active.iter().filter(|_| self.is_unheard) {
            if let Some(state) = self.shares.get_mut(&share.id) {
                self.is_anybody_new |= state.meetings < NEW_FOR;
                state.meetings = state.meetings.saturating_add(1);
            }
        }
    }

    /// Of the time in which a share is under way and takes turns with the others that are, the part in which it runs: the
    /// mean over who they are.
    fn taking_turns(&self, active: &[Active<Id>], share: &Active<Id>) -> u64 {
        let others: Vec<(u64, u64)> = active
            .iter()
            .filter(|other| other.id != share.id && share.work.meets(other.work))
            .filter_map(|other| {
                let under_way = self.shares.get(&other.id)?.under_way;
                Some((under_way, under_way * other.work.divisible() / ALL))
            })
            .collect();
        if others.len() >= CROWD {
            let under_way: u64 = others.iter().map(|(under_way, _)| under_way).sum();
            return ALL * ALL / (ALL + under_way);
        }
        // chance[n]: n others are under way and take turns with it, and none runs without giving way, parts per million.
        let mut chance = vec![0; others.len() + 1];
        if let Some(none) = chance.first_mut() {
            *none = ALL;
        }
        for (under_way, dividing) in others {
            let mut before = 0;
            for chance in &mut chance {
                let here = *chance;
                *chance = (here * (ALL - under_way) + before * dividing) / ALL;
                before = here;
            }
        }
        chance
            .iter()
            .zip(1u64..)
            .map(|(chance, turns)| chance / turns)
            .sum()
    }

    /// Takes what NVML has seen of each share in the `elapsed_us` since the last time, µs.
    pub fn observe(&mut self, elapsed_us: u64, seen: &[(Id, u64)]) {
        let is_late = self.late_us > 0;
        self.late_us = self.late_us.saturating_sub(elapsed_us);
        // Steps and NVML's samples are not of the same stretches of time, but of stretches like each other.
        let steps_us = std::mem::take(&mut self.fresh_us);
        let (fade_us, known_us) = (self.fade_us, self.fade_us / KNOWN);
        let active = self.shares.values().filter(|state| state.is_active);
        let is_alone = active.count() < 2;
        if !is_late && !is_alone && std::mem::take(&mut self.is_unheard) {
            // What was concluded without NVML is where it begins, and nothing that it has to outweigh.
            for state in self.shares.values_mut() {
                (state.predicted_us, state.seen_us) = (0, 0);
            }
        }
        for (id, state) in &mut self.shares {
            let fresh_us = std::mem::take(&mut state.fresh_us).saturating_mul(elapsed_us);
            // What NVML sees of one that has just stopped is of before it did, and was counted then.
            if is_late || is_alone || !state.is_active || !state.is_at_work {
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
