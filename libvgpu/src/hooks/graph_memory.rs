//! Memory of graphs: allocation nodes get memory when their graph is launched, from a pool per device for all
//! graphs of the process.
//!
//! A launch cannot be reverted. So the largest need of a graph is computed from its nodes at instantiation,
//! reserved before each launch, and corrected afterwards to the size that libcuda reports for the pool. The largest
//! need is the sum of the allocation nodes; libcuda may use less, where nodes share memory. Memory cached from an
//! earlier launch is not reserved again; see [`crate::hooks::driver_cache::graphs`].

use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, size_of};
use core::ptr;
use core::slice;
use core::sync::atomic::Ordering;

use crate::accounts::blocks::BLOCK;
use crate::accounts::records::GraphNeed;
use crate::current::{Target, target_of_device};
use crate::driver_api::cuda::{
    CU_GRAPH_NODE_TYPE_GRAPH, CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPES_THAT_WAIT,
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_MEM_ALLOC_NODE_PARAMS,
    CUDA_SUCCESS, CUdevice, CUgraph, CUgraphExec, CUgraphNode, CUresult, CUstream,
};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::{
    cuGraphAddMemAllocNode, cuGraphAddNode, cuGraphAddNode_v2, cuGraphUpload,
};
use crate::hooks::driver_cache::{deny, graphs, reserve_ahead};
use crate::hooks::metering;
use crate::limits::gpu::Gpu;
use crate::process::Process;
use crate::system::sys;

/// Depth of inspected child graphs; libcuda allows only a few levels.
const DEPTH: u32 = 16;
/// Number of nodes to inspect in a process without allocation nodes, where they only decide on how the graph is metered.
const NODES: usize = 1024;

static GET_NODES: Original<GetNodes> = Original::new(Library::Cuda, c"cuGraphGetNodes");
static GET_TYPE: Original<GetType> = Original::new(Library::Cuda, c"cuGraphNodeGetType");
static GET_CHILD: Original<GetChild> =
    Original::new(Library::Cuda, c"cuGraphChildGraphNodeGetGraph");
static GET_ALLOCATION: Original<GetAllocation> =
    Original::new(Library::Cuda, c"cuGraphMemAllocNodeGetParams");

type GetNodes = unsafe extern "C" fn(CUgraph, *mut CUgraphNode, *mut usize) -> CUresult;
type GetType = unsafe extern "C" fn(CUgraphNode, *mut c_int) -> CUresult;
type GetChild = unsafe extern "C" fn(CUgraphNode, *mut CUgraph) -> CUresult;
type GetAllocation = unsafe extern "C" fn(CUgraphNode, *mut CUDA_MEM_ALLOC_NODE_PARAMS) -> CUresult;

/// What the nodes of a graph and its child graphs imply.
#[derive(Default)]
pub(crate) struct Contents {
    need: Option<Need>,
    /// The graph waits for the host, another stream or another device.
    pub(crate) may_idle: bool,
}

/// Largest memory need of a graph, on the device of its first allocation node.
#[derive(Clone, Copy)]
struct Need {
    device: CUdevice,
    bytes: u64,
}

/// Records that graphs may have allocation nodes from now on.
pub(crate) fn expect_allocations() {
    if let Some(process) = Process::get() {
        process.allocates_in_graphs.store(1, Ordering::Relaxed);
    }
}

pub(crate) unsafe fn add_allocation(
    original: cuGraphAddMemAllocNode::Function,
    node: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    parameters: *mut c_void,
) -> CUresult {
    expect_allocations();
    // SAFETY: the caller's arguments.
    unsafe { original(node, graph, dependencies, count, parameters) }
}

/// Expects allocations if the parameters of a node are those of an allocation.
///
/// # Safety
/// Null, or `CUgraphNodeParams`, which begins with the type.
unsafe fn expect_node(parameters: *const c_void) {
    // SAFETY: the caller's contract.
    let r#type = unsafe { parameters.cast::<c_int>().as_ref() };
    if r#type == Some(&CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        expect_allocations();
    }
}

pub(crate) unsafe fn add_node(
    original: cuGraphAddNode::Function,
    node: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
    parameters: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { expect_node(parameters) };
    // SAFETY: the caller's arguments.
    unsafe { original(node, graph, dependencies, count, parameters) }
}

pub(crate) unsafe fn add_node_v2(
    original: cuGraphAddNode_v2::Function,
    node: *mut CUgraphNode,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    edges: *const c_void,
    count: usize,
    parameters: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    unsafe { expect_node(parameters) };
    // SAFETY: the caller's arguments.
    unsafe { original(node, graph, dependencies, edges, count, parameters) }
}

/// Calls `each` with every node of the graph, except nodes that cannot be queried. In a process without allocation nodes,
/// only with the first [`NODES`].
fn for_each_node(graph: CUgraph, mut each: impl FnMut(CUgraphNode)) {
    let Some(get) = GET_NODES.get() else {
        return;
    };
    let mut count = 0;
    // SAFETY: without an array it only writes the number of nodes.
    let result = unsafe { get(graph, ptr::null_mut(), &raw mut count) };
    if result != CUDA_SUCCESS || count == 0 {
        return;
    }
    if Process::get()
        .is_some_and(|process| process.allocates_in_graphs.load(Ordering::Relaxed) == 0)
    {
        count = count.min(NODES);
    }
    let size = count.saturating_mul(size_of::<CUgraphNode>());
    let Some(place) = sys::map_zeroes(size) else {
        return;
    };
    let nodes = place.cast::<CUgraphNode>();
    // SAFETY: the mapping has `count` entries.
    let result = unsafe { get(graph, nodes.as_ptr(), &raw mut count) };
    if result == CUDA_SUCCESS {
        let fitting = count.min(size.checked_div(size_of::<CUgraphNode>()).unwrap_or(0));
        // SAFETY: that many zeroed entries are mapped, and zeroes are valid nodes.
        let nodes = unsafe { slice::from_raw_parts(nodes.as_ptr(), fitting) };
        nodes.iter().for_each(|node| each(*node));
    }
    sys::unmap(place, size);
}

fn type_of(node: CUgraphNode) -> Option<c_int> {
    let get = GET_TYPE.get()?;
    let mut kind = 0;
    // SAFETY: writes one type.
    let result = unsafe { get(node, &raw mut kind) };
    (result == CUDA_SUCCESS).then_some(kind)
}

fn child_of(node: CUgraphNode) -> Option<CUgraph> {
    let get = GET_CHILD.get()?;
    let mut child = ptr::null_mut();
    // SAFETY: writes one graph.
    let result = unsafe { get(node, &raw mut child) };
    (result == CUDA_SUCCESS).then_some(child)
}

fn allocation_of(node: CUgraphNode) -> Option<CUDA_MEM_ALLOC_NODE_PARAMS> {
    let get = GET_ALLOCATION.get()?;
    let mut params = MaybeUninit::<CUDA_MEM_ALLOC_NODE_PARAMS>::zeroed();
    // SAFETY: writes one set of parameters.
    let result = unsafe { get(node, params.as_mut_ptr()) };
    // SAFETY: all zeroes is a valid set of parameters.
    (result == CUDA_SUCCESS).then_some(unsafe { params.assume_init() })
}

fn add_contents(graph: CUgraph, depth: u32, contents: &mut Contents) {
    for_each_node(graph, |node| match type_of(node) {
        Some(CU_GRAPH_NODE_TYPE_MEM_ALLOC) => {
            let Some(params) = allocation_of(node) else {
                return;
            };
            if params.poolLocation.r#type != CU_MEM_LOCATION_TYPE_DEVICE {
                return;
            }
            let bytes = (params.bytesize as u64)
                .checked_next_multiple_of(BLOCK)
                .unwrap_or(u64::MAX);
            let need = contents.need;
            contents.need = Some(Need {
                device: need.map_or(params.poolLocation.id, |need| need.device),
                bytes: need.map_or(0, |need| need.bytes).saturating_add(bytes),
            });
        }
        Some(CU_GRAPH_NODE_TYPE_GRAPH) => {
            if let Some(depth) = depth.checked_sub(1)
                && let Some(child) = child_of(node)
            {
                add_contents(child, depth, contents);
            }
        }
        Some(kind) if CU_GRAPH_NODE_TYPES_THAT_WAIT.contains(&kind) => contents.may_idle = true,
        _ => {}
    });
}

fn key_of(exec: CUgraphExec) -> u64 {
    exec.expose_provenance() as u64
}

fn contents_of(graph: CUgraph) -> Contents {
    let mut contents = Contents::default();
    add_contents(graph, DEPTH, &mut contents);
    contents
}

/// Records the need of `exec`, which was just instantiated from `graph`, and returns the graph's contents.
pub(crate) fn record(exec: CUgraphExec, graph: CUgraph) -> Contents {
    forget(exec);
    let contents = contents_of(graph);
    let Some(need) = contents.need else {
        return contents;
    };
    if let Target::Limited(gpu) = target_of_device(need.device) {
        let need = GraphNeed {
            bytes: need.bytes,
            gpu: gpu.index(),
            device: need.device,
            is_counted: false,
        };
        Process::of(gpu).graphs.insert(key_of(exec), need);
    }
    contents
}

/// Launches or uploads an executable graph with `call`, if its need can be reserved. A captured launch needs
/// nothing until its graph is launched.
pub(crate) fn launch_charged(
    exec: CUgraphExec,
    stream: CUstream,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let known = Process::get().and_then(|process| {
        let need = process.graphs.get(key_of(exec))?;
        Some((process.gpu(need.gpu)?, need))
    });
    match known {
        Some((gpu, GraphNeed { bytes, device, .. })) if !metering::is_capturing(stream) => {
            let need = Need { device, bytes };
            let reused = graphs::reuse_charge(gpu, need.device, key_of(exec), need.bytes);
            call_charged(gpu, need, reused, call)
        }
        _ => call(),
    }
}

/// Runs `call`, which may allocate the nodes of a graph, if the need beyond `reused_bytes` can be reserved.
fn call_charged(
    gpu: Gpu,
    need: Need,
    reused_bytes: u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let more = need.bytes.saturating_sub(reused_bytes);
    let attempt = match more {
        0 => Some(Process::of(gpu).pending_reservations.begin()),
        _ => reserve_ahead(gpu, more),
    };
    let Some(_attempt) = attempt else {
        graphs::settle(gpu, need.device, reused_bytes, reused_bytes);
        return deny(gpu);
    };
    graphs::add_reservation(gpu, need.device, more);
    let result = call();
    let grown_bytes = if result == CUDA_SUCCESS {
        need.bytes
    } else {
        reused_bytes
    };
    graphs::settle(gpu, need.device, need.bytes, grown_bytes);
    result
}

/// Instantiates `graph` with `call`, which uploads it and calls [`record_upload`], if its need can be reserved.
pub(crate) fn instantiate_uploaded(graph: CUgraph, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(need) = contents_of(graph).need else {
        return call();
    };
    match target_of_device(need.device) {
        Target::Unlimited => call(),
        Target::Denied => CUDA_ERROR_OUT_OF_MEMORY,
        // A new graph has no cached memory to reuse.
        Target::Limited(gpu) => call_charged(gpu, need, 0, call),
    }
}

/// Records that an executable graph was uploaded at instantiation.
pub(crate) fn record_upload(exec: CUgraphExec) {
    if let Some(process) = Process::get() {
        graphs::record_upload(process, key_of(exec));
    }
}

/// An upload allocates the nodes before the launch.
pub(crate) unsafe fn upload(
    original: cuGraphUpload::Function,
    exec: CUgraphExec,
    stream: CUstream,
) -> CUresult {
    // SAFETY: the caller's arguments.
    launch_charged(exec, stream, || unsafe { original(exec, stream) })
}

/// Drops a destroyed executable graph.
pub(crate) fn forget(exec: CUgraphExec) {
    if let Some(process) = Process::get() {
        process.graphs.remove(key_of(exec));
    }
}
