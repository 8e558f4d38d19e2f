//! The best victims for a pod, and those that are known for the equal pods of its gang.
//!
//! A node is asked which pods may end there where the end of its pods may cost the least, see [`holder_costs`](super::holder_costs),
//! and the end of these is simulated where it costs the least, until no other node can be better.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_allocator::claim::Alternative;
use drava_allocator::placement::Placement;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::{Suspended, Undecided};
use drava_allocator::turn::{Turn, Work};

use super::holder_costs::{NodeCosts, Position};
use super::holders::simulation_units;
use super::{RoomCause, Search};
use crate::decide::planner::Planner;
use crate::decide::planner::demand::Request;
use crate::decide::victims::{self, Candidate, Cost, Effect, Simulation};

/// A placement, and the pods that have to end for it.
pub(super) type PlacedByVictims = (Placement, BTreeSet<String>);

/// What is known of the victims on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum OfNode {
    /// They are these.
    Are(Cost),
    /// They cost this at least, also if other pods could end.
    CostAnyAtLeast(Arc<Cost>),
    /// They cost this at least.
    CostAtLeast(Cost),
}

impl OfNode {
    fn cost(&self) -> &Cost {
        match self {
            Self::Are(cost) | Self::CostAtLeast(cost) => cost,
            Self::CostAnyAtLeast(cost) => cost,
        }
    }
}

/// What a search knows of the victims for one request on the nodes that it has asked. Nodes that changed since are asked again.
/// What changes elsewhere, such as the usage of a quota, may outdate the victims of a node; a placement checks them again.
#[derive(Debug, Default)]
pub(super) struct KnownVictims {
    request: Option<PodRequest>,
    /// `None` if no pods can end on the node.
    nodes: BTreeMap<String, Option<OfNode>>,
    /// The same by cost: known victims before those that may cost as much.
    order: BTreeSet<(Cost, OfNode, String)>,
    /// Whether what is known holds for the pod that is placed now.
    is_complete: bool,
}

impl KnownVictims {
    /// Starts a search that knows nothing.
    fn restart(&mut self, request: &PodRequest) {
        *self = Self {
            request: Some(request.clone()),
            is_complete: true,
            ..Self::default()
        };
    }

    /// A member was placed on the node.
    pub(super) fn node_changed(&mut self, node: &str) {
        self.forget(node);
        self.is_complete = false;
    }

    /// Pods on these nodes are going to end.
    pub(super) fn pods_ended<'a>(&mut self, nodes: impl Iterator<Item = &'a str>) {
        nodes.for_each(|node| self.forget(node));
    }

    /// Returns whether the victims are those for a pod, or for one equal to it.
    fn is_for(&self, request: &PodRequest) -> bool {
        let of = self.request.as_ref();
        of.is_some_and(|of| of.uid == request.uid || of.is_equivalent(request))
    }

    fn forget(&mut self, node: &str) {
        if let Some((node, Some(before))) = self.nodes.remove_entry(node) {
            self.order.remove(&(before.cost().clone(), before, node));
        }
    }

    /// Sets what is known of a node; `None` if no pods can end there.
    fn set(&mut self, node: String, known: Option<OfNode>) {
        self.forget(&node);
        if let Some(known) = &known {
            self.order
                .insert((known.cost().clone(), known.clone(), node.clone()));
        }
        self.nodes.insert(node, known);
    }

    /// Returns the node with the least cost, also of the nodes after a position of which only `costs` are known.
    fn first(&self, costs: &NodeCosts, from: &mut Option<Position>) -> Option<(String, OfNode)> {
        let of_asked = self.order.first();
        let (cost, node) = match costs.next(from, |node| self.nodes.contains_key(node)) {
            Some(next) if of_asked.is_none_or(|(cost, ..)| *next.0 <= *cost) => next,
            _ => {
                let (_, known, node) = of_asked?;
                return Some((node.clone(), known.clone()));
            }
        };
        Some((node.to_string(), OfNode::CostAnyAtLeast(cost)))
    }

    /// Returns the cost of the best victims that are known.
    fn best(&self) -> Option<Cost> {
        let mut order = self.order.iter();
        let (cost, ..) = order.find(|(_, known, _)| matches!(known, OfNode::Are(_)))?;
        Some(cost.clone())
    }
}

impl Planner {
    /// Returns a placement of the pod on the node where the best set of pods has to end, and this set, which is presumed to
    /// have ended. The pod fits on no node without such an end. A search of many nodes goes on in other turns.
    pub(super) fn place_by_victims(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        known: &mut KnownVictims,
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        // The members of a gang are often equal.
        let pod_request = &request.pod_request;
        if !known.is_for(pod_request) {
            known.restart(pod_request);
        }
        let mut costs = self.take_holder_costs(pod_request, search);
        let mut placed = self.place_by_known(request, search, (known, &mut costs), turn);
        if matches!(placed, Ok(None)) && !known.is_complete {
            known.restart(pod_request);
            placed = self.place_by_known(request, search, (known, &mut costs), turn);
        }
        self.return_holder_costs(costs);
        placed
    }

    fn place_by_known(
        &mut self,
        request: &Request,
        search: &Search<'_>,
        (known, costs): (&mut KnownVictims, &mut NodeCosts),
        turn: &mut Turn,
    ) -> Result<Option<PlacedByVictims>, Suspended> {
        let pod_request = &request.pod_request;
        let (mut has_progress, mut has_tried) = (false, false);
        let unknown = costs.changed();
        let unknown = unknown.filter(|node| !known.nodes.contains_key(*node));
        for node in unknown.cloned().collect::<Vec<_>>() {
            if let Some(work) = turn.over_by().filter(|_| has_progress) {
                return Err(work.into());
            }
            let cost = self.ask_holders(&node, costs, turn);
            known.set(node, cost.map(OfNode::CostAnyAtLeast));
            has_progress = true;
        }
        let mut from = None;
        loop {
            let over = turn.over_by().filter(|_| has_progress);
            let Some((node, of_node)) = known.first(costs, &mut from) else {
                return Ok(None);
            };
            match of_node {
                OfNode::CostAnyAtLeast(_) => {
                    if let Some(work) = over {
                        return Err(work.into());
                    }
                    let least = self.least_cost_on(&node, pod_request, search, turn);
                    known.set(node, least.map(OfNode::CostAtLeast));
                    has_progress = true;
                }
                OfNode::CostAtLeast(_) => {
                    if let Some(work) = over {
                        return Err(work.into());
                    }
                    // Other members of a gang may need what is no better for this one.
                    let bound = known.best().filter(|_| search.group.requests.len() == 1);
                    let candidates = self.candidates_on(&node, search, turn);
                    let victims = self.victims_on(
                        (&node, candidates),
                        request,
                        search,
                        bound.as_ref(),
                        turn,
                    )?;
                    // The turn ended amid the simulations, so they tell nothing about this node.
                    if victims.is_none() && has_tried && turn.is_out_of_searches() {
                        return Err(Work::Searches.into());
                    }
                    (has_progress, has_tried) = (true, true);
                    known.set(node, victims.map(OfNode::Are));
                }
                OfNode::Are(victims) if !self.may_end(victims.uids(), search) => {
                    // They were chosen in an earlier turn.
                    let least = self.least_cost_on(&node, pod_request, search, turn);
                    known.set(node, least.map(OfNode::CostAtLeast));
                }
                OfNode::Are(victims) => {
                    let placed = self.place_instead(request, search, (&node, &victims), turn);
                    match &placed {
                        // It was cut short, and another turn has the time.
                        Ok(None) if has_progress && turn.is_out_of_searches() => {
                            return Err(Work::Searches.into());
                        }
                        Ok(None) => {
                            has_progress = true;
                            known.set(node, None);
                        }
                        _ => {
                            known.forget(&node);
                            return placed;
                        }
                    }
                }
            }
        }
    }

    /// Returns what victims on a node cost at least; `None` if no pods may end there.
    fn least_cost_on(
        &mut self,
        node: &str,
        request: &PodRequest,
        search: &Search<'_>,
        turn: &mut Turn,
    ) -> Option<Cost> {
        let candidates = self.candidates_on(node, search, turn);
        let ends = candidates.iter();
        let ends = ends.map(|each| each.pods.keys().map(String::as_str));
        let fewest = self.fewest_ends(node, ends, request.several(), turn);
        victims::least_cost(&candidates, fewest)
    }

    /// Returns how many of these ends of pods a request needs on a node at least.
    pub(super) fn fewest_ends<'a>(
        &self,
        node: &str,
        ends: impl Iterator<Item = impl Iterator<Item = &'a str>>,
        several: Option<&Alternative>,
        turn: &mut Turn,
    ) -> usize {
        let cluster = &self.world.cluster;
        let shortfall = several.and_then(|several| cluster.shortfall(node, several, turn));
        let Some(shortfall) = shortfall else {
            return 1;
        };
        let made_room_for = |pods| {
            let claims = Iterator::flat_map(pods, |uid| self.claims_of_pod(uid));
            cluster.made_room_for(&shortfall, claims)
        };
        victims::fewest(ends.map(made_room_for), shortfall.missing)
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
        self.turn.count(simulation_units(victims));
        let gone = self.planner.departure(self.search, victims);
        let has_host_memory =
            self.search.cause != RoomCause::Suspension || self.planner.has_host_memory(victims);
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
                Ok(_) if has_host_memory && cluster.keeps(&self.search.floors) => {
                    Some(Effect::Enough)
                }
                Ok(_) => Some(Effect::Forbidden),
            }
        })
    }

    fn may_compare(&self) -> bool {
        !self.turn.is_out_of_checks()
    }
}
