//! Memory beyond the guarantees: writes what [`policy::burst`](crate::agent::policy::burst) decides, and ends processes that do not
//! give memory back.

use std::collections::BTreeSet;

use super::{Gpu, Shares};
use crate::agent::FindingKind;
use crate::agent::node::ShareKey;
use crate::agent::node::nvml_observer::Observation;
use crate::agent::node::tracked_share::{Reclaim, TrackedShare};
use crate::agent::policy::burst::{Division, ShareMemory, divide};
use crate::agent::policy::detection::{GpuProcess, ShareView, SuspectedViolation, detect};
use crate::node::claim::ClaimRef;

/// Time for the programs of a share to give memory back before they are killed, µs.
const GRACE_US: u64 = 400_000;

/// Age of NVML's list of processes at which nothing is lent: what is lent could not be taken back safely, µs.
const OBSERVATION_AGE_US: u64 = 5_000_000;

/// Outcome of a division of a GPU's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Divided {
    /// NVML's list of processes is needed now.
    pub needs_observation: bool,
    /// Shares that have waited too long for what they lent, since the last division.
    pub missed: u64,
}

/// A share of a GPU by its record, without a limits page that the agent follows.
#[derive(Debug, Clone)]
pub struct UnopenedShare {
    /// The claim.
    pub claim: ClaimRef,
    /// Its memory.
    pub memory: ShareMemory<Option<ShareKey>>,
    /// Whether it may use more than its guarantee.
    pub is_lent: bool,
}

/// Memory of a GPU, as far as it is known.
#[derive(Debug, Clone, Default)]
pub struct GpuMemory {
    /// What its shares can get together, bytes; `None` if that is unknown, or limits do not hold on the GPU.
    pub allocatable_bytes: Option<u64>,
    /// Shares that are recorded and not followed.
    pub unopened: Vec<UnopenedShare>,
    /// Whether claims hold unknown amounts of it.
    pub has_unknown: bool,
}

impl Gpu {
    /// Returns whether some of its shares may use more than their guarantee.
    #[must_use]
    pub fn can_burst(&self, unopened: &[UnopenedShare], shares: &Shares) -> bool {
        let mut own = self.keys.iter().filter_map(|key| shares.tracked.get(key));
        own.any(TrackedShare::can_burst) || unopened.iter().any(|share| share.is_lent)
    }

    /// Divides its memory among the shares that can burst, and takes back what others are guaranteed.
    pub fn divide_memory(
        &mut self,
        now_us: u64,
        memory: &GpuMemory,
        shares: &mut Shares,
    ) -> Divided {
        if !self.can_burst(&memory.unopened, shares) {
            self.waiting = None;
            for key in &self.keys {
                if let Some(share) = shares.tracked.get_mut(key) {
                    // A page without memory was created beside shares that can burst. They may be those whose records are unknown.
                    let is_empty = share.memory(*key).present_bytes == 0;
                    share.is_backed = !(is_empty && memory.has_unknown);
                }
                // What was lent is back. A share whose record is unknown may use it still.
                let lends = |share: &TrackedShare| share.page.limits().lent_bytes > 0;
                if shares.tracked.get(key).is_some_and(lends) && !memory.has_unknown {
                    shares.write(*key, |share| share.set_lent(now_us, 0));
                }
            }
            return Divided::default();
        }
        let mut all: Vec<ShareMemory<Option<ShareKey>>> = self
            .keys
            .iter()
            .filter_map(|key| Some(shares.tracked.get(key)?.memory(*key)))
            .chain(memory.unopened.iter().map(|share| share.memory))
            .collect();
        self.add_loans(now_us, &mut all, shares);
        let allocatable_bytes = memory.allocatable_bytes.filter(|_| !memory.has_unknown);
        let mut division = self.division(allocatable_bytes.unwrap_or(0), &mut all, shares);
        if allocatable_bytes.is_none() {
            // What is lent stays, and nothing is lent.
            let is_lent = |id: Option<ShareKey>| {
                let mut all = all.iter();
                all.any(|share| share.id == id && share.present_bytes > share.held_bytes)
            };
            division.limits.retain(|(id, _)| !is_lent(*id));
            division.reclaimed.clear();
        }
        if memory.has_unknown {
            division.unbacked = all.iter().map(|share| share.id).collect();
        }
        let is_observed = now_us.saturating_sub(self.observed_us) < OBSERVATION_AGE_US;
        for &(id, limit) in &division.limits {
            let Some((key, share)) = id.zip(all.iter().find(|share| share.id == id)) else {
                continue;
            };
            let present = share.present_bytes;
            let guaranteed = match division.unbacked.contains(&id) {
                true => present,
                false => present.max(share.kept_bytes),
            };
            // What is lent must be possible to take back.
            let limit = match allocatable_bytes.is_some() && is_observed {
                true => limit,
                false => limit.min(guaranteed),
            };
            if share.limit_bytes.is_some() && limit != present {
                shares.write(key, |share| share.set_memory_limit(now_us, limit));
            }
        }
        for &(id, lent_bytes) in &division.loans {
            let share = all.iter().find(|share| share.id == id);
            let Some((key, share)) = id.zip(share) else {
                continue;
            };
            let before = share.loan.lent_bytes;
            // Nothing more is lent that could not be taken back, and nothing is given back that may be in use.
            let lent_bytes = match (allocatable_bytes.is_some(), is_observed) {
                (true, true) => lent_bytes,
                (true, false) => lent_bytes.min(before),
                (false, _) => before,
            };
            if lent_bytes != before {
                shares.write(key, |share| share.set_lent(now_us, lent_bytes));
            }
        }
        let waiting = self.waiting_claim(&division, memory, shares);
        self.waiting = waiting.filter(|_| allocatable_bytes.is_some());
        for key in &self.keys {
            let Some(share) = shares.tracked.get_mut(key) else {
                continue;
            };
            share.is_backed = !division.unbacked.contains(&Some(*key));
            if self.waiting.is_none() {
                share.reclaim = None;
            }
            let is_new = division.reclaimed.contains(&Some(*key)) && share.reclaim.is_none();
            if let Some(claim) = self.waiting.clone().filter(|_| is_new) {
                tracing::info!(share = %share.claim_ref, %claim, "taking back memory that was lent");
                let since_us = now_us;
                share.reclaim = Some(Reclaim {
                    since_us,
                    claim,
                    killed_us: None,
                });
            }
        }
        let mut divided = Divided::default();
        for key in &self.keys {
            if let Some(share) = shares.tracked.get_mut(key) {
                divided.needs_observation |= share.is_giving_back();
                divided.missed += u64::from(share.is_newly_missed(now_us));
            }
        }
        divided
    }

    /// Adds what shares lend, and what they could lend if others may use it.
    fn add_loans(
        &self,
        now_us: u64,
        all: &mut [ShareMemory<Option<ShareKey>>],
        shares: &mut Shares,
    ) {
        let mut own = self.keys.iter().filter_map(|key| shares.tracked.get(key));
        let is_borrowed = own.any(TrackedShare::bursts_idle);
        for memory in all {
            let share = memory.id.and_then(|key| shares.tracked.get_mut(&key));
            if let Some(share) = share.filter(|_| is_borrowed || memory.loan.lent_bytes > 0) {
                memory.loan = share.loan(now_us, &mut shares.buffer);
            }
        }
    }

    /// Divides what is known. The use of shares is read only if something changes.
    fn division(
        &self,
        allocatable_bytes: u64,
        all: &mut [ShareMemory<Option<ShareKey>>],
        shares: &mut Shares,
    ) -> Division<Option<ShareKey>> {
        for share in &mut *all {
            share.used_bytes = Some(0);
        }
        let unused = divide(allocatable_bytes, all);
        let is_present = |(id, limit): &(Option<ShareKey>, u64)| {
            let mut all = all.iter();
            all.any(|share| share.id == *id && share.present_bytes == *limit)
        };
        let is_lent = |(id, lent_bytes): &(Option<ShareKey>, u64)| {
            let mut all = all.iter();
            all.any(|share| share.id == *id && share.loan.lent_bytes == *lent_bytes)
        };
        let is_same = unused.limits.iter().all(is_present) && unused.loans.iter().all(is_lent);
        if unused.unbacked.is_empty() && is_same {
            return unused;
        }
        for share in &mut *all {
            let tracked = share.id.and_then(|key| shares.tracked.get_mut(&key));
            share.used_bytes = match share.limit_bytes {
                Some(_) => tracked.and_then(|tracked| tracked.live_use(&mut shares.buffer)),
                None => None,
            }
            .map(|live| live.bytes);
        }
        divide(allocatable_bytes, all)
    }

    /// Returns a claim that waits for memory that it is guaranteed.
    fn waiting_claim(
        &self,
        division: &Division<Option<ShareKey>>,
        memory: &GpuMemory,
        shares: &Shares,
    ) -> Option<ClaimRef> {
        let is_unbacked = |key: &&ShareKey| division.unbacked.contains(&Some(**key));
        let tracked = self.keys.iter().filter(is_unbacked).find_map(|key| {
            let share = shares.tracked.get(key)?;
            let is_waiting = share.memory(*key).is_waiting();
            is_waiting.then(|| share.claim_ref.clone())
        });
        let unopened = memory.unopened.iter();
        let mut unopened = unopened.filter(|share| {
            share.memory.is_waiting() && division.unbacked.contains(&share.memory.id)
        });
        tracked.or_else(|| Some(unopened.next()?.claim.clone()))
    }

    /// Compares the use of shares that give memory back with NVML's list of processes: applies what is back, and kills the processes
    /// of shares that do not give it back.
    pub fn settle_memory(
        &mut self,
        now_us: u64,
        observation: &Observation,
        estimate_bytes: Option<u64>,
        shares: &mut Shares,
    ) -> Vec<(ShareKey, FindingKind)> {
        let Some(observed) = &observation.processes else {
            return Vec::new();
        };
        if observed.iter().any(|process| process.used_bytes.is_none()) {
            return Vec::new();
        }
        self.observed_us = observation.requested_us;
        let processes: Vec<GpuProcess<ShareKey>> = observed
            .iter()
            .map(|observed| self.gpu_process(observed, &shares.tracked))
            .collect();
        for key in &self.keys {
            let own = processes.iter();
            let own = own.filter(|process| process.shares.contains(key));
            let used_bytes = own.filter_map(|process| process.used_bytes);
            if let Some(share) = shares.tracked.get_mut(key) {
                share.set_observed_use(used_bytes.fold(0, u64::saturating_add));
            }
        }
        let is_giving_back = |key: &ShareKey| {
            let share = shares.tracked.get(key);
            share.is_some_and(TrackedShare::is_giving_back)
        };
        let giving: Vec<ShareKey> = self.keys.iter().copied().filter(is_giving_back).collect();
        if giving.is_empty() {
            return Vec::new();
        }
        let over = self.over_page(estimate_bytes, &processes, shares);
        let mut found = Vec::new();
        for key in giving {
            let own: Vec<&GpuProcess<ShareKey>> = processes
                .iter()
                .filter(|process| process.shares.contains(&key))
                .collect();
            let Some(share) = shares.tracked.get_mut(&key) else {
                continue;
            };
            let limit_bytes = share.usable_bytes();
            let live = share.live_use(&mut shares.buffer);
            let exceeds = |bytes: u64| limit_bytes.is_some_and(|limit| bytes > limit);
            let is_within = live.as_ref().is_some_and(|live| !exceeds(live.bytes));
            let is_over = own.iter().any(|process| over.contains(&process.pid));
            let is_ending = observation.ending.iter().any(|ending| share.is(ending));
            let is_known = observation.is_complete && !is_ending;
            // Memory that an ended process has exported is free when no other one can have it open.
            let is_unused = is_known
                && own.is_empty()
                && live.as_ref().is_some_and(|live| live.locked.is_empty());
            if is_unused || (is_within && !is_over) {
                if is_known {
                    share.confirm_return(observation.requested_us);
                }
                continue;
            }
            // What it uses is its own: a share that lends gets all of its guarantee back.
            if !share.can_burst() {
                continue;
            }
            // Its region shows less than NVML: what it uses more is taken back, too.
            if share.reclaim.is_none() && is_over {
                let waiting = self.waiting.clone();
                share.reclaim = waiting.map(|claim| Reclaim {
                    since_us: now_us,
                    claim,
                    killed_us: None,
                });
            }
            let Some(reclaim) = share.reclaim.clone() else {
                continue;
            };
            let last_us = reclaim.killed_us.unwrap_or(reclaim.since_us);
            if last_us.saturating_add(GRACE_US) > observation.requested_us.min(now_us) {
                continue;
            }
            let live = live.unwrap_or_default();
            let charged = live.locked.iter().map(|(_, bytes)| *bytes);
            let is_charged = exceeds(charged.fold(0, u64::saturating_add));
            let holds_excess = |process: &&&GpuProcess<ShareKey>| {
                let mut locked = live.locked.iter();
                let has_slot = locked.any(|(owner, bytes)| *owner == process.owner && *bytes > 0);
                (is_charged && has_slot) || over.contains(&process.pid)
            };
            let pids = match reclaim.killed_us {
                None => {
                    let holders = own.iter().filter(holds_excess);
                    Some(holders.map(|process| process.pid).collect())
                }
                // Processes that NVML does not list may keep the memory, such as a child with the open files of a killed one.
                Some(_) => shares.processes.with_share(&share.mounted()),
            };
            if let Some(reclaim) = &mut share.reclaim {
                reclaim.killed_us = Some(now_us);
            }
            // Without processes no memory is in use. The region may be forged.
            if reclaim.killed_us.is_some()
                && is_known
                && own.is_empty()
                && pids.as_ref().is_some_and(Vec::is_empty)
            {
                share.confirm_return(observation.requested_us);
            }
            for pid in pids.into_iter().flatten() {
                // Another process may have the PID by now.
                let is_killed = shares.processes.kill(pid, |described| {
                    let mut listed = own.iter().filter(|process| process.pid == pid);
                    listed.all(|process| process.owner == described.owner)
                        && described.shares.iter().any(|mounted| share.is(mounted))
                });
                if is_killed {
                    let claim = reclaim.claim.clone();
                    found.push((key, FindingKind::Reclaimed { pid, claim }));
                }
            }
        }
        found
    }

    /// Returns the PIDs of the processes of shares that use more than the limit of their page, by NVML, with the tolerance of
    /// [`detect`].
    fn over_page(
        &self,
        estimate_bytes: Option<u64>,
        processes: &[GpuProcess<ShareKey>],
        shares: &mut Shares,
    ) -> BTreeSet<u32> {
        let mut views: Vec<ShareView<ShareKey>> = Vec::new();
        for key in &self.keys {
            if let Some(share) = shares.tracked.get_mut(key) {
                let limit_bytes = share.usable_bytes();
                let view = share.view(*key, estimate_bytes, &mut shares.buffer);
                views.push(ShareView {
                    limit_bytes,
                    ..view
                });
            }
        }
        let suspected = detect(self.uuid.as_str(), &views, processes);
        let over = suspected
            .into_iter()
            .filter_map(|(_, violation)| match violation {
                SuspectedViolation::OverLimit { pids, .. } => Some(pids),
                SuspectedViolation::NotCounted { .. }
                | SuspectedViolation::Region(_)
                | SuspectedViolation::OtherGpu { .. } => None,
            });
        over.flatten().collect()
    }
}
