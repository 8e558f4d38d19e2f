//! Creating, reading and changing nodes.

use super::Node;
use super::parameters::{NodeType, kernel_to};
use crate::State;
use crate::abi::{CudaResult, In, InOut, Out, entry_points};
use crate::driver::{Driver, driver};
use crate::error::CudaError;
use crate::operation::{HostFunction, MemoryNode, Operation};
use crate::types::{
    CUchildGraphNodeParams, CUcontext, CUdeviceptr, CUeventNodeParams, CUgraph, CUgraphNode,
    CUgraphNodeParams, CUhostNodeParams, CUkernelNodeParams, CUkernelNodeParamsV2,
    CUmemAllocNodeParams, CUmemFreeNodeParams, CUmemLocation, CUmemPoolProps, CUmemcpy3D,
    CUmemcpyNodeParams, CUmemsetNodeParams, CUmemsetNodeParamsV2,
};

impl CUkernelNodeParamsV2 {
    pub(super) fn from_v1(v1: CUkernelNodeParams) -> Self {
        Self {
            v1,
            kernel: crate::types::CUfunction(0),
            context: CUcontext::NULL,
        }
    }
}

impl CUhostNodeParams {
    pub(super) fn operation(&self) -> CudaResult<Operation> {
        HostFunction::plain(self.function, self.data).map(Operation::Host)
    }
}

impl CUmemAllocNodeParams {
    fn of(node: &MemoryNode) -> Self {
        Self {
            pool: CUmemPoolProps::pinned_on(node.device),
            access: std::ptr::null(),
            access_count: 0,
            bytes: usize::try_from(node.bytes).unwrap_or(usize::MAX),
            address: node.address,
        }
    }
}

impl State {
    /// Converts `CUgraphNodeParams` to an operation.
    pub(super) fn operation_from(
        &mut self,
        driver: &Driver,
        params: CUgraphNodeParams,
    ) -> CudaResult<Operation> {
        let union = In::at(std::ptr::from_ref(&params.parameters));
        Ok(match NodeType::from_code(params.kind)? {
            NodeType::Kernel => {
                let kernel = union.cast::<CUkernelNodeParamsV2>().get()?;
                self.kernel_from(driver, &kernel)?
            }
            NodeType::Copy => Operation::Copy(union.cast::<CUmemcpyNodeParams>().get()?.copy),
            NodeType::Fill => Operation::Fill(union.cast::<CUmemsetNodeParamsV2>().get()?.v1),
            NodeType::Host => union.cast::<CUhostNodeParams>().get()?.operation()?,
            NodeType::Child => {
                Operation::Child(union.cast::<CUchildGraphNodeParams>().get()?.graph)
            }
            NodeType::Empty => Operation::Empty,
            NodeType::Wait => {
                let event = union.cast::<CUeventNodeParams>().get()?.event;
                self.require_event(event)?;
                Operation::Wait(event)
            }
            NodeType::Free => Operation::Free(union.cast::<CUmemFreeNodeParams>().get()?.address),
            NodeType::Allocate => return Err(CudaError::NotSupported),
        })
    }
}

/// Graph, dependencies and output of a new node.
#[derive(Clone, Copy)]
struct NewNode {
    node: Out<CUgraphNode>,
    graph: CUgraph,
    dependencies: In<CUgraphNode>,
    count: usize,
}

impl NewNode {
    fn add(self, operation: impl FnOnce(&mut State) -> CudaResult<Operation>) -> CudaResult {
        if self.node.is_null() {
            return Err(CudaError::InvalidValue);
        }
        let dependencies = self.dependencies.list(self.count)?;
        let mut state = driver()?.state();
        state.require_graph(self.graph)?;
        let operation = operation(&mut state)?;
        self.node
            .set(state.add_node(self.graph, &dependencies, operation)?)
    }

    /// Adds an allocation node and returns its address.
    fn add_memory(self, params: CUmemAllocNodeParams) -> CudaResult<CUdeviceptr> {
        if params.pool.location.kind != CUmemLocation::DEVICE {
            return Err(CudaError::InvalidValue);
        }
        let driver = driver()?;
        let mut address = 0;
        self.add(|state| {
            let (device, bytes) = (params.pool.location.id, params.bytes as u64);
            let memory = state.new_memory_node(driver, device, bytes)?;
            address = memory.address;
            Ok(Operation::Allocate(memory))
        })?;
        Ok(address)
    }

    fn add_child(self, child: CUgraph) -> CudaResult {
        self.add(|state| {
            let copy = state.clone_graph(child)?;
            state.mark_child(copy);
            Ok(Operation::Child(copy))
        })
    }
}

fn add_kernel(new_node: NewNode, params: CUkernelNodeParamsV2) -> CudaResult {
    let driver = driver()?;
    new_node.add(|state| state.kernel_from(driver, &params))
}

/// Reads the operation of a node.
fn read<T>(node: CUgraphNode, what: impl FnOnce(&Node) -> Option<T>) -> CudaResult<T> {
    let driver = driver()?;
    let state = driver.state();
    what(state.graphs.node(node)?).ok_or(CudaError::InvalidValue)
}

fn kernel_params(node: CUgraphNode) -> CudaResult<CUkernelNodeParamsV2> {
    read(node, |node| match &node.operation {
        Operation::Kernel(launch) => Some(kernel_to(
            launch,
            node.arguments.as_deref(),
            CUcontext::NULL,
        )),
        _ => None,
    })
}

entry_points! {
    "cuGraphAddKernelNode" 10000 fn cuGraphAddKernelNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: In<CUkernelNodeParams>) {
        add_kernel(NewNode { node, graph, dependencies, count }, CUkernelNodeParamsV2::from_v1(params.get()?))
    }
    "cuGraphAddKernelNode" 12000 fn cuGraphAddKernelNode_v2(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: In<CUkernelNodeParamsV2>) {
        add_kernel(NewNode { node, graph, dependencies, count }, params.get()?)
    }

    "cuGraphAddMemcpyNode" 10000 fn cuGraphAddMemcpyNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, copy: In<CUmemcpy3D>, _context: CUcontext) {
        let copy = copy.get()?;
        NewNode { node, graph, dependencies, count }.add(|_| Ok(Operation::Copy(copy)))
    }

    "cuGraphAddMemsetNode" 10000 fn cuGraphAddMemsetNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, fill: In<CUmemsetNodeParams>, _context: CUcontext) {
        let fill = fill.get()?;
        NewNode { node, graph, dependencies, count }.add(|_| Ok(Operation::Fill(fill)))
    }

    "cuGraphAddChildGraphNode" 10000 fn cuGraphAddChildGraphNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, child: CUgraph) {
        NewNode { node, graph, dependencies, count }.add_child(child)
    }

    "cuGraphAddMemAllocNode" 11040 fn cuGraphAddMemAllocNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: InOut<CUmemAllocNodeParams>) {
        let given = params.get()?;
        let address = NewNode { node, graph, dependencies, count }.add_memory(given)?;
        params.set(CUmemAllocNodeParams { address, ..given })
    }

    "cuGraphAddMemFreeNode" 11040 fn cuGraphAddMemFreeNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, address: CUdeviceptr) {
        NewNode { node, graph, dependencies, count }.add(|_| Ok(Operation::Free(address)))
    }

    "cuGraphKernelNodeGetParams" 10000 fn cuGraphKernelNodeGetParams(node: CUgraphNode, params: Out<CUkernelNodeParams>) { params.set(kernel_params(node)?.v1) }
    "cuGraphKernelNodeGetParams" 12000 fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, params: Out<CUkernelNodeParamsV2>) { params.set(kernel_params(node)?) }

    "cuGraphChildGraphNodeGetGraph" 10000 fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, child: Out<CUgraph>) {
        child.set(read(node, |node| match node.operation { Operation::Child(child) => Some(child), _ => None })?)
    }

    "cuGraphMemAllocNodeGetParams" 11040 fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, params: Out<CUmemAllocNodeParams>) {
        params.set(read(node, |node| match &node.operation { Operation::Allocate(memory) => Some(CUmemAllocNodeParams::of(memory)), _ => None })?)
    }
}
