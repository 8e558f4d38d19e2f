//! Linear memory of the current context: plain, pitched, managed. And what all allocating hooks share.
//!
//! Reserve, call the driver, keep the charge or give it back. What does not fit is refused without calling the
//! driver.

use core::ffi::c_uint;

use crate::card::{Card, Target, current_context, target_of_current_context};
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdeviceptr, CUdeviceptr_v1, CUresult};
use crate::held::{Held, HeldMap};
use crate::hooks::pool;
use crate::process::Process;
use crate::table::{
    cuMemAlloc, cuMemAlloc_v2, cuMemAllocManaged, cuMemAllocPitch, cuMemAllocPitch_v2, cuMemFree,
    cuMemFree_v2,
};

/// Small requests share blocks, in steps of this.
const SMALL_STEP: u64 = 512;
/// Largest request that shares a block with others.
const LARGEST_SMALL: u64 = 1 << 20;
/// What the driver hands out larger requests in.
const BLOCK: u64 = 2 << 20;

/// What a request of linear memory takes from the card.
pub(crate) fn taken_by(bytes: u64) -> u64 {
    let step = if bytes > LARGEST_SMALL {
        BLOCK
    } else {
        SMALL_STEP
    };
    bytes.checked_next_multiple_of(step).unwrap_or(u64::MAX)
}

/// What a pitched request takes if the driver pads rows to this.
const ROW_STEP: u64 = 512;

/// An allocation that is about to be made.
#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) target: Target,
    pub(crate) bytes: u64,
    /// The context whose end frees it, 0 if none does.
    pub(crate) context: u64,
}

impl Request {
    /// Memory of the current context.
    pub(crate) fn in_current_context(bytes: u64) -> Self {
        Self {
            target: target_of_current_context(),
            bytes,
            context: current_context().unwrap_or(0),
        }
    }

    /// Makes the allocation with `call` if it fits, and remembers it in `map` under the key that `key` finds.
    pub(crate) fn make(
        self,
        map: impl FnOnce(&'static Process) -> &'static HeldMap,
        call: impl FnOnce() -> CUresult,
        key: impl FnOnce() -> u64,
    ) -> CUresult {
        let card = match self.target {
            Target::Unlimited => return call(),
            Target::Refused => return CUDA_ERROR_OUT_OF_MEMORY,
            Target::Limited(card) => card,
        };
        let Some(process) = Process::get() else {
            return CUDA_ERROR_OUT_OF_MEMORY;
        };
        if card.reserve(self.bytes).is_err() && !pool::reserve_after_trim(card, self.bytes) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        let result = call();
        if result == CUDA_SUCCESS {
            let held = Held {
                bytes: self.bytes,
                card: card.index(),
                context: self.context,
            };
            map(process).insert(key(), held);
        } else {
            card.release(self.bytes);
        }
        result
    }
}

/// Frees with `call` what is remembered under `key`, if anything is, and returns its charge.
///
/// It is forgotten before the driver is called: afterwards the driver may have given the same pointer to
/// another thread.
pub(crate) fn free_held(
    map: impl FnOnce(&'static Process) -> &'static HeldMap,
    key: u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let map = map(process);
    let held = map.remove(key);
    let result = call();
    let Some(held) = held else { return result };
    if result != CUDA_SUCCESS {
        map.insert(key, held);
    } else if let Some(card) = Card::at(process, held.card) {
        card.release(held.bytes);
    }
    result
}

pub(crate) unsafe fn alloc(
    original: cuMemAlloc_v2::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
) -> CUresult {
    Request::in_current_context(taken_by(bytes as u64)).make(
        |process| &process.pointers,
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer, bytes) },
        // SAFETY: the driver has written the pointer.
        || unsafe { pointer.read() },
    )
}

pub(crate) unsafe fn alloc_v1(
    original: cuMemAlloc::Function,
    pointer: *mut CUdeviceptr_v1,
    bytes: c_uint,
) -> CUresult {
    Request::in_current_context(taken_by(u64::from(bytes))).make(
        |process| &process.pointers,
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer, bytes) },
        // SAFETY: the driver has written the pointer.
        || u64::from(unsafe { pointer.read() }),
    )
}

pub(crate) unsafe fn alloc_managed(
    original: cuMemAllocManaged::Function,
    pointer: *mut CUdeviceptr,
    bytes: usize,
    flags: c_uint,
) -> CUresult {
    Request::in_current_context(taken_by(bytes as u64)).make(
        |process| &process.pointers,
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer, bytes, flags) },
        // SAFETY: the driver has written the pointer.
        || unsafe { pointer.read() },
    )
}

/// What a pitched request takes, before the driver has said how it pads rows.
fn pitched(width: u64, height: u64) -> u64 {
    width
        .checked_next_multiple_of(ROW_STEP)
        .and_then(|pitch| pitch.checked_mul(height))
        .map_or(u64::MAX, taken_by)
}

pub(crate) unsafe fn alloc_pitch(
    original: cuMemAllocPitch_v2::Function,
    pointer: *mut CUdeviceptr,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: c_uint,
) -> CUresult {
    let expected = pitched(width as u64, height as u64);
    let result = Request::in_current_context(expected).make(
        |process| &process.pointers,
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer, pitch, width, height, element) },
        // SAFETY: the driver has written the pointer.
        || unsafe { pointer.read() },
    );
    if result == CUDA_SUCCESS {
        // SAFETY: the driver has written the pitch.
        let pitch = unsafe { pitch.read() } as u64;
        let actual = pitch.checked_mul(height as u64).map_or(expected, taken_by);
        // SAFETY: the driver has written the pointer.
        correct(unsafe { pointer.read() }, actual);
    }
    result
}

pub(crate) unsafe fn alloc_pitch_v1(
    original: cuMemAllocPitch::Function,
    pointer: *mut CUdeviceptr_v1,
    pitch: *mut c_uint,
    width: c_uint,
    height: c_uint,
    element: c_uint,
) -> CUresult {
    let expected = pitched(u64::from(width), u64::from(height));
    Request::in_current_context(expected).make(
        |process| &process.pointers,
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer, pitch, width, height, element) },
        // SAFETY: the driver has written the pointer.
        || u64::from(unsafe { pointer.read() }),
    )
}

/// Makes the charge of a pointer what the driver really took.
fn correct(pointer: u64, actual: u64) {
    let Some(process) = Process::get() else {
        return;
    };
    let Some(held) = process.pointers.get(pointer) else {
        return;
    };
    if held.bytes == actual {
        return;
    }
    if let Some(held) = process.pointers.remove(pointer)
        && let Some(card) = Card::at(process, held.card)
    {
        card.correct(held.bytes, actual);
        let corrected = Held {
            bytes: actual,
            ..held
        };
        process.pointers.insert(pointer, corrected);
    }
}

pub(crate) unsafe fn free(original: cuMemFree_v2::Function, pointer: CUdeviceptr) -> CUresult {
    free_held(
        |process| &process.pointers,
        pointer,
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer) },
    )
}

pub(crate) unsafe fn free_v1(original: cuMemFree::Function, pointer: CUdeviceptr_v1) -> CUresult {
    free_held(
        |process| &process.pointers,
        u64::from(pointer),
        // SAFETY: the caller's arguments.
        || unsafe { original(pointer) },
    )
}
