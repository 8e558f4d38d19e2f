//! A GPU with shares: the policies, and the effects of their decisions.

use std::collections::BTreeMap;
use std::io;

use drava_nvml::GpuUuid;
use drava_vgpu_abi::page;

use super::ShareKey;
use super::region_watch::RegionWatch;
use super::tracked_share::{PriorityRole, TrackedShare};
use super::usage_region::ReadBuffer;
use crate::agent::policy::allotment;
use crate::agent::policy::control::{ActivityChange, Controller, Decision, Entitlement, Measured};
use crate::agent::policy::detection::ViolationTracker;
use crate::agent::policy::priority::{PriorityArbiter, ShareState};
use crate::agent::policy::schedule::GpuState;
use crate::agent::{FindingKind, Terminate};
use crate::node::claim::ClaimRef;
use crate::node::process::Processes;

pub mod burst;
mod scan;

/// Ticks without activity after which a GPU is quiet; more than the controller needs to notice.
const QUIET_AFTER_TICKS: u32 = 10;

/// A GPU.
pub struct Gpu {
    uuid: GpuUuid,
    /// Its shares.
    keys: Vec<ShareKey>,
    controller: Controller<ShareKey>,
    arbiter: PriorityArbiter<ShareKey>,
    violations: ViolationTracker<ShareKey>,
    /// Successive ticks without activity.
    quiet_ticks: u32,
    /// Whether any share may have processes.
    is_occupied: bool,
    /// Whether lent shares may resume, or resumed shares may go idle, at any time.
    is_lent: bool,
    /// Whether some shares yield to others.
    has_roles: bool,
    ticked_us: u64,
    scanned_us: u64,
    /// When NVML last listed the memory of all processes, µs; 0 is never.
    observed_us: u64,
    /// The claim for which lent memory is taken back.
    waiting: Option<ClaimRef>,
}

/// The shares of a node, and what reads them.
pub struct Shares {
    /// By key.
    pub tracked: BTreeMap<ShareKey, TrackedShare>,
    /// Buffer for usage regions.
    pub buffer: ReadBuffer,
    /// Events on usage regions.
    pub watch: RegionWatch,
    /// Describes processes before they are killed.
    pub processes: Processes,
    /// See [`Config::terminate`](crate::agent::Config::terminate).
    pub terminate: Terminate,
}

impl Shares {
    /// Returns no shares.
    #[must_use]
    pub fn new(processes: Processes, terminate: Terminate) -> Self {
        Self {
            tracked: BTreeMap::new(),
            buffer: ReadBuffer::default(),
            watch: RegionWatch::default(),
            processes,
            terminate,
        }
    }

    /// Writes the capacity that the records give the shares to their pages.
    pub fn follow_records(&mut self) {
        for share in self.tracked.values_mut() {
            if let Err(error) = share.follow_record(&mut self.buffer) {
                tracing::warn!(claim = %share.claim, share = %share.share, %error, "cannot write the limits page");
            }
        }
    }

    /// Writes to the page of a share. A page that cannot be written keeps its content.
    fn write(&mut self, key: ShareKey, write: impl FnOnce(&mut TrackedShare) -> io::Result<()>) {
        if let Some(share) = self.tracked.get_mut(&key)
            && let Err(error) = write(share)
        {
            tracing::warn!(claim = %share.claim, share = %share.share, %error, "cannot write the limits page");
        }
    }
}

impl Gpu {
    /// Returns a GPU without shares.
    #[must_use]
    pub fn new(uuid: GpuUuid, now_us: u64) -> Self {
        Self {
            uuid,
            keys: Vec::new(),
            controller: Controller::default(),
            arbiter: PriorityArbiter::default(),
            violations: ViolationTracker::default(),
            quiet_ticks: 0,
            is_occupied: true,
            is_lent: false,
            has_roles: false,
            ticked_us: now_us,
            scanned_us: now_us,
            observed_us: 0,
            waiting: None,
        }
    }

    /// Returns the state that decides what is due.
    #[must_use]
    pub fn state(&self) -> GpuState {
        GpuState {
            is_quiet: self.is_quiet(),
            is_occupied: self.is_occupied,
            is_lent: self.is_lent,
            next_priority_poll_us: self.has_roles.then(|| self.arbiter.next_us()),
            scanned_us: self.scanned_us,
        }
    }

    /// Selects its shares, after shares were added or removed.
    pub fn select_shares(&mut self, shares: &Shares) {
        let own = shares.tracked.iter();
        let own = own.filter(|(_, share)| share.gpu == self.uuid);
        self.keys = own.map(|(key, _)| *key).collect();
        self.quiet_ticks = 0;
        self.is_occupied = true;
    }

    /// Applies the start of a process of one of its shares.
    pub fn mark_occupied(&mut self) {
        self.is_occupied = true;
    }

    fn is_quiet(&self) -> bool {
        self.quiet_ticks > QUIET_AFTER_TICKS
    }

    /// Assigns priority roles, measures the shares and sets their rates. Returns long kernels.
    pub fn tick(&mut self, now_us: u64, shares: &mut Shares) -> Vec<(ShareKey, FindingKind)> {
        self.assign_roles(shares);
        let elapsed_us = now_us.saturating_sub(std::mem::replace(&mut self.ticked_us, now_us));
        let (mut found, mut metered) = (Vec::new(), Vec::new());
        for key in &self.keys {
            let Some(share) = shares.tracked.get_mut(key) else {
                continue;
            };
            let activity = share.measure(now_us, &mut shares.buffer);
            let long_kernel = activity.long_kernel_us.map(FindingKind::LongKernel);
            found.extend(long_kernel.map(|kind| (*key, kind)));
            let entitlement = share.entitlement();
            metered.extend(entitlement.map(|entitlement| (*key, entitlement, activity.measured)));
        }
        let is_active = |measured: &Measured| measured.has_waited || measured.used_us > 0;
        let active = metered
            .iter()
            .filter(|(_, _, measured)| is_active(measured));
        let active = active.count();
        self.quiet_ticks = match active {
            0 => self.quiet_ticks.saturating_add(1),
            1.. => 0,
        };
        if !self.is_quiet() {
            let decisions = self.controller.tick(elapsed_us, &metered);
            self.apply(now_us, &decisions, shares);
        }
        found
    }

    /// Reclaims the lent time of shares that have resumed, and lends the time of resumed shares that have gone idle again.
    /// The other shares are not measured: just after a change their use is not typical.
    pub fn reclaim_lent_time(&mut self, now_us: u64, shares: &mut Shares) {
        if !self.is_lent {
            return;
        }
        let mut changed: Vec<(ShareKey, ActivityChange)> = Vec::new();
        for key in &self.keys {
            let share = shares.tracked.get_mut(key);
            let change = share.and_then(|share| share.poll_activity(now_us, &mut shares.buffer));
            changed.extend(change.map(|change| (*key, change)));
        }
        if changed.is_empty() {
            return;
        }
        let metered: Vec<(ShareKey, Entitlement)> = self
            .keys
            .iter()
            .filter_map(|key| Some((*key, shares.tracked.get(key)?.entitlement()?)))
            .collect();
        let decisions = self.controller.on_activity_change(&metered, &changed);
        self.quiet_ticks = 0;
        self.apply(now_us, &decisions, shares);
    }

    fn apply(&mut self, now_us: u64, decisions: &[(ShareKey, Decision)], shares: &mut Shares) {
        for (key, decision) in decisions {
            shares.write(*key, |share| share.apply(*decision));
        }
        let mut decided = decisions.iter();
        self.is_lent = decided.any(|(key, _)| {
            let share = shares.tracked.get(key);
            share.is_some_and(|share| share.is_polled(now_us))
        });
    }

    /// Assigns the roles of the shares by their priorities.
    fn assign_roles(&mut self, shares: &mut Shares) {
        let metered: Vec<_> = self
            .keys
            .iter()
            .filter_map(|key| {
                let share = shares.tracked.get(key)?;
                Some((*key, share.entitlement()?.priority, share.is_occupied()))
            })
            .collect();
        self.has_roles = false;
        for key in &self.keys {
            let own = metered.iter().find(|(of, ..)| of == key);
            shares.write(*key, |share| {
                let role = own.map_or(PriorityRole::default(), |(_, priority, is_occupied)| {
                    let mut others = metered.iter().filter(|(.., occupied)| *occupied);
                    PriorityRole {
                        notifies_agent: *is_occupied
                            && others.clone().any(|(_, of, _)| of < priority),
                        yields: others.any(|(_, of, _)| of > priority),
                    }
                });
                self.has_roles |= role.notifies_agent;
                share.set_role(role)
            });
        }
    }

    /// Makes shares yield while a share of higher priority works.
    pub fn poll_priorities(&mut self, now_us: u64, shares: &mut Shares) {
        if !self.has_roles {
            return;
        }
        let mut states = Vec::new();
        for key in &self.keys {
            let Some(share) = shares.tracked.get(key).filter(|share| share.is_occupied()) else {
                continue;
            };
            let Some(entitlement) = share.entitlement() else {
                continue;
            };
            states.push(ShareState {
                id: *key,
                priority: entitlement.priority,
                guarantee: allotment::guarantee(entitlement.cores),
                busy_until_us: share.busy_until_us(&mut shares.buffer),
            });
        }
        let best_effort = states.iter().filter(|state| state.guarantee == 0);
        let floor = allotment::floor(best_effort.count());
        for state in &mut states {
            state.guarantee = state.guarantee.max(floor);
        }
        for (key, until_us) in self.arbiter.poll(now_us, &states) {
            shares.write(key, |share| match share.role.yields {
                true => share.page.set(&page::yield_until(until_us)),
                false => Ok(()),
            });
        }
    }
}
