//! Physical memory: the references that keep it alive, and its charge.
//!
//! It lives until its last handle is released, its last mapping is gone (to addresses, to a sparse array, or to a
//! multicast object), and the last file descriptor of it is closed; see [`exported`]. An import is charged at its
//! first mapping, when its size is known, unless it belongs to the same share; see [`crate::limits::imports`].
//!
//! A mapping is counted before libcuda makes it; otherwise another thread could release the memory unnoticed.
//! Handle values recur, so a record never outlives its last handle and mapping.

use core::mem::MaybeUninit;

use crate::accounts::records::{Binding, NO_GPU, Origin, Physical};
use crate::current::{Target, target_of_device};
use crate::driver_api::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CUDA_SUCCESS, CUdevice, CUmemAllocationProp,
    CUmemGenericAllocationHandle, CUresult,
};
use crate::driver_api::driver::{Library, Original};
use crate::hooks::driver_cache::reserve_with;
use crate::hooks::exported::{self, Descriptors};
use crate::limits::gpu::Gpu;
use crate::process::Process;

static GET_PROPERTIES: Original<GetProperties> =
    Original::new(Library::Cuda, c"cuMemGetAllocationPropertiesFromHandle");
type GetProperties =
    unsafe extern "C" fn(*mut CUmemAllocationProp, CUmemGenericAllocationHandle) -> CUresult;

/// Returns the device of the memory.
pub(crate) fn device_of(handle: CUmemGenericAllocationHandle) -> Option<CUdevice> {
    let get = GET_PROPERTIES.get()?;
    let mut properties = MaybeUninit::<CUmemAllocationProp>::zeroed();
    // SAFETY: writes one set of properties.
    let result = unsafe { get(properties.as_mut_ptr(), handle) };
    // SAFETY: all zeroes is a valid set of properties.
    let location = unsafe { properties.assume_init() }.location;
    let is_on_gpu = result == CUDA_SUCCESS && location.r#type == CU_MEM_LOCATION_TYPE_DEVICE;
    is_on_gpu.then_some(location.id)
}

/// Returns the limited GPU of the memory.
fn gpu_of(handle: CUmemGenericAllocationHandle) -> Option<Gpu> {
    match target_of_device(device_of(handle)?) {
        Target::Limited(gpu) => Some(gpu),
        Target::Unlimited | Target::Denied => None,
    }
}

/// Returns the record of new memory with one handle.
pub(crate) fn new(gpu: u8, bytes: u64) -> Physical {
    Physical {
        bytes,
        gpu,
        origin: Origin::Own,
        handles: 1,
        mappings: 0,
    }
}

/// Adds a handle of an object without memory that can hold some: a multicast object.
pub(crate) fn add_object(process: &Process, handle: CUmemGenericAllocationHandle) {
    process.physical.insert(handle, new(NO_GPU, 0));
}

/// Adds a handle from an import.
pub(crate) fn add_import(process: &Process, handle: CUmemGenericAllocationHandle) {
    let gpu = gpu_of(handle);
    // Another thread may have got the same handle.
    let _guard = process.import_guard();
    if add_handle(process, handle) {
        return;
    }
    let Some(gpu) = gpu else {
        return add_object(process, handle);
    };
    let imported = Physical {
        origin: Origin::Imported,
        ..new(gpu.index(), 0)
    };
    process.physical.insert(handle, imported);
}

/// Adds a handle of known memory; `false` if the memory is unknown.
pub(crate) fn add_handle(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    process.physical.change(handle, with_handle).is_some()
}

/// Adds a mapping of known memory; `false` if the memory is not the share's.
pub(crate) fn add_mapping(process: &Process, handle: CUmemGenericAllocationHandle) -> bool {
    process.physical.change(handle, with_mapping).is_some()
}

fn with_handle(memory: &Physical) -> Option<Physical> {
    Some(Physical {
        handles: memory.handles.saturating_add(1),
        ..*memory
    })
}

fn with_mapping(memory: &Physical) -> Option<Physical> {
    Some(Physical {
        mappings: memory.mappings.saturating_add(1),
        ..*memory
    })
}

/// Removes a mapping that libcuda has ended.
pub(crate) fn drop_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    begin_drop_mapping(process, handle).confirm(process);
}

/// A reference that libcuda is about to end. It is removed before: afterwards other memory may have the same handle.
///
/// The last reference takes the record and its charge along.
#[derive(Clone, Copy)]
pub(crate) struct DroppedReference {
    handle: CUmemGenericAllocationHandle,
    /// `None` if the memory had no such reference.
    dropped: Option<Remaining>,
    restore: fn(&Physical) -> Option<Physical>,
}

/// What remains of memory without a reference.
#[derive(Clone, Copy)]
struct Remaining {
    memory: Physical,
    /// File descriptors that may keep it alive without references.
    descriptors: Descriptors,
}

/// Removes a handle.
pub(crate) fn begin_drop_handle(
    process: &Process,
    handle: CUmemGenericAllocationHandle,
) -> DroppedReference {
    DroppedReference {
        handle,
        dropped: drop_reference(process, handle, without_handle),
        restore: with_handle,
    }
}

/// Removes a mapping.
pub(crate) fn begin_drop_mapping(
    process: &Process,
    handle: CUmemGenericAllocationHandle,
) -> DroppedReference {
    DroppedReference {
        handle,
        dropped: drop_reference(process, handle, without_mapping),
        restore: with_mapping,
    }
}

impl DroppedReference {
    /// Confirms or restores the reference after the call.
    pub(crate) fn end(self, process: &'static Process, result: CUresult) {
        if result == CUDA_SUCCESS {
            self.confirm(process);
        } else {
            self.restore(process);
        }
    }

    /// Returns the multicast object that ends with the reference, if it is one.
    pub(crate) fn ended_object(&self) -> Option<CUmemGenericAllocationHandle> {
        let memory = self.dropped?.memory;
        let ends = memory.gpu == NO_GPU && !memory.is_referenced();
        ends.then_some(self.handle)
    }

    fn confirm(self, process: &'static Process) {
        if let Some(dropped) = self.dropped {
            dropped.release_if_unreferenced(process);
        }
    }

    fn restore(self, process: &'static Process) {
        let Some(Remaining {
            memory,
            descriptors,
        }) = self.dropped
        else {
            return;
        };
        let owned_bytes = if memory.is_referenced() {
            0
        } else {
            memory.bytes
        };
        let _guard = process.import_guard();
        exported::attach(process, descriptors, self.handle);
        // Other threads may have restored references, or imported the memory again.
        let known = process.physical.change(self.handle, |known| {
            let origin = match known.origin {
                Origin::Imported => memory.origin,
                origin => origin,
            };
            (self.restore)(&Physical {
                bytes: known.bytes.max(memory.bytes),
                origin,
                ..*known
            })
        });
        let known_bytes = known.map_or(0, |known| known.bytes);
        let charged_bytes = known_bytes.saturating_add(owned_bytes);
        let needed_bytes = known_bytes.max(memory.bytes);
        memory.charge(process, needed_bytes.saturating_sub(charged_bytes));
        memory.release(process, charged_bytes.saturating_sub(needed_bytes));
        if known.is_none() {
            // Other references that were in the record have ended or are restored by themselves.
            let unreferenced = Physical {
                handles: 0,
                mappings: 0,
                ..memory
            };
            if let Some(restored) = (self.restore)(&unreferenced) {
                process.physical.insert(self.handle, restored);
            }
        }
    }
}

impl Remaining {
    fn release_if_unreferenced(self, process: &'static Process) {
        let memory = self.memory;
        if memory.is_referenced() {
            return;
        }
        match process.gpu(memory.gpu) {
            Some(gpu) if memory.origin == Origin::Exported => {
                exported::release(process, gpu, self.descriptors, memory.bytes);
            }
            _ => memory.release(process, memory.bytes),
        }
    }
}

impl Physical {
    /// Charges `bytes` of this memory, which exists.
    fn charge(self, process: &'static Process, bytes: u64) {
        let Some(gpu) = process.gpu(self.gpu).filter(|_| bytes != 0) else {
            return;
        };
        match self.origin {
            Origin::Own => gpu.charge(bytes),
            Origin::Exported => {
                gpu.charge(bytes);
                gpu.export(bytes);
            }
            Origin::Imported => gpu.import_existing(bytes),
        }
    }

    /// Releases `bytes` of this memory.
    fn release(self, process: &'static Process, bytes: u64) {
        let Some(gpu) = process.gpu(self.gpu).filter(|_| bytes != 0) else {
            return;
        };
        match self.origin {
            Origin::Own => gpu.release(bytes),
            Origin::Exported => gpu.end_export_charged(bytes),
            Origin::Imported => gpu.end_import(bytes),
        }
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
    let is_imported = known.is_some_and(|memory| memory.origin == Origin::Imported);
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
    let Some(gpu) = known.and_then(|memory| process.gpu(memory.gpu)) else {
        return true;
    };
    reserve_with(gpu, bytes, || {
        let _guard = process.import_guard();
        let known = process.physical.get(handle);
        let more = bytes.saturating_sub(known.map_or(u64::MAX, |memory| memory.bytes));
        if more == 0 {
            return true;
        }
        let is_paid = gpu.import(more).is_ok();
        if is_paid {
            process
                .physical
                .change(handle, |memory| Some(Physical { bytes, ..*memory }));
        }
        is_paid
    })
}

/// Reverts [`begin_mapping`] after libcuda failed. Imported memory without a mapping is not charged: its size is
/// unknown again.
pub(crate) fn cancel_mapping(process: &'static Process, handle: CUmemGenericAllocationHandle) {
    let guard = process.import_guard();
    let remaining = drop_reference(process, handle, without_mapping);
    let mut unpaid = None;
    process.physical.change(handle, |memory| {
        if memory.origin != Origin::Imported || memory.mappings != 0 {
            return Some(*memory);
        }
        unpaid = Some(*memory);
        Some(Physical {
            bytes: 0,
            ..*memory
        })
    });
    if let Some(memory) = unpaid
        && let Some(gpu) = process.gpu(memory.gpu)
    {
        gpu.end_import(memory.bytes);
    }
    drop(guard);
    let Some(remaining) = remaining else { return };
    remaining.release_if_unreferenced(process);
    if remaining.memory.gpu == NO_GPU && !remaining.memory.is_referenced() {
        // Another thread has released the handle of the object meanwhile.
        drop_bindings(process, handle);
    }
}

fn without_handle(memory: &Physical) -> Option<Physical> {
    let handles = memory.handles.checked_sub(1)?;
    Some(Physical { handles, ..*memory })
}

fn without_mapping(memory: &Physical) -> Option<Physical> {
    let mappings = memory.mappings.checked_sub(1)?;
    Some(Physical {
        mappings,
        ..*memory
    })
}

/// Removes one reference, if there is one, and returns what remains. Memory without references is removed.
fn drop_reference(
    process: &Process,
    handle: CUmemGenericAllocationHandle,
    without: impl FnOnce(&Physical) -> Option<Physical>,
) -> Option<Remaining> {
    let mut remaining = None;
    process.physical.change(handle, |memory| {
        remaining = without(memory);
        let kept = remaining.unwrap_or(*memory);
        kept.is_referenced().then_some(kept)
    });
    let memory = remaining?;
    let descriptors = match memory.origin {
        Origin::Exported if !memory.is_referenced() => exported::detach(process, handle),
        _ => Descriptors::NONE,
    };
    Some(Remaining {
        memory,
        descriptors,
    })
}

/// Removes the bindings of a destroyed multicast object.
fn drop_bindings(process: &'static Process, object: CUmemGenericAllocationHandle) {
    let ends = |binding: &Binding| binding.object == object;
    process.bindings.remove_all(ends, |_, binding| {
        drop_mapping(process, binding.memory);
    });
}
