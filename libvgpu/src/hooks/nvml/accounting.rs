//! Accounting: the records of the share's own live processes.
//!
//! NVML has records of all processes on the GPU, by PIDs that are meaningful only if NVML translates them. The
//! share of an ended process is unknown, so its record is hidden.

use core::ffi::c_uint;

use crate::current::Target;
use crate::driver_api::functions::{
    nvmlDeviceGetAccountingPids, nvmlDeviceGetAccountingStats, nvmlDeviceGetAccountingStats_v2,
};
use crate::driver_api::nvml::{
    NVML_ERROR_NOT_FOUND, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlAccountingStats_t,
    nvmlAccountingStats_v2_t, nvmlDevice_t, nvmlReturn_t,
};
use crate::hooks::nvml::memory_target;
use crate::hooks::nvml::processes::live_processes;
use crate::hooks::nvml::utilization::{cores_percent, scale, shows_own_pids};
use crate::limits::gpu::Gpu;

fn is_live(gpu: Gpu, pid: c_uint) -> bool {
    live_processes(gpu).any(|process| process.pid == pid)
}

pub(crate) unsafe fn pids(
    original: nvmlDeviceGetAccountingPids::Function,
    device: nvmlDevice_t,
    count: *mut c_uint,
    pids: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, count, pids) };
    let gpu = match memory_target(device) {
        Target::Unlimited => return result,
        _ if result != NVML_SUCCESS => return result,
        Target::Denied => return NVML_ERROR_NOT_SUPPORTED,
        Target::Limited(gpu) => gpu,
    };
    if !shows_own_pids(gpu, device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: NVML has written it.
    let length = usize::try_from(unsafe { count.read() }).unwrap_or(0);
    let mut retained: c_uint = 0;
    for index in 0..length {
        // SAFETY: NVML has written that many.
        let place = unsafe { pids.add(index) };
        // SAFETY: as above.
        let pid = unsafe { place.read() };
        if is_live(gpu, pid) {
            let to = usize::try_from(retained).unwrap_or(index);
            // SAFETY: not after the entry that was read.
            let to = unsafe { pids.add(to) };
            // SAFETY: as above.
            unsafe { to.write(pid) };
            retained = retained.saturating_add(1);
        }
    }
    // SAFETY: NVML has written it.
    unsafe { count.write(retained) };
    NVML_SUCCESS
}

/// Queries the record of a process of the share with `call`. `to_share` scales it from the GPU to the share's cores.
fn query(
    device: nvmlDevice_t,
    pid: c_uint,
    call: impl FnOnce() -> nvmlReturn_t,
    to_share: impl FnOnce(u32),
) -> nvmlReturn_t {
    let gpu = match memory_target(device) {
        Target::Unlimited => return call(),
        Target::Denied => return NVML_ERROR_NOT_SUPPORTED,
        Target::Limited(gpu) => gpu,
    };
    if !is_live(gpu, pid) {
        return NVML_ERROR_NOT_FOUND;
    }
    if !shows_own_pids(gpu, device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    let result = call();
    if result == NVML_SUCCESS {
        to_share(cores_percent(gpu));
    }
    result
}

pub(crate) unsafe fn stats(
    original: nvmlDeviceGetAccountingStats::Function,
    device: nvmlDevice_t,
    pid: c_uint,
    stats: *mut nvmlAccountingStats_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(device, pid, stats) };
    query(device, pid, call, |cores| {
        // SAFETY: null or written by NVML.
        if let Some(stats) = unsafe { stats.as_mut() } {
            stats.gpuUtilization = scale(stats.gpuUtilization, cores);
            stats.memoryUtilization = scale(stats.memoryUtilization, cores);
        }
    })
}

pub(crate) unsafe fn stats_v2(
    original: nvmlDeviceGetAccountingStats_v2::Function,
    device: nvmlDevice_t,
    stats: *mut nvmlAccountingStats_v2_t,
) -> nvmlReturn_t {
    // SAFETY: null, which NVML rejects, or the caller's query.
    let pid = unsafe { stats.as_ref() }.map_or(0, |stats| stats.pid);
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(device, stats) };
    query(device, pid, call, |cores| {
        // SAFETY: null or written by NVML.
        if let Some(stats) = unsafe { stats.as_mut() } {
            stats.gpuUtilization = scale(stats.gpuUtilization, cores);
            stats.memoryUtilization = scale(stats.memoryUtilization, cores);
            stats.sumGpuUtil = scale_sum(stats.sumGpuUtil, stats.sampleCount, cores);
            stats.sumFbUtil = scale_sum(stats.sumFbUtil, stats.sampleCount, cores);
        }
    })
}

/// As [`scale`], for the sum of a number of samples, each in hundredths of a percent.
fn scale_sum(sum: u64, samples: u32, cores_percent: u32) -> u64 {
    sum.saturating_mul(100)
        .checked_div(u64::from(cores_percent))
        .unwrap_or(sum)
        .min(u64::from(samples).saturating_mul(100 * 100))
}
