//! Idle shares: what their GpuPolicy does with them.
//!
//! The node driver says since when a share has used no GPU time, in the condition `Idle`. It is a level, so a new leader finds the
//! same shares. Each idle period has one action: an event, the suspension of the share, or the eviction of its pod.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use drava_api::event::EventReason;
use drava_api::policy::{IdleAction, IdlePolicy};
use drava_api::{names, suspension};
use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use crate::action::{Action, Eviction, EvictionCause, OwnCause, Victim};
use crate::decide::planner::{DecisionTime, Planner};
use crate::pods::claim;

/// Time after which an idle share is looked at again that could be neither suspended nor evicted.
const RETRY: Duration = Duration::from_secs(300);

/// Time for which a new leader does nothing about the idle shares that it finds. The API server may have been away, and the node drivers
/// write within half a minute which of them are used again.
const SETTLE: Duration = Duration::from_secs(60);

/// Idle shares, each with when it is to be looked at: `None` after its action.
#[derive(Debug, Default)]
pub(in crate::decide::planner) struct IdleShares(BTreeMap<ObjectKey, Idle>);

#[derive(Debug)]
struct Idle {
    since: Timestamp,
    /// Nothing is done before.
    settled: Instant,
    due: Option<Instant>,
    /// Whether something was done.
    has_action: bool,
}

/// What is done with an idle share now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// No policy says anything of it.
    Nothing,
    /// It has not been idle for long enough.
    Wait(Duration),
    Act(IdleAction),
}

/// Returns what is done with a share that has been idle for this time.
fn step(policy: Option<IdlePolicy>, idle: Duration) -> Step {
    let Some(IdlePolicy { after, action }) = policy else {
        return Step::Nothing;
    };
    match after.duration().checked_sub(idle) {
        Some(left) if !left.is_zero() => Step::Wait(left),
        _ => Step::Act(action),
    }
}

impl IdleShares {
    /// Observes the newest version of a claim, which may be outdated if it `is_listed`. An idle period that is known is not acted on
    /// again.
    pub(super) fn observe(
        &mut self,
        key: &ObjectKey,
        claim: &ResourceClaim,
        is_listed: bool,
        now: Instant,
    ) {
        let Some(since) = suspension::idle_since(claim).filter(|_| claim::is_allocated(claim))
        else {
            self.0.remove(key);
            return;
        };
        if self.0.get(key).is_none_or(|known| known.since != since) {
            let settled = now + if is_listed { SETTLE } else { Duration::ZERO };
            let due = Some(settled);
            let idle = Idle {
                since,
                settled,
                due,
                has_action: false,
            };
            self.0.insert(key.clone(), idle);
        }
    }

    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.0.remove(key);
    }

    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().filter_map(|idle| idle.due).min()
    }

    /// A policy has changed: all periods are looked at again.
    pub(in crate::decide::planner) fn policy_changed(&mut self, now: Instant) {
        for idle in self.0.values_mut() {
            idle.due = Some(now.max(idle.settled));
        }
    }

    /// The labels by which policies select may have changed: the periods are looked at again that had no action.
    pub(in crate::decide::planner) fn selection_changed(&mut self, now: Instant) {
        for idle in self.0.values_mut().filter(|idle| !idle.has_action) {
            idle.due = Some(now.max(idle.settled));
        }
    }

    fn take_due(&mut self, now: Instant) -> Vec<(ObjectKey, Timestamp)> {
        let due = self.0.iter_mut();
        let due = due.filter(|(_, idle)| idle.due.is_some_and(|due| due <= now));
        due.map(|(key, idle)| {
            idle.due = None;
            (key.clone(), idle.since)
        })
        .collect()
    }

    fn acts(&mut self, key: &ObjectKey) {
        if let Some(idle) = self.0.get_mut(key) {
            idle.has_action = true;
        }
    }

    pub(super) fn look_again(&mut self, key: &ObjectKey, at: Instant) {
        if let Some(idle) = self.0.get_mut(key) {
            idle.due = Some(at);
        }
    }
}

impl Planner {
    /// Does what the policies say with the shares that are idle for long enough.
    pub(in crate::decide::planner) fn decide_idle_shares(
        &mut self,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        for (key, since) in self.commitments.suspensions.idle.take_due(time.instant) {
            let Some(claim) = self.commitments.ledger.claim(&key).cloned() else {
                continue;
            };
            let classes: BTreeSet<&str> = claim::classes(&claim).collect();
            let policy = self.world.cluster.idle_policy(&key.0, &classes);
            let is_evicted = policy.is_some_and(|policy| policy.action == IdleAction::Evict);
            let Some(since) = self.idle_since(&key, since, is_evicted) else {
                let idle = &mut self.commitments.suspensions.idle;
                idle.look_again(&key, time.instant + RETRY);
                continue;
            };
            let idle = Duration::try_from(time.time.0.duration_since(since)).unwrap_or_default();
            let action = match step(policy, idle) {
                Step::Nothing => continue,
                Step::Wait(left) => {
                    let idle = &mut self.commitments.suspensions.idle;
                    idle.look_again(&key, time.instant + left);
                    continue;
                }
                Step::Act(action) => action,
            };
            self.commitments.suspensions.idle.acts(&key);
            let state = format!("has used no GPU time since {since}");
            match action {
                IdleAction::Event => {
                    self.report_suspension(&claim, EventReason::ShareIdle, &state, time, actions);
                }
                IdleAction::Suspend => self.suspend_idle(&key, &claim, &state, time, actions),
                IdleAction::Evict => self.evict_idle(&key, &claim, &state, time, actions),
            }
        }
    }

    /// Returns since when the time of a share counts that `since` uses no GPU time. The eviction of a pod is no matter before the pod is
    /// ready: until then it pulls its image, or loads its model.
    fn idle_since(&self, key: &ObjectKey, since: Timestamp, is_evicted: bool) -> Option<Timestamp> {
        if !is_evicted {
            return Some(since);
        }
        let (_, pod) = self.pod_of(key)?;
        pod.ready_since.map(|ready| since.max(ready))
    }

    fn suspend_idle(
        &mut self,
        key: &ObjectKey,
        claim: &ResourceClaim,
        state: &str,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let suspensions = &self.commitments.suspensions;
        if suspensions.contains(key) || suspension::is_suspended(claim) {
            return;
        }
        let problem = suspensions.protected.contains_key(key).then(|| {
            let refusal = suspension::refusal(claim).map(|refusal| refusal.message.clone());
            refusal.unwrap_or_else(|| "its node has not suspended it a short time ago".to_owned())
        });
        let problem = problem.or_else(|| self.suspension_problem_now(claim));
        let message = match &problem {
            None => {
                let cause = names::SUSPENDED_FOR_IDLENESS.to_owned();
                self.intend(key, None, Some(cause), actions);
                format!("{state}, and is being suspended until a program calls CUDA")
            }
            Some(problem) => {
                let idle = &mut self.commitments.suspensions.idle;
                idle.look_again(key, time.instant + RETRY);
                format!("{state}, and cannot be suspended: {problem}")
            }
        };
        self.report_suspension(claim, EventReason::ShareIdle, &message, time, actions);
    }

    fn evict_idle(
        &mut self,
        key: &ObjectKey,
        claim: &ResourceClaim,
        state: &str,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let Some((uid, pod)) = self.pod_of(key).filter(|(_, pod)| pod.is_bound) else {
            return;
        };
        if pod.grace_period_end.is_some() || self.commitments.evicted.contains_key(uid) {
            return;
        }
        let suspensions = &self.commitments.suspensions;
        let is_suspended = suspensions.contains(key) || suspension::is_suspended(claim);
        let obstacle = if self.share_of_pod(pod).as_ref() != Some(key) {
            Some("the pod has other claims".to_owned())
        } else {
            let gang = pod.gang.as_ref();
            gang.map(|gang| format!("the pod belongs to gang {gang}"))
        };
        if is_suspended || obstacle.is_some() {
            let idle = &mut self.commitments.suspensions.idle;
            idle.look_again(key, time.instant + RETRY);
            // Of a suspended share its pod has other events.
            if let Some(obstacle) = obstacle.filter(|_| !is_suspended) {
                let message = format!("{state}, and its pod is not evicted: {obstacle}");
                self.report_suspension(claim, EventReason::ShareIdle, &message, time, actions);
            }
            return;
        }
        let victim = Victim {
            pod: pod.reference.clone(),
            priority: pod.priority,
        };
        let uid = uid.to_owned();
        self.commitments.evicted.insert(uid, None);
        // Its pod may be created again by then, or may have used its GPU.
        let idle = &mut self.commitments.suspensions.idle;
        idle.look_again(key, time.instant + RETRY);
        actions.push(Action::Evict(Eviction {
            cause: EvictionCause::Own(OwnCause::Idle, format!("its share {state}")),
            victims: vec![victim],
        }));
    }

    /// The pod of an idle share could not be evicted. It is tried again later.
    pub(in crate::decide::planner) fn idle_not_ended(&mut self, pod_uid: &str, now: Instant) {
        let pod = self.world.live_pods.get(pod_uid);
        let key = pod.and_then(|pod| self.share_of_pod(pod));
        if let Some(key) = key {
            let idle = &mut self.commitments.suspensions.idle;
            idle.look_again(&key, now + RETRY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acts_after_time_of_policy() {
        let policy = |after: &str, action| {
            let after = after.to_owned().try_into().unwrap();
            Some(IdlePolicy { after, action })
        };
        let seconds = Duration::from_secs;
        let cases = [
            (None, 86_400, Step::Nothing),
            (
                policy("1h", IdleAction::Suspend),
                3599,
                Step::Wait(seconds(1)),
            ),
            (
                policy("1h", IdleAction::Suspend),
                3600,
                Step::Act(IdleAction::Suspend),
            ),
            (
                policy("1m30s", IdleAction::Evict),
                60,
                Step::Wait(seconds(30)),
            ),
            (
                policy("90s", IdleAction::Event),
                9000,
                Step::Act(IdleAction::Event),
            ),
        ];
        for (policy, idle, expected) in cases {
            assert_eq!(step(policy, seconds(idle)), expected, "{policy:?} {idle}");
        }
    }
}
