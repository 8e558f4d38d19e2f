//! Physical memory: which handles and mappings keep it alive, and who pays for it.
//!
//! It lives until its last handle is released **and** its last mapping is gone: to addresses, to a sparse array, or to a
//! multicast object. Memory that was exported stays charged until the process ends: the exported handle may be open in
//! another process, where it keeps the memory alive unseen. Whoever imports it pays when it is mapped, which is when its
//! size is known, unless it is of the same share; see [`crate::imports`].
//!
//! A mapping is counted before the driver makes it, or another thread could release the memory unseen.

use core::ffi::c_void;
use core::mem::MaybeUninit;
use core::ptr::NonNull;

use crate::card::{Card, Target, target_of_device};
use crate::charge_map::Charge;
use crate::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_SUCCESS, CUdevice, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUresult,
};
use crate::driver::{Library, Original};
use crate::hooks::driver_cache::reserve_with;
use crate::process::Process;

/// One handle in the count of references that stands in `Charge::context`.
pub(crate) const HANDLE: u64 = 1 << 32;
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
        Target::Unlimited | Target::Denied => None,
    }
}

/// Notes a handle of something that is no memory of the share, but can hold some: a multicast object.
pub(crate) fn add_object(process: &Process, handle: CUmemGenericAllocationHandle) {
    let held = Charge {
        bytes: 0,
        card: u8::MAX,
        context: HANDLE,
    };
    process.physical.insert(handle, held);
}

/// Notes a handle that the driver has made of something that was imported.
pub(crate) fn add_import(process: &Process, handle: CUmemGenericAllocationHandle) {
    let card = card_of(handle);
    // Another thread may have got the same one.
    let _guard = process.guard();
    if add_handle(process, handle) {
        return;
    }
    let Some(card) = card else {
        return add_object(process, handle);
    };
    let held = Charge {
        bytes: 0,
        card: card.index(),
        context: HANDLE | IMPORTED,
    };
    process.physical.insert(handle, held);
}

/// Notes one more handle of memory that is known; `false` if it is not.
pub(crate) fn add_handle(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    change(process, handle, |count| count.saturating_add(HANDLE)).is_some()
}

/// Notes one more use of memory beside its handles; `false` if it is not the share's.
pub(crate) fn add_mapping(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    change(process, handle, |count| count.saturating_add(MAPPING)).is_some()
}

/// Takes back what [`add_mapping`] noted.
pub(crate) fn drop_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    if let Some(left) = drop_reference(process, handle, MAPPING, MAPPINGS) {
        release_if_unreferenced(process, handle, left);
    }
}

/// A handle that the driver is about to release.
pub(crate) struct DroppedHandle(Option<Charge>);

/// Takes a handle off, before the driver is asked: afterwards it may have given the same one to another thread.
pub(crate) fn drop_handle(
    process: &Process,
    handle: CUmemGenericAllocationHandle,
) -> DroppedHandle {
    DroppedHandle(drop_reference(process, handle, HANDLE, HANDLES))
}

impl DroppedHandle {
    /// The driver has released it.
    pub(crate) fn confirm(self, process: &'static Process, handle: CUmemGenericAllocationHandle) {
        if let Some(left) = self.0 {
            release_if_unreferenced(process, handle, left);
        }
    }

    /// The driver has not.
    pub(crate) fn restore(self, process: &Process, handle: CUmemGenericAllocationHandle) {
        let Some(left) = self.0 else { return };
        let _guard = process.guard();
        if !add_handle(process, handle) {
            let context = left.context.saturating_add(HANDLE);
            process.physical.insert(handle, Charge { context, ..left });
        }
    }
}

/// Notes that memory may be open in other processes from now on.
pub(crate) fn export(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    let before = change(process, handle, |count| count | EXPORTED);
    if let Some(held) = before.filter(|held| held.context & (EXPORTED | IMPORTED) == 0)
        && let Some(card) = Card::at(process, held.card)
    {
        card.export(held.bytes);
    }
}

/// Counts a mapping of memory up to `bytes` from its beginning, and pays for so much of it if it was imported. `bytes` is
/// asked for only then.
///
/// `Ok(false)` if it is not the share's.
///
/// # Errors
/// The share has not so much; the mapping is not counted then.
pub(crate) fn begin_mapping(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
    bytes: impl FnOnce() -> u64,
) -> Result<bool, Denied> {
    if !add_mapping(process, handle) {
        return Ok(false);
    }
    let known = process.physical.get(handle);
    let is_imported = known.is_some_and(|held| held.context & IMPORTED != 0);
    if is_imported && !charge_import(process, handle, bytes()) {
        cancel_mapping(process, handle);
        return Err(Denied);
    }
    Ok(true)
}

/// There is not so much left of the share.
pub(crate) struct Denied;

/// Pays for imported memory that turns out to have at least `bytes`.
fn charge_import(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
    bytes: u64,
) -> bool {
    let known = process.physical.get(handle);
    let Some(card) = known.and_then(|held| Card::at(process, held.card)) else {
        return true;
    };
    reserve_with(card, || {
        let _guard = process.import_guard();
        let known = process.physical.get(handle);
        let more = bytes.saturating_sub(known.map_or(u64::MAX, |held| held.bytes));
        if more == 0 {
            return true;
        }
        let is_paid = card.import(more).is_ok();
        if is_paid {
            process
                .physical
                .change(handle, |held| Some(Charge { bytes, ..*held }));
        }
        is_paid
    })
}

/// Takes back what [`begin_mapping`] counted, because the driver has not made the mapping. Imported memory that is mapped
/// nowhere is not paid for any more: its size is as unknown as before.
pub(crate) fn cancel_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    let guard = process.import_guard();
    let left = drop_reference(process, handle, MAPPING, MAPPINGS);
    let mut unpaid = None;
    process.physical.change(handle, |held| {
        if held.context & IMPORTED == 0 || held.context & MAPPINGS != 0 {
            return Some(*held);
        }
        unpaid = Some(*held);
        Some(Charge { bytes: 0, ..*held })
    });
    if let Some(held) = unpaid
        && let Some(card) = Card::at(process, held.card)
    {
        card.end_import(held.bytes);
    }
    drop(guard);
    if let Some(left) = left {
        release_if_unreferenced(process, handle, left);
    }
}

/// Takes one reference off the memory, if it has one of that kind, and returns what is left; it stays known while that is
/// something.
fn drop_reference(process: &Process, handle: u64, reference: u64, kind: u64) -> Option<Charge> {
    let mut left = None;
    process.physical.change(handle, |held| {
        if held.context & kind == 0 {
            return Some(*held);
        }
        let context = held.context.saturating_sub(reference);
        let held = *left.insert(Charge { context, ..*held });
        is_referenced(held).then_some(held)
    });
    left
}

fn is_referenced(held: Charge) -> bool {
    held.context & !IMPORTED != 0
}

/// Changes the count of references of memory that is known, and returns what it was.
fn change(process: &Process, handle: u64, count: impl FnOnce(u64) -> u64) -> Option<Charge> {
    process.physical.change(handle, |held| {
        let context = count(held.context);
        Some(Charge { context, ..*held })
    })
}

fn release_if_unreferenced(process: &'static Process, handle: u64, left: Charge) {
    if is_referenced(left) {
        return;
    }
    if left.card == u8::MAX {
        drop_bindings(process, handle);
    } else if let Some(card) = Card::at(process, left.card) {
        if left.context & IMPORTED == 0 {
            card.release(left.bytes);
        } else {
            card.end_import(left.bytes);
        }
    }
}

/// As much of an object's handle as a binding has room for.
fn truncated_handle(object: CUmemGenericAllocationHandle) -> u64 {
    object & 0xffff_ffff_ffff
}

/// Memory that is bound to a multicast object, which [`add_mapping`] has counted.
pub(crate) fn binding(
    object: CUmemGenericAllocationHandle,
    memory: CUmemGenericAllocationHandle,
) -> Charge {
    Charge {
        bytes: truncated_handle(object),
        card: u8::MAX,
        context: memory,
    }
}

/// The object is gone, and with it what was bound.
fn drop_bindings(process: &'static Process, object: CUmemGenericAllocationHandle) {
    let ends = |held: &Charge| held.bytes == truncated_handle(object);
    process.bindings.remove_all(ends, |_, binding| {
        drop_mapping(process, binding.context);
    });
}
