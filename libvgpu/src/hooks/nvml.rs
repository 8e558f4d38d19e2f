//! NVML's view of a GPU: the share, with its own processes and its own use.
//!
//! NVML is called first, so its errors and argument checks are its own: a lost GPU, a struct of an unknown version,
//! an uninitialized library. If the share's value is unknown, the result is `NVML_ERROR_NOT_SUPPORTED`, never the
//! value of the whole GPU.
//!
//! Handles, indices, UUIDs and PCI data are NVML's own: the container's device files define the visible GPUs.

use core::ffi::{CStr, c_char, c_uint};

use drava_vgpu_abi::DeviceUuid;

use crate::current::{Target, target_of};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::{
    nvmlDeviceGetConfComputeMemSizeInfo, nvmlDeviceGetMemoryInfo, nvmlDeviceGetMemoryInfo_v2,
};
use crate::driver_api::nvml::{
    NVML_SUCCESS, UUID_BUFFER_SIZE, nvmlConfComputeMemSizeInfo_t, nvmlDevice_t, nvmlMemory_t,
    nvmlMemory_v2_t, nvmlReturn_t,
};
use crate::hooks::memory_info::amount_of;
use crate::process::Process;

pub(crate) mod accounting;
pub(crate) mod events;
pub(crate) mod fields;
pub(crate) mod processes;
pub(crate) mod utilization;
pub(crate) mod video;
pub(crate) mod whole_gpu;

static GET_UUID: Original<GetUuid> = Original::new(Library::Nvml, c"nvmlDeviceGetUUID");
type GetUuid = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;

/// Returns the limit that applies to an NVML device. MIG devices have UUIDs that no share has.
fn target(device: nvmlDevice_t) -> Target {
    let Some(process) = Process::get() else {
        return Target::Denied;
    };
    let Some(get) = GET_UUID.get() else {
        return Target::Unlimited;
    };
    let mut text = [0u8; UUID_BUFFER_SIZE as usize];
    // SAFETY: NVML writes at most that many bytes.
    let result = unsafe { get(device, text.as_mut_ptr().cast(), UUID_BUFFER_SIZE) };
    let uuid = CStr::from_bytes_until_nul(&text)
        .ok()
        .and_then(|text| text.to_str().ok())
        .and_then(|text| text.parse::<DeviceUuid>().ok());
    match uuid {
        Some(uuid) if result == NVML_SUCCESS => target_of(process, uuid, None),
        _ => Target::Unlimited,
    }
}

/// Returns whether NVML's values of the device include those of other shares.
fn is_shared(device: nvmlDevice_t) -> bool {
    !matches!(target(device), Target::Unlimited)
}

/// Returns the limit that applies to the memory of an NVML device.
fn memory_target(device: nvmlDevice_t) -> Target {
    match target(device) {
        Target::Limited(gpu) if !gpu.is_memory_limited() => Target::Unlimited,
        target => target,
    }
}

pub(crate) unsafe fn memory(
    original: nvmlDeviceGetMemoryInfo::Function,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, memory) };
    if result == NVML_SUCCESS
        && let Some(amount) = amount_of(memory_target(device))
        // SAFETY: null or written by NVML.
        && let Some(memory) = unsafe { memory.as_mut() }
    {
        memory.free = amount.free_bytes().min(memory.free);
        memory.total = amount.limit_bytes.min(memory.total);
        memory.used = amount.used_bytes.min(memory.total);
    }
    result
}

pub(crate) unsafe fn memory_v2(
    original: nvmlDeviceGetMemoryInfo_v2::Function,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, memory) };
    if result == NVML_SUCCESS
        && let Some(amount) = amount_of(memory_target(device))
        // SAFETY: null or written by NVML.
        && let Some(memory) = unsafe { memory.as_mut() }
    {
        memory.free = amount.free_bytes().min(memory.free);
        memory.total = amount.limit_bytes.min(memory.total);
        memory.used = amount.used_bytes.min(memory.total);
        memory.reserved = 0;
    }
    result
}

/// The two parts of the GPU's memory, of which the share has as much as its limit.
pub(crate) unsafe fn confidential_sizes(
    original: nvmlDeviceGetConfComputeMemSizeInfo::Function,
    device: nvmlDevice_t,
    sizes: *mut nvmlConfComputeMemSizeInfo_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, sizes) };
    if result == NVML_SUCCESS
        && let Some(amount) = amount_of(memory_target(device))
        // SAFETY: null or written by NVML.
        && let Some(sizes) = unsafe { sizes.as_mut() }
    {
        let limit_kib = amount.limit_bytes >> 10;
        sizes.protectedMemSizeKib = sizes.protectedMemSizeKib.min(limit_kib);
        let rest_kib = limit_kib.saturating_sub(sizes.protectedMemSizeKib);
        sizes.unprotectedMemSizeKib = sizes.unprotectedMemSizeKib.min(rest_kib);
    }
    result
}
