//! Memory information: the share's, not the GPU's. [`crate::hooks::nvml`] has the NVML functions.
//!
//! libcuda is called first, so errors and argument checks are its own. Free memory is the rest of the share, or of
//! the GPU if that is less.

use core::ffi::c_uint;

use crate::card::Amount;
use crate::cuda::{CUDA_SUCCESS, CUdevice, CUresult};
use crate::current::{Target, target_of_current_context, target_of_device};
use crate::functions::{cuDeviceTotalMem, cuDeviceTotalMem_v2, cuMemGetInfo, cuMemGetInfo_v2};
use crate::hooks::driver_cache;

/// A denied GPU.
const NONE: Amount = Amount {
    limit_bytes: 0,
    used_bytes: 0,
};

/// Returns the memory to report instead of the GPU's.
pub(crate) fn amount_of(target: Target) -> Option<Amount> {
    match target {
        Target::Unlimited => None,
        Target::Limited(card) => {
            driver_cache::refresh(card);
            Some(card.amount())
        }
        Target::Denied => Some(NONE),
    }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn size_v1(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}

pub(crate) unsafe fn mem_get_info(
    original: cuMemGetInfo_v2::Function,
    free: *mut usize,
    total: *mut usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(free, total) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_current_context())
    {
        // SAFETY: null or written by libcuda.
        if let Some(free) = unsafe { free.as_mut() } {
            *free = size(amount.free_bytes()).min(*free);
        }
        // SAFETY: null or written by libcuda.
        if let Some(total) = unsafe { total.as_mut() } {
            *total = size(amount.limit_bytes).min(*total);
        }
    }
    result
}

pub(crate) unsafe fn mem_get_info_v1(
    original: cuMemGetInfo::Function,
    free: *mut c_uint,
    total: *mut c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(free, total) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_current_context())
    {
        // SAFETY: null or written by libcuda.
        if let Some(free) = unsafe { free.as_mut() } {
            *free = size_v1(amount.free_bytes()).min(*free);
        }
        // SAFETY: null or written by libcuda.
        if let Some(total) = unsafe { total.as_mut() } {
            *total = size_v1(amount.limit_bytes).min(*total);
        }
    }
    result
}

pub(crate) unsafe fn total_mem(
    original: cuDeviceTotalMem_v2::Function,
    bytes: *mut usize,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(bytes, device) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_device(device))
        // SAFETY: null or written by libcuda.
        && let Some(bytes) = unsafe { bytes.as_mut() }
    {
        *bytes = size(amount.limit_bytes).min(*bytes);
    }
    result
}

pub(crate) unsafe fn total_mem_v1(
    original: cuDeviceTotalMem::Function,
    bytes: *mut c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(bytes, device) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_device(device))
        // SAFETY: null or written by libcuda.
        && let Some(bytes) = unsafe { bytes.as_mut() }
    {
        *bytes = size_v1(amount.limit_bytes).min(*bytes);
    }
    result
}
