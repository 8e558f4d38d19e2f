//! The best victims for a pod, searched node by node, and remembered for the equal pods of its gang.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::{Suspended, Undecided};
use drava_allocator::turn::{Turn, Work};

use super::holders::SIMULATION_UNITS;
use super::{FoundSoFar, RoomProgress, Search};
use crate::decide::planner::Planner;
use crate::decide::planner::demand::Request;
use crate::decide::victims::{self, Candidate, Cost, Effect, Simulation};

/// A placement, and the pods that have to end for it.
pub(super) type PlacedByVictims = (Placement, BTreeSet<String>);

/// The best victims on each node for one request. Nodes that changed since are searched again. What changes elsewhere, such
/// as the usage of a quota, may outdate the victims of a node; a placement checks them again.
#[derive(Debug, Default)]
pub(super) struct KnownVictims {
    request: Option<PodRequest>,
    by_node: BTreeMap<String, Cost>,
    changed: BTreeSet<String>,
    /// Whether every node was searched, or is going to be, for the pod that is placed now.
    is_complete: bool,
}

/// What the search for the victims of one pod has found so far.
#[derive(Debug)]
pub(super) struct PodRoom {
    /// Up to which node all were asked what victims cost there.
    asked: Bound<String>,
    /// The nodes that are not searched yet, by what victims cost there at least.
    nodes: BTreeSet<(Cost, String)>,
    /// The best victims so far, with their node.
    best: Option<(String, Cost)>,
}

impl Default for PodRoom {
    fn default() -> Self {
        Self {
            asked: Bound::Unbounded,
            nodes: BTreeSet::new(),
            best: None,
        }
    }
}

impl KnownVictims {
    /// Starts a search on these nodes: all that there are.
    fn restart(&mut self, request: &PodRequest, nodes: BTreeSet<String>) {
        *self = Self {
            request: Some(request.clone()),
            by_node: BTreeMap::new(),
            changed: nodes,
            is_complete: true,
        };
    }

    /// A member was placed on the node.
    pub(super) fn node_changed(&mut self, node: &str) {
        self.changed.insert(node.to_owned());
        self.is_complete = false;
    }

    /// Pods on these nodes are going to end.
    pub(super) fn pods_ended<'a>(&mut self, nodes: impl Iterator<Item = &'a str>) {
        self.changed.extend(nodes.map(str::to_owned));
    }

    /// Returns whether the victims are those for a pod, or for one equal to it.
    fn is_for(&self, request: &PodRequest) -> bool {
        let of = self.request.as_ref();
        of.is_some_and(|of| of.uid == request.uid || of.is_equivalent(request))
    }

    /// Removes and returns the best victims, with their node.
    fn take_best(&mut self) -> Option<(String, Cost)> {
        let best = self.by_node.iter().min_by_key(|(_, cost)| *cost);
        let node = best.map(|(node, _)| node.clone())?;
        self.by_node.remove_entry(&node)
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
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        if search.group.requests.len() == 1 {
            return self.place_by_best(request, search, turn);
        }
        // The members of a gang are often equal.
        let pod_request = &request.pod_request;
        if !known.is_for(pod_request) {
            known.restart(pod_request, self.nodes_with_holders());
        }
        let placed = self.place_by_known(request, search, known, turn)?;
        if placed.is_some() || known.is_complete {
            return Ok(placed);
        }
        known.restart(pod_request, self.nodes_with_holders());
        self.place_by_known(request, search, known, turn)
    }

    /// Returns the placement by the known victims, after a search on the nodes that have changed.
    fn place_by_known(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        known: &mut KnownVictims,
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        let mut has_progress = false;
        loop {
            while let Some(node) = known.changed.first().cloned() {
                if let Some(work) = turn.over_by().filter(|_| has_progress) {
                    return Err(work.into());
                }
                let candidates = self.candidates_on(&node, search, turn);
                let victims = match candidates.is_empty() {
                    true => None,
                    false => self.victims_on((&*node, candidates), request, search, None, turn)?,
                };
                // The turn ended amid the simulations, so they tell nothing about this node.
                if victims.is_none() && has_progress && turn.is_out_of_searches() {
                    return Err(Work::Searches.into());
                }
                has_progress = true;
                known.changed.remove(&node);
                match victims {
                    Some(cost) => known.by_node.insert(node, cost),
                    None => known.by_node.remove(&node),
                };
            }
            let Some((node, victims)) = known.take_best() else {
                return Ok(None);
            };
            // Some may have been chosen in an earlier turn.
            if !self.may_end(victims.uids(), search) {
                known.changed.insert(node);
                continue;
            }
            match self.place_instead(request, search, (&node, &victims), turn) {
                // It was cut short, and another turn has the time.
                Ok(None) if has_progress && turn.is_out_of_searches() => {
                    known.by_node.insert(node, victims);
                    return Err(Work::Searches.into());
                }
                Ok(None) => has_progress = true,
                placed => {
                    known.changed.insert(node);
                    return placed;
                }
            }
        }
    }

    /// Returns the placement of the pod on the node when the victims have ended, and the victims, which are presumed to have
    /// ended, if it fits then.
    fn place_instead(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        (node, victims): (&str, &Cost),
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        let victims = victims.uids();
        let gone = self.presume_also_ended(search, victims);
        let policies = self.world.settings.policies;
        let placed = self
            .world
            .cluster
            .decide_on_in(node, &request.pod_request, policies, turn);
        match placed {
            Ok(placement) if self.world.cluster.keeps(&search.floors) => {
                Ok(Some((placement, victims.clone())))
            }
            not_placed => {
                self.world.cluster.presume_back(&gone);
                match not_placed {
                    Err(Undecided::Suspended(suspended)) => Err(suspended),
                    Err(Undecided::Rejected(_)) | Ok(_) => Ok(None),
                }
            }
        }
    }

    /// Returns the placement by the best victims of all nodes. A search of many nodes goes on in other turns.
    fn place_by_best(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        let uid = &request.pod_request.uid;
        let before = self.backlog.suspended_decisions.take_room(uid);
        let before = before.filter(|before| before.cause == search.cause);
        let mut room = match before.map(|before| before.found) {
            Some(FoundSoFar::OfPod(room)) => room,
            Some(FoundSoFar::OfGang(_)) | None => PodRoom::default(),
        };
        let placed = self.search_best(request, search, &mut room, turn);
        if placed.is_err() {
            let progress = RoomProgress {
                cause: search.cause,
                found: FoundSoFar::OfPod(room),
            };
            self.backlog.suspended_decisions.set_room(uid, progress);
        }
        placed
    }

    /// Goes on with the search for the best victims. First it asks all nodes for what victims cost there at least, and then it
    /// simulates their end where this is the least, until no other node can be better.
    fn search_best(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        room: &mut PodRoom,
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        let mut has_progress = false;
        while let Some(node) = self.next_node(room.asked.as_ref().map(String::as_str)) {
            if let Some(work) = turn.over_by().filter(|_| has_progress) {
                return Err(work.into());
            }
            has_progress = true;
            let candidates = self.candidates_on(&node, search, turn);
            let least = victims::least_cost(&candidates);
            room.nodes.extend(least.map(|least| (least, node.clone())));
            room.asked = Bound::Excluded(node);
        }
        let mut has_tried = false;
        while let Some((least, node)) = room.nodes.pop_first() {
            let bound = room.best.as_ref().map(|(_, cost)| cost);
            if bound.is_some_and(|bound| *bound <= least) {
                room.nodes.clear();
                break;
            }
            let suspended = match turn.over_by().filter(|_| has_progress) {
                Some(work) => work.into(),
                None => {
                    has_progress = true;
                    let candidates = self.candidates_on(&node, search, turn);
                    let is_first = !std::mem::replace(&mut has_tried, true);
                    match self.victims_on((&node, candidates), request, search, bound, turn) {
                        Ok(Some(cost)) => {
                            room.best = Some((node, cost));
                            continue;
                        }
                        // The turn ended amid the simulations, so they tell nothing about this node.
                        Ok(None) if !is_first && turn.is_out_of_searches() => Work::Searches.into(),
                        Ok(None) => continue,
                        Err(suspended) => suspended,
                    }
                }
            };
            // The search goes on with this node.
            room.nodes.insert((least, node));
            return Err(suspended);
        }
        let Some((node, victims)) = &room.best else {
            return Ok(None);
        };
        let placed = self.place_instead(request, search, (node, victims), turn);
        // It was cut short, and another turn has the time.
        if matches!(placed, Ok(None)) && has_progress && turn.is_out_of_searches() {
            return Err(Work::Searches.into());
        }
        placed
    }

    /// Returns the best set of these pods of the node whose end makes room for the pod. `None` if there is none better than
    /// `bound`.
    fn victims_on(
        &mut self,
        (node, mut candidates): (&str, Vec<Candidate>),
        request: &Request,
        search: &Search<'_>,
        bound: Option<&Cost>,
        turn: &mut Turn,
    ) -> Result<Option<Cost>, Suspended> {
        self.retain_allowed(&mut candidates, search, turn);
        let mut on_node = OnNode {
            planner: self,
            node,
            request,
            search,
            turn,
            suspended: None,
        };
        let victims = victims::search(&candidates, bound, &mut on_node);
        match on_node.suspended {
            Some(suspended) => Err(suspended),
            None => Ok(victims),
        }
    }
}

/// Simulations of the end of pods of one node.
struct OnNode<'a> {
    planner: &'a mut Planner,
    node: &'a str,
    request: &'a Request,
    search: &'a Search<'a>,
    turn: &'a mut Turn,
    /// That of the last simulation, if its turn was too short.
    suspended: Option<Suspended>,
}

impl Simulation for OnNode<'_> {
    /// A search for devices that gave up tells nothing about victims, and another one would give up, too.
    fn effect(&mut self, victims: &BTreeSet<String>) -> Option<Effect> {
        self.turn.count(SIMULATION_UNITS);
        let gone = self.planner.departure(self.search, victims);
        let policies = self.planner.world.settings.policies;
        let request = &self.request.pod_request;
        self.planner.world.cluster.try_without(&gone, |cluster| {
            match cluster.decide_on_in(self.node, request, policies, self.turn) {
                Err(Undecided::Suspended(suspended)) => {
                    self.suspended = Some(suspended);
                    None
                }
                Err(Undecided::Rejected(explanation)) if explanation.gave_up() => None,
                Err(Undecided::Rejected(_)) => Some(Effect::TooLittle),
                Ok(_) if cluster.keeps(&self.search.floors) => Some(Effect::Enough),
                Ok(_) => Some(Effect::Forbidden),
            }
        })
    }

    fn may_compare(&self) -> bool {
        !self.turn.is_out_of_checks()
    }
}
