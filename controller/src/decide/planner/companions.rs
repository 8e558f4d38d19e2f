//! Companion claims, which add capacity to the shares of a running pod: their allocation on the devices of their base, and its
//! release when the node driver has given the capacity back.
//!
//! No pod waits for a companion, so it is not in the queue. It is tried when it changes, and again ever more rarely, after the pods
//! that are due, and takes only what no pod was promised: it preempts no pod, and devices that are reserved for waiting pods are not
//! free.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::explanation::Explanation;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::placement::Placement;
use drava_allocator::searched::Undecided;
use drava_allocator::turn::Turn;
use drava_api::placement_record::PlacementRecord;
use drava_api::reason::Reason;
use drava_explanation::growth::{self, Growth, RunningPod};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use tokio::time::Instant;

use super::{DecisionTime, MAX_IN_FLIGHT, Planner};
use crate::action::event::{PendingEvent, ReleaseReason};
use crate::action::{Action, AllocationJob, ClaimWrite, PodAllocation, Release};
use crate::decide::allocation;
use crate::operate::metrics::CompanionCounts;
use crate::pods::claim;

use waiting::Waiting;

mod waiting;

/// Time until the first repetition of a release.
const RETRY: Duration = Duration::from_secs(1);

/// Longest time until a release is repeated.
const MAX_RETRY: Duration = Duration::from_secs(60);

/// Companions that need something, and those that pods use.
#[derive(Debug, Default)]
pub(super) struct Companions {
    /// Those that are being deleted and have their allocation.
    returning: BTreeSet<ObjectKey>,
    /// Those that are allocated, with the UIDs of the pods that use them.
    users: BTreeMap<ObjectKey, Vec<String>>,
    /// The same by pod.
    of_pods: BTreeMap<String, BTreeSet<ObjectKey>>,
    /// All, by the UID of their base.
    of_bases: BTreeMap<String, BTreeSet<ObjectKey>>,
    /// The UID of the base of each.
    bases: BTreeMap<ObjectKey, String>,
    /// Those without an allocation.
    waiting: Waiting,
    /// Why those have none that were tried.
    answers: BTreeMap<ObjectKey, Answer>,
    /// The same by the UID of the pod with which they go.
    answers_of_pods: BTreeMap<String, BTreeSet<ObjectKey>>,
    /// Those whose capacity is given back.
    given_back: BTreeMap<ObjectKey, GivenBack>,
}

/// Why a companion has no allocation.
#[derive(Debug)]
struct Answer {
    /// UID of the pod with which it goes.
    pod: Option<String>,
    reason: Reason,
    text: String,
}

/// A companion whose capacity is given back.
#[derive(Debug)]
struct GivenBack {
    /// Time of the next release; `None` while one is in flight.
    due: Option<Instant>,
    /// Time until the release is repeated.
    retry: Duration,
}

impl Companions {
    /// Observes a version of a claim.
    pub(super) fn observe(&mut self, claim: &ResourceClaim, now: Instant) {
        let key = object_key(&claim.metadata);
        self.forget_users(&key);
        self.forget_base(&key);
        if let Some(base) = claim::base(claim) {
            let of_base = self.of_bases.entry(base.to_owned()).or_default();
            of_base.insert(key.clone());
            self.bases.insert(key.clone(), base.to_owned());
        }
        if claim::is_allocated(claim) {
            let users: Vec<String> = claim::consumers(claim).map(str::to_owned).collect();
            for uid in &users {
                let of_pod = self.of_pods.entry(uid.clone()).or_default();
                of_pod.insert(key.clone());
            }
            self.users.insert(key.clone(), users);
            if claim.metadata.deletion_timestamp.is_some() {
                self.returning.insert(key.clone());
            }
        }
        if claim::is_given_back(claim) {
            self.waiting.remove(&key);
            self.forget_answer(&key);
            self.given_back.entry(key).or_insert(GivenBack {
                due: Some(now),
                retry: RETRY,
            });
            return;
        }
        self.forget_needs(&key);
        let is_waiting = claim::base(claim).is_some()
            && !claim::is_allocated(claim)
            && claim.metadata.deletion_timestamp.is_none();
        if is_waiting {
            let created = claim.metadata.creation_timestamp.as_ref();
            let created = created.map(|created| created.0);
            self.waiting.insert(key, created, now);
        }
    }

    /// Removes a deleted claim.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.forget_needs(key);
        self.forget_users(key);
        self.forget_base(key);
    }

    fn forget_needs(&mut self, key: &ObjectKey) {
        self.waiting.remove(key);
        self.forget_answer(key);
        self.given_back.remove(key);
    }

    fn forget_answer(&mut self, key: &ObjectKey) {
        if let Some(pod) = self.answers.remove(key).and_then(|answer| answer.pod)
            && let Entry::Occupied(mut of_pod) = self.answers_of_pods.entry(pod)
        {
            of_pod.get_mut().remove(key);
            if of_pod.get().is_empty() {
                of_pod.remove();
            }
        }
    }

    /// A companion was tried in vain. `pod` is the UID of the pod with which it goes, if that exists.
    fn answered(&mut self, key: ObjectKey, pod: Option<String>, why: &Explanation) {
        self.forget_answer(&key);
        if let Some(pod) = &pod {
            let of_pod = self.answers_of_pods.entry(pod.clone()).or_default();
            of_pod.insert(key.clone());
        }
        let answer = Answer {
            pod,
            reason: why.reason(),
            text: why.summary(),
        };
        self.answers.insert(key, answer);
    }

    /// Returns the names of the companions of a pod that have no allocation, each with the reason, and how many there are. A tenant
    /// can create thousands, so that none of them costs a walk of all.
    fn answers_of(&self, pod: &str) -> (impl Iterator<Item = (&str, &str)>, usize) {
        let keys = self.answers_of_pods.get(pod);
        let answers = keys
            .into_iter()
            .flatten()
            .filter_map(|key| Some((key.1.as_str(), self.answers.get(key)?.text.as_str())));
        (answers, keys.map_or(0, BTreeSet::len))
    }

    fn forget_base(&mut self, key: &ObjectKey) {
        if let Some(base) = self.bases.remove(key)
            && let Entry::Occupied(mut of_base) = self.of_bases.entry(base)
        {
            of_base.get_mut().remove(key);
            if of_base.get().is_empty() {
                of_base.remove();
            }
        }
    }

    /// Returns the companions of the claim with this UID.
    fn of_base(&self, uid: &str) -> impl Iterator<Item = &ObjectKey> {
        self.of_bases.get(uid).into_iter().flatten()
    }

    fn forget_users(&mut self, key: &ObjectKey) {
        self.returning.remove(key);
        for uid in self.users.remove(key).unwrap_or_default() {
            if let Entry::Occupied(mut of_pod) = self.of_pods.entry(uid) {
                of_pod.get_mut().remove(key);
                if of_pod.get().is_empty() {
                    of_pod.remove();
                }
            }
        }
    }

    /// Returns the companions that a pod uses, which end with it. Its spec names none of them.
    pub(super) fn of_pod(&self, uid: &str) -> impl Iterator<Item = &ObjectKey> {
        self.of_pods.get(uid).into_iter().flatten()
    }

    /// A release of the claim has ended, or cannot start. It is repeated, after twice the time each, unless the claim is observed
    /// without its allocation.
    pub(super) fn repeat_release(&mut self, key: &ObjectKey, now: Instant) {
        if let Some(release) = self.given_back.get_mut(key) {
            release.due = Some(now + release.retry);
            release.retry = (release.retry * 2).min(MAX_RETRY);
        }
    }

    /// Returns how many there are in each state.
    pub(super) fn counts(&self) -> CompanionCounts {
        let answers = self.answers.values();
        let refused = answers.filter(|answer| answer.reason == Reason::InvalidCompanion);
        let refused = refused.count();
        let returning = self.returning.len();
        CompanionCounts {
            waiting: self.waiting.len().saturating_sub(refused),
            refused,
            allocated: self.users.len().saturating_sub(returning),
            returning,
        }
    }

    /// Returns when something is to be done.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let releases = self.given_back.values().filter_map(|release| release.due);
        releases.chain(self.waiting.next_due()).min()
    }

    /// Returns the companions to release now.
    fn start_releases(&mut self, now: Instant) -> Vec<ObjectKey> {
        let due = self.given_back.iter_mut();
        let due = due.filter_map(|(key, release)| {
            release.due.take_if(|due| *due <= now)?;
            Some(key.clone())
        });
        due.collect()
    }
}

impl Planner {
    /// Releases the companions whose capacity is given back. A claim that its pod names is none: its containers use it.
    pub(super) fn release_companions(&mut self, now: Instant, actions: &mut Vec<Action>) {
        for key in self.backlog.companions.start_releases(now) {
            let claim = self.commitments.ledger.claim(&key).filter(|claim| {
                let mut users =
                    claim::consumers(claim).filter_map(|uid| self.world.live_pods.get(uid));
                !users.any(|pod| pod.claims.contains(&key))
            });
            match claim {
                Some(claim) => actions.push(Action::Release(Release {
                    claim: claim.clone(),
                    reason: ReleaseReason::GivenBack,
                })),
                None => self.backlog.companions.repeat_release(&key, now),
            }
        }
    }

    /// Allocates the companions that fit: at least one is tried, and others while the time slice lasts.
    pub(super) fn decide_companions(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        while self.commitments.in_flight.len() < MAX_IN_FLIGHT
            && let Some(key) = self.backlog.companions.waiting.start_next(time.instant)
        {
            self.decide_companion(key, time, actions);
            if (time.is_slice_over)(time.instant) {
                return;
            }
        }
    }

    fn decide_companion(&mut self, key: ObjectKey, time: &DecisionTime, actions: &mut Vec<Action>) {
        let Some(claim) = self.commitments.ledger.claim(&key).cloned() else {
            return;
        };
        if self.commitments.ledger.is_in_flight(&key) {
            return;
        }
        let mut turn = Turn::limited();
        let placed = self.place_companion(&claim, &mut turn);
        self.backlog.decisions.add(&turn);
        let placement = match placed {
            Ok(placement) => placement,
            // What was evaluated so far is known at the next attempt.
            Err(Undecided::Suspended(_)) => {
                return self.backlog.companions.waiting.go_on(&key, time.instant);
            }
            Err(Undecided::Rejected(why)) => {
                return self.companion_rejected(&claim, &why, time.instant, actions);
            }
        };
        let user = self.user_of(&claim);
        let (Some(placed), Some((user_uid, pod))) = (placement.claims.first(), user) else {
            return;
        };
        let consumer = ResourceClaimConsumerReference {
            api_group: None,
            resource: "pods".to_owned(),
            name: pod.name.clone().unwrap_or_default(),
            uid: user_uid,
        };
        let event = PendingEvent::allocated(pod.clone(), &placement, &[(&key.1, placed)]);
        let mut allocation = allocation::build(
            &claim,
            placed,
            &placement.node,
            &self.world.cluster.classes,
            time.time.clone(),
            &mut self.share_ids,
        );
        let record = PlacementRecord {
            pod_uid: consumer.uid.clone(),
            reason: placement.reason(placed),
        };
        record.add_to(&mut allocation);
        // Jobs have the UIDs of pods that wait; this one does not.
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        let write = ClaimWrite {
            claim,
            allocation,
            consumer: Some(consumer),
        };
        self.world.assume_growth(&placement);
        self.commitments.ledger.writing_started([key].into_iter());
        self.reporter.deduplicator.forget(&uid);
        self.commitments.in_flight.insert(uid.clone(), vec![event]);
        actions.push(Action::Allocate(AllocationJob {
            pods: vec![PodAllocation {
                uid,
                pod,
                node: placement.node,
                writes: vec![write],
            }],
        }));
    }

    /// A companion does not fit, or is none. Its pod says so, too, because users do not look for claims that the pod does not name.
    fn companion_rejected(
        &mut self,
        claim: &ResourceClaim,
        why: &Explanation,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let key = object_key(&claim.metadata);
        let mut events = vec![PendingEvent::unschedulable(claim::reference(claim), why)];
        let user = self.user_of(claim);
        let uid = user.as_ref().map(|(uid, _)| uid.clone());
        self.backlog.companions.answered(key, uid, why);
        if let Some((uid, pod)) = user {
            let (answers, count) = self.backlog.companions.answers_of(&uid);
            events.push(PendingEvent::growth_waits(pod, answers, count));
        }
        for event in events {
            let event = self.reporter.deduplicator.filter(event, now);
            actions.extend(event.map(Action::PublishEvent));
        }
    }

    /// Returns the pod of its namespace with which a companion goes, with its UID.
    fn user_of(&self, companion: &ResourceClaim) -> Option<(String, ObjectReference)> {
        let uid = &growth::owner(companion)?.uid;
        let pod = self.world.live_pods.get(uid)?;
        (pod.reference.namespace == companion.metadata.namespace)
            .then(|| (uid.clone(), pod.reference.clone()))
    }

    fn place_companion(
        &self,
        companion: &ResourceClaim,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        let growth = self.growth(companion).map_err(Undecided::Rejected)?;
        let base = claim::base(companion).unwrap_or_default();
        let siblings = self.backlog.companions.of_base(base);
        growth.place(
            &self.world.cluster,
            siblings,
            self.world.settings.policies,
            turn,
        )
    }

    /// Returns the growth that a companion asks for.
    fn growth<'a>(&'a self, companion: &'a ResourceClaim) -> Result<Growth<'a>, Explanation> {
        Growth::of(&self.world.cluster, companion, |uid| {
            let pod = self.world.live_pods.get(uid)?;
            let is_running = pod.is_bound && pod.grace_period_end.is_none();
            let claims = pod.claims.iter();
            is_running.then(|| RunningPod {
                name: pod.reference.name.as_deref().unwrap_or_default(),
                namespace: pod.reference.namespace.as_deref().unwrap_or_default(),
                claims: claims
                    .filter_map(|key| self.commitments.ledger.claim(key))
                    .map(AsRef::as_ref)
                    .collect(),
            })
        })
    }
}
