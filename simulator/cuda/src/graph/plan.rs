//! Execution order of a graph's nodes and their assignment to streams. Pure.
//!
//! Child graphs are inlined: successors of a child graph node depend on the last nodes of the child
//! graph.

use std::collections::BTreeMap;

use super::Graphs;
use crate::operation::Operation;
use crate::types::{CUgraph, CUgraphNode};

/// Most streams of one launch; further branches share them.
const MAX_LANES: usize = 32;

/// One operation of an executable graph.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) node: CUgraphNode,
    pub(crate) operation: Operation,
    /// Indices of the steps it depends on, all smaller than its own.
    pub(crate) after: Vec<usize>,
    /// Stream of the launch: 0 is the launch stream.
    pub(crate) lane: usize,
    pub(crate) enabled: bool,
}

/// The graph has a cycle or refers to missing nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Returns a graph's nodes in execution order.
pub(crate) fn flatten(graphs: &Graphs, graph: CUgraph) -> Result<Vec<Step>, Malformed> {
    let mut steps = Vec::new();
    append(graphs, graph, &[], &mut steps)?;
    assign_lanes(&mut steps);
    Ok(steps)
}

/// Appends a graph whose first nodes depend on `before`. Returns its last steps.
fn append(
    graphs: &Graphs,
    graph: CUgraph,
    before: &[usize],
    steps: &mut Vec<Step>,
) -> Result<Vec<usize>, Malformed> {
    let nodes = &graphs.graph(graph).map_err(|_| Malformed)?.nodes;
    let mut ends: BTreeMap<CUgraphNode, Vec<usize>> = BTreeMap::new();
    let mut followed = std::collections::BTreeSet::new();
    // Each pass takes the nodes whose dependencies are done.
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

/// A step continues the lane of one of its dependencies if that is the lane's last step.
fn assign_lanes(steps: &mut [Step]) {
    // The last step of each lane.
    let mut tails: Vec<usize> = Vec::new();
    for index in 0..steps.len() {
        let Some(step) = steps.get(index) else {
            return;
        };
        let mut lane = tails.iter().position(|tail| step.after.contains(tail));
        if lane.is_none() && tails.len() >= MAX_LANES {
            lane = Some(index % MAX_LANES);
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

/// Number of streams of a launch.
pub(crate) fn lanes(steps: &[Step]) -> usize {
    steps.iter().map(|step| step.lane + 1).max().unwrap_or(0)
}
