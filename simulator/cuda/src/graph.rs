//! Graphs: nodes, dependencies, creation and queries.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_uint;
use std::sync::Arc;

use crate::State;
use crate::abi::{CudaResult, InOut, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::operation::Operation;
use crate::types::{CUgraph, CUgraphNode};

mod exec;
mod memory;
mod nodes;
mod parameters;
mod plan;

pub(crate) use exec::ENTRY_POINTS as EXEC_ENTRY_POINTS;
pub(crate) use exec::Execs;
pub(crate) use memory::ENTRY_POINTS as MEMORY_ENTRY_POINTS;
pub(crate) use nodes::ENTRY_POINTS as NODE_ENTRY_POINTS;

use parameters::Arguments;

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
    /// Whether the graph belongs to a child graph node.
    is_child: bool,
}

#[derive(Clone, Debug)]
struct Node {
    graph: CUgraph,
    operation: Operation,
    dependencies: Vec<CUgraphNode>,
    /// Storage for the parameters of a kernel node, returned to the program.
    arguments: Option<Arc<Arguments>>,
}

impl Graphs {
    /// Handles of its objects.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        let graphs = self.graphs.keys().map(|graph| graph.0);
        let nodes = self.nodes.keys().map(|node| node.0);
        graphs.chain(nodes).chain(self.execs.handles())
    }

    fn graph(&self, handle: CUgraph) -> CudaResult<&Graph> {
        self.graphs.get(&handle).ok_or(CudaError::InvalidValue)
    }

    fn node(&self, handle: CUgraphNode) -> CudaResult<&Node> {
        self.nodes.get(&handle).ok_or(CudaError::InvalidValue)
    }

    /// Releases the addresses of graph memory that no node, no executable graph and no memory needs.
    fn release_addresses(&mut self) {
        let launched = self.execs.addresses();
        self.memory.retain(&launched);
    }

    /// Nodes and all their transitive dependencies.
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

    pub(crate) fn require_graph(&self, graph: CUgraph) -> CudaResult {
        self.graphs.graph(graph).map(drop)
    }

    /// Errors unless the node belongs to the graph.
    pub(crate) fn require_node(&self, graph: CUgraph, node: CUgraphNode) -> CudaResult {
        match self.graphs.node(node)?.graph == graph {
            true => Ok(()),
            false => Err(CudaError::InvalidValue),
        }
    }

    /// Nodes and all their transitive dependencies.
    pub(crate) fn with_ancestors(&self, nodes: &[CUgraphNode]) -> BTreeSet<CUgraphNode> {
        self.graphs.before(nodes)
    }

    /// Appends a node to a graph.
    pub(crate) fn add_node(
        &mut self,
        graph: CUgraph,
        dependencies: &[CUgraphNode],
        operation: Operation,
    ) -> CudaResult<CUgraphNode> {
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
        };
        self.graphs.nodes.insert(handle, node);
        if let Some(graph) = self.graphs.graphs.get_mut(&graph) {
            graph.nodes.push(handle);
        }
        Ok(handle)
    }

    /// Copies a graph and its child graphs. Memory nodes cannot be copied.
    fn clone_graph(&mut self, original: CUgraph) -> CudaResult<CUgraph> {
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
            let handle = CUgraphNode(self.handle());
            let copy = self.graphs.node(*node)?.clone();
            self.graphs.nodes.insert(handle, copy);
            renamed.insert(*node, handle);
        }
        for (old, new) in &renamed {
            let mut node = self.graphs.node(*old)?.clone();
            if let Operation::Child(child) = node.operation {
                let child = self.clone_graph(child)?;
                self.mark_child(child);
                node.operation = Operation::Child(child);
            }
            node.graph = clone;
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
        Ok(clone)
    }

    fn mark_child(&mut self, graph: CUgraph) {
        if let Some(graph) = self.graphs.graphs.get_mut(&graph) {
            graph.is_child = true;
        }
    }

    /// Removes a graph with its nodes and child graphs.
    pub(crate) fn destroy_graph(&mut self, driver: &Driver, handle: CUgraph) -> CudaResult {
        let graph = self.graphs.graphs.remove(&handle);
        for node in graph.ok_or(CudaError::InvalidValue)?.nodes {
            self.remove_node(driver, node)?;
        }
        self.graphs.release_addresses();
        Ok(())
    }

    fn remove_node(&mut self, driver: &Driver, handle: CUgraphNode) -> CudaResult {
        let node = self.graphs.nodes.remove(&handle);
        match node.map(|node| node.operation) {
            Some(Operation::Child(child)) => self.destroy_graph(driver, child),
            Some(Operation::Allocate(memory)) => {
                self.graphs.memory.remove_node(memory.address);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Writes a list: without an array only its length; unused elements are cleared.
fn set_list<T: Copy>(list: &[T], array: Out<T>, count: InOut<usize>, empty: T) -> CudaResult {
    if !array.is_null() {
        let room = count.get()?;
        let padded = list.iter().copied().chain(std::iter::repeat(empty));
        array.write_all(padded.take(room))?;
        return count.set(list.len().min(room));
    }
    count.set(list.len())
}

const NO_NODE: CUgraphNode = CUgraphNode(0);

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
            // The graph belongs to its node.
            return Err(CudaError::InvalidValue);
        }
        state.destroy_graph(driver, graph)
    }

    "cuGraphGetNodes" 10000 fn cuGraphGetNodes(graph: CUgraph, nodes: Out<CUgraphNode>, count: InOut<usize>) {
        let found = driver()?.state().graphs.graph(graph)?.nodes.clone();
        set_list(&found, nodes, count, NO_NODE)
    }

    "cuGraphNodeGetType" 10000 fn cuGraphNodeGetType(node: CUgraphNode, kind: Out<c_uint>) {
        kind.set(driver()?.state().graphs.node(node)?.operation.node_type())
    }
}
