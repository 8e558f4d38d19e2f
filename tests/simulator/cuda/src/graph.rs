//! Graphs: nodes, what they depend on, and the calls that look at and change both.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;
use std::sync::Arc;

use crate::abi::{Answer, In, InOut, Out, Text, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::operation::Operation;
use crate::types::{CUgraph, CUgraphEdgeData, CUgraphNode};

mod exec;
pub(crate) mod memory;
mod nodes;
mod parameters;
mod plan;

pub(crate) use exec::ENTRY_POINTS as EXEC_ENTRY_POINTS;
pub(crate) use exec::Execs;
pub(crate) use memory::ENTRY_POINTS as MEMORY_ENTRY_POINTS;
pub(crate) use nodes::ENTRY_POINTS as NODE_ENTRY_POINTS;

use parameters::Arguments;

/// All graphs of this process.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    graphs: BTreeMap<CUgraph, Graph>,
    nodes: BTreeMap<CUgraphNode, Node>,
    pub(crate) execs: Execs,
    pub(crate) memory: memory::GraphMemory,
}

#[derive(Debug, Default)]
struct Graph {
    /// In order of creation.
    nodes: Vec<CUgraphNode>,
    /// Belongs to a child graph node.
    is_child: bool,
}

#[derive(Clone, Debug)]
struct Node {
    graph: CUgraph,
    operation: Operation,
    dependencies: Vec<CUgraphNode>,
    /// The node it was cloned from.
    original: Option<CUgraphNode>,
    /// What a kernel node's parameters are when they are asked for.
    arguments: Option<Arc<Arguments>>,
}

impl Graphs {
    fn graph(&self, handle: CUgraph) -> Answer<&Graph> {
        self.graphs.get(&handle).ok_or(CudaError::InvalidValue)
    }

    fn node(&self, handle: CUgraphNode) -> Answer<&Node> {
        self.nodes.get(&handle).ok_or(CudaError::InvalidValue)
    }

    fn node_mut(&mut self, handle: CUgraphNode) -> Answer<&mut Node> {
        self.nodes.get_mut(&handle).ok_or(CudaError::InvalidValue)
    }

    /// Pairs of a node and one that depends on it.
    fn edges(&self, graph: CUgraph) -> Answer<Vec<(CUgraphNode, CUgraphNode)>> {
        let mut edges = Vec::new();
        for to in &self.graph(graph)?.nodes {
            let from = &self.node(*to)?.dependencies;
            edges.extend(from.iter().map(|from| (*from, *to)));
        }
        Ok(edges)
    }

    /// Nodes and everything they depend on.
    fn before(&self, nodes: &[CUgraphNode]) -> BTreeSet<CUgraphNode> {
        let mut found = BTreeSet::new();
        let mut open = nodes.to_vec();
        while let Some(node) = open.pop() {
            if found.insert(node)
                && let Some(node) = self.nodes.get(&node)
            {
                open.extend(&node.dependencies);
            }
        }
        found
    }
}

impl State {
    pub(crate) fn create_graph(&mut self) -> CUgraph {
        let handle = CUgraph(self.handle());
        self.graphs.graphs.insert(handle, Graph::default());
        handle
    }

    /// Refuses what is no graph.
    pub(crate) fn require_graph(&self, graph: CUgraph) -> Answer {
        self.graphs.graph(graph).map(drop)
    }

    /// Refuses what is no node of a graph.
    pub(crate) fn require_node(&self, graph: CUgraph, node: CUgraphNode) -> Answer {
        match self.graphs.node(node)?.graph == graph {
            true => Ok(()),
            false => Err(CudaError::InvalidValue),
        }
    }

    /// Nodes and everything they depend on.
    pub(crate) fn nodes_before(&self, nodes: &[CUgraphNode]) -> BTreeSet<CUgraphNode> {
        self.graphs.before(nodes)
    }

    /// Appends a node to a graph.
    pub(crate) fn add_node(
        &mut self,
        graph: CUgraph,
        dependencies: &[CUgraphNode],
        operation: Operation,
    ) -> Answer<CUgraphNode> {
        self.graphs.graph(graph)?;
        let unique: BTreeSet<&CUgraphNode> = dependencies.iter().collect();
        if unique.len() != dependencies.len() {
            return Err(CudaError::InvalidValue);
        }
        for dependency in dependencies {
            self.require_node(graph, *dependency)?;
        }
        let handle = CUgraphNode(self.handle());
        let node = Node {
            graph,
            arguments: Arguments::of(&operation),
            operation,
            dependencies: dependencies.to_vec(),
            original: None,
        };
        self.graphs.nodes.insert(handle, node);
        if let Some(graph) = self.graphs.graphs.get_mut(&graph) {
            graph.nodes.push(handle);
        }
        Ok(handle)
    }

    /// A copy of a graph, child graphs included. Memory nodes cannot be copied.
    fn clone_graph(&mut self, original: CUgraph) -> Answer<CUgraph> {
        let nodes = self.graphs.graph(original)?.nodes.clone();
        let unique = |node: &CUgraphNode| {
            self.graphs.node(*node).is_ok_and(|node| {
                matches!(node.operation, Operation::Allocate(_) | Operation::Free(_))
            })
        };
        if nodes.iter().any(unique) {
            return Err(CudaError::NotSupported);
        }
        let clone = self.create_graph();
        let mut renamed = BTreeMap::new();
        for node in &nodes {
            renamed.insert(*node, CUgraphNode(self.handle()));
        }
        for (old, new) in &renamed {
            let mut node = self.graphs.node(*old)?.clone();
            if let Operation::Child(child) = node.operation {
                let child = self.clone_graph(child)?;
                self.mark_child(child);
                node.operation = Operation::Child(child);
            }
            node.graph = clone;
            node.original = Some(*old);
            for dependency in &mut node.dependencies {
                *dependency = renamed.get(dependency).copied().unwrap_or(*dependency);
            }
            self.graphs.nodes.insert(*new, node);
        }
        let in_order = nodes.iter().filter_map(|old| renamed.get(old).copied());
        let in_order = in_order.collect();
        if let Some(graph) = self.graphs.graphs.get_mut(&clone) {
            graph.nodes = in_order;
        }
        self.copy_user_objects(original, clone)?;
        Ok(clone)
    }

    fn mark_child(&mut self, graph: CUgraph) {
        if let Some(graph) = self.graphs.graphs.get_mut(&graph) {
            graph.is_child = true;
        }
    }

    /// Removes a graph with its nodes and child graphs.
    pub(crate) fn destroy_graph(&mut self, driver: &Driver, handle: CUgraph) -> Answer {
        let graph = self.graphs.graphs.remove(&handle);
        for node in graph.ok_or(CudaError::InvalidValue)?.nodes {
            self.remove_node(driver, node)?;
        }
        self.forget_user_objects(handle)
    }

    fn remove_node(&mut self, driver: &Driver, handle: CUgraphNode) -> Answer {
        let node = self.graphs.nodes.remove(&handle);
        match node.map(|node| node.operation) {
            Some(Operation::Child(child)) => self.destroy_graph(driver, child),
            Some(Operation::Allocate(memory)) => {
                self.graphs.memory.forget_node(memory.address);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Whether adding edges has made a graph circular.
    fn is_circular(&self, graph: CUgraph) -> bool {
        plan::flatten(&self.graphs, graph).is_err()
    }
}

/// Writes a list as the calls that return lists do: without an array they say how long it is;
/// places that are left over are cleared.
fn set_list<T: Copy>(list: &[T], array: Out<T>, count: InOut<usize>, empty: T) -> Answer {
    if !array.is_null() {
        let room = count.get()?;
        let padded = list.iter().copied().chain(std::iter::repeat(empty));
        array.set_all(padded.take(room))?;
        return count.set(list.len().min(room));
    }
    count.set(list.len())
}

const NO_NODE: CUgraphNode = CUgraphNode(0);

/// Results that come as two or three arrays of the same length.
fn set_edges(
    edges: &[(CUgraphNode, CUgraphNode)],
    from: Out<CUgraphNode>,
    to: Out<CUgraphNode>,
    data: Out<CUgraphEdgeData>,
    count: InOut<usize>,
) -> Answer {
    if from.is_null() != to.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let sources: Vec<CUgraphNode> = edges.iter().map(|(from, _)| *from).collect();
    let targets: Vec<CUgraphNode> = edges.iter().map(|(_, to)| *to).collect();
    let plain = vec![CUgraphEdgeData::default(); edges.len()];
    let room = count.get()?;
    set_list(&sources, from, count, NO_NODE)?;
    if !to.is_null() {
        count.set(room)?;
        set_list(&targets, to, count, NO_NODE)?;
    }
    if !data.is_null() {
        count.set(room)?;
        set_list(&plain, data, count, CUgraphEdgeData::default())?;
    }
    Ok(())
}

fn edges_of(
    graph: CUgraph,
    from: Out<CUgraphNode>,
    to: Out<CUgraphNode>,
    data: Out<CUgraphEdgeData>,
    count: InOut<usize>,
) -> Answer {
    let edges = driver()?.state().graphs.edges(graph)?;
    set_edges(&edges, from, to, data, count)
}

/// The nodes before or after a node, with edges.
fn neighbours(
    node: CUgraphNode,
    after: bool,
    nodes: Out<CUgraphNode>,
    data: Out<CUgraphEdgeData>,
    count: InOut<usize>,
) -> Answer {
    let driver = driver()?;
    let state = driver.state();
    let graph = state.graphs.node(node)?.graph;
    let edges = state.graphs.edges(graph)?;
    let found: Vec<CUgraphNode> = edges
        .iter()
        .filter_map(|(from, to)| match after {
            true => (*from == node).then_some(*to),
            false => (*to == node).then_some(*from),
        })
        .collect();
    let room = count.get()?;
    set_list(&found, nodes, count, NO_NODE)?;
    if !data.is_null() {
        count.set(room)?;
        let plain = vec![CUgraphEdgeData::default(); found.len()];
        set_list(&plain, data, count, CUgraphEdgeData::default())?;
    }
    Ok(())
}

fn add_edges(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) -> Answer {
    let (from, to) = (from.list(count)?, to.list(count)?);
    let driver = driver()?;
    let mut state = driver.state();
    for (from, to) in from.into_iter().zip(to) {
        state.require_node(graph, from)?;
        state.require_node(graph, to)?;
        let dependencies = &mut state.graphs.node_mut(to)?.dependencies;
        if dependencies.contains(&from) {
            return Err(CudaError::InvalidValue);
        }
        dependencies.push(from);
        if state.is_circular(graph) {
            state.graphs.node_mut(to)?.dependencies.pop();
            return Err(CudaError::InvalidValue);
        }
    }
    Ok(())
}

fn remove_edges(
    graph: CUgraph,
    from: In<CUgraphNode>,
    to: In<CUgraphNode>,
    count: usize,
) -> Answer {
    let (from, to) = (from.list(count)?, to.list(count)?);
    let driver = driver()?;
    let mut state = driver.state();
    for (from, to) in from.into_iter().zip(to) {
        state.require_node(graph, to)?;
        let dependencies = &mut state.graphs.node_mut(to)?.dependencies;
        let position = dependencies.iter().position(|node| *node == from);
        dependencies.remove(position.ok_or(CudaError::InvalidValue)?);
    }
    Ok(())
}

entry_points! {
    "cuGraphCreate" 10000 fn cuGraphCreate(graph: Out<CUgraph>, flags: c_uint) {
        if flags != 0 {
            return Err(CudaError::InvalidValue);
        }
        graph.set(driver()?.state().create_graph())
    }

    "cuGraphClone" 10000 fn cuGraphClone(clone: Out<CUgraph>, original: CUgraph) {
        clone.set(driver()?.state().clone_graph(original)?)
    }

    "cuGraphDestroy" 10000 fn cuGraphDestroy(graph: CUgraph) {
        let driver = driver()?;
        let mut state = driver.state();
        if state.graphs.graph(graph)?.is_child {
            // Belongs to its node.
            return Err(CudaError::InvalidValue);
        }
        state.destroy_graph(driver, graph)
    }

    "cuGraphDestroyNode" 10000 fn cuGraphDestroyNode(node: CUgraphNode) {
        let driver = driver()?;
        let mut state = driver.state();
        let graph = state.graphs.node(node)?.graph;
        if matches!(state.graphs.node(node)?.operation, Operation::Allocate(_) | Operation::Free(_)) {
            return Err(CudaError::NotSupported);
        }
        state.remove_node(driver, node)?;
        if let Some(graph) = state.graphs.graphs.get_mut(&graph) {
            graph.nodes.retain(|other| *other != node);
        }
        for other in state.graphs.nodes.values_mut() {
            other.dependencies.retain(|dependency| *dependency != node);
        }
        Ok(())
    }

    "cuGraphGetNodes" 10000 fn cuGraphGetNodes(graph: CUgraph, nodes: Out<CUgraphNode>, count: InOut<usize>) {
        let found = driver()?.state().graphs.graph(graph)?.nodes.clone();
        set_list(&found, nodes, count, NO_NODE)
    }

    "cuGraphGetRootNodes" 10000 fn cuGraphGetRootNodes(graph: CUgraph, nodes: Out<CUgraphNode>, count: InOut<usize>) {
        let driver = driver()?;
        let state = driver.state();
        let mut roots = state.graphs.graph(graph)?.nodes.clone();
        roots.retain(|node| state.graphs.node(*node).is_ok_and(|node| node.dependencies.is_empty()));
        set_list(&roots, nodes, count, NO_NODE)
    }

    "cuGraphGetEdges" 10000 fn cuGraphGetEdges(graph: CUgraph, from: Out<CUgraphNode>, to: Out<CUgraphNode>, count: InOut<usize>) { edges_of(graph, from, to, Out::NULL, count) }
    "cuGraphGetEdges" 12030 fn cuGraphGetEdges_v2(graph: CUgraph, from: Out<CUgraphNode>, to: Out<CUgraphNode>, data: Out<CUgraphEdgeData>, count: InOut<usize>) { edges_of(graph, from, to, data, count) }

    "cuGraphNodeGetDependencies" 10000 fn cuGraphNodeGetDependencies(node: CUgraphNode, nodes: Out<CUgraphNode>, count: InOut<usize>) { neighbours(node, false, nodes, Out::NULL, count) }
    "cuGraphNodeGetDependencies" 12030 fn cuGraphNodeGetDependencies_v2(node: CUgraphNode, nodes: Out<CUgraphNode>, data: Out<CUgraphEdgeData>, count: InOut<usize>) { neighbours(node, false, nodes, data, count) }
    "cuGraphNodeGetDependentNodes" 10000 fn cuGraphNodeGetDependentNodes(node: CUgraphNode, nodes: Out<CUgraphNode>, count: InOut<usize>) { neighbours(node, true, nodes, Out::NULL, count) }
    "cuGraphNodeGetDependentNodes" 12030 fn cuGraphNodeGetDependentNodes_v2(node: CUgraphNode, nodes: Out<CUgraphNode>, data: Out<CUgraphEdgeData>, count: InOut<usize>) { neighbours(node, true, nodes, data, count) }

    "cuGraphAddDependencies" 10000 fn cuGraphAddDependencies(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) { add_edges(graph, from, to, count) }
    "cuGraphAddDependencies" 12030 fn cuGraphAddDependencies_v2(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, _data: In<CUgraphEdgeData>, count: usize) { add_edges(graph, from, to, count) }
    "cuGraphRemoveDependencies" 10000 fn cuGraphRemoveDependencies(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, count: usize) { remove_edges(graph, from, to, count) }
    "cuGraphRemoveDependencies" 12030 fn cuGraphRemoveDependencies_v2(graph: CUgraph, from: In<CUgraphNode>, to: In<CUgraphNode>, _data: In<CUgraphEdgeData>, count: usize) { remove_edges(graph, from, to, count) }

    "cuGraphNodeFindInClone" 10000 fn cuGraphNodeFindInClone(node: Out<CUgraphNode>, original: CUgraphNode, clone: CUgraph) {
        let driver = driver()?;
        let state = driver.state();
        let nodes = &state.graphs.graph(clone)?.nodes;
        let is_clone = |node: &&CUgraphNode| {
            state.graphs.node(**node).is_ok_and(|node| node.original == Some(original))
        };
        node.set(*nodes.iter().find(is_clone).ok_or(CudaError::InvalidValue)?)
    }

    "cuGraphNodeGetType" 10000 fn cuGraphNodeGetType(node: CUgraphNode, kind: Out<c_uint>) {
        kind.set(driver()?.state().graphs.node(node)?.operation.node_type())
    }

    "cuGraphDebugDotPrint" 11030 fn cuGraphDebugDotPrint(graph: CUgraph, path: Text, _flags: c_uint) {
        let path = path.get()?;
        let driver = driver()?;
        let state = driver.state();
        let mut text = String::from("digraph {\n");
        for node in &state.graphs.graph(graph)?.nodes {
            let kind = state.graphs.node(*node)?.operation.node_type();
            text.push_str(&format!("  \"{:#x}\" [label=\"type {kind}\"];\n", node.0));
        }
        for (from, to) in state.graphs.edges(graph)? {
            text.push_str(&format!("  \"{:#x}\" -> \"{:#x}\";\n", from.0, to.0));
        }
        text.push_str("}\n");
        std::fs::write(path, text).map_err(|_| CudaError::OperatingSystem)
    }
}
