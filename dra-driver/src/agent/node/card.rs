//! A GPU with shares: the policies, and the effects of their decisions.

use std::collections::BTreeMap;
use std::io;

use drava_nvml::GpuUuid;
use drava_vgpu_abi::page;

use super::ShareKey;
use super::region_watch::RegionWatch;
use super::tracked_share::{PriorityRole, TrackedShare};
use super::usage_region::ReadBuffer;
use crate::agent::FindingKind;
use crate::agent::policy::allotment;
use crate::agent::policy::control::{ActivityChange, Controller, Decision, Entitlement, Measured};
use crate::agent::policy::detection::ViolationTracker;
use crate::agent::policy::priority::{PriorityArbiter, ShareState};
use crate::agent::policy::schedule::GpuState;
use crate::agent::policy::token::{Change, TokenCandidate, TokenRing};
use crate::process::Processes;

mod scan;

/// Time for which the token is polled after the last demand for it, µs.
const TOKEN_IN_USE_US: u64 = 4_000_000;

/// Time between two writes that another share has the token, µs; shorter than the time after which libvgpu assumes that
/// the agent has stopped.
const TOKEN_REMINDER_US: u64 = 1_000_000;

/// Ticks without activity after which a GPU is quiet; more than the controller needs to notice.
const QUIET_AFTER_TICKS: u32 = 10;

/// A GPU.
pub struct Card {
    uuid: GpuUuid,
    /// Its shares.
    keys: Vec<ShareKey>,
    controller: Controller<ShareKey>,
    ring: TokenRing<ShareKey>,
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
    /// Last demand for the token.
    token_demand_us: Option<u64>,
    token_reminder_us: u64,
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
}

impl Shares {
    /// Returns no shares.
    #[must_use]
    pub fn new(processes: Processes) -> Self {
        Self {
            tracked: BTreeMap::new(),
            buffer: ReadBuffer::default(),
            watch: RegionWatch::default(),
            processes,
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

    /// Ends the token slice of a share. A time in the past means that another share has the token.
    fn revoke_token(&mut self, key: ShareKey, now_us: u64) {
        self.write(key, |share| share.page.set(&page::token(now_us)));
    }
}

impl Card {
    /// Returns a GPU without shares.
    #[must_use]
    pub fn new(uuid: GpuUuid, now_us: u64) -> Self {
        Self {
            uuid,
            keys: Vec::new(),
            controller: Controller::default(),
            ring: TokenRing::default(),
            arbiter: PriorityArbiter::default(),
            violations: ViolationTracker::default(),
            quiet_ticks: 0,
            is_occupied: true,
            is_lent: false,
            has_roles: false,
            ticked_us: now_us,
            scanned_us: now_us,
            token_demand_us: None,
            token_reminder_us: 0,
        }
    }

    /// Returns the state that decides what is due.
    #[must_use]
    pub fn state(&self) -> GpuState {
        GpuState {
            is_quiet: self.is_quiet(),
            is_occupied: self.is_occupied,
            is_lent: self.is_lent,
            uses_token: self.token_demand_us.is_some(),
            next_priority_poll_us: self.has_roles.then(|| self.arbiter.next_us()),
            scanned_us: self.scanned_us,
        }
    }

    /// Selects its shares, after shares were added or removed.
    pub fn select_shares(&mut self, shares: &Shares) {
        let own = shares.tracked.iter();
        let own = own.filter(|(_, share)| share.card == self.uuid);
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
                    // A share that waits for a token must not also wait for a poll, with or without processes of others.
                    let is_below = |(_, of, occupied): &(_, _, bool)| {
                        *of < *priority && (*occupied || share.uses_token())
                    };
                    PriorityRole {
                        notifies_agent: *is_occupied && metered.iter().any(is_below),
                        yields: metered
                            .iter()
                            .any(|(_, of, occupied)| *of > *priority && *occupied),
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
                weight: match share.uses_token() {
                    true => entitlement.cores.percent(),
                    false => 1,
                },
                busy_until_us: share.busy_until_us(now_us, &mut shares.buffer),
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

    /// Passes the token on, if it is time. Polled after each tick, and while the token is in use or shares have roles.
    pub fn poll_token(&mut self, now_us: u64, has_ticked: bool, shares: &mut Shares) {
        if !(has_ticked || self.token_demand_us.is_some() || self.has_roles) {
            return;
        }
        let mut candidates: Vec<TokenCandidate<ShareKey>> = Vec::new();
        for key in &self.keys {
            if let Some(share) = shares.tracked.get(key).filter(|share| share.uses_token()) {
                let yields = self.arbiter.yields(*key, now_us);
                candidates.push(share.token_candidate(*key, now_us, yields, &mut shares.buffer));
            }
        }
        if candidates.iter().any(|candidate| candidate.wants) {
            self.token_demand_us = Some(now_us);
        }
        let Some(demand_us) = self.token_demand_us else {
            return;
        };
        if now_us.saturating_sub(demand_us) > TOKEN_IN_USE_US {
            // Without further tokens libvgpu meters by the rate.
            self.token_demand_us = None;
            self.token_reminder_us = 0;
            return;
        }
        for change in self.ring.poll(now_us, &candidates) {
            match change {
                Change::Grant(key, slice) => shares.write(key, |share| {
                    let mut writes = page::token_slice(slice).into_iter();
                    writes.try_for_each(|write| share.page.set(&write))
                }),
                Change::Revoke(key) => shares.revoke_token(key, now_us),
            }
        }
        for ended in self.ring.ended() {
            if let Some(share) = shares.tracked.get_mut(&ended.id) {
                let used_us = share.used_in_slice(&mut shares.buffer);
                let of_others_us = self.ring.account_slice(ended, used_us);
                share.totals.deduct(of_others_us);
            }
        }
        if now_us.saturating_sub(self.token_reminder_us) >= TOKEN_REMINDER_US {
            self.token_reminder_us = now_us;
            for key in candidates.iter().map(|candidate| candidate.id) {
                if !self.ring.has_slice(key) {
                    shares.revoke_token(key, now_us);
                }
            }
        }
    }
}
