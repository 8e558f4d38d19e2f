//! Who gives way to whom, and until when. Pure.
//!
//! A share of higher priority that is at work says until when. Until then those of lower priority make no launches: a
//! card that runs them by turns would make each request of the higher one take twice as long. They go on by the clock,
//! whatever has become of the agent, so an end that moves is told again before it comes.
//!
//! **Nobody is starved, whatever is claimed.** What a share is kept from is counted against what is guaranteed to it, or
//! against the floor where nothing is. One that is owed [`OWED_US`] gives way to nobody until that is repaid. Only the
//! time is counted in which it was let, not what it made of it: nothing that any tenant writes about itself changes that.

use std::collections::BTreeMap;

use drava_vgpu_abi::Priority;

/// The farthest moment that is told, from now, µs; less than what libvgpu believes.
pub const AHEAD_US: u64 = 50_000;

/// So much of its guarantee may be kept from a share before it gives way no longer, µs; as much may it have been given in
/// advance.
pub const OWED_US: u64 = 10_000;

/// A share ends later than it says where it had to wait for the card: by this part of its work, µs at least and at most.
const LATE: u64 = 4;
const LATE_US: (u64, u64) = (50, 1_000);

/// So long before the end of its work a share is looked at again, µs.
const LOOK_AHEAD_US: u64 = 500;

/// The longest time between two looks at a share at work, and the shortest, µs.
const LOOK_US: (u64, u64) = (200, 5_000);

const MILLION: i64 = 1_000_000;

/// A metered share as it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing<Id> {
    /// Which.
    pub id: Id,
    /// Its rank.
    pub priority: Priority,
    /// What is kept for it however long others are at work, µs of GPU time per second.
    pub kept: i64,
    /// Its weight where shares take turns; elsewhere the card treats all alike.
    pub weight: u32,
    /// Until when it says that it will be at work, µs; a moment that has passed if it is not.
    pub busy_until_us: u64,
}

/// What one share was let and kept from.
#[derive(Debug, Clone, Copy)]
struct Account {
    /// What it was kept from beyond what it was let, µs in millionths.
    owed: i64,
    is_owed: bool,
    /// What it was told last.
    until_us: u64,
    /// Its part of the card while it does not give way, in millionths.
    part: i64,
}

impl Default for Account {
    fn default() -> Self {
        Self {
            owed: 0,
            is_owed: false,
            until_us: 0,
            // Nobody has kept it from anything yet.
            part: MILLION,
        }
    }
}

/// The shares of one card.
#[derive(Debug, Clone)]
pub struct Precedence<Id> {
    accounts: BTreeMap<Id, Account>,
    /// Since when each of those at work is, µs.
    begun_us: BTreeMap<Id, u64>,
    looked_us: u64,
    next_us: u64,
}

impl<Id> Default for Precedence<Id> {
    fn default() -> Self {
        Self {
            accounts: BTreeMap::new(),
            begun_us: BTreeMap::new(),
            looked_us: 0,
            next_us: u64::MAX,
        }
    }
}

impl<Id: Ord + Copy> Precedence<Id> {
    /// When to look again, unless somebody calls.
    #[must_use]
    pub fn next_us(&self) -> u64 {
        self.next_us
    }

    /// Whether that share gives way at `now_us`.
    #[must_use]
    pub fn gives_way(&self, id: Id, now_us: u64) -> bool {
        self.accounts
            .get(&id)
            .is_some_and(|account| account.until_us > now_us)
    }

    /// Until when each share gives way, µs; 0 if it does not.
    pub fn look(&mut self, now_us: u64, standings: &[Standing<Id>]) -> Vec<(Id, u64)> {
        let is_there = |id: &Id| standings.iter().any(|standing| standing.id == *id);
        self.accounts.retain(|id, _| is_there(id));
        let busy: Vec<&Standing<Id>> = standings
            .iter()
            .filter(|standing| standing.busy_until_us > now_us)
            .collect();
        self.begun_us
            .retain(|id, _| busy.iter().any(|standing| standing.id == *id));
        let ends: Vec<(&Standing<Id>, u64)> = busy
            .into_iter()
            .map(|standing| (standing, self.end_us(now_us, standing)))
            .collect();
        let last_us = std::mem::replace(&mut self.looked_us, now_us);
        let told = standings.iter().map(|standing| {
            let above = || {
                let ends = ends.iter();
                ends.filter(|(other, _)| other.priority > standing.priority)
            };
            let account = self.accounts.entry(standing.id).or_default();
            account.settle(last_us, now_us, standing.kept);
            let others: u32 = above().map(|(other, _)| other.weight.max(1)).sum();
            let weight = i64::from(standing.weight.max(1));
            account.part = MILLION * weight / (weight + i64::from(others));
            let until_us = above().map(|(_, end_us)| *end_us).max().unwrap_or(0);
            account.until_us = if account.is_owed { 0 } else { until_us };
            (standing.id, account.until_us)
        });
        let told = told.collect();
        self.next_us = next_us(now_us, &ends);
        told
    }

    /// Until when others give way to one that is at work.
    fn end_us(&mut self, now_us: u64, standing: &Standing<Id>) -> u64 {
        let begun_us = *self.begun_us.entry(standing.id).or_insert(now_us);
        let (shortest, longest) = LATE_US;
        let length_us = standing.busy_until_us.saturating_sub(begun_us);
        let late_us = (length_us / LATE).clamp(shortest, longest);
        let end_us = standing.busy_until_us.saturating_add(late_us);
        end_us.min(now_us.saturating_add(AHEAD_US))
    }
}

fn next_us<Id>(now_us: u64, ends: &[(&Standing<Id>, u64)]) -> u64 {
    let (shortest, longest) = LOOK_US;
    let soonest = ends
        .iter()
        .flat_map(|(standing, end_us)| {
            let ends_us = standing.busy_until_us.min(*end_us);
            [ends_us.saturating_sub(LOOK_AHEAD_US), ends_us, *end_us]
        })
        .filter(|moment_us| *moment_us > now_us)
        .min();
    soonest.map_or(u64::MAX, |soonest| {
        soonest.clamp(now_us + shortest, now_us + longest)
    })
}

impl Account {
    /// Counts the time since the last look.
    fn settle(&mut self, last_us: u64, now_us: u64, kept: i64) {
        const MOST: i64 = OWED_US.cast_signed() * MILLION;
        // After a pause that long everything is settled.
        let passed_us = now_us.saturating_sub(last_us).min(1_000_000);
        let stopped_us = self.until_us.min(now_us).saturating_sub(last_us);
        let let_us = passed_us.saturating_sub(stopped_us).cast_signed();
        self.owed += kept * passed_us.cast_signed() - self.part * let_us;
        self.owed = self.owed.clamp(-MOST, MOST);
        self.is_owed = self.owed >= MOST || (self.is_owed && self.owed > 0);
    }
}
