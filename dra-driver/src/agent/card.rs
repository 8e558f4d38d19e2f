//! A card with shares: one step of its controller, one turn of its token, one look at what NVML says.

use std::collections::BTreeMap;
use std::io;

use drava_api::config::Enforcement;
use drava_nvml::GpuUuid;
use drava_vgpu_abi::ledger::Owner;

use super::arrivals::Arrivals;
use super::control::{Controller, Measured};
use super::detect::{GpuProcess, Judge, Kind, News, Suspicion, look};
use super::observe::{Listed, Observation};
use super::precedence::Precedence;
use super::reserve::shown;
use super::share::Scratch;
use super::tenant::{Key, Tenant};
use super::token::{Change, Contender, Ring};
use crate::process::{self, Processes};

mod lending;
mod ranks;

/// After a share with turns wanted time, all of them go on taking turns for so long, µs.
const TURNS_FOR_US: u64 = 4_000_000;

/// Time between two reminders that somebody else has the token, µs; less than until libvgpu believes that the agent is
/// gone.
const REMIND_US: u64 = 1_000_000;

/// Steps for which a card counts as shared after several shares were active in one.
const SHARED_FOR: u8 = 10;

/// NVML's longest sample period, µs. What is older, nobody asked for.
const LONGEST_SAMPLE_US: u64 = 1_000_000;

/// Steps without any activity after which a card is quiet; more than the controller needs to see it.
const QUIET: u32 = 10;

/// How long a share is followed before its processes are killed for what they did, µs: after a restart of the agent
/// processes may still be registering.
const KILL_GRACE_US: u64 = 10_000_000;

/// What the agent has to tell about a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A breach, or its end.
    News(News),
    /// A kernel that no share of time can be kept with, µs.
    LongKernel(u64),
    /// A process was killed.
    Killed {
        /// On the host.
        pid: u32,
        /// Why.
        why: Kind,
    },
}

/// A card.
pub struct Card {
    uuid: GpuUuid,
    controller: Controller<Key>,
    ring: Ring<Key>,
    precedence: Precedence<Key>,
    judge: Judge<Key>,
    stepped_us: u64,
    /// Its shares.
    keys: Vec<Key>,
    /// Steps in a row in which none of them did anything.
    quiet: u32,
    /// How many metered shares did anything in the last step.
    active: usize,
    /// Steps for which it still counts as shared.
    shared_for: u8,
    /// Whether any of its shares may have processes.
    is_inhabited: bool,
    /// Whether some of them are idle while others use their time, and may want it back at any moment.
    is_lent: bool,
    /// Whether some of them give way to others.
    is_ranked: bool,
    looked_us: u64,
    /// When NVML last said how busy it was.
    seen_us: u64,
    /// The shares of its processes, by PID on the host.
    owners: BTreeMap<u32, Key>,
    /// When a share with turns last wanted time.
    turns_wanted_us: Option<u64>,
    reminded_us: u64,
}

/// The shares of a node, and what is needed to look at them.
pub struct Shares {
    /// By key.
    pub tenants: BTreeMap<Key, Tenant>,
    /// For reading their regions.
    pub scratch: Scratch,
    /// Tells of processes that come to those that have none.
    pub arrivals: Arrivals<Key>,
    /// Describes processes before they are killed.
    pub processes: Processes,
}

impl Shares {
    /// Returns no shares.
    #[must_use]
    pub fn new(processes: Processes) -> Self {
        Self {
            tenants: BTreeMap::new(),
            scratch: Scratch::default(),
            arrivals: Arrivals::default(),
            processes,
        }
    }
}

impl Card {
    /// A card that nobody has looked at yet.
    #[must_use]
    pub fn new(uuid: GpuUuid, now_us: u64) -> Self {
        Self {
            uuid,
            controller: Controller::default(),
            ring: Ring::default(),
            precedence: Precedence::default(),
            judge: Judge::default(),
            stepped_us: now_us,
            keys: Vec::new(),
            quiet: 0,
            active: 0,
            shared_for: 0,
            is_inhabited: true,
            is_lent: false,
            is_ranked: false,
            looked_us: now_us,
            seen_us: now_us,
            owners: BTreeMap::new(),
            turns_wanted_us: None,
            reminded_us: 0,
        }
    }

    /// When it was last looked at, µs.
    #[must_use]
    pub fn looked_us(&self) -> u64 {
        self.looked_us
    }

    /// Whether several shares use it.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared_for > 0
    }

    /// Whether its shares take turns now.
    #[must_use]
    pub fn takes_turns(&self) -> bool {
        self.turns_wanted_us.is_some()
    }

    /// Takes its shares from all of them, after some have come or gone.
    pub fn meet(&mut self, shares: &Shares) {
        let here = shares
            .tenants
            .iter()
            .filter(|(_, tenant)| tenant.card == self.uuid);
        self.keys = here.map(|(key, _)| *key).collect();
        self.quiet = 0;
        self.is_inhabited = true;
    }

    /// Takes note that somebody has come to one of its shares.
    pub fn arrive(&mut self) {
        self.is_inhabited = true;
    }

    /// Whether this step may be left out: nothing has happened for long, and it is every second one or nobody is there
    /// who could do anything. A share that begins on a card like this needs nobody: its page already lets it have what
    /// nobody uses.
    #[must_use]
    pub fn may_rest(&self, is_odd_step: bool) -> bool {
        self.is_quiet() && (is_odd_step || !self.is_inhabited)
    }

    /// Whether nothing has happened for so long that all that can be said has been said.
    fn is_quiet(&self) -> bool {
        self.quiet > QUIET
    }

    /// Measures the shares and sets their rates.
    pub fn step(&mut self, now_us: u64, shares: &mut Shares) -> Vec<(Key, What)> {
        let Shares {
            tenants, scratch, ..
        } = shares;
        let elapsed_us = now_us.saturating_sub(self.stepped_us);
        self.stepped_us = now_us;
        let mut told = Vec::new();
        let mut metered = Vec::new();
        for key in self.keys.iter().copied() {
            let Some(tenant) = tenants.get_mut(&key) else {
                continue;
            };
            let activity = tenant.measure(now_us, scratch);
            told.extend(
                activity
                    .long_kernel_us
                    .map(|us| (key, What::LongKernel(us))),
            );
            if let Some(terms) = tenant.terms() {
                metered.push((key, terms, activity.measured));
            }
        }
        let is_active = |measured: &Measured| measured.waited || measured.used_us > 0;
        self.active = metered
            .iter()
            .filter(|(_, _, measured)| is_active(measured))
            .count();
        self.shared_for = match self.active {
            2.. => SHARED_FOR,
            0 | 1 => self.shared_for.saturating_sub(1),
        };
        self.quiet = if self.active > 0 {
            0
        } else {
            self.quiet.saturating_add(1)
        };
        if self.is_quiet() {
            return told;
        }
        let decisions = self.controller.step(elapsed_us, &metered);
        self.apply(now_us, &decisions, tenants);
        told
    }

    /// Hands the token on if it is time.
    pub fn turn(&mut self, now_us: u64, shares: &mut Shares) {
        let Shares {
            tenants, scratch, ..
        } = shares;
        let taking: Vec<Key> = self
            .keys
            .iter()
            .copied()
            .filter(|key| tenants.get(key).is_some_and(Tenant::takes_turns))
            .collect();
        let contenders: Vec<Contender<Key>> = taking
            .iter()
            .filter_map(|key| {
                let gives_way = self.precedence.gives_way(*key, now_us);
                let tenant = tenants.get(key)?;
                Some(tenant.contender(*key, now_us, gives_way, scratch))
            })
            .collect();
        if contenders.iter().any(|contender| contender.wants) {
            self.turns_wanted_us = Some(now_us);
        }
        let Some(wanted_us) = self.turns_wanted_us else {
            return;
        };
        if now_us.saturating_sub(wanted_us) > TURNS_FOR_US {
            // libvgpu sees that nobody gives tokens any more and goes by the rate.
            self.turns_wanted_us = None;
            self.reminded_us = 0;
            return;
        }
        for change in self.ring.look(now_us, &contenders) {
            let (Change::Grant(key, _) | Change::Revoke(key)) = change;
            let Some(tenant) = tenants.get_mut(&key) else {
                continue;
            };
            let written = match change {
                Change::Grant(_, turn) => tenant.set_turn(turn),
                Change::Revoke(_) => tenant.end_turn(now_us),
            };
            complain(written, tenant);
        }
        for ended in self.ring.ended() {
            if let Some(tenant) = tenants.get_mut(&ended.id) {
                let used_us = tenant.used_in_turns(scratch);
                self.ring.settle(ended, used_us);
            }
        }
        if now_us.saturating_sub(self.reminded_us) >= REMIND_US {
            self.reminded_us = now_us;
            for key in taking.into_iter().filter(|key| !self.ring.has_turn(*key)) {
                if let Some(tenant) = tenants.get_mut(&key) {
                    complain(tenant.end_turn(now_us), tenant);
                }
            }
        }
    }

    /// Compares the shares with what NVML says; without an observation only the regions are looked at. `estimate_bytes`
    /// is what the driver takes in a context of the card, where that is known.
    pub fn look(
        &mut self,
        now_us: u64,
        observation: Option<&Observation>,
        estimate_bytes: Option<u64>,
        shares: &mut Shares,
    ) -> Vec<(Key, What)> {
        self.looked_us = now_us;
        let keys = self.keys.clone();
        let Shares {
            tenants, scratch, ..
        } = shares;
        let listed = observation.and_then(|observation| observation.processes.as_deref());
        let processes: Option<Vec<GpuProcess<Key>>> = listed.map(|listed| {
            let of_listed = |listed| gpu_process(listed, &keys, tenants);
            listed.iter().map(of_listed).collect()
        });
        let mut views = Vec::new();
        for key in &keys {
            let uses_card = |process: &GpuProcess<Key>| process.shares.contains(key);
            let is_used = processes
                .as_deref()
                .is_some_and(|p| p.iter().any(uses_card));
            if let Some(tenant) = tenants.get_mut(key)
                && (tenant.is_due() || is_used)
            {
                views.push(tenant.view(*key, scratch));
            }
        }
        let suspicions = look(&views, processes.as_deref().unwrap_or_default());
        let mut told = Vec::new();
        let news = self.judge.hear(&keys, suspicions.clone());
        told.extend(news.into_iter().map(|(key, news)| (key, What::News(news))));
        let owners = processes.iter().flatten();
        let owners = owners.map(|process| (process.pid, process.owner)).collect();
        told.extend(self.enforce(now_us, &suspicions, &owners, shares));
        for view in &views {
            let Some(tenant) = shares.tenants.get_mut(&view.id) else {
                continue;
            };
            tenant.account(view, processes.as_deref(), &suspicions);
            tenant.settle(
                view.id,
                now_us,
                view,
                processes.as_deref(),
                &mut shares.arrivals,
            );
            let Some(processes) = &processes else {
                continue;
            };
            let shown = shown(view.id, &views, processes);
            complain(tenant.correct(estimate_bytes, &shown), tenant);
            if tenant.takes_turns() {
                let own = processes
                    .iter()
                    .filter(|process| process.shares.contains(&view.id));
                tenant.follow(
                    own.filter_map(|process| process::open(process.pid))
                        .collect(),
                );
            }
        }
        let is_here = |key: &Key| shares.tenants.get(key).is_some_and(Tenant::is_here);
        self.is_inhabited = keys.iter().any(is_here);
        if let Some(processes) = &processes {
            let owner = |process: &GpuProcess<Key>| Some((process.pid, *process.shares.first()?));
            self.owners = processes.iter().filter_map(owner).collect();
        }
        told
    }

    /// Takes how busy each process was, per mille by PID.
    pub fn see(&mut self, now_us: u64, per_mille: &BTreeMap<u32, u32>) {
        let elapsed_us = now_us.saturating_sub(self.seen_us).min(LONGEST_SAMPLE_US);
        self.seen_us = now_us;
        let seen = |key: &Key| {
            let own = self.owners.iter().filter(|(_, owner)| *owner == key);
            let busy: u64 = own
                .filter_map(|(pid, _)| per_mille.get(pid))
                .map(|busy| u64::from(*busy))
                .sum();
            (*key, elapsed_us * busy.min(1000) / 1000)
        };
        let seen: Vec<(Key, u64)> = self.keys.iter().map(seen).collect();
        let busy: u64 = per_mille.values().map(|busy| u64::from(*busy)).sum();
        self.controller
            .observe(elapsed_us, elapsed_us * busy.min(1000) / 1000, &seen);
    }

    fn enforce(
        &self,
        now_us: u64,
        suspicions: &[(Key, Suspicion)],
        owners: &BTreeMap<u32, Owner>,
        shares: &mut Shares,
    ) -> Vec<(Key, What)> {
        let Shares {
            tenants, processes, ..
        } = shares;
        let mut told = Vec::new();
        for (key, suspicion) in suspicions {
            let Some(tenant) = tenants.get(key) else {
                continue;
            };
            let is_due = now_us.saturating_sub(tenant.since_us) >= KILL_GRACE_US;
            if tenant.enforcement != Enforcement::Required
                || !is_due
                || !self.judge.is_confirmed(*key, suspicion.kind())
            {
                continue;
            }
            let pids: &[u32] = match suspicion {
                Suspicion::OverLimit { pids, .. } => pids,
                Suspicion::NotCounted { pid, .. } => std::slice::from_ref(pid),
                // libvgpu refuses everything by itself where the region is damaged.
                Suspicion::Region(_) => &[],
            };
            for pid in pids {
                // NVML listed it a moment ago; by now another process may have the PID.
                let is_killed = processes.kill(*pid, |described| {
                    owners.get(pid) == Some(&described.owner)
                        && described.shares.iter().any(|mounted| tenant.is(mounted))
                });
                if is_killed {
                    told.push((
                        *key,
                        What::Killed {
                            pid: *pid,
                            why: suspicion.kind(),
                        },
                    ));
                }
            }
        }
        told
    }
}

fn gpu_process(listed: &Listed, keys: &[Key], tenants: &BTreeMap<Key, Tenant>) -> GpuProcess<Key> {
    let has = |key: &&Key| {
        tenants.get(key).is_some_and(|tenant| {
            listed
                .described
                .shares
                .iter()
                .any(|mounted| tenant.is(mounted))
        })
    };
    GpuProcess {
        pid: listed.pid,
        name: listed.described.name.clone(),
        owner: listed.described.owner,
        used_bytes: listed.used_bytes,
        shares: keys.iter().filter(has).copied().collect(),
    }
}

/// A page that cannot be written keeps what it said.
fn complain(written: io::Result<()>, tenant: &Tenant) {
    if let Err(error) = written {
        tracing::warn!(claim = %tenant.claim, share = %tenant.share, %error, "cannot write the limits page");
    }
}
