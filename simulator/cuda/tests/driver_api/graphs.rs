//! Graphs: execution order, durations and memory.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;
use simulator_machine::description::{MIB, T4};
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_VALUE, call};

const MS: u64 = 1_000_000;
/// Longer than a program needs to queue a few calls.
const BUSY: u64 = 400 * MS;
const NON_BLOCKING: u32 = 1;
const NONE: Handle = std::ptr::null_mut();
/// Blocks that fill a T4, at 1024 threads each.
const ALL: u32 = 40;
const USED: u32 = 0;
const RESERVED: u32 = 2;

struct Graph<'a> {
    api: &'a Api,
    handle: Handle,
    spin: Handle,
}

impl<'a> Graph<'a> {
    fn new(api: &'a Api) -> Self {
        let mut handle = NONE;
        assert_eq!(call!(api, "cuGraphCreate", &raw mut handle, 0u32), 0);
        let spin = api.function(c"spin");
        Self { api, handle, spin }
    }

    /// Runs an action with the parameters of a kernel.
    fn with_kernel<T>(
        &self,
        blocks: u32,
        mut nanos: u64,
        action: impl FnOnce(&sys::CUDA_KERNEL_NODE_PARAMS) -> T,
    ) -> T {
        let mut parameters = [(&raw mut nanos).cast::<c_void>()];
        action(&sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.spin.cast(),
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1024,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            kernelParams: parameters.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        })
    }

    fn kernel(&self, after: &[Handle], blocks: u32, nanos: u64) -> Handle {
        let mut node = NONE;
        let code = self.with_kernel(blocks, nanos, |params| {
            call!(
                self.api,
                "cuGraphAddKernelNode_v2",
                &raw mut node,
                self.handle,
                after.as_ptr(),
                after.len(),
                std::ptr::from_ref(params)
            )
        });
        assert_eq!(code, 0);
        node
    }

    fn memory(&self, after: &[Handle], bytes: usize) -> (Handle, u64) {
        let mut node = NONE;
        let mut params: sys::CUDA_MEM_ALLOC_NODE_PARAMS = unsafe { std::mem::zeroed() };
        params.poolProps.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        params.poolProps.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        params.bytesize = bytes;
        let code = call!(
            self.api,
            "cuGraphAddMemAllocNode",
            &raw mut node,
            self.handle,
            after.as_ptr(),
            after.len(),
            &raw mut params
        );
        assert_eq!(code, 0);
        (node, params.dptr)
    }

    fn free(&self, after: &[Handle], address: u64) -> Handle {
        let mut node = NONE;
        let code = call!(
            self.api,
            "cuGraphAddMemFreeNode",
            &raw mut node,
            self.handle,
            after.as_ptr(),
            after.len(),
            address
        );
        assert_eq!(code, 0);
        node
    }

    fn instantiate(&self, flags: u64) -> Handle {
        let mut exec = NONE;
        let code = call!(
            self.api,
            "cuGraphInstantiateWithFlags",
            &raw mut exec,
            self.handle,
            flags
        );
        assert_eq!(code, 0);
        exec
    }
}

/// Returns the GPU time, ms, of work submitted to a busy stream.
fn measure(api: &Api, stream: Handle, work: impl FnOnce()) -> f32 {
    let spin = api.function(c"spin");
    let (start, end) = (api.event(), api.event());
    api.spin(spin, stream, ALL, BUSY);
    assert_eq!(call!(api, "cuEventRecord", start, stream), 0);
    work();
    assert_eq!(call!(api, "cuEventRecord", end, stream), 0);
    api.synchronize();
    let mut milliseconds = 0f32;
    assert_eq!(
        call!(api, "cuEventElapsedTime", &raw mut milliseconds, start, end),
        0
    );
    milliseconds
}

fn near(measured: f32, expected: f32) -> bool {
    (measured - expected).abs() < 0.001 * expected + 0.01
}

fn launch(api: &Api, exec: Handle, stream: Handle) -> u32 {
    call!(api, "cuGraphLaunch", exec, stream)
}

fn graph_memory(api: &Api, which: u32) -> u64 {
    let mut bytes = 0u64;
    let code = call!(
        api,
        "cuDeviceGetGraphMemAttribute",
        0,
        which,
        &raw mut bytes
    );
    assert_eq!(code, 0);
    bytes
}

#[test]
fn runs_branches_concurrently_and_joins_them() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    // Without dependencies all would run concurrently.
    let first = graph.kernel(&[], ALL / 4, 10 * MS);
    let left = graph.kernel(&[first], ALL / 4, 20 * MS);
    let right = graph.kernel(&[first], ALL / 4, 30 * MS);
    graph.kernel(&[left, right], ALL / 4, 5 * MS);
    let exec = graph.instantiate(0);
    assert_eq!(machine.gpu(0).unwrap().processes[0].kernels, 0);
    let stream = api.stream(NON_BLOCKING);
    let taken = measure(&api, stream, || assert_eq!(launch(&api, exec, stream), 0));
    assert!(near(taken, 45.0), "{taken}");
    // The executable graph does not need the graph.
    assert_eq!(call!(api, "cuGraphDestroy", graph.handle), 0);
    let taken = measure(&api, stream, || {
        assert_eq!(launch(&api, exec, stream), 0);
        assert_eq!(launch(&api, exec, stream), 0);
    });
    assert!(near(taken, 90.0), "{taken}");
    let process = &machine.gpu(0).unwrap().processes[0];
    // Three launches of four kernels, and two kernels that kept the GPU busy.
    assert_eq!(process.kernels, 3 * 4 + 2);
    assert_eq!(process.busy_nanos, 3 * 45 * MS + 2 * BUSY);
}

#[test]
fn serializes_launches_of_one_executable_graph() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    // Two of them would fit concurrently.
    graph.kernel(&[], 1, 50 * MS);
    let exec = graph.instantiate(0);
    let (first, second) = (api.stream(NON_BLOCKING), api.stream(NON_BLOCKING));
    assert_eq!(launch(&api, exec, first), 0);
    assert_eq!(launch(&api, exec, second), 0);
    api.synchronize();
    let process = &machine.gpu(0).unwrap().processes[0];
    assert_eq!((process.kernels, process.busy_nanos), (2, 100 * MS));
}

#[test]
fn applies_changed_parameters_and_updates() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    let node = graph.kernel(&[], ALL, 10 * MS);
    let exec = graph.instantiate(0);
    let stream = api.stream(NON_BLOCKING);
    let code = graph.with_kernel(ALL, 20 * MS, |params| {
        call!(
            api,
            "cuGraphExecKernelNodeSetParams_v2",
            exec,
            node,
            std::ptr::from_ref(params)
        )
    });
    assert_eq!(code, 0);
    let taken = measure(&api, stream, || assert_eq!(launch(&api, exec, stream), 0));
    assert!(near(taken, 20.0), "{taken}");

    let other = Graph::new(&api);
    other.kernel(&[], ALL, 7 * MS);
    let mut info: sys::CUgraphExecUpdateResultInfo = unsafe { std::mem::zeroed() };
    let mut update = |graph: &Graph| {
        let code = call!(
            api,
            "cuGraphExecUpdate_v2",
            exec,
            graph.handle,
            &raw mut info
        );
        (code, info.result as u32)
    };
    assert_eq!(update(&other), (0, 0));
    let taken = measure(&api, stream, || assert_eq!(launch(&api, exec, stream), 0));
    assert!(near(taken, 7.0), "{taken}");
    other.kernel(&[], ALL, 7 * MS);
    const UPDATE_FAILURE: u32 = 910;
    const TOPOLOGY_CHANGED: u32 = 2;
    assert_eq!(update(&other), (UPDATE_FAILURE, TOPOLOGY_CHANGED));

    assert_eq!(call!(api, "cuGraphNodeSetEnabled", exec, node, 0u32), 0);
    let taken = measure(&api, stream, || assert_eq!(launch(&api, exec, stream), 0));
    assert!(near(taken, 0.0), "{taken}");
}

#[test]
fn keeps_graph_memory_from_launch_to_trim() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    let (allocate, address) = graph.memory(&[], (100 << 20) + 1);
    let kernel = graph.kernel(&[allocate], ALL, MS);
    graph.free(&[kernel], address);
    let exec = graph.instantiate(0);
    let idle = machine.gpu(0).unwrap().used_bytes;
    let used = || machine.gpu(0).unwrap().used_bytes - idle;
    // The kernel's module is 2 MiB.
    let taken = 102 * MIB;
    for _ in 0..3 {
        assert_eq!(launch(&api, exec, NONE), 0);
        api.synchronize();
        assert_eq!(used(), taken + 2 * MIB);
        assert_eq!(graph_memory(&api, USED), 0);
        assert_eq!(graph_memory(&api, RESERVED), taken);
    }
    assert_eq!(call!(api, "cuDeviceGraphMemTrim", 0), 0);
    assert_eq!((used(), graph_memory(&api, RESERVED)), (2 * MIB, 0));
}

/// The executable graph keeps the memory of its nodes.
#[test]
fn launches_memory_nodes_of_destroyed_graph() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    let (_, address) = graph.memory(&[], 4 << 20);
    let exec = graph.instantiate(0);
    assert_eq!(call!(api, "cuGraphDestroy", graph.handle), 0);
    for _ in 0..2 {
        assert_eq!(launch(&api, exec, NONE), 0);
        assert_eq!(call!(api, "cuMemsetD8_v2", address, 7u8, 4 * MIB), 0);
        assert_eq!(call!(api, "cuMemFreeAsync", address, NONE), 0);
    }
    assert_eq!(call!(api, "cuGraphExecDestroy", exec), 0);
    assert_eq!(
        call!(api, "cuMemsetD8_v2", address, 7u8, 4 * MIB),
        INVALID_VALUE
    );
}

#[test]
fn leaves_unfreed_graph_memory_to_the_program() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    let (_, address) = graph.memory(&[], 4 << 20);
    let exec = graph.instantiate(0);
    // Not mapped before the launch.
    assert_eq!(
        call!(api, "cuMemsetD8_v2", address, 7u8, 4 * MIB),
        INVALID_VALUE
    );
    assert_eq!(launch(&api, exec, NONE), 0);
    assert_eq!(call!(api, "cuMemsetD8_v2", address, 7u8, 4 * MIB), 0);
    assert_eq!(graph_memory(&api, USED), 4 * MIB);
    // Allocation fails until the memory is freed.
    assert_eq!(launch(&api, exec, NONE), INVALID_VALUE);
    assert_eq!(call!(api, "cuMemFreeAsync", address, NONE), 0);
    assert_eq!(launch(&api, exec, NONE), 0);
    const AUTO_FREE_ON_LAUNCH: u64 = 1;
    let exec = graph.instantiate(AUTO_FREE_ON_LAUNCH);
    assert_eq!(launch(&api, exec, NONE), 0);
    assert_eq!(launch(&api, exec, NONE), 0);
    assert_eq!(graph_memory(&api, USED), 4 * MIB);
    api.free(address);
    assert_eq!(graph_memory(&api, USED), 0);
}

#[test]
fn runs_captured_host_functions_in_order() {
    extern "C" fn note(seen: *mut c_void) {
        let seen = unsafe { seen.cast::<AtomicU64>().as_ref() }.unwrap();
        seen.fetch_add(1, Ordering::SeqCst);
    }

    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let spin = api.function(c"spin");
    let calls = AtomicU64::new(0);
    let captured = api.stream(NON_BLOCKING);
    assert_eq!(call!(api, "cuStreamBeginCapture_v2", captured, 0u32), 0);
    api.spin(spin, captured, ALL, 50 * MS);
    let code = call!(
        api,
        "cuLaunchHostFunc",
        captured,
        note as extern "C" fn(*mut c_void),
        std::ptr::from_ref(&calls)
    );
    assert_eq!(code, 0);
    api.spin(spin, captured, ALL, 50 * MS);
    let mut handle = NONE;
    assert_eq!(
        call!(api, "cuStreamEndCapture", captured, &raw mut handle),
        0
    );
    let graph = Graph {
        api: &api,
        handle,
        spin,
    };
    let exec = graph.instantiate(0);
    let stream = api.stream(NON_BLOCKING);
    for round in 1..=3 {
        assert_eq!(launch(&api, exec, stream), 0);
        assert_eq!(call!(api, "cuStreamSynchronize", stream), 0);
        assert_eq!(calls.load(Ordering::SeqCst), round);
        let kernels = machine.gpu(0).unwrap().processes[0].kernels;
        assert_eq!(kernels, 2 * round);
    }
}

#[test]
fn runs_a_copy_of_the_child_graph() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let child = Graph::new(&api);
    child.kernel(&[], ALL, 10 * MS);
    let graph = Graph::new(&api);
    let first = graph.kernel(&[], ALL, MS);
    let mut node = NONE;
    let code = call!(
        api,
        "cuGraphAddChildGraphNode",
        &raw mut node,
        graph.handle,
        &raw const first,
        1usize,
        child.handle
    );
    assert_eq!(code, 0);
    graph.kernel(&[node], ALL, MS);
    // Does not change the copy.
    child.kernel(&[], ALL, 100 * MS);
    let mut clone = NONE;
    assert_eq!(call!(api, "cuGraphClone", &raw mut clone, graph.handle), 0);
    let stream = api.stream(NON_BLOCKING);
    for handle in [graph.handle, clone] {
        let copy = Graph {
            api: &api,
            handle,
            spin: graph.spin,
        };
        let exec = copy.instantiate(0);
        let taken = measure(&api, stream, || assert_eq!(launch(&api, exec, stream), 0));
        assert!(near(taken, 12.0), "{taken}");
    }
}

#[test]
fn lists_nodes_and_returns_their_parameters() {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let graph = Graph::new(&api);
    let first = graph.kernel(&[], ALL, 3 * MS);
    let second = graph.kernel(&[first], ALL, MS);
    let (mut nodes, mut count) = ([NONE; 4], 4usize);
    let list = nodes.as_mut_ptr();
    assert_eq!(
        call!(api, "cuGraphGetNodes", graph.handle, list, &raw mut count),
        0
    );
    assert_eq!((count, nodes), (2, [first, second, NONE, NONE]));
    let mut kind = 99u32;
    assert_eq!(call!(api, "cuGraphNodeGetType", second, &raw mut kind), 0);
    assert_eq!(kind, 0);
    let mut params: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    assert_eq!(
        call!(api, "cuGraphKernelNodeGetParams_v2", first, &raw mut params),
        0
    );
    let argument = unsafe { params.kernelParams.read() };
    let nanos = unsafe { argument.cast::<u64>().read() };
    assert_eq!((params.gridDimX, nanos), (ALL, 3 * MS));
}
