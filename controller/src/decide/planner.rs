//! The planner: decides what to do next. A pure function of what has been observed; no client, no clock.
//!
//! [`Planner`] receives [`Observation`]s of the watches, returns [`Action`]s, and receives their [`Outcome`]s.
//!
//! Its state has four owners, of which each knows only those before it: the world (what is true), the commitments (what
//! is promised), the backlog (who waits) and the reporter (what is said).
//!
//! Invariants: no decision before the complete lists of all kinds; allocations in flight count as allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::Policies;
use drava_api::listed::{Change, Unreadable};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use crate::action::event::{PendingEvent, ReleaseReason};
use crate::action::{Action, AllocationOutcome, Outcome, ReleaseOutcome};
use crate::decide::ledger::{Observed, Origin};
use crate::decide::queue::pending_pod::Phase;
use crate::operate::metrics::ClusterMetrics;
use crate::pods::{claim, pod};
use crate::watch::{Kind, Observation};

mod backlog;
mod commitments;
mod companions;
mod decision;
mod demand;
mod ended_pods;
mod eviction;
mod gang;
mod gate;
mod missing_claims;
mod overcommit;
mod pod_conditions;
mod policy;
mod progress;
mod quota;
mod rejections;
mod reporter;
mod reserved_devices;
mod room;
mod round;
mod suspension;
mod wake;
mod world;

use backlog::Backlog;
use commitments::Commitments;
use reporter::Reporter;
use wake::Wake;
use world::World;

/// Maximum number of allocation jobs in flight.
const MAX_IN_FLIGHT: usize = 64;

/// Generates the UUIDs of shares.
pub type ShareIds = Box<dyn FnMut() -> String + Send>;

/// Settings of the planner.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Policies by which nodes and GPUs are scored.
    pub policies: Policies,
    /// Names of the schedulers whose pods are served.
    pub schedulers: Vec<String>,
    /// Time after which an unreserved allocation is released.
    pub release_after: Duration,
    /// Whether pods are evicted for pods of higher priority.
    pub preemption: bool,
}

/// Time of a decision.
#[derive(Debug, Clone)]
pub struct DecisionTime {
    /// For backoffs and deadlines.
    pub instant: Instant,
    /// For written timestamps.
    pub time: Time,
    /// Returns whether the time slice that started at `instant` is over. The decisions that are left are due at once, after
    /// other inputs have had their turn.
    pub is_slice_over: fn(Instant) -> bool,
}

/// See the [module](self).
pub struct Planner {
    world: World,
    commitments: Commitments,
    backlog: Backlog,
    reporter: Reporter,
    share_ids: ShareIds,
}

impl Planner {
    /// Creates a planner without observations.
    #[must_use]
    pub fn new(settings: Settings, share_ids: ShareIds) -> Self {
        Self {
            commitments: Commitments::new(settings.release_after),
            world: World::new(settings),
            backlog: Backlog::default(),
            reporter: Reporter::default(),
            share_ids,
        }
    }

    /// Allows decisions, as if the complete lists of all kinds had been observed.
    pub fn set_synced(&mut self) {
        self.world.unlisted.clear();
    }

    /// Returns whether the complete lists of all kinds have been observed on which decisions depend.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.world.is_synced()
    }

    /// Returns all kinds, each with whether its complete list has been observed.
    #[must_use]
    pub fn synced_kinds(&self) -> Vec<(Kind, bool)> {
        let is_synced = |kind| (kind, !self.world.unlisted.contains(&kind));
        Kind::ALL.map(is_synced).into()
    }

    /// Observes what a watch has delivered.
    pub fn observe(&mut self, observation: Observation, now: Instant) {
        match observation {
            Observation::Pod(change) if !self.world.knows_pod_groups() => {
                self.world.early_pods.push(change);
            }
            Observation::Pod(change) => self.pod(change),
            Observation::Claim(change) => self.claim(change, now),
            Observation::Template(change) => self.template(change),
            Observation::Class(change) => self.class(change),
            Observation::Slice(change) => self.slice(change),
            Observation::Node(change) => self.node(change),
            Observation::TaintRule(change) => self.backlog.wake(self.world.taint_rule(change)),
            Observation::Quota(change) => self.quota(change),
            Observation::Policy(change) => {
                self.policy(change);
                self.commitments.suspensions.policy_changed(now);
            }
            Observation::Leader(change) => self.leader(change),
            Observation::Namespace(change) => {
                self.namespace(change);
                self.commitments.suspensions.selection_changed(now);
            }
            Observation::VolumeClaim(change) => self.world.volume(change),
            Observation::Volume(change) => self.world.volume(change),
            Observation::StorageClass(change) => self.world.volume(change),
            Observation::PodGroup(change) => self.pod_group(change),
            Observation::Unreadable(kind, object) => self.unreadable(kind, &object),
            Observation::Readable(kind, key) => self.readable(kind, key),
            Observation::Listed(kind) => {
                self.world.unlisted.remove(&kind);
                if self.world.knows_pod_groups() {
                    for change in std::mem::take(&mut self.world.early_pods) {
                        self.pod(change);
                    }
                }
            }
            // The watch restarts by itself.
            Observation::WatchFailed(..) => {}
        }
    }

    /// Observes what has become of an action.
    pub fn finished(&mut self, outcome: Outcome, now: Instant) {
        match outcome {
            Outcome::Allocation(outcome) => self.allocation_finished(outcome, now),
            Outcome::Release(outcome) => self.release_finished(outcome, now),
            Outcome::Eviction(outcome) => self.eviction_finished(*outcome, now),
            Outcome::GateRemoval(outcome) => self.gate_removed(outcome, now),
            Outcome::Suspension(outcome) => self.suspension_written(outcome, now),
            Outcome::QuotaStatus(outcome) => self.quota_status_written(outcome, now),
            Outcome::PolicyStatus(outcome) => self.policy_status_written(outcome, now),
            Outcome::LeaderStatus(outcome) => self.leader_status_written(outcome, now),
            Outcome::EventFailed(event) => self.event_failed(*event, now),
        }
    }

    /// Observes a pod.
    pub fn pod(&mut self, change: Change<Pod>) {
        match change {
            Change::Applied(pod) => self.pod_applied(*pod),
            Change::Deleted(pod) => self.pod_removed(&pod.uid),
        }
    }

    fn pod_applied(&mut self, mut pod: Pod) {
        self.world.pod_groups.resolve(&mut pod);
        let uid = pod.metadata.uid.clone().unwrap_or_default();
        if drava_allocator::cluster::is_finished(&pod) {
            if self.world.live_pods.get(&uid).is_none() {
                self.world.ended_pods.insert_finished(&uid, &pod);
            }
            self.pod_removed(&uid);
            return;
        }
        let is_newly_bound = self.world.cluster.upsert_pod(&pod);
        self.observe_condition(&uid, &pod);
        let is_newly_rejected = self.backlog.is_newly_rejected(&uid, &pod);
        self.commitments.is_scheduler_active |=
            self.world
                .shows_scheduler(&pod, is_newly_bound, is_newly_rejected);
        let is_new = self.world.live_pods.get(&uid).is_none();
        self.world.live_pods.upsert(&uid, &pod);
        self.note_running(&uid);
        if is_newly_bound {
            // Its allocation was to be released for another pod.
            self.commitments.evicted.remove(&uid);
            self.backlog.wake(Wake::Bound);
            // It can be evicted from now on, if it holds something.
            if self.world.settings.preemption && self.world.live_pods.get(&uid).is_some() {
                self.backlog.wake(Wake::Above(pod::priority(&pod)));
            }
        }
        let gang = crate::pods::gang::name_of(&pod).filter(|_| is_new);
        if pod::is_pending(&pod) {
            let keys = pod::claim_keys(&pod);
            self.backlog.queue.upsert(&uid, pod);
            self.review_gate(&uid);
            if is_newly_rejected {
                for key in keys {
                    self.commitments.ledger.users_changed(&key);
                }
            }
        } else {
            // Jobs keep their deleted pods by a finalizer.
            if pod.metadata.deletion_timestamp.is_some()
                && drava_allocator::pod::node(&pod).is_none()
            {
                self.backlog.queue.keep_age(&uid);
            }
            self.dequeue(&uid);
        }
        if let Some(gang) = gang {
            self.backlog.wake(Wake::Gang(gang));
        }
        self.note_holder(&uid);
    }

    fn pod_removed(&mut self, uid: &str) {
        self.reporter.conditions.forget(uid);
        self.reporter.running.forget(uid);
        self.commitments.evicted.remove(uid);
        self.reporter.deduplicator.forget(uid);
        self.backlog.forget_limits(uid);
        if let Some(node) = self.world.cluster.remove_pod(uid) {
            self.backlog.wake(Wake::Ended { node });
        }
        self.backlog.queue.keep_age(uid);
        self.dequeue(uid);
        let mut gang = None;
        if let Some(pod) = self.world.live_pods.get(uid) {
            gang.clone_from(&pod.gang);
            if pod.is_bound && !pod.claims.is_empty() {
                self.world.ended_pods.insert(uid, pod.claims.clone());
            }
        }
        self.world.live_pods.remove(uid);
        if let Some(gang) = gang {
            self.backlog.wake(Wake::Gang(gang));
        }
    }

    fn dequeue(&mut self, uid: &str) {
        let keys = self
            .backlog
            .queue
            .get(uid)
            .map(|pending| pod::claim_keys(&pending.pod));
        if self.backlog.queue.remove(uid) {
            for key in keys.into_iter().flatten() {
                self.commitments.ledger.users_changed(&key);
            }
            self.reservation_unneeded(uid);
            self.backlog.missing_claims.remove(uid);
            self.backlog.suspended_decisions.forget(uid);
            self.reporter.deduplicator.forget(uid);
            self.world.cluster.forget_pod(uid);
        }
    }

    /// Observes a claim.
    pub fn claim(&mut self, change: Change<ResourceClaim>, now: Instant) {
        match change {
            Change::Applied(claim) => self.claim_applied(*claim, Origin::Watch, now),
            Change::Deleted(claim) => {
                let key = (claim.namespace, claim.name);
                self.commitments.ledger.remove(&key);
                self.backlog.companions.remove(&key);
                self.commitments.suspensions.remove(&key);
                self.backlog.wake(Wake::Users(key.clone()));
                self.backlog.missing_claims.claim_gone(&key.0, now);
                self.reporter.deduplicator.forget(&claim.uid);
                self.world.claim_removed(&key);
            }
        }
    }

    fn claim_applied(&mut self, claim: ResourceClaim, origin: Origin, now: Instant) {
        let key = object_key(&claim.metadata);
        let counted = self.commitments.suspensions.counted(&claim);
        self.world.claim(&counted);
        let is_releasing = self.commitments.ledger.is_in_flight(&key);
        let is_companion = claim::base(&claim).is_some();
        match self.commitments.ledger.observe(claim, origin, now) {
            Observed::Outdated => return,
            Observed::Newest => {}
            Observed::Reserved => self.commitments.is_scheduler_active |= self.world.is_synced(),
            Observed::Released(lost) => {
                if origin == Origin::Watch && !is_releasing {
                    self.reporter.scheduler_releases += 1;
                }
                let reason = lost.release_reason();
                if let Some(ReleaseReason::Preempted { by, why }) = reason {
                    self.allocation_preempted(&key, &lost.node, (by, why));
                } else {
                    self.commitments.is_scheduler_active = true;
                    let timeout = match reason {
                        Some(ReleaseReason::Unreserved { after, .. }) => Some(*after),
                        _ => None,
                    };
                    self.allocation_lost(&key, &lost.node, timeout, now);
                }
            }
        }
        match self.commitments.ledger.claim(&key) {
            Some(newest) if is_companion => self.backlog.companions.observe(newest, now),
            Some(_) | None => self.backlog.companions.remove(&key),
        }
        self.suspension_observed(&key, now);
        self.note_held(&key);
        self.backlog.wake(Wake::Users(key.clone()));
        for uid in self.backlog.queue.users_of(&key) {
            self.review_gate(&uid);
        }
    }

    /// A write has ended with the claim in this version. The claim of a write that ends after its deletion is ignored.
    fn claim_written(&mut self, claim: ResourceClaim, now: Instant) {
        let known = self.commitments.ledger.claim(&object_key(&claim.metadata));
        if known.is_some_and(|known| known.metadata.uid == claim.metadata.uid) {
            self.claim_applied(claim, Origin::Write, now);
        }
    }

    /// An unreserved allocation was released for another pod. Its own pod waits again, for any node.
    fn allocation_preempted(&mut self, key: &ObjectKey, node: &str, by: (&str, &str)) {
        for uid in self.backlog.queue.users_of(key) {
            self.world.cluster.forget_pod(&uid);
            if let Some(pending) = self.backlog.queue.get(&uid) {
                self.reporter
                    .state_events
                    .push(PendingEvent::allocation_preempted(
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
        let users: Vec<String> = self.backlog.queue.users_of(key);
        let siblings: BTreeSet<ObjectKey> = users
            .iter()
            .filter_map(|uid| self.backlog.queue.get(uid))
            .flat_map(|pending| pod::claim_keys(&pending.pod))
            .filter(|sibling| sibling != key)
            .collect();
        for uid in users {
            self.world.cluster.forget_pod(&uid);
            if let Some(pending) = self.backlog.queue.get_mut(&uid) {
                match timeout {
                    Some(after) => pending.not_bound(node, after, now),
                    None => pending.avoid(node, now),
                }
                self.reporter
                    .state_events
                    .push(PendingEvent::allocation_lost(
                        pod::reference(&pending.pod),
                        &format!("{}/{}", key.0, key.1),
                        node,
                    ));
            }
        }
        for sibling in siblings {
            self.commitments
                .ledger
                .release_now(&sibling, ReleaseReason::SiblingReleased);
        }
    }

    /// Observes a device class.
    pub fn class(&mut self, change: Change<DeviceClass>) {
        self.backlog.wake(self.world.class(change));
    }

    /// Observes a slice of this driver.
    pub fn slice(&mut self, change: Change<ResourceSlice>) {
        self.backlog.wake(self.world.slice(change));
    }

    /// Observes a namespace.
    pub fn namespace(&mut self, change: Change<Namespace>) {
        self.backlog.wake(self.world.namespace(change));
    }

    /// Observes a claim template.
    pub fn template(&mut self, change: Change<ResourceClaimTemplate>) {
        self.backlog.wake(self.world.template(change));
    }

    /// Observes a node.
    pub fn node(&mut self, change: Change<Node>) {
        if let Change::Deleted(node) = &change {
            self.commitments.ledger.node_deleted(&node.name);
            // Events reference a node by its name.
            self.reporter.deduplicator.forget(&node.name);
        }
        self.backlog.wake(self.world.node(change));
    }

    /// Observes a version of an object that cannot be read.
    pub fn unreadable(&mut self, kind: Kind, object: &Unreadable) {
        self.reporter
            .state_events
            .push(PendingEvent::unreadable(kind, object));
        self.world.unreadable(kind, object);
        if kind == Kind::Claims {
            let key = object_key(&object.metadata);
            self.commitments.ledger.remove(&key);
            self.commitments.suspensions.remove(&key);
            self.backlog.wake(Wake::Users(key));
            self.backlog.wake(Wake::All);
        }
    }

    /// Observes that an object can be read by now, or is deleted.
    pub fn readable(&mut self, kind: Kind, key: ObjectKey) {
        self.backlog.wake(self.world.readable(kind, key));
    }

    /// Observes the outcome of an allocation job.
    pub fn allocation_finished(&mut self, outcome: AllocationOutcome, now: Instant) {
        for claim in outcome.claims {
            self.claim_written(claim, now);
        }
        self.commitments.ledger.writing_ended(&outcome.keys, now);
        let first = outcome.pods.first();
        let events = first.and_then(|uid| self.commitments.in_flight.remove(uid));
        match &outcome.failure {
            None => self
                .reporter
                .write_events
                .extend(events.unwrap_or_default()),
            Some(_) => {
                for key in &outcome.keys {
                    self.world.not_allocated(key);
                }
            }
        }
        for uid in &outcome.pods {
            if outcome.failure.is_some() {
                self.world.cluster.forget_pod(uid);
            }
            self.review_gate(uid);
            let Some(pending) = self.backlog.queue.get_mut(uid) else {
                continue;
            };
            match &outcome.failure {
                None => pending.phase = Phase::Active,
                Some(failure) => {
                    pending.is_placed = false;
                    pending.back_off(now);
                    if failure.is_reportable {
                        self.reporter
                            .state_events
                            .push(PendingEvent::allocation_failed(
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
        self.commitments.ledger.release_ended(&key, now);
        self.backlog.companions.repeat_release(&key, now);
        for uid in self.backlog.queue.users_of(&key) {
            self.commitments.evicted.remove(&uid);
            self.review_gate(&uid);
        }
        if let Some(claim) = outcome.claim {
            if !claim::is_allocated(&claim) {
                self.reporter.write_events.push(PendingEvent::released(
                    claim::reference(&claim),
                    &outcome.release.reason,
                ));
            }
            self.claim_written(*claim, now);
        }
    }

    /// An event could not be published.
    pub fn event_failed(&mut self, event: PendingEvent, now: Instant) {
        self.reporter.deduplicator.failed(event, now);
    }

    /// Returns when a pending pod was created.
    #[must_use]
    pub fn created(&self, pod_uid: &str) -> Option<Timestamp> {
        let created = &self
            .backlog
            .queue
            .get(pod_uid)?
            .pod
            .metadata
            .creation_timestamp;
        created.as_ref().map(|created| created.0)
    }

    /// Returns the unpublished events of finished writes.
    pub fn into_write_events(self) -> impl Iterator<Item = PendingEvent> {
        let evictions = self.reporter.deduplicator.into_evictions();
        self.reporter.write_events.into_iter().chain(evictions)
    }

    /// Returns what to do now.
    pub fn actions(&mut self, time: &DecisionTime) -> Vec<Action> {
        if !self.world.is_synced() {
            return Vec::new();
        }
        self.backlog.activate_changed(&mut self.world, time.instant);
        let mut actions = Vec::new();
        let mut events = std::mem::take(&mut self.reporter.write_events);
        events.append(&mut self.reporter.state_events);
        events.extend(self.reporter.excluded_pools.new_events(&self.world.cluster));
        events.extend(self.review_overcommits());
        for event in events {
            let event = self.reporter.deduplicator.filter(event, time.instant);
            actions.extend(event.map(Action::PublishEvent));
        }
        self.remove_due_gates(time, &mut actions);
        let backlog = &self.backlog;
        let users_of = |key: &ObjectKey| backlog.users_of(key);
        let releases = self
            .commitments
            .start_releases(&self.world, time.instant, users_of);
        actions.extend(releases.map(Action::Release));
        self.end_incomplete_gangs(time.instant, &mut actions);
        self.review_reservations(time);
        self.drop_changed_holder_costs();
        self.review_missing_claims(time.instant);
        self.decide_due(time, &mut actions);
        self.release_companions(time.instant, &mut actions);
        self.decide_idle_shares(time, &mut actions);
        self.decide_suspensions(time, &mut actions);
        self.decide_companions(time, &mut actions);
        self.write_quota_statuses(time, &mut actions);
        self.write_policy_statuses(time, &mut actions);
        self.write_leader_status(time, &mut actions);
        let delayed = self.reporter.deduplicator.due(time.instant);
        actions.extend(delayed.into_iter().map(Action::PublishEvent));
        self.write_changed_conditions(time, &mut actions);
        self.write_running_conditions(time, &mut actions);
        actions
    }

    /// Returns when [`Self::actions`] has to be called without a new observation.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        if !self.world.is_synced() {
            return None;
        }
        let commitments = self.commitments.next_due();
        commitments
            .into_iter()
            .chain(self.backlog.next_due())
            .chain(self.reporter.next_due())
            .chain(self.next_gang_end())
            .min()
    }

    /// Returns what the metrics show of the cluster and the queue, apart from [`Self::changed_node_metrics`].
    #[must_use]
    pub fn metrics(&self) -> ClusterMetrics {
        let mut pending = BTreeMap::new();
        for pod in self.backlog.queue.iter() {
            *pending.entry(pod.reason).or_default() += 1;
        }
        ClusterMetrics {
            pending,
            gangs: self.world.live_pods.count_gangs(),
            companions: self.backlog.companions.counts(),
            in_flight: self.commitments.in_flight.len(),
            oldest_undelivered: self.commitments.ledger.oldest_undelivered(),
            scheduler_releases: self.reporter.scheduler_releases,
            unreadable: self.world.count_unreadable(),
            excluded_pools: self.world.cluster.excluded_pools().count(),
            quotas: self.quota_metrics(),
            namespaces: self.namespace_amounts(),
        }
    }
}

#[cfg(test)]
mod tests;
