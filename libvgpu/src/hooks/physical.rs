//! Physical memory: the handles and mappings that keep it alive, and its charge.
//!
//! It lives until its last handle is released **and** its last mapping is gone: to addresses, to a sparse array, or
//! to a multicast object. Exported memory stays charged until the process ends: another process may have it open,
//! which is not visible here. An import is charged at its first mapping, when its size is known, unless it belongs
//! to the same share; see [`crate::imports`].
//!
//! A mapping is counted before libcuda makes it; otherwise another thread could release the memory unnoticed.

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

/// One handle in the reference count in `Charge::context`.
pub(crate) const HANDLE: u64 = 1 << 32;
/// One mapping in the reference count.
const MAPPING: u64 = 1;
/// Bits of the two counts.
const HANDLES: u64 = (1 << 56) - HANDLE;
const MAPPINGS: u64 = HANDLE - 1;
/// The memory was exported.
const EXPORTED: u64 = 1 << 56;
/// The memory belongs to another process; not a reference. `bytes` is the known part of its size.
const IMPORTED: u64 = 1 << 57;

static GET_PROPERTIES: Original =
    Original::new(Library::Cuda, c"cuMemGetAllocationPropertiesFromHandle");
type GetProperties =
    unsafe extern "C" fn(*mut CUmemAllocationProp, CUmemGenericAllocationHandle) -> CUresult;

/// Returns the device of the memory.
pub(crate) fn device_of(handle: CUmemGenericAllocationHandle) -> Option<CUdevice> {
    let get = GET_PROPERTIES.address()?;
    // SAFETY: the signature of `cuMemGetAllocationPropertiesFromHandle`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetProperties>(get) };
    let mut properties = MaybeUninit::<CUmemAllocationProp>::zeroed();
    // SAFETY: writes one set of properties.
    let result = unsafe { get(properties.as_mut_ptr(), handle) };
    // SAFETY: all zeroes is a valid set of properties.
    let location = unsafe { properties.assume_init() }.location;
    let is_on_card = result == CUDA_SUCCESS && location.r#type == CU_MEM_LOCATION_TYPE_DEVICE;
    is_on_card.then_some(location.id)
}

/// Returns the limited GPU of the memory.
fn card_of(handle: CUmemGenericAllocationHandle) -> Option<Card> {
    match target_of_device(device_of(handle)?) {
        Target::Limited(card) => Some(card),
        Target::Unlimited | Target::Denied => None,
    }
}

/// Adds a handle of an object without memory that can hold some: a multicast object.
pub(crate) fn add_object(process: &Process, handle: CUmemGenericAllocationHandle) {
    let charge = Charge {
        bytes: 0,
        card: u8::MAX,
        context: HANDLE,
    };
    process.physical.insert(handle, charge);
}

/// Adds a handle from an import.
pub(crate) fn add_import(process: &Process, handle: CUmemGenericAllocationHandle) {
    let card = card_of(handle);
    // Another thread may have got the same handle.
    let _guard = process.guard();
    if add_handle(process, handle) {
        return;
    }
    let Some(card) = card else {
        return add_object(process, handle);
    };
    let charge = Charge {
        bytes: 0,
        card: card.index(),
        context: HANDLE | IMPORTED,
    };
    process.physical.insert(handle, charge);
}

/// Adds a handle of known memory; `false` if the memory is unknown.
pub(crate) fn add_handle(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    change(process, handle, |count| count.saturating_add(HANDLE)).is_some()
}

/// Adds a mapping of known memory; `false` if the memory is not the share's.
pub(crate) fn add_mapping(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    change(process, handle, |count| count.saturating_add(MAPPING)).is_some()
}

/// Reverts [`add_mapping`].
pub(crate) fn drop_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    if let Some(remaining) = drop_reference(process, handle, MAPPING, MAPPINGS) {
        release_if_unreferenced(process, handle, remaining);
    }
}

/// A handle that libcuda is about to release.
pub(crate) struct DroppedHandle(Option<Charge>);

/// Removes a handle before libcuda is called: afterwards another thread may have got the same handle.
pub(crate) fn drop_handle(
    process: &Process,
    handle: CUmemGenericAllocationHandle,
) -> DroppedHandle {
    DroppedHandle(drop_reference(process, handle, HANDLE, HANDLES))
}

impl DroppedHandle {
    /// Confirms that libcuda released the handle.
    pub(crate) fn confirm(self, process: &'static Process, handle: CUmemGenericAllocationHandle) {
        if let Some(remaining) = self.0 {
            release_if_unreferenced(process, handle, remaining);
        }
    }

    /// Restores the handle, which libcuda did not release.
    pub(crate) fn restore(self, process: &Process, handle: CUmemGenericAllocationHandle) {
        let Some(remaining) = self.0 else { return };
        let _guard = process.guard();
        if !add_handle(process, handle) {
            let context = remaining.context.saturating_add(HANDLE);
            process.physical.insert(
                handle,
                Charge {
                    context,
                    ..remaining
                },
            );
        }
    }
}

/// Records that other processes may open the memory.
pub(crate) fn export(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    let before = change(process, handle, |count| count | EXPORTED);
    if let Some(charge) = before.filter(|charge| charge.context & (EXPORTED | IMPORTED) == 0)
        && let Some(card) = Card::at(process, charge.card)
    {
        card.export(charge.bytes);
    }
}

/// Adds a mapping of memory up to `bytes` from its start, and charges that part of imported memory. `bytes` is
/// called only for that.
///
/// Returns `Ok(false)` if the memory is not the share's.
///
/// # Errors
/// The limit is exceeded; then the mapping is not counted.
pub(crate) fn begin_mapping(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
    bytes: impl FnOnce() -> u64,
) -> Result<bool, Denied> {
    if !add_mapping(process, handle) {
        return Ok(false);
    }
    let known = process.physical.get(handle);
    let is_imported = known.is_some_and(|charge| charge.context & IMPORTED != 0);
    if is_imported && !charge_import(process, handle, bytes()) {
        cancel_mapping(process, handle);
        return Err(Denied);
    }
    Ok(true)
}

/// Denial: the limit is exceeded.
pub(crate) struct Denied;

/// Charges imported memory that has at least `bytes`.
fn charge_import(
    process: &'static Process,
    handle: CUmemGenericAllocationHandle,
    bytes: u64,
) -> bool {
    let known = process.physical.get(handle);
    let Some(card) = known.and_then(|charge| Card::at(process, charge.card)) else {
        return true;
    };
    reserve_with(card, || {
        let _guard = process.import_guard();
        let known = process.physical.get(handle);
        let more = bytes.saturating_sub(known.map_or(u64::MAX, |charge| charge.bytes));
        if more == 0 {
            return true;
        }
        let is_paid = card.import(more).is_ok();
        if is_paid {
            process
                .physical
                .change(handle, |charge| Some(Charge { bytes, ..*charge }));
        }
        is_paid
    })
}

/// Reverts [`begin_mapping`] after libcuda failed. Imported memory without a mapping is not charged: its size is
/// unknown again.
pub(crate) fn cancel_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    let guard = process.import_guard();
    let remaining = drop_reference(process, handle, MAPPING, MAPPINGS);
    let mut unpaid = None;
    process.physical.change(handle, |charge| {
        if charge.context & IMPORTED == 0 || charge.context & MAPPINGS != 0 {
            return Some(*charge);
        }
        unpaid = Some(*charge);
        Some(Charge {
            bytes: 0,
            ..*charge
        })
    });
    if let Some(charge) = unpaid
        && let Some(card) = Card::at(process, charge.card)
    {
        card.end_import(charge.bytes);
    }
    drop(guard);
    if let Some(remaining) = remaining {
        release_if_unreferenced(process, handle, remaining);
    }
}

/// Removes one reference of that kind, if there is one, and returns the remaining charge. Memory without references
/// is removed.
fn drop_reference(process: &Process, handle: u64, reference: u64, kind: u64) -> Option<Charge> {
    let mut remaining = None;
    process.physical.change(handle, |charge| {
        if charge.context & kind == 0 {
            return Some(*charge);
        }
        let context = charge.context.saturating_sub(reference);
        let charge = *remaining.insert(Charge { context, ..*charge });
        is_referenced(charge).then_some(charge)
    });
    remaining
}

fn is_referenced(charge: Charge) -> bool {
    charge.context & !IMPORTED != 0
}

/// Changes the reference count of known memory and returns its previous charge.
fn change(process: &Process, handle: u64, count: impl FnOnce(u64) -> u64) -> Option<Charge> {
    process.physical.change(handle, |charge| {
        let context = count(charge.context);
        Some(Charge { context, ..*charge })
    })
}

fn release_if_unreferenced(process: &'static Process, handle: u64, remaining: Charge) {
    if is_referenced(remaining) {
        return;
    }
    if remaining.card == u8::MAX {
        drop_bindings(process, handle);
    } else if let Some(card) = Card::at(process, remaining.card) {
        if remaining.context & IMPORTED == 0 {
            card.release(remaining.bytes);
        } else {
            card.end_import(remaining.bytes);
        }
    }
}

/// Truncates an object's handle to the size of [`Charge::bytes`].
fn truncated_handle(object: CUmemGenericAllocationHandle) -> u64 {
    object & 0xffff_ffff_ffff
}

/// Returns the binding of memory to a multicast object, counted by [`add_mapping`].
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

/// Removes the bindings of a destroyed object.
fn drop_bindings(process: &'static Process, object: CUmemGenericAllocationHandle) {
    let ends = |charge: &Charge| charge.bytes == truncated_handle(object);
    process.bindings.remove_all(ends, |_, binding| {
        drop_mapping(process, binding.context);
    });
}
