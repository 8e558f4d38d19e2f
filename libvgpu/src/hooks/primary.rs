//! Primary contexts, one per device, and their parts, which are green contexts.
//!
//! The first retain in a process creates the context and charges it; the last release, or a reset, ends it with all
//! allocations in it and in its parts. Only one thread at a time creates or ends it, however long that takes, as in
//! libcuda itself; otherwise another thread could use it without a charge while it is being denied, pay for it
//! again, or allocate in a new context that is mistaken for the old one.

use core::ffi::{c_int, c_uint};
use core::ptr;
use core::sync::atomic::Ordering;

use crate::accounts::records::Context;
use crate::current::{Target, target_of_device};
use crate::driver_api::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUcontext, CUdevice, CUresult,
};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::{
    cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, cuDevicePrimaryCtxRetain,
};
use crate::hooks::context::{
    ContextCharge, charge_context, create_charged, release_allocations_of, release_context,
};
use crate::hooks::library;
use crate::hooks::metering;
use crate::process::{Device, Process};

static STATE: Original<State> = Original::new(Library::Cuda, c"cuDevicePrimaryCtxGetState");
type State = unsafe extern "C" fn(CUdevice, *mut c_uint, *mut c_int) -> CUresult;

fn is_active(device: CUdevice) -> bool {
    let Some(state) = STATE.get() else {
        return true;
    };
    let (mut flags, mut active) = (0, 1);
    // SAFETY: writes two integers.
    unsafe { state(device, &raw mut flags, &raw mut active) };
    active != 0
}

fn device_state(device: CUdevice) -> Option<&'static Device> {
    let ordinal = usize::try_from(device).ok()?;
    Process::get()?.devices.get(ordinal)
}

pub(crate) unsafe fn retain(
    original: cuDevicePrimaryCtxRetain::Function,
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(context, device) };
    let Some(state) = device_state(device) else {
        return create_charged(device, context, call);
    };
    let is_new = state.charged.load(Ordering::Acquire) == 0;
    let result = retain_with(device, || {
        let result = call();
        if result == CUDA_SUCCESS {
            // SAFETY: libcuda has written the context.
            let context = unsafe { context.read() };
            let key = context.expose_provenance() as u64;
            state.primary.store(key, Ordering::Release);
        }
        result
    });
    if result != CUDA_SUCCESS || !is_new {
        return result;
    }
    // SAFETY: libcuda has written the context.
    if library::charge_known(device, unsafe { context.read() }) {
        return result;
    }
    if let Some(undo) = cuDevicePrimaryCtxRelease_v2::ORIGINAL.get() {
        // SAFETY: reverts the retain.
        unsafe { end(undo, device) };
    }
    // SAFETY: libcuda has written the context.
    unsafe { context.write(ptr::null_mut()) };
    CUDA_ERROR_OUT_OF_MEMORY
}

/// Retains the primary context with `call`. A retain creates the context if it is the first one, or the first one
/// since a release or reset ended the context.
pub(crate) fn retain_with(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(state) = device_state(device) else {
        return call();
    };
    let _alone = state.primary_gate.wait_exclusive();
    if state.charged.load(Ordering::Acquire) != 0 {
        return call();
    }
    let charge = match charge_context(device) {
        Ok(charge) => charge,
        Err(result) => return result,
    };
    let result = call();
    match charge {
        ContextCharge::Charged(_, bytes) if result == CUDA_SUCCESS => {
            let charged = bytes.saturating_add(1);
            state.charged.store(charged, Ordering::Release);
        }
        ContextCharge::Charged(gpu, bytes) => release_context(gpu, bytes),
        ContextCharge::None => {}
    }
    result
}

/// Release and reset.
pub(crate) unsafe fn end(
    original: cuDevicePrimaryCtxRelease::Function,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    end_with(device, || unsafe { original(device) })
}

/// Runs a call that may end the primary context. If it did, the charges of the context, its allocations and its
/// parts are released.
pub(crate) fn end_with(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    metering::begin_end_of_contexts(|_| true);
    let state = device_state(device);
    let _alone = state.map(|state| state.primary_gate.wait_exclusive());
    let result = call();
    if result == CUDA_SUCCESS
        && let Some(state) = state
        && !is_active(device)
    {
        let primary = state.primary.load(Ordering::Acquire);
        metering::end_contexts(|context| context == primary);
        release_allocations_of(primary);
        end_parts(device);
        let charge = state.charged.swap(0, Ordering::AcqRel);
        if let Target::Limited(gpu) = target_of_device(device) {
            release_context(gpu, charge.saturating_sub(1));
        }
    }
    result
}

/// Returns the device of a green context, or of its `CUcontext`.
pub(crate) fn device_of_part(process: &Process, key: u64) -> Option<CUdevice> {
    match process.contexts.get(key)? {
        Context::Part { device } => Some(device),
        Context::Own { .. } => None,
    }
}

/// Records a handle as a part of the device's primary context.
pub(crate) fn add_part(process: &Process, key: u64, device: CUdevice) {
    process.contexts.remove(key);
    process.contexts.insert(key, Context::Part { device });
}

/// Removes the parts of a primary context that has ended.
fn end_parts(device: CUdevice) {
    if let Some(process) = Process::get() {
        let ends = |context: &Context| *context == Context::Part { device };
        process.contexts.remove_all(ends, |key, _| {
            metering::end_contexts(|context| context == key);
            release_allocations_of(key);
        });
    }
}
