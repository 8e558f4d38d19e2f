//! The node agent: what libvgpu cannot do from inside the containers.
//!
//! | Question | Module |
//! |---|---|
//! | Who may use how much of a card's time? | [`allot`], [`control`] (pure) |
//! | How much of what events measure is a share's own? | [`contention`] (pure) |
//! | Who has the token? | [`token`] (pure) |
//! | Who gives way to whom? | [`precedence`] (pure) |
//! | Who has just begun to use a card? | [`calls`] |
//! | Does somebody escape or exceed a limit? | [`detect`] (pure) |
//! | Which container does a process belong to? | [`crate::process`] |
//! | What does NVML say? | [`observe`] |
//! | What does the driver take by itself? | [`reserve`] (pure) |
//! | What do the files of a share say, and how are they changed? | [`share`], [`tenant`], [`progress`] |
//! | Has a process come to a share that had none? | [`arrivals`] |
//! | What do the metrics of a share say? | [`share_metrics`] (pure) |
//! | Who does all this when? | [`card`], and the thread here |
//! | Who is told? | [`tell`] |
//!
//! Invariants:
//! - It reaches containers only by the files that they have anyway: the limits page, which it writes in place, and the
//!   usage region, which it reads. There is no socket.
//! - It is not needed: without it limits stay as they are, with the last rate; a restart kills nobody.
//! - Nothing that a tenant writes gives the tenant more than its page says, or keeps the agent from others.
//! - The thread makes no call that a card can hold up: NVML is asked by a thread for each card.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, SystemTime};

use drava_nvml::GpuUuid;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::time::{ClockId, clock_gettime};
use share_metrics::ShareMetrics;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::claim::{ClaimUid, ShareId};
use crate::layout::Layout;
use crate::prepare::Prepared;
use crate::prepare::record::{Loaded, RecordStore};
use crate::process::Processes;

pub mod allot;
pub mod arrivals;
pub mod calls;
pub mod card;
pub mod contention;
pub mod control;
pub mod detect;
pub mod observe;
pub mod precedence;
pub mod progress;
pub mod reserve;
pub mod share;
pub mod share_metrics;
pub mod tell;
pub mod tenant;
pub mod token;

use crate::inventory::OpenLibrary;
use calls::Calls;
use card::{Card, Shares, What};
use observe::{Attention, Busy, Observation, Observer, Outbox, Seen};
use tenant::{Key, Tenant};

/// Time between two steps of the controllers.
const STEP_US: u64 = 100_000;

/// Time between two looks whether an idle share, whose time others use, wants it back.
const WAKE_US: u64 = 20_000;

/// Time between two looks at the token of a card.
const TURN_US: u64 = 5_000;

/// Cards of which NVML says nothing for so long are looked at without it.
const BLIND_US: u64 = 2_000_000;

/// Claims are read again after so long even if nothing has changed.
const REFRESH_US: u64 = 30_000_000;

/// Time between two publications of metrics.
const METRICS_US: u64 = 1_000_000;

/// Time between two attempts to open a share: its record precedes its limits page by some milliseconds.
const RETRY_US: u64 = 200_000;

/// What the agent needs.
#[derive(Clone)]
pub struct Config {
    /// Where claims and their files are.
    pub layout: Layout,
    /// `/proc` of the node.
    pub proc_root: PathBuf,
    /// Opens the GPU library.
    pub open: OpenLibrary,
    /// What the driver takes in a context of a card, bytes; `None` while nobody knows.
    pub estimate: Estimate,
    /// Receives the metrics of all shares once a second.
    pub metrics: watch::Sender<Arc<[ShareMetrics]>>,
}

/// See [`Config::estimate`].
pub type Estimate = Arc<dyn Fn(&GpuUuid) -> Option<u64> + Send + Sync>;

/// Something to tell about a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its claim.
    pub claim: ClaimUid,
    /// Its ID.
    pub share: ShareId,
    /// What.
    pub what: What,
}

/// The agent. One thread does all of it.
pub struct Agent {
    config: Config,
    store: RecordStore,
    shares: Shares,
    cards: BTreeMap<GpuUuid, Card>,
    /// Of every card that ever had a share.
    observers: BTreeMap<GpuUuid, Observer>,
    next_key: u32,
    observations: Receiver<Seen>,
    outbox: Outbox,
    /// Rings when there are observations.
    bell: Option<Arc<OwnedFd>>,
    calls: Calls,
    /// Whether all shares that call are heard.
    hears_all: bool,
    claims_changed: Option<SystemTime>,
    refresh_us: u64,
    step_us: u64,
    metrics_us: u64,
    is_odd_step: bool,
}

impl Agent {
    /// An agent that has not looked yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (sender, observations) = mpsc::channel();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let bell = eventfd(0, flags).ok().map(Arc::new);
        Self {
            store: RecordStore::new(config.layout.claims()),
            shares: Shares::new(processes(&config)),
            config,
            cards: BTreeMap::new(),
            observers: BTreeMap::new(),
            next_key: 0,
            observations,
            outbox: Outbox::new(sender, bell.clone()),
            bell,
            calls: Calls::default(),
            hears_all: true,
            claims_changed: None,
            refresh_us: 0,
            step_us: 0,
            metrics_us: 0,
            is_odd_step: false,
        }
    }

    /// Works until `stop`. Blocks.
    pub fn run(mut self, stop: &CancellationToken, mut tell: impl FnMut(Finding)) {
        while !stop.is_cancelled() {
            self.pass(now_us()).into_iter().for_each(&mut tell);
            self.wait();
            while let Ok(seen) = self.observations.try_recv() {
                match seen {
                    Seen::Processes(observation) => {
                        let found = self.observed(now_us(), &observation);
                        found.into_iter().for_each(&mut tell);
                    }
                    Seen::Busy(busy) => self.busy(now_us(), &busy),
                }
            }
        }
    }

    /// Waits until there is something to do.
    fn wait(&mut self) {
        let now_us = now_us();
        let (calls, until_us) = match self.calls.awaited(now_us) {
            Ok(calls) => (calls, self.next_us(now_us)),
            Err(from_us) => (None, self.next_us(now_us).min(from_us)),
        };
        let mut until_us = until_us;
        if self.bell.is_none() {
            until_us = until_us.min(now_us + WAKE_US);
        }
        let wait = Duration::from_micros(until_us.saturating_sub(now_us));
        let awaited = [self.bell.as_ref().map(|bell| bell.as_fd()), calls];
        let polled = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let mut fds: Vec<PollFd<'_>> = awaited.into_iter().flatten().map(polled).collect();
        // What interrupts it is as good as nothing to do.
        let _ = poll(&mut fds, Timespec::try_from(wait).ok().as_ref());
        let has_come = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
        let has_called = calls.is_some() && fds.last().is_some_and(has_come);
        if let Some(bell) = &self.bell {
            let _ = rustix::io::read(bell, &mut [0u8; 8]);
        }
        if has_called {
            self.calls.take(self::now_us());
        }
    }

    /// How often it has read a usage region so far: what it costs, mostly.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.shares.scratch.reads()
    }

    fn findings(&self, told: Vec<(Key, What)>) -> Vec<Finding> {
        let finding = |(key, what)| {
            let tenant = self.shares.tenants.get(&key)?;
            Some(Finding {
                claim: tenant.claim.clone(),
                share: tenant.share.clone(),
                what,
            })
        };
        told.into_iter().filter_map(finding).collect()
    }

    /// When there is something to do next, µs of the clock that [`Self::pass`] is given.
    #[must_use]
    pub fn next_us(&self, now_us: u64) -> u64 {
        let turns = self.cards.values().any(Card::takes_turns);
        let lent = self.cards.values().any(Card::is_lent);
        let deaf = !self.hears_all;
        let soon = match (turns, lent || deaf) {
            (true, _) => now_us + TURN_US,
            (false, true) => now_us + WAKE_US,
            (false, false) => u64::MAX,
        };
        let gives_way = self.cards.values().map(Card::gives_way_next_us).min();
        soon.min(self.step_us).min(gives_way.unwrap_or(u64::MAX))
    }

    /// Does what is due at `now_us`, of a clock in microseconds.
    pub fn pass(&mut self, now_us: u64) -> Vec<Finding> {
        let mut told = Vec::new();
        let is_step = now_us >= self.step_us;
        if is_step {
            self.step_us = now_us + STEP_US;
            self.is_odd_step = !self.is_odd_step;
            self.refresh(now_us);
            for key in self.shares.arrivals.take() {
                self.arrive(key);
            }
        }
        for (uuid, card) in &mut self.cards {
            let steps = is_step && !card.may_rest(self.is_odd_step);
            if steps {
                card.rank(&mut self.shares);
            }
            if steps {
                told.extend(card.step(now_us, &mut self.shares));
            }
            let has_changed = steps || card.give_back(now_us, &mut self.shares);
            if let Some(observer) = self.observers.get(uuid).filter(|_| has_changed) {
                observer.attend(match card.is_shared() {
                    true => Attention::Busy,
                    false => Attention::Memory,
                });
            }
            if card.is_ranked() {
                card.give_way(now_us, &mut self.shares);
            }
            if steps || card.takes_turns() || card.is_ranked() {
                card.turn(now_us, &mut self.shares);
            }
            if is_step && now_us.saturating_sub(card.looked_us()) > BLIND_US {
                told.extend(card.look(now_us, None, None, &mut self.shares));
            }
        }
        if is_step && now_us >= self.metrics_us {
            self.metrics_us = now_us + METRICS_US;
            let tenants = self.shares.tenants.values();
            let metrics = tenants.filter_map(Tenant::metrics).collect();
            self.config.metrics.send_replace(metrics);
        }
        if is_step {
            let calling = self.shares.tenants.iter();
            let calling = calling.filter(|(_, tenant)| tenant.rank.calls || tenant.is_lent());
            let dirs: BTreeMap<Key, &Path> = calling
                .map(|(key, tenant)| (*key, tenant.usage_dir()))
                .collect();
            self.hears_all = self.calls.listen(&dirs);
        }
        self.findings(told)
    }

    fn arrive(&mut self, key: Key) {
        let Some(tenant) = self.shares.tenants.get_mut(&key) else {
            return;
        };
        tenant.arrive();
        if let Some(card) = self.cards.get_mut(&tenant.card) {
            card.arrive();
        }
    }

    /// Takes how busy NVML says that a card was.
    pub fn busy(&mut self, now_us: u64, busy: &Busy) {
        if let Some(card) = self.cards.get_mut(&busy.card) {
            card.see(now_us, &busy.per_mille);
        }
    }

    /// Takes what NVML says of the processes of a card.
    pub fn observed(&mut self, now_us: u64, observation: &Observation) -> Vec<Finding> {
        let Some(card) = self.cards.get_mut(&observation.card) else {
            return Vec::new();
        };
        let estimate = (self.config.estimate)(&observation.card);
        let told = card.look(now_us, Some(observation), estimate, &mut self.shares);
        let found = self.findings(told);
        let before = self.shares.tenants.len();
        self.shares.tenants.retain(|_, tenant| {
            tenant.card != observation.card || !tenant.is_here() || tenant.is_current()
        });
        if self.shares.tenants.len() < before {
            self.refresh_us = 0;
        }
        found
    }

    /// Opens the shares of new claims and forgets those of claims that are gone.
    fn refresh(&mut self, now_us: u64) {
        let changed = fs::metadata(self.config.layout.claims())
            .and_then(|dir| dir.modified())
            .ok();
        if changed == self.claims_changed && now_us < self.refresh_us {
            return;
        }
        let listed = match self.store.list() {
            Ok(listing) => listing.recorded,
            Err(error) => {
                tracing::warn!(%error, "cannot list the prepared claims");
                return;
            }
        };
        self.claims_changed = changed;
        self.refresh_us = now_us + REFRESH_US;
        self.shares
            .tenants
            .retain(|_, tenant| listed.contains(&tenant.claim));
        let known: BTreeSet<ClaimUid> = self
            .shares
            .tenants
            .values()
            .map(|tenant| tenant.claim.clone())
            .collect();
        for uid in listed.into_iter().filter(|uid| !known.contains(uid)) {
            if let Err(error) = self.open_claim(&uid, now_us) {
                self.refresh_us = now_us + RETRY_US;
                tracing::debug!(claim = %uid, %error, "cannot open the shares of the claim; retrying");
            }
        }
        self.follow_cards(now_us);
    }

    fn open_claim(&mut self, uid: &ClaimUid, now_us: u64) -> Result<(), String> {
        let record = match self.store.load(uid) {
            Ok(Loaded::Present(record)) => record,
            // A rebuilt record changes the directory.
            Ok(Loaded::Absent | Loaded::Unsupported(_) | Loaded::Damaged(_)) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        let mut opened = Vec::new();
        for (device, share) in record
            .devices
            .iter()
            .filter_map(|device| Some((device, Prepared::share(device)?)))
        {
            let tenant = Tenant::open(&self.config.layout, &record, device, share, now_us);
            opened.push(tenant.map_err(|error| format!("share {}: {error}", share.id))?);
        }
        for tenant in opened {
            self.next_key = self.next_key.wrapping_add(1);
            self.shares.tenants.insert(Key(self.next_key), tenant);
        }
        Ok(())
    }

    fn follow_cards(&mut self, now_us: u64) {
        let wanted: BTreeSet<&GpuUuid> = self
            .shares
            .tenants
            .values()
            .map(|tenant| &tenant.card)
            .collect();
        self.cards.retain(|uuid, _| wanted.contains(uuid));
        for (uuid, observer) in &self.observers {
            if !wanted.contains(uuid) {
                observer.attend(Attention::None);
            }
        }
        for uuid in wanted {
            let card = self.cards.entry(uuid.clone());
            card.or_insert_with(|| Card::new(uuid.clone(), now_us))
                .meet(&self.shares);
            if self.observers.contains_key(uuid) {
                continue;
            }
            let observer = Observer::start(
                uuid.clone(),
                self.config.open.clone(),
                processes(&self.config),
                self.outbox.clone(),
            );
            match observer {
                Ok(observer) => {
                    self.observers.insert(uuid.clone(), observer);
                }
                Err(error) => {
                    tracing::warn!(gpu = %uuid, %error, "cannot start the NVML observer")
                }
            }
        }
    }
}

fn processes(config: &Config) -> Processes {
    Processes::new(config.proc_root.clone(), config.layout.claims())
}

/// `CLOCK_MONOTONIC` in microseconds, the clock of pages and regions.
fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000 + nanos.unwrap_or(0) / 1_000
}
