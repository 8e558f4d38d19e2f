//! Memory information: the share's, not the GPU's. [`crate::hooks::nvml`] has the NVML functions.
//!
//! libcuda is called first, so errors and argument checks are its own. Free memory is the rest of the share, or of
//! the GPU if that is less.

use core::ffi::c_uint;

use crate::current::{Target, target_of_current_context, target_of_device};
use crate::driver_api::cuda::{CUDA_SUCCESS, CUdevice, CUresult};
use crate::hooks::driver_cache;
use crate::limits::gpu::Amount;

/// A denied GPU.
const NONE: Amount = Amount {
    limit_bytes: 0,
    used_bytes: 0,
};

/// Returns the memory to report instead of the GPU's.
pub(crate) fn amount_of(target: Target) -> Option<Amount> {
    match target {
        Target::Unlimited => None,
        Target::Limited(gpu) => {
            driver_cache::refresh(gpu);
            Some(gpu.amount())
        }
        Target::Denied => Some(NONE),
    }
}

/// Size in libcuda's functions: of 32 bits in their first versions.
pub(crate) trait Size: Copy + Ord {
    /// Returns the size, or the largest one.
    fn of(bytes: u64) -> Self;
}

impl Size for usize {
    fn of(bytes: u64) -> Self {
        Self::try_from(bytes).unwrap_or(Self::MAX)
    }
}

impl Size for c_uint {
    fn of(bytes: u64) -> Self {
        Self::try_from(bytes).unwrap_or(Self::MAX)
    }
}

/// Lowers a size that libcuda has written.
///
/// # Safety
/// `size` is null or points to a size.
unsafe fn lower<T: Size>(size: *mut T, bytes: u64) {
    // SAFETY: the caller's contract.
    if let Some(size) = unsafe { size.as_mut() } {
        *size = T::of(bytes).min(*size);
    }
}

pub(crate) unsafe fn mem_get_info<T: Size>(
    original: unsafe extern "C" fn(*mut T, *mut T) -> CUresult,
    free: *mut T,
    total: *mut T,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(free, total) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_current_context())
    {
        // SAFETY: null or written by libcuda.
        unsafe { lower(free, amount.free_bytes()) };
        // SAFETY: null or written by libcuda.
        unsafe { lower(total, amount.limit_bytes) };
    }
    result
}

pub(crate) unsafe fn total_mem<T: Size>(
    original: unsafe extern "C" fn(*mut T, CUdevice) -> CUresult,
    bytes: *mut T,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(bytes, device) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_device(device))
    {
        // SAFETY: null or written by libcuda.
        unsafe { lower(bytes, amount.limit_bytes) };
    }
    result
}
