//! What to do next, as a pure function of what has been observed: no client, no clock of its own.
//!
//! [`Planner`] is fed the changes of watched objects and the outcomes of writes, and yields [`Action`]s. It never
//! acts on half a picture: nothing is decided before [`Planner::synced`], and what is being written counts as taken.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::ask::PodAsk;
use drava_allocator::cluster::{Cluster, ObjectKey, Policies, object_key};
use drava_allocator::explanation::Explanation;
use drava_allocator::node::PodDemand;
use drava_allocator::placement::Placement;
use drava_allocator::pool::PoolProblem;
use drava_api::names;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use crate::allocation;
use crate::notice::{Notice, Notices, Tone, reason};
use crate::unreserved::Unreserved;
use crate::waiting::{self, Phase, Waiting};

/// Placements that are being written at once; the rest waits in order.
const MAX_WRITING: usize = 64;

/// A change of a watched object.
#[derive(Debug, Clone)]
pub enum Change<K> {
    /// It exists in this version.
    Applied(Box<K>),
    /// It is gone.
    Gone(Gone),
}

/// What is left of an object that is gone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Gone {
    /// Namespace; empty for a cluster-wide kind.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// Something to do.
#[derive(Debug)]
pub enum Action {
    /// Write the allocations of a pod's claims, all or none.
    Allocate(Job),
    /// Take an allocation back that nobody has reserved.
    Release(Release),
    /// Tell a user.
    Tell(Notice),
}

/// Allocations of one pod's claims.
#[derive(Debug)]
pub struct Job {
    /// UID of the pod.
    pub pod_uid: String,
    /// The pod, for messages.
    pub pod: ObjectReference,
    /// Node that was chosen.
    pub node: String,
    /// Claims with what is to be written.
    pub writes: Vec<ClaimWrite>,
}

/// One allocation to be written.
#[derive(Debug, Clone)]
pub struct ClaimWrite {
    /// The claim as it is known.
    pub claim: Arc<ResourceClaim>,
    /// What its status gets.
    pub allocation: AllocationResult,
    /// For the event on the claim.
    pub summary: String,
}

/// An allocation to be taken back.
#[derive(Debug)]
pub struct Release {
    /// The claim as it is known.
    pub claim: Arc<ResourceClaim>,
    /// Why, for the log and the event.
    pub why: String,
}

/// How the writing of a [`Job`] ended.
#[derive(Debug)]
pub struct JobOutcome {
    /// UID of the pod.
    pub pod_uid: String,
    /// Claims of the job.
    pub keys: Vec<ObjectKey>,
    /// Claims in their newest known versions.
    pub claims: Vec<ResourceClaim>,
    /// The failure, with what the user needs to know; claims that had been written were released again.
    pub failure: Option<JobFailure>,
}

/// Why a job failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFailure {
    /// For the log and the event.
    pub message: String,
    /// Whether the user must hear of it: not when somebody else just was faster.
    pub tell: bool,
}

/// What the planner is set to.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Policies between nodes and between cards.
    pub policies: Policies,
    /// Schedulers whose pods are served.
    pub schedulers: Vec<String>,
    /// Time after which an allocation that no pod has reserved is taken back.
    pub release_after: Duration,
}

/// The moment of a decision.
#[derive(Debug, Clone)]
pub struct Moment {
    /// For pauses and time-outs.
    pub instant: Instant,
    /// For what is written.
    pub time: Time,
}

/// Yields the UUIDs of shares.
pub type ShareIds = Box<dyn FnMut() -> String + Send>;

/// See the [module](self).
pub struct Planner {
    settings: Settings,
    share_ids: ShareIds,
    cluster: Cluster,
    claims: BTreeMap<ObjectKey, Arc<ResourceClaim>>,
    waiting: BTreeMap<String, Waiting>,
    /// UIDs of the waiting pods that name a claim.
    users: BTreeMap<ObjectKey, BTreeSet<String>>,
    unreserved: BTreeMap<ObjectKey, Unreserved>,
    notices: Notices,
    to_tell: Vec<Notice>,
    left_out: BTreeMap<String, String>,
    writing: usize,
    wake_all: bool,
    synced: bool,
}

impl Planner {
    /// A planner that knows nothing yet.
    #[must_use]
    pub fn new(settings: Settings, share_ids: ShareIds) -> Self {
        Self {
            settings,
            share_ids,
            cluster: Cluster::default(),
            claims: BTreeMap::new(),
            waiting: BTreeMap::new(),
            users: BTreeMap::new(),
            unreserved: BTreeMap::new(),
            notices: Notices::default(),
            to_tell: Vec::new(),
            left_out: BTreeMap::new(),
            writing: 0,
            wake_all: false,
            synced: false,
        }
    }

    /// The full lists of all kinds have been observed: decisions may be taken from now on.
    pub fn set_synced(&mut self) {
        self.synced = true;
    }

    /// Observes a pod.
    pub fn pod(&mut self, change: Change<Pod>) {
        match change {
            Change::Applied(pod) => self.pod_applied(*pod),
            Change::Gone(gone) => self.pod_gone(&gone.uid),
        }
    }

    fn pod_applied(&mut self, pod: Pod) {
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if drava_allocator::cluster::is_finished(&pod) {
            self.pod_gone(&uid);
            return;
        }
        self.cluster.upsert_pod(&pod);
        if !waiting::may_wait(&pod, &self.settings.schedulers) {
            self.stop_waiting(&uid);
            return;
        }
        let keys = claim_keys(&pod);
        match self.waiting.get_mut(&uid) {
            Some(waiting) => {
                let before = claim_keys(&waiting.pod);
                waiting.pod = pod;
                waiting.wake();
                self.unlink(&uid, &before);
            }
            None => {
                self.waiting.insert(uid.clone(), Waiting::new(pod));
            }
        }
        for key in keys {
            self.users.entry(key).or_default().insert(uid.clone());
        }
    }

    fn unlink(&mut self, uid: &str, keys: &[ObjectKey]) {
        for key in keys {
            if let Some(users) = self.users.get_mut(key) {
                users.remove(uid);
                if users.is_empty() {
                    self.users.remove(key);
                }
            }
        }
    }

    fn pod_gone(&mut self, uid: &str) {
        if self.cluster.remove_pod(uid) {
            self.wake_all = true;
        }
        self.stop_waiting(uid);
    }

    fn stop_waiting(&mut self, uid: &str) {
        if let Some(waiting) = self.waiting.remove(uid) {
            self.unlink(uid, &claim_keys(&waiting.pod));
            self.notices.forget(uid);
            self.cluster.forget_pod(uid);
        }
    }

    /// Observes a claim.
    pub fn claim(&mut self, change: Change<ResourceClaim>, now: Instant) {
        match change {
            Change::Applied(claim) => self.claim_applied(*claim, now),
            Change::Gone(gone) => {
                let key = (gone.namespace, gone.name);
                self.claims.remove(&key);
                self.unreserved.remove(&key);
                self.notices.forget(&gone.uid);
                if self.cluster.remove_claim(&key) {
                    self.wake_all = true;
                }
            }
        }
    }

    fn claim_applied(&mut self, claim: ResourceClaim, now: Instant) {
        let key = object_key(&claim.metadata);
        let known = self.claims.get(&key).cloned();
        if known.as_ref().is_some_and(|known| is_older(&claim, known)) {
            return;
        }
        if self.cluster.upsert_claim(&claim) {
            self.wake_all = true;
        }
        if let Some(known) = known
            && is_allocated(&known)
            && !is_allocated(&claim)
            && known.metadata.uid == claim.metadata.uid
        {
            self.allocation_lost(&key, &known, now);
        }
        match Unreserved::observe(&claim, self.unreserved.get(&key), now) {
            Some(unreserved) => self.unreserved.insert(key.clone(), unreserved),
            None => self.unreserved.remove(&key),
        };
        self.claims.insert(key.clone(), Arc::new(claim));
        self.wake_users(&key);
    }

    /// An allocation of ours is gone: by kube-scheduler's PostFilter, or by our own release.
    fn allocation_lost(&mut self, key: &ObjectKey, before: &ResourceClaim, now: Instant) {
        let Some(lost) = self.unreserved.get(key) else {
            return;
        };
        let node = lost.node.clone();
        let users: Vec<String> = self.users_of(key);
        let siblings: BTreeSet<ObjectKey> = users
            .iter()
            .filter_map(|uid| self.waiting.get(uid))
            .flat_map(|waiting| claim_keys(&waiting.pod))
            .filter(|sibling| sibling != key)
            .collect();
        tracing::info!(
            claim = %format!("{}/{}", key.0, key.1),
            uid = before.metadata.uid.as_deref().unwrap_or_default(),
            node,
            "an unreserved allocation was taken back; planning again"
        );
        for uid in users {
            self.cluster.forget_pod(&uid);
            if let Some(waiting) = self.waiting.get_mut(&uid) {
                waiting.avoid(&node, now);
                waiting.pause(now);
                self.to_tell.push(Notice {
                    regarding: waiting.reference(),
                    tone: Tone::Warning,
                    reason: reason::RELEASED,
                    message: format!(
                        "claim {} had devices on node {node}, but the pod was not bound there; planning again, that node \
                         last",
                        key.1
                    ),
                });
            }
        }
        for sibling in siblings {
            if let Some(unreserved) = self.unreserved.get_mut(&sibling) {
                unreserved.release_now("another claim of the pod lost its allocation");
            }
        }
    }

    /// Observes a device class.
    pub fn class(&mut self, change: Change<DeviceClass>) {
        match change {
            Change::Applied(class) => self.cluster.upsert_class(*class),
            Change::Gone(gone) => self.cluster.remove_class(&gone.name),
        }
        self.wake_all = true;
    }

    /// Observes a slice of this driver.
    pub fn slice(&mut self, change: Change<ResourceSlice>) {
        match change {
            Change::Applied(slice) => self.cluster.upsert_slice(&slice),
            Change::Gone(gone) => self.cluster.remove_slice(&gone.name),
        }
        self.wake_all = true;
    }

    /// Observes a node.
    pub fn node(&mut self, change: Change<Node>) {
        let helps = match change {
            Change::Applied(node) => self.cluster.upsert_node(&node),
            Change::Gone(gone) => {
                self.cluster.remove_node(&gone.name);
                for unreserved in self
                    .unreserved
                    .values_mut()
                    .filter(|unreserved| unreserved.node == gone.name)
                {
                    unreserved.release_now("the node is gone");
                }
                true
            }
        };
        if helps {
            self.wake_all = true;
        }
    }

    /// Takes the outcome of a job.
    pub fn written(&mut self, outcome: JobOutcome, now: Instant) {
        self.writing = self.writing.saturating_sub(1);
        for claim in outcome.claims {
            self.claim_applied(claim, now);
        }
        if outcome.failure.is_some() {
            for key in &outcome.keys {
                self.cluster.forget(key);
            }
            self.cluster.forget_pod(&outcome.pod_uid);
            self.wake_all = true;
        }
        let Some(waiting) = self.waiting.get_mut(&outcome.pod_uid) else {
            return;
        };
        match outcome.failure {
            None => waiting.phase = Phase::Due,
            Some(failure) => {
                waiting.pause(now);
                if failure.tell {
                    self.to_tell.push(Notice {
                        regarding: waiting.reference(),
                        tone: Tone::Warning,
                        reason: reason::ALLOCATION_FAILED,
                        message: failure.message,
                    });
                }
            }
        }
    }

    /// A release ended; the claim in its newest version if it is known.
    pub fn released(&mut self, key: &ObjectKey, claim: Option<ResourceClaim>, now: Instant) {
        if let Some(unreserved) = self.unreserved.get_mut(key) {
            unreserved.release_ended(now);
        }
        if let Some(claim) = claim {
            self.claim_applied(claim, now);
        }
    }

    /// What to do now.
    pub fn actions(&mut self, moment: &Moment) -> Vec<Action> {
        if !self.synced {
            return Vec::new();
        }
        let mut actions = Vec::new();
        if std::mem::take(&mut self.wake_all) {
            self.waiting.values_mut().for_each(Waiting::wake);
        }
        for notice in std::mem::take(&mut self.to_tell) {
            actions.extend(self.notices.offer(notice, moment.instant).map(Action::Tell));
        }
        self.report_pools(moment.instant, &mut actions);
        self.release_unreserved(moment.instant, &mut actions);
        for uid in self.due(moment.instant) {
            if self.writing >= MAX_WRITING {
                break;
            }
            self.plan(&uid, moment, &mut actions);
        }
        actions.extend(
            self.notices
                .due(moment.instant)
                .into_iter()
                .map(Action::Tell),
        );
        actions
    }

    /// When [`Self::actions`] has something to do without a new observation.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.synced {
            return None;
        }
        let pauses = self
            .waiting
            .values()
            .filter_map(|waiting| match waiting.phase {
                Phase::Pausing(until) => Some(until),
                Phase::Due | Phase::Parked | Phase::Writing => None,
            });
        let releases = self.unreserved.iter().filter_map(|(key, unreserved)| {
            unreserved.due_at(self.settings.release_after, self.has_users(key))
        });
        pauses.chain(releases).chain(self.notices.next_due()).min()
    }

    /// Waiting pods that are due, in the order in which they are served.
    fn due(&self, now: Instant) -> Vec<String> {
        let mut due: Vec<_> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.is_due(now))
            .map(|(uid, waiting)| (waiting.rank(), uid.clone()))
            .collect();
        due.sort();
        due.into_iter().map(|(_, uid)| uid).collect()
    }

    fn plan(&mut self, uid: &str, moment: &Moment, actions: &mut Vec<Action>) {
        let Some(waiting) = self.waiting.get_mut(uid) else {
            return;
        };
        waiting.phase = Phase::Parked;
        let Some(claims) = resolve(&self.claims, &waiting.pod) else {
            return;
        };
        // Another pod's job writes one of them; its outcome wakes this pod.
        let being_written =
            |claim: &ResourceClaim| self.cluster.is_assumed(&object_key(&claim.metadata));
        if claims.iter().any(|(_, claim)| being_written(claim)) {
            return;
        }
        let named: Vec<(&str, &ResourceClaim)> = claims
            .iter()
            .map(|(name, claim)| (name.as_str(), claim.as_ref()))
            .collect();
        let ask = PodAsk::new(
            &waiting.pod,
            &named,
            &self.cluster.classes,
            &self.cluster.selectors,
        );
        let decision = match ask {
            Ok(ask) if ask.claims.is_empty() => return,
            Ok(mut ask) => {
                ask.avoid = waiting.avoided(moment.instant).cloned().collect();
                self.decide(uid, &mut ask)
            }
            Err(error) => Err(Explanation::from(error)),
        };
        match decision {
            Ok((placement, ask)) => {
                self.start_writing(uid, &placement, &ask, &claims, moment, actions)
            }
            Err(explanation) => self.explain(uid, &explanation, &claims, moment.instant, actions),
        }
    }

    /// Decides for the pod; claims that it shares with other waiting pods are planned for all of them if that works.
    fn decide(&self, uid: &str, ask: &mut PodAsk) -> Result<(Placement, PodAsk), Explanation> {
        let sharers = self.sharers(uid, ask);
        if !sharers.is_empty() {
            let mut joint = ask.clone();
            joint.companions = sharers;
            if let Ok(placement) = self.cluster.decide(&joint, self.settings.policies) {
                return Ok((placement, joint));
            }
        }
        let placement = self.cluster.decide(ask, self.settings.policies)?;
        Ok((placement, ask.clone()))
    }

    /// What the other waiting pods that share a claim with this one need of a node.
    fn sharers(&self, uid: &str, ask: &PodAsk) -> Vec<PodDemand> {
        let others: BTreeSet<String> = ask
            .claims
            .iter()
            .flat_map(|claim| self.users_of(&(claim.id.namespace.clone(), claim.id.name.clone())))
            .filter(|other| other != uid)
            .collect();
        others
            .iter()
            .filter_map(|other| self.waiting.get(other))
            .map(|waiting| PodDemand::of(&waiting.pod))
            .collect()
    }

    fn start_writing(
        &mut self,
        uid: &str,
        placement: &Placement,
        ask: &PodAsk,
        claims: &[(String, Arc<ResourceClaim>)],
        moment: &Moment,
        actions: &mut Vec<Action>,
    ) {
        let Some(waiting) = self.waiting.get_mut(uid) else {
            return;
        };
        let writes: Vec<_> = placement
            .claims
            .iter()
            .filter_map(|placed| {
                let claim = claims
                    .iter()
                    .map(|(_, claim)| claim)
                    .find(|claim| claim.metadata.uid.as_deref() == Some(&placed.claim.uid))?;
                Some(ClaimWrite {
                    claim: Arc::clone(claim),
                    allocation: allocation::build(
                        claim,
                        placed,
                        &placement.node,
                        &self.cluster.classes,
                        moment.time.clone(),
                        &mut self.share_ids,
                    ),
                    summary: allocation::summary(placed, &placement.node),
                })
            })
            .collect();
        waiting.phase = Phase::Writing;
        self.writing += 1;
        self.notices.forget(uid);
        let job = Job {
            pod_uid: uid.to_owned(),
            pod: waiting.reference(),
            node: placement.node.clone(),
            writes,
        };
        self.cluster.assume(placement);
        self.cluster
            .assume_pod(uid, &placement.node, ask.demand.requests.clone());
        actions.push(Action::Allocate(job));
    }

    fn explain(
        &mut self,
        uid: &str,
        explanation: &Explanation,
        claims: &[(String, Arc<ResourceClaim>)],
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let Some(waiting) = self.waiting.get(uid) else {
            return;
        };
        let message = explanation.summary();
        let unallocated = claims
            .iter()
            .map(|(_, claim)| claim)
            .filter(|claim| !is_allocated(claim))
            .map(|claim| claim_reference(claim));
        for regarding in std::iter::once(waiting.reference()).chain(unallocated) {
            let notice = Notice {
                regarding,
                tone: Tone::Warning,
                reason: reason::UNSCHEDULABLE,
                message: message.clone(),
            };
            actions.extend(self.notices.offer(notice, now).map(Action::Tell));
        }
    }

    fn release_unreserved(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let due: Vec<(ObjectKey, String)> = self
            .unreserved
            .iter()
            .filter_map(|(key, unreserved)| {
                let used = self.has_users(key);
                let node_exists = self.cluster.node(&unreserved.node).is_some();
                let why = unreserved.due(now, self.settings.release_after, used, node_exists)?;
                Some((key.clone(), why))
            })
            .collect();
        for (key, why) in due {
            let Some(claim) = self.claims.get(&key) else {
                continue;
            };
            if let Some(unreserved) = self.unreserved.get_mut(&key) {
                unreserved.release_started();
            }
            actions.push(Action::Release(Release {
                claim: Arc::clone(claim),
                why,
            }));
        }
    }

    /// Tells about pools that are left out, once each.
    fn report_pools(&mut self, now: Instant, actions: &mut Vec<Action>) {
        let problems: BTreeMap<String, (Option<String>, String)> = self
            .cluster
            .problems()
            // While a driver publishes, its pool is incomplete for a moment.
            .filter(|(_, _, problem)| !matches!(problem, PoolProblem::Incomplete { .. }))
            .map(|(pool, node, problem)| {
                (
                    pool.to_owned(),
                    (node.map(str::to_owned), problem.to_string()),
                )
            })
            .collect();
        self.left_out.retain(|pool, _| problems.contains_key(pool));
        for (pool, (node, problem)) in problems {
            if self.left_out.insert(pool.clone(), problem.clone()).as_ref() == Some(&problem) {
                continue;
            }
            tracing::warn!(pool, node, problem, "the devices of a pool are left out");
            if let Some(node) = node {
                let notice = Notice {
                    regarding: ObjectReference {
                        api_version: Some("v1".to_owned()),
                        kind: Some("Node".to_owned()),
                        uid: Some(node.clone()),
                        name: Some(node),
                        ..ObjectReference::default()
                    },
                    tone: Tone::Warning,
                    reason: reason::POOL_LEFT_OUT,
                    message: format!("the devices of pool {pool} are not used: {problem}"),
                };
                actions.extend(self.notices.offer(notice, now).map(Action::Tell));
            }
        }
    }

    fn wake_users(&mut self, key: &ObjectKey) {
        for uid in self.users_of(key) {
            if let Some(waiting) = self.waiting.get_mut(&uid) {
                waiting.wake();
            }
        }
    }

    /// UIDs of the waiting pods that name the claim.
    fn users_of(&self, key: &ObjectKey) -> Vec<String> {
        self.users.get(key).into_iter().flatten().cloned().collect()
    }

    fn has_users(&self, key: &ObjectKey) -> bool {
        self.users.contains_key(key)
    }
}

/// The pod's claims by the name that the pod calls them; `None` while one is missing, or is not (yet) the pod's.
fn resolve(
    claims: &BTreeMap<ObjectKey, Arc<ResourceClaim>>,
    pod: &Pod,
) -> Option<Vec<(String, Arc<ResourceClaim>)>> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    waiting::claims(pod)
        .map(|(name, object)| {
            let claim = claims.get(&(namespace.clone(), object?.to_owned()))?;
            let usable = claim.metadata.deletion_timestamp.is_none() && belongs_to(claim, pod);
            usable.then(|| (name.to_owned(), Arc::clone(claim)))
        })
        .collect()
}

/// A claim that was made for a pod is for that pod alone; others are for whoever names them.
fn belongs_to(claim: &ResourceClaim, pod: &Pod) -> bool {
    let owners = claim
        .metadata
        .owner_references
        .as_deref()
        .unwrap_or_default();
    owners
        .iter()
        .filter(|owner| owner.kind == "Pod" && owner.controller == Some(true))
        .all(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
}

fn claim_keys(pod: &Pod) -> Vec<ObjectKey> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    waiting::claims(pod)
        .filter_map(|(_, object)| Some((namespace.clone(), object?.to_owned())))
        .collect()
}

fn is_allocated(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .is_some_and(|status| status.allocation.is_some())
}

/// Whether `claim` is an older version than `known`; resource versions are ordered numbers (KEP-5504).
fn is_older(claim: &ResourceClaim, known: &ResourceClaim) -> bool {
    let version = |claim: &ResourceClaim| {
        claim
            .metadata
            .resource_version
            .as_deref()?
            .parse::<u64>()
            .ok()
    };
    matches!((version(claim), version(known)), (Some(new), Some(old)) if new < old)
}

/// Reference to a claim for an event.
#[must_use]
pub fn claim_reference(claim: &ResourceClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("resource.k8s.io/v1".to_owned()),
        kind: Some("ResourceClaim".to_owned()),
        name: claim.metadata.name.clone(),
        namespace: claim.metadata.namespace.clone(),
        uid: claim.metadata.uid.clone(),
        resource_version: claim.metadata.resource_version.clone(),
        field_path: None,
    }
}

/// UID of the pod for which this controller has allocated the claim.
#[must_use]
pub fn allocated_for(claim: &ResourceClaim) -> Option<&str> {
    claim
        .metadata
        .annotations
        .as_ref()?
        .get(names::ALLOCATED_FOR_ANNOTATION)
        .map(String::as_str)
}

#[cfg(test)]
mod tests;
