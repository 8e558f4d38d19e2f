//! Executable graphs: instantiation, launch, update.
//!
//! A launch submits every step to the stream of its lane. The first lane is the launch stream,
//! which resumes when all lanes are done. Launches of one executable graph are serialized.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_uint, c_ulonglong};

use simulator_machine::protocol::Work;

use super::plan::{self, Step, flatten};
use super::{NO_NODE, Node};
use crate::State;
use crate::abi::{CudaResult, In, InOut, Out, Untyped, entry_points};
use crate::driver::{Driver, Point, driver};
use crate::error::CudaError;
use crate::operation::Operation;
use crate::stream::{Stream, with_capacity};
use crate::types::{
    CUcontext, CUdeviceptr, CUgraph, CUgraphExec, CUgraphExecUpdateResultInfo,
    CUgraphInstantiateParams, CUgraphNode, CUgraphNodeParams, CUkernelNodeParams,
    CUkernelNodeParamsV2, CUmemcpy3D, CUmemsetNodeParams, CUstream,
};

/// Most steps of one graph: the capacity of a stream's queue.
const MAX_STEPS: usize = 1 << 14;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`
const AUTO_FREE_ON_LAUNCH: u64 = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
const UPLOAD: u64 = 2;
/// All known `CUDA_GRAPH_INSTANTIATE_FLAG_*`.
const FLAGS: u64 = 0xf;

#[derive(Debug, Default)]
pub(crate) struct Execs(BTreeMap<CUgraphExec, Exec>);

#[derive(Debug)]
struct Exec {
    steps: Vec<Step>,
    /// Steps by node, for the nodes of the original graph and of graphs it was updated to.
    by_node: BTreeMap<CUgraphNode, usize>,
    flags: u64,
    /// Cells of all lanes but the first.
    lanes: Vec<u32>,
    last: Option<(CUcontext, Point)>,
}

enum LaunchOutcome {
    Queued,
    /// The previous launch, in another context, has to complete first.
    After(Point),
}

impl Execs {
    /// Handles of executable graphs.
    pub(crate) fn handles(&self) -> impl Iterator<Item = usize> {
        self.0.keys().map(|exec| exec.0)
    }

    /// Addresses of the memory that launches allocate.
    pub(super) fn addresses(&self) -> BTreeSet<CUdeviceptr> {
        let steps = self.0.values().flat_map(|exec| &exec.steps);
        let allocated = steps.filter_map(|step| match &step.operation {
            Operation::Allocate(memory) => Some(memory.address),
            _ => None,
        });
        allocated.collect()
    }

    fn get(&self, handle: CUgraphExec) -> CudaResult<&Exec> {
        self.0.get(&handle).ok_or(CudaError::InvalidValue)
    }

    fn get_mut(&mut self, handle: CUgraphExec) -> CudaResult<&mut Exec> {
        self.0.get_mut(&handle).ok_or(CudaError::InvalidValue)
    }
}

impl Exec {
    fn step(&mut self, node: CUgraphNode) -> CudaResult<&mut Step> {
        let index = self.by_node.get(&node).ok_or(CudaError::InvalidValue)?;
        self.steps.get_mut(*index).ok_or(CudaError::InvalidValue)
    }
}

fn by_node(steps: &[Step]) -> BTreeMap<CUgraphNode, usize> {
    let numbered = steps.iter().enumerate();
    numbered.map(|(index, step)| (step.node, index)).collect()
}

impl State {
    fn instantiate(
        &mut self,
        driver: &Driver,
        graph: CUgraph,
        flags: u64,
    ) -> CudaResult<CUgraphExec> {
        if flags & !FLAGS != 0 {
            return Err(CudaError::InvalidValue);
        }
        self.require_safe_in_capture()?;
        let steps = flatten(&self.graphs, graph).map_err(|_| CudaError::InvalidValue)?;
        if steps.len() > MAX_STEPS {
            return Err(CudaError::OutOfMemory);
        }
        let mut lanes = Vec::new();
        for _ in 1..plan::lanes(&steps) {
            lanes.push(self.hidden_cell(driver)?);
        }
        let handle = CUgraphExec(self.handle());
        let exec = Exec {
            by_node: by_node(&steps),
            steps,
            flags,
            lanes,
            last: None,
        };
        self.graphs.execs.0.insert(handle, exec);
        Ok(handle)
    }

    fn destroy_exec(&mut self, handle: CUgraphExec) -> CudaResult {
        let exec = self.graphs.execs.0.remove(&handle);
        // LaunchOutcome work still completes.
        self.free_cells(exec.ok_or(CudaError::InvalidValue)?.lanes);
        self.graphs.release_addresses();
        Ok(())
    }

    /// Runs an action during which the graph may reuse memory freed by its last launch, since
    /// launches are serialized.
    fn reusing_memory_of<T>(
        &mut self,
        handle: CUgraphExec,
        use_it: impl FnOnce(&mut Self) -> CudaResult<T>,
    ) -> CudaResult<T> {
        self.graphs.memory.begin_launch(handle);
        let result = use_it(self);
        let last = self
            .graphs
            .execs
            .get(handle)
            .ok()
            .and_then(|exec| exec.last);
        self.graphs.memory.end_launch(last.map(|(_, end)| end));
        result
    }

    /// Allocates the memory of the next launch.
    fn upload_exec(&mut self, driver: &Driver, stream: Stream, handle: CUgraphExec) -> CudaResult {
        let steps = self.graphs.execs.get(handle)?.steps.clone();
        let context = self.owner(stream.context);
        self.reusing_memory_of(handle, |state| {
            let operations = steps.iter().map(|step| &step.operation);
            state.preallocate_graph_memory(driver, context, operations)
        })
    }

    /// Submits all steps to streams.
    fn launch_exec(
        &mut self,
        driver: &Driver,
        stream: Stream,
        handle: CUgraphExec,
    ) -> CudaResult<LaunchOutcome> {
        let exec = self.graphs.execs.get(handle)?;
        let steps = exec.steps.clone();
        let auto_free = exec.flags & AUTO_FREE_ON_LAUNCH != 0;
        let last = exec.last.filter(|(_, last)| !driver.is_reached(*last));
        let lanes: Vec<Stream> = std::iter::once(stream)
            .chain(
                exec.lanes
                    .iter()
                    .map(|cell| Stream::hidden(stream.context, *cell)),
            )
            .collect();
        self.free_before_launch(&steps, auto_free)?;
        match last {
            Some((context, last)) if context != stream.context => {
                return Ok(LaunchOutcome::After(last));
            }
            Some((_, last)) if last.cell != stream.cell => {
                self.wait_in(driver, stream, last)?;
            }
            _ => {}
        }
        let begin = match lanes.len() {
            1 => None,
            _ => Some(self.marker(driver, stream)?),
        };
        let mut points: Vec<Option<Point>> = Vec::with_capacity(steps.len());
        // Per lane: the last ticket it waits for, by cell.
        let mut waited: Vec<BTreeMap<u32, u64>> = vec![BTreeMap::new(); lanes.len()];
        for step in &steps {
            let lane = lanes.get(step.lane).copied().ok_or(CudaError::Unknown)?;
            let waited = waited.get_mut(step.lane).ok_or(CudaError::Unknown)?;
            let before = step.after.iter().filter_map(|index| *points.get(*index)?);
            let before: Vec<Point> = begin.into_iter().chain(before).collect();
            for point in before {
                let known = waited.entry(point.cell).or_default();
                if point.cell != lane.cell && *known < point.ticket {
                    *known = point.ticket;
                    self.wait_in(driver, lane, point)?;
                }
            }
            let done = match step.enabled {
                true => self.perform(driver, lane, &step.operation)?,
                false => None,
            };
            points.push(done.or_else(|| self.unfinished(driver, lane.cell)));
        }
        for lane in lanes.iter().skip(1) {
            if let Some(point) = self.unfinished(driver, lane.cell) {
                self.wait_in(driver, stream, point)?;
            }
        }
        let end = self.unfinished(driver, stream.cell);
        self.graphs.execs.get_mut(handle)?.last = end.map(|end| (stream.context, end));
        Ok(LaunchOutcome::Queued)
    }

    fn wait_in(&mut self, driver: &Driver, stream: Stream, point: Point) -> CudaResult {
        let work = Work::Wait {
            stream: point.cell,
            ticket: point.ticket,
        };
        self.submit(driver, stream, work).map(drop)
    }

    /// Frees memory that the last launch allocated and nothing has freed.
    fn free_before_launch(&mut self, steps: &[Step], auto_free: bool) -> CudaResult {
        for step in steps {
            if let Operation::Allocate(memory) = &step.operation
                && self.graphs.memory.is_mapped(memory.address)
            {
                if !auto_free {
                    return Err(CudaError::InvalidValue);
                }
                self.release_graph_memory(memory.address)?;
            }
        }
        Ok(())
    }

    /// Captures a launch as a child graph.
    fn capture_exec(&mut self, stream: Stream, handle: CUgraphExec) -> CudaResult {
        let steps = self.graphs.execs.get(handle)?.steps.clone();
        let child = self.create_graph();
        self.mark_child(child);
        let mut nodes: Vec<CUgraphNode> = Vec::with_capacity(steps.len());
        for step in steps {
            let after = step.after.iter().filter_map(|index| nodes.get(*index));
            let after: Vec<CUgraphNode> = after.copied().collect();
            nodes.push(self.add_node(child, &after, step.operation)?);
        }
        self.capture(stream, Operation::Child(child)).map(drop)
    }

    /// Adopts the operations of another graph of the same topology. The inner error is the result
    /// code and the differing node.
    fn update(
        &mut self,
        handle: CUgraphExec,
        graph: CUgraph,
    ) -> CudaResult<Result<(), (c_uint, CUgraphNode)>> {
        const TOPOLOGY_CHANGED: c_uint = 2;
        const NODE_TYPE_CHANGED: c_uint = 3;
        const NOT_SUPPORTED: c_uint = 6;
        let new = flatten(&self.graphs, graph).map_err(|_| CudaError::InvalidValue)?;
        let exec = self.graphs.execs.get_mut(handle)?;
        if new.len() != exec.steps.len() {
            return Ok(Err((TOPOLOGY_CHANGED, NO_NODE)));
        }
        for (old, new) in exec.steps.iter().zip(&new) {
            if old.operation.node_type() != new.operation.node_type() {
                return Ok(Err((NODE_TYPE_CHANGED, new.node)));
            }
            if old.after != new.after {
                return Ok(Err((TOPOLOGY_CHANGED, new.node)));
            }
            if matches!(new.operation, Operation::Allocate(_)) {
                return Ok(Err((NOT_SUPPORTED, new.node)));
            }
        }
        exec.by_node.extend(by_node(&new));
        for (old, new) in exec.steps.iter_mut().zip(new) {
            old.operation = new.operation;
        }
        Ok(Ok(()))
    }

    /// Replaces the operation of a step by one of the same type.
    fn set_step(&mut self, handle: CUgraphExec, node: CUgraphNode, new: Operation) -> CudaResult {
        let step = self.graphs.execs.get_mut(handle)?.step(node)?;
        if step.operation.node_type() != new.node_type() {
            return Err(CudaError::InvalidValue);
        }
        step.operation = new;
        Ok(())
    }

    /// Replaces the steps of a child graph.
    fn set_child(&mut self, handle: CUgraphExec, node: CUgraphNode, new: CUgraph) -> CudaResult {
        let Node {
            operation: Operation::Child(old),
            ..
        } = self.graphs.node(node)?
        else {
            return Err(CudaError::InvalidValue);
        };
        let flat = |graph| flatten(&self.graphs, graph).map_err(|_| CudaError::InvalidValue);
        let (old, new) = (flat(*old)?, flat(new)?);
        let same = |(old, new): (&Step, &Step)| {
            old.after == new.after && old.operation.node_type() == new.operation.node_type()
        };
        if old.len() != new.len() || !old.iter().zip(&new).all(same) {
            return Err(CudaError::GraphExecUpdateFailure);
        }
        for (old, new) in old.into_iter().zip(new) {
            self.set_step(handle, old.node, new.operation)?;
        }
        Ok(())
    }
}

fn instantiate(exec: Out<CUgraphExec>, graph: CUgraph, flags: u64) -> CudaResult {
    if exec.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let driver = driver()?;
    exec.set(driver.state().instantiate(driver, graph, flags)?)
}

fn instantiate_and_upload(
    exec: Out<CUgraphExec>,
    graph: CUgraph,
    flags: u64,
    stream: CUstream,
) -> CudaResult {
    if exec.is_null() {
        return Err(CudaError::InvalidValue);
    }
    let driver = driver()?;
    let mut state = driver.state();
    let stream = state.stream(driver, stream)?;
    let handle = state.instantiate(driver, graph, flags)?;
    if let Err(error) = state.upload_exec(driver, stream, handle) {
        state.destroy_exec(handle)?;
        return Err(error);
    }
    exec.set(handle)
}

fn launch(exec: CUgraphExec, handle: CUstream) -> CudaResult {
    loop {
        let launched = with_capacity(handle, |driver, state, stream| {
            if state.is_capturing(stream)? {
                state.capture_exec(stream, exec)?;
                return Ok(LaunchOutcome::Queued);
            }
            state.reusing_memory_of(exec, |state| state.launch_exec(driver, stream, exec))
        })?;
        match launched {
            LaunchOutcome::Queued => return Ok(()),
            // The daemon orders streams of one context only: the calling thread waits.
            LaunchOutcome::After(point) => driver()?.wait_for(&[point])?,
        }
    }
}

fn update(exec: CUgraphExec, graph: CUgraph) -> CudaResult<Result<(), (c_uint, CUgraphNode)>> {
    driver()?.state().update(exec, graph)
}

fn set(exec: CUgraphExec, node: CUgraphNode, operation: Operation) -> CudaResult {
    driver()?.state().set_step(exec, node, operation)
}

entry_points! {
    "cuGraphInstantiate" 10000 fn cuGraphInstantiate(exec: Out<CUgraphExec>, graph: CUgraph, node: Out<CUgraphNode>, _log: Untyped, _log_bytes: usize) {
        node.set_if_not_null(NO_NODE);
        instantiate(exec, graph, 0)
    }
    "cuGraphInstantiate" 11000 fn cuGraphInstantiate_v2(exec: Out<CUgraphExec>, graph: CUgraph, node: Out<CUgraphNode>, _log: Untyped, _log_bytes: usize) {
        node.set_if_not_null(NO_NODE);
        instantiate(exec, graph, 0)
    }
    "cuGraphInstantiateWithFlags" 11040 fn cuGraphInstantiateWithFlags(exec: Out<CUgraphExec>, graph: CUgraph, flags: c_ulonglong) { instantiate(exec, graph, flags) }

    "cuGraphInstantiateWithParams" 12000 fn cuGraphInstantiateWithParams(exec: Out<CUgraphExec>, graph: CUgraph, params: InOut<CUgraphInstantiateParams>) ptds(_stream) cuGraphInstantiateWithParams_ptsz {
        const ERROR: c_uint = 1;
        let mut given = params.get()?;
        let answer = match given.flags & UPLOAD {
            0 => instantiate(exec, graph, given.flags),
            _ => instantiate_and_upload(exec, graph, given.flags, given.upload_stream),
        };
        given.error_node = NO_NODE;
        given.result = if answer.is_ok() { 0 } else { ERROR };
        params.set(given)?;
        answer
    }

    "cuGraphLaunch" 10000 fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) ptsz(stream) cuGraphLaunch_ptsz { launch(exec, stream) }

    "cuGraphUpload" 11010 fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) ptsz(stream) cuGraphUpload_ptsz {
        let driver = driver()?;
        let mut state = driver.state();
        let stream = state.stream(driver, stream)?;
        state.upload_exec(driver, stream, exec)
    }

    "cuGraphExecDestroy" 10000 fn cuGraphExecDestroy(exec: CUgraphExec) {
        driver()?.state().destroy_exec(exec)
    }

    "cuGraphExecUpdate" 10020 fn cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, node: Out<CUgraphNode>, result: Out<c_uint>) {
        let (code, which) = match update(exec, graph)? {
            Ok(()) => (0, NO_NODE),
            Err(difference) => difference,
        };
        node.set_if_not_null(which);
        result.set_if_not_null(code);
        if code == 0 { Ok(()) } else { Err(CudaError::GraphExecUpdateFailure) }
    }
    "cuGraphExecUpdate" 12000 fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: Out<CUgraphExecUpdateResultInfo>) {
        let (code, which) = match update(exec, graph)? {
            Ok(()) => (0, NO_NODE),
            Err(difference) => difference,
        };
        info.set(CUgraphExecUpdateResultInfo { result: code, error_node: which, error_from_node: NO_NODE })?;
        if code == 0 { Ok(()) } else { Err(CudaError::GraphExecUpdateFailure) }
    }

    "cuGraphExecKernelNodeSetParams" 10010 fn cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: In<CUkernelNodeParams>) {
        let params = CUkernelNodeParamsV2::from_v1(params.get()?);
        let driver = driver()?;
        let mut state = driver.state();
        let operation = state.kernel_from(driver, &params)?;
        state.set_step(exec, node, operation)
    }
    "cuGraphExecKernelNodeSetParams" 12000 fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: In<CUkernelNodeParamsV2>) {
        let params = params.get()?;
        let driver = driver()?;
        let mut state = driver.state();
        let operation = state.kernel_from(driver, &params)?;
        state.set_step(exec, node, operation)
    }

    "cuGraphExecMemcpyNodeSetParams" 10020 fn cuGraphExecMemcpyNodeSetParams(exec: CUgraphExec, node: CUgraphNode, copy: In<CUmemcpy3D>, _context: CUcontext) { set(exec, node, Operation::Copy(copy.get()?)) }
    "cuGraphExecMemsetNodeSetParams" 10020 fn cuGraphExecMemsetNodeSetParams(exec: CUgraphExec, node: CUgraphNode, fill: In<CUmemsetNodeParams>, _context: CUcontext) { set(exec, node, Operation::Fill(fill.get()?)) }
    "cuGraphExecChildGraphNodeSetParams" 11010 fn cuGraphExecChildGraphNodeSetParams(exec: CUgraphExec, node: CUgraphNode, child: CUgraph) {
        driver()?.state().set_child(exec, node, child)
    }

    "cuGraphExecNodeSetParams" 12020 fn cuGraphExecNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: InOut<CUgraphNodeParams>) {
        let driver = driver()?;
        let mut state = driver.state();
        let operation = state.operation_from(driver, params.get()?)?;
        match operation {
            Operation::Child(child) => state.set_child(exec, node, child),
            operation => state.set_step(exec, node, operation),
        }
    }

    "cuGraphNodeSetEnabled" 11060 fn cuGraphNodeSetEnabled(exec: CUgraphExec, node: CUgraphNode, enabled: c_uint) {
        let mut state = driver()?.state();
        let step = state.graphs.execs.get_mut(exec)?.step(node)?;
        if !matches!(step.operation, Operation::Kernel(_) | Operation::Copy(_) | Operation::Fill(_)) {
            return Err(CudaError::InvalidValue);
        }
        step.enabled = enabled != 0;
        Ok(())
    }
}
