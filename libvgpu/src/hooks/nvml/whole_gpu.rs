//! Values that NVML has only for the whole GPU with all shares, such as performance counters, the traffic of its links and
//! the use of its PCI aperture: a share has none.

use core::ffi::c_int;

use crate::driver_api::functions::nvmlGpmQueryDeviceSupport;
use crate::driver_api::nvml::{
    NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlDevice_t, nvmlGpmSupport_t, nvmlReturn_t,
};
use crate::hooks::nvml::is_shared;

/// A function of a device with one argument more.
pub(crate) unsafe fn one<A>(
    original: unsafe extern "C" fn(nvmlDevice_t, A) -> c_int,
    device: nvmlDevice_t,
    a: A,
) -> nvmlReturn_t {
    if is_shared(device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(device, a) }
}

/// A function of a device with two arguments more.
pub(crate) unsafe fn two<A, B>(
    original: unsafe extern "C" fn(nvmlDevice_t, A, B) -> c_int,
    device: nvmlDevice_t,
    a: A,
    b: B,
) -> nvmlReturn_t {
    if is_shared(device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(device, a, b) }
}

/// A function of a device with four arguments more.
pub(crate) unsafe fn four<A, B, C, D>(
    original: unsafe extern "C" fn(nvmlDevice_t, A, B, C, D) -> c_int,
    device: nvmlDevice_t,
    a: A,
    b: B,
    c: C,
    d: D,
) -> nvmlReturn_t {
    if is_shared(device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    unsafe { original(device, a, b, c, d) }
}

/// Whether the GPU has performance monitoring.
pub(crate) unsafe fn monitoring(
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
