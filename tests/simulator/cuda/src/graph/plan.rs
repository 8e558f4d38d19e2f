//! The order in which a graph's nodes are put on streams, and how many streams that takes.
//!
//! Pure. Child graphs are taken apart: what depends on the node of a child graph depends on the
//! ends of the child graph.

use std::collections::BTreeMap;

use super::Graphs;
use crate::operation::Operation;
use crate::types::{CUgraph, CUgraphNode};

/// Streams that one graph is spread over at most; more branches share them.
const MOST_LANES: usize = 32;

/// One operation of a graph that is ready to be launched.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// The node it comes from.
    pub(crate) node: CUgraphNode,
    pub(crate) operation: Operation,
    /// Indices of the steps it comes after; all are smaller than its own.
    pub(crate) after: Vec<usize>,
    /// Which of the launch's streams it runs in; 0 is the one it was launched into.
    pub(crate) lane: usize,
    pub(crate) enabled: bool,
}

/// The graph is circular, or names nodes that do not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// A graph's nodes in an order in which they can be done.
pub(crate) fn flatten(graphs: &Graphs, graph: CUgraph) -> Result<Vec<Step>, Malformed> {
    let mut steps = Vec::new();
    append(graphs, graph, &[], &mut steps)?;
    assign_lanes(&mut steps);
    Ok(steps)
}

/// Appends a graph whose first nodes come after `before`; returns its last ones.
fn append(
    graphs: &Graphs,
    graph: CUgraph,
    before: &[usize],
    steps: &mut Vec<Step>,
) -> Result<Vec<usize>, Malformed> {
    let nodes = &graphs.graph(graph).map_err(|_| Malformed)?.nodes;
    let mut ends: BTreeMap<CUgraphNode, Vec<usize>> = BTreeMap::new();
    let mut followed = std::collections::BTreeSet::new();
    // Nodes whose dependencies are done, until there are none left.
    let mut open: Vec<CUgraphNode> = nodes.clone();
    while !open.is_empty() {
        let mut later = Vec::new();
        let waiting = open.len();
        for handle in open {
            let node = graphs.node(handle).map_err(|_| Malformed)?;
            if !node.dependencies.iter().all(|node| ends.contains_key(node)) {
                later.push(handle);
                continue;
            }
            let mut after: Vec<usize> = match node.dependencies.is_empty() {
                true => before.to_vec(),
                false => {
                    let of_node = |node| ends.get(node).into_iter().flatten().copied();
                    node.dependencies.iter().flat_map(of_node).collect()
                }
            };
            after.sort_unstable();
            after.dedup();
            followed.extend(node.dependencies.iter().copied());
            let end = match node.operation {
                Operation::Child(child) => append(graphs, child, &after, steps)?,
                _ => {
                    steps.push(Step {
                        node: handle,
                        operation: node.operation.clone(),
                        after,
                        lane: 0,
                        enabled: true,
                    });
                    vec![steps.len() - 1]
                }
            };
            ends.insert(handle, end);
        }
        if later.len() == waiting {
            return Err(Malformed);
        }
        open = later;
    }
    let last = ends.iter().filter(|(node, _)| !followed.contains(node));
    let mut last: Vec<usize> = last.flat_map(|(_, ends)| ends).copied().collect();
    if nodes.is_empty() {
        last = before.to_vec();
    }
    last.sort_unstable();
    Ok(last)
}

/// A step goes on in the lane of one it comes after, unless another one already did.
fn assign_lanes(steps: &mut [Step]) {
    // The last step of each lane.
    let mut tails: Vec<usize> = Vec::new();
    for index in 0..steps.len() {
        let Some(step) = steps.get(index) else {
            return;
        };
        let mut lane = tails.iter().position(|tail| step.after.contains(tail));
        if lane.is_none() && tails.len() >= MOST_LANES {
            lane = Some(index % MOST_LANES);
        }
        let lane = lane.unwrap_or(tails.len());
        match tails.get_mut(lane) {
            Some(tail) => *tail = index,
            None => tails.push(index),
        }
        if let Some(step) = steps.get_mut(index) {
            step.lane = lane;
        }
    }
}

/// How many streams the steps are spread over.
pub(crate) fn lanes(steps: &[Step]) -> usize {
    steps.iter().map(|step| step.lane + 1).max().unwrap_or(0)
}
