//! Pods whose claims do not exist, or cannot be used.
//!
//! kube-controller-manager creates the claims of templates a moment after the pod, so a pod waits for a moment in silence. If
//! a quota refuses a claim, kube-controller-manager tries again after up to 16 minutes, also when the quota is free long
//! before; but it tries at once when the pod changes. So the pod's condition is written again from time to time, and soon
//! after a claim of the namespace was deleted, with a new `lastProbeTime` only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::claim_problem::{ClaimProblem, Claims};
use drava_allocator::explanation::Explanation;
use drava_allocator::object::ObjectKey;
use drava_api::reason::Reason;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use super::{DecisionTime, Planner};
use crate::action::Action;
use crate::pods::{pod, pod_condition};

/// Time that the creation of a claim has, in silence.
const GRACE: Duration = Duration::from_secs(1);
/// Time from the first report to the first reminder; doubles with each.
const FIRST_REMINDER: Duration = Duration::from_secs(5);
/// Maximum time between two reminders.
const MAX_PAUSE: Duration = Duration::from_secs(120);
/// Time after which the controller of ResourceQuotas has noticed that a claim is gone.
const QUOTA_DELAY: Duration = Duration::from_secs(1);
/// Number of pods of a namespace that are tried again after the end of a claim.
const TRIED_AFTER_RELEASE: usize = 16;

/// A pod without a claim.
#[derive(Debug)]
struct Waiting {
    namespace: String,
    since: Instant,
    next: Instant,
    /// Number of reports and reminders.
    reports: u32,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct MissingClaims {
    /// By UID.
    pods: BTreeMap<String, Waiting>,
    due: BTreeSet<(Instant, String)>,
}

/// What to do about a pod without a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Nothing so far.
    Wait,
    /// Report it.
    Report,
    /// Report it, and remind kube-controller-manager.
    Remind,
}

impl MissingClaims {
    /// A decision has found a claim missing.
    fn found_missing(&mut self, uid: &str, namespace: &str, now: Instant) -> Step {
        let Some(pod) = self.pods.get_mut(uid) else {
            let next = now + GRACE;
            let pod = Waiting {
                namespace: namespace.to_owned(),
                since: now,
                next,
                reports: 0,
            };
            self.pods.insert(uid.to_owned(), pod);
            self.due.insert((next, uid.to_owned()));
            return Step::Wait;
        };
        if now < pod.next {
            return if pod.reports == 0 {
                Step::Wait
            } else {
                Step::Report
            };
        }
        let step = if pod.reports == 0 {
            Step::Report
        } else {
            Step::Remind
        };
        self.due.remove(&(pod.next, uid.to_owned()));
        pod.next = now
            + FIRST_REMINDER
                .saturating_mul(1 << pod.reports.min(5))
                .min(MAX_PAUSE);
        pod.reports = pod.reports.saturating_add(1);
        self.due.insert((pod.next, uid.to_owned()));
        step
    }

    /// A decision has found all claims of the pod, or the pod is gone.
    pub(super) fn remove(&mut self, uid: &str) {
        if let Some(pod) = self.pods.remove(uid) {
            self.due.remove(&(pod.next, uid.to_owned()));
        }
    }

    /// Nothing is to be done about the pod before `until`.
    fn postpone(&mut self, uid: &str, until: Instant) {
        if let Some(pod) = self.pods.get_mut(uid) {
            self.due.remove(&(pod.next, uid.to_owned()));
            pod.next = pod.next.max(until);
            self.due.insert((pod.next, uid.to_owned()));
        }
    }

    /// A claim of the namespace is gone: the oldest pods are tried again soon.
    pub(super) fn claim_gone(&mut self, namespace: &str, now: Instant) {
        let waiting = self.pods.iter();
        let mut waiting: Vec<(Instant, String)> = waiting
            .filter(|(_, pod)| pod.namespace == namespace && pod.reports > 0)
            .map(|(uid, pod)| (pod.since, uid.clone()))
            .collect();
        waiting.sort_unstable();
        for (_, uid) in waiting.into_iter().take(TRIED_AFTER_RELEASE) {
            if let Some(pod) = self.pods.get_mut(&uid) {
                self.due.remove(&(pod.next, uid.clone()));
                pod.next = pod.next.min(now + QUOTA_DELAY);
                pod.reports = 1;
                self.due.insert((pod.next, uid));
            }
        }
    }

    /// Returns the UIDs of the pods of a namespace.
    pub(super) fn of_namespace(&self, namespace: &str) -> Vec<String> {
        let pods = self.pods.iter();
        let pods = pods.filter(|(_, pod)| pod.namespace == namespace);
        pods.map(|(uid, _)| uid.clone()).collect()
    }

    /// Returns the UIDs of the pods whose report or reminder is due.
    fn due(&self, now: Instant) -> Vec<String> {
        let due = self.due.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, uid)| uid.clone()).collect()
    }

    /// Returns when a decision is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }
}

impl Planner {
    /// Makes decisions due for the pods whose missing claims are to be reported.
    pub(super) fn review_missing_claims(&mut self, now: Instant) {
        for uid in self.backlog.missing_claims.due(now) {
            let pending = self.backlog.queue.get_mut(&uid);
            let back_off_end = pending.and_then(|pending| {
                pending.activate();
                pending.back_off_end()
            });
            // A back-off ends with a decision, which finds the claim missing or not.
            if let Some(until) = back_off_end {
                self.backlog.missing_claims.postpone(&uid, until);
            }
        }
    }

    /// Reports why a claim of the pod cannot be used. A pod without the gate may wait for claims of other drivers, and
    /// kube-scheduler says what it waits for.
    pub(super) fn report_claim_problem(
        &mut self,
        uid: &str,
        problem: &ClaimProblem,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let Some(pending) = self.backlog.queue.get(uid) else {
            return;
        };
        if !pod::has_allocation_gate(&pending.pod) && pending.reason.is_none() {
            self.backlog.missing_claims.remove(uid);
            return;
        }
        let step = match problem.may_be_momentary() {
            true => {
                self.backlog
                    .missing_claims
                    .found_missing(uid, pending.namespace(), time.instant)
            }
            false => {
                self.backlog.missing_claims.remove(uid);
                Step::Report
            }
        };
        if step == Step::Wait {
            return;
        }
        let explanation = Explanation::rejected(Reason::ClaimMissing, problem.to_string());
        self.report_unschedulable(uid, &explanation, &Vec::new(), time, actions);
        if step == Step::Remind
            && matches!(problem, ClaimProblem::NotCreated { .. })
            && let Some(pending) = self.backlog.queue.get(uid)
        {
            let in_flight = self.reporter.conditions.get(uid);
            let reminder = pod_condition::probed(&pending.pod, in_flight, time.time.0);
            actions.extend(reminder.map(Action::WritePodCondition));
        }
    }
}

impl Claims<Arc<ResourceClaim>> for Planner {
    fn claim(&self, key: &ObjectKey) -> Option<Arc<ResourceClaim>> {
        self.commitments.ledger.claim(key).cloned()
    }

    fn unreadable(&self, key: &ObjectKey) -> Option<String> {
        self.world.unreadable_claim(key).map(str::to_owned)
    }

    fn has_template(&self, key: &ObjectKey) -> Option<bool> {
        Some(self.world.templates.contains(key))
    }
}
