//! C types of `cuda.h`.
//!
//! A test compares sizes and offsets with generated bindings. Objects are opaque handles: numbers
//! of pointer size, never dereferenced.

use std::ffi::{c_int, c_uint, c_void};

mod copy;
mod graph;
mod resource;

pub(crate) use copy::{
    CUarray3DDescriptor, CUarray3DDescriptorV1, CUarrayDescriptor, CUarrayDescriptorV1, CUmemcpy2D,
    CUmemcpy2DSide, CUmemcpy3D, CUmemcpy3DBatchOp, CUmemcpy3DOperand, CUmemcpy3DSide,
    CUmemcpyAttributes, CUmemsetNodeParams, MemoryType,
};
pub(crate) use graph::{
    CUchildGraphNodeParams, CUeventNodeParams, CUgraphEdgeData, CUgraphExecUpdateResultInfo,
    CUgraphInstantiateParams, CUgraphNodeParams, CUhostNodeParams, CUkernelNodeParams,
    CUkernelNodeParamsV2, CUmemAllocNodeParams, CUmemFreeNodeParams, CUmemcpyNodeParams,
    CUmemsetNodeParamsV2,
};

pub(crate) use resource::{
    CUarrayMapInfo, CUarraySparseProperties, CUdevResource, CUexternalMemoryBufferDesc,
    CUexternalMemoryHandleDesc, CUmulticastObjectProp,
};

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;

macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident;)*) => {$(
        $(#[$meta])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub(crate) struct $name(pub(crate) usize);
    )*};
}

handles! {
    CUcontext;
    CUstream;
    CUevent;
    CUmemoryPool;
    CUmodule;
    CUfunction;
    CUgraph;
    CUgraphNode;
    CUgraphExec;
    CUarray;
    CUmipmappedArray;
    CUlibrary;
    CUkernel;
    CUgreenCtx;
    CUdevResourceDesc;
    CUexternalMemory;
    CUlinkState;
}

impl CUcontext {
    pub(crate) const NULL: Self = Self(0);
}

impl CUstream {
    /// The default stream: legacy or per-thread.
    pub(crate) const NULL: Self = Self(0);
    /// `CU_STREAM_LEGACY`
    pub(crate) const LEGACY: Self = Self(1);
    /// `CU_STREAM_PER_THREAD`
    pub(crate) const PER_THREAD: Self = Self(2);

    /// Maps the default stream to the calling thread's.
    pub(crate) fn or_per_thread(self) -> Self {
        if self == Self::NULL {
            Self::PER_THREAD
        } else {
            self
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [u8; 16],
}

/// `CUctxCreateParams`, not evaluated.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUctxCreateParams {
    pub(crate) exec_affinity: *const c_void,
    pub(crate) exec_affinity_count: c_int,
    pub(crate) cig: *const c_void,
}

/// `CUlaunchConfig`; attributes have no effect.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUlaunchConfig {
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) attributes: *const c_void,
    pub(crate) attribute_count: c_uint,
}

/// `CUDA_LAUNCH_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUlaunchParams {
    pub(crate) function: CUfunction,
    pub(crate) grid: [c_uint; 3],
    pub(crate) block: [c_uint; 3],
    pub(crate) shared_bytes: c_uint,
    pub(crate) stream: CUstream,
    pub(crate) pointers: *const *const u64,
}

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_uint,
    pub(crate) id: c_int,
}

impl CUmemLocation {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`
    pub(crate) const DEVICE: c_uint = 1;
}

/// `CUmemPoolProps`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemPoolProps {
    pub(crate) alloc_type: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: CUmemLocation,
    pub(crate) security_attributes: *const c_void,
    pub(crate) max_size: usize,
    pub(crate) usage: std::ffi::c_ushort,
    pub(crate) reserved: [u8; 54],
}

impl CUmemPoolProps {
    /// Properties of a pool of device memory.
    pub(crate) fn pinned_on(device: CUdevice) -> Self {
        const PINNED: c_uint = 1;
        Self {
            alloc_type: PINNED,
            handle_types: 0,
            location: CUmemLocation {
                kind: CUmemLocation::DEVICE,
                id: device,
            },
            security_attributes: std::ptr::null(),
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        }
    }
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_uint,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_uint,
    pub(crate) handle_types: c_uint,
    pub(crate) location: CUmemLocation,
    pub(crate) windows: *const c_void,
    pub(crate) flags: [u8; 8],
}

/// `CUipcMemHandle`: 64 bytes, defined by this library.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUipcHandle {
    pub(crate) bytes: [u8; 64],
}

impl CUipcHandle {
    pub(crate) fn of<const COUNT: usize>(words: [u64; COUNT]) -> Self {
        let mut bytes = [0; 64];
        let words = words.iter().flat_map(|word| word.to_ne_bytes());
        for (byte, value) in bytes.iter_mut().zip(words) {
            *byte = value;
        }
        Self { bytes }
    }

    pub(crate) fn words<const COUNT: usize>(&self) -> [u64; COUNT] {
        let mut words = [0; COUNT];
        for (word, bytes) in words.iter_mut().zip(self.bytes.chunks_exact(8)) {
            *word = bytes.try_into().map_or(0, u64::from_ne_bytes);
        }
        words
    }
}

#[cfg(test)]
mod tests;
