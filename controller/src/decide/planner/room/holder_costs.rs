//! What the end of the pods of each node costs at least, kept from search to search.
//!
//! It depends on the pods that hold something on the node, whether they may end or not, and for a request for several devices on
//! what it lacks there. So it holds for all searches until the node changes, and a search asks only those nodes for the pods
//! that may end there on which they may cost the least.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use drava_allocator::claim::Alternative;
use drava_allocator::object::ObjectKey;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::turn::Turn;

use super::holders::{HOLDER_UNITS, ROOM_UNITS};
use super::{RoomCause, Search};
use crate::decide::planner::Planner;
use crate::decide::victims::{self, Cost};

/// Most kinds of searches whose costs are kept, each about 1 KiB for a node.
const MAX_KINDS: usize = 4;

/// The costs for the kinds of searches that were used last, the newest first.
#[derive(Debug, Default)]
pub(in crate::decide::planner) struct HolderCosts(Vec<NodeCosts>);

impl HolderCosts {
    /// Notes that what pods hold on these nodes has changed.
    pub(in crate::decide::planner) fn nodes_changed(&mut self, nodes: &BTreeSet<String>) {
        for costs in &mut self.0 {
            for node in nodes {
                costs.node_changed(node);
            }
        }
    }
}

/// Position of a node in the order of the costs.
pub(super) type Position = (Arc<Cost>, Arc<str>);

/// What the end of pods costs on each node at least, for one kind of searches.
#[derive(Debug)]
pub(super) struct NodeCosts {
    /// The request, if it is for several devices: others need the end of one pod at least.
    several: Option<Alternative>,
    /// Whether the priorities of the pods count.
    by_priority: bool,
    costs: BTreeMap<Arc<str>, Arc<Cost>>,
    order: BTreeSet<Position>,
    /// Nodes whose pods are not known.
    changed: BTreeSet<String>,
}

impl NodeCosts {
    fn node_changed(&mut self, node: &str) {
        self.remove(node);
        self.changed.insert(node.to_owned());
    }

    fn remove(&mut self, node: &str) {
        if let Some((node, cost)) = self.costs.remove_entry(node) {
            self.order.remove(&(cost, node));
        }
    }

    /// Sets the cost on a node; `None` if too few pods hold something there.
    fn set(&mut self, node: &str, cost: Option<Cost>) {
        self.remove(node);
        self.changed.remove(node);
        if let Some(cost) = cost {
            let (node, cost): (Arc<str>, _) = (node.into(), Arc::new(cost));
            self.costs.insert(Arc::clone(&node), Arc::clone(&cost));
            self.order.insert((cost, node));
        }
    }

    /// Returns the nodes whose pods are not known.
    pub(super) fn changed(&self) -> impl Iterator<Item = &String> {
        self.changed.iter()
    }

    /// Returns the first node after a position that is not `known`, and moves the position past those that are: a search visits
    /// each of them once.
    pub(super) fn next(
        &self,
        from: &mut Option<Position>,
        known: impl Fn(&str) -> bool,
    ) -> Option<Position> {
        let start = from.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let rest = self.order.range::<Position, _>((start, Bound::Unbounded));
        let mut last_known = None;
        let next = rest.into_iter().find(|position| {
            let is_known = known(&position.1);
            if is_known {
                last_known = Some(*position);
            }
            !is_known
        });
        let (next, last_known) = (next.cloned(), last_known.cloned());
        *from = last_known.or_else(|| from.take());
        next
    }
}

impl Planner {
    /// Drops the costs on the nodes that have changed.
    pub(in crate::decide::planner) fn drop_changed_holder_costs(&mut self) {
        let changed = self.world.cluster.take_changed_holders();
        self.backlog.holder_costs.nodes_changed(&changed);
    }

    /// Notes that a pod may hold something that it did not, or end for pods for which it did not.
    pub(in crate::decide::planner) fn note_holder(&mut self, uid: &str) {
        let nodes: Vec<String> = self.nodes_of_pod(uid).map(str::to_owned).collect();
        for node in nodes {
            self.world.cluster.note_changed_holders(&node);
        }
    }

    /// Notes that other pods may hold a claim.
    pub(in crate::decide::planner) fn note_held(&mut self, key: &ObjectKey) {
        let nodes = self.world.cluster.nodes_of(key).map(str::to_owned);
        for node in nodes.collect::<Vec<String>>() {
            self.world.cluster.note_changed_holders(&node);
        }
    }

    /// Takes the costs for a search, to which [`Self::return_holder_costs`] gives them back.
    pub(super) fn take_holder_costs(
        &mut self,
        request: &PodRequest,
        search: &Search<'_>,
    ) -> NodeCosts {
        self.drop_changed_holder_costs();
        let by_priority = search.cause != RoomCause::Wait;
        let several = request.several();
        let is_known = |costs: &NodeCosts| {
            costs.by_priority == by_priority && costs.several.as_ref() == several
        };
        let kinds = &mut self.backlog.holder_costs.0;
        match kinds.iter().position(is_known) {
            Some(position) => kinds.remove(position),
            None => NodeCosts {
                several: several.cloned(),
                by_priority,
                costs: BTreeMap::new(),
                order: BTreeSet::new(),
                changed: self.nodes_with_holders(),
            },
        }
    }

    /// Keeps the costs for other searches.
    pub(super) fn return_holder_costs(&mut self, costs: NodeCosts) {
        let kinds = &mut self.backlog.holder_costs.0;
        kinds.insert(0, costs);
        kinds.truncate(MAX_KINDS);
    }

    /// Finds out what the end of pods of a node costs at least, and returns it.
    pub(super) fn ask_holders(
        &self,
        node: &str,
        costs: &mut NodeCosts,
        turn: &mut Turn,
    ) -> Option<Arc<Cost>> {
        let holders = self.holders_on(node);
        let units = HOLDER_UNITS + costs.several.as_ref().map_or(0, |_| ROOM_UNITS);
        turn.count(units.saturating_mul(u64::try_from(holders.len()).unwrap_or(u64::MAX)));
        let priority = |priority| if costs.by_priority { priority } else { 0 };
        let pods = holders.iter();
        let pods: Vec<_> = pods
            .map(|(uid, pod)| (*uid, priority(pod.priority), pod.created))
            .collect();
        let ends = holders.iter().map(|(uid, _)| std::iter::once(*uid));
        let fewest = self.fewest_ends(node, ends, costs.several.as_ref(), turn);
        costs.set(node, victims::least_cost_of_pods(&pods, fewest));
        costs.costs.get(node).cloned()
    }
}
