//! The planner: decides what to do next. A pure function of what has been observed; no client, no clock.
//!
//! [`Planner`] receives the changes of watched objects and the outcomes of writes, and returns [`Action`]s.
//!
//! Invariants: no decision before [`Planner::set_synced`]; allocations in flight count as allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::cluster::{Cluster, PoolChange};
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::pod::rejection;
use drava_api::listed::Change;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, ObjectReference, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use tokio::time::Instant;

use crate::action::{Action, AllocationOutcome, Release, ReleaseOutcome};
use crate::event::{PendingEvent, ReleaseReason};
use crate::event_deduplicator::EventDeduplicator;
use crate::excluded_pools::ExcludedPools;
use crate::ledger::{Ledger, Observed, Origin, Owner, Reservation, Users};
use crate::live_pods::LivePods;
use crate::pod_group::PodGroups;
use crate::queue::PodQueue;
use crate::queue::pending_pod::Phase;
use crate::quota::QuotaStatuses;
use crate::{claim, gang, pod};

mod decision;
mod demand;
mod ended_pods;
mod eviction;
mod gate;
mod incomplete_gang;
mod metrics;
mod missing_claims;
mod overcommit;
mod pod_conditions;
mod pod_group;
mod policy;
mod progress;
mod quota;
mod rejections;
mod room;
mod round;
mod scheduler_activity;
mod settings;
mod unreadable;
mod volumes;

use ended_pods::EndedPods;
use missing_claims::MissingClaims;
use overcommit::Overcommits;
use pod_conditions::ConditionsInFlight;
use policy::PolicyStatuses;
use progress::SuspendedDecisions;
use rejections::Rejections;
use round::{DecisionCount, Refresh, Round};
use unreadable::UnreadableObjects;

pub use settings::{DecisionTime, Settings};

/// Maximum number of allocation jobs in flight.
const MAX_IN_FLIGHT: usize = 64;

/// Generates the UUIDs of shares.
pub type ShareIds = Box<dyn FnMut() -> String + Send>;

/// See the [module](self).
pub struct Planner {
    settings: Settings,
    share_ids: ShareIds,
    cluster: Cluster,
    ledger: Ledger,
    queue: PodQueue,
    live_pods: LivePods,
    pod_groups: PodGroups,
    /// Pods whose eviction or release for another pod was started, until they are observed to be deleted, or this time;
    /// `None` while the eviction is in flight.
    evicted: BTreeMap<String, Option<Instant>>,
    /// UIDs of the pods for which an eviction is in flight: they choose no other victims.
    preemptors: BTreeSet<String>,
    ended_pods: EndedPods,
    /// Pods that could not be evicted, and are not tried again before this time.
    protected: BTreeMap<String, Instant>,
    /// Pods whose minimum runtime ends at this time.
    in_minimum_runtime: BTreeMap<String, Instant>,
    /// Pods for which no other is evicted before this time.
    eviction_delays: BTreeMap<String, Instant>,
    deduplicator: EventDeduplicator,
    /// Events of the current state; they pass the deduplicator.
    state_events: Vec<PendingEvent>,
    /// Pods whose condition says that their claims are not allocated, although they are.
    newly_allocated: Vec<ObjectReference>,
    conditions: ConditionsInFlight,
    /// Events of finished writes; also those that end last are published.
    write_events: Vec<PendingEvent>,
    excluded_pools: ExcludedPools,
    unreadable: UnreadableObjects,
    /// Claim templates.
    templates: BTreeSet<ObjectKey>,
    missing_claims: MissingClaims,
    /// Events to publish when the job in flight succeeds, by the UID of its first pod.
    in_flight: BTreeMap<String, Vec<PendingEvent>>,
    /// UIDs of the pods whose gate is being removed.
    gates_in_flight: BTreeSet<String>,
    quota_statuses: QuotaStatuses,
    policy_statuses: PolicyStatuses,
    /// Namespaces in which claims have released devices since the last decisions.
    released_in: BTreeSet<String>,
    activate_all: bool,
    /// Whether something has changed that helps none of the pods that wait, but may be the reason of one.
    are_reasons_outdated: bool,
    refresh: Refresh,
    /// Whether kube-scheduler has shown a sign of life since the last decisions.
    is_scheduler_active: bool,
    rejections: Rejections,
    suspended_decisions: SuspendedDecisions,
    /// Reservations that are lifted while pods ahead of their owners are decided.
    lifted: Vec<(Owner, Reservation)>,
    /// Owners whose lifted reservation was taken by a pod ahead, until they are decided again.
    outdated: BTreeSet<Owner>,
    /// Whether the owner of a reservation was decided and has none any longer: others may use the devices.
    has_room_ended: bool,
    round: Round,
    decisions: DecisionCount,
    overcommits: Overcommits,
    /// Number of unreserved allocations of this controller that kube-scheduler has released.
    scheduler_releases: u64,
    is_synced: bool,
}

impl Planner {
    /// Creates a planner without observations.
    #[must_use]
    pub fn new(settings: Settings, share_ids: ShareIds) -> Self {
        let ledger = Ledger::new(settings.release_after);
        Self {
            settings,
            share_ids,
            cluster: Cluster::default(),
            ledger,
            queue: PodQueue::default(),
            live_pods: LivePods::default(),
            pod_groups: PodGroups::default(),
            evicted: BTreeMap::new(),
            preemptors: BTreeSet::new(),
            ended_pods: EndedPods::default(),
            protected: BTreeMap::new(),
            in_minimum_runtime: BTreeMap::new(),
            eviction_delays: BTreeMap::new(),
            deduplicator: EventDeduplicator::default(),
            state_events: Vec::new(),
            newly_allocated: Vec::new(),
            conditions: ConditionsInFlight::default(),
            write_events: Vec::new(),
            excluded_pools: ExcludedPools::default(),
            unreadable: UnreadableObjects::new(),
            templates: BTreeSet::new(),
            missing_claims: MissingClaims::default(),
            in_flight: BTreeMap::new(),
            gates_in_flight: BTreeSet::new(),
            quota_statuses: QuotaStatuses::default(),
            policy_statuses: PolicyStatuses::default(),
            released_in: BTreeSet::new(),
            activate_all: false,
            are_reasons_outdated: false,
            refresh: Refresh::default(),
            is_scheduler_active: false,
            rejections: Rejections::default(),
            suspended_decisions: SuspendedDecisions::default(),
            lifted: Vec::new(),
            outdated: BTreeSet::new(),
            has_room_ended: false,
            round: Round::default(),
            decisions: DecisionCount::default(),
            overcommits: Overcommits::default(),
            scheduler_releases: 0,
            is_synced: false,
        }
    }

    /// Allows decisions, after the complete lists of all kinds have been observed.
    pub fn set_synced(&mut self) {
        self.is_synced = true;
    }

    /// Observes a pod.
    pub fn pod(&mut self, change: Change<Pod>) {
        match change {
            Change::Applied(pod) => self.pod_applied(*pod),
            Change::Deleted(pod) => self.pod_removed(&pod.uid),
        }
    }

    fn pod_applied(&mut self, mut pod: Pod) {
        self.pod_groups.resolve(&mut pod);
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if drava_allocator::cluster::is_finished(&pod) {
            if self.live_pods.get(&uid).is_none() {
                self.ended_pods.insert_finished(&uid, &pod);
            }
            self.pod_removed(&uid);
            return;
        }
        let is_newly_bound = self.cluster.upsert_pod(&pod);
        self.observe_condition(&uid, &pod);
        let is_newly_rejected = self.is_newly_rejected(&uid, &pod);
        self.note_scheduler_activity(&pod, is_newly_bound, is_newly_rejected);
        let is_new = self.live_pods.get(&uid).is_none();
        self.live_pods.upsert(&uid, &pod);
        if is_newly_bound {
            // Its allocation was to be released for another pod.
            self.evicted.remove(&uid);
            self.queue.neighbors_changed();
            // It can be evicted from now on, if it holds something.
            if self.settings.preemption && self.live_pods.get(&uid).is_some() {
                self.queue.activate_above(pod::priority(&pod));
            }
        }
        let gang = gang::name_of(&pod).filter(|_| is_new);
        if pod::is_pending(&pod) {
            let keys = pod::claim_keys(&pod);
            self.queue.upsert(&uid, pod);
            self.review_gate(&uid);
            if is_newly_rejected {
                for key in keys {
                    self.ledger.users_changed(&key);
                }
            }
        } else {
            self.dequeue(&uid);
        }
        if let Some(gang) = gang {
            self.queue.activate_gang(&gang);
        }
    }

    fn pod_removed(&mut self, uid: &str) {
        self.conditions.forget(uid);
        self.evicted.remove(uid);
        self.deduplicator.forget(uid);
        self.protected.remove(uid);
        self.in_minimum_runtime.remove(uid);
        self.eviction_delays.remove(uid);
        if let Some(node) = self.cluster.remove_pod(uid) {
            self.queue.resources_freed(&node);
            self.queue.neighbors_changed();
        }
        self.dequeue(uid);
        let mut gang = None;
        if let Some(pod) = self.live_pods.get(uid) {
            gang.clone_from(&pod.gang);
            if pod.is_bound && !pod.claims.is_empty() {
                self.ended_pods.insert(uid, pod.claims.clone());
            }
        }
        self.live_pods.remove(uid);
        if let Some(gang) = gang {
            self.queue.activate_gang(&gang);
        }
    }

    fn dequeue(&mut self, uid: &str) {
        let keys = self
            .queue
            .get(uid)
            .map(|pending| pod::claim_keys(&pending.pod));
        if self.queue.remove(uid) {
            for key in keys.into_iter().flatten() {
                self.ledger.users_changed(&key);
            }
            self.reservation_unneeded(uid);
            self.missing_claims.remove(uid);
            self.suspended_decisions.forget(uid);
            self.deduplicator.forget(uid);
            self.cluster.forget_pod(uid);
        }
    }

    /// Observes a claim.
    pub fn claim(&mut self, change: Change<ResourceClaim>, now: Instant) {
        match change {
            Change::Applied(claim) => self.claim_applied(*claim, Origin::Watch, now),
            Change::Deleted(claim) => {
                let key = (claim.namespace, claim.name);
                self.ledger.remove(&key);
                self.queue.activate_users(&key);
                self.missing_claims.claim_gone(&key.0, now);
                self.deduplicator.forget(&claim.uid);
                if self.cluster.remove_claim(&key) {
                    self.released_in.insert(key.0);
                }
            }
        }
    }

    fn claim_applied(&mut self, claim: ResourceClaim, origin: Origin, now: Instant) {
        let key = object_key(&claim.metadata);
        if self.cluster.upsert_claim(&claim) {
            self.released_in.insert(key.0.clone());
        }
        let is_releasing = self.ledger.is_in_flight(&key);
        match self.ledger.observe(claim, origin, now) {
            Observed::Outdated => return,
            Observed::Newest => {}
            Observed::Reserved => self.is_scheduler_active |= self.is_synced,
            Observed::Released(lost) => {
                if origin == Origin::Watch && !is_releasing {
                    self.scheduler_releases += 1;
                }
                let reason = lost.release_reason();
                if let Some(ReleaseReason::Preempted { by, why }) = reason {
                    self.allocation_preempted(&key, &lost.node, (by, why));
                } else {
                    self.is_scheduler_active = true;
                    let timeout = match reason {
                        Some(ReleaseReason::Unreserved { after, .. }) => Some(*after),
                        _ => None,
                    };
                    self.allocation_lost(&key, &lost.node, timeout, now);
                }
            }
        }
        self.queue.activate_users(&key);
        for uid in self.queue.users_of(&key) {
            self.review_gate(&uid);
        }
    }

    /// A write has ended with the claim in this version. The claim of a write that ends after its deletion is ignored.
    fn claim_written(&mut self, claim: ResourceClaim, now: Instant) {
        let known = self.ledger.claim(&object_key(&claim.metadata));
        if known.is_some_and(|known| known.metadata.uid == claim.metadata.uid) {
            self.claim_applied(claim, Origin::Write, now);
        }
    }

    /// An unreserved allocation was released for another pod. Its own pod waits again, for any node.
    fn allocation_preempted(&mut self, key: &ObjectKey, node: &str, by: (&str, &str)) {
        for uid in self.queue.users_of(key) {
            self.cluster.forget_pod(&uid);
            if let Some(pending) = self.queue.get(&uid) {
                self.state_events.push(PendingEvent::allocation_preempted(
                    pod::reference(&pending.pod),
                    &format!("{}/{}", key.0, key.1),
                    node,
                    by,
                ));
            }
        }
    }

    /// An unreserved allocation of this controller was released, by kube-scheduler's PostFilter or by this controller, after
    /// this time-out if there is one.
    fn allocation_lost(
        &mut self,
        key: &ObjectKey,
        node: &str,
        timeout: Option<Duration>,
        now: Instant,
    ) {
        let users: Vec<String> = self.queue.users_of(key);
        let siblings: BTreeSet<ObjectKey> = users
            .iter()
            .filter_map(|uid| self.queue.get(uid))
            .flat_map(|pending| pod::claim_keys(&pending.pod))
            .filter(|sibling| sibling != key)
            .collect();
        for uid in users {
            self.cluster.forget_pod(&uid);
            if let Some(pending) = self.queue.get_mut(&uid) {
                match timeout {
                    Some(after) => pending.not_bound(node, after, now),
                    None => pending.avoid(node, now),
                }
                self.state_events.push(PendingEvent::allocation_lost(
                    pod::reference(&pending.pod),
                    &format!("{}/{}", key.0, key.1),
                    node,
                ));
            }
        }
        for sibling in siblings {
            self.ledger
                .release_now(&sibling, ReleaseReason::SiblingReleased);
        }
    }

    /// Observes a device class.
    pub fn class(&mut self, change: Change<DeviceClass>) {
        match change {
            Change::Applied(class) => self.activate_all |= self.cluster.upsert_class(*class),
            Change::Deleted(class) => {
                self.cluster.remove_class(&class.name);
                self.activate_all = true;
            }
        }
    }

    /// Observes a slice of this driver.
    pub fn slice(&mut self, change: Change<ResourceSlice>) {
        let effect = match change {
            Change::Applied(slice) => self.cluster.upsert_slice(&slice),
            Change::Deleted(slice) => self.cluster.remove_slice(&slice.name),
        };
        match effect {
            PoolChange::None => {}
            PoolChange::Unusable => self.are_reasons_outdated = true,
            PoolChange::Usable(node) => {
                self.queue.devices_changed(&node);
                self.are_reasons_outdated = true;
            }
        }
    }

    /// Observes a DeviceTaintRule.
    pub fn taint_rule(&mut self, change: Change<DeviceTaintRule>) {
        self.activate_all |= match change {
            Change::Applied(rule) => self.cluster.upsert_taint_rule(&rule),
            Change::Deleted(rule) => self.cluster.remove_taint_rule(&rule.name),
        };
    }

    /// Observes a node.
    pub fn node(&mut self, change: Change<Node>) {
        match change {
            Change::Applied(node) => {
                let name = node.metadata.name.as_deref().unwrap_or_default();
                let is_new = self.cluster.node(name).is_none();
                if self.cluster.upsert_node(&node) {
                    self.queue.node_changed(name, is_new);
                    self.are_reasons_outdated = true;
                }
            }
            Change::Deleted(node) => {
                self.queue.node_deleted(&node.name);
                self.cluster.remove_node(&node.name);
                self.ledger.node_deleted(&node.name);
                // Events reference a node by its name.
                self.deduplicator.forget(&node.name);
                self.are_reasons_outdated = true;
            }
        }
    }

    /// Observes the outcome of an allocation job.
    pub fn allocation_finished(&mut self, outcome: AllocationOutcome, now: Instant) {
        for claim in outcome.claims {
            self.claim_written(claim, now);
        }
        self.ledger.writing_ended(&outcome.keys, now);
        let first = outcome.pods.first();
        let events = first.and_then(|uid| self.in_flight.remove(uid));
        match &outcome.failure {
            None => self.write_events.extend(events.unwrap_or_default()),
            Some(_) => {
                for key in &outcome.keys {
                    self.cluster.forget(key);
                    self.released_in.insert(key.0.clone());
                }
            }
        }
        for uid in &outcome.pods {
            if outcome.failure.is_some() {
                self.cluster.forget_pod(uid);
            }
            self.review_gate(uid);
            let Some(pending) = self.queue.get_mut(uid) else {
                continue;
            };
            match &outcome.failure {
                None => pending.phase = Phase::Active,
                Some(failure) => {
                    pending.is_placed = false;
                    pending.back_off(now);
                    if failure.is_reportable {
                        self.state_events.push(PendingEvent::allocation_failed(
                            pod::reference(&pending.pod),
                            failure.message.clone(),
                        ));
                    }
                }
            }
        }
    }

    /// Observes the outcome of a release.
    pub fn release_finished(&mut self, outcome: ReleaseOutcome, now: Instant) {
        let key = object_key(&outcome.release.claim.metadata);
        self.ledger.release_ended(&key, now);
        for uid in self.queue.users_of(&key) {
            self.evicted.remove(&uid);
            self.review_gate(&uid);
        }
        if let Some(claim) = outcome.claim {
            if !claim::is_allocated(&claim) {
                self.write_events.push(PendingEvent::released(
                    claim::reference(&claim),
                    &outcome.release.reason,
                ));
            }
            self.claim_written(*claim, now);
        }
    }

    /// An event could not be published.
    pub fn event_failed(&mut self, event: PendingEvent, now: Instant) {
        self.deduplicator.failed(event, now);
    }

    /// Returns when a pending pod was created.
    #[must_use]
    pub fn created(&self, pod_uid: &str) -> Option<Timestamp> {
        let created = &self.queue.get(pod_uid)?.pod.metadata.creation_timestamp;
        created.as_ref().map(|created| created.0)
    }

    /// Returns the unpublished events of finished writes.
    pub fn into_write_events(self) -> impl Iterator<Item = PendingEvent> {
        let evictions = self.deduplicator.into_evictions();
        self.write_events.into_iter().chain(evictions)
    }

    /// Returns what to do now.
    pub fn actions(&mut self, time: &DecisionTime) -> Vec<Action> {
        if !self.is_synced {
            return Vec::new();
        }
        let released_in = std::mem::take(&mut self.released_in);
        self.activate_all |= self
            .refresh
            .is_due(std::mem::take(&mut self.are_reasons_outdated), time.instant);
        if std::mem::take(&mut self.activate_all) {
            self.queue.activate_all();
        } else if !released_in.is_empty() {
            self.activate_after_release(&released_in);
        }
        let mut actions = Vec::new();
        let mut events = std::mem::take(&mut self.write_events);
        events.append(&mut self.state_events);
        events.extend(self.excluded_pools.new_events(&self.cluster));
        events.extend(self.review_overcommits());
        for event in events {
            let event = self.deduplicator.filter(event, time.instant);
            actions.extend(event.map(Action::PublishEvent));
        }
        self.remove_due_gates(time, &mut actions);
        self.release_unreserved(time.instant, &mut actions);
        self.end_incomplete_gangs(time.instant, &mut actions);
        self.review_reservations(time);
        self.review_missing_claims(time.instant);
        self.decide_due(time, &mut actions);
        self.write_quota_statuses(time, &mut actions);
        self.write_policy_statuses(time, &mut actions);
        let delayed = self.deduplicator.due(time.instant);
        actions.extend(delayed.into_iter().map(Action::PublishEvent));
        self.write_changed_conditions(time, &mut actions);
        actions
    }

    /// Returns when [`Self::actions`] has to be called without a new observation.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.is_synced {
            return None;
        }
        let next_release = self.ledger.next_release();
        next_release
            .into_iter()
            .chain(self.queue.next_backoff_end())
            .chain(self.missing_claims.next_due())
            .chain(self.next_review())
            .chain(self.next_gang_end())
            .chain(self.deduplicator.next_due())
            .chain(self.quota_statuses.next_due())
            .chain(self.policy_statuses.next_due())
            .chain(self.round.resumes_at())
            .chain(self.refresh.next())
            .min()
    }

    fn release_unreserved(&mut self, now: Instant, actions: &mut Vec<Action>) {
        if std::mem::take(&mut self.is_scheduler_active) {
            self.ledger.scheduler_active(now);
        }
        let (queue, cluster) = (&self.queue, &self.cluster);
        let due = self.ledger.start_due_releases(now, |key, node| {
            (users_of(queue, key), cluster.node(node).is_some())
        });
        actions.extend(
            due.into_iter()
                .map(|(claim, reason)| Action::Release(Release { claim, reason })),
        );
    }
}

/// Returns which pending pods reference a claim: those closest to their scheduler.
fn users_of(queue: &PodQueue, key: &ObjectKey) -> Users {
    let uids = queue.users_of(key);
    let pending = uids.iter().filter_map(|uid| queue.get(uid));
    let users = pending.map(|pending| match pod::has_allocation_gate(&pending.pod) {
        true if pending.is_complete => Users::Complete,
        true => Users::Incomplete,
        false if rejection(&pending.pod).is_none() => Users::Untried,
        false => Users::Rejected,
    });
    users.max().unwrap_or(Users::Gone)
}

#[cfg(test)]
mod tests;
