//! Video engines and frame buffer capture. Their libraries are not mounted into containers with a share, so a share has no
//! session and does not use them; NVML's sessions have the PIDs of other tenants.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

use crate::driver_api::functions::{nvmlDeviceGetEncoderStats, nvmlDeviceGetFBCStats};
use crate::driver_api::nvml::{
    NVML_ERROR_INSUFFICIENT_SIZE, NVML_SUCCESS, nvmlDevice_t, nvmlFBCStats_t, nvmlReturn_t,
};
use crate::hooks::nvml::is_shared;

/// Sets a value that NVML has written to zero.
///
/// # Safety
/// `place` is null or valid.
unsafe fn clear(place: *mut c_uint) {
    // SAFETY: the caller's contract.
    if let Some(place) = unsafe { place.as_mut() } {
        *place = 0;
    }
}

pub(crate) unsafe fn utilization(
    original: unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut c_uint) -> c_int,
    device: nvmlDevice_t,
    percent: *mut c_uint,
    period: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, percent, period) };
    if result == NVML_SUCCESS && is_shared(device) {
        // SAFETY: the caller's argument.
        unsafe { clear(percent) };
    }
    result
}

pub(crate) unsafe fn encoder_stats(
    original: nvmlDeviceGetEncoderStats::Function,
    device: nvmlDevice_t,
    sessions: *mut c_uint,
    frames: *mut c_uint,
    latency: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, sessions, frames, latency) };
    if result == NVML_SUCCESS && is_shared(device) {
        for value in [sessions, frames, latency] {
            // SAFETY: the caller's argument.
            unsafe { clear(value) };
        }
    }
    result
}

pub(crate) unsafe fn capture_stats(
    original: nvmlDeviceGetFBCStats::Function,
    device: nvmlDevice_t,
    stats: *mut nvmlFBCStats_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, stats) };
    if result == NVML_SUCCESS
        && is_shared(device)
        // SAFETY: null or written by NVML.
        && let Some(stats) = unsafe { stats.as_mut() }
    {
        *stats = nvmlFBCStats_t {
            sessionsCount: 0,
            averageFPS: 0,
            averageLatency: 0,
        };
    }
    result
}

/// The sessions of encoders or captures: none. NVML checks all arguments except the array, which it must not fill.
pub(crate) unsafe fn sessions(
    original: unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut c_void) -> c_int,
    device: nvmlDevice_t,
    count: *mut c_uint,
    sessions: *mut c_void,
) -> nvmlReturn_t {
    if count.is_null() || !is_shared(device) {
        // SAFETY: the caller's arguments.
        return unsafe { original(device, count, sessions) };
    }
    let mut driver_count = 0;
    // SAFETY: the capacity is zero.
    let result = unsafe { original(device, &raw mut driver_count, ptr::null_mut()) };
    if result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE {
        return result;
    }
    // SAFETY: the caller's argument.
    unsafe { clear(count) };
    NVML_SUCCESS
}
