//! Utilization: the share's own work only, where 100% is the share's cores.
//!
//! There are two sources. The share's own meter comes first: NVML's process samples attribute a period of 0.2 s to one
//! process with up to 99%, so a share that works all the time reads 0 and 100 in turn. The samples answer for shares
//! without a meter, and for what the meter does not have: memory traffic, and single processes. They need NVML to report
//! the container's own PIDs (NVIDIA drivers since 515), or a program on the host; with other PIDs, or none, a sample
//! cannot be attributed to the share. Without both the function is not supported.
//!
//! For a share without a guarantee 100% is the whole GPU. Work beyond the guarantee, in idle time of other shares,
//! still reads 100%.

use core::ffi::c_uint;
use core::ptr;

use crate::current::Target;
use crate::driver_api::functions::{
    nvmlDeviceGetComputeRunningProcesses_v3, nvmlDeviceGetDynamicPstatesInfo,
    nvmlDeviceGetProcessUtilization, nvmlDeviceGetProcessesUtilizationInfo, nvmlDeviceGetSamples,
    nvmlDeviceGetUtilizationRates,
};
use crate::driver_api::nvml::{
    NO_INSTANCE, NVML_DEC_UTILIZATION_SAMPLES, NVML_ENC_UTILIZATION_SAMPLES,
    NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_NOT_FOUND, NVML_ERROR_NOT_SUPPORTED,
    NVML_GPU_UTILIZATION_DOMAIN_FB, NVML_GPU_UTILIZATION_DOMAIN_GPU, NVML_GPU_UTILIZATION_SAMPLES,
    NVML_JPG_UTILIZATION_SAMPLES, NVML_MEMORY_UTILIZATION_SAMPLES, NVML_OFA_UTILIZATION_SAMPLES,
    NVML_SUCCESS, NVML_VALUE_TYPE_UNSIGNED_INT, PROCESSES_UTILIZATION_INFO_V1, nvmlDevice_t,
    nvmlGpuDynamicPstatesInfo_t, nvmlGpuDynamicPstatesUtilization_t, nvmlProcessInfo_t,
    nvmlProcessUtilizationInfo_v1_t, nvmlProcessUtilizationSample_t,
    nvmlProcessesUtilizationInfo_t, nvmlReturn_t, nvmlSample_t, nvmlUtilization_t,
};
use crate::hooks::nvml::{
    self,
    processes::{live_processes, reclaim_dead},
};
use crate::limits::gpu::Gpu;
use crate::system::sys;

/// Number of inspected processes of a GPU, on the stack of the calling thread.
const MAX_PROCESSES: c_uint = 96;

/// Age of recent samples: NVML's own sampling period is between 1/6 s and 1 s.
const RECENT_US: u64 = 1_000_000;
/// Sampling period of a share.
const SAMPLE_US: u64 = 166_000;

/// Scales a percentage of the GPU to the share's cores.
pub(super) fn scale(percent: u32, cores_percent: u32) -> u32 {
    percent
        .saturating_mul(100)
        .checked_div(cores_percent)
        .unwrap_or(percent)
        .min(100)
}

/// Returns the total cores of all shares of a GPU; 100 if one has no guarantee.
pub(super) fn cores_percent(gpu: Gpu) -> u32 {
    let mut sum = 0u32;
    for share in gpu.shares() {
        match share.cores_percent() {
            0 => return 100,
            percent => sum = sum.saturating_add(percent),
        }
    }
    sum.clamp(1, 100)
}

/// Returns whether NVML reports the PIDs of this container: every reported PID exists here, and all processes of
/// the share are reported.
pub(super) fn shows_own_pids(gpu: Gpu, device: nvmlDevice_t) -> bool {
    let list = nvmlDeviceGetComputeRunningProcesses_v3::ORIGINAL.get();
    let Some(list) = list else { return false };
    let mut shown = [nvmlProcessInfo_t {
        pid: 0,
        usedGpuMemory: 0,
        gpuInstanceId: NO_INSTANCE,
        computeInstanceId: NO_INSTANCE,
    }; MAX_PROCESSES as usize];
    let mut count = MAX_PROCESSES;
    // SAFETY: the array has `count` entries.
    let result = unsafe { list(device, &raw mut count, shown.as_mut_ptr()) };
    if result != NVML_SUCCESS {
        return false;
    }
    let shown = || shown.iter().take(usize::try_from(count).unwrap_or(0));
    shown().all(|process| sys::process_exists(process.pid))
        && live_processes(gpu).all(|process| shown().any(|shown| shown.pid == process.pid))
}

/// Passes the newest sample of each process of the GPU's shares to `each`.
fn sampled(
    gpu: Gpu,
    device: nvmlDevice_t,
    since_us: u64,
    mut each: impl FnMut(&nvmlProcessUtilizationSample_t),
) -> Result<(), nvmlReturn_t> {
    if live_processes(gpu).next().is_none() {
        return Ok(());
    }
    if !shows_own_pids(gpu, device) {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    let ask = nvmlDeviceGetProcessUtilization::ORIGINAL
        .get()
        .ok_or(NVML_ERROR_NOT_SUPPORTED)?;
    let mut samples = [nvmlProcessUtilizationSample_t {
        pid: 0,
        timeStamp: 0,
        smUtil: 0,
        memUtil: 0,
        encUtil: 0,
        decUtil: 0,
    }; MAX_PROCESSES as usize];
    let mut count = MAX_PROCESSES;
    // SAFETY: the array has `count` entries.
    let result = unsafe { ask(device, samples.as_mut_ptr(), &raw mut count, since_us) };
    match result {
        NVML_SUCCESS => {}
        NVML_ERROR_NOT_FOUND => return Ok(()),
        NVML_ERROR_INSUFFICIENT_SIZE => return Err(NVML_ERROR_NOT_SUPPORTED),
        error => return Err(error),
    }
    let filled = samples.iter().take(usize::try_from(count).unwrap_or(0));
    // NVML may leave entries empty.
    let new = filled.filter(|sample| sample.pid != 0 && sample.timeStamp > since_us);
    for sample in new {
        if live_processes(gpu).any(|process| process.pid == sample.pid) {
            each(sample);
        }
    }
    Ok(())
}

/// Returns the limit that applies to the utilization of an NVML device. A share without counted memory or launches
/// has no utilization of its own.
fn target(device: nvmlDevice_t) -> Target {
    match nvml::target(device) {
        Target::Limited(gpu) if !gpu.is_memory_limited() && !gpu.is_metered() => Target::Unlimited,
        target => target,
    }
}

/// Returns the share's utilization, scaled to its cores.
fn of_share(gpu: Gpu, device: nvmlDevice_t) -> Result<nvmlUtilization_t, nvmlReturn_t> {
    if !gpu.shares().all(|share| share.is_countable()) {
        return Err(NVML_ERROR_NOT_SUPPORTED);
    }
    reclaim_dead(gpu);
    let cores = cores_percent(gpu);
    let mut sum = nvmlUtilization_t { gpu: 0, memory: 0 };
    let since_us = sys::epoch_us().saturating_sub(RECENT_US);
    let sampled = sampled(gpu, device, since_us, |sample| {
        sum.gpu = sum.gpu.saturating_add(sample.smUtil);
        sum.memory = sum.memory.saturating_add(sample.memUtil);
    });
    match metered_percent(gpu) {
        Some(percent) => sum.gpu = percent,
        None => sampled?,
    }
    Ok(nvmlUtilization_t {
        gpu: scale(sum.gpu, cores),
        memory: scale(sum.memory, cores),
    })
}

/// Returns the percent of GPU time by the meters of the shares; `None` if one has none.
fn metered_percent(gpu: Gpu) -> Option<u32> {
    gpu.shares().try_fold(0u32, |sum, share| {
        Some(sum.saturating_add(share.metered_percent()?))
    })
}

pub(crate) unsafe fn rates(
    original: nvmlDeviceGetUtilizationRates::Function,
    device: nvmlDevice_t,
    rates: *mut nvmlUtilization_t,
) -> nvmlReturn_t {
    let target = target(device);
    if rates.is_null() || matches!(target, Target::Unlimited) {
        // SAFETY: the caller's arguments.
        return unsafe { original(device, rates) };
    }
    let mut of_gpu = nvmlUtilization_t { gpu: 0, memory: 0 };
    // SAFETY: writes one struct.
    let result = unsafe { original(device, &raw mut of_gpu) };
    if result != NVML_SUCCESS {
        return result;
    }
    let shown = match target {
        Target::Limited(gpu) => of_share(gpu, device),
        _ => Ok(nvmlUtilization_t { gpu: 0, memory: 0 }),
    };
    match shown {
        Ok(shown) => {
            // SAFETY: not null, and valid by the caller's contract.
            unsafe { rates.write(shown) };
            NVML_SUCCESS
        }
        Err(error) => error,
    }
}

/// Utilization by domain: the GPU and its memory; the others, video engines and bus, are not present in a share.
pub(crate) unsafe fn dynamic_states(
    original: nvmlDeviceGetDynamicPstatesInfo::Function,
    device: nvmlDevice_t,
    info: *mut nvmlGpuDynamicPstatesInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, info) };
    let target = target(device);
    // SAFETY: null or written by NVML.
    let Some(info) = (unsafe { info.as_mut() }) else {
        return result;
    };
    if result != NVML_SUCCESS || matches!(target, Target::Unlimited) {
        return result;
    }
    let shown = match target {
        Target::Limited(gpu) => of_share(gpu, device),
        _ => Ok(nvmlUtilization_t { gpu: 0, memory: 0 }),
    };
    let none = nvmlGpuDynamicPstatesUtilization_t {
        bIsPresent: 0,
        percentage: 0,
        incThreshold: 0,
        decThreshold: 0,
    };
    for (domain, value) in info.utilization.iter_mut().enumerate() {
        *value = match (domain, &shown) {
            (NVML_GPU_UTILIZATION_DOMAIN_GPU, Ok(shown)) => nvmlGpuDynamicPstatesUtilization_t {
                percentage: shown.gpu,
                ..*value
            },
            (NVML_GPU_UTILIZATION_DOMAIN_FB, Ok(shown)) => nvmlGpuDynamicPstatesUtilization_t {
                percentage: shown.memory,
                ..*value
            },
            _ => none,
        };
    }
    shown.err().unwrap_or(NVML_SUCCESS)
}

/// Reduces an array that NVML has written to the share's processes, and scales it.
///
/// # Safety
/// `array` has `length` elements that NVML has written.
unsafe fn retain_own<T: Copy>(
    gpu: Gpu,
    array: *mut T,
    length: c_uint,
    pid: fn(&T) -> c_uint,
    scaled: fn(T, u32) -> T,
) -> c_uint {
    let cores = cores_percent(gpu);
    let length = usize::try_from(length).unwrap_or(0);
    let mut retained = 0usize;
    for index in 0..length {
        // SAFETY: within the array.
        let place = unsafe { array.add(index) };
        // SAFETY: written by NVML.
        let sample = unsafe { place.read() };
        if !live_processes(gpu).any(|process| process.pid == pid(&sample)) {
            continue;
        }
        // SAFETY: `retained` is at most `index`.
        let place = unsafe { array.add(retained) };
        // SAFETY: within the array.
        unsafe { place.write(scaled(sample, cores)) };
        retained = retained.saturating_add(1);
    }
    for index in retained..length {
        // SAFETY: within the array.
        let place = unsafe { array.add(index) };
        // Samples of other shares are erased.
        // SAFETY: as above; all zeroes is a valid sample.
        unsafe { ptr::write_bytes(place, 0, 1) };
    }
    c_uint::try_from(retained).unwrap_or(0)
}

/// Returns whether process samples can be attributed to the share.
fn has_own_samples(gpu: Gpu, device: nvmlDevice_t) -> bool {
    if !gpu.shares().all(|share| share.is_countable()) {
        return false;
    }
    reclaim_dead(gpu);
    live_processes(gpu).next().is_none() || shows_own_pids(gpu, device)
}

pub(crate) unsafe fn by_process(
    original: nvmlDeviceGetProcessUtilization::Function,
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut c_uint,
    since_us: u64,
) -> nvmlReturn_t {
    let gpu = match target(device) {
        Target::Limited(gpu) => Some(gpu),
        Target::Denied => None,
        Target::Unlimited => {
            // SAFETY: the caller's arguments.
            return unsafe { original(device, samples, count, since_us) };
        }
    };
    let Some(gpu) = gpu.filter(|gpu| has_own_samples(*gpu, device)) else {
        return NVML_ERROR_NOT_SUPPORTED;
    };
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, samples, count, since_us) };
    if result != NVML_SUCCESS || samples.is_null() {
        return result;
    }
    // SAFETY: not null, or NVML had failed.
    let length = unsafe { count.read() };
    // SAFETY: NVML has written that many.
    let retained = unsafe {
        retain_own(
            gpu,
            samples,
            length,
            |sample| sample.pid,
            |sample, cores| nvmlProcessUtilizationSample_t {
                smUtil: scale(sample.smUtil, cores),
                memUtil: scale(sample.memUtil, cores),
                ..sample
            },
        )
    };
    // SAFETY: as above.
    unsafe { count.write(retained) };
    if retained == 0 {
        return NVML_ERROR_NOT_FOUND;
    }
    NVML_SUCCESS
}

pub(crate) unsafe fn by_process_info(
    original: nvmlDeviceGetProcessesUtilizationInfo::Function,
    device: nvmlDevice_t,
    info: *mut nvmlProcessesUtilizationInfo_t,
) -> nvmlReturn_t {
    let target = target(device);
    if info.is_null() || matches!(target, Target::Unlimited) {
        // SAFETY: the caller's arguments.
        return unsafe { original(device, info) };
    }
    // SAFETY: not null; every version begins with its number.
    let version = unsafe { info.cast::<c_uint>().read() };
    let known = version == PROCESSES_UTILIZATION_INFO_V1;
    let gpu = match target {
        // A version that is unknown to this build cannot be reduced to the share.
        Target::Limited(gpu) if known && has_own_samples(gpu, device) => gpu,
        Target::Limited(_) | Target::Denied | Target::Unlimited => {
            return NVML_ERROR_NOT_SUPPORTED;
        }
    };
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, info) };
    // SAFETY: not null, and of this version.
    let info = unsafe { &mut *info };
    if result != NVML_SUCCESS || info.procUtilArray.is_null() {
        return result;
    }
    // SAFETY: NVML has written that many.
    info.processSamplesCount = unsafe {
        retain_own(
            gpu,
            info.procUtilArray,
            info.processSamplesCount,
            |sample| sample.pid,
            |sample, cores| nvmlProcessUtilizationInfo_v1_t {
                smUtil: scale(sample.smUtil, cores),
                memUtil: scale(sample.memUtil, cores),
                ..sample
            },
        )
    };
    if info.processSamplesCount == 0 {
        return NVML_ERROR_NOT_FOUND;
    }
    NVML_SUCCESS
}

/// Utilization samples are replaced by one of the share; samples of power and clocks are the GPU's own.
pub(crate) unsafe fn samples(
    original: nvmlDeviceGetSamples::Function,
    device: nvmlDevice_t,
    kind: c_uint,
    since_us: u64,
    value_type: *mut c_uint,
    count: *mut c_uint,
    samples: *mut nvmlSample_t,
) -> nvmlReturn_t {
    let value: fn(nvmlUtilization_t) -> c_uint = match kind {
        NVML_GPU_UTILIZATION_SAMPLES => |of_share| of_share.gpu,
        NVML_MEMORY_UTILIZATION_SAMPLES => |of_share| of_share.memory,
        // A share does not use the video engines.
        NVML_ENC_UTILIZATION_SAMPLES
        | NVML_DEC_UTILIZATION_SAMPLES
        | NVML_JPG_UTILIZATION_SAMPLES
        | NVML_OFA_UTILIZATION_SAMPLES => |_| 0,
        // SAFETY: the caller's arguments.
        _ => return unsafe { original(device, kind, since_us, value_type, count, samples) },
    };
    let gpu = match target(device) {
        Target::Limited(gpu) if !value_type.is_null() && !count.is_null() => gpu,
        Target::Denied => return NVML_ERROR_NOT_SUPPORTED,
        Target::Limited(_) | Target::Unlimited => {
            // SAFETY: the caller's arguments.
            return unsafe { original(device, kind, since_us, value_type, count, samples) };
        }
    };
    let mut of_gpu = 0;
    // SAFETY: without an array NVML only writes the needed length.
    let result = unsafe {
        original(
            device,
            kind,
            since_us,
            value_type,
            &raw mut of_gpu,
            ptr::null_mut(),
        )
    };
    if result != NVML_SUCCESS {
        return result;
    }
    // SAFETY: not null, or NVML had failed.
    unsafe { value_type.write(NVML_VALUE_TYPE_UNSIGNED_INT) };
    // SAFETY: not null.
    let room = unsafe { count.read() };
    // SAFETY: not null.
    unsafe { count.write(1) };
    if samples.is_null() {
        return NVML_SUCCESS;
    }
    let now_us = sys::epoch_us();
    if now_us.saturating_sub(since_us) < SAMPLE_US || room == 0 {
        return NVML_ERROR_NOT_FOUND;
    }
    match of_share(gpu, device) {
        Ok(of_share) => {
            let sample = nvmlSample_t {
                timeStamp: now_us,
                sampleValue: value(of_share).into(),
            };
            // SAFETY: the array has at least one entry.
            unsafe { samples.write(sample) };
            NVML_SUCCESS
        }
        Err(error) => error,
    }
}
