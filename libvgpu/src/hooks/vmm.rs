//! Virtual memory management: physical memory with handles, and mappings of it.
//!
//! Physical memory lives until its last handle is released **and** its last mapping is gone. Address ranges by
//! themselves take nothing. Memory that was exported stays charged until the process ends: the exported handle
//! may be open in another process, where it keeps the memory alive unseen. Whoever imports it is not charged.

use core::ffi::{c_int, c_void};

use crate::card::{Card, Target, target_of_device};
use crate::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_SUCCESS, CUdeviceptr, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUresult,
};
use crate::held::Held;
use crate::hooks::memory::Request;
use crate::process::Process;
use crate::table::{
    cuMemCreate, cuMemExportToShareableHandle, cuMemMap, cuMemRelease, cuMemRetainAllocationHandle,
    cuMemUnmap,
};

/// One handle in the count of references that stands in `Held::context`.
const HANDLE: u64 = 1 << 32;
/// One mapping there.
const MAPPING: u64 = 1;
/// Exported handles, however many.
const EXPORTED: u64 = 1 << 56;

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
        // Host memory, or no properties, which the driver refuses.
        _ => Target::Unlimited,
    };
    let request = Request {
        target,
        // The driver refuses sizes that are no multiple of its granularity.
        bytes: bytes as u64,
        context: || HANDLE,
    };
    request.make(
        |process| &process.physical,
        // SAFETY: the caller's arguments.
        || unsafe { original(handle, bytes, properties, flags) },
        // SAFETY: the driver has written the handle.
        || unsafe { handle.read() },
    )
}

pub(crate) unsafe fn release(
    original: cuMemRelease::Function,
    handle: CUmemGenericAllocationHandle,
) -> CUresult {
    let Some(process) = Process::get() else {
        // SAFETY: the caller's arguments.
        return unsafe { original(handle) };
    };
    // The reference is dropped first: afterwards the driver may have given the same handle to another thread.
    let dropped = drop_reference(process, handle, HANDLE);
    // SAFETY: the caller's arguments.
    let result = unsafe { original(handle) };
    match dropped {
        Some(held) if result != CUDA_SUCCESS => {
            change_references(process, handle, Some(held), |count| {
                count.saturating_add(HANDLE)
            });
        }
        Some(held) => give_back_if_unreferenced(process, held),
        None => {}
    }
    result
}

pub(crate) unsafe fn retain(
    original: cuMemRetainAllocationHandle::Function,
    handle: *mut CUmemGenericAllocationHandle,
    address: *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(handle, address) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: the driver has written the handle.
        let handle = unsafe { handle.read() };
        change_references(process, handle, None, |count| count.saturating_add(HANDLE));
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
        change_references(process, handle, None, |count| count | EXPORTED);
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
    let result = unsafe { original(address, bytes, offset, handle, flags) };
    let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) else {
        return result;
    };
    let counted = change_references(process, handle, None, |count| count.saturating_add(MAPPING));
    if let Some(held) = counted {
        let mapping = Held {
            bytes: bytes as u64,
            card: held.card,
            context: handle,
        };
        process.mappings.insert(address, mapping);
    }
    result
}

pub(crate) unsafe fn unmap(
    original: cuMemUnmap::Function,
    address: CUdeviceptr,
    bytes: usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(address, bytes) };
    let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) else {
        return result;
    };
    // The range is made of whole mappings; the driver refuses others.
    let end = address.saturating_add(bytes as u64);
    let mut at = address;
    while at < end {
        let Some(mapping) = process.mappings.remove(at) else {
            break;
        };
        if let Some(held) = drop_reference(process, mapping.context, MAPPING) {
            give_back_if_unreferenced(process, held);
        }
        at = at.saturating_add(mapping.bytes.max(1));
    }
    result
}

/// Takes one reference off the physical memory and returns what is left; it stays known while that is something.
fn drop_reference(process: &Process, handle: u64, reference: u64) -> Option<Held> {
    let _guard = process.guard();
    let held = process.physical.remove(handle)?;
    let left = Held {
        context: held.context.saturating_sub(reference),
        ..held
    };
    if left.context != 0 {
        process.physical.insert(handle, left);
    }
    Some(left)
}

/// Changes the count of references of physical memory that is known, or was until now as `dropped`.
fn change_references(
    process: &Process,
    handle: u64,
    dropped: Option<Held>,
    change: impl FnOnce(u64) -> u64,
) -> Option<Held> {
    let _guard = process.guard();
    let held = process.physical.remove(handle).or(dropped)?;
    let changed = Held {
        context: change(held.context),
        ..held
    };
    process.physical.insert(handle, changed);
    Some(changed)
}

fn give_back_if_unreferenced(process: &'static Process, left: Held) {
    if left.context == 0
        && let Some(card) = Card::at(process, left.card)
    {
        card.release(left.bytes);
    }
}
