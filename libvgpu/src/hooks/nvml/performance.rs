//! Performance monitoring: its counters cover the whole GPU with all shares, so a share has none.

use core::ffi::c_uint;

use crate::current::Target;
use crate::functions::{nvmlGpmMigSampleGet, nvmlGpmQueryDeviceSupport, nvmlGpmSampleGet};
use crate::hooks::nvml::target;
use crate::nvml::{
    NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlDevice_t, nvmlGpmSample_t, nvmlGpmSupport_t,
    nvmlReturn_t,
};

fn is_shared(device: nvmlDevice_t) -> bool {
    !matches!(target(device), Target::Unlimited)
}

pub(crate) unsafe fn support(
    original: nvmlGpmQueryDeviceSupport::Function,
    device: nvmlDevice_t,
    support: *mut nvmlGpmSupport_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, support) };
    if result == NVML_SUCCESS
        && is_shared(device)
        // SAFETY: null or written by NVML.
        && let Some(support) = unsafe { support.as_mut() }
    {
        support.isSupportedDevice = 0;
    }
    result
}

pub(crate) unsafe fn sample(
    original: nvmlGpmSampleGet::Function,
    device: nvmlDevice_t,
    sample: nvmlGpmSample_t,
) -> nvmlReturn_t {
    if is_shared(device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(device, sample) }
}

pub(crate) unsafe fn sample_of_instance(
    original: nvmlGpmMigSampleGet::Function,
    device: nvmlDevice_t,
    gpu_instance: c_uint,
    sample: nvmlGpmSample_t,
) -> nvmlReturn_t {
    if is_shared(device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(device, gpu_instance, sample) }
}
