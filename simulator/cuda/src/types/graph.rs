//! Types of graphs and node parameters.

use std::ffi::{c_int, c_longlong, c_uchar, c_uint, c_void};

use super::{
    CUcontext, CUdeviceptr, CUevent, CUfunction, CUgraph, CUgraphNode, CUmemAccessDesc,
    CUmemPoolProps, CUmemcpy3D, CUmemsetNodeParams, CUstream,
};

/// `CUgraphEdgeData`; ports have no effect.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CUgraphEdgeData {
    pub(crate) from_port: c_uchar,
    pub(crate) to_port: c_uchar,
    pub(crate) kind: c_uchar,
    pub(crate) reserved: [c_uchar; 5],
}

/// `CUDA_KERNEL_NODE_PARAMS_v1`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUkernelNodeParams {
    pub(crate) function: CUfunction,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) pointers: *const *const u64,
    pub(crate) extra: *const *const c_void,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2` and `_v3`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUkernelNodeParamsV2 {
    pub(crate) v1: CUkernelNodeParams,
    /// Used if the function is null.
    pub(crate) kernel: CUfunction,
    pub(crate) context: CUcontext,
}

/// `CUDA_HOST_NODE_PARAMS` and `_v2`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUhostNodeParams {
    pub(crate) function: Option<unsafe extern "C" fn(*mut c_void)>,
    pub(crate) data: *mut c_void,
}

/// `CUDA_MEMCPY_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemcpyNodeParams {
    pub(crate) flags: c_int,
    pub(crate) reserved: c_int,
    pub(crate) context: CUcontext,
    pub(crate) copy: CUmemcpy3D,
}

/// `CUDA_MEMSET_NODE_PARAMS_v2`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemsetNodeParamsV2 {
    pub(crate) v1: CUmemsetNodeParams,
    pub(crate) context: CUcontext,
}

/// `CUDA_CHILD_GRAPH_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUchildGraphNodeParams {
    pub(crate) graph: CUgraph,
    pub(crate) ownership: c_int,
}

/// `CUDA_EVENT_RECORD_NODE_PARAMS` and `CUDA_EVENT_WAIT_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUeventNodeParams {
    pub(crate) event: CUevent,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS` and `_v2`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocNodeParams {
    pub(crate) pool: CUmemPoolProps,
    pub(crate) access: *const CUmemAccessDesc,
    pub(crate) access_count: usize,
    pub(crate) bytes: usize,
    /// Output.
    pub(crate) address: CUdeviceptr,
}

/// `CUDA_MEM_FREE_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemFreeNodeParams {
    pub(crate) address: CUdeviceptr,
}

/// `CUgraphNodeParams`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUgraphNodeParams {
    /// `CUgraphNodeType`
    pub(crate) kind: c_uint,
    pub(crate) reserved0: [c_int; 3],
    /// Union by node type.
    pub(crate) parameters: [c_longlong; 29],
    pub(crate) reserved2: c_longlong,
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUgraphInstantiateParams {
    pub(crate) flags: u64,
    pub(crate) upload_stream: CUstream,
    /// Output.
    pub(crate) error_node: CUgraphNode,
    /// Output: `CUgraphInstantiateResult`.
    pub(crate) result: c_uint,
}

/// `CUgraphExecUpdateResultInfo`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUgraphExecUpdateResultInfo {
    /// `CUgraphExecUpdateResult`
    pub(crate) result: c_uint,
    pub(crate) error_node: CUgraphNode,
    pub(crate) error_from_node: CUgraphNode,
}
