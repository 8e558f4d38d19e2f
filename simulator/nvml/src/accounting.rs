//! Accounting: process statistics, also after their end.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings::{nvmlAccountingStats_t, nvmlDevice_t, nvmlEnableState_t};
use simulator_machine::kernel::ACCOUNTED_PROCESSES;
use simulator_machine::protocol::{
    AccountingReply, AccountingRequest, AccountingStats, Reply, Request,
};

use crate::abi::{NvmlResult, Out, entry_points, set_list};
use crate::error::NvmlError;
use crate::handle::{Device, device};
use crate::mig::require_root;

/// Sends an accounting request.
fn ask(device: Device, request: AccountingRequest) -> NvmlResult<Option<AccountingReply>> {
    let gpu = device.gpu;
    match device
        .library
        .request(&Request::Accounting { gpu, request })?
    {
        Reply::Accounting(reply) => Ok(Some(reply)),
        Reply::Done => Ok(None),
        _ => Err(NvmlError::Unknown),
    }
}

fn state(device: Device) -> NvmlResult<(bool, Vec<c_uint>)> {
    match ask(device, AccountingRequest::State)? {
        Some(AccountingReply::State { enabled, pids }) => Ok((enabled, pids)),
        _ => Err(NvmlError::Unknown),
    }
}

/// Errors if accounting of a GPU is off.
fn enabled(handle: nvmlDevice_t) -> NvmlResult<(Device, Vec<c_uint>)> {
    let device = device(handle)?;
    match state(device)? {
        (true, pids) => Ok((device, pids)),
        (false, _) => Err(NvmlError::NotSupported),
    }
}

entry_points! {
    fn nvmlDeviceGetAccountingMode(handle: nvmlDevice_t, mode: Out<nvmlEnableState_t>) {
        let (enabled, _) = state(device(handle)?)?;
        mode.set(enabled.into())
    }

    fn nvmlDeviceSetAccountingMode(handle: nvmlDevice_t, mode: nvmlEnableState_t) {
        let device = device(handle)?;
        let enabled = match mode {
            0 => false,
            1 => true,
            _ => return Err(NvmlError::InvalidArgument),
        };
        require_root()?;
        ask(device, AccountingRequest::SetMode { enabled }).map(drop)
    }

    fn nvmlDeviceClearAccountingPids(handle: nvmlDevice_t) {
        let device = device(handle)?;
        require_root()?;
        ask(device, AccountingRequest::Clear).map(drop)
    }

    fn nvmlDeviceGetAccountingBufferSize(handle: nvmlDevice_t, size: Out<c_uint>) {
        state(device(handle)?)?;
        size.set(ACCOUNTED_PROCESSES)
    }

    fn nvmlDeviceGetAccountingPids(handle: nvmlDevice_t, count: Out<c_uint>, pids: Out<c_uint>) {
        let (_, known) = enabled(handle)?;
        set_list(count, pids, known)
    }

    fn nvmlDeviceGetAccountingStats(handle: nvmlDevice_t, pid: c_uint, stats: Out<nvmlAccountingStats_t>) {
        let (device, _) = enabled(handle)?;
        match ask(device, AccountingRequest::Stats { pid })? {
            Some(AccountingReply::Stats(kept)) => stats.set(shown(device, &kept)),
            _ => Err(NvmlError::Unknown),
        }
    }

    fn nvmlDeviceGetAccountingStats_v2(handle: nvmlDevice_t, stats: Out<AccountingStatsV2>) {
        let (device, _) = enabled(handle)?;
        let pid = stats.get()?.pid;
        match ask(device, AccountingRequest::Stats { pid })? {
            Some(AccountingReply::Stats(kept)) => stats.set(shown_v2(pid, &shown(device, &kept))),
            _ => Err(NvmlError::Unknown),
        }
    }
}

/// `nvmlAccountingStats_v2_t` of NVML 610; the bindings are older.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct AccountingStatsV2 {
    pid: c_uint,
    is_running: c_uint,
    gpu_utilization: c_uint,
    memory_utilization: c_uint,
    max_memory_usage: c_ulonglong,
    sample_count: c_uint,
    /// Sums over the samples, in hundredths of a percent.
    sum_gpu_utilization: c_ulonglong,
    sum_memory_utilization: c_ulonglong,
    time: c_ulonglong,
    start_time: c_ulonglong,
}

/// The statistics as one sample.
fn shown_v2(pid: c_uint, stats: &nvmlAccountingStats_t) -> AccountingStatsV2 {
    AccountingStatsV2 {
        pid,
        is_running: stats.isRunning,
        gpu_utilization: stats.gpuUtilization,
        memory_utilization: stats.memoryUtilization,
        max_memory_usage: stats.maxMemoryUsage,
        sample_count: 1,
        sum_gpu_utilization: c_ulonglong::from(stats.gpuUtilization) * 100,
        sum_memory_utilization: c_ulonglong::from(stats.memoryUtilization) * 100,
        time: stats.time,
        start_time: stats.startTime,
    }
}

fn shown(device: Device, kept: &AccountingStats) -> nvmlAccountingStats_t {
    const NANOS_PER_MILLISECOND: c_ulonglong = 1_000_000;
    nvmlAccountingStats_t {
        gpuUtilization: kept.gpu_percent,
        memoryUtilization: kept.memory_percent,
        maxMemoryUsage: kept.max_bytes,
        time: kept.nanos / NANOS_PER_MILLISECOND,
        startTime: device.library.microseconds(kept.started),
        isRunning: kept.running.into(),
        reserved: [0; 5],
    }
}
