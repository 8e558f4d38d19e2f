//! Conditions of pods that wait for GPUs, and of those that have stopped waiting.
//!
//! The first condition of a wait is written at once, also when the budget of events is used up. Later texts are written with
//! an event, so the limits of events hold for them, and a condition is never older than the event. A condition is written
//! once, although the watch shows it later. The publisher repeats failed writes.
//!
//! Pods whose share is suspended have another condition, which others that are ready only while their programs run have, too.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_allocator::explanation::Explanation;
use drava_allocator::turn::Work;
use drava_api::event::EventReason;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use tokio::time::Instant;

use super::{DecisionTime, Planner};
use crate::action::Action;
use crate::pods::pod_condition::{self, PodConditionUpdate};

/// Time after which a condition that the watch has not shown counts as rejected. It may be written again.
const WATCH_LIMIT: Duration = Duration::from_secs(5 * 60);

/// The newest condition of each pod whose condition the watch has not shown yet, by the UID of the pod.
#[derive(Debug, Default)]
pub(super) struct ConditionsInFlight {
    conditions: BTreeMap<String, (PodCondition, Instant)>,
    expired: Option<Instant>,
}

impl ConditionsInFlight {
    pub(super) fn get(&self, uid: &str) -> Option<&PodCondition> {
        self.conditions.get(uid).map(|(condition, _)| condition)
    }

    /// Returns whether the condition is to be written: it differs from the one in flight.
    fn start(&mut self, update: &PodConditionUpdate, now: Instant) -> bool {
        let uid = update.pod.uid.clone().unwrap_or_default();
        let condition = &update.condition;
        let is_new = !self
            .get(&uid)
            .is_some_and(|before| pod_condition::is_same(before, condition));
        if is_new {
            self.conditions.insert(uid, (condition.clone(), now));
        }
        is_new
    }

    /// The watch shows this version of the pod.
    fn observe(&mut self, uid: &str, pod: &Pod) {
        let is_shown = |condition| pod_condition::has(pod, condition);
        if self.get(uid).is_some_and(is_shown) {
            self.forget(uid);
        }
    }

    pub(super) fn forget(&mut self, uid: &str) {
        self.conditions.remove(uid);
    }

    /// Forgets conditions of which the watch has shown nothing for long.
    fn expire(&mut self, now: Instant) {
        if now < *self.expired.get_or_insert(now) + WATCH_LIMIT {
            return;
        }
        self.expired = Some(now);
        self.conditions
            .retain(|_, (_, started)| now < *started + WATCH_LIMIT);
    }
}

impl Planner {
    /// Observes the condition of a pod. A bound pod does not wait.
    pub(super) fn observe_condition(&mut self, uid: &str, pod: &Pod) {
        self.reporter.conditions.observe(uid, pod);
        self.reporter.running.observe(uid, pod);
        if drava_allocator::pod::node(pod).is_some() {
            let waiting = pod_condition::waiting(pod, self.reporter.conditions.get(uid));
            self.reporter.newly_allocated.extend(waiting);
        }
    }

    /// Writes why a pod waits, if its condition does not say yet that it waits.
    pub(super) fn write_first_condition(
        &mut self,
        uid: &str,
        explanation: &Explanation,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let Some(pending) = self.backlog.queue.get(uid) else {
            return;
        };
        let (pod, in_flight) = (&pending.pod, self.reporter.conditions.get(uid));
        if pod_condition::waiting(pod, in_flight).is_some() {
            return;
        }
        let reason = EventReason::GpuUnschedulable.as_str();
        let (message, now) = (explanation.summary(), time.time.0);
        let update = pod_condition::unallocated(pod, in_flight, reason, &message, now);
        self.write_conditions(update, time.instant, actions);
    }

    /// Suspends the decision for a pod because of this work, and writes why it waits: the decision may end after minutes.
    pub(super) fn suspend_pod(
        &mut self,
        uid: &str,
        work: Work,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        const SELECTORS: &str = "the selectors of the pod, or of other pods of its namespace, take long to evaluate; the \
                                 evaluation goes on after the decisions for other pods";
        const SEARCHES: &str = "the devices can be combined in many ways; the search goes on after the decisions for other pods";
        const CHECKS: &str = "many nodes are checked for each pod of the gang, or many pods could end for this one; the checks \
                              go on after the decisions for other pods";
        self.backlog.queue.suspend(uid, work);
        let explanation = match work {
            Work::Selectors => Explanation::rejected(Reason::CostlySelectors, SELECTORS),
            Work::Searches => Explanation::rejected(Reason::CostlySearch, SEARCHES),
            Work::Checks => Explanation::rejected(Reason::CostlySearch, CHECKS),
        };
        if let Some(pending) = self.backlog.queue.get_mut(uid) {
            pending.reason.get_or_insert(explanation.reason());
        }
        self.write_first_condition(uid, &explanation, time, actions);
    }

    /// Writes the condition of each pod that an event reports as unschedulable, and of the pods that have stopped waiting.
    pub(super) fn write_changed_conditions(
        &mut self,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        self.reporter.conditions.expire(time.instant);
        let now = time.time.0;
        let of_event = |action: &Action| -> Option<PodConditionUpdate> {
            let Action::PublishEvent(event) = action else {
                return None;
            };
            let is_waiting = event.reason == EventReason::GpuUnschedulable;
            let uid = event.regarding.uid.as_ref().filter(|_| is_waiting)?;
            let pod = &self.backlog.queue.get(uid)?.pod;
            let in_flight = self.reporter.conditions.get(uid);
            pod_condition::unallocated(pod, in_flight, event.reason.as_str(), &event.message, now)
        };
        let mut updates: Vec<PodConditionUpdate> = actions.iter().filter_map(of_event).collect();
        let allocated = std::mem::take(&mut self.reporter.newly_allocated).into_iter();
        updates.extend(allocated.map(|pod| pod_condition::allocated(pod, now)));
        self.write_conditions(updates, time.instant, actions);
    }

    /// Notes that it may have changed whether the programs of a pod run.
    pub(super) fn note_running(&mut self, uid: &str) {
        let Some(pod) = self.world.live_pods.get(uid) else {
            return;
        };
        let suspensions = &self.commitments.suspensions;
        let is_concerned = pod.is_running_gate
            || pod.running.is_some()
            || pod.claims.iter().any(|claim| suspensions.contains(claim));
        if pod.is_bound && is_concerned {
            self.reporter.running_changed.insert(uid.to_owned());
        }
    }

    /// Writes whether the programs of pods run of which that may have changed.
    pub(super) fn write_running_conditions(
        &mut self,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        self.reporter.running.expire(time.instant);
        for uid in std::mem::take(&mut self.reporter.running_changed) {
            let Some(pod) = self.world.live_pods.get(&uid) else {
                continue;
            };
            let suspended = self.stands_still(pod);
            let before = self.reporter.running.get(&uid).or(pod.running.as_ref());
            if before.is_none() && suspended.is_none() && !pod.is_running_gate {
                continue;
            }
            let (pod, now) = (pod.reference.clone(), time.time.0);
            let update = pod_condition::running(pod, before, suspended.as_deref(), now);
            let update = update.filter(|update| self.reporter.running.start(update, time.instant));
            actions.extend(update.map(Action::WritePodCondition));
        }
    }

    fn write_conditions(
        &mut self,
        updates: impl IntoIterator<Item = PodConditionUpdate>,
        now: Instant,
        actions: &mut Vec<Action>,
    ) {
        let new = updates
            .into_iter()
            .filter(|update| self.reporter.conditions.start(update, now));
        actions.extend(new.map(Action::WritePodCondition));
    }
}
