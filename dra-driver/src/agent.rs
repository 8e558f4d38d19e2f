//! The node agent: what libvgpu cannot do from inside the containers.
//!
//! | Question | Module |
//! |---|---|
//! | Who may use how much of a card's time? | [`allot`], [`control`] (pure) |
//! | How much of what events measure is a share's own? | [`contention`] (pure) |
//! | Who has the token? | [`token`] (pure) |
//! | Does somebody escape or exceed a limit? | [`detect`] (pure) |
//! | Which container does a process belong to? | [`process`] |
//! | What does NVML say? | [`observe`] |
//! | What do the files of a share say, and how are they changed? | [`share`], [`tenant`] |
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
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, SystemTime};

use drava_nvml::GpuUuid;
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;

use crate::claim::ClaimUid;
use crate::layout::Layout;
use crate::prepare::record::{Loaded, Stage, Store};
use crate::prepare::{Prepared, ShareId};

pub mod allot;
pub mod card;
pub mod contention;
pub mod control;
pub mod detect;
pub mod observe;
pub mod process;
pub mod share;
pub mod tell;
pub mod tenant;
pub mod token;

use card::{Card, Tenants, What};
use observe::{Attention, Observation, Observer, Open};
use share::Scratch;
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

/// As long as a share could not be opened.
const RETRY_US: u64 = 1_000_000;

/// What the agent needs.
#[derive(Clone)]
pub struct Config {
    /// Where claims and their files are.
    pub layout: Layout,
    /// `/proc` of the node.
    pub proc_root: PathBuf,
    /// Opens the GPU library.
    pub open: Open,
}

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
    store: Store,
    tenants: Tenants,
    cards: BTreeMap<GpuUuid, Card>,
    /// Of every card that ever had a share.
    observers: BTreeMap<GpuUuid, Observer>,
    next_key: u32,
    scratch: Scratch,
    observations: (Sender<Observation>, Receiver<Observation>),
    claims_changed: Option<SystemTime>,
    refresh_us: u64,
    step_us: u64,
    is_odd_step: bool,
}

impl Agent {
    /// An agent that has not looked yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            store: Store::new(config.layout.claims()),
            config,
            tenants: Tenants::new(),
            cards: BTreeMap::new(),
            observers: BTreeMap::new(),
            next_key: 0,
            scratch: Scratch::default(),
            observations: mpsc::channel(),
            claims_changed: None,
            refresh_us: 0,
            step_us: 0,
            is_odd_step: false,
        }
    }

    /// Works until `stop`. Blocks.
    pub fn run(mut self, stop: &CancellationToken, mut tell: impl FnMut(Finding)) {
        while !stop.is_cancelled() {
            let now_us = now_us();
            for (key, what) in self.pass(now_us) {
                self.tell(key, what, &mut tell);
            }
            let wait = Duration::from_micros(self.next_us().saturating_sub(self::now_us()));
            match self.observations.1.recv_timeout(wait) {
                Ok(observation) => {
                    for (key, what) in self.observed(self::now_us(), &observation) {
                        self.tell(key, what, &mut tell);
                    }
                }
                // The agent holds a sender itself.
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
        }
    }

    fn tell(&self, key: Key, what: What, tell: &mut impl FnMut(Finding)) {
        if let Some(tenant) = self.tenants.get(&key) {
            tell(Finding {
                claim: tenant.claim.clone(),
                share: tenant.share.clone(),
                what,
            });
        }
    }

    /// When there is something to do next, µs.
    fn next_us(&self) -> u64 {
        let now_us = now_us();
        let turns = self.cards.values().any(Card::takes_turns);
        let lent = self.tenants.values().any(|tenant| tenant.is_lent);
        let soon = match (turns, lent) {
            (true, _) => now_us + TURN_US,
            (false, true) => now_us + WAKE_US,
            (false, false) => u64::MAX,
        };
        soon.min(self.step_us)
    }

    /// Does what is due.
    fn pass(&mut self, now_us: u64) -> Vec<(Key, What)> {
        let mut told = Vec::new();
        let is_step = now_us >= self.step_us;
        if is_step {
            self.step_us = now_us + STEP_US;
            self.is_odd_step = !self.is_odd_step;
            self.refresh(now_us);
        }
        for (uuid, card) in &mut self.cards {
            // Every second step, where nobody would notice.
            let is_step = is_step && !(card.is_quiet() && self.is_odd_step);
            if is_step || card.has_woken(&self.tenants, &mut self.scratch) {
                told.extend(card.step(now_us, &mut self.tenants, &mut self.scratch));
                if let Some(observer) = self.observers.get(uuid) {
                    observer.attend(if card.is_shared() {
                        Attention::Busy
                    } else {
                        Attention::Memory
                    });
                }
            }
            if is_step || card.takes_turns() {
                card.turn(now_us, &mut self.tenants, &mut self.scratch);
            }
            if is_step && now_us.saturating_sub(card.looked_us()) > BLIND_US {
                told.extend(card.look(now_us, None, &mut self.tenants, &mut self.scratch));
            }
        }
        told
    }

    fn observed(&mut self, now_us: u64, observation: &Observation) -> Vec<(Key, What)> {
        let Some(card) = self.cards.get_mut(&observation.card) else {
            return Vec::new();
        };
        let told = card.look(
            now_us,
            Some(observation),
            &mut self.tenants,
            &mut self.scratch,
        );
        let replaced = |tenant: &Tenant| tenant.card == observation.card && !tenant.is_current();
        if self.tenants.values().any(replaced) {
            self.tenants.retain(|_, tenant| !replaced(tenant));
            self.refresh_us = 0;
        }
        told
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
                tracing::warn!(%error, "the agent cannot see which claims there are");
                return;
            }
        };
        self.claims_changed = changed;
        self.refresh_us = now_us + REFRESH_US;
        self.tenants
            .retain(|_, tenant| listed.contains(&tenant.claim));
        let known: BTreeSet<ClaimUid> = self
            .tenants
            .values()
            .map(|tenant| tenant.claim.clone())
            .collect();
        for uid in listed.into_iter().filter(|uid| !known.contains(uid)) {
            if let Err(error) = self.open_claim(&uid, now_us) {
                self.refresh_us = now_us + RETRY_US;
                tracing::debug!(claim = %uid, %error, "not followed yet");
            }
        }
        self.follow_cards(now_us);
    }

    fn open_claim(&mut self, uid: &ClaimUid, now_us: u64) -> Result<(), String> {
        let record = match self.store.load(uid) {
            Ok(Loaded::Present(record)) if record.stage == Stage::Prepared => record,
            // Its next stage changes the directory.
            Ok(Loaded::Present(_) | Loaded::Absent | Loaded::Corrupt(_)) => return Ok(()),
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
            self.tenants.insert(Key(self.next_key), tenant);
        }
        Ok(())
    }

    fn follow_cards(&mut self, now_us: u64) {
        let wanted: BTreeSet<&GpuUuid> = self.tenants.values().map(|tenant| &tenant.card).collect();
        self.cards.retain(|uuid, _| wanted.contains(uuid));
        for (uuid, observer) in &self.observers {
            if !wanted.contains(uuid) {
                observer.attend(Attention::None);
            }
        }
        for uuid in wanted {
            let card = self.cards.entry(uuid.clone());
            card.or_insert_with(|| Card::new(uuid.clone(), now_us))
                .meet(&self.tenants);
            if self.observers.contains_key(uuid) {
                continue;
            }
            let observer = Observer::start(
                uuid.clone(),
                self.config.open.clone(),
                self.config.proc_root.clone(),
                self.observations.0.clone(),
            );
            match observer {
                Ok(observer) => {
                    self.observers.insert(uuid.clone(), observer);
                }
                Err(error) => {
                    tracing::warn!(card = %uuid, %error, "nobody watches the card with NVML")
                }
            }
        }
    }
}

/// `CLOCK_MONOTONIC` in microseconds, the clock of pages and regions.
fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000 + nanos.unwrap_or(0) / 1_000
}
