//! Process lists: the share's own processes, by the PIDs of this container.
//!
//! They come from the share's usage region, because NVIDIA drivers differ inside a container: host PIDs, container
//! PIDs, or no process. A share has no graphics and no MPS clients, so those lists are empty.

use core::ffi::c_uint;
use core::ptr;

use crate::current::Target;
use crate::driver_api::functions::{
    nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetComputeRunningProcesses_v2,
    nvmlDeviceGetRunningProcessDetailList,
};
use crate::driver_api::nvml::{
    NO_INSTANCE, NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS,
    PROCESS_DETAIL_LIST_V1, nvmlDevice_t, nvmlProcessDetail_v1_t, nvmlProcessDetailList_t,
    nvmlProcessInfo_t, nvmlProcessInfo_v1_t, nvmlReturn_t,
};
use crate::hooks::nvml::memory_target;
use crate::limits::gpu::Gpu;
use crate::limits::share::usage::LiveProcess;
use crate::process::Process;

type List<T> = unsafe extern "C" fn(nvmlDevice_t, *mut c_uint, *mut T) -> nvmlReturn_t;

/// Returns the processes of a GPU's shares, each once, with its usage of all shares.
pub(crate) fn live_processes(gpu: Gpu) -> impl Iterator<Item = LiveProcess> {
    let shares = move || gpu.shares().enumerate();
    shares().flat_map(move |(position, share)| {
        share.live_processes().filter_map(move |process| {
            let others = |before: bool| {
                shares()
                    .filter(move |(other, _)| (*other < position) == before && *other != position)
                    .flat_map(|(_, share)| share.live_processes())
                    .filter(move |other| other.pid == process.pid)
            };
            if others(true).next().is_some() {
                return None;
            }
            let used_bytes = others(false).fold(process.used_bytes, |sum, other| {
                sum.saturating_add(other.used_bytes)
            });
            Some(LiveProcess {
                used_bytes,
                ..process
            })
        })
    })
}

/// Reclaims dead processes in the shares of a GPU.
pub(crate) fn reclaim_dead(gpu: Gpu) {
    let _guard = Process::of(gpu).guard();
    for share in gpu.shares() {
        share.reclaim();
    }
}

/// Writes a list of `processes` as NVML does: `count` is the capacity before and the length after.
///
/// # Safety
/// As for NVML's function: `count` is valid, and `infos` has space for as many entries.
unsafe fn write<T>(
    original: List<T>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut T,
    processes: impl Iterator<Item = T>,
) -> nvmlReturn_t {
    // NVML checks all arguments except the array, which it must not fill.
    let mut driver_count = 0;
    // SAFETY: the capacity is zero.
    let result = unsafe { original(device, &raw mut driver_count, ptr::null_mut()) };
    if result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE {
        return result;
    }
    // SAFETY: not null, checked by the caller.
    let capacity = unsafe { count.read() };
    let mut length: c_uint = 0;
    for process in processes {
        if length < capacity && !infos.is_null() {
            let offset = usize::try_from(length).unwrap_or(usize::MAX);
            // SAFETY: within the caller's array.
            let place = unsafe { infos.add(offset) };
            // SAFETY: as above.
            unsafe { place.write(process) };
        }
        length = length.saturating_add(1);
    }
    // SAFETY: not null, checked by the caller.
    unsafe { count.write(length) };
    if length > capacity || (length > 0 && infos.is_null()) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    NVML_SUCCESS
}

/// Writes the list of compute processes in one of its versions, or an empty list.
///
/// # Safety
/// As for NVML's function.
unsafe fn list<T>(
    original: List<T>,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut T,
    entry: Option<fn(LiveProcess) -> T>,
) -> nvmlReturn_t {
    let target = memory_target(device);
    if count.is_null() || matches!(target, Target::Unlimited) {
        // SAFETY: the caller's arguments.
        return unsafe { original(device, count, infos) };
    }
    match (target, entry) {
        (Target::Limited(gpu), Some(entry)) => {
            if !gpu.shares().all(|share| share.is_countable()) {
                return NVML_ERROR_NOT_SUPPORTED;
            }
            reclaim_dead(gpu);
            // SAFETY: the caller's arguments; `count` is not null.
            unsafe {
                write(
                    original,
                    device,
                    count,
                    infos,
                    live_processes(gpu).map(entry),
                )
            }
        }
        // SAFETY: the caller's arguments; `count` is not null.
        _ => unsafe { write(original, device, count, infos, core::iter::empty()) },
    }
}

fn info_v1(process: LiveProcess) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t {
        pid: process.pid,
        usedGpuMemory: process.used_bytes,
    }
}

fn info(process: LiveProcess) -> nvmlProcessInfo_t {
    nvmlProcessInfo_t {
        pid: process.pid,
        usedGpuMemory: process.used_bytes,
        gpuInstanceId: NO_INSTANCE,
        computeInstanceId: NO_INSTANCE,
    }
}

pub(crate) unsafe fn compute_v1(
    original: nvmlDeviceGetComputeRunningProcesses::Function,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_v1_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    unsafe { list(original, device, count, infos, Some(info_v1)) }
}

pub(crate) unsafe fn compute(
    original: nvmlDeviceGetComputeRunningProcesses_v2::Function,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    unsafe { list(original, device, count, infos, Some(info)) }
}

/// Values of `mode` in a detailed list. Between these are graphics and MPS, which a share does not have.
const COMPUTE: c_uint = 0;
const ALL: c_uint = 3;

/// Lets NVML check the arguments of a detailed list without filling it.
///
/// # Safety
/// As for NVML's function.
unsafe fn check(
    original: nvmlDeviceGetRunningProcessDetailList::Function,
    device: nvmlDevice_t,
    list: *const nvmlProcessDetailList_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's list.
    let asked = unsafe { list.read() };
    let mut empty = nvmlProcessDetailList_t {
        numProcArrayEntries: 0,
        procArray: ptr::null_mut(),
        ..asked
    };
    // SAFETY: the capacity is zero.
    unsafe { original(device, &raw mut empty) }
}

pub(crate) unsafe fn detailed(
    original: nvmlDeviceGetRunningProcessDetailList::Function,
    device: nvmlDevice_t,
    list: *mut nvmlProcessDetailList_t,
) -> nvmlReturn_t {
    let target = memory_target(device);
    if list.is_null() || matches!(target, Target::Unlimited) {
        // SAFETY: the caller's arguments.
        return unsafe { original(device, list) };
    }
    // SAFETY: the caller's arguments; `list` is not null.
    let result = unsafe { check(original, device, list) };
    if result != NVML_SUCCESS && result != NVML_ERROR_INSUFFICIENT_SIZE {
        return result;
    }
    // SAFETY: NVML has accepted it.
    let asked = unsafe { list.read() };
    // A version that is unknown to this build may have other entries.
    if asked.version != PROCESS_DETAIL_LIST_V1 {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    let gpu = match target {
        Target::Limited(gpu) if matches!(asked.mode, COMPUTE | ALL) => Some(gpu),
        _ if asked.mode <= ALL => None,
        _ => return NVML_ERROR_NOT_SUPPORTED,
    };
    if gpu.is_some_and(|gpu| !gpu.shares().all(|share| share.is_countable())) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if let Some(gpu) = gpu {
        reclaim_dead(gpu);
    }
    let mut length: c_uint = 0;
    for process in gpu.into_iter().flat_map(live_processes) {
        if length < asked.numProcArrayEntries && !asked.procArray.is_null() {
            let offset = usize::try_from(length).unwrap_or(usize::MAX);
            // SAFETY: within the caller's array.
            let place = unsafe { asked.procArray.add(offset) };
            let detail = nvmlProcessDetail_v1_t {
                pid: process.pid,
                usedGpuMemory: process.used_bytes,
                gpuInstanceId: NO_INSTANCE,
                computeInstanceId: NO_INSTANCE,
                usedGpuCcProtectedMemory: 0,
            };
            // SAFETY: as above.
            unsafe { place.write(detail) };
        }
        length = length.saturating_add(1);
    }
    let answer = nvmlProcessDetailList_t {
        numProcArrayEntries: length,
        ..asked
    };
    // SAFETY: NVML has accepted it.
    unsafe { list.write(answer) };
    if length > asked.numProcArrayEntries || (length > 0 && asked.procArray.is_null()) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    NVML_SUCCESS
}

pub(crate) unsafe fn empty_v1(
    original: nvmlDeviceGetComputeRunningProcesses::Function,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_v1_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    unsafe { list(original, device, count, infos, None) }
}

pub(crate) unsafe fn empty(
    original: nvmlDeviceGetComputeRunningProcesses_v2::Function,
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    unsafe { list(original, device, count, infos, None) }
}
