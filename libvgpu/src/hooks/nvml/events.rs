//! Events of a GPU. An XID names no process: most are faults of programs, also of other tenants. So a share has no such
//! events; those of the hardware, such as ECC errors and the recovery action, are the GPU's own.

use core::ffi::{c_ulonglong, c_void};

use crate::driver_api::functions::{
    nvmlDeviceGetSupportedEventTypes, nvmlDeviceRegisterEvents,
    nvmlEventSetRegisterGpuOperationalEvents_v1,
};
use crate::driver_api::nvml::{
    NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlDevice_t, nvmlEventTypeXidCriticalError,
    nvmlReturn_t,
};
use crate::hooks::nvml::is_shared;
use crate::process::Process;

pub(crate) unsafe fn supported(
    original: nvmlDeviceGetSupportedEventTypes::Function,
    device: nvmlDevice_t,
    types: *mut c_ulonglong,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, types) };
    if result == NVML_SUCCESS
        && is_shared(device)
        // SAFETY: null or written by NVML.
        && let Some(types) = unsafe { types.as_mut() }
    {
        *types &= !nvmlEventTypeXidCriticalError;
    }
    result
}

/// NVML rejects types that it does not support in the same way.
pub(crate) unsafe fn register(
    original: nvmlDeviceRegisterEvents::Function,
    device: nvmlDevice_t,
    types: c_ulonglong,
    set: *mut c_void,
) -> nvmlReturn_t {
    if types & nvmlEventTypeXidCriticalError != 0 && is_shared(device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(device, types, set) }
}

/// Operational events have XIDs in their contexts, and can be registered for all GPUs at once.
pub(crate) unsafe fn register_operational(
    original: nvmlEventSetRegisterGpuOperationalEvents_v1::Function,
    set: *mut c_void,
    config: *mut c_void,
) -> nvmlReturn_t {
    if Process::get().is_none_or(Process::is_limited) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(set, config) }
}
