//! The best victims for a pod, searched node by node, and remembered for the equal pods of its gang.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::Departure;
use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::turn;

use super::holders::NodesOfPod;
use super::{RoomCause, RoomProgress, Search};
use crate::planner::Planner;
use crate::planner::demand::Request;
use crate::victims::{self, Cost, Effect, Simulation};

/// Units of checks of devices in one turn beyond which sets of pods are not compared any more, about 50 ms.
const COMPARISON_UNITS: u64 = 100_000;
/// Units of one search among the nodes in one turn, about as long.
const SEARCH_UNITS: u64 = 100_000;
/// Units of a simulation, beside its checks of devices.
const SIMULATION_UNITS: u64 = 20;

/// The best victims on each node for one request. Nodes that changed since are searched again. What changes elsewhere, such
/// as the usage of a quota, may outdate the victims of a node; a placement checks them again.
#[derive(Default)]
pub(super) struct KnownVictims {
    request: Option<PodRequest>,
    by_node: BTreeMap<String, Cost>,
    changed: BTreeSet<String>,
}

impl KnownVictims {
    /// A member was placed on the node.
    pub(super) fn node_changed(&mut self, node: &str) {
        self.changed.insert(node.to_owned());
    }

    /// These pods are going to end.
    pub(super) fn pods_ended(&mut self, nodes_of_pod: &NodesOfPod<'_>, ended: &BTreeSet<String>) {
        for uid in ended {
            let nodes = nodes_of_pod.get(uid.as_str()).into_iter().flatten();
            self.changed.extend(nodes.map(|node| (*node).to_owned()));
        }
    }

    /// Removes and returns the best victims, with their node.
    fn take_best(&mut self) -> Option<(String, BTreeSet<String>)> {
        let best = self.by_node.iter().min_by_key(|(_, cost)| *cost);
        let node = best.map(|(node, _)| node.clone())?;
        let cost = self.by_node.remove(&node)?;
        Some((node, cost.into_uids()))
    }
}

impl Planner {
    /// Returns a placement of the pod on the node where the best set of pods has to end, and this set, which is presumed to
    /// have ended. The pod fits on no node without such an end.
    pub(super) fn place_by_victims(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        known: &mut KnownVictims,
    ) -> Option<(Placement, BTreeSet<String>)> {
        if search.group.requests.len() == 1 {
            let (node, victims) = self.best_victims(request, search)?;
            return self.place_instead(request, search, (&node, victims));
        }
        // The members of a gang are often equal.
        let pod_request = &request.pod_request;
        let of = known.request.as_ref();
        if of.is_some_and(|of| of.is_equivalent(pod_request)) {
            let placed = self.place_by_known(request, search, known);
            if placed.is_some() {
                return placed;
            }
        }
        *known = KnownVictims {
            request: Some(pod_request.clone()),
            by_node: BTreeMap::new(),
            changed: search.holders.candidates.keys().cloned().collect(),
        };
        self.place_by_known(request, search, known)
    }

    /// Returns the placement by the known victims, after a search on the nodes that have changed.
    fn place_by_known(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        known: &mut KnownVictims,
    ) -> Option<(Placement, BTreeSet<String>)> {
        for node in std::mem::take(&mut known.changed) {
            known.by_node.remove(&node);
            if let Some(cost) = self.victims_on(&node, request, search, None) {
                known.by_node.insert(node, cost);
            }
        }
        while let Some((node, victims)) = known.take_best() {
            let placed = self.place_instead(request, search, (&node, victims));
            if placed.is_some() {
                return placed;
            }
        }
        None
    }

    /// Returns the placement of the pod on the node when the victims have ended, and the victims, which are presumed to have
    /// ended, if it fits then.
    fn place_instead(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        (node, victims): (&str, BTreeSet<String>),
    ) -> Option<(Placement, BTreeSet<String>)> {
        let gone = self.presume_also_ended(&search.holders, &victims);
        let policies = self.world.settings.policies;
        let placed = self
            .world
            .cluster
            .decide_on(node, &request.pod_request, policies);
        let placement = placed
            .ok()
            .filter(|_| self.world.cluster.keeps(&search.floors));
        if placement.is_none() {
            self.world.cluster.presume_back(&gone);
        }
        Some((placement?, victims))
    }

    /// Returns the best set of pods of one node whose end makes room for the pod, and the node. A search of many nodes goes on
    /// in other turns.
    fn best_victims(
        &mut self,
        request: &Request,
        search: &Search<'_>,
    ) -> Option<(String, BTreeSet<String>)> {
        let uid = &request.pod_request.uid;
        let before = self.backlog.suspended_decisions.take_room(uid);
        let before = before.filter(|before| before.cause == search.cause);
        let (first, mut best) = match before {
            Some(RoomProgress { next, best, .. }) => (next, best),
            None => (String::new(), None),
        };
        let started = turn::checked();
        let mut has_progress = false;
        for (node, candidates) in search.holders.candidates.range(first..) {
            let is_over = turn::checked().saturating_sub(started) >= SEARCH_UNITS;
            let is_first = !std::mem::replace(&mut has_progress, true);
            if !is_first && (is_over || turn::has_searched()) {
                return self.continue_at(node, best, uid, search.cause);
            }
            let bound = best.as_ref().map(|(_, cost)| cost);
            if bound.is_some_and(|bound| victims::cannot_beat(candidates, bound)) {
                continue;
            }
            match self.victims_on(node, request, search, bound) {
                Some(cost) => best = Some((node.clone(), cost)),
                // The turn ended amid the simulations, so they tell nothing about this node.
                None if !is_first && turn::has_searched() => {
                    return self.continue_at(node, best, uid, search.cause);
                }
                None => {}
            }
        }
        best.map(|(node, cost)| (node, cost.into_uids()))
    }

    /// Suspends a search for victims, which goes on with this node.
    fn continue_at<T>(
        &mut self,
        node: &str,
        best: Option<(String, Cost)>,
        uid: &str,
        cause: RoomCause,
    ) -> Option<T> {
        let progress = RoomProgress {
            cause,
            next: node.to_owned(),
            best,
        };
        self.backlog.suspended_decisions.set_room(uid, progress);
        turn::suspend_search();
        None
    }

    /// Returns the best set of pods of the node whose end makes room for the pod. `None` if there is none better than
    /// `bound`.
    fn victims_on(
        &mut self,
        node: &str,
        request: &Request,
        search: &Search<'_>,
        bound: Option<&Cost>,
    ) -> Option<Cost> {
        let candidates = search.holders.candidates.get(node)?;
        victims::search(
            candidates,
            bound,
            &mut OnNode {
                planner: self,
                node,
                request,
                search,
            },
        )
    }
}

/// Simulations of the end of pods of one node.
struct OnNode<'a> {
    planner: &'a mut Planner,
    node: &'a str,
    request: &'a Request,
    search: &'a Search<'a>,
}

impl Simulation for OnNode<'_> {
    /// A search for devices that gave up tells nothing about victims, and another one would give up, too.
    fn effect(&mut self, victims: &BTreeSet<String>) -> Option<Effect> {
        let Search {
            holders, floors, ..
        } = self.search;
        turn::count(SIMULATION_UNITS);
        let gone: Departure = self.planner.presume_also_ended(holders, victims);
        let cluster = &self.planner.world.cluster;
        let policies = self.planner.world.settings.policies;
        let placed = cluster.decide_on(self.node, &self.request.pod_request, policies);
        let effect = match placed {
            Err(explanation) if explanation.gave_up() => None,
            Err(_) => Some(Effect::TooLittle),
            Ok(_) if cluster.keeps(floors) => Some(Effect::Enough),
            Ok(_) => Some(Effect::Forbidden),
        };
        self.planner.world.cluster.presume_back(&gone);
        effect
    }

    fn may_compare(&self) -> bool {
        turn::checked() < COMPARISON_UNITS
    }
}
