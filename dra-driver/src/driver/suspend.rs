//! Suspends and resumes the shares of claims as their label says; see [`crate::suspend`].
//!
//! The watch only tells which claims to look at. Each step reads the claim again, so it acts on the intent of that moment, and
//! each write is refused if the claim has changed since. Without claims that have the label, and without shares that are
//! suspended, nothing is read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use drava_api::condition::ConditionReason;
use drava_api::config;
use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_api::names;
use drava_nvml::GpuUuid;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Resource as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::labelled::{self, Follower, Found};
use crate::agent::node::usage_region::ReadBuffer;
use crate::gpus::inventory::{Node, State};
use crate::kubelet::claims::{ClaimService, blocking, has_devices_of};
use crate::node::claim::{ClaimUid, ShareId};
use crate::node::limits_page::Page;
use crate::prepare::effects::Effects;
use crate::prepare::record::{ClaimRecord, Loaded, RecordError};
use crate::prepare::{Phase, Prepared, Share, Suspension};
use crate::report::pods::reserving_pods;
use crate::report::{self, Subject};
use crate::suspend::checkpoint::{Action, FIRST_RELEASE};
use crate::suspend::node::{ActError, SuspendNode};
use crate::suspend::{Look, Refusals, Seen, Step, decide};

/// Time from the first to the second review of a claim that waits for something. It doubles with each further one.
const POLL: Duration = Duration::from_millis(250);

/// Time between two looks at whether a suspended share is demanded.
const DEMAND_POLL: Duration = Duration::from_millis(40);

/// Longest time between two such reviews.
const MAX_POLL: Duration = Duration::from_secs(10);

/// How long a suspension may wait for the node agent and for NVML before it is undone.
const PATIENCE: Duration = Duration::from_secs(30);

/// Time from the first failure to the next attempt. It doubles with each further one.
const FIRST_REST: Duration = Duration::from_secs(15);

/// Longest time between two attempts.
const MAX_REST: Duration = Duration::from_secs(600);

/// Time limit of a write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest read of a claim whose processes stand still and are not suspended yet. Without an answer they are let go.
const LOCKED_FETCH: Duration = Duration::from_millis(500);

/// Most steps of one review; more than any suspension takes.
const MAX_STEPS: u32 = 32;

/// File name of libcuda, by which programs load it.
const LIBCUDA: &str = "libcuda.so.1";

/// Follows the label of claims until `stop`.
pub(super) async fn run<E: Effects>(
    claims: Arc<ClaimService<E>>,
    node: SuspendNode,
    stop: CancellationToken,
) {
    let selector = format!("{}={}", names::SUSPEND_LABEL, names::SUSPEND);
    let task = Task::new(Arc::clone(&claims), node);
    labelled::follow(&claims, &selector, task, stop).await;
}

struct Task<E> {
    claims: Arc<ClaimService<E>>,
    node: SuspendNode,
    /// Claims of this node that are to be suspended, or to be resumed; `None` until the records were read.
    followed: Option<BTreeMap<ClaimUid, Followed>>,
    /// Whether all of them could be read.
    are_records_read: bool,
    /// Why the records could not be read.
    error: Option<String>,
    buffer: ReadBuffer,
}

/// What is known of a claim from one review to the next.
struct Followed {
    due: Instant,
    wait: Duration,
    /// When its suspension began, as far as this process knows.
    since: Option<Instant>,
    /// Since when the suspension waits for something other than libcuda.
    waits_since: Option<Instant>,
    failure: Option<Failure>,
    refusals: Refusals,
    /// Time until the next attempt after the next failure.
    rest: Duration,
    /// What the last review failed or waited for.
    note: Option<String>,
    /// Its share, while it is suspended and not demanded.
    undemanded: Option<ShareId>,
    /// Whether its processes may stand still although its share is not suspended.
    is_between: bool,
}

/// A suspension that failed.
struct Failure {
    reason: ConditionReason,
    message: String,
    /// When it is tried again; `None` if not while the label stays.
    until: Option<Instant>,
}

/// Returns whether processes may stand still in a phase although their share is not suspended.
const fn is_between(phase: Phase) -> bool {
    matches!(phase, Phase::Suspending | Phase::Resuming)
}

/// What a review leaves to be done.
enum Left {
    /// The claim has no state of a suspension.
    Nothing,
    /// The claim is suspended, or refused, and is looked at from time to time.
    Kept,
    /// Something is waited for.
    Open(String),
}

impl Followed {
    fn new(is_between: bool) -> Self {
        Self {
            due: Instant::now(),
            wait: POLL,
            since: None,
            waits_since: None,
            failure: None,
            refusals: Refusals::default(),
            rest: FIRST_REST,
            note: None,
            undemanded: None,
            is_between,
        }
    }

    /// Remembers a failure, after which the suspension is undone.
    fn fail(&mut self, is_final: bool, message: String) {
        tracing::warn!(message, "cannot suspend a share; undoing it");
        let (reason, until) = match is_final {
            true => (ConditionReason::SuspendRefused, None),
            false => {
                let until = Instant::now() + self.rest;
                self.rest = (self.rest * 2).min(MAX_REST);
                (ConditionReason::SuspendFailed, Some(until))
            }
        };
        self.failure = Some(Failure {
            reason,
            message,
            until,
        });
    }

    fn is_due(&self) -> bool {
        self.due <= Instant::now()
    }

    /// Sets when the next review is due.
    fn schedule(&mut self, left: &Left, is_new: bool) {
        self.wait = match left {
            Left::Nothing | Left::Kept => MAX_POLL,
            Left::Open(_) if is_new => POLL,
            Left::Open(_) => (self.wait * 2).min(MAX_POLL),
        };
        let retry = self.failure.as_ref().and_then(|failure| failure.until);
        let due = Instant::now() + self.wait;
        self.due = retry.map_or(due, |retry| retry.min(due));
    }
}

impl<E: Effects> Follower for Task<E> {
    /// A share without a record has no state on the node.
    const SWEEPS: bool = false;

    /// Resource version.
    type Kept = Option<String>;

    /// Keeps claims with devices of this node, readable or not.
    fn keep(&self, claim: Listed<ResourceClaim>) -> Option<Self::Kept> {
        let is_own = has_devices_of(&self.claims.pool, &claim);
        is_own.then(|| claim.meta().resource_version.clone())
    }

    /// Makes the next review of a claim due.
    fn changed(&mut self, uid: &ClaimUid) {
        let followed = self.followed.as_mut();
        if let Some(followed) = followed.and_then(|followed| followed.get_mut(uid)) {
            followed.due = Instant::now();
        }
    }

    /// Looks at the claims that are due. Returns when the next one is due. Claims with a state on this node need no watch: what was
    /// locked before a restart is undone also while the API server is away.
    async fn review(&mut self, found: Option<&Found<Self::Kept>>) -> Option<Instant> {
        let known = self.followed.take();
        // A record that cannot be read may be that of a suspended claim, until it is repaired.
        let mut followed: BTreeMap<ClaimUid, Followed> = match known {
            Some(known) if self.are_records_read => known,
            known => match self.read_suspended().await {
                Ok((found, are_all_read)) => {
                    self.are_records_read = are_all_read;
                    let mut known = known.unwrap_or_default();
                    for (uid, is_between) in found {
                        let claim = known.entry(uid);
                        claim.or_insert_with(|| Followed::new(is_between));
                    }
                    known
                }
                Err(error) => {
                    if self.error.replace(error.clone()).as_ref() != Some(&error) {
                        tracing::warn!(error, "cannot read the records of suspended claims");
                    }
                    self.followed = known;
                    return None;
                }
            },
        };
        for uid in found.into_iter().flat_map(Found::keys) {
            let store = self.claims.applier.store();
            if !followed.contains_key(uid) && store.version(uid).is_some() {
                followed.insert(uid.clone(), Followed::new(false));
            }
        }
        self.expedite_demanded(&mut followed);
        let due = followed.iter().filter(|(_, claim)| claim.is_due());
        for uid in due.map(|(uid, _)| uid.clone()).collect::<Vec<_>>() {
            // Processes that stand still do not wait for the reviews of all other claims.
            let between = followed.iter().filter(|(_, claim)| claim.is_between);
            let between: Vec<ClaimUid> = between.map(|(uid, _)| uid.clone()).collect();
            for uid in between.into_iter().chain([uid]) {
                if let Some(claim) = followed.get_mut(&uid).filter(|claim| claim.is_due())
                    && self.review_followed(&uid, claim).await
                {
                    followed.remove(&uid);
                }
            }
        }
        let due = followed.values().map(|claim| claim.due).min();
        let polls = followed.values().any(|claim| claim.undemanded.is_some());
        let poll = polls.then(|| Instant::now() + DEMAND_POLL);
        let due = due.into_iter().chain(poll).min();
        self.followed = Some(followed);
        due
    }
}

impl<E: Effects> Task<E> {
    fn new(claims: Arc<ClaimService<E>>, node: SuspendNode) -> Self {
        Self {
            claims,
            node,
            followed: None,
            are_records_read: false,
            error: None,
            buffer: ReadBuffer::default(),
        }
    }

    /// Makes the reviews of claims due whose suspended shares are demanded. Reads files in memory.
    fn expedite_demanded(&mut self, followed: &mut BTreeMap<ClaimUid, Followed>) {
        for (uid, claim) in followed {
            if let Some(share) = &claim.undemanded
                && self.node.is_demanded(uid, share, &mut self.buffer)
            {
                claim.undemanded = None;
                claim.due = Instant::now();
            }
        }
    }

    /// Returns the claims with suspended shares, once: by their records, and by their pages if a record was lost. Each with whether its
    /// processes may stand still although its share is not suspended. Also returns whether all records could be read.
    async fn read_suspended(&self) -> Result<(Vec<(ClaimUid, bool)>, bool), String> {
        let (applier, layout) = (Arc::clone(&self.claims.applier), self.node.layout.clone());
        let read = blocking(move || {
            let store = applier.store();
            let (mut found, mut are_all_read) = (Vec::new(), true);
            for uid in store.list()?.recorded {
                let record = match store.load(&uid)? {
                    Loaded::Present(record) => record,
                    Loaded::Absent => continue,
                    Loaded::Damaged(_) | Loaded::Unsupported(_) => {
                        are_all_read = false;
                        continue;
                    }
                };
                let shares = record.devices.iter().filter_map(Prepared::share);
                let is_suspended = |share: &Share| {
                    let page = Page::open(&layout.limits(&uid, &share.id));
                    share.suspension.is_some() || page.is_ok_and(|page| page.is_suspended())
                };
                if shares.clone().any(is_suspended) {
                    let mut phases = shares.filter_map(|share| share.suspension.as_ref());
                    let is_between = phases.any(|recorded| is_between(recorded.phase));
                    found.push((uid, is_between));
                }
            }
            Ok::<_, RecordError>((found, are_all_read))
        });
        let read = read.await.map_err(|error| describe(&error))?;
        read.map_err(|error| describe(&error))
    }

    /// Reviews a claim and sets when the next review is due. Returns whether there is nothing more to do for it.
    async fn review_followed(&self, uid: &ClaimUid, claim: &mut Followed) -> bool {
        let reviewed = self.review_claim(uid, claim).await;
        let left = reviewed.unwrap_or_else(Left::Open);
        let note = match &left {
            Left::Open(note) => Some(note.clone()),
            Left::Nothing | Left::Kept => None,
        };
        let is_new = claim.note != note;
        if let Some(note) = note.as_ref().filter(|_| is_new) {
            tracing::info!(claim.uid = %uid, note, "a suspension waits");
        }
        claim.note = note;
        claim.schedule(&left, is_new);
        matches!(left, Left::Nothing)
    }

    /// Takes the steps of a claim until something must be waited for.
    async fn review_claim(&self, uid: &ClaimUid, followed: &mut Followed) -> Result<Left, String> {
        followed.undemanded = None;
        for _ in 0..MAX_STEPS {
            let Some(record) = self.load(uid).await? else {
                return Ok(Left::Nothing);
            };
            let State::Known(node) = self.claims.gpus.borrow().clone() else {
                return Err("the GPUs of the node are not known".to_owned());
            };
            // What was locked and not promised to others is undone without the API server.
            let shares = record.devices.iter().filter_map(Prepared::share);
            let mut suspensions = shares.filter_map(|share| share.suspension.as_ref());
            let can_undo = suspensions.any(|recorded| recorded.phase == Phase::Suspending);
            let fetch = self.claims.fetch(&record.claim);
            let fetched = match can_undo {
                true => tokio::time::timeout(LOCKED_FETCH, fetch).await.ok(),
                false => Some(fetch.await),
            };
            let fetched = match fetched {
                Some(Ok(fetched)) => fetched,
                Some(Err(error)) if !can_undo => return Err(describe(&error)),
                Some(Err(_)) | None => None,
            };
            let is_same =
                |claim: &ResourceClaim| ClaimUid::of(&claim.metadata).as_ref() == Some(uid);
            let claim = fetched.filter(is_same);
            if claim.is_none() && !can_undo {
                // Its pod ends, and its processes with it.
                return Ok(Left::Kept);
            }
            let is_wanted = claim.as_ref().is_some_and(is_labelled);
            let now = Instant::now();
            let is_over = |failure: &Failure| failure.until.is_some_and(|until| until <= now);
            if !is_wanted || followed.failure.as_ref().is_some_and(is_over) {
                followed.failure = None;
                followed.since = None;
            }
            if !is_wanted {
                followed.rest = FIRST_REST;
            }
            let judged = claim.as_ref().map(|claim| judge(&record, claim, &node));
            let (share, refusal) = match judged {
                Some(Ok(share)) => (Some(share), None),
                Some(Err(refusal)) => (first_share(&record), Some(refusal)),
                None => (first_share(&record), None),
            };
            let look = match share {
                Some((device, share)) => self.look(uid, device, share, &node).await?,
                None => Look::default(),
            };
            followed.refusals.retain(&look);
            let recorded = share.and_then(|(_, share)| share.suspension.clone());
            let phase = recorded.as_ref().map(|recorded| recorded.phase);
            followed.is_between = phase.is_some_and(is_between);
            let refusal = refusal.or(look.refusal);
            if let (Some(Phase::Suspending), Some(why), None, true) =
                (phase, &refusal, &followed.failure, is_wanted)
            {
                followed.fail(true, why.clone());
            }
            let seen = Seen {
                is_wanted,
                failure: followed.failure.as_ref().map(|failure| failure.reason),
                recorded,
                look: Look {
                    refusal: refusal.clone(),
                    ..look
                },
                answer: claim.as_ref().and_then(report::suspended),
                refusals: followed.refusals.clone(),
            };
            let since = *followed.since.get_or_insert(now);
            let step = decide(&seen);
            if !matches!(step, Step::Wait(_)) {
                followed.waits_since = None;
            }
            match step {
                Step::Done if is_wanted => {
                    let is_undemanded = seen.answer == Some(ConditionReason::Suspended);
                    let share = share.filter(|_| is_undemanded);
                    followed.undemanded = share.map(|(_, share)| share.id.clone());
                    return Ok(Left::Kept);
                }
                Step::Done => return Ok(Left::Nothing),
                Step::Wait(what) => {
                    let waits_since = *followed.waits_since.get_or_insert(now);
                    let can_fail = phase == Some(Phase::Suspending) && followed.failure.is_none();
                    if can_fail && waits_since.elapsed() > PATIENCE {
                        let patience = PATIENCE.as_secs();
                        followed.fail(false, format!("{what}, for {patience} s"));
                        continue;
                    }
                    return Ok(Left::Open(what.to_owned()));
                }
                Step::Record(mut suspension) => {
                    let begins = seen.recorded.as_ref().map(|recorded| recorded.phase)
                        != Some(suspension.phase);
                    match suspension.phase {
                        Phase::Suspending if begins => followed.since = Some(now),
                        Phase::Suspended if begins => {
                            let millis = u64::try_from(since.elapsed().as_millis());
                            suspension.millis = millis.unwrap_or(u64::MAX);
                            let now = SystemTime::now().duration_since(UNIX_EPOCH);
                            suspension.free_since_seconds = now.map_or(0, |now| now.as_secs());
                        }
                        _ => {}
                    }
                    self.record(&record, suspension, &node).await?;
                }
                Step::Answer(reason) => {
                    let refused = refusal.as_deref();
                    let failed = followed.failure.as_ref();
                    let failed = failed.map(|failure| failure.message.as_str());
                    let message = message(reason, seen.recorded.as_ref(), refused.or(failed));
                    let claim = claim.as_ref().ok_or("the API server does not answer")?;
                    self.answer(claim, &record, reason, &message).await?;
                }
                Step::Lock(processes) => {
                    let acted = self.act(&node, Action::Lock, processes).await?;
                    settle(&acted, phase, followed)?;
                }
                Step::Checkpoint(processes) => {
                    let acted = self.act(&node, Action::Checkpoint, processes).await?;
                    settle(&acted, phase, followed)?;
                }
                Step::Restore(processes) => {
                    let failures = self.act(&node, Action::Restore, processes).await?;
                    for failure in &failures {
                        followed.refusals.count(failure.process, &failure.error);
                    }
                    if let Some(first) = failures.first() {
                        // Those that are restored go on; the others refuse this call.
                        let all = seen.look.processes.iter().map(|seen| seen.process);
                        let _ = self.act(&node, Action::Unlock, all.collect()).await?;
                        return Err(first.to_string());
                    }
                }
                Step::Unlock(processes) => {
                    let failures = self.act(&node, Action::Unlock, processes).await?;
                    if let Some(first) = failures.first() {
                        return Err(first.to_string());
                    }
                }
                Step::Kill(processes) => {
                    let share = share.map(|(_, share)| share.clone());
                    let share = share.ok_or("the claim has no share")?;
                    let (node, uid) = (self.node.clone(), uid.clone());
                    let killed = blocking(move || node.kill(&uid, &share, &processes)).await;
                    let killed = killed.map_err(|error| describe(&error))?;
                    self.report_killed(&record, claim.as_ref(), &killed);
                    // Their end takes a moment.
                    return Ok(Left::Open("killed processes must end".to_owned()));
                }
            }
        }
        Err("its processes change all the time".to_owned())
    }

    async fn load(&self, uid: &ClaimUid) -> Result<Option<ClaimRecord>, String> {
        let (applier, wanted) = (Arc::clone(&self.claims.applier), uid.clone());
        let loaded = blocking(move || applier.store().load(&wanted)).await;
        let loaded = loaded.map_err(|error| describe(&error))?;
        match loaded.map_err(|error| describe(&error))? {
            Loaded::Present(record) => Ok(Some(*record)),
            Loaded::Absent => Ok(None),
            Loaded::Damaged(_) | Loaded::Unsupported(_) => {
                Err("its record cannot be read".to_owned())
            }
        }
    }

    async fn look(
        &self,
        uid: &ClaimUid,
        device: &Prepared,
        share: &Share,
        driver: &Node,
    ) -> Result<Look, String> {
        let (node, uid, share) = (self.node.clone(), uid.clone(), share.clone());
        let gpu = GpuUuid::new(device.gpu.uuid.clone());
        let library = libcuda(driver)?;
        let looked = blocking(move || node.look(&uid, &share, &gpu, &library)).await;
        looked.map_err(|error| describe(&error))?
    }

    async fn act(
        &self,
        driver: &Node,
        action: Action,
        processes: Vec<crate::prepare::HeldProcess>,
    ) -> Result<Vec<ActError>, String> {
        let (node, library) = (self.node.clone(), libcuda(driver)?);
        let acted = blocking(move || node.act(&library, action, &processes)).await;
        acted.map_err(|error| describe(&error))
    }

    /// Reports processes that were killed. The API server may not have the claim at present.
    fn report_killed(&self, record: &ClaimRecord, claim: Option<&ResourceClaim>, pids: &[u32]) {
        let pods = claim.map(reserving_pods).unwrap_or_default();
        let pods = pods.into_iter().map(Subject::Pod);
        let subjects: Vec<Subject> = std::iter::once(Subject::Claim(record.claim.clone()))
            .chain(pods)
            .collect();
        for pid in pids {
            let note = format!(
                "claim {}: killed process {pid} (PID on the node) because libcuda cannot restore it after it was suspended: an \
                 earlier restore failed, as for lack of free GPU memory; its container restarts",
                record.claim
            );
            for subject in &subjects {
                let reporter = &self.claims.reporter;
                reporter.event(subject.clone(), EventReason::RestoreFailed, note.clone());
            }
        }
    }

    /// Writes the record, unless it has changed since it was read.
    async fn record(
        &self,
        record: &ClaimRecord,
        suspension: Suspension,
        node: &Arc<Node>,
    ) -> Result<(), String> {
        let (applier, seen, node) = (
            Arc::clone(&self.claims.applier),
            record.clone(),
            Arc::clone(node),
        );
        let recorded = blocking(move || {
            let lock = applier.locks().try_claim(&seen.claim.uid);
            let Some(_lock) = lock.map_err(|error| describe(&error))? else {
                return Err("the claim is being prepared".to_owned());
            };
            let loaded = applier.store().load(&seen.claim.uid);
            if loaded.map_err(|error| describe(&error))? != Loaded::Present(Box::new(seen.clone()))
            {
                return Err("its record has changed".to_owned());
            }
            let recorded = applier.record_suspension(&seen, &suspension, &node.inventory);
            recorded.map(drop).map_err(|error| describe(&error))
        });
        recorded.await.map_err(|error| describe(&error))?
    }

    async fn answer(
        &self,
        claim: &ResourceClaim,
        record: &ClaimRecord,
        reason: ConditionReason,
        message: &str,
    ) -> Result<(), String> {
        let client = &self.claims.client;
        let written = report::write_suspended(client, claim, record, reason, message);
        match tokio::time::timeout(WRITE_TIMEOUT, written).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(format!("cannot write its condition: {}", describe(&error))),
            Err(_) => Err("cannot write its condition: no answer".to_owned()),
        }
    }
}

/// Applies the outcome of a call that holds processes. A failure before the share is suspended undoes all.
fn settle(
    failures: &[ActError],
    phase: Option<Phase>,
    followed: &mut Followed,
) -> Result<(), String> {
    match failures.first() {
        None => Ok(()),
        Some(failure) if phase == Some(Phase::Suspending) => {
            followed.fail(failure.error.is_final(), failure.to_string());
            Ok(())
        }
        Some(failure) => Err(failure.to_string()),
    }
}

/// Returns the share of a claim that may be suspended.
///
/// # Errors
/// Why it cannot be, as far as that is known without its processes.
fn judge<'a>(
    record: &'a ClaimRecord,
    claim: &ResourceClaim,
    node: &Node,
) -> Result<(&'a Prepared, &'a Share), String> {
    let [device] = record.devices.as_slice() else {
        return Err("the claim has several devices".to_owned());
    };
    let Some(share) = device.share() else {
        return Err(
            "only shares of a GPU can be suspended, no whole GPUs and no partitions".to_owned(),
        );
    };
    if !record.can_wait {
        let why = "its containers have the libvgpu of an earlier release, which does not make new processes wait";
        return Err(why.to_owned());
    }
    let status = claim.status.as_ref();
    let allocation = status.and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let configs = devices.and_then(|devices| devices.config.as_deref());
    let settings = config::resolve(configs.unwrap_or_default(), &device.request);
    if !settings
        .map_err(|error| error.to_string())?
        .allows_suspend()
    {
        return Err("neither the device class nor the claim has suspend.allowed: true".to_owned());
    }
    let version = node.driver.version();
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    match (version, major) {
        (Some(version), Some(major)) if major < FIRST_RELEASE => Err(format!(
            "the NVIDIA driver has the version {version}; checkpoints need {FIRST_RELEASE} or later"
        )),
        _ => Ok((device, share)),
    }
}

/// Returns the share of a claim that cannot be suspended, and may have been before: a record that was rebuilt says neither.
fn first_share(record: &ClaimRecord) -> Option<(&Prepared, &Share)> {
    let mut devices = record.devices.iter();
    devices.find_map(|device| Some((device, device.share()?)))
}

/// Returns the path of libcuda in the driver root.
fn libcuda(node: &Node) -> Result<PathBuf, String> {
    let library = node.driver.library(LIBCUDA);
    let library = library.ok_or_else(|| format!("the driver root has no {LIBCUDA}"))?;
    let below = library.path.trim_start_matches('/');
    Ok(node.driver.root().mount().join(below))
}

/// Returns the message of a condition.
fn message(
    reason: ConditionReason,
    recorded: Option<&Suspension>,
    failure: Option<&str>,
) -> String {
    match (reason, recorded) {
        (ConditionReason::Suspended | ConditionReason::Demanded, Some(recorded)) => {
            let waits = match reason {
                ConditionReason::Demanded => "a program has called CUDA since, and waits",
                _ => "new processes wait",
            };
            let (mib, count) = (recorded.bytes >> 20, recorded.processes.len());
            // Without the decimals of `f64`.
            let (seconds, tenths) = (recorded.millis / 1000, recorded.millis % 1000 / 100);
            format!(
                "{mib} MiB of {count} processes went to host memory within {seconds}.{tenths} s; {waits}"
            )
        }
        (ConditionReason::StateLost, _) => {
            "the node was restarted while the share was suspended, so the state of its programs is lost; new processes wait".to_owned()
        }
        (ConditionReason::Resuming, _) => {
            "the processes are being restored; the share uses its memory again".to_owned()
        }
        (ConditionReason::SuspendRefused | ConditionReason::SuspendFailed, _) => failure
            .unwrap_or("the share cannot be suspended")
            .to_owned(),
        _ => "all processes run".to_owned(),
    }
}

fn is_labelled(claim: &ResourceClaim) -> bool {
    let labels = claim.metadata.labels.as_ref();
    let value = labels.and_then(|labels| labels.get(names::SUSPEND_LABEL));
    value.is_some_and(|value| value == names::SUSPEND)
}
