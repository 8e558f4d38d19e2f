//! Types and numbers of the CUDA driver API that the hooks use. Names as in `cuda.h`.

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
pub(crate) type CUstream = *mut c_void;
pub(crate) type CUarray = *mut c_void;
pub(crate) type CUmipmappedArray = *mut c_void;
pub(crate) type CUmemoryPool = *mut c_void;
pub(crate) type CUmemGenericAllocationHandle = u64;

pub(crate) const CUDA_SUCCESS: CUresult = 0;
pub(crate) const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
pub(crate) const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;

/// Flag of `cuGetProcAddress`: per-thread default streams.
pub(crate) const CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM: u64 = 1 << 1;

pub(crate) const CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: c_int = 5;
pub(crate) const CU_MEMPOOL_ATTR_USED_MEM_CURRENT: c_int = 7;

pub(crate) const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct CUmemLocation {
    pub(crate) r#type: c_int,
    pub(crate) id: c_int,
}

/// Beginning of the structure; the hooks only read.
#[repr(C)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) r#type: c_int,
    pub(crate) requestedHandleTypes: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32HandleMetaData: *mut c_void,
    pub(crate) allocFlags: [u8; 8],
}

/// Beginning of the structure; the hooks only read.
#[repr(C)]
pub(crate) struct CUmemPoolProps {
    pub(crate) allocType: c_int,
    pub(crate) handleTypes: c_int,
    pub(crate) location: CUmemLocation,
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
    assert!(size_of::<CUDA_ARRAY_DESCRIPTOR_v1>() == 16);
    assert!(size_of::<CUDA_ARRAY_DESCRIPTOR>() == 24);
    assert!(size_of::<CUDA_ARRAY3D_DESCRIPTOR_v1>() == 24);
    assert!(size_of::<CUDA_ARRAY3D_DESCRIPTOR>() == 40);
    assert!(size_of::<CUuuid>() == 16);
};
