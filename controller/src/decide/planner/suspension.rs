//! Suspended shares: who is suspended because a user wishes it or instead of an eviction, and when a share is resumed.
//!
//! The intent is a label of the claim, which only this controller writes; the node driver acts on it and answers in a condition
//! ([`drava_api::suspension`]). Both are levels, so a new leader goes on from what the claims say. The memory and GPU time of a
//! share are free while the intent stands and the answer is True. From the decision to resume a share it counts again, before
//! the intent is withdrawn: what it gets back is given to no other.
//!
//! A share is resumed when its amounts are free on its GPU and promised to no pod: after the pods of higher priority that are due,
//! and before the others. A share that is suspended because it was idle ([`idle`]) is resumed only when a program has called CUDA,
//! which the node driver says. A share reserves nothing: pods that need less may take what becomes free bit by bit. Its pod is evicted if
//! that takes longer than the claim allows.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::usage::AllocatedDevice;
use drava_api::event::EventReason;
use drava_api::{names, suspension};
use drava_explanation::owner::name_for;
use drava_explanation::suspension as share;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use tokio::time::Instant;

use super::decision::Group;
use super::{DecisionTime, MAX_IN_FLIGHT, Planner};
use crate::action::event::PendingEvent;
use crate::action::{
    Action, Eviction, EvictionCause, OwnCause, Preemptor, SuspensionOutcome, SuspensionWrite,
    Victim,
};
use crate::pods::claim;
use crate::pods::live_pods::LivePod;
use crate::pods::pod::qualified_name;
use crate::watch::Kind;

pub(super) mod idle;
mod problem;
mod step;

use step::{Step, View};

/// Time between two attempts to resume a share, and until a failed write is repeated.
const RETRY: Duration = Duration::from_secs(1);

/// Time in which a share has to be suspended for a pod. After it the intent is withdrawn, and pods are evicted instead.
const PATIENCE: Duration = Duration::from_secs(60);

/// Time between two evictions of a pod that cannot be evicted: each has an event.
const EVICTION_RETRY: Duration = Duration::from_secs(300);

/// Time for which a share that was not suspended in time is not tried for another pod.
const PROTECTION: Duration = Duration::from_secs(600);

/// Claims that are suspended, on their way there or back, or may be suspended.
#[derive(Debug, Default)]
pub(super) struct Suspensions {
    claims: BTreeMap<ObjectKey, Suspension>,
    /// Claims whose config allows it.
    allowed: BTreeSet<ObjectKey>,
    /// Claims of which the node driver says that they are suspended or being resumed, whatever is intended: their memory is in host
    /// memory.
    answered: BTreeSet<ObjectKey>,
    /// Claims that are not suspended for a pod before this time.
    protected: BTreeMap<ObjectKey, Instant>,
    /// Claims whose shares are idle.
    idle: idle::IdleShares,
    /// UIDs of the pods for which no share is suspended before this time, because one was not.
    evicting: BTreeMap<String, Instant>,
}

/// A claim with an intent or a wish.
#[derive(Debug)]
struct Suspension {
    /// The pod for which the share is suspended, and until when its suspension is awaited.
    awaited: Option<(Preemptor, Instant)>,
    write: Write,
    /// Whether it is to be resumed, and did not fit the last time.
    waits_for_room: bool,
    /// Earliest time of the next eviction of its pod, after one that failed.
    retry_eviction: Option<Instant>,
    /// Time of the next step without an observation.
    due: Option<Instant>,
}

/// The write of an intent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Write {
    None,
    /// The intent is being written.
    Intending,
    /// The intent is being withdrawn, or is going to be. The share counts.
    Withdrawing {
        is_in_flight: bool,
    },
}

impl Suspensions {
    /// Observes the newest version of a claim.
    fn observe(&mut self, claim: &ResourceClaim, is_listed: bool, now: Instant) {
        let key = object_key(&claim.metadata);
        self.idle.observe(&key, claim, is_listed, now);
        match share::check(claim) {
            Ok(_) => self.allowed.insert(key.clone()),
            Err(_) => self.allowed.remove(&key),
        };
        let is_held =
            |answer: &Condition| answer.status == "True" || suspension::is_resuming(answer);
        match suspension::answers(claim).any(is_held) {
            true => self.answered.insert(key.clone()),
            false => self.answered.remove(&key),
        };
        let metadata = &claim.metadata;
        let is_intended = suspension::is_intended(metadata);
        if !is_intended && !suspension::is_wished(metadata) {
            // A write of the intent that is in flight ends with its own observation.
            if let Some(known) = self.claims.get(&key)
                && known.write != Write::Intending
            {
                self.claims.remove(&key);
            }
            return;
        }
        let known = self.claims.entry(key).or_insert(Suspension {
            awaited: None,
            write: Write::None,
            waits_for_room: false,
            retry_eviction: None,
            due: None,
        });
        if !is_intended && matches!(known.write, Write::Withdrawing { .. }) {
            known.write = Write::None;
            known.awaited = None;
        }
        known.due = Some(now);
    }

    /// Removes a deleted claim.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.claims.remove(key);
        self.allowed.remove(key);
        self.answered.remove(key);
        self.protected.remove(key);
        self.idle.remove(key);
    }

    /// Returns the claim as it counts: one whose intent is being withdrawn is not suspended any more.
    pub(super) fn counted<'a>(&self, claim: &'a ResourceClaim) -> Cow<'a, ResourceClaim> {
        let known = self.claims.get(&object_key(&claim.metadata));
        let is_withdrawing =
            known.is_some_and(|known| matches!(known.write, Write::Withdrawing { .. }));
        if !is_withdrawing || !suspension::is_intended(&claim.metadata) {
            return Cow::Borrowed(claim);
        }
        let mut counted = claim.clone();
        if let Some(labels) = counted.metadata.labels.as_mut() {
            labels.remove(names::SUSPEND_LABEL);
        }
        Cow::Owned(counted)
    }

    /// Returns whether the claim is suspended, on its way there or back, or wished to be suspended.
    pub(super) fn contains(&self, claim: &ObjectKey) -> bool {
        self.claims.contains_key(claim)
    }

    /// Returns when something is to be done.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let claims = self.claims.values().filter_map(|claim| claim.due);
        claims.chain(self.idle.next_due()).min()
    }

    /// A policy has changed.
    pub(super) fn policy_changed(&mut self, now: Instant) {
        self.idle.policy_changed(now);
    }

    /// The labels of a namespace may have changed.
    pub(super) fn selection_changed(&mut self, now: Instant) {
        self.idle.selection_changed(now);
    }

    /// Returns the claims whose suspension a pod awaits.
    pub(super) fn awaited(&self) -> impl Iterator<Item = &ObjectKey> {
        let awaited = self.claims.iter();
        let awaited = awaited.filter(|(_, known)| {
            known.awaited.is_some() && !matches!(known.write, Write::Withdrawing { .. })
        });
        awaited.map(|(key, _)| key)
    }
}

impl Planner {
    /// Observes the newest version of a claim.
    pub(super) fn suspension_observed(&mut self, key: &ObjectKey, now: Instant) {
        match self.commitments.ledger.claim(key).cloned() {
            Some(newest) => {
                let is_listed = self.world.unlisted.contains(&Kind::Claims);
                let suspensions = &mut self.commitments.suspensions;
                suspensions.observe(&newest, is_listed, now);
                let is_concerned = self.commitments.suspensions.contains(key)
                    || suspension::answers(&newest).next().is_some();
                let pod = self.pod_of(key).filter(|_| is_concerned);
                let uid = pod.map(|(uid, _)| uid.to_owned());
                self.reporter.running_changed.extend(uid);
            }
            None => self.commitments.suspensions.remove(key),
        }
    }

    /// Returns the shares to decide in a round, with the priority of their pods, the highest first: each is decided before the
    /// pods of its priority, which do not overtake it.
    pub(super) fn shares_of_round(&mut self, now: Instant) -> VecDeque<(i32, ObjectKey)> {
        let suspensions = &mut self.commitments.suspensions;
        suspensions.protected.retain(|_, until| now < *until);
        suspensions.evicting.retain(|_, until| now < *until);
        for known in suspensions.claims.values_mut() {
            let preemptor = known.awaited.as_ref().map(|(preemptor, _)| &preemptor.uid);
            let is_gone = preemptor.is_some_and(|uid| self.backlog.queue.get(uid).is_none());
            if is_gone {
                known.awaited = None;
            }
            // Room may have become free.
            if is_gone || known.waits_for_room {
                known.due = Some(now);
            }
        }
        let due = self.due_suspensions(now).into_iter();
        let due = due.filter_map(|key| Some((self.pod_of(&key)?.1.priority, key)));
        due.collect()
    }

    /// Suspends and resumes what is due. While pods that are due are not decided, no share is resumed.
    pub(super) fn decide_suspensions(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let now = time.instant;
        for key in self.due_suspensions(now) {
            self.decide_suspension(&key, time, actions);
        }
    }

    /// Returns the claims with something to be done, in the order of their pods' priority and age.
    fn due_suspensions(&self, now: Instant) -> Vec<ObjectKey> {
        let due = self.commitments.suspensions.claims.iter();
        let due = due.filter(|(_, known)| known.due.is_some_and(|due| due <= now));
        let mut due: Vec<ObjectKey> = due.map(|(key, _)| key.clone()).collect();
        due.sort_by_cached_key(|key| {
            let pod = self.pod_of(key);
            let pod = pod.map(|(_, pod)| (Reverse(pod.priority), pod.created));
            (pod.is_none(), pod)
        });
        due
    }

    /// Does what is due for a claim.
    pub(super) fn decide_suspension(
        &mut self,
        key: &ObjectKey,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let now = time.instant;
        let Some(claim) = self.commitments.ledger.claim(key).cloned() else {
            self.commitments.suspensions.claims.remove(key);
            return;
        };
        let Some(known) = self.commitments.suspensions.claims.get_mut(key) else {
            return;
        };
        known.due = None;
        known.waits_for_room = false;
        match known.write {
            Write::None => {}
            Write::Withdrawing {
                is_in_flight: false,
            } => {
                known.write = Write::Withdrawing { is_in_flight: true };
                actions.push(withdrawal(claim));
                return;
            }
            Write::Intending | Write::Withdrawing { is_in_flight: true } => return,
        }
        let expired = known.awaited.take_if(|(_, until)| *until <= now);
        let awaited_until = known.awaited.as_ref().map(|(_, until)| *until);
        if let Some((preemptor, _)) = expired.filter(|_| !suspension::is_suspended(&claim)) {
            let why = "the node driver has not answered in time";
            self.not_suspended_for(&preemptor, &claim, why, time, actions);
        }
        let known = self.commitments.suspensions.claims.get(key);
        let retry = known.and_then(|known| known.retry_eviction);
        let step = match View::of(&claim, awaited_until.is_some()).step() {
            // Nothing is left to lose: a pod that cannot be evicted starts anew.
            Step::Evict if retry.is_some_and(|retry| now < retry) => Step::Resume,
            step => step,
        };
        let said: Option<(EventReason, String)> = match step {
            Step::Nothing => {
                self.decide_again(key, awaited_until);
                Self::said_by_node(&claim)
            }
            Step::TakeOver => {
                self.intend(key, None, None, actions);
                None
            }
            Step::Intend => Some(match self.suspension_problem_now(&claim) {
                None => {
                    self.intend(key, None, None, actions);
                    let annotation = names::SUSPEND_WISH_ANNOTATION;
                    let what = format!("being suspended, as its annotation {annotation} requests");
                    (EventReason::ShareSuspended, format!("is {what}"))
                }
                Some(problem) => {
                    // It may pass, for instance when the pod is bound.
                    self.decide_again(key, Some(now + RETRY));
                    let message = format!("cannot be suspended: {problem}");
                    (EventReason::SuspensionRefused, message)
                }
            }),
            Step::Withdraw => {
                let known = self.commitments.suspensions.claims.get_mut(key);
                let awaited = known.and_then(|known| known.awaited.take());
                self.withdraw(key, actions);
                let is_for_idleness =
                    suspension::cause(&claim.metadata) == Some(suspension::Cause::Idleness);
                if let Some(refusal) = suspension::refusal(&claim).filter(|_| is_for_idleness) {
                    let protected = &mut self.commitments.suspensions.protected;
                    protected.insert(key.clone(), now + PROTECTION);
                    let message = format!("is idle, and cannot be suspended: {}", refusal.message);
                    let event = EventReason::SuspensionRefused;
                    self.report_suspension(&claim, event, &message, time, actions);
                }
                if let Some((preemptor, _)) = awaited {
                    let refusal = suspension::refusal(&claim);
                    let why = refusal.map_or("the claim has changed", |refusal| &refusal.message);
                    self.not_suspended_for(&preemptor, &claim, why, time, actions);
                }
                None
            }
            Step::Evict => {
                self.decide_again(key, Some(now + EVICTION_RETRY));
                let state = "the node was restarted while its share was suspended, so the state of its programs is lost";
                self.evict_suspended(key, state.to_owned(), time, actions);
                None
            }
            Step::Resume if self.has_undecided_pods() => {
                self.wait_for_room(key, now);
                None
            }
            Step::Resume => Some(match self.world.cluster.lacks_to_resume(key) {
                None => {
                    self.withdraw(key, actions);
                    (EventReason::ShareResumed, "is being resumed".to_owned())
                }
                Some((device, lacking)) => {
                    self.wait_for_room(key, now);
                    let room = share::room(&device, &lacking);
                    let end = match share::ends_at(&claim) {
                        Some(end) if end <= time.time.0 => {
                            let state = expired_state(&claim, &room);
                            self.evict_suspended(key, state, time, actions);
                            return;
                        }
                        Some(end) => format!("; its pod is evicted at {end} otherwise"),
                        None => String::new(),
                    };
                    let message = format!("is suspended; it is resumed when there is {room}{end}");
                    (EventReason::ShareSuspended, message)
                }
            }),
        };
        if let Some((event, message)) = said {
            self.report_suspension(&claim, event, &message, time, actions);
        }
    }

    /// Returns what the node driver says of a share that is to be suspended, for the events of its pod.
    fn said_by_node(claim: &ResourceClaim) -> Option<(EventReason, String)> {
        if !suspension::is_intended(&claim.metadata) {
            return None;
        }
        if suspension::is_suspended(claim) {
            let message = format!("is suspended {}", share::cause(claim));
            return Some((EventReason::ShareSuspended, message));
        }
        let refusal = suspension::refusal(claim)?;
        let message = format!("cannot be suspended: {}", refusal.message);
        Some((EventReason::SuspensionRefused, message))
    }

    /// Starts the eviction of a pod whose share is suspended and does not stay so.
    fn evict_suspended(
        &mut self,
        key: &ObjectKey,
        state: String,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let known = self.commitments.suspensions.claims.get(key);
        let retry = known.and_then(|known| known.retry_eviction);
        let Some((uid, pod)) = self.pod_of(key) else {
            return;
        };
        let is_ending =
            pod.grace_period_end.is_some() || self.commitments.evicted.contains_key(uid);
        if is_ending || retry.is_some_and(|retry| time.instant < retry) {
            return;
        }
        let (uid, victim) = (
            uid.to_owned(),
            Victim {
                pod: pod.reference.clone(),
                priority: pod.priority,
            },
        );
        self.commitments.evicted.insert(uid, None);
        actions.push(Action::Evict(Eviction {
            cause: EvictionCause::Own(OwnCause::SuspensionExpired, state),
            victims: vec![victim],
        }));
    }

    /// The pod of a suspended share could not be evicted. It is tried again later.
    pub(super) fn suspension_not_ended(&mut self, pod_uid: &str, now: Instant) {
        let pod = self.world.live_pods.get(pod_uid);
        let key = pod.and_then(|pod| self.share_of_pod(pod));
        let claims = &mut self.commitments.suspensions.claims;
        if let Some(known) = key.and_then(|key| claims.get_mut(&key)) {
            known.retry_eviction = Some(now + EVICTION_RETRY);
            known.due = Some(now);
        }
    }

    /// Returns whether pods that are due wait for the next slice of time, or for writes to end.
    fn has_undecided_pods(&self) -> bool {
        self.backlog.round.resumes_at().is_some()
            || self.commitments.in_flight.len() >= MAX_IN_FLIGHT
    }

    fn wait_for_room(&mut self, key: &ObjectKey, now: Instant) {
        self.decide_again(key, Some(now + RETRY));
        if let Some(known) = self.commitments.suspensions.claims.get_mut(key) {
            known.waits_for_room = true;
        }
    }

    fn decide_again(&mut self, key: &ObjectKey, due: Option<Instant>) {
        if let Some(known) = self.commitments.suspensions.claims.get_mut(key) {
            known.due = due;
        }
    }

    /// A share was not suspended for a pod. The pod evicts others instead, without trying more shares one after the other.
    fn not_suspended_for(
        &mut self,
        preemptor: &Preemptor,
        claim: &ResourceClaim,
        why: &str,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let key = object_key(&claim.metadata);
        let until = time.instant + PROTECTION;
        let suspensions = &mut self.commitments.suspensions;
        suspensions.protected.insert(key.clone(), until);
        suspensions.evicting.insert(preemptor.uid.clone(), until);
        self.backlog.activate(&preemptor.uid);
        let pod = name_for(&key.0, "pod", &qualified_name(&preemptor.pod));
        let message = format!("was not suspended for {pod}: {why}");
        let refused = EventReason::SuspensionRefused;
        self.report_suspension(claim, refused, &message, time, actions);
    }

    /// Starts the write of the intent.
    fn intend(
        &mut self,
        key: &ObjectKey,
        awaited: Option<(Preemptor, Instant)>,
        suspended_for: Option<String>,
        actions: &mut Vec<Action>,
    ) {
        let Some(claim) = self.commitments.ledger.claim(key).cloned() else {
            return;
        };
        let due = awaited.as_ref().map(|(_, until)| *until);
        let known = Suspension {
            awaited,
            write: Write::Intending,
            waits_for_room: false,
            retry_eviction: None,
            due,
        };
        self.commitments
            .suspensions
            .claims
            .insert(key.clone(), known);
        actions.push(Action::WriteSuspension(SuspensionWrite {
            claim,
            is_intended: true,
            suspended_for,
        }));
    }

    /// Starts to withdraw the intent. The share counts from now on.
    fn withdraw(&mut self, key: &ObjectKey, actions: &mut Vec<Action>) {
        let Some(claim) = self.commitments.ledger.claim(key).cloned() else {
            return;
        };
        if let Some(known) = self.commitments.suspensions.claims.get_mut(key) {
            known.write = Write::Withdrawing { is_in_flight: true };
            known.awaited = None;
        }
        self.world
            .claim(&self.commitments.suspensions.counted(&claim));
        actions.push(withdrawal(claim));
    }

    /// Observes the end of the write of an intent. What it has written, or another has meanwhile, is observed before.
    pub fn suspension_written(&mut self, outcome: SuspensionOutcome, now: Instant) {
        let is_conflict = outcome.claim.is_some();
        if let Some(claim) = outcome.claim {
            self.claim_written(*claim, now);
        }
        let claim = self.commitments.ledger.claim(&outcome.key);
        let is_wanted = claim.is_some_and(|claim| {
            suspension::is_wished(&claim.metadata) || suspension::is_intended(&claim.metadata)
        });
        let suspensions = &mut self.commitments.suspensions;
        let Some(known) = suspensions.claims.get_mut(&outcome.key) else {
            return;
        };
        known.due = Some(match outcome.is_written {
            true => now,
            false => now + RETRY,
        });
        match known.write {
            Write::Intending if !outcome.is_written && known.awaited.is_some() => {
                let awaited = suspensions.claims.remove(&outcome.key);
                let awaited = awaited.and_then(|known| known.awaited);
                if let Some((preemptor, _)) = awaited {
                    // After a conflict the pod chooses again; what cannot be written is not tried again.
                    if !is_conflict {
                        let until = now + PROTECTION;
                        suspensions.protected.insert(outcome.key, until);
                        suspensions.evicting.insert(preemptor.uid.clone(), until);
                    }
                    self.backlog.activate(&preemptor.uid);
                }
            }
            // The share is idle; a user's wish, or an intent that the write met, is seen again.
            Write::Intending if !outcome.is_written && !is_wanted => {
                suspensions.claims.remove(&outcome.key);
                suspensions.idle.look_again(&outcome.key, now + RETRY);
            }
            Write::Intending => known.write = Write::None,
            Write::Withdrawing { .. } => {
                known.write = Write::Withdrawing {
                    is_in_flight: false,
                }
            }
            Write::None => {}
        }
    }

    /// Suspends the shares of these pods, for a pod that waits for their memory or GPU time.
    pub(super) fn suspend_for(
        &mut self,
        preemptor: &Preemptor,
        victims: &BTreeSet<String>,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        for uid in victims {
            let key = self.world.live_pods.get(uid);
            let key = key.and_then(|pod| self.share_of_pod(pod));
            let Some(key) = key.filter(|key| self.can_suspend(key)) else {
                continue;
            };
            let Some(claim) = self.commitments.ledger.claim(&key).cloned() else {
                continue;
            };
            let awaited = (preemptor.clone(), time.instant + PATIENCE);
            let by = name_for(&key.0, "pod", &qualified_name(&preemptor.pod));
            self.intend(&key, Some(awaited), Some(by.clone()), actions);
            let why = preemptor.why();
            let message = format!("is being suspended for {by} ({why})");
            let suspended = EventReason::ShareSuspended;
            self.report_suspension(&claim, suspended, &message, time, actions);
        }
    }

    /// Returns the UIDs of the pods whose shares are being suspended for another pod.
    pub(super) fn suspending_pods(&self) -> BTreeSet<String> {
        let awaited = self.commitments.suspensions.awaited();
        let pods = awaited.filter(|key| {
            let claim = self.commitments.ledger.claim(key);
            claim.is_some_and(|claim| {
                !suspension::is_suspended(claim) && suspension::refusal(claim).is_none()
            })
        });
        pods.filter_map(|key| self.pod_of(key))
            .map(|(uid, _)| uid.to_owned())
            .collect()
    }

    /// Returns the UIDs of the pods of lower priority whose shares can be suspended for the first pod of a group. Those of other
    /// tenants cannot while any tenant has guaranteed usage: what is suspended still counts as used.
    pub(super) fn suspendable_for(&self, group: &Group, priority: i32) -> BTreeSet<String> {
        let suspensions = &self.commitments.suspensions;
        let first = group.requests.first();
        let first = first.map(|request| &request.pod_request.uid);
        let Some(first) = first.filter(|first| {
            !suspensions.allowed.is_empty() && !suspensions.evicting.contains_key(*first)
        }) else {
            return BTreeSet::new();
        };
        let namespace = self.namespace_of(first);
        let are_others_guaranteed = !self.world.cluster.floors(&namespace).is_empty();
        let can = suspensions.allowed.iter();
        let can = can.filter(|key| !are_others_guaranteed || key.0 == namespace);
        let suspended = self.suspended_memory();
        let has_host_memory = |key: &ObjectKey| {
            let claim = self.commitments.ledger.claim(key).map(|claim| &**claim);
            self.host_memory_problem(claim, &suspended).is_none()
        };
        let pods = can.filter(|key| self.can_suspend(key) && has_host_memory(key));
        let pods = pods.filter_map(|key| self.pod_of(key));
        let pods = pods.filter(|(_, pod)| pod.priority < priority);
        pods.map(|(uid, _)| uid.to_owned()).collect()
    }

    /// Returns the only claim of a pod that has devices of this driver.
    fn share_of_pod(&self, pod: &LivePod) -> Option<ObjectKey> {
        let own = pod.claims.iter().filter(|key| {
            let claim = self.commitments.ledger.claim(key);
            claim.is_some_and(|claim| !AllocatedDevice::of_claim(claim).is_empty())
        });
        let mut own = own.cloned();
        own.next().filter(|_| own.next().is_none())
    }

    /// Returns for what the share of a pod is suspended, or is going to be; `None` if its programs run.
    pub(super) fn stands_still(&self, pod: &LivePod) -> Option<String> {
        let key = self.share_of_pod(pod)?;
        let claim = self.commitments.ledger.claim(&key)?;
        let mut answers = suspension::answers(claim);
        let is_intended =
            suspension::is_intended(&claim.metadata) && suspension::refusal(claim).is_none();
        let is_stopped =
            answers.any(|answer| answer.status == "True" || suspension::is_resuming(answer));
        (is_intended || is_stopped).then(|| {
            let why = share::cause(claim);
            format!(
                "its programs stand still: the share of claim {} is suspended {why}",
                key.1
            )
        })
    }

    /// Returns the only pod that has reserved a claim, with its UID.
    fn pod_of(&self, key: &ObjectKey) -> Option<(&str, &LivePod)> {
        let claim = self.commitments.ledger.claim(key)?;
        let status = claim.status.as_ref()?;
        let [only] = status.reserved_for.as_deref()? else {
            return None;
        };
        let pod = self.world.live_pods.get_key_value(&only.uid)?;
        (only.resource == "pods").then_some(pod)
    }

    /// Says at the pods that are evicted why their shares are not suspended, as their config allows.
    pub(super) fn report_not_suspended(
        &mut self,
        preemptor: &Preemptor,
        victims: &BTreeSet<String>,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        if self.commitments.suspensions.allowed.is_empty() {
            return;
        }
        for uid in victims {
            let key = self.world.live_pods.get(uid);
            let key = key.and_then(|pod| self.share_of_pod(pod));
            let allowed = &self.commitments.suspensions.allowed;
            let Some(key) = key.filter(|key| allowed.contains(key)) else {
                continue;
            };
            let claim = self.commitments.ledger.claim(&key).cloned();
            let Some((claim, problem)) =
                claim.and_then(|claim| Some((claim.clone(), self.suspension_problem_now(&claim)?)))
            else {
                continue;
            };
            let pod = name_for(&key.0, "pod", &qualified_name(&preemptor.pod));
            let message = format!("is not suspended for {pod}: {problem}");
            let refused = EventReason::SuspensionRefused;
            self.report_suspension(&claim, refused, &message, time, actions);
        }
    }

    /// Says at the pod what its share does, or at the claim if no pod alone has it.
    fn report_suspension(
        &mut self,
        claim: &ResourceClaim,
        reason: EventReason,
        does: &str,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let key = object_key(&claim.metadata);
        let pod = self.pod_of(&key);
        let regarding =
            pod.map_or_else(|| claim::reference(claim), |(_, pod)| pod.reference.clone());
        let event = PendingEvent {
            regarding,
            reason,
            message: format!("the share of claim {} {does}", key.1),
        };
        let event = self.reporter.deduplicator.filter(event, time.instant);
        actions.extend(event.map(Action::PublishEvent));
    }
}

/// Returns why the pod of a share is evicted that has been suspended for longer than it may be.
fn expired_state(claim: &ResourceClaim, room: &str) -> String {
    let by = suspension::suspended_for(&claim.metadata).unwrap_or_default();
    let limit = share::check(claim).ok();
    let limit = limit.and_then(|settings| settings.max_suspend);
    let limit = limit.map(|limit| format!(" ({limit})"));
    format!(
        "its share was suspended for {by} for longer than suspend.maxSuspendSeconds{}, and lacks {room}",
        limit.unwrap_or_default()
    )
}

fn withdrawal(claim: Arc<ResourceClaim>) -> Action {
    Action::WriteSuspension(SuspensionWrite {
        claim,
        is_intended: false,
        suspended_for: None,
    })
}
