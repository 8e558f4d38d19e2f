//! Each kind of node, made in every way; and what memsets and copies do.

use std::ffi::c_void;

use cudarc::driver::sys;
use simulator_machine::description::T4;
use simulator_machine::testing::Machine;

use crate::api::{Api, Handle, INVALID_VALUE, Invoke, NOT_SUPPORTED, call};

const NONE: Handle = std::ptr::null_mut();

/// `CUgraphNodeParams`: a kind, and what its kind has from the sixteenth byte on.
#[repr(C, align(8))]
struct Params {
    kind: i32,
    reserved: [i32; 3],
    words: [u64; 29],
    end: u64,
}

impl Params {
    fn new<T>(kind: i32, value: T) -> Self {
        let mut params = Self {
            kind,
            reserved: [0; 3],
            words: [0; 29],
            end: 0,
        };
        assert!(size_of::<T>() <= size_of_val(&params.words));
        let place = params.words.as_mut_ptr().cast::<T>();
        unsafe { place.write_unaligned(value) };
        params
    }
}

pub(crate) struct Ground {
    pub(crate) api: Api,
    pub(crate) graph: Handle,
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) machine: Machine,
}

pub(crate) fn ground() -> Ground {
    let machine = Machine::start(T4).unwrap();
    let api = Api::start(&machine);
    let (from, to) = (api.allocate(256).unwrap(), api.allocate(256).unwrap());
    let mut graph = NONE;
    assert_eq!(call!(api, "cuGraphCreate", &raw mut graph, 0u32), 0);
    Ground {
        api,
        graph,
        from,
        to,
        machine,
    }
}

impl Ground {
    /// A node by `cuGraphAddNode`, behind another one.
    fn add(&self, name: &str, before: &[Handle], params: &mut Params) -> Result<Handle, u32> {
        let mut node = NONE;
        let params = std::ptr::from_mut(params);
        let symbol = self.api.symbol(name);
        let (list, count) = (before.as_ptr(), before.len());
        let code: u32 = match name.ends_with("_v2") {
            true => Invoke::invoke(
                symbol,
                (&raw mut node, self.graph, list, NONE, count, params),
            ),
            false => Invoke::invoke(symbol, (&raw mut node, self.graph, list, count, params)),
        };
        match code {
            0 => Ok(node),
            code => Err(code),
        }
    }

    pub(crate) fn kind(&self, node: Handle) -> i32 {
        let mut kind = -1;
        assert_eq!(
            call!(self.api, "cuGraphNodeGetType", node, &raw mut kind),
            0
        );
        kind
    }

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

    /// All of the first place to the second one.
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

    pub(crate) fn instantiate(&self) -> Handle {
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

    pub(crate) fn run(&self, exec: Handle) {
        assert_eq!(call!(self.api, "cuGraphLaunch", exec, NONE), 0);
        self.api.synchronize();
    }
}

pub(crate) unsafe extern "C" fn nothing(_data: *mut c_void) {}

/// As `CUDA_KERNEL_NODE_PARAMS_v3`: function, shape, shared bytes, parameters, kernel, context.
#[repr(C)]
pub(crate) struct Kernel {
    function: Handle,
    pub(crate) shape: [u32; 7],
    parameters: *mut *mut c_void,
    extra: Handle,
    kernel: Handle,
    context: Handle,
}

pub(crate) fn kernel(api: &Api) -> Kernel {
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
fn nodes_of_every_kind_are_added_in_one_way() {
    let ground = ground();
    let event = ground.api.event();
    let mut child = NONE;
    assert_eq!(call!(ground.api, "cuGraphCreate", &raw mut child, 0u32), 0);
    for name in ["cuGraphAddNode", "cuGraphAddNode_v2"] {
        let words = [0u64; 29];
        let mut kinds = vec![
            Params::new(0, kernel(&ground.api)),
            Params::new(2, (ground.fill(1), NONE)),
            Params::new(3, (nothing as unsafe extern "C" fn(*mut c_void), NONE)),
            Params::new(4, (child, 0u64)),
            Params::new(5, words),
            Params::new(6, event),
            Params::new(7, event),
        ];
        let mut before = Vec::new();
        for params in &mut kinds {
            let node = ground.add(name, &before, params).unwrap();
            assert_eq!(ground.kind(node), params.kind, "{name}");
            before = vec![node];
        }
        // External semaphores and conditions.
        for kind in [8, 9, 13] {
            let refused = ground.add(name, &[], &mut Params::new(kind, words));
            assert_eq!(refused.err(), Some(NOT_SUPPORTED), "{name} {kind}");
        }
        let unknown = ground.add(name, &[], &mut Params::new(99, words));
        assert_eq!(unknown.err(), Some(INVALID_VALUE), "{name}");
    }
    ground.run(ground.instantiate());
    assert_eq!(ground.api.read(ground.to, 256), [1; 256]);
}

#[test]
fn what_a_memset_node_does_is_read_and_changed() {
    let ground = ground();
    let api = &ground.api;
    let (mut node, mut read) = (NONE, ground.fill(9));
    let first = ground.fill(1);
    let code = call!(
        api,
        "cuGraphAddMemsetNode",
        &raw mut node,
        ground.graph,
        NONE,
        0usize,
        &raw const first,
        NONE
    );
    assert_eq!(code, 0);
    assert_eq!(
        call!(api, "cuGraphMemsetNodeGetParams", node, &raw mut read),
        0
    );
    assert_eq!(read, first);
    let second = ground.fill(2);
    assert_eq!(
        call!(api, "cuGraphMemsetNodeSetParams", node, &raw const second),
        0
    );
    let exec = ground.instantiate();
    ground.run(exec);
    assert_eq!(api.read(ground.to, 256), [2; 256]);
    let third = ground.fill(3);
    assert_eq!(
        call!(
            api,
            "cuGraphExecMemsetNodeSetParams",
            exec,
            node,
            &raw const third,
            NONE
        ),
        0
    );
    ground.run(exec);
    assert_eq!(api.read(ground.to, 256), [3; 256]);
    // As a node of any kind, of the kind that it is.
    let mut params = Params::new(2, (ground.fill(4), NONE));
    assert_eq!(call!(api, "cuGraphNodeSetParams", node, &raw mut params), 0);
    ground.run(ground.instantiate());
    assert_eq!(api.read(ground.to, 256), [4; 256]);
    let mut other = Params::new(5, [0u64; 29]);
    assert_eq!(
        call!(api, "cuGraphNodeSetParams", node, &raw mut other),
        INVALID_VALUE
    );
}

#[test]
fn what_a_copy_node_does_is_read_and_changed() {
    let ground = ground();
    let api = &ground.api;
    api.write(ground.from, &[5; 256]);
    let mut copy = ground.copy();
    let mut node = NONE;
    let code = call!(
        api,
        "cuGraphAddMemcpyNode",
        &raw mut node,
        ground.graph,
        NONE,
        0usize,
        &raw const copy,
        NONE
    );
    assert_eq!(code, 0);
    let exec = ground.instantiate();
    ground.run(exec);
    assert_eq!(api.read(ground.to, 256), [5; 256]);
    let mut read = copy;
    read.WidthInBytes = 0;
    assert_eq!(
        call!(api, "cuGraphMemcpyNodeGetParams", node, &raw mut read),
        0
    );
    assert_eq!((read.WidthInBytes, read.srcDevice), (256, ground.from));
    // The other half only.
    assert_eq!(call!(api, "cuMemsetD8_v2", ground.to, 0u8, 256usize), 0);
    read.WidthInBytes = 128;
    assert_eq!(
        call!(
            api,
            "cuGraphExecMemcpyNodeSetParams",
            exec,
            node,
            &raw const read,
            NONE
        ),
        0
    );
    ground.run(exec);
    assert_eq!(api.read(ground.to + 120, 16), [[5; 8], [0; 8]].concat());
    assert_eq!(
        call!(api, "cuGraphMemcpyNodeSetParams", node, &raw const read),
        0
    );
    assert_eq!(
        call!(api, "cuGraphMemcpyNodeGetParams", node, &raw mut copy),
        0
    );
    assert_eq!(copy.WidthInBytes, 128);
}

#[test]
fn copies_and_memsets_of_a_graph_move_bytes_at_each_launch() {
    let ground = ground();
    let api = &ground.api;
    let fill = sys::CUDA_MEMSET_NODE_PARAMS {
        dst: ground.from,
        elementSize: 4,
        width: 64,
        ..ground.fill(0x0403_0201)
    };
    let (mut set, mut node) = (NONE, NONE);
    let code = call!(
        api,
        "cuGraphAddMemsetNode",
        &raw mut set,
        ground.graph,
        NONE,
        0usize,
        &raw const fill,
        NONE
    );
    assert_eq!(code, 0);
    let copy = ground.copy();
    let code = call!(
        api,
        "cuGraphAddMemcpyNode",
        &raw mut node,
        ground.graph,
        &raw const set,
        1usize,
        &raw const copy,
        NONE
    );
    assert_eq!(code, 0);
    let exec = ground.instantiate();
    for _ in 0..2 {
        assert_eq!(call!(api, "cuMemsetD8_v2", ground.to, 0u8, 256usize), 0);
        ground.run(exec);
        assert_eq!(api.read(ground.to + 248, 8), [1, 2, 3, 4, 1, 2, 3, 4]);
    }
}
