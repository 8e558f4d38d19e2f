//! Rollouts that block themselves: the new pod of a Deployment waits for devices of its old ones, which the rollout ends only
//! when the new pod runs.

use std::collections::BTreeSet;

use drava_allocator::cluster::Departure;
use drava_allocator::explanation::Explanation;
use drava_allocator::searched::Suspended;
use drava_allocator::turn::Turn;
use drava_api::reason::Reason;

use super::RoomCause;
use crate::decide::planner::decision::Group;
use crate::decide::planner::{DecisionTime, Planner};
use crate::pods::pod::Revision;

/// Namespace and revision of a Deployment.
pub(in crate::decide::planner) type Rollout = (Option<String>, Revision);

impl Planner {
    /// Returns why the rollout of a pod's Deployment is blocked: the pod fits only when pods of another revision have ended,
    /// and none of them is being deleted.
    pub(super) fn own_rollout(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        time: &DecisionTime,
        turn: &mut Turn,
    ) -> Result<Option<Explanation>, Suspended> {
        let [request] = &group.requests[..] else {
            return Ok(None);
        };
        let Some(key) = self.rollout_of(&request.pod_request.uid) else {
            return Ok(None);
        };
        // The pods of a rollout are equal.
        let rollouts = &self.backlog.rejections.at(&self.world).rollouts;
        let known = rollouts.of(&request.pod_request).find(|(of, _)| *of == key);
        if let Some((_, blocked)) = known.cloned() {
            return Ok(blocked);
        }
        let blocked = self.blocked_rollout(group, ending, &key, time, turn)?;
        let rejections = self.backlog.rejections.at(&self.world);
        let rollout = (key, blocked.clone());
        rejections.rollouts.add(&request.pod_request, rollout);
        Ok(blocked)
    }

    fn rollout_of(&self, uid: &str) -> Option<Rollout> {
        let pod = self.world.live_pods.get(uid)?;
        Some((pod.reference.namespace.clone(), pod.revision.clone()?))
    }

    fn blocked_rollout(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        (namespace, revision): &Rollout,
        time: &DecisionTime,
        turn: &mut Turn,
    ) -> Result<Option<Explanation>, Suspended> {
        let Some(request) = group.requests.first() else {
            return Ok(None);
        };
        let others = self.world.live_pods.iter().filter(|(_, other)| {
            let of = other.revision.as_ref();
            let is_other = of.is_some_and(|of| {
                of.deployment == revision.deployment && of.template_hash != revision.template_hash
            });
            is_other && other.is_bound && other.reference.namespace == *namespace
        });
        let others: Vec<_> = others.collect();
        if others.is_empty() || others.iter().any(|(_, pod)| pod.grace_period_end.is_some()) {
            return Ok(None);
        }
        let mut ended: BTreeSet<String> =
            others.into_iter().map(|(uid, _)| uid.to_owned()).collect();
        ended.extend(ending.iter().cloned());
        let search = self.search(group, ending, RoomCause::Wait, &|_| None, time);
        self.presume_ended(&search, &ended);
        let placed = self.place(&request.pod_request, turn);
        self.world.cluster.presume_gone(&Departure::default());
        Ok(placed?.map(|_| {
            let message = format!(
                "the pod fits when pods of another revision of Deployment {} have ended, and the rollout ends them only when \
                 this pod is ready; set strategy.rollingUpdate.maxSurge: 0 with maxUnavailable: 1, or strategy.type: Recreate",
                revision.deployment
            );
            Explanation::rejected(Reason::RolloutBlocked, message)
        }))
    }
}
