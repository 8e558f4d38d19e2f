//! Libraries: libcuda loads one into a context when the context first uses it, at the latest at the launch of a kernel.
//!
//! A launch is not hooked for memory. So a library with global variables is charged in every context on a GPU with a limit
//! from the first request for one of its kernels on, where that can be denied: in existing contexts with the request, in
//! others at their creation. Nothing is loaded on the program's behalf: a load waits for the kernels that run in its
//! context.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::Ordering;

use crate::accounts::charge_map::Charge;
use crate::accounts::records::{Context, LibraryImage, LibraryPart};
use crate::current::{Target, target_of_current_context, target_of_device};
use crate::driver_api::cuda::{
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUcontext, CUdevice, CUdeviceptr, CUkernel, CUlibrary,
    CUmodule, CUresult,
};
use crate::driver_api::device::current_context;
use crate::driver_api::functions::{
    cuLibraryEnumerateKernels, cuLibraryGetGlobal, cuLibraryGetKernel, cuLibraryGetModule,
    cuLibraryGetUnifiedFunction, cuLibraryLoadData, cuLibraryLoadFromFile, cuLibraryUnload,
};
use crate::hooks::driver_cache::reserve_ahead;
use crate::hooks::freed_bytes::FreedBytes;
use crate::hooks::metering;
use crate::hooks::module::{bytes_of_file, bytes_of_image};
use crate::limits::gpu::Gpu;
use crate::process::Process;
use crate::system::temporary_list::TemporaryList;

fn key_of(library: CUlibrary) -> u64 {
    library.expose_provenance() as u64
}

/// Loads a library with `call`, which writes it to `library`, and records the memory that it takes in each context.
///
/// # Safety
/// `call` calls libcuda, which writes to `library` on success.
unsafe fn load_with(
    library: *mut CUlibrary,
    bytes: impl FnOnce() -> u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = call();
    if let Some(process) = Process::get()
        && process.is_memory_limited()
        && result == CUDA_SUCCESS
    {
        let bytes = bytes();
        // SAFETY: libcuda has written the library.
        let key = key_of(unsafe { library.read() });
        if bytes != 0 {
            let image = LibraryImage { bytes, uses: 0 };
            process.libraries.insert(key, image);
        }
    }
    result
}

#[expect(clippy::too_many_arguments, reason = "the original's arguments")]
pub(crate) unsafe fn load_data(
    original: cuLibraryLoadData::Function,
    library: *mut CUlibrary,
    code: *const c_void,
    jit: *mut c_int,
    jit_values: *mut *mut c_void,
    jit_count: c_uint,
    options: *mut c_int,
    values: *mut *mut c_void,
    count: c_uint,
) -> CUresult {
    // SAFETY: libcuda has accepted the image.
    let bytes = || unsafe { bytes_of_image(code) };
    let call = || {
        // SAFETY: the caller's arguments.
        unsafe {
            original(
                library, code, jit, jit_values, jit_count, options, values, count,
            )
        }
    };
    // SAFETY: the call writes to `library`.
    unsafe { load_with(library, bytes, call) }
}

#[expect(clippy::too_many_arguments, reason = "the original's arguments")]
pub(crate) unsafe fn load_file(
    original: cuLibraryLoadFromFile::Function,
    library: *mut CUlibrary,
    path: *const c_char,
    jit: *mut c_int,
    jit_values: *mut *mut c_void,
    jit_count: c_uint,
    options: *mut c_int,
    values: *mut *mut c_void,
    count: c_uint,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let bytes = || unsafe { bytes_of_file(path) };
    let call = || {
        // SAFETY: the caller's arguments.
        unsafe {
            original(
                library, path, jit, jit_values, jit_count, options, values, count,
            )
        }
    };
    // SAFETY: the call writes to `library`.
    unsafe { load_with(library, bytes, call) }
}

/// Charges a library in a context, once. Returns `false` if the limit is exceeded.
fn charge(process: &'static Process, library: u64, bytes: u64, gpu: Gpu, context: u64) -> bool {
    let key = library.rotate_left(16) ^ context;
    if process.library_parts.get(key).is_some() {
        return true;
    }
    // Another thread may be charging it, and then this one needs nothing.
    let Some(_pending) = reserve_ahead(gpu, bytes) else {
        let is_charged = process.library_parts.get(key).is_some();
        if !is_charged {
            gpu.count_denied();
        }
        return is_charged;
    };
    let is_new = {
        let _guard = process.guard();
        let is_new = process.library_parts.get(key).is_none();
        if is_new {
            let part = LibraryPart { library, context };
            process.library_parts.insert(key, part);
            let charge = Charge {
                bytes,
                gpu: gpu.index(),
                context,
            };
            process.modules.insert(key, charge);
        }
        is_new
    };
    if !is_new {
        // Another thread has charged it.
        gpu.release(bytes);
    }
    true
}

/// Charges a library in the current context, which may be one that no hook has seen, or a green one.
fn charge_here(process: &'static Process, library: u64, bytes: u64) -> bool {
    match (target_of_current_context(), current_context()) {
        (Target::Limited(gpu), Some(context)) => {
            let _in_use = process.library_gate.enter();
            charge(process, library, bytes, gpu, context)
        }
        _ => true,
    }
}

/// Charges the libraries whose kernels the program has in a new context of the device. Returns `false` if the limit is
/// exceeded.
pub(crate) fn charge_known(device: CUdevice, context: CUcontext) -> bool {
    let (Some(process), Target::Limited(gpu)) = (Process::get(), target_of_device(device)) else {
        return true;
    };
    let context = context.expose_provenance() as u64;
    let mut fits = true;
    process.libraries.for_each(|key, library| {
        if library.uses == 0 || !fits {
            return;
        }
        let _in_use = process.library_gate.enter();
        if process.libraries.get(key).is_some() {
            fits = charge(process, key, library.bytes, gpu, context);
        }
    });
    fits
}

/// Charges a library in all contexts. Returns `false` if a limit is exceeded.
fn charge_everywhere(process: &'static Process, library: u64, bytes: u64) -> bool {
    let mut fits = true;
    process.contexts.for_each(|key, context| {
        let Context::Own { gpu, .. } = context else {
            return;
        };
        let _in_use = process.library_gate.enter();
        if process.contexts.get(key).is_some()
            && let Some(gpu) = process.gpu(gpu)
        {
            fits &= charge(process, library, bytes, gpu, key);
        }
    });
    for (device, ordinal) in process.devices.iter().zip(0..) {
        if device.charged.load(Ordering::Acquire) == 0 {
            continue;
        }
        let _alive = device.primary_gate.enter();
        let context = device.primary.load(Ordering::Acquire);
        if device.charged.load(Ordering::Acquire) != 0
            && context != 0
            && let Target::Limited(gpu) = target_of_device(ordinal)
        {
            let _in_use = process.library_gate.enter();
            fits &= charge(process, library, bytes, gpu, context);
        }
    }
    fits
}

/// Charges a library before the program gets its kernels. Returns `false` if a limit is exceeded: then the program gets no
/// kernel, and the library is charged where it was before, unless other threads use it.
fn begin_use(library: CUlibrary) -> bool {
    let key = key_of(library);
    let known = Process::get().and_then(|process| Some((process, process.libraries.get(key)?)));
    let Some((process, LibraryImage { bytes, .. })) = known else {
        return true;
    };
    let change_uses = |change: fn(u64, u64) -> u64| {
        process.libraries.change(key, |image| {
            let uses = change(image.uses, 1);
            Some(LibraryImage { uses, ..*image })
        });
    };
    let of_library = |part: &LibraryPart| part.library == key;
    let count = process.library_parts.count(of_library);
    let Some(mut before) = TemporaryList::with_capacity(count) else {
        return false;
    };
    process.library_parts.for_each(|_, part| {
        if of_library(&part) {
            before.push(part.context);
        }
    });
    // Counted first: a context that another thread creates meanwhile charges the library, too, and the charges on which this
    // request relies stay if the request of another thread is denied.
    change_uses(u64::saturating_add);
    let fits = charge_everywhere(process, key, bytes) & charge_here(process, key, bytes);
    if !fits {
        change_uses(u64::saturating_sub);
        let stays = before.as_mut_slice();
        let is_unused = || {
            let image = process.libraries.get(key);
            image.is_none_or(|image| image.uses == 0)
        };
        end_parts(process, |part| {
            part.library == key && !stays.contains(&part.context) && is_unused()
        })
        .release(process);
    }
    fits
}

/// Removes the charges of libraries in contexts.
fn end_parts(process: &Process, ends: impl Fn(&LibraryPart) -> bool) -> FreedBytes {
    let mut freed = FreedBytes::NONE;
    let _alone = process.library_gate.enter_exclusive();
    process.library_parts.remove_all(ends, |part, _| {
        if let Some(charge) = process.modules.remove(part) {
            freed.add(charge.gpu, charge.bytes);
        }
    });
    freed
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
fn use_with(library: CUlibrary, call: impl FnOnce() -> CUresult) -> CUresult {
    let key = key_of(library);
    let known = Process::get().and_then(|process| Some((process, process.libraries.get(key)?)));
    if known.is_none_or(|(process, image)| charge_here(process, key, image.bytes)) {
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
    use_with(library, || unsafe { original(module, library) })
}

pub(crate) unsafe fn global(
    original: cuLibraryGetGlobal::Function,
    pointer: *mut CUdeviceptr,
    bytes: *mut usize,
    library: CUlibrary,
    name: *const c_char,
) -> CUresult {
    // SAFETY: the caller's arguments.
    use_with(library, || unsafe {
        original(pointer, bytes, library, name)
    })
}

pub(crate) unsafe fn unified_function(
    original: cuLibraryGetUnifiedFunction::Function,
    function: *mut *mut c_void,
    library: CUlibrary,
    symbol: *const c_char,
) -> CUresult {
    // SAFETY: the caller's arguments.
    use_with(library, || unsafe { original(function, library, symbol) })
}

pub(crate) unsafe fn unload(original: cuLibraryUnload::Function, library: CUlibrary) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(library) };
    let Some(process) = Process::get() else {
        return call();
    };
    let key = key_of(library);
    // Removed before the call: afterwards another library may have the same handle.
    let freed = match process.libraries.remove(key) {
        Some(_) => end_parts(process, |part| part.library == key),
        None => FreedBytes::NONE,
    };
    let result = call();
    // A library that libcuda cannot unload stays charged.
    if result == CUDA_SUCCESS {
        freed.release(process);
    }
    // Other functions may get the handles of its functions.
    metering::mark_all_stale();
    result
}

/// Drops the records of libraries in a context that ends.
pub(crate) fn end_context(process: &Process, context: u64) {
    let ends = |part: &LibraryPart| part.context == context;
    process.library_parts.remove_all(ends, |_, _| {});
}
