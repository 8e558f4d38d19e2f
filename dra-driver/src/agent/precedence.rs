//! Who gives way to whom, and until when. Pure.
//!
//! A share of higher priority that is at work says until when. Until then those of lower priority make no launches: a
//! card that runs them by turns would make each request of the higher one take twice as long. They go on by the clock,
//! whatever has become of the agent, so an end that moves is told again before it comes.
//!
//! **Work that comes in pieces counts as one.** A program that waits for each of its kernels leaves the card idle in
//! between, and what had to wait for the card ends later than was said. Each such gap would let in a kernel of the others,
//! of any length. So they wait for a little more: for a quarter of the work, and for [`LINGERS_US`] where a tenth of the time
//! has not been spent on that and its work has come in pieces lately. Behind the third piece and later ones,
//! which nothing of theirs was in front of, that is [`GAP_US`]. Very short work that comes all the time does not keep them from the card.
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

/// What a host takes from one kernel to the next, µs: the others wait for so long whether a share goes on.
pub const GAP_US: u64 = 500;

/// The same where a kernel of theirs of a millisecond may have been in front.
pub const LINGERS_US: u64 = GAP_US + 1_000;

/// One part in so many of the time may go to that, and what may be saved up, µs.
const LINGERS: u64 = 10;
const SAVED_US: u64 = 20_000;

/// A share whose work has come in pieces is waited for so many times in vain.
const PIECES: u8 = 4;

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

/// A share that others may give way to.
#[derive(Debug, Clone, Copy, Default)]
struct Worker {
    /// For how long they may wait whether it goes on: by its work, µs, and by the time that has passed, µs in [`LINGERS`] parts.
    earned_us: u64,
    saved: u64,
    /// Its work, until that is over.
    run: Option<Run>,
    /// Until when it was at work last, µs, and for how many more times it is believed to go on after that.
    worked_until_us: u64,
    pieces: u8,
}

/// Work that counts as one, µs.
#[derive(Debug, Clone, Copy)]
struct Run {
    /// Until when the share says that it is at work.
    busy_until_us: u64,
    /// Until when others give way.
    end_us: u64,
    /// In how many pieces it came.
    pieces: u8,
}

/// The shares of one card.
#[derive(Debug, Clone)]
pub struct Precedence<Id> {
    accounts: BTreeMap<Id, Account>,
    workers: BTreeMap<Id, Worker>,
    looked_us: u64,
    next_us: u64,
}

impl<Id> Default for Precedence<Id> {
    fn default() -> Self {
        Self {
            accounts: BTreeMap::new(),
            workers: BTreeMap::new(),
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
        self.workers.retain(|id, _| is_there(id));
        let last_us = match std::mem::replace(&mut self.looked_us, now_us) {
            0 => now_us,
            last_us => last_us,
        };
        let runs: Vec<(&Standing<Id>, Run)> = standings
            .iter()
            .filter_map(|standing| {
                let worker = self.workers.entry(standing.id).or_default();
                worker.look(last_us, now_us, standing.busy_until_us);
                Some((standing, worker.run?))
            })
            .collect();
        let told = standings.iter().map(|standing| {
            let above = || {
                let runs = runs.iter();
                runs.filter(|(other, _)| other.priority > standing.priority)
            };
            let account = self.accounts.entry(standing.id).or_default();
            account.settle(last_us, now_us, standing.kept);
            let others: u32 = above().map(|(other, _)| other.weight.max(1)).sum();
            let weight = i64::from(standing.weight.max(1));
            account.part = MILLION * weight / (weight + i64::from(others));
            let until_us = above().map(|(_, run)| run.end_us).max().unwrap_or(0);
            account.until_us = if account.is_owed { 0 } else { until_us };
            (standing.id, account.until_us)
        });
        let told = told.collect();
        self.next_us = next_us(now_us, runs.iter().map(|(_, run)| run));
        told
    }
}

impl Worker {
    /// Takes note of until when the share says that it is at work.
    fn look(&mut self, last_us: u64, now_us: u64, busy_until_us: u64) {
        let passed_us = now_us.saturating_sub(last_us).min(LINGERS * SAVED_US);
        self.saved = (self.saved + passed_us).min(LINGERS * SAVED_US);
        let (shortest, longest) = LATE_US;
        if let Some(run) = self.run {
            let from_us = run.busy_until_us.saturating_add(shortest).max(last_us);
            self.spend(run.end_us.min(now_us).saturating_sub(from_us));
        }
        if busy_until_us <= now_us {
            self.run = self.run.filter(|run| run.end_us > now_us);
            return;
        }
        let goes_on = self.expect(now_us, busy_until_us);
        let before = self.run.filter(|run| run.end_us > now_us);
        let pieces = before.map_or(1, |run| run.pieces.saturating_add(u8::from(goes_on)));
        let lingers_us = match pieces {
            // What others launched before they heard of the first piece may run behind it.
            0..=2 => LINGERS_US,
            _ => GAP_US,
        };
        let before_us = self.run.map_or(now_us, |run| run.busy_until_us.max(now_us));
        let work_us = busy_until_us.saturating_sub(before_us);
        self.earned_us = self.earned_us.saturating_add(work_us / LATE).min(longest);
        let saved_us = match self.pieces {
            0 => shortest,
            _ => (self.saved / LINGERS).clamp(shortest, lingers_us),
        };
        let end_us = busy_until_us.saturating_add(self.earned_us.max(saved_us));
        self.run = Some(Run {
            busy_until_us,
            end_us: end_us.min(now_us.saturating_add(AHEAD_US)),
            pieces,
        });
    }

    /// Takes note of whether it goes on soon after it was at work, before it is at work until `busy_until_us`, and says so.
    fn expect(&mut self, now_us: u64, busy_until_us: u64) -> bool {
        let idle_us = now_us.saturating_sub(self.worked_until_us);
        self.worked_until_us = busy_until_us;
        self.pieces = match idle_us {
            0 => self.pieces,
            1..=LINGERS_US => PIECES,
            _ => self.pieces.saturating_sub(1),
        };
        (1..=LINGERS_US).contains(&idle_us)
    }

    /// Takes off what others have waited for.
    fn spend(&mut self, us: u64) {
        let earned_us = us.min(self.earned_us);
        self.earned_us -= earned_us;
        self.saved = self.saved.saturating_sub(LINGERS * (us - earned_us));
    }
}

fn next_us<'a>(now_us: u64, runs: impl Iterator<Item = &'a Run>) -> u64 {
    let (shortest, longest) = LOOK_US;
    let soonest = runs
        .flat_map(|run| {
            let ends_us = run.busy_until_us.min(run.end_us);
            [ends_us.saturating_sub(LOOK_AHEAD_US), ends_us, run.end_us]
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
