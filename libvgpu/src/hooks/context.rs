//! Contexts: each is charged libcuda's own memory, and its end frees its allocations. Primary contexts are in
//! [`crate::hooks::primary`].

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{Ordering, fence};

use crate::accounts::charge_map::Charge;
use crate::accounts::records::Context;
use crate::current::{Target, target_of_device};
use crate::driver_api::cuda::{
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUcontext,
    CUdevice, CUresult,
};
use crate::driver_api::device::attribute;
use crate::driver_api::functions::{
    cuCtxAttach, cuCtxCreate, cuCtxCreate_v3, cuCtxCreate_v4, cuCtxDestroy, cuCtxDestroy_v2,
    cuCtxDetach,
};
use crate::hooks::array::drop_array;
use crate::hooks::driver_cache::reserve;
use crate::hooks::freed_bytes::FreedBytes;
use crate::hooks::memory::drop_linear;
use crate::hooks::metering;
use crate::hooks::{library, module, shared_memory};
use crate::limits::gpu::Gpu;
use crate::limits::share::Share;
use crate::process::Process;
use crate::system::sys;

/// Charge of a context, made before its creation.
pub(crate) enum ContextCharge {
    None,
    Charged(Gpu, u64),
}

/// Estimate for each multiprocessor of a GPU, whose resident threads have local memory and stacks, and the estimate
/// for a GPU whose multiprocessors are unknown, bytes.
const PER_MULTIPROCESSOR: u64 = 4 << 20;
const UNKNOWN_CONTEXT: u64 = 512 << 20;

/// Time between two looks at whether the share is resumed, microseconds.
const SUSPENDED_NAP_US: u64 = 20_000;

/// Charges libcuda's own memory for a context. Waits while the share is suspended.
pub(crate) fn charge_context(device: CUdevice) -> Result<ContextCharge, CUresult> {
    let gpu = match target_of_device(device) {
        Target::Unlimited => return Ok(ContextCharge::None),
        Target::Denied => return Err(CUDA_ERROR_OUT_OF_MEMORY),
        Target::Limited(gpu) => gpu,
    };
    let bytes = gpu.driver_reserve_bytes().unwrap_or_else(|| {
        attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_or(UNKNOWN_CONTEXT, |count| {
                count.saturating_mul(PER_MULTIPROCESSOR)
            })
    });
    loop {
        if !reserve(gpu, bytes) {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        gpu.add_driver_bytes(bytes);
        // The charge comes first: the node driver sets the word and then reads the charges.
        fence(Ordering::SeqCst);
        if !gpu.is_suspended() {
            return Ok(ContextCharge::Charged(gpu, bytes));
        }
        release_context(gpu, bytes);
        while gpu.is_suspended() {
            gpu.shares().for_each(Share::demand_resume);
            sys::sleep_us(SUSPENDED_NAP_US);
        }
    }
}

/// Reverts [`charge_context`].
pub(crate) fn release_context(gpu: Gpu, bytes: u64) {
    gpu.subtract_driver_bytes(bytes);
    gpu.release(bytes);
}

/// Creates a context with `make`, which writes it to `context`.
pub(crate) fn create_charged(
    device: CUdevice,
    context: *mut CUcontext,
    make: impl FnOnce() -> CUresult,
) -> CUresult {
    let charge = match charge_context(device) {
        Ok(charge) => charge,
        Err(result) => return result,
    };
    let result = make();
    let ContextCharge::Charged(gpu, bytes) = charge else {
        return result;
    };
    if result != CUDA_SUCCESS {
        release_context(gpu, bytes);
        return result;
    }
    // SAFETY: libcuda has written the context.
    let created = unsafe { context.read() };
    let charge = Context::Own {
        bytes,
        gpu: gpu.index(),
        attachments: 0,
    };
    let key = created.expose_provenance() as u64;
    Process::of(gpu).contexts.insert(key, charge);
    if library::charge_known(device, created) {
        return result;
    }
    if let Some(undo) = cuCtxDestroy_v2::ORIGINAL.get() {
        // SAFETY: just created, and unknown to the program.
        unsafe { destroy(undo, created) };
    }
    // SAFETY: libcuda has written the context.
    unsafe { context.write(core::ptr::null_mut()) };
    CUDA_ERROR_OUT_OF_MEMORY
}

pub(crate) unsafe fn create(
    original: cuCtxCreate::Function,
    context: *mut CUcontext,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    create_charged(device, context, || unsafe {
        original(context, flags, device)
    })
}

pub(crate) unsafe fn create_v3(
    original: cuCtxCreate_v3::Function,
    context: *mut CUcontext,
    affinity: *mut c_void,
    count: c_int,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    create_charged(device, context, || {
        // SAFETY: the caller's arguments.
        unsafe { original(context, affinity, count, flags, device) }
    })
}

pub(crate) unsafe fn create_v4(
    original: cuCtxCreate_v4::Function,
    context: *mut CUcontext,
    parameters: *mut c_void,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    create_charged(device, context, || {
        // SAFETY: the caller's arguments.
        unsafe { original(context, parameters, flags, device) }
    })
}

pub(crate) unsafe fn destroy(original: cuCtxDestroy::Function, context: CUcontext) -> CUresult {
    let key = context.expose_provenance() as u64;
    metering::begin_end_of_contexts(|context| context == key);
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(context) };
    let Some(process) = Process::get() else {
        return call();
    };
    let known = {
        // No library is being charged in it.
        let _alone = process.library_gate.enter_exclusive();
        process.contexts.remove(key)
    };
    let mut freed = FreedBytes::NONE;
    // libcuda does not destroy the contexts of other functions.
    let is_own = matches!(known, Some(Context::Own { .. }));
    if is_own {
        remove_allocations_of(process, key, &mut freed);
    }
    let result = call();
    if result != CUDA_SUCCESS {
        if let Some(known) = known {
            let restored = known.with_bytes(|gpu| {
                let bytes = freed.take(gpu);
                if let Some(gpu) = process.gpu(gpu) {
                    gpu.add_driver_bytes(bytes);
                }
                bytes
            });
            process.contexts.insert(key, restored);
        }
        return result;
    }
    metering::end_contexts(|context| context == key);
    if !is_own {
        remove_allocations_of(process, key, &mut freed);
    }
    freed.release(process);
    forget_pool_memory(process);
    if let Some(Context::Own { bytes, gpu, .. }) = known
        && let Some(gpu) = process.gpu(gpu)
    {
        release_context(gpu, bytes);
    }
    result
}

/// Adds an attachment to a context.
pub(crate) unsafe fn attach(
    original: cuCtxAttach::Function,
    context: *mut CUcontext,
    flags: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(context, flags) };
    if let Some(process) = Process::get().filter(|_| result == CUDA_SUCCESS) {
        // SAFETY: libcuda has written the context.
        let key = unsafe { context.read() }.expose_provenance() as u64;
        process
            .contexts
            .change(key, |context| Some(context.attached(1)));
    }
    result
}

/// Removes an attachment. Removing the one of its creation ends the context.
pub(crate) unsafe fn detach(original: cuCtxDetach::Function, context: CUcontext) -> CUresult {
    let key = context.expose_provenance() as u64;
    let known = Process::get().and_then(|process| Some((process, process.contexts.get(key)?)));
    let Some((process, _)) = known.filter(|(_, context)| context.is_attached()) else {
        // SAFETY: the caller's arguments.
        return unsafe { destroy(original, context) };
    };
    // SAFETY: the caller's arguments.
    let result = unsafe { original(context) };
    if result == CUDA_SUCCESS {
        process
            .contexts
            .change(key, |context| Some(context.attached(-1)));
    }
    result
}

/// Releases the charges of the allocations and imports in a context that has ended.
pub(crate) fn release_allocations_of(context: u64) {
    let Some(process) = Process::get().filter(|_| context != 0) else {
        return;
    };
    let mut freed = FreedBytes::NONE;
    remove_allocations_of(process, context, &mut freed);
    freed.release(process);
    forget_pool_memory(process);
}

/// Removes the records of the allocations and imports in a context that ends.
fn remove_allocations_of(process: &'static Process, context: u64, freed: &mut FreedBytes) {
    let ends = |charge: &Charge| charge.context == context;
    process.pointers.remove_all(ends, |pointer, charge| {
        shared_memory::end_export(process, pointer);
        freed.add(charge.gpu, drop_linear(process, pointer, charge));
    });
    shared_memory::end_context(process, context, freed);
    module::end_context(process, context, freed);
    library::end_context(process, context);
    process.arrays.remove_all(ends, |array, charge| {
        freed.add(charge.gpu, drop_array(process, array, charge));
    });
}

/// Drops what is known of free pool memory after the end of a context.
fn forget_pool_memory(process: &Process) {
    process.pool_free_space.forget_all();
}
