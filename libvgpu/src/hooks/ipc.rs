//! Linear memory that other processes open by IPC handle.
//!
//! Whoever opens it pays for it unless it is of the same share; see [`crate::imports`].

use core::ffi::{c_uint, c_void};
use core::ptr::NonNull;

use crate::blocks::{self, BLOCK};
use crate::card::{Card, Target, target_of_current_context};
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUipcMemHandle, CUresult};
use crate::driver::{Library, Original};
use crate::held::Held;
use crate::process::Process;
use crate::table::{cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle};

static GET_RANGE: Original = Original::new(Library::Cuda, c"cuMemGetAddressRange_v2");
type GetRange = unsafe extern "C" fn(*mut CUdeviceptr, *mut usize, CUdeviceptr) -> CUresult;

/// Start and size of the allocation that a pointer points into.
pub(crate) fn range_of(pointer: CUdeviceptr) -> Option<(CUdeviceptr, u64)> {
    let get = GET_RANGE.address()?;
    // SAFETY: the signature of `cuMemGetAddressRange_v2`.
    let get = unsafe { core::mem::transmute::<NonNull<c_void>, GetRange>(get) };
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: writes a pointer and a size.
    let result = unsafe { get(&raw mut base, &raw mut bytes, pointer) };
    (result == CUDA_SUCCESS).then_some((base, bytes as u64))
}

pub(crate) unsafe fn get_handle(
    original: cuIpcGetMemHandle::Function,
    handle: *mut CUipcMemHandle,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(handle, pointer) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS)
        && let Some((base, _)) = range_of(pointer)
        && let Some(held) = process.pointers.get(base)
        && let Some(card) = Card::at(process, held.card)
        && process.shared.get(base).is_none()
    {
        // Small allocations are opened with their block.
        let bytes = if blocks::is_small(held.bytes) {
            BLOCK
        } else {
            held.bytes
        };
        process.shared.insert(base, Held { bytes, ..held });
        card.export(bytes);
    }
    result
}

/// After memory was freed: nobody can open it any more.
pub(crate) fn forget(process: &Process, card: Card, pointer: CUdeviceptr) {
    if let Some(held) = process.shared.remove(pointer) {
        card.end_export(held.bytes);
    }
}

pub(crate) unsafe fn open(
    original: cuIpcOpenMemHandle::Function,
    pointer: *mut CUdeviceptr,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(pointer, handle, flags) };
    let card = match target_of_current_context() {
        Target::Unlimited => return call(),
        Target::Refused => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(card) => card,
    };
    let result = call();
    if result != CUDA_SUCCESS {
        return result;
    }
    let process = card.process();
    // SAFETY: the driver has written the pointer.
    let address = unsafe { pointer.read() };
    // Opened again, it is the same memory at the same address.
    let again = {
        let _guard = process.guard();
        process.opened.remove(address).inspect(|held| {
            let again = Held {
                context: held.context.saturating_add(1),
                ..*held
            };
            process.opened.insert(address, again);
        })
    };
    if again.is_some() {
        return result;
    }
    let bytes = range_of(address).map_or(BLOCK, |(_, bytes)| bytes);
    let bytes = bytes.checked_next_multiple_of(BLOCK).unwrap_or(bytes);
    if card.import(bytes).is_err() {
        if let Some(close) = cuIpcCloseMemHandle::ORIGINAL.address() {
            // SAFETY: the driver's function of that name has this signature.
            let close = unsafe {
                core::mem::transmute::<NonNull<c_void>, cuIpcCloseMemHandle::Function>(close)
            };
            // SAFETY: opened just now, and unknown to the program.
            unsafe { close(address) };
        }
        // SAFETY: the driver has written the pointer.
        unsafe { pointer.write(0) };
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let held = Held {
        bytes,
        card: card.index(),
        context: 1,
    };
    process.opened.insert(address, held);
    result
}

pub(crate) unsafe fn close(
    original: cuIpcCloseMemHandle::Function,
    pointer: CUdeviceptr,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(pointer) };
    let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) else {
        return result;
    };
    let closed = {
        let _guard = process.guard();
        process.opened.remove(pointer).and_then(|held| {
            let left = Held {
                context: held.context.saturating_sub(1),
                ..held
            };
            if left.context == 0 {
                return Some(held);
            }
            process.opened.insert(pointer, left);
            None
        })
    };
    if let Some(held) = closed
        && let Some(card) = Card::at(process, held.card)
    {
        card.end_import(held.bytes);
    }
    result
}
