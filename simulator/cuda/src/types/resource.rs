//! Types of device resources, arrays and external memory.

use std::ffi::{c_int, c_uchar, c_uint, c_ulonglong};

use super::CUdevice;

/// `CUdevResource`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUdevResource {
    /// `CUdevResourceType`
    pub(crate) kind: c_uint,
    /// In the part that is private to the driver.
    pub(crate) device: CUdevice,
    internal: [c_uchar; 88],
    /// `smCount`
    pub(crate) multiprocessors: c_uint,
    least: c_uint,
    alignment: c_uint,
    rest: [c_uint; 9],
}

impl CUdevResource {
    /// `CU_DEV_RESOURCE_TYPE_SM`
    pub(crate) const SM: c_uint = 1;

    /// Multiprocessors of a device; partitions are multiples of `granularity`.
    pub(crate) fn multiprocessors(device: CUdevice, count: c_uint, granularity: c_uint) -> Self {
        Self {
            kind: Self::SM,
            device,
            internal: [0; 88],
            multiprocessors: count,
            least: granularity,
            alignment: granularity,
            rest: [0; 9],
        }
    }
}

/// `CUDA_ARRAY_SPARSE_PROPERTIES`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUarraySparseProperties {
    pub(crate) tile: [c_uint; 3],
    pub(crate) first_level_of_tail: c_uint,
    pub(crate) tail_bytes: c_ulonglong,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 4],
}

/// `CUarrayMapInfo`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUarrayMapInfo {
    /// `CUresourcetype`
    pub(crate) resource_type: c_uint,
    pub(crate) resource: usize,
    /// `CUarraySparseSubresourceType`
    pub(crate) subresource_type: c_uint,
    padding: c_uint,
    /// Of a sparse level: level, layer, offset, extent.
    pub(crate) subresource: [c_uint; 8],
    /// `CUmemOperationType`
    pub(crate) operation: c_uint,
    /// `CUmemHandleType`
    pub(crate) memory_type: c_uint,
    pub(crate) memory: c_ulonglong,
    pub(crate) offset: c_ulonglong,
    /// Device bit mask.
    pub(crate) devices: c_uint,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 2],
}

/// `CUmulticastObjectProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmulticastObjectProp {
    pub(crate) devices: c_uint,
    pub(crate) bytes: usize,
    pub(crate) handle_types: c_ulonglong,
    pub(crate) flags: c_ulonglong,
}

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUexternalMemoryHandleDesc {
    /// `CUexternalMemoryHandleType`
    pub(crate) kind: c_uint,
    padding: c_uint,
    /// Union of all handle types.
    pub(crate) descriptor: c_int,
    others: [c_int; 3],
    pub(crate) bytes: c_ulonglong,
    pub(crate) flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUexternalMemoryBufferDesc {
    pub(crate) offset: c_ulonglong,
    pub(crate) bytes: c_ulonglong,
    pub(crate) flags: c_uint,
    reserved: [c_uint; 16],
}
