//! Rejected requests of a round. Thousands of pods that do not fit are often equal; the cluster is searched once for them.

use std::collections::VecDeque;
use std::sync::Arc;

use drava_allocator::explanation::Explanation;
use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::Undecided;
use drava_allocator::turn::Turn;

use super::Planner;
use super::room::{Rollout, RoomKind};
use crate::decide::queue::NodeSet;

/// Most requests that are remembered.
const MAX_REJECTIONS: usize = 16;

/// See the [module](self). Valid in one revision of the world.
#[derive(Debug, Default)]
pub(super) struct Rejections {
    /// The newest first.
    known: VecDeque<(PodRequest, Explanation)>,
    /// Requests for which no room of that kind can be made, the newest first.
    without_room: VecDeque<(PodRequest, RoomKind)>,
    /// Requests with the reservation that keeps their devices, if one does; the newest first.
    reserved: VecDeque<(PodRequest, Option<Explanation>)>,
    /// Requests of rollouts, with why the rollout is blocked if it is; the newest first.
    rollouts: VecDeque<(PodRequest, Rollout, Option<Explanation>)>,
    /// The last explanation with its nodes that are unfit regardless of devices.
    unfit_nodes: Option<(Explanation, Arc<NodeSet>)>,
}

impl Rejections {
    /// Notes whether a rollout is blocked.
    pub(super) fn set_rollout(
        &mut self,
        request: &PodRequest,
        rollout: Rollout,
        blocked: Option<Explanation>,
    ) {
        self.rollouts
            .push_front((request.clone(), rollout, blocked));
        self.rollouts.truncate(MAX_REJECTIONS);
    }

    /// Returns why a rollout is blocked, if it is, and if that is known.
    pub(super) fn rollout(
        &self,
        request: &PodRequest,
        rollout: &Rollout,
    ) -> Option<&Option<Explanation>> {
        let mut known = self.rollouts.iter();
        let (.., blocked) =
            known.find(|(known, of, _)| of == rollout && known.is_equivalent(request))?;
        Some(blocked)
    }

    /// Notes which reservation keeps the devices of a request.
    pub(super) fn reserved(&mut self, request: &PodRequest, by: Option<Explanation>) {
        self.reserved.push_front((request.clone(), by));
        self.reserved.truncate(MAX_REJECTIONS);
    }

    /// Returns which reservation keeps the devices of a request, if that is known.
    pub(super) fn reserved_for(&self, request: &PodRequest) -> Option<&Option<Explanation>> {
        let mut known = self.reserved.iter();
        let (_, by) = known.find(|(known, _)| known.is_equivalent(request))?;
        Some(by)
    }

    /// Notes that no room can be made for a request.
    pub(super) fn no_room(&mut self, request: &PodRequest, kind: RoomKind) {
        self.without_room.push_front((request.clone(), kind));
        self.without_room.truncate(MAX_REJECTIONS);
    }

    /// Returns whether no room can be made for a request.
    pub(super) fn has_no_room(&self, request: &PodRequest, kind: RoomKind) -> bool {
        let mut known = self.without_room.iter();
        known.any(|(known, of)| *of == kind && known.is_equivalent(request))
    }
}

impl Planner {
    /// Decides like [`Planner::decide`]; for a request equal to one that was rejected, without a search.
    pub(super) fn decide_once(
        &mut self,
        pod_request: &PodRequest,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        // A pod with an assumed node does not compete with itself, so it is not equal to others.
        if self.world.cluster.node_of_pod(&pod_request.uid).is_some() {
            return self.decide(pod_request, turn);
        }
        let mut known = self.backlog.rejections.at(&self.world).known.iter();
        if let Some((_, explanation)) = known.find(|(known, _)| known.is_equivalent(pod_request)) {
            return Err(explanation.clone().into());
        }
        let decision = self.decide(pod_request, turn);
        // Verdicts of earlier turns are older than an equal pod that is created meanwhile.
        let searched = pod_request.searched.as_ref();
        if let Err(Undecided::Rejected(explanation)) = &decision
            && !searched.is_some_and(|searched| searched.has_verdicts())
        {
            let rejected = (pod_request.clone(), explanation.clone());
            let rejections = self.backlog.rejections.at(&self.world);
            rejections.known.push_front(rejected);
            rejections.known.truncate(MAX_REJECTIONS);
        }
        decision
    }

    /// Returns the nodes that are unfit regardless of devices.
    pub(super) fn unfit_nodes(&mut self, explanation: &Explanation) -> Arc<NodeSet> {
        let last = &mut self.backlog.rejections.at(&self.world).unfit_nodes;
        match last {
            Some((known, nodes)) if known.is_same(explanation) => Arc::clone(nodes),
            _ => {
                let nodes = self.backlog.queue.node_set(explanation.unfit_nodes());
                *last = Some((explanation.clone(), Arc::clone(&nodes)));
                nodes
            }
        }
    }
}
