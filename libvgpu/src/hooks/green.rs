//! Green contexts: parts of a device's primary context, which each of them retains.
//!
//! The first one can make the primary context, and the end of the last one can end it, with everything that was
//! allocated in it and in its parts.

use core::ffi::{c_uint, c_void};

use crate::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUgreenCtx, CUresult};
use crate::held::Held;
use crate::hooks::context;
use crate::meter;
use crate::process::Process;
use crate::table::{cuCtxFromGreenCtx, cuGreenCtxCreate, cuGreenCtxDestroy};

/// In the place of a context: with the device whose primary context it is a part of.
const PART_OF: u64 = 1 << 63;

fn part_of(device: CUdevice) -> u64 {
    PART_OF | u64::from(device.unsigned_abs())
}

/// The device of a green context, or of the context that stands for it.
fn device_of(process: &Process, key: u64) -> Option<CUdevice> {
    let held = process.contexts.get(key)?;
    let device = held.context.checked_sub(PART_OF)?;
    CUdevice::try_from(device).ok()
}

/// Remembers a handle as a part of the device's primary context.
fn remember(process: &Process, key: u64, device: CUdevice) {
    let part = Held {
        bytes: 0,
        card: u8::MAX,
        context: part_of(device),
    };
    process.contexts.remove(key);
    process.contexts.insert(key, part);
}

/// The device's primary context has ended: hands each of its parts to `each`.
pub(crate) fn end_parts(process: &Process, device: CUdevice, mut each: impl FnMut(u64)) {
    let ends = |held: &Held| held.context == part_of(device);
    process.contexts.remove_all(ends, |key, _| each(key));
}

pub(crate) unsafe fn create(
    original: cuGreenCtxCreate::Function,
    green: *mut CUgreenCtx,
    description: *mut c_void,
    device: CUdevice,
    flags: c_uint,
) -> CUresult {
    let result = context::retain(device, || {
        // SAFETY: the caller's arguments.
        unsafe { original(green, description, device, flags) }
    });
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: the driver has written the green context.
        let green = unsafe { green.read() };
        remember(process, green.expose_provenance() as u64, device);
    }
    result
}

/// A context that stands for a green one: what is allocated while it is current ends with the primary context.
pub(crate) unsafe fn context(
    original: cuCtxFromGreenCtx::Function,
    context: *mut CUcontext,
    green: CUgreenCtx,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(context, green) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS)
        && let Some(device) = device_of(process, green.expose_provenance() as u64)
    {
        // SAFETY: the driver has written the context.
        let context = unsafe { context.read() };
        remember(process, context.expose_provenance() as u64, device);
    }
    result
}

pub(crate) unsafe fn destroy(original: cuGreenCtxDestroy::Function, green: CUgreenCtx) -> CUresult {
    // Events of ours may end with it.
    meter::forget_all_contexts();
    let key = green.expose_provenance() as u64;
    let device = Process::get().and_then(|process| device_of(process, key));
    // SAFETY: the caller's arguments.
    let result = unsafe { original(green) };
    if result == CUDA_SUCCESS
        && let Some(device) = device
    {
        if let Some(process) = Process::get() {
            process.contexts.remove(key);
        }
        context::look_at_primary(device);
    }
    result
}
