//! Virtual memory management: physical memory with handles, and mappings of it.
//!
//! Physical memory lives until its last handle is released **and** its last mapping is gone. Address ranges by
//! themselves take nothing. Memory that was exported stays charged until the process ends: the exported handle
//! may be open in another process, where it keeps the memory alive unseen. Whoever imports it pays when it is mapped,
//! which is when its size is known, unless it is of the same share; see [`crate::imports`].

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr::NonNull;

use crate::card::{Card, Target, target_of_device};
use crate::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUdeviceptr,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUresult,
};
use crate::driver::{Library, Original};
use crate::held::Held;
use crate::hooks::memory::Request;
use crate::hooks::multicast;
use crate::process::Process;
use crate::table::{
    cuMemCreate, cuMemExportToShareableHandle, cuMemImportFromShareableHandle, cuMemMap,
    cuMemRelease, cuMemRetainAllocationHandle, cuMemUnmap,
};

/// One handle in the count of references that stands in `Held::context`.
const HANDLE: u64 = 1 << 32;
/// One mapping there.
const MAPPING: u64 = 1;
/// Where their numbers are.
const HANDLES: u64 = (1 << 56) - HANDLE;
const MAPPINGS: u64 = HANDLE - 1;
/// Exported handles, however many.
const EXPORTED: u64 = 1 << 56;
/// No reference: the memory is another process's. Its `bytes` are what is known of its size.
const IMPORTED: u64 = 1 << 57;

static GET_PROPERTIES: Original =
    Original::new(Library::Cuda, c"cuMemGetAllocationPropertiesFromHandle");
type GetProperties =
    unsafe extern "C" fn(*mut CUmemAllocationProp, CUmemGenericAllocationHandle) -> CUresult;

/// The device that memory is on.
pub(crate) fn device_of(handle: CUmemGenericAllocationHandle) -> Option<CUdevice> {
    let get = GET_PROPERTIES.address()?;
    // SAFETY: the signature of `cuMemGetAllocationPropertiesFromHandle`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetProperties>(get) };
    let mut properties = MaybeUninit::<CUmemAllocationProp>::zeroed();
    // SAFETY: writes one set of properties.
    let result = unsafe { get(properties.as_mut_ptr(), handle) };
    // SAFETY: all zeroes is a set of properties.
    let location = unsafe { properties.assume_init() }.location;
    let is_on_card = result == CUDA_SUCCESS && location.r#type == CU_MEM_LOCATION_TYPE_DEVICE;
    is_on_card.then_some(location.id)
}

/// The limited card that memory is on.
fn card_of(handle: CUmemGenericAllocationHandle) -> Option<Card> {
    match target_of_device(device_of(handle)?) {
        Target::Limited(card) => Some(card),
        Target::Unlimited | Target::Refused => None,
    }
}

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
        Some(held) => give_back_if_unreferenced(process, handle, held),
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
        let mut is_first = false;
        let exported = change_references(process, handle, None, |count| {
            is_first = count & (EXPORTED | IMPORTED) == 0;
            count | EXPORTED
        });
        if let Some(held) = exported.filter(|_| is_first)
            && let Some(card) = Card::at(process, held.card)
        {
            card.export(held.bytes);
        }
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
        // SAFETY: the driver has written the handle.
        let handle = unsafe { handle.read() };
        let known = change_references(process, handle, None, |count| count.saturating_add(HANDLE));
        match card_of(handle).filter(|_| known.is_none()) {
            Some(card) => {
                let held = Held {
                    bytes: 0,
                    card: card.index(),
                    context: HANDLE | IMPORTED,
                };
                process.physical.insert(handle, held);
            }
            None if known.is_none() => know_object(process, handle),
            None => {}
        }
    }
    result
}

/// Notes a handle of something that is no memory of the share, but can hold some: a multicast object.
pub(crate) fn know_object(process: &Process, handle: CUmemGenericAllocationHandle) {
    let held = Held {
        bytes: 0,
        card: u8::MAX,
        context: HANDLE,
    };
    process.physical.insert(handle, held);
}

/// Notes one more use of memory beside its handles; `false` if it is not the share's.
pub(crate) fn add_mapping(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    change_references(process, handle, None, |count| count.saturating_add(MAPPING)).is_some()
}

/// Takes back what [`add_mapping`] noted.
pub(crate) fn drop_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    if let Some(held) = drop_reference(process, handle, MAPPING) {
        give_back_if_unreferenced(process, handle, held);
    }
}

/// Pays for imported memory that turns out to have at least `bytes`, and returns for how much.
fn pay_for_import(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
    bytes: u64,
) -> Result<u64, CUresult> {
    let known = process.physical.get(handle);
    let Some(held) = known.filter(|held| held.context & IMPORTED != 0) else {
        return Ok(0);
    };
    let more = bytes.saturating_sub(held.bytes);
    match Card::at(process, held.card) {
        Some(card) if more != 0 => match card.import(more) {
            Ok(()) => Ok(more),
            Err(_) => Err(CUDA_ERROR_OUT_OF_MEMORY),
        },
        _ => Ok(0),
    }
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
    let end = (offset as u64).saturating_add(bytes as u64);
    let paid = match pay_for_import(process, handle, end) {
        Ok(paid) => paid,
        Err(result) => return result,
    };
    let result = call();
    if result != CUDA_SUCCESS {
        let known = process.physical.get(handle).filter(|_| paid != 0);
        if let Some(card) = known.and_then(|held| Card::at(process, held.card)) {
            card.end_import(paid);
        }
        return result;
    }
    let counted = change(process, handle, None, |held| Held {
        bytes: held.bytes.saturating_add(paid),
        context: held.context.saturating_add(MAPPING),
        ..held
    });
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
        drop_mapping(process, mapping.context);
        at = at.saturating_add(mapping.bytes.max(1));
    }
    result
}

/// Takes one reference off the physical memory, if it has one of that kind, and returns what is left; it stays known
/// while that is something.
fn drop_reference(process: &Process, handle: u64, reference: u64) -> Option<Held> {
    let _guard = process.guard();
    let kind = if reference == HANDLE {
        HANDLES
    } else {
        MAPPINGS
    };
    process
        .physical
        .get(handle)
        .filter(|held| held.context & kind != 0)?;
    let held = process.physical.remove(handle)?;
    let left = Held {
        context: held.context.saturating_sub(reference),
        ..held
    };
    if is_referenced(left) {
        process.physical.insert(handle, left);
    }
    Some(left)
}

fn is_referenced(held: Held) -> bool {
    held.context & !IMPORTED != 0
}

/// Changes the count of references of physical memory that is known, or was until now as `dropped`.
fn change_references(
    process: &Process,
    handle: u64,
    dropped: Option<Held>,
    count: impl FnOnce(u64) -> u64,
) -> Option<Held> {
    change(process, handle, dropped, |held| Held {
        context: count(held.context),
        ..held
    })
}

fn change(
    process: &Process,
    handle: u64,
    dropped: Option<Held>,
    change: impl FnOnce(Held) -> Held,
) -> Option<Held> {
    let _guard = process.guard();
    let held = process.physical.remove(handle).or(dropped)?;
    let changed = change(held);
    process.physical.insert(handle, changed);
    Some(changed)
}

fn give_back_if_unreferenced(process: &'static Process, handle: u64, left: Held) {
    if is_referenced(left) {
        return;
    }
    if left.card == u8::MAX {
        multicast::forget(process, handle);
    } else if let Some(card) = Card::at(process, left.card) {
        if left.context & IMPORTED == 0 {
            card.release(left.bytes);
        } else {
            card.end_import(left.bytes);
        }
    }
}
