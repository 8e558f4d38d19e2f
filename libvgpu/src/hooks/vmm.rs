//! Virtual memory management: handles of physical memory, and its mappings to addresses. [`crate::hooks::physical`]
//! counts them. An address range without a mapping uses no memory.

use core::ffi::{c_int, c_void};

use crate::accounts::records::Mapping;
use crate::current::{Target, target_of_device};
use crate::driver_api::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult,
};
use crate::driver_api::functions::{
    cuMemCreate, cuMemExportToShareableHandle, cuMemImportFromShareableHandle, cuMemMap,
    cuMemRelease, cuMemRetainAllocationHandle, cuMemUnmap,
};
use crate::hooks::driver_cache::reserve;
use crate::hooks::ending_references::{EndingReferences, end_references};
use crate::hooks::exported;
use crate::hooks::physical::{self, Denied};
use crate::process::Process;

pub(crate) unsafe fn create(
    original: cuMemCreate::Function,
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
) -> CUresult {
    // SAFETY: null or the caller's properties.
    let location = unsafe { properties.as_ref() }.map(|properties| properties.location);
    let target = match location {
        Some(location) if location.r#type == CU_MEM_LOCATION_TYPE_DEVICE => {
            target_of_device(location.id)
        }
        // Host memory, or no properties, which libcuda rejects.
        _ => Target::Unlimited,
    };
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(handle, bytes, properties, flags) };
    // libcuda rejects sizes that are no multiple of its granularity.
    let size = bytes as u64;
    let gpu = match target {
        Target::Unlimited => return call(),
        Target::Denied => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(gpu) if reserve(gpu, size) => gpu,
        Target::Limited(_) => return CUDA_ERROR_OUT_OF_MEMORY,
    };
    let result = call();
    if result == CUDA_SUCCESS {
        // SAFETY: libcuda has written the handle.
        let key = unsafe { handle.read() };
        let memory = physical::new(gpu.index(), size);
        Process::of(gpu).physical.insert(key, memory);
    } else {
        gpu.release(size);
    }
    result
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`. Handles of other types keep no memory alive.
const FILE_DESCRIPTOR: c_int = 1;

pub(crate) unsafe fn release(
    original: cuMemRelease::Function,
    handle: CUmemGenericAllocationHandle,
) -> CUresult {
    end_references(
        |process| EndingReferences::of_handle(process, handle),
        // SAFETY: the caller's arguments.
        || unsafe { original(handle) },
    )
}

pub(crate) unsafe fn retain(
    original: cuMemRetainAllocationHandle::Function,
    handle: *mut CUmemGenericAllocationHandle,
    address: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(handle, address) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: libcuda has written the handle.
        physical::add_handle(process, unsafe { handle.read() });
    }
    result
}

pub(crate) unsafe fn export(
    original: cuMemExportToShareableHandle::Function,
    shareable: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: c_int,
    flags: u64,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(shareable, handle, kind, flags) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        let fd = (kind == FILE_DESCRIPTOR).then_some(shareable.cast::<c_int>());
        // SAFETY: libcuda has written the descriptor.
        exported::add(process, handle, fd.map(|fd| unsafe { fd.read() }));
    }
    result
}

pub(crate) unsafe fn import(
    original: cuMemImportFromShareableHandle::Function,
    handle: *mut CUmemGenericAllocationHandle,
    shareable: *mut c_void,
    kind: c_int,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(handle, shareable, kind) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: libcuda has written the handle.
        physical::add_import(process, unsafe { handle.read() });
    }
    result
}

pub(crate) unsafe fn map(
    original: cuMemMap::Function,
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(address, bytes, offset, handle, flags) };
    let Some(process) = Process::get() else {
        return call();
    };
    let end = || (offset as u64).saturating_add(bytes as u64);
    match physical::begin_mapping(process, handle, end) {
        Ok(true) => {}
        Ok(false) => return call(),
        Err(Denied) => return CUDA_ERROR_OUT_OF_MEMORY,
    }
    let result = call();
    if result == CUDA_SUCCESS {
        let mapping = Mapping {
            memory: handle,
            bytes: bytes as u64,
        };
        process.mappings.insert(address, mapping);
    } else {
        physical::cancel_mapping(process, handle);
    }
    result
}

pub(crate) unsafe fn unmap(
    original: cuMemUnmap::Function,
    address: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    end_references(
        |process| EndingReferences::of_addresses(process, address, bytes as u64),
        // SAFETY: the caller's arguments.
        || unsafe { original(address, bytes) },
    )
}
