//! Types of copies and memsets.

use std::ffi::c_uint;

use super::{CUarray, CUcontext, CUdeviceptr, CUmemLocation};
use crate::error::CudaError;

/// `CUmemorytype`
pub(crate) struct MemoryType;

impl MemoryType {
    /// `CU_MEMORYTYPE_HOST`
    pub(crate) const HOST: c_uint = 1;
    /// `CU_MEMORYTYPE_DEVICE`
    pub(crate) const DEVICE: c_uint = 2;
    /// `CU_MEMORYTYPE_ARRAY`
    pub(crate) const ARRAY: c_uint = 3;
    /// `CU_MEMORYTYPE_UNIFIED`
    pub(crate) const UNIFIED: c_uint = 4;
}

/// One half of `CUDA_MEMCPY3D` or `CUDA_MEMCPY3D_PEER`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemcpy3DSide {
    pub(crate) x: usize,
    pub(crate) y: usize,
    pub(crate) z: usize,
    pub(crate) lod: usize,
    /// One of [`MemoryType`].
    pub(crate) memory_type: c_uint,
    pub(crate) host: usize,
    pub(crate) device: CUdeviceptr,
    pub(crate) array: CUarray,
    /// Of `CUDA_MEMCPY3D_PEER` only.
    pub(crate) context: CUcontext,
    pub(crate) pitch: usize,
    pub(crate) height: usize,
}

/// `CUDA_MEMCPY3D` and `CUDA_MEMCPY3D_PEER`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemcpy3D {
    pub(crate) from: CUmemcpy3DSide,
    pub(crate) to: CUmemcpy3DSide,
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
}

/// One half of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemcpy2DSide {
    pub(crate) x: usize,
    pub(crate) y: usize,
    /// One of [`MemoryType`].
    pub(crate) memory_type: c_uint,
    pub(crate) host: usize,
    pub(crate) device: CUdeviceptr,
    pub(crate) array: CUarray,
    pub(crate) pitch: usize,
}

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemcpy2D {
    pub(crate) from: CUmemcpy2DSide,
    pub(crate) to: CUmemcpy2DSide,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// `CUDA_ARRAY_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUarrayDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUarray3DDescriptor {
    pub(crate) width: usize,
    pub(crate) height: usize,
    pub(crate) depth: usize,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
    pub(crate) flags: c_uint,
}

/// `CUDA_MEMSET_NODE_PARAMS`
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CUmemsetNodeParams {
    pub(crate) to: CUdeviceptr,
    pub(crate) pitch: usize,
    pub(crate) value: c_uint,
    pub(crate) element_size: c_uint,
    pub(crate) width: usize,
    pub(crate) height: usize,
}

/// `CUmemcpyAttributes`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemcpyAttributes {
    /// `CUmemcpySrcAccessOrder`
    pub(crate) access_order: c_uint,
    pub(crate) from: CUmemLocation,
    pub(crate) to: CUmemLocation,
    pub(crate) flags: c_uint,
}

/// `CUmemcpy3DOperand`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemcpy3DOperand {
    /// `CUmemcpy3DOperandType`
    pub(crate) kind: c_uint,
    /// Address, row length, layer height and hint; or array and offset.
    pub(crate) place: [u64; 4],
}

impl CUmemcpy3DOperand {
    /// `CU_MEMCPY_OPERAND_TYPE_POINTER`
    pub(crate) const POINTER: c_uint = 1;
    /// `CU_MEMCPY_OPERAND_TYPE_ARRAY`
    pub(crate) const ARRAY: c_uint = 2;

    /// The array handle of an array operand.
    pub(crate) fn array(&self) -> Result<CUarray, CudaError> {
        let handle = usize::try_from(self.place[0]);
        handle.map(CUarray).map_err(|_| CudaError::InvalidHandle)
    }
}

/// `CUDA_MEMCPY3D_BATCH_OP`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemcpy3DBatchOp {
    pub(crate) from: CUmemcpy3DOperand,
    pub(crate) to: CUmemcpy3DOperand,
    /// Width, height and depth.
    pub(crate) extent: [usize; 3],
    /// `CUmemcpySrcAccessOrder`
    pub(crate) access_order: c_uint,
    pub(crate) flags: c_uint,
}

/// `CUDA_ARRAY_DESCRIPTOR_v1`, before CUDA 3.2
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUarrayDescriptorV1 {
    pub(crate) width: c_uint,
    pub(crate) height: c_uint,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR_v1`, before CUDA 3.2
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUarray3DDescriptorV1 {
    pub(crate) width: c_uint,
    pub(crate) height: c_uint,
    pub(crate) depth: c_uint,
    pub(crate) format: c_uint,
    pub(crate) channels: c_uint,
    pub(crate) flags: c_uint,
}
