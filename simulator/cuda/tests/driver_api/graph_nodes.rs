//! Graph nodes: memset, copy, child graph and kernel.

use std::ffi::c_void;

use cudarc::driver::sys;
use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, Invoke, call};

const NONE: Handle = std::ptr::null_mut();

struct TestBed {
    api: Api,
    graph: Handle,
    from: u64,
    to: u64,
    _machine: Machine,
}

fn test_bed() -> TestBed {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (from, to) = (api.allocate(256).unwrap(), api.allocate(256).unwrap());
    let mut graph = NONE;
    assert_eq!(call!(api, "cuGraphCreate", &raw mut graph, 0u32), 0);
    TestBed {
        api,
        graph,
        from,
        to,
        _machine: machine,
    }
}

impl TestBed {
    fn fill(&self, value: u32) -> sys::CUDA_MEMSET_NODE_PARAMS {
        sys::CUDA_MEMSET_NODE_PARAMS {
            dst: self.to,
            pitch: 0,
            value,
            elementSize: 1,
            width: 256,
            height: 1,
        }
    }

    /// Copies the first buffer to the second.
    fn copy(&self) -> sys::CUDA_MEMCPY3D {
        let on_device = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE;
        sys::CUDA_MEMCPY3D {
            srcXInBytes: 0,
            srcY: 0,
            srcZ: 0,
            srcLOD: 0,
            srcMemoryType: on_device,
            srcHost: std::ptr::null(),
            srcDevice: self.from,
            srcArray: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            srcPitch: 0,
            srcHeight: 0,
            dstXInBytes: 0,
            dstY: 0,
            dstZ: 0,
            dstLOD: 0,
            dstMemoryType: on_device,
            dstHost: std::ptr::null_mut(),
            dstDevice: self.to,
            dstArray: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dstPitch: 0,
            dstHeight: 0,
            WidthInBytes: 256,
            Height: 1,
            Depth: 1,
        }
    }

    fn instantiate(&self) -> Handle {
        let mut exec = NONE;
        let code = call!(
            self.api,
            "cuGraphInstantiateWithFlags",
            &raw mut exec,
            self.graph,
            0u64
        );
        assert_eq!(code, 0);
        exec
    }

    fn run(&self, exec: Handle) {
        assert_eq!(call!(self.api, "cuGraphLaunch", exec, NONE), 0);
        self.api.synchronize();
    }
}

/// `CUDA_KERNEL_NODE_PARAMS_v3`: function, shape, shared bytes, parameters, kernel, context.
#[repr(C)]
struct Kernel {
    function: Handle,
    shape: [u32; 7],
    parameters: *mut *mut c_void,
    extra: Handle,
    kernel: Handle,
    context: Handle,
}

fn kernel(api: &Api) -> Kernel {
    Kernel {
        function: api.function(c"noop"),
        shape: [1, 1, 1, 32, 1, 1, 0],
        parameters: std::ptr::null_mut(),
        extra: NONE,
        kernel: NONE,
        context: NONE,
    }
}

#[test]
fn changes_memset_of_an_executable_graph() {
    let bed = test_bed();
    let api = &bed.api;
    let mut node = NONE;
    let first = bed.fill(1);
    let code = call!(
        api,
        "cuGraphAddMemsetNode",
        &raw mut node,
        bed.graph,
        NONE,
        0usize,
        &raw const first,
        NONE
    );
    assert_eq!(code, 0);
    let exec = bed.instantiate();
    bed.run(exec);
    assert_eq!(api.read(bed.to, 256), [1; 256]);
    let second = bed.fill(2);
    assert_eq!(
        call!(
            api,
            "cuGraphExecMemsetNodeSetParams",
            exec,
            node,
            &raw const second,
            NONE
        ),
        0
    );
    bed.run(exec);
    assert_eq!(api.read(bed.to, 256), [2; 256]);
}

#[test]
fn changes_copy_of_an_executable_graph() {
    let bed = test_bed();
    let api = &bed.api;
    api.write(bed.from, &[5; 256]);
    let mut copy = bed.copy();
    let mut node = NONE;
    let code = call!(
        api,
        "cuGraphAddMemcpyNode",
        &raw mut node,
        bed.graph,
        NONE,
        0usize,
        &raw const copy,
        NONE
    );
    assert_eq!(code, 0);
    let exec = bed.instantiate();
    bed.run(exec);
    assert_eq!(api.read(bed.to, 256), [5; 256]);
    assert_eq!(call!(api, "cuMemsetD8_v2", bed.to, 0u8, 256usize), 0);
    copy.WidthInBytes = 128;
    assert_eq!(
        call!(
            api,
            "cuGraphExecMemcpyNodeSetParams",
            exec,
            node,
            &raw const copy,
            NONE
        ),
        0
    );
    bed.run(exec);
    assert_eq!(api.read(bed.to + 120, 16), [[5; 8], [0; 8]].concat());
}

#[test]
fn moves_bytes_at_each_graph_launch() {
    let bed = test_bed();
    let api = &bed.api;
    let fill = sys::CUDA_MEMSET_NODE_PARAMS {
        dst: bed.from,
        elementSize: 4,
        width: 64,
        ..bed.fill(0x0403_0201)
    };
    let (mut set, mut node) = (NONE, NONE);
    let code = call!(
        api,
        "cuGraphAddMemsetNode",
        &raw mut set,
        bed.graph,
        NONE,
        0usize,
        &raw const fill,
        NONE
    );
    assert_eq!(code, 0);
    let copy = bed.copy();
    let code = call!(
        api,
        "cuGraphAddMemcpyNode",
        &raw mut node,
        bed.graph,
        &raw const set,
        1usize,
        &raw const copy,
        NONE
    );
    assert_eq!(code, 0);
    let exec = bed.instantiate();
    for _ in 0..2 {
        assert_eq!(call!(api, "cuMemsetD8_v2", bed.to, 0u8, 256usize), 0);
        bed.run(exec);
        assert_eq!(api.read(bed.to + 248, 8), [1, 2, 3, 4, 1, 2, 3, 4]);
    }
}

#[test]
fn copies_the_graph_of_a_child_node() {
    let bed = test_bed();
    let api = &bed.api;
    let mut kernel_node = NONE;
    let params = kernel(api);
    let code = call!(
        api,
        "cuGraphAddKernelNode_v2",
        &raw mut kernel_node,
        bed.graph,
        NONE,
        0usize,
        &raw const params
    );
    assert_eq!(code, 0);
    let (mut child, mut node, mut inner) = (NONE, NONE, NONE);
    assert_eq!(call!(api, "cuGraphClone", &raw mut child, bed.graph), 0);
    let code = call!(
        api,
        "cuGraphAddChildGraphNode",
        &raw mut node,
        bed.graph,
        NONE,
        0usize,
        child
    );
    assert_eq!(code, 0);
    assert_eq!(
        call!(api, "cuGraphChildGraphNodeGetGraph", node, &raw mut inner),
        0
    );
    assert!(inner != child && !inner.is_null());
    let exec = bed.instantiate();
    assert_eq!(
        call!(api, "cuGraphExecChildGraphNodeSetParams", exec, node, child),
        0
    );
    bed.run(exec);
}

#[test]
fn returns_kernel_node_parameters_in_both_versions() {
    let bed = test_bed();
    let api = &bed.api;
    let mut params = kernel(api);
    for version in ["", "_v2"] {
        let name = |verb: &str| api.symbol(&format!("cuGraph{verb}{version}"));
        let mut node = NONE;
        params.shape[0] = 7;
        let code: u32 = Invoke::invoke(
            name("AddKernelNode"),
            (&raw mut node, bed.graph, NONE, 0usize, &raw const params),
        );
        assert_eq!(code, 0, "{version}");
        params.shape[0] = 0;
        let code: u32 = Invoke::invoke(name("KernelNodeGetParams"), (node, &raw mut params));
        assert_eq!((code, params.shape[0]), (0, 7), "{version}");
    }
}
