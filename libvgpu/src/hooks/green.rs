//! Green contexts: parts of a device's primary context, which each of them retains.
//!
//! The first green context can create the primary context, and the end of the last one can end it, with all
//! allocations in it and in its parts.

use core::ffi::{c_uint, c_void};

use crate::driver_api::cuda::{CUDA_SUCCESS, CUcontext, CUdevice, CUgreenCtx, CUresult};
use crate::driver_api::functions::{cuCtxFromGreenCtx, cuGreenCtxCreate, cuGreenCtxDestroy};
use crate::hooks::metering;
use crate::hooks::primary;
use crate::process::Process;

pub(crate) unsafe fn create(
    original: cuGreenCtxCreate::Function,
    green: *mut CUgreenCtx,
    description: *mut c_void,
    device: CUdevice,
    flags: c_uint,
) -> CUresult {
    let result = primary::retain_with(device, || {
        // SAFETY: the caller's arguments.
        unsafe { original(green, description, device, flags) }
    });
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: libcuda has written the green context.
        let green = unsafe { green.read() };
        primary::add_part(process, green.expose_provenance() as u64, device);
    }
    result
}

/// A context of a green context: its allocations end with the primary context.
pub(crate) unsafe fn context(
    original: cuCtxFromGreenCtx::Function,
    context: *mut CUcontext,
    green: CUgreenCtx,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(context, green) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS)
        && let Some(device) = primary::device_of_part(process, green.expose_provenance() as u64)
    {
        // SAFETY: libcuda has written the context.
        let context = unsafe { context.read() };
        primary::add_part(process, context.expose_provenance() as u64, device);
    }
    result
}

pub(crate) unsafe fn destroy(original: cuGreenCtxDestroy::Function, green: CUgreenCtx) -> CUresult {
    let key = green.expose_provenance() as u64;
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(green) };
    let known =
        Process::get().and_then(|process| Some((process, primary::device_of_part(process, key)?)));
    let Some((process, device)) = known else {
        // The meter's events may end with it.
        metering::begin_end_of_contexts(|_| true);
        return call();
    };
    primary::end_with(device, || {
        let result = call();
        if result == CUDA_SUCCESS {
            process.contexts.remove(key);
        }
        result
    })
}
