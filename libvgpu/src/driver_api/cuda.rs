//! Types and constants of the CUDA driver API that the hooks use. Names as in `cuda.h`.

#![expect(
    non_camel_case_types,
    non_snake_case,
    reason = "names are those of cuda.h"
)]

use core::ffi::{c_int, c_uint, c_void};
use core::mem::{offset_of, size_of};

pub(crate) type CUresult = c_int;
pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
/// Of the ABI before CUDA 3.2.
pub(crate) type CUdeviceptr_v1 = c_uint;
pub(crate) type CUcontext = *mut c_void;
pub(crate) type CUgreenCtx = *mut c_void;
pub(crate) type CUexternalMemory = *mut c_void;
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUevent = *mut c_void;
pub(crate) type CUfunction = *mut c_void;
pub(crate) type CUmodule = *mut c_void;
pub(crate) type CUlibrary = *mut c_void;
pub(crate) type CUkernel = *mut c_void;
pub(crate) type CUgraph = *mut c_void;
pub(crate) type CUgraphNode = *mut c_void;
pub(crate) type CUgraphExec = *mut c_void;
pub(crate) type CUarray = *mut c_void;
pub(crate) type CUmipmappedArray = *mut c_void;
pub(crate) type CUmemoryPool = *mut c_void;
pub(crate) type CUmemGenericAllocationHandle = u64;

pub(crate) const CUDA_SUCCESS: CUresult = 0;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
pub(crate) const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
pub(crate) const CUDA_ERROR_NOT_READY: CUresult = 600;
pub(crate) const CUDA_ERROR_NOT_PERMITTED: CUresult = 800;
pub(crate) const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;

/// The default stream that synchronizes with other streams.
pub(crate) const CU_STREAM_LEGACY: CUstream = core::ptr::without_provenance_mut(1);
/// The calling thread's own default stream.
pub(crate) const CU_STREAM_PER_THREAD: CUstream = core::ptr::without_provenance_mut(2);

pub(crate) const CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;
pub(crate) const CU_STREAM_CAPTURE_MODE_RELAXED: c_int = 2;

pub(crate) const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
pub(crate) const CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: c_int = 39;

pub(crate) const CU_LIMIT_STACK_SIZE: c_int = 0;
pub(crate) const CU_LIMIT_PRINTF_FIFO_SIZE: c_int = 1;
pub(crate) const CU_LIMIT_MALLOC_HEAP_SIZE: c_int = 2;

pub(crate) const CU_MEMORYTYPE_HOST: c_uint = 1;
pub(crate) const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: c_int = 2;

pub(crate) const CU_GRAPH_NODE_TYPE_GRAPH: c_int = 4;
/// `HOST`, `WAIT_EVENT`, `EXT_SEMAS_WAIT`, `BATCH_MEM_OP`
pub(crate) const CU_GRAPH_NODE_TYPES_THAT_WAIT: [c_int; 4] = [3, 6, 9, 12];
pub(crate) const CU_GRAPH_NODE_TYPE_MEM_ALLOC: c_int = 10;
pub(crate) const CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: c_uint = 2;
pub(crate) const CU_GRAPH_NODE_TYPE_KERNEL: c_int = 0;
pub(crate) const CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD: u64 = 2;
pub(crate) const CUDA_GRAPH_INSTANTIATE_ERROR: c_int = 1;

#[repr(C)]
pub(crate) struct CUDA_GRAPH_INSTANTIATE_PARAMS {
    pub(crate) flags: u64,
    hUploadStream: CUstream,
    hErrNode_out: CUgraphNode,
    pub(crate) result_out: c_int,
}

/// Beginning of the structure, read only.
#[repr(C)]
pub(crate) struct CUlaunchConfig {
    pub(crate) gridDim: [c_uint; 3],
    pub(crate) blockDim: [c_uint; 3],
    pub(crate) sharedMemBytes: c_uint,
    pub(crate) hStream: CUstream,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUDA_LAUNCH_PARAMS {
    pub(crate) function: CUfunction,
    pub(crate) gridDimX: c_uint,
    pub(crate) gridDimY: c_uint,
    pub(crate) gridDimZ: c_uint,
    pub(crate) blockDimX: c_uint,
    pub(crate) blockDimY: c_uint,
    pub(crate) blockDimZ: c_uint,
    pub(crate) sharedMemBytes: c_uint,
    pub(crate) hStream: CUstream,
    pub(crate) kernelParams: *mut *mut c_void,
}

/// Version 2, with space for the fields of later versions.
#[repr(C)]
pub(crate) struct CUDA_KERNEL_NODE_PARAMS {
    pub(crate) func: CUfunction,
    pub(crate) gridDim: [c_uint; 3],
    pub(crate) blockDim: [c_uint; 3],
    pub(crate) sharedMemBytes: c_uint,
    pub(crate) kernelParams: *mut *mut c_void,
    pub(crate) extra: *mut *mut c_void,
    pub(crate) kern: *mut c_void,
    pub(crate) ctx: CUcontext,
    reserved: [u64; 8],
}

impl CUDA_KERNEL_NODE_PARAMS {
    pub(crate) const ZERO: Self = Self {
        func: core::ptr::null_mut(),
        gridDim: [0; 3],
        blockDim: [0; 3],
        sharedMemBytes: 0,
        kernelParams: core::ptr::null_mut(),
        extra: core::ptr::null_mut(),
        kern: core::ptr::null_mut(),
        ctx: core::ptr::null_mut(),
        reserved: [0; 8],
    };
}

/// `CUDA_MEMCPY2D` since CUDA 3.2.
#[repr(C)]
pub(crate) struct CUDA_MEMCPY2D {
    pub(crate) srcXInBytes: usize,
    pub(crate) srcY: usize,
    pub(crate) srcMemoryType: c_uint,
    pub(crate) srcHost: *const c_void,
    pub(crate) srcDevice: CUdeviceptr,
    pub(crate) srcArray: CUarray,
    pub(crate) srcPitch: usize,
    pub(crate) dstXInBytes: usize,
    pub(crate) dstY: usize,
    pub(crate) dstMemoryType: c_uint,
    pub(crate) dstHost: *mut c_void,
    pub(crate) dstDevice: CUdeviceptr,
    pub(crate) dstArray: CUarray,
    pub(crate) dstPitch: usize,
    pub(crate) WidthInBytes: usize,
    pub(crate) Height: usize,
}

/// `CUDA_MEMCPY3D` since CUDA 3.2, and `CUDA_MEMCPY3D_PEER`, which has contexts instead of reserved pointers.
#[repr(C)]
pub(crate) struct CUDA_MEMCPY3D {
    pub(crate) srcXInBytes: usize,
    pub(crate) srcY: usize,
    pub(crate) srcZ: usize,
    pub(crate) srcLOD: usize,
    pub(crate) srcMemoryType: c_uint,
    pub(crate) srcHost: *const c_void,
    pub(crate) srcDevice: CUdeviceptr,
    pub(crate) srcArray: CUarray,
    pub(crate) reserved0: *mut c_void,
    pub(crate) srcPitch: usize,
    pub(crate) srcHeight: usize,
    pub(crate) dstXInBytes: usize,
    pub(crate) dstY: usize,
    pub(crate) dstZ: usize,
    pub(crate) dstLOD: usize,
    pub(crate) dstMemoryType: c_uint,
    pub(crate) dstHost: *mut c_void,
    pub(crate) dstDevice: CUdeviceptr,
    pub(crate) dstArray: CUarray,
    pub(crate) reserved1: *mut c_void,
    pub(crate) dstPitch: usize,
    pub(crate) dstHeight: usize,
    pub(crate) WidthInBytes: usize,
    pub(crate) Height: usize,
    pub(crate) Depth: usize,
}

pub(crate) const CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_SPARSE_LEVEL: c_uint = 0;
pub(crate) const CU_MEM_OPERATION_TYPE_MAP: c_uint = 1;
pub(crate) const CU_RESOURCE_TYPE_ARRAY: c_uint = 0;

/// One operation of `cuMemMapArrayAsync`.
#[repr(C)]
pub(crate) struct CUarrayMapInfo {
    pub(crate) resourceType: c_uint,
    /// A `CUarray` or a `CUmipmappedArray`.
    pub(crate) resource: u64,
    pub(crate) subresourceType: c_uint,
    padding: c_uint,
    /// Union of two structures.
    pub(crate) subresource: [c_uint; 8],
    pub(crate) memOperationType: c_uint,
    pub(crate) memHandleType: c_uint,
    pub(crate) memHandle: CUmemGenericAllocationHandle,
    pub(crate) offset: u64,
    pub(crate) deviceBitMask: c_uint,
    pub(crate) flags: c_uint,
    pub(crate) reserved: [c_uint; 2],
}

/// Properties of a sparse array.
#[repr(C)]
pub(crate) struct CUDA_ARRAY_SPARSE_PROPERTIES {
    /// Elements of a tile in each direction.
    pub(crate) tileExtent: [c_uint; 3],
    miptailFirstLevel: c_uint,
    miptailSize: u64,
    flags: c_uint,
    reserved: [c_uint; 4],
}

/// Flag of `cuGetProcAddress`: per-thread default streams.
pub(crate) const CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM: u64 = 1 << 1;

pub(crate) const CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC: c_int = 2;
pub(crate) const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: c_int = 5;
pub(crate) const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: c_int = 7;

pub(crate) const CU_MEMPOOL_ATTR_ALLOCATION_TYPE: c_int = 9;
pub(crate) const CU_MEMPOOL_ATTR_LOCATION_ID: c_int = 11;
pub(crate) const CU_MEMPOOL_ATTR_LOCATION_TYPE: c_int = 12;

pub(crate) const CU_MEM_ALLOCATION_TYPE_PINNED: u64 = 1;
pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub(crate) const CU_MEM_LOCATION_TYPE_HOST: c_int = 2;
/// The host, one of its NUMA nodes, or the node of the calling thread.
pub(crate) const CU_MEM_LOCATION_TYPES_OF_HOST: core::ops::RangeInclusive<u64> = 2..=4;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUmemLocation {
    pub(crate) r#type: c_int,
    pub(crate) id: c_int,
}

/// Beginning of the structure, read only.
#[repr(C)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) r#type: c_int,
    pub(crate) requestedHandleTypes: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32HandleMetaData: *mut c_void,
    pub(crate) allocFlags: [u8; 8],
}

/// Beginning of the structure, read only. The handle is a union.
#[repr(C)]
pub(crate) struct CUDA_EXTERNAL_MEMORY_HANDLE_DESC {
    pub(crate) r#type: c_int,
    pub(crate) handle: [u64; 2],
    pub(crate) size: u64,
}

/// Beginning of the structure, read only.
#[repr(C)]
pub(crate) struct CUmemPoolProps {
    pub(crate) allocType: c_int,
    pub(crate) handleTypes: c_int,
    pub(crate) location: CUmemLocation,
}

/// As `cuGraphMemAllocNodeGetParams` writes it; both versions.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUDA_MEM_ALLOC_NODE_PARAMS {
    pub(crate) poolAllocType: c_int,
    pub(crate) poolHandleTypes: c_int,
    pub(crate) poolLocation: CUmemLocation,
    poolRest: [u64; 9],
    accessDescs: *const c_void,
    accessDescCount: usize,
    pub(crate) bytesize: usize,
    pub(crate) dptr: CUdeviceptr,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUDA_ARRAY_DESCRIPTOR_v1 {
    pub(crate) Width: c_uint,
    pub(crate) Height: c_uint,
    pub(crate) Format: c_uint,
    pub(crate) NumChannels: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUDA_ARRAY_DESCRIPTOR {
    pub(crate) Width: usize,
    pub(crate) Height: usize,
    pub(crate) Format: c_uint,
    pub(crate) NumChannels: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUDA_ARRAY3D_DESCRIPTOR_v1 {
    pub(crate) Width: c_uint,
    pub(crate) Height: c_uint,
    pub(crate) Depth: c_uint,
    pub(crate) Format: c_uint,
    pub(crate) NumChannels: c_uint,
    pub(crate) Flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUDA_ARRAY3D_DESCRIPTOR {
    pub(crate) Width: usize,
    pub(crate) Height: usize,
    pub(crate) Depth: usize,
    pub(crate) Format: c_uint,
    pub(crate) NumChannels: c_uint,
    pub(crate) Flags: c_uint,
}

/// Passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUipcMemHandle {
    reserved: [u8; 64],
}

/// As `cuDeviceGetUuid` writes it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUuuid {
    pub(crate) bytes: [u8; 16],
}

const _: () = {
    assert!(size_of::<CUmemAllocationProp>() == 32);
    assert!(offset_of!(CUmemAllocationProp, location) == 8);
    assert!(offset_of!(CUmemPoolProps, location) == 8);
    assert!(offset_of!(CUDA_EXTERNAL_MEMORY_HANDLE_DESC, size) == 24);
    assert!(size_of::<CUDA_ARRAY_DESCRIPTOR_v1>() == 16);
    assert!(size_of::<CUDA_ARRAY_DESCRIPTOR>() == 24);
    assert!(size_of::<CUDA_ARRAY3D_DESCRIPTOR_v1>() == 24);
    assert!(size_of::<CUDA_ARRAY3D_DESCRIPTOR>() == 40);
    assert!(size_of::<CUDA_ARRAY_SPARSE_PROPERTIES>() == 48);
    assert!(size_of::<CUarrayMapInfo>() == 96);
    assert!(offset_of!(CUarrayMapInfo, subresource) == 24);
    assert!(offset_of!(CUarrayMapInfo, memHandle) == 64);
    assert!(size_of::<CUuuid>() == 16);
    assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>() == 120);
    assert!(offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS, bytesize) == 104);
    assert!(offset_of!(CUlaunchConfig, hStream) == 32);
    assert!(size_of::<CUDA_LAUNCH_PARAMS>() == 56);
    assert!(offset_of!(CUDA_LAUNCH_PARAMS, hStream) == 40);
    assert!(offset_of!(CUDA_KERNEL_NODE_PARAMS, kern) == 56);
    assert!(size_of::<CUDA_MEMCPY2D>() == 128);
    assert!(size_of::<CUDA_MEMCPY3D>() == 200);
};
