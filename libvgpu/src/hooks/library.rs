//! Libraries: libcuda loads one into a context when the context first uses it, at the latest at the launch of a kernel.
//!
//! A launch is not hooked for memory. So a library whose kernels the program has is loaded into every context on a
//! GPU with a limit, where the load can be denied: into existing contexts with the request for the kernel, into others
//! at their creation. [`crate::hooks::module`] measures the load.

use core::ffi::{c_char, c_uint};
use core::ptr;
use core::sync::atomic::Ordering;

use crate::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUcontext, CUdevice, CUdeviceptr, CUkernel, CUlibrary,
    CUmodule, CUresult,
};
use crate::current::{Target, target_of_current_context, target_of_device};
use crate::device::current_context;
use crate::functions::{
    cuLibraryEnumerateKernels, cuLibraryGetGlobal, cuLibraryGetKernel, cuLibraryGetModule,
    cuLibraryUnload,
};
use crate::hooks::freed_bytes::FreedBytes;
use crate::hooks::metering;
use crate::hooks::module::{charge_growth, record};
use crate::hooks::physical_use::{uncounted_bytes, with_context};
use crate::process::Process;
use crate::records::{Context, LibraryPart};

/// A library or context of libcuda from its key.
fn handle_of<T>(key: u64) -> *mut T {
    ptr::with_exposed_provenance_mut(usize::try_from(key).unwrap_or(0))
}

/// Loads a library into the current context. Returns `false` if the limit is exceeded: then the library stays loaded
/// and charged until it is unloaded or the context ends.
fn load(process: &'static Process, library: u64) -> bool {
    let Target::Limited(card) = target_of_current_context() else {
        return true;
    };
    let (Some(get), Some(context)) = (cuLibraryGetModule::ORIGINAL.get(), current_context()) else {
        return true;
    };
    let before = uncounted_bytes(card);
    let mut module: CUmodule = ptr::null_mut();
    // SAFETY: writes one module. A library without code for the GPU, or that does not fit into it, fails at its use, as
    // without this call.
    if unsafe { get(&raw mut module, handle_of(library)) } != CUDA_SUCCESS {
        return true;
    }
    let key = module.expose_provenance() as u64;
    if process.library_parts.get(key).is_some() {
        return true;
    }
    process
        .library_parts
        .insert(key, LibraryPart { library, context });
    let Err(bytes) = charge_growth(process, card, key, before) else {
        return true;
    };
    card.charge(bytes);
    record(process, card, key, bytes);
    false
}

/// Loads the libraries whose kernels the program has into a new context of the device. Returns `false` if the limit is
/// exceeded.
pub(crate) fn load_known(device: CUdevice, context: CUcontext) -> bool {
    let (Some(process), Target::Limited(_)) = (Process::get(), target_of_device(device)) else {
        return true;
    };
    let mut fits = true;
    process.library_parts.for_each(|key, part| {
        if key != part.library || !fits {
            return;
        }
        let _in_use = process.library_gate.enter();
        if process.library_parts.get(key).is_some() {
            fits = with_context(context, || load(process, key)).unwrap_or(true);
        }
    });
    fits
}

/// Loads a library into all contexts, before the program gets its first kernel. Returns `false` if a limit is
/// exceeded.
fn load_everywhere(process: &'static Process, library: u64) -> bool {
    let part = LibraryPart {
        library,
        context: 0,
    };
    process.library_parts.insert(library, part);
    let mut fits = true;
    process.contexts.for_each(|key, context| {
        let Context::Own { .. } = context else { return };
        let _in_use = process.library_gate.enter();
        if process.contexts.get(key).is_some() {
            fits &= with_context(handle_of(key), || load(process, library)).unwrap_or(true);
        }
    });
    for device in &process.devices {
        if device.charged.load(Ordering::Acquire) == 0 {
            continue;
        }
        let _alive = device.primary_gate.enter();
        let context = device.primary.load(Ordering::Acquire);
        if device.charged.load(Ordering::Acquire) != 0 && context != 0 {
            fits &= with_context(handle_of(context), || load(process, library)).unwrap_or(true);
        }
    }
    fits
}

/// Loads a library before the program uses its kernels. Returns `false` if a limit is exceeded.
fn begin_use(library: CUlibrary) -> bool {
    let Some(process) = Process::get() else {
        return true;
    };
    let key = library.expose_provenance() as u64;
    let is_known = process.library_parts.get(key).is_some();
    // The current context may be one that no hook has seen, or a green one.
    (is_known || load_everywhere(process, key)) & load(process, key)
}

pub(crate) unsafe fn kernel(
    original: cuLibraryGetKernel::Function,
    kernel: *mut CUkernel,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(kernel, library, name) };
    if result != CUDA_SUCCESS || begin_use(library) {
        return result;
    }
    // SAFETY: libcuda has written the kernel.
    unsafe { kernel.write(ptr::null_mut()) };
    CUDA_ERROR_OUT_OF_MEMORY
}

pub(crate) unsafe fn kernels(
    original: cuLibraryEnumerateKernels::Function,
    kernels: *mut CUkernel,
    count: c_uint,
    library: CUlibrary,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(kernels, count, library) };
    if result != CUDA_SUCCESS || begin_use(library) {
        return result;
    }
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the caller's list of `count` kernels.
        unsafe { kernels.wrapping_add(index).write(ptr::null_mut()) };
    }
    CUDA_ERROR_OUT_OF_MEMORY
}

/// Makes a call that loads the library into the current context.
fn load_with(library: CUlibrary, call: impl FnOnce() -> CUresult) -> CUresult {
    let fits = |process| load(process, library.expose_provenance() as u64);
    if Process::get().is_none_or(fits) {
        call()
    } else {
        CUDA_ERROR_OUT_OF_MEMORY
    }
}

pub(crate) unsafe fn module(
    original: cuLibraryGetModule::Function,
    module: *mut CUmodule,
    library: CUlibrary,
) -> CUresult {
    // SAFETY: the caller's arguments.
    load_with(library, || unsafe { original(module, library) })
}

pub(crate) unsafe fn global(
    original: cuLibraryGetGlobal::Function,
    pointer: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the caller's arguments.
    load_with(library, || unsafe {
        original(pointer, bytes, library, name)
    })
}

pub(crate) unsafe fn unload(original: cuLibraryUnload::Function, library: CUlibrary) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(library) };
    let Some(process) = Process::get() else {
        return call();
    };
    let key = library.expose_provenance() as u64;
    let mut freed = FreedBytes::NONE;
    // Removed before the call: afterwards other libraries and modules may have the same handles.
    {
        let _alone = process.library_gate.enter_exclusive();
        let ends = |part: &LibraryPart| part.library == key;
        process.library_parts.remove_all(ends, |part, _| {
            if let Some(charge) = process.modules.remove(part) {
                freed.add(charge.card, charge.bytes);
            }
        });
    }
    let result = call();
    // A library that libcuda cannot unload stays charged.
    if result == CUDA_SUCCESS {
        freed.release(process);
    }
    // Other functions may get the handles of its functions.
    metering::mark_all_stale();
    result
}

/// Drops the records of modules in a context that ends.
pub(crate) fn end_context(process: &Process, context: u64) {
    let ends = |part: &LibraryPart| part.context == context;
    process.library_parts.remove_all(ends, |_, _| {});
}
