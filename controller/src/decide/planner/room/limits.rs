//! Limits of evictions that GpuPolicies set: the delay of a pod that others are evicted for, and the minimum runtime of the
//! evicted pods.

use std::collections::BTreeSet;
use std::time::Duration;

use drava_allocator::steps;
use drava_api::policy::PreemptionLimits;
use jiff::{SignedDuration, Timestamp};
use tokio::time::Instant;

use crate::decide::planner::decision::Group;
use crate::decide::planner::{DecisionTime, Planner};
use crate::pods::claim;
use crate::pods::live_pods::LivePod;

impl Planner {
    /// Returns whether every pod of the group has waited for its delay. A pod that has not is decided again then.
    pub(super) fn has_waited(&mut self, group: &Group, time: &DecisionTime) -> bool {
        let mut delays = Vec::new();
        for request in &group.requests {
            let uid = &request.pod_request.uid;
            let Some(pod) = self.world.live_pods.get(uid) else {
                continue;
            };
            let delay = self.preemption_limits(pod).delay_seconds;
            let end = delay.and_then(|delay| end(pod.created, delay, time));
            delays.extend(end.map(|end| (uid.clone(), end)));
        }
        let has_waited = delays.is_empty();
        for (uid, end) in delays {
            self.backlog.eviction_delays.set(uid, end);
        }
        has_waited
    }

    /// Returns until when a pod is not evicted because of its minimum runtime.
    pub(super) fn minimum_runtime_end(
        &self,
        pod: &LivePod,
        time: &DecisionTime,
    ) -> Option<Instant> {
        steps::count(1);
        let has_limits = self.world.cluster.has_preemption_limits();
        let bound_at = pod.bound_at.filter(|_| has_limits)?;
        let runtime = self.preemption_limits(pod).minimum_runtime_seconds?;
        end(bound_at, runtime, time)
    }

    fn preemption_limits(&self, pod: &LivePod) -> PreemptionLimits {
        let claims = pod
            .claims
            .iter()
            .filter_map(|key| self.commitments.ledger.claim(key));
        let classes: BTreeSet<&str> = claims.flat_map(|claim| claim::classes(claim)).collect();
        let namespace = pod.reference.namespace.as_deref().unwrap_or_default();
        self.world.cluster.preemption_limits(namespace, &classes)
    }
}

/// Returns when this number of seconds after `start` is over; `None` if it is.
fn end(start: Timestamp, seconds: u32, time: &DecisionTime) -> Option<Instant> {
    let end = start.checked_add(SignedDuration::from_secs(seconds.into()));
    let left = Duration::try_from(end.ok()?.duration_since(time.time.0)).ok()?;
    (!left.is_zero()).then(|| time.instant + left)
}
