//! Graphs: launched and charged as a whole. Stream captures, which create most graphs.
//!
//! The cost of a graph is learned per executable graph. Until the first measurement it is estimated from the known
//! costs of its kernels; after a change of its nodes it is measured again. A graph that waits for the host or another
//! device leaves the GPU idle, so its cost stays that estimate.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use core::ptr;

use drava_vgpu_abi::cost::{Cost, FIRST_GUESS_NS, LaunchKind};

use crate::driver_api::cuda::{
    CU_GRAPH_NODE_TYPE_KERNEL, CUDA_GRAPH_INSTANTIATE_ERROR, CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD,
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_KERNEL_NODE_PARAMS, CUDA_SUCCESS, CUcontext, CUgraph,
    CUgraphExec, CUgraphNode, CUresult, CUstream,
};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::{
    cuGraphExecChildGraphNodeSetParams, cuGraphExecDestroy, cuGraphExecMemcpyNodeSetParams,
    cuGraphExecNodeSetParams, cuGraphExecUpdate, cuGraphExecUpdate_v2, cuGraphInstantiate,
    cuGraphInstantiateWithFlags, cuGraphInstantiateWithParams, cuGraphLaunch,
    cuGraphNodeSetEnabled, cuStreamBeginCapture, cuStreamBeginCapture_v2,
    cuStreamBeginCaptureToGraph, cuStreamEndCapture,
};
use crate::hooks::metering::{self, NullStream, metered};
use crate::hooks::{graph_memory, pool};

/// Number of nodes to inspect; a larger graph is extrapolated.
const NODES: usize = 256;

static GET_NODES: Original<GetNodes> = Original::new(Library::Cuda, c"cuGraphGetNodes");
static GET_TYPE: Original<GetType> = Original::new(Library::Cuda, c"cuGraphNodeGetType");
static GET_KERNEL: Original<GetKernel> =
    Original::new(Library::Cuda, c"cuGraphKernelNodeGetParams_v2");

type GetNodes = unsafe extern "C" fn(CUgraph, *mut CUgraphNode, *mut usize) -> CUresult;
type GetType = unsafe extern "C" fn(CUgraphNode, *mut c_int) -> CUresult;
type GetKernel = unsafe extern "C" fn(CUgraphNode, *mut CUDA_KERNEL_NODE_PARAMS) -> CUresult;

fn kind_of(exec: CUgraphExec) -> LaunchKind {
    LaunchKind::graph(exec.expose_provenance() as u64)
}

/// Returns the sum of the costs of the graph's kernels; those of unknown kernels count as the mean of the known ones.
fn estimate_ns(graph: CUgraph) -> Option<u64> {
    let get = GET_NODES.get()?;
    let mut all = 0usize;
    // SAFETY: without an array it only writes the number of nodes.
    if unsafe { get(graph, ptr::null_mut(), &raw mut all) } != CUDA_SUCCESS {
        return None;
    }
    let mut nodes = [ptr::null_mut(); NODES];
    let mut count = NODES;
    // SAFETY: writes at most `count` nodes.
    if unsafe { get(graph, nodes.as_mut_ptr(), &raw mut count) } != CUDA_SUCCESS {
        return None;
    }
    let inspected = count.min(all).min(NODES);
    let (mut kernels, mut known, mut sum) = (0u64, 0u64, 0u64);
    for kernel in nodes
        .iter()
        .take(inspected)
        .filter_map(|node| kernel_of(*node))
    {
        kernels = kernels.saturating_add(1);
        if let Some(ns) = metering::known_cost_ns(kernel) {
            known = known.saturating_add(1);
            sum = sum.saturating_add(ns);
        }
    }
    let mean = sum.checked_div(known)?;
    let unknown = kernels.saturating_sub(known);
    let sum = sum
        .saturating_add(mean.saturating_mul(unknown))
        .saturating_mul(all as u64)
        .checked_div(inspected as u64)?;
    (sum != 0).then_some(sum)
}

/// Returns the kernel of a kernel node.
fn kernel_of(node: CUgraphNode) -> Option<LaunchKind> {
    let get_type = GET_TYPE.get()?;
    let mut r#type = -1;
    // SAFETY: writes one number.
    let result = unsafe { get_type(node, &raw mut r#type) };
    if result != CUDA_SUCCESS || r#type != CU_GRAPH_NODE_TYPE_KERNEL {
        return None;
    }
    let get = GET_KERNEL.get()?;
    let mut parameters = CUDA_KERNEL_NODE_PARAMS::ZERO;
    // SAFETY: writes one structure.
    if unsafe { get(node, &raw mut parameters) } != CUDA_SUCCESS {
        return None;
    }
    let function = if parameters.func.is_null() {
        parameters.kern
    } else {
        parameters.func
    };
    Some(LaunchKind::kernel(
        function.expose_provenance() as u64,
        parameters.gridDim,
        parameters.blockDim,
    ))
}

/// After an instantiation: the handle may have belonged to another graph.
///
/// # Safety
/// If `result` is success, `exec` points to an executable graph.
unsafe fn instantiated(result: CUresult, exec: *const CUgraphExec, graph: CUgraph) -> CUresult {
    if result == CUDA_SUCCESS {
        // SAFETY: libcuda has written it.
        let exec = unsafe { exec.read() };
        let contents = graph_memory::record(exec, graph);
        let estimate = estimate_ns(graph);
        let cost = if contents.may_idle {
            Cost::unmeasurable(estimate.unwrap_or(FIRST_GUESS_NS))
        } else {
            estimate.map_or(Cost::UNKNOWN, Cost::guess)
        };
        metering::expect(kind_of(exec), cost);
    }
    result
}

pub(crate) unsafe fn instantiate(
    original: cuGraphInstantiate::Function,
    exec: *mut CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    log: *mut c_char,
    size: usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(exec, graph, error_node, log, size) };
    // SAFETY: `original` wrote to `exec`.
    unsafe { instantiated(result, exec, graph) }
}

pub(crate) unsafe fn instantiate_with_flags(
    original: cuGraphInstantiateWithFlags::Function,
    exec: *mut CUgraphExec,
    graph: CUgraph,
    flags: c_ulonglong,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(exec, graph, flags) };
    // SAFETY: `original` wrote to `exec`.
    unsafe { instantiated(result, exec, graph) }
}

pub(crate) unsafe fn instantiate_with_params(
    original: cuGraphInstantiateWithParams::Function,
    exec: *mut CUgraphExec,
    graph: CUgraph,
    parameters: *mut c_void,
) -> CUresult {
    let call = || {
        // SAFETY: the caller's arguments.
        let result = unsafe { original(exec, graph, parameters) };
        // SAFETY: `original` wrote to `exec`.
        unsafe { instantiated(result, exec, graph) }
    };
    let parameters = parameters.cast::<CUDA_GRAPH_INSTANTIATE_PARAMS>();
    // SAFETY: null, or the caller's parameters.
    let flags = unsafe { parameters.as_ref() }.map_or(0, |parameters| parameters.flags);
    if flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD == 0 {
        return call();
    }
    let mut is_called = false;
    let result = graph_memory::instantiate_uploaded(graph, || {
        is_called = true;
        let result = call();
        if result == CUDA_SUCCESS {
            // SAFETY: libcuda has written it.
            graph_memory::record_upload(unsafe { exec.read() });
        }
        result
    });
    // SAFETY: as above.
    if let Some(parameters) = unsafe { parameters.as_mut() }.filter(|_| !is_called) {
        parameters.result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
    }
    result
}

/// Marks the cost as stale after a change of an executable graph, or an attempt.
fn changed(exec: CUgraphExec, result: CUresult) -> CUresult {
    metering::mark_stale(kind_of(exec));
    result
}

pub(crate) unsafe fn update(
    original: cuGraphExecUpdate::Function,
    exec: CUgraphExec,
    graph: CUgraph,
    error_node: *mut CUgraphNode,
    update: *mut c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    changed(exec, unsafe { original(exec, graph, error_node, update) })
}

pub(crate) unsafe fn update_v2(
    original: cuGraphExecUpdate_v2::Function,
    exec: CUgraphExec,
    graph: CUgraph,
    info: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    changed(exec, unsafe { original(exec, graph, info) })
}

pub(crate) unsafe fn set_node(
    original: cuGraphExecNodeSetParams::Function,
    exec: CUgraphExec,
    node: CUgraphNode,
    parameters: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    changed(exec, unsafe { original(exec, node, parameters) })
}

pub(crate) unsafe fn set_transfer(
    original: cuGraphExecMemcpyNodeSetParams::Function,
    exec: CUgraphExec,
    node: CUgraphNode,
    parameters: *const c_void,
    context: CUcontext,
) -> CUresult {
    // SAFETY: the caller's arguments.
    changed(exec, unsafe { original(exec, node, parameters, context) })
}

pub(crate) unsafe fn set_child(
    original: cuGraphExecChildGraphNodeSetParams::Function,
    exec: CUgraphExec,
    node: CUgraphNode,
    child: CUgraph,
) -> CUresult {
    // SAFETY: the caller's arguments.
    changed(exec, unsafe { original(exec, node, child) })
}

pub(crate) unsafe fn set_enabled(
    original: cuGraphNodeSetEnabled::Function,
    exec: CUgraphExec,
    node: CUgraphNode,
    enabled: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    changed(exec, unsafe { original(exec, node, enabled) })
}

pub(crate) unsafe fn destroy(
    original: cuGraphExecDestroy::Function,
    exec: CUgraphExec,
) -> CUresult {
    metering::expect(kind_of(exec), Cost::UNKNOWN);
    graph_memory::forget(exec);
    // SAFETY: the caller's arguments.
    unsafe { original(exec) }
}

pub(crate) unsafe fn launch<S: NullStream>(
    original: cuGraphLaunch::Function,
    exec: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    let resolved = S::resolve(stream);
    // Memory is reserved when the launch is admitted, not while it waits.
    metered!(
        kind_of(exec),
        resolved,
        // SAFETY: the caller's arguments.
        graph_memory::launch_charged(exec, resolved, || unsafe { original(exec, stream) })
    )
}

pub(crate) unsafe fn begin_capture<S: NullStream>(
    original: cuStreamBeginCapture::Function,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    metering::begin_capture(S::resolve(stream), || unsafe { original(stream) })
}

pub(crate) unsafe fn begin_capture_v2<S: NullStream>(
    original: cuStreamBeginCapture_v2::Function,
    stream: CUstream,
    mode: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    metering::begin_capture(S::resolve(stream), || unsafe { original(stream, mode) })
}

pub(crate) unsafe fn begin_capture_to_graph<S: NullStream>(
    original: cuStreamBeginCaptureToGraph::Function,
    stream: CUstream,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    edges: *const c_void,
    count: usize,
    mode: c_int,
) -> CUresult {
    metering::begin_capture(S::resolve(stream), || {
        // SAFETY: the caller's arguments.
        unsafe { original(stream, graph, dependencies, edges, count, mode) }
    })
}

pub(crate) unsafe fn end_capture<S: NullStream>(
    original: cuStreamEndCapture::Function,
    stream: CUstream,
    graph: *mut CUgraph,
) -> CUresult {
    // SAFETY: the caller's arguments.
    metering::end_capture(S::resolve(stream), || unsafe { original(stream, graph) })
}

/// A destroyed stream is not being captured, and its handle may be reused.
pub(crate) unsafe fn destroy_stream(
    original: crate::driver_api::functions::cuStreamDestroy::Function,
    stream: CUstream,
) -> CUresult {
    pool::forget_stream(stream);
    // SAFETY: the caller's arguments.
    let result = unsafe { original(stream) };
    if result == CUDA_SUCCESS {
        metering::forget_stream(stream);
    }
    result
}
