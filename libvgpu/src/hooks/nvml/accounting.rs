//! Accounting: the records of the share's own live processes.
//!
//! NVML has records of all processes on the GPU, by PIDs that are meaningful only if NVML translates them. The
//! share of an ended process is unknown, so its record is hidden.

use core::ffi::c_uint;

use crate::card::Card;
use crate::current::Target;
use crate::functions::{nvmlDeviceGetAccountingPids, nvmlDeviceGetAccountingStats};
use crate::hooks::nvml::memory_target;
use crate::hooks::nvml::processes::live_processes;
use crate::hooks::nvml::utilization::{cores_percent, scale, shows_own_pids};
use crate::nvml::{
    NVML_ERROR_NOT_FOUND, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS, nvmlAccountingStats_t,
    nvmlDevice_t, nvmlReturn_t,
};

fn is_live(card: Card, pid: c_uint) -> bool {
    live_processes(card).any(|process| process.pid == pid)
}

pub(crate) unsafe fn pids(
    original: nvmlDeviceGetAccountingPids::Function,
    device: nvmlDevice_t,
    count: *mut c_uint,
    pids: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, count, pids) };
    let card = match memory_target(device) {
        Target::Unlimited => return result,
        _ if result != NVML_SUCCESS => return result,
        Target::Denied => return NVML_ERROR_NOT_SUPPORTED,
        Target::Limited(card) => card,
    };
    if !shows_own_pids(card, device) {
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
        if is_live(card, pid) {
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

pub(crate) unsafe fn stats(
    original: nvmlDeviceGetAccountingStats::Function,
    device: nvmlDevice_t,
    pid: c_uint,
    stats: *mut nvmlAccountingStats_t,
) -> nvmlReturn_t {
    let card = match memory_target(device) {
        // SAFETY: the caller's arguments.
        Target::Unlimited => return unsafe { original(device, pid, stats) },
        Target::Denied => return NVML_ERROR_NOT_SUPPORTED,
        Target::Limited(card) => card,
    };
    if !is_live(card, pid) {
        return NVML_ERROR_NOT_FOUND;
    }
    if !shows_own_pids(card, device) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, pid, stats) };
    // SAFETY: null or written by NVML.
    if let Some(stats) = unsafe { stats.as_mut() }.filter(|_| result == NVML_SUCCESS) {
        let cores = cores_percent(card);
        stats.gpuUtilization = scale(stats.gpuUtilization, cores);
        stats.memoryUtilization = scale(stats.memoryUtilization, cores);
    }
    result
}
