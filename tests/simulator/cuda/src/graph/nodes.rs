//! Making nodes, and reading and changing what they do.

use std::ffi::c_uint;

use super::Node;
use super::memory::MemoryNode;
use super::parameters::{NodeType, OWNERSHIP_MOVE, kernel_to};
use crate::abi::{Answer, In, InOut, Out, Untyped, entry_points};
use crate::driver::{Driver, State, driver};
use crate::error::CudaError;
use crate::host::HostFunction;
use crate::operation::Operation;
use crate::types::{
    CUbatchMemOpNodeParams, CUchildGraphNodeParams, CUcontext, CUdeviceptr, CUevent,
    CUeventNodeParams, CUgraph, CUgraphEdgeData, CUgraphNode, CUgraphNodeParams, CUhostNodeParams,
    CUkernelNodeParams, CUkernelNodeParamsV2, CUmemAllocNodeParams, CUmemFreeNodeParams,
    CUmemLocation, CUmemPoolProps, CUmemcpy3D, CUmemcpyNodeParams, CUmemsetNodeParams,
    CUmemsetNodeParamsV2,
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
    pub(super) fn operation(&self) -> Answer<Operation> {
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
    /// The operation that `CUgraphNodeParams` describes, of kinds that can be changed later.
    pub(super) fn operation_from(
        &mut self,
        driver: &Driver,
        params: CUgraphNodeParams,
    ) -> Answer<Operation> {
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
            NodeType::Record => {
                let event = union.cast::<CUeventNodeParams>().get()?.event;
                self.require_event(event)?;
                Operation::Record(event)
            }
            NodeType::Free => Operation::Free(union.cast::<CUmemFreeNodeParams>().get()?.address),
            NodeType::Memory => {
                let batch = union.cast::<CUbatchMemOpNodeParams>().get()?;
                self.memory_node(&batch)?
            }
            NodeType::Allocate => return Err(CudaError::NotSupported),
        })
    }
}

impl State {
    fn memory_node(&self, batch: &CUbatchMemOpNodeParams) -> Answer<Operation> {
        let operations = In::at(batch.operations).list((batch.count as usize).min(257))?;
        self.memory_operations(&operations)
    }
}

/// Where a new node goes.
#[derive(Clone, Copy)]
struct Place {
    node: Out<CUgraphNode>,
    graph: CUgraph,
    dependencies: In<CUgraphNode>,
    count: usize,
}

impl Place {
    fn add(self, operation: impl FnOnce(&mut State) -> Answer<Operation>) -> Answer {
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

    /// Adds a node that takes memory, and returns the memory's address.
    fn add_memory(self, params: CUmemAllocNodeParams) -> Answer<CUdeviceptr> {
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

    fn add_child(self, child: CUgraph, ownership: std::ffi::c_int) -> Answer {
        self.add(|state| {
            let owned = match ownership {
                OWNERSHIP_MOVE => child,
                _ => state.clone_graph(child)?,
            };
            state.mark_child(owned);
            Ok(Operation::Child(owned))
        })
    }
}

fn add_kernel(place: Place, params: CUkernelNodeParamsV2) -> Answer {
    let driver = driver()?;
    place.add(|state| state.kernel_from(driver, &params))
}

/// `cuGraphAddNode`: a node of any kind.
fn add(place: Place, params: InOut<CUgraphNodeParams>) -> Answer {
    let driver = driver()?;
    let given = params.get()?;
    let union = In::at(std::ptr::from_ref(&given.parameters));
    match NodeType::from_code(given.kind)? {
        NodeType::Allocate => {
            let memory = union.cast::<CUmemAllocNodeParams>().get()?;
            let address = place.add_memory(memory)?;
            let result = CUmemAllocNodeParams { address, ..memory };
            let mut answer = given;
            let slot = std::ptr::from_mut(&mut answer.parameters).cast();
            Out::at(slot).set(result)?;
            params.set(answer)
        }
        NodeType::Child => {
            let child = union.cast::<CUchildGraphNodeParams>().get()?;
            place.add_child(child.graph, child.ownership)
        }
        _ => place.add(|state| state.operation_from(driver, given)),
    }
}

/// Reads what a node does.
fn read<T>(node: CUgraphNode, what: impl FnOnce(&Node) -> Option<T>) -> Answer<T> {
    let driver = driver()?;
    let state = driver.state();
    what(state.graphs.node(node)?).ok_or(CudaError::InvalidValue)
}

/// Changes what a node does, not of which kind it is.
fn change(node: CUgraphNode, operation: impl FnOnce(&mut State) -> Answer<Operation>) -> Answer {
    let mut state = driver()?.state();
    let operation = operation(&mut state)?;
    let node = state.graphs.node_mut(node)?;
    if node.operation.node_type() != operation.node_type() {
        return Err(CudaError::InvalidValue);
    }
    node.arguments = super::Arguments::of(&operation);
    node.operation = operation;
    Ok(())
}

fn kernel_params(node: CUgraphNode) -> Answer<CUkernelNodeParamsV2> {
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
        add_kernel(Place { node, graph, dependencies, count }, CUkernelNodeParamsV2::from_v1(params.get()?))
    }
    "cuGraphAddKernelNode" 12000 fn cuGraphAddKernelNode_v2(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: In<CUkernelNodeParamsV2>) {
        add_kernel(Place { node, graph, dependencies, count }, params.get()?)
    }

    "cuGraphAddMemcpyNode" 10000 fn cuGraphAddMemcpyNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, copy: In<CUmemcpy3D>, _context: CUcontext) {
        let copy = copy.get()?;
        Place { node, graph, dependencies, count }.add(|_| Ok(Operation::Copy(copy)))
    }

    "cuGraphAddMemsetNode" 10000 fn cuGraphAddMemsetNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, fill: In<CUmemsetNodeParams>, _context: CUcontext) {
        let fill = fill.get()?;
        Place { node, graph, dependencies, count }.add(|_| Ok(Operation::Fill(fill)))
    }

    "cuGraphAddHostNode" 10000 fn cuGraphAddHostNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: In<CUhostNodeParams>) {
        let host = params.get()?.operation()?;
        Place { node, graph, dependencies, count }.add(|_| Ok(host))
    }

    "cuGraphAddChildGraphNode" 10000 fn cuGraphAddChildGraphNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, child: CUgraph) {
        Place { node, graph, dependencies, count }.add_child(child, 0)
    }

    "cuGraphAddEmptyNode" 10000 fn cuGraphAddEmptyNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize) {
        Place { node, graph, dependencies, count }.add(|_| Ok(Operation::Empty))
    }

    "cuGraphAddEventRecordNode" 11010 fn cuGraphAddEventRecordNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, event: CUevent) {
        Place { node, graph, dependencies, count }.add(|state| {
            state.require_event(event)?;
            Ok(Operation::Record(event))
        })
    }

    "cuGraphAddEventWaitNode" 11010 fn cuGraphAddEventWaitNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, event: CUevent) {
        Place { node, graph, dependencies, count }.add(|state| {
            state.require_event(event)?;
            Ok(Operation::Wait(event))
        })
    }

    "cuGraphAddMemAllocNode" 11040 fn cuGraphAddMemAllocNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: InOut<CUmemAllocNodeParams>) {
        let given = params.get()?;
        let address = Place { node, graph, dependencies, count }.add_memory(given)?;
        params.set(CUmemAllocNodeParams { address, ..given })
    }

    "cuGraphAddMemFreeNode" 11040 fn cuGraphAddMemFreeNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, address: CUdeviceptr) {
        Place { node, graph, dependencies, count }.add(|_| Ok(Operation::Free(address)))
    }

    "cuGraphAddBatchMemOpNode" 11070 fn cuGraphAddBatchMemOpNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, batch: In<CUbatchMemOpNodeParams>) {
        let batch = batch.get()?;
        Place { node, graph, dependencies, count }.add(|state| state.memory_node(&batch))
    }

    "cuGraphAddNode" 12020 fn cuGraphAddNode(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, count: usize, params: InOut<CUgraphNodeParams>) {
        add(Place { node, graph, dependencies, count }, params)
    }
    "cuGraphAddNode" 12030 fn cuGraphAddNode_v2(node: Out<CUgraphNode>, graph: CUgraph, dependencies: In<CUgraphNode>, _edges: In<CUgraphEdgeData>, count: usize, params: InOut<CUgraphNodeParams>) {
        add(Place { node, graph, dependencies, count }, params)
    }

    "cuGraphNodeSetParams" 12020 fn cuGraphNodeSetParams(node: CUgraphNode, params: InOut<CUgraphNodeParams>) {
        let params = params.get()?;
        let driver = driver()?;
        change(node, |state| state.operation_from(driver, params))
    }

    "cuGraphKernelNodeGetParams" 10000 fn cuGraphKernelNodeGetParams(node: CUgraphNode, params: Out<CUkernelNodeParams>) { params.set(kernel_params(node)?.v1) }
    "cuGraphKernelNodeGetParams" 12000 fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, params: Out<CUkernelNodeParamsV2>) { params.set(kernel_params(node)?) }
    "cuGraphKernelNodeSetParams" 10000 fn cuGraphKernelNodeSetParams(node: CUgraphNode, params: In<CUkernelNodeParams>) {
        let params = CUkernelNodeParamsV2::from_v1(params.get()?);
        let driver = driver()?;
        change(node, |state| state.kernel_from(driver, &params))
    }
    "cuGraphKernelNodeSetParams" 12000 fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: In<CUkernelNodeParamsV2>) {
        let params = params.get()?;
        let driver = driver()?;
        change(node, |state| state.kernel_from(driver, &params))
    }

    // Attributes of kernels change nothing here: what was set is not kept.
    "cuGraphKernelNodeCopyAttributes" 11000 fn cuGraphKernelNodeCopyAttributes(to: CUgraphNode, from: CUgraphNode) {
        kernel_params(to)?;
        kernel_params(from).map(drop)
    }
    "cuGraphKernelNodeSetAttribute" 11000 fn cuGraphKernelNodeSetAttribute(node: CUgraphNode, _which: c_uint, _value: Untyped) { kernel_params(node).map(drop) }
    "cuGraphKernelNodeGetAttribute" 11000 fn cuGraphKernelNodeGetAttribute(node: CUgraphNode, _which: c_uint, value: Untyped) {
        kernel_params(node)?;
        value.out::<[u64; 8]>().set([0; 8])
    }

    "cuGraphMemcpyNodeGetParams" 10000 fn cuGraphMemcpyNodeGetParams(node: CUgraphNode, copy: Out<CUmemcpy3D>) {
        copy.set(read(node, |node| match node.operation { Operation::Copy(copy) => Some(copy), _ => None })?)
    }
    "cuGraphMemcpyNodeSetParams" 10000 fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, copy: In<CUmemcpy3D>) {
        let copy = copy.get()?;
        change(node, |_| Ok(Operation::Copy(copy)))
    }

    "cuGraphMemsetNodeGetParams" 10000 fn cuGraphMemsetNodeGetParams(node: CUgraphNode, fill: Out<CUmemsetNodeParams>) {
        fill.set(read(node, |node| match node.operation { Operation::Fill(fill) => Some(fill), _ => None })?)
    }
    "cuGraphMemsetNodeSetParams" 10000 fn cuGraphMemsetNodeSetParams(node: CUgraphNode, fill: In<CUmemsetNodeParams>) {
        let fill = fill.get()?;
        change(node, |_| Ok(Operation::Fill(fill)))
    }

    "cuGraphHostNodeGetParams" 10000 fn cuGraphHostNodeGetParams(node: CUgraphNode, params: Out<CUhostNodeParams>) {
        params.set(read(node, |node| match node.operation {
            Operation::Host(HostFunction::Plain { function, data }) => Some(CUhostNodeParams {
                function: Some(function),
                data: std::ptr::with_exposed_provenance_mut(data),
            }),
            _ => None,
        })?)
    }
    "cuGraphHostNodeSetParams" 10000 fn cuGraphHostNodeSetParams(node: CUgraphNode, params: In<CUhostNodeParams>) {
        let host = params.get()?.operation()?;
        change(node, |_| Ok(host))
    }

    "cuGraphChildGraphNodeGetGraph" 10000 fn cuGraphChildGraphNodeGetGraph(node: CUgraphNode, child: Out<CUgraph>) {
        child.set(read(node, |node| match node.operation { Operation::Child(child) => Some(child), _ => None })?)
    }

    "cuGraphEventRecordNodeGetEvent" 11010 fn cuGraphEventRecordNodeGetEvent(node: CUgraphNode, event: Out<CUevent>) {
        event.set(read(node, |node| match node.operation { Operation::Record(event) => Some(event), _ => None })?)
    }
    "cuGraphEventRecordNodeSetEvent" 11010 fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) { change(node, |_| Ok(Operation::Record(event))) }
    "cuGraphEventWaitNodeGetEvent" 11010 fn cuGraphEventWaitNodeGetEvent(node: CUgraphNode, event: Out<CUevent>) {
        event.set(read(node, |node| match node.operation { Operation::Wait(event) => Some(event), _ => None })?)
    }
    "cuGraphEventWaitNodeSetEvent" 11010 fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) { change(node, |_| Ok(Operation::Wait(event))) }

    "cuGraphMemAllocNodeGetParams" 11040 fn cuGraphMemAllocNodeGetParams(node: CUgraphNode, params: Out<CUmemAllocNodeParams>) {
        params.set(read(node, |node| match &node.operation { Operation::Allocate(memory) => Some(CUmemAllocNodeParams::of(memory)), _ => None })?)
    }
    "cuGraphMemFreeNodeGetParams" 11040 fn cuGraphMemFreeNodeGetParams(node: CUgraphNode, address: Out<CUdeviceptr>) {
        address.set(read(node, |node| match node.operation { Operation::Free(address) => Some(address), _ => None })?)
    }
}
