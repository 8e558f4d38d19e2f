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
    known: Recent<Explanation>,
    /// Requests for which no room of that kind can be made.
    pub(super) without_room: Recent<RoomKind>,
    /// Requests with the reservation that keeps their devices, if one does.
    pub(super) reserved: Recent<Option<Explanation>>,
    /// Requests of rollouts, with why the rollout is blocked if it is.
    pub(super) rollouts: Recent<(Rollout, Option<Explanation>)>,
    /// The last explanation with its nodes that are unfit regardless of devices.
    unfit_nodes: Option<(Explanation, Arc<NodeSet>)>,
}

/// What is known of the last requests, the newest first.
#[derive(Debug)]
pub(super) struct Recent<T>(VecDeque<(PodRequest, T)>);

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T> Recent<T> {
    /// Adds what is known of a request, and forgets the oldest.
    pub(super) fn add(&mut self, request: &PodRequest, known: T) {
        self.0.push_front((request.clone(), known));
        self.0.truncate(MAX_REJECTIONS);
    }

    /// Returns what is known of a request that is equal to this one.
    pub(super) fn of(&self, request: &PodRequest) -> impl Iterator<Item = &T> {
        let equal = |(known, _): &&(PodRequest, T)| known.is_equivalent(request);
        self.0.iter().filter(equal).map(|(_, known)| known)
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
        let known = &self.backlog.rejections.at(&self.world).known;
        if let Some(explanation) = known.of(pod_request).next() {
            return Err(explanation.clone().into());
        }
        let decision = self.decide(pod_request, turn);
        // Verdicts of earlier turns are older than an equal pod that is created meanwhile.
        let searched = pod_request.searched.as_ref();
        if let Err(Undecided::Rejected(explanation)) = &decision
            && !searched.is_some_and(|searched| searched.has_verdicts())
        {
            let known = &mut self.backlog.rejections.at(&self.world).known;
            known.add(pod_request, explanation.clone());
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
