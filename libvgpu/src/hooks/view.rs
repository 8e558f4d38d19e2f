//! How much memory there is: the share, not the card.
//!
//! The driver is always asked first; its errors and its checks of arguments stay its own. Free memory is what is
//! left of the share, or of the card if that is less.

use core::ffi::{c_char, c_uint, c_void};
use core::ptr::NonNull;

use drava_vgpu_abi::DeviceUuid;

use crate::card::{Amount, Target, target_of_current_context, target_of_device};
use crate::cuda::{CUDA_SUCCESS, CUdevice, CUresult};
use crate::driver::{Library, Original};
use crate::hooks::pool;
use crate::nvml::{
    NVML_SUCCESS, UUID_BUFFER_SIZE, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlReturn_t,
};
use crate::process::Process;
use crate::table::{
    cuDeviceTotalMem, cuDeviceTotalMem_v2, cuMemGetInfo, cuMemGetInfo_v2, nvmlDeviceGetMemoryInfo,
    nvmlDeviceGetMemoryInfo_v2,
};

/// A card of which nothing may be taken.
const NOTHING: Amount = Amount {
    limit_bytes: 0,
    used_bytes: 0,
};

/// What to show of the card instead of itself.
fn amount_of(target: Target) -> Option<Amount> {
    match target {
        Target::Unlimited => None,
        Target::Limited(card) => {
            pool::refresh(card);
            Some(card.amount())
        }
        Target::Refused => Some(NOTHING),
    }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

fn size_v1(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}

pub(crate) unsafe fn mem_get_info(
    original: cuMemGetInfo_v2::Function,
    free: *mut usize,
    total: *mut usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(free, total) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_current_context())
    {
        // SAFETY: null or written by the driver.
        if let Some(free) = unsafe { free.as_mut() } {
            *free = size(amount.free_bytes()).min(*free);
        }
        // SAFETY: null or written by the driver.
        if let Some(total) = unsafe { total.as_mut() } {
            *total = size(amount.limit_bytes).min(*total);
        }
    }
    result
}

pub(crate) unsafe fn mem_get_info_v1(
    original: cuMemGetInfo::Function,
    free: *mut c_uint,
    total: *mut c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(free, total) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_current_context())
    {
        // SAFETY: null or written by the driver.
        if let Some(free) = unsafe { free.as_mut() } {
            *free = size_v1(amount.free_bytes()).min(*free);
        }
        // SAFETY: null or written by the driver.
        if let Some(total) = unsafe { total.as_mut() } {
            *total = size_v1(amount.limit_bytes).min(*total);
        }
    }
    result
}

pub(crate) unsafe fn total_mem(
    original: cuDeviceTotalMem_v2::Function,
    bytes: *mut usize,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(bytes, device) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_device(device))
        // SAFETY: null or written by the driver.
        && let Some(bytes) = unsafe { bytes.as_mut() }
    {
        *bytes = size(amount.limit_bytes).min(*bytes);
    }
    result
}

pub(crate) unsafe fn total_mem_v1(
    original: cuDeviceTotalMem::Function,
    bytes: *mut c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(bytes, device) };
    if result == CUDA_SUCCESS
        && let Some(amount) = amount_of(target_of_device(device))
        // SAFETY: null or written by the driver.
        && let Some(bytes) = unsafe { bytes.as_mut() }
    {
        *bytes = size_v1(amount.limit_bytes).min(*bytes);
    }
    result
}

static GET_UUID: Original = Original::new(Library::Nvml, c"nvmlDeviceGetUUID");
type GetUuid = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, c_uint) -> nvmlReturn_t;

/// What applies to the memory of an NVML device. Partitions have UUIDs that no share has.
fn target_of_nvml(device: nvmlDevice_t) -> Target {
    let Some(process) = Process::get() else {
        return Target::Refused;
    };
    let Some(get) = GET_UUID.address() else {
        return Target::Unlimited;
    };
    // SAFETY: the signature of `nvmlDeviceGetUUID`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetUuid>(get) };
    let mut text = [0u8; UUID_BUFFER_SIZE as usize];
    // SAFETY: NVML writes at most that many bytes.
    let result = unsafe { get(device, text.as_mut_ptr().cast(), UUID_BUFFER_SIZE) };
    let uuid = core::ffi::CStr::from_bytes_until_nul(&text)
        .ok()
        .and_then(|text| text.to_str().ok())
        .and_then(|text| text.parse::<DeviceUuid>().ok());
    match uuid {
        Some(uuid) if result == NVML_SUCCESS => match process.target_of(uuid, None) {
            Target::Limited(card) if !card.is_memory_limited() => Target::Unlimited,
            target => target,
        },
        _ => Target::Unlimited,
    }
}

pub(crate) unsafe fn nvml_memory(
    original: nvmlDeviceGetMemoryInfo::Function,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, memory) };
    if result == NVML_SUCCESS
        && let Some(amount) = amount_of(target_of_nvml(device))
        // SAFETY: null or written by NVML.
        && let Some(memory) = unsafe { memory.as_mut() }
    {
        memory.free = amount.free_bytes().min(memory.free);
        memory.total = amount.limit_bytes.min(memory.total);
        memory.used = amount.used_bytes.min(memory.total);
    }
    result
}

pub(crate) unsafe fn nvml_memory_v2(
    original: nvmlDeviceGetMemoryInfo_v2::Function,
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device, memory) };
    if result == NVML_SUCCESS
        && let Some(amount) = amount_of(target_of_nvml(device))
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
