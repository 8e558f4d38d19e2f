//! What the driver takes by itself in the processes of a share. Pure.
//!
//! Each context is charged ahead for it, with an estimate for the card's model. NVML shows what a process really holds; what
//! its program did not ask for is the driver's. Two things follow from that, once a second:
//!
//! - the **reserve**, what the next context is charged: what the neediest context takes, at least the estimate, since a
//!   context takes more as its program goes on (modules that are loaded lazily, stacks, heaps), and at most
//!   [`RESERVE_FACTOR`] times that. It rises at once and falls after [`FALLS_AFTER`] looks;
//! - the **excess**, what living processes hold beyond what they were charged. It counts as taken, so a share that
//!   exceeds its limit by it is denied everything until it has repaid it by freeing. It is gone with the process.
//!
//! What a program asked for is read in its share's region, **at another moment than NVML's figure**: a program that frees
//! and allocates all the time would seem to hold what it has just freed. So the driver is believed to have what is beyond
//! the *most* that the program ever asked for, which is exact when the share is full and never too much; and besides
//! what all of many looks ([`LOOKS`]) agree upon.
//!
//! The region is the tenant's own, who gains nothing here: a higher figure there is one that it is charged.

use std::collections::{BTreeMap, VecDeque};

use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::snapshot::ProcessUsage;

use super::detect::{GpuProcess, ShareView};

/// The reserve is at most so many times the estimate: what is more is not the driver.
pub const RESERVE_FACTOR: u64 = 2;

/// The excess of one process is at most so many times the estimate: what is more is not the driver, and a breach.
pub const EXCESS_FACTOR: u64 = 4;

/// Looks in a row that show less before the reserve falls.
pub const FALLS_AFTER: usize = 5;

/// Looks that must agree that the driver has more, where the program has once asked for more than now.
pub const LOOKS: usize = 16;

/// Looks that must agree that the driver has less.
const LESS_AFTER: usize = 5;

/// What one look shows of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown {
    /// Which.
    pub owner: Owner,
    /// Device memory by NVML.
    pub held_bytes: u64,
    /// What its program has asked for, by its slots, and what it may have opened of others.
    pub requested_bytes: u64,
    /// The most that this ever was.
    pub most_requested_bytes: u64,
    /// What its contexts were charged ahead.
    pub charged_bytes: u64,
}

/// What is to stand in the page of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Correction {
    /// What the next context is charged.
    pub reserve_bytes: u64,
    /// What is taken beyond what contexts were charged.
    pub excess_bytes: u64,
}

/// What is known about the driver in the processes of one share.
#[derive(Debug, Clone, Default)]
pub struct Reserve {
    processes: BTreeMap<(u32, u64, u64), Known>,
    reserve_bytes: u64,
    /// What the latest looks asked for that asked for less than the reserve.
    less: VecDeque<u64>,
}

#[derive(Debug, Clone, Default)]
struct Known {
    /// What the driver is believed to have taken.
    driver_bytes: u64,
    /// By the latest looks, each wrong by what was asked for or freed during it.
    looks: VecDeque<u64>,
}

impl Known {
    fn look(&mut self, shown: &Shown) {
        let beyond = |requested: u64| shown.held_bytes.saturating_sub(requested);
        remember(&mut self.looks, beyond(shown.requested_bytes), LOOKS);
        let agreed = (self.looks.len() == LOOKS).then(|| self.looks.iter().min());
        let agreed = agreed.flatten().copied().unwrap_or(0);
        let at_least = beyond(shown.most_requested_bytes).max(agreed);
        let lately = self.looks.iter().rev().take(LESS_AFTER);
        let at_most = if self.looks.len() < LESS_AFTER {
            u64::MAX
        } else {
            lately.max().copied().unwrap_or(u64::MAX)
        };
        self.driver_bytes = self.driver_bytes.min(at_most).max(at_least);
    }
}

impl Reserve {
    /// Takes one look at all processes of the share that NVML lists. `estimate_bytes` is what the driver takes in a
    /// context on a card of this model.
    pub fn look(&mut self, estimate_bytes: u64, processes: &[Shown]) -> Correction {
        let key = |owner: Owner| (owner.pid, owner.start_time, owner.pid_namespace);
        let is_there = |known: &(u32, u64, u64)| processes.iter().any(|p| key(p.owner) == *known);
        self.processes.retain(|known, _| is_there(known));
        let (mut wanted, mut excess_bytes) = (estimate_bytes, 0u64);
        for shown in processes {
            let contexts = self.contexts(estimate_bytes, shown);
            let known = self.processes.entry(key(shown.owner)).or_default();
            known.look(shown);
            wanted = wanted.max(known.driver_bytes / contexts);
            let beyond = known.driver_bytes.saturating_sub(shown.charged_bytes);
            let most = estimate_bytes.saturating_mul(EXCESS_FACTOR);
            excess_bytes = excess_bytes.saturating_add(beyond.min(most));
        }
        self.move_to(wanted.min(estimate_bytes.saturating_mul(RESERVE_FACTOR)));
        Correction {
            reserve_bytes: self.reserve_bytes,
            excess_bytes,
        }
    }

    /// How many contexts the process was charged for, as far as that can be told.
    fn contexts(&self, estimate_bytes: u64, shown: &Shown) -> u64 {
        let each = self.reserve_bytes.max(estimate_bytes).max(1);
        (shown.charged_bytes.saturating_add(each / 2) / each).max(1)
    }

    fn move_to(&mut self, wanted: u64) {
        if wanted >= self.reserve_bytes {
            self.reserve_bytes = wanted;
            self.less.clear();
            return;
        }
        remember(&mut self.less, wanted, FALLS_AFTER);
        if self.less.len() == FALLS_AFTER {
            self.reserve_bytes = self.less.iter().max().copied().unwrap_or(wanted);
            self.less.clear();
        }
    }
}

fn remember(looks: &mut VecDeque<u64>, look: u64, count: usize) {
    looks.push_back(look);
    while looks.len() > count {
        looks.pop_front();
    }
}

/// What a look shows of the processes for which the share `id` answers. A process that has several shares of the card is
/// shown in the one that paid for its contexts.
#[must_use]
pub fn shown<Id: Ord + Copy>(
    id: Id,
    shares: &[ShareView<Id>],
    processes: &[GpuProcess<Id>],
) -> Vec<Shown> {
    let of = |process: &GpuProcess<Id>| {
        let slots = slots(shares, process);
        let own = |(_, slot): &&(Id, &ProcessUsage)| slot.owner == process.owner;
        let paid = slots
            .iter()
            .filter(own)
            .find(|(_, slot)| slot.driver_bytes > 0);
        let (home, _) = paid.or_else(|| slots.iter().find(own))?;
        if *home != id {
            return None;
        }
        let sum = |figure: fn(&ProcessUsage) -> u64| {
            let own = slots.iter().filter(own).map(|(_, slot)| figure(slot));
            own.fold(0, u64::saturating_add)
        };
        let opened = slots
            .iter()
            .filter(|(_, slot)| slot.owner != process.owner)
            .map(|(_, slot)| slot.exported_bytes)
            .fold(0, u64::saturating_add);
        let charged_bytes = sum(|slot| slot.driver_bytes);
        let asked = |bytes: u64| bytes.saturating_sub(charged_bytes).saturating_add(opened);
        Some(Shown {
            owner: process.owner,
            held_bytes: process.used_bytes?,
            requested_bytes: asked(sum(|slot| slot.used_bytes)),
            most_requested_bytes: asked(sum(|slot| slot.peak_bytes.max(slot.used_bytes))),
            charged_bytes,
        })
    };
    processes.iter().filter_map(of).collect()
}

/// The slots of the shares that the process has of the card.
fn slots<'a, Id: Ord + Copy>(
    shares: &'a [ShareView<Id>],
    process: &GpuProcess<Id>,
) -> Vec<(Id, &'a ProcessUsage)> {
    shares
        .iter()
        .filter(|share| process.shares.contains(&share.id))
        .filter_map(|share| Some((share.id, share.region.as_ref().ok()?)))
        .flat_map(|(id, region)| region.processes.iter().map(move |slot| (id, slot)))
        .collect()
}
