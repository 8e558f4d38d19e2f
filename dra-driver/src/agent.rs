//! The node agent: the part of enforcement that libvgpu cannot do inside the containers.
//!
//! Two rooms: [`policy`] decides and is pure, without I/O and without a clock; [`node`] reads, writes and waits.
//!
//! | Task | Decided by | Effects by |
//! |---|---|---|
//! | follow the amounts of the claim records | [`node::tracked_share`] | [`node::gpu`] |
//! | divide the time of a GPU | [`policy::allotment`], [`policy::control`], [`policy::contention`] | [`node::gpu`] |
//! | yield to higher priority | [`policy::priority`] | [`node::gpu`] |
//! | measure a share, lend its time, reclaim it | [`policy::activity`], [`policy::occupancy`] | [`node::tracked_share`] |
//! | detect violations, kill processes | [`policy::detection`] | [`node::gpu`], [`node::nvml_observer`] |
//! | divide memory beyond the guarantees, take it back | [`policy::burst`] | [`node::gpu::burst`] |
//! | correct the driver's reserve | [`policy::reserve`] | [`node::tracked_share`] |
//! | since when a share is idle | [`policy::idle`] | [`node::gpu`], [`node::nvml_observer`] |
//! | what is due when | [`policy::schedule`], [`policy::rate_limiter`] | the thread here, [`node::region_watch`] |
//! | report findings and metrics | [`policy::share_metrics`] | [`node::enforcement_events`] |
//!
//! Invariants:
//! - The agent reaches containers only by files that they have anyway: the limits page, which it writes in place, and the
//!   usage region, which it reads. There is no socket.
//! - Limits hold without the agent, with the last rate. A restart kills no process.
//! - Nothing that a tenant writes grants it more than its page, or blocks the agent.
//! - The thread makes no call that a GPU can block: NVML is called by one thread per GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use drava_nvml::GpuUuid;
use drava_vgpu_abi::paths;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::gpus::inventory::OpenLibrary;
use crate::node::claim::{ClaimRef, ClaimUid, ShareId};
use crate::node::layout::Layout;
use crate::node::process::Processes;
use crate::prepare::apply::{MissedReclaims, Unreturned};
use crate::prepare::record::{ClaimRecord, Loaded, RecordStore, RecordVersion};
use crate::prepare::{Prepared, Share, spec};

pub mod node;
pub mod policy;

use node::ShareKey;
pub use node::enforcement_events;
use node::gpu::burst::{GpuMemory, UnopenedShare};
use node::gpu::{Gpu, Shares};
use node::now_us;
use node::nvml_observer::{Observation, ObservationSender, Observer};
use node::tracked_share::{Opened, TrackedShare};
use policy::burst::{Loan, ShareMemory};
use policy::detection::{ViolationChange, ViolationKind};
use policy::schedule::Schedule;
pub use policy::share_metrics;
use share_metrics::ShareMetrics;

/// Claims are listed again after so long without a change of their directory, µs.
const REFRESH_US: u64 = 30_000_000;

/// As [`REFRESH_US`], while shares have more memory than they are guaranteed: a claim that is guaranteed it waits for the agent.
const BURST_REFRESH_US: u64 = 500_000;

/// Time between two attempts to open a share, µs: its record precedes its limits page by some milliseconds.
const RETRY_US: u64 = 200_000;

/// Time between two attempts to list the claims, µs.
const LIST_RETRY_US: u64 = 5_000_000;

/// Longest wait without an eventfd, µs.
const POLL_WITHOUT_EVENTS_US: u64 = 20_000;

/// Configuration of the agent.
#[derive(Clone)]
pub struct Config {
    /// Paths of claims and their files.
    pub layout: Layout,
    /// `/proc` of the node.
    pub proc_root: PathBuf,
    /// Opens the GPU library.
    pub open: OpenLibrary,
    /// Returns the driver's memory of a context on a GPU, bytes; `None` while it is unknown.
    pub estimate: Estimate,
    /// Returns the memory that the shares of a GPU can get together, bytes; `None` while it is unknown, and where no limit of memory
    /// holds.
    pub allocatable: Estimate,
    /// Counts guarantees that lent memory is not back for in time.
    pub missed_reclaims: MissedReclaims,
    /// Receives the metrics of all shares once per second.
    pub metrics: watch::Sender<Arc<[ShareMetrics]>>,
    /// Time without GPU time after which a share is idle, µs; see [`policy::idle::FIRST_US`].
    pub idle_after_us: u64,
    /// Receives the versions of the records that it follows.
    pub followed: FollowedRecords,
    /// Ends the work of a program on its MPS server before the program is killed.
    pub terminate: Terminate,
}

/// Ends the work of the program with this PID on the MPS server of a GPU. Returns in bounded time, also when that fails.
pub type Terminate = Arc<dyn Fn(&GpuUuid, u32) + Send + Sync>;

/// The records by which the agent writes limits: it has written what follows from them as far as the use allows it, and raises no limit
/// by an earlier one.
#[derive(Debug, Clone, Default)]
pub struct FollowedRecords(Arc<Mutex<BTreeMap<ClaimUid, RecordVersion>>>);

impl FollowedRecords {
    /// Returns the version of a claim's record; `None` before it was read.
    #[must_use]
    pub fn version_of(&self, claim: &ClaimUid) -> Option<RecordVersion> {
        let versions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        versions.get(claim).copied()
    }

    fn replace(&self, versions: BTreeMap<ClaimUid, RecordVersion>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = versions;
    }
}

/// See [`Config::estimate`] and [`Config::allocatable`].
pub type Estimate = Arc<dyn Fn(&GpuUuid) -> Option<u64> + Send + Sync>;

/// A finding about a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Claim of the share.
    pub claim: ClaimUid,
    /// ID of the share.
    pub share: ShareId,
    /// The finding.
    pub kind: FindingKind,
}

/// Kinds of findings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FindingKind {
    /// A violation is confirmed or cleared.
    Violation(ViolationChange),
    /// A kernel too long for any share of GPU time, µs.
    LongKernel(u64),
    /// A process was killed.
    Killed {
        /// PID on the host.
        pid: u32,
        /// Violation of the process.
        reason: ViolationKind,
    },
    /// A process was killed that did not give back memory beyond the guarantee of its share.
    Reclaimed {
        /// PID on the host.
        pid: u32,
        /// The claim that is guaranteed the memory.
        claim: ClaimRef,
    },
}

/// A claim whose shares are followed.
struct OpenedClaim {
    gpus: BTreeSet<GpuUuid>,
    /// Version of its record that was read last.
    version: Option<RecordVersion>,
}

/// Recorded claims that are not opened.
#[derive(Debug, Default)]
struct UnopenedClaims {
    /// Their shares, by the UUIDs of their GPUs.
    shares: Vec<(GpuUuid, UnopenedShare)>,
    /// Claims of which shares are unknown: the UUIDs of the GPUs that each holds; `None` if these are unknown, too.
    unknown: Vec<Option<BTreeSet<String>>>,
}

/// The agent, for one thread.
pub struct Agent {
    config: Config,
    store: RecordStore,
    shares: Shares,
    /// Opened claims.
    claims: BTreeMap<ClaimUid, OpenedClaim>,
    gpus: BTreeMap<GpuUuid, Gpu>,
    /// Of each GPU that was ever followed.
    observers: BTreeMap<GpuUuid, Observer>,
    next_key: u32,
    observations: Receiver<Observation>,
    sender: ObservationSender,
    /// Readable when there are observations.
    wakeup_fd: Option<Arc<OwnedFd>>,
    /// Whether all notifying shares are watched.
    has_notifications: bool,
    claims_changed: Option<SystemTime>,
    refresh_us: u64,
    /// Whether shares that appear are new. Those that an agent has followed before may have been lent memory.
    opened: Opened,
    /// Recorded claims that are not opened.
    unopened: UnopenedClaims,
    schedule: Schedule,
}

impl Agent {
    /// Returns an agent without shares.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let (sender, observations) = mpsc::channel();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wakeup_fd = eventfd(0, flags).ok().map(Arc::new);
        Self {
            store: RecordStore::new(config.layout.claims()),
            shares: Shares::new(processes(&config), Arc::clone(&config.terminate)),
            config,
            claims: BTreeMap::new(),
            gpus: BTreeMap::new(),
            observers: BTreeMap::new(),
            next_key: 0,
            observations,
            sender: ObservationSender::new(sender, wakeup_fd.clone()),
            wakeup_fd,
            has_notifications: true,
            claims_changed: None,
            refresh_us: 0,
            opened: Opened::Again,
            unopened: UnopenedClaims::default(),
            schedule: Schedule::default(),
        }
    }

    /// Runs until `stop`. Blocks.
    pub fn run(mut self, stop: &CancellationToken, mut report: impl FnMut(Finding)) {
        while !stop.is_cancelled() {
            self.poll(now_us()).into_iter().for_each(&mut report);
            self.wait();
            while let Ok(observation) = self.observations.try_recv() {
                let found = self.scan(now_us(), &observation);
                found.into_iter().for_each(&mut report);
            }
        }
        self.end();
    }

    /// Withdraws what only a running agent may grant.
    pub fn end(&mut self) {
        for share in self.shares.tracked.values_mut() {
            if let Err(error) = share.end() {
                tracing::warn!(share = %share.share, %error, "cannot write the limits page");
            }
        }
    }

    /// Waits until a task is due or an event is readable.
    fn wait(&mut self) {
        let now_us = now_us();
        let mut until_us = self.next_us(now_us);
        let events = self.shares.watch.pollable(now_us);
        let events = events.unwrap_or_else(|from_us| {
            until_us = until_us.min(from_us);
            None
        });
        if self.wakeup_fd.is_none() {
            until_us = until_us.min(now_us + POLL_WITHOUT_EVENTS_US);
        }
        let wait = Duration::from_micros(until_us.saturating_sub(now_us));
        let has_events = events.is_some();
        let polled = [self.wakeup_fd.as_ref().map(|fd| fd.as_fd()), events];
        let polled = polled.into_iter().flatten();
        let mut fds: Vec<PollFd<'_>> = polled
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        // An interrupted poll only causes an early round.
        let _ = poll(&mut fds, Timespec::try_from(wait).ok().as_ref());
        let is_readable = |fd: &PollFd<'_>| fd.revents().contains(PollFlags::IN);
        let has_event = has_events && fds.last().is_some_and(is_readable);
        if let Some(wakeup_fd) = &self.wakeup_fd {
            let _ = rustix::io::read(wakeup_fd, &mut [0u8; 8]);
        }
        if has_event {
            self.shares.watch.accept(self::now_us());
        }
    }

    /// Returns how many times it has read a usage region, which is most of its cost.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.shares.buffer.reads()
    }

    fn findings(&self, found: Vec<(ShareKey, FindingKind)>) -> Vec<Finding> {
        let finding = |(key, kind)| {
            let share = self.shares.tracked.get(&key)?;
            Some(Finding {
                claim: share.claim.clone(),
                share: share.share.clone(),
                kind,
            })
        };
        found.into_iter().filter_map(finding).collect()
    }

    /// Returns the time of the next task, µs of the clock of [`Self::poll`].
    #[must_use]
    pub fn next_us(&self, now_us: u64) -> u64 {
        let states = self.gpus.values().map(Gpu::state);
        self.schedule
            .next_us(now_us, self.has_notifications, states)
    }

    /// Does what is due at `now_us`, µs of a clock.
    pub fn poll(&mut self, now_us: u64) -> Vec<Finding> {
        let tasks = self.schedule.start(now_us);
        if tasks.tick {
            let is_read = self.refresh(now_us);
            self.divide_memory(now_us);
            self.shares.follow_records();
            if is_read {
                let versions = self.claims.iter();
                let versions =
                    versions.filter_map(|(uid, claim)| Some((uid.clone(), claim.version?)));
                self.config.followed.replace(versions.collect());
            }
            for key in self.shares.watch.started() {
                self.mark_occupied(key);
            }
        }
        let mut found = Vec::new();
        for gpu in self.gpus.values_mut() {
            let due = self.schedule.gpu_tasks(now_us, tasks, &gpu.state());
            if due.tick {
                found.extend(gpu.tick(now_us, &mut self.shares));
            }
            if !due.tick {
                gpu.reclaim_lent_time(now_us, &mut self.shares);
            }
            gpu.poll_priorities(now_us, &mut self.shares);
            if due.scan {
                found.extend(gpu.scan(now_us, None, None, &mut self.shares));
            }
        }
        if tasks.publish_metrics {
            let shares = self.shares.tracked.values();
            let metrics = shares.filter_map(TrackedShare::metrics).collect();
            self.config.metrics.send_replace(metrics);
        }
        if tasks.tick {
            let Shares { tracked, watch, .. } = &mut self.shares;
            let notifies = |share: &TrackedShare| share.role.notifies_agent || share.is_lent();
            let notifiers: BTreeMap<ShareKey, &Path> = tracked
                .iter()
                .filter(|(_, share)| notifies(share))
                .map(|(key, share)| (*key, share.usage_dir()))
                .collect();
            self.has_notifications = watch.set_notifiers(&notifiers);
        }
        self.findings(found)
    }

    fn mark_occupied(&mut self, key: ShareKey) {
        let Some(share) = self.shares.tracked.get_mut(&key) else {
            return;
        };
        share.mark_occupied();
        if let Some(gpu) = self.gpus.get_mut(&share.gpu) {
            gpu.mark_occupied();
        }
    }

    /// Scans a GPU with NVML's list of processes.
    pub fn scan(&mut self, now_us: u64, observation: &Observation) -> Vec<Finding> {
        let Some(gpu) = self.gpus.get_mut(&observation.gpu) else {
            return Vec::new();
        };
        let estimate = (self.config.estimate)(&observation.gpu);
        let mut found = match observation.is_extra {
            true => Vec::new(),
            false => gpu.scan(now_us, Some(observation), estimate, &mut self.shares),
        };
        found.extend(gpu.settle_memory(now_us, observation, estimate, &mut self.shares));
        let found = self.findings(found);
        // Claims are opened as a whole, so a share with another page closes all shares of its claim.
        let mut replaced = BTreeSet::new();
        for share in self.shares.tracked.values_mut() {
            if share.gpu == observation.gpu && share.is_occupied() && !share.is_current() {
                replaced.insert(share.claim.clone());
            }
        }
        if !replaced.is_empty() {
            let tracked = &mut self.shares.tracked;
            tracked.retain(|_, share| !replaced.contains(&share.claim));
            self.claims.retain(|uid, _| !replaced.contains(uid));
            self.opened = Opened::Again;
            self.refresh_us = 0;
        }
        found
    }

    /// Opens the shares of new claims and removes those of unprepared claims. Returns whether it has read the records.
    fn refresh(&mut self, now_us: u64) -> bool {
        let changed = fs::metadata(self.config.layout.claims())
            .and_then(|dir| dir.modified())
            .ok();
        if changed == self.claims_changed && now_us < self.refresh_us {
            return false;
        }
        self.claims_changed = changed;
        let (listed, limits) = match self.store.list() {
            Ok(listing) => (listing.recorded, listing.limits),
            Err(error) => {
                tracing::warn!(%error, "cannot list the prepared claims; retrying");
                self.refresh_us = now_us + LIST_RETRY_US;
                return false;
            }
        };
        let can_burst = self.shares.tracked.values().any(TrackedShare::can_burst);
        let refresh_us = if can_burst {
            BURST_REFRESH_US
        } else {
            REFRESH_US
        };
        self.refresh_us = now_us + refresh_us;
        let tracked = &mut self.shares.tracked;
        tracked.retain(|_, share| listed.contains(&share.claim));
        self.claims.retain(|uid, _| listed.contains(uid));
        let mut opened = Opened::New;
        for uid in &listed {
            // Before the record is read: a write during the read is seen the next time.
            let version = self.store.version(uid);
            let followed = match self.claims.get_mut(uid) {
                Some(claim) if claim.version == version => Ok(()),
                Some(_) => self.reread_claim(uid, version, now_us),
                None => self.open_claim(uid, version, now_us),
            };
            if let Err(error) = followed {
                self.refresh_us = now_us + RETRY_US;
                opened = self.opened;
                tracing::debug!(claim = %uid, %error, "cannot follow the shares of the claim; retrying");
            }
        }
        self.opened = opened;
        self.follow_gpus(now_us);
        let is_opened = |uid: &ClaimUid| self.claims.contains_key(uid);
        self.unopened = match listed.iter().chain(&limits).all(is_opened)
            && !self.shares.tracked.values().any(TrackedShare::can_burst)
        {
            true => UnopenedClaims::default(),
            false => self.read_unopened(&limits),
        };
        true
    }

    /// Returns the shares of recorded claims that are not opened. Claims are listed again: one that was recorded before a share that
    /// can burst was opened is not missed. `limits` are the claims with limits pages.
    fn read_unopened(&self, limits: &[ClaimUid]) -> UnopenedClaims {
        let Ok(listing) = self.store.list() else {
            return UnopenedClaims {
                unknown: vec![None],
                ..UnopenedClaims::default()
            };
        };
        let gpus_of_spec = |uid| spec::held_gpus(&self.config.layout, uid);
        let recorded = listing.recorded.iter();
        let mut found = UnopenedClaims::default();
        for uid in recorded.filter(|uid| !self.claims.contains_key(uid)) {
            match self.store.load(uid) {
                Ok(Loaded::Present(record)) => {
                    found
                        .shares
                        .extend(record.devices.iter().filter_map(|device| {
                            Some(self.unopened(&record.claim, device, device.share()?))
                        }));
                }
                Ok(Loaded::Absent) => {}
                Ok(Loaded::Unsupported(unsupported)) => found.unknown.push(Some(unsupported.gpus)),
                Ok(Loaded::Damaged(damage)) => {
                    let gpus = damage.gpus.or_else(|| gpus_of_spec(uid));
                    found.unknown.push(gpus);
                }
                Err(_) => found.unknown.push(gpus_of_spec(uid)),
            }
        }
        // Their record is lost, unless it was written since.
        let is_lost = |uid: &&ClaimUid| {
            !listing.recorded.contains(uid) && self.config.layout.claim(uid).exists()
        };
        let lost = limits.iter().filter(is_lost);
        found.unknown.extend(lost.map(gpus_of_spec));
        found
    }

    /// Returns a share whose page is missing, or cannot be used.
    fn unopened(
        &self,
        claim: &ClaimRef,
        device: &Prepared,
        share: &Share,
    ) -> (GpuUuid, UnopenedShare) {
        let held_bytes = share.held().memory_bytes;
        let page = self
            .config
            .layout
            .limits(&claim.uid, &share.id)
            .join(paths::PAGE_FILE);
        let present_bytes = match page.exists() {
            true => share
                .limit_bytes
                .map_or(held_bytes, |limit| limit.max(held_bytes)),
            false => 0,
        };
        // Without a page it may get one with its guarantee at any moment: where no share could burst when it was recorded.
        let unreturned_bytes = match present_bytes {
            0 => held_bytes,
            1.. => 0,
        };
        let memory = ShareMemory {
            id: None,
            priority: share.priority,
            held_bytes,
            kept_bytes: share.kept().memory_bytes,
            limit_bytes: None,
            bursts_idle: false,
            loan: Loan::default(),
            present_bytes,
            unreturned_bytes,
            used_bytes: None,
            is_reclaimed: false,
        };
        let claim = claim.clone();
        let is_lent = present_bytes > held_bytes;
        (
            GpuUuid::new(device.gpu.uuid.clone()),
            UnopenedShare {
                claim,
                memory,
                is_lent,
            },
        )
    }

    /// Divides the memory of GPUs with shares that can have more than their guarantee.
    fn divide_memory(&mut self, now_us: u64) {
        let memory = self
            .gpus
            .iter()
            .map(|(uuid, gpu)| self.memory_of(uuid, gpu));
        let memory: Vec<GpuMemory> = memory.collect();
        for ((uuid, gpu), memory) in self.gpus.iter_mut().zip(&memory) {
            let divided = gpu.divide_memory(now_us, memory, &mut self.shares);
            let missed = self.config.missed_reclaims.of(Unreturned::InUse);
            missed.inc_by(divided.missed);
            if divided.needs_observation
                && let Some(observer) = self.observers.get(uuid)
            {
                observer.request();
            }
        }
    }

    fn memory_of(&self, uuid: &GpuUuid, gpu: &Gpu) -> GpuMemory {
        let own = self.unopened.shares.iter().filter(|(of, _)| of == uuid);
        let unopened: Vec<UnopenedShare> = own.map(|(_, share)| share.clone()).collect();
        let can_burst = gpu.can_burst(&unopened, &self.shares);
        GpuMemory {
            allocatable_bytes: can_burst.then(|| (self.config.allocatable)(uuid)).flatten(),
            unopened,
            has_unknown: self.unopened.unknown.iter().any(|gpus| {
                let gpus = gpus.as_ref();
                gpus.is_none_or(|gpus| gpus.contains(uuid.as_str()))
            }),
        }
    }

    /// Applies the changed record of an opened claim to its shares. A claim that was unprepared and prepared again since has other
    /// shares or other pages, and is opened again.
    fn reread_claim(
        &mut self,
        uid: &ClaimUid,
        version: Option<RecordVersion>,
        now_us: u64,
    ) -> Result<(), String> {
        let Some(record) = self.load(uid)? else {
            return Ok(());
        };
        let devices = record.devices.iter();
        let recorded: Vec<(&str, &Share)> = devices
            .filter_map(|device| Some((device.gpu.uuid.as_str(), device.share()?)))
            .collect();
        let tracked = self.shares.tracked.values_mut();
        let mut tracked: Vec<&mut TrackedShare> =
            tracked.filter(|share| share.claim == *uid).collect();
        let is_same = tracked.len() == recorded.len()
            && tracked.iter_mut().all(|share| {
                let is_recorded = recorded
                    .iter()
                    .any(|(gpu, of)| of.id == share.share && *gpu == share.gpu.as_str());
                is_recorded && share.is_current()
            });
        if !is_same {
            self.shares.tracked.retain(|_, share| share.claim != *uid);
            self.claims.remove(uid);
            self.opened = Opened::Again;
            return self.open_claim(uid, version, now_us);
        }
        for share in tracked {
            if let Some((_, recorded)) = recorded.iter().find(|(_, of)| of.id == share.share) {
                share.set_recorded(recorded);
            }
        }
        if let Some(claim) = self.claims.get_mut(uid) {
            claim.version = version;
        }
        Ok(())
    }

    /// Loads a record that this build can read. A rebuilt record changes the directory.
    fn load(&self, uid: &ClaimUid) -> Result<Option<Box<ClaimRecord>>, String> {
        match self.store.load(uid) {
            Ok(Loaded::Present(record)) => Ok(Some(record)),
            Ok(Loaded::Absent | Loaded::Unsupported(_) | Loaded::Damaged(_)) => Ok(None),
            Err(error) => Err(error.to_string()),
        }
    }

    fn open_claim(
        &mut self,
        uid: &ClaimUid,
        version: Option<RecordVersion>,
        now_us: u64,
    ) -> Result<(), String> {
        let Some(record) = self.load(uid)? else {
            return Ok(());
        };
        let mut opened = Vec::new();
        for device in &record.devices {
            if let Some(share) = Prepared::share(device) {
                let tracked = TrackedShare::open(
                    &self.config.layout,
                    &record,
                    device,
                    share,
                    self.opened,
                    self.config.idle_after_us,
                    now_us,
                );
                opened.push(tracked.map_err(|error| format!("share {}: {error}", share.id))?);
            }
        }
        let gpus = record.gpus();
        self.claims
            .insert(uid.clone(), OpenedClaim { gpus, version });
        for share in opened {
            self.next_key = self.next_key.wrapping_add(1);
            self.shares.tracked.insert(ShareKey(self.next_key), share);
        }
        Ok(())
    }

    /// Adds the GPUs of claims, with their observers, and removes the others. GPUs of claims without shares are followed while
    /// there are shares, whose processes may use them.
    fn follow_gpus(&mut self, now_us: u64) {
        let used: BTreeSet<&GpuUuid> = match self.shares.tracked.is_empty() {
            true => BTreeSet::new(),
            false => self.claims.values().flat_map(|claim| &claim.gpus).collect(),
        };
        self.gpus.retain(|uuid, _| used.contains(uuid));
        for (uuid, observer) in &self.observers {
            observer.set_needed(used.contains(uuid));
        }
        for uuid in used {
            let gpu = self.gpus.entry(uuid.clone());
            let gpu = gpu.or_insert_with(|| Gpu::new(uuid.clone(), now_us));
            gpu.select_shares(&self.shares);
            if self.observers.contains_key(uuid) {
                continue;
            }
            let (open, processes) = (self.config.open.clone(), processes(&self.config));
            match Observer::start(uuid.clone(), open, processes, self.sender.clone()) {
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
