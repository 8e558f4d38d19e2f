//! Memory that libcuda allocates for modules and for the limits of a context.
//!
//! A module is charged the global variables that its image declares ([`crate::accounts::image`]). Its code, and variables of images
//! that cannot be read, are libcuda's own memory, which the node agent corrects.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::accounts::blocks::{BLOCK, rounded};
use crate::accounts::charge_map::Charge;
use crate::accounts::image;
use crate::current::{Target, target_of_current_context};
use crate::driver_api::cuda::{
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_LIMIT_MALLOC_HEAP_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_STACK_SIZE,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUmodule, CUresult,
};
use crate::driver_api::device::{attribute, current_context, current_device};
use crate::driver_api::driver::{Library, Original};
use crate::driver_api::functions::{
    cuCtxSetLimit, cuModuleLoad, cuModuleLoadDataEx, cuModuleUnload,
};
use crate::hooks::driver_cache::reserve;
use crate::hooks::freed_bytes::FreedBytes;
use crate::hooks::memory::{Request, free_charged};
use crate::hooks::metering;
use crate::process::Process;
use crate::system::sys;

/// Returns the memory of the global variables of an image in memory.
///
/// # Safety
/// `image` is null or an image for libcuda.
pub(super) unsafe fn bytes_of_image(image: *const c_void) -> u64 {
    // SAFETY: the caller's contract.
    rounded(unsafe { image::global_bytes(image, None) })
}

/// As [`bytes_of_image`], of an image in a file. A file that cannot be read counts as nothing: libcuda reports it.
///
/// # Safety
/// `path` is null or terminated.
pub(super) unsafe fn bytes_of_file(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: the caller's contract.
    let path = unsafe { CStr::from_ptr(path) };
    let Some(file) = sys::open(None, path, libc::O_RDONLY, 0) else {
        return 0;
    };
    let length = sys::status(file).and_then(|status| usize::try_from(status.size).ok());
    let mapped = length.and_then(|length| Some((sys::map_file(file, length, false)?, length)));
    sys::close(file);
    let Some((image, length)) = mapped else {
        return 0;
    };
    // SAFETY: mapped with this length.
    let bytes = unsafe { image::global_bytes(image.as_ptr(), Some(length)) };
    sys::unmap(image, length);
    rounded(bytes)
}

/// Loads a module with `call`, which writes it to `module`, if the memory of its image fits.
///
/// # Safety
/// `call` calls libcuda, which writes to `module` on success.
unsafe fn load_with(
    module: *mut CUmodule,
    bytes: impl FnOnce() -> u64,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Target::Limited(_) = target_of_current_context() else {
        return call();
    };
    match bytes() {
        0 => call(),
        bytes => Request::in_current_context(bytes).allocate(
            |process| &process.modules,
            call,
            // SAFETY: libcuda has written the module.
            || unsafe { module.read() }.expose_provenance() as u64,
        ),
    }
}

pub(crate) unsafe fn load(
    original: cuModuleLoad::Function,
    module: *mut CUmodule,
    path: *const c_char,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let bytes = || unsafe { bytes_of_file(path) };
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(module, path) };
    // SAFETY: the call writes to `module`.
    unsafe { load_with(module, bytes, call) }
}

pub(crate) unsafe fn load_data_ex(
    original: cuModuleLoadDataEx::Function,
    module: *mut CUmodule,
    image: *const c_void,
    count: c_uint,
    options: *mut c_int,
    values: *mut *mut c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let bytes = || unsafe { bytes_of_image(image) };
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(module, image, count, options, values) };
    // SAFETY: the call writes to `module`.
    unsafe { load_with(module, bytes, call) }
}

/// As [`load`], from memory.
pub(crate) unsafe fn load_data(
    original: unsafe extern "C" fn(*mut CUmodule, *const c_void) -> CUresult,
    module: *mut CUmodule,
    image: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let bytes = || unsafe { bytes_of_image(image) };
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(module, image) };
    // SAFETY: the call writes to `module`.
    unsafe { load_with(module, bytes, call) }
}

pub(crate) unsafe fn unload(original: cuModuleUnload::Function, module: CUmodule) -> CUresult {
    let result = free_charged(
        |process| &process.modules,
        module.expose_provenance() as u64,
        // SAFETY: the caller's arguments.
        || unsafe { original(module) },
        |process, _, charge| {
            if let Some(gpu) = process.gpu(charge.gpu) {
                gpu.release(charge.bytes);
            }
        },
    );
    // Other functions may get the handles of its functions.
    metering::mark_all_stale();
    result
}

static GET_LIMIT: Original<GetLimit> = Original::new(Library::Cuda, c"cuCtxGetLimit");
type GetLimit = unsafe extern "C" fn(*mut usize, c_int) -> CUresult;

fn limit_of_context(limit: c_int) -> Option<u64> {
    let get = GET_LIMIT.get()?;
    let mut value = 0;
    // SAFETY: writes one number.
    let result = unsafe { get(&raw mut value, limit) };
    (result == CUDA_SUCCESS).then_some(value as u64)
}

/// Stack of each thread that is part of the context's own memory.
const DEFAULT_STACK: u64 = 1 << 10;

/// Returns the memory for that value of a limit; `None` if the limit takes no memory. A stack exists for each
/// thread that the GPU can run at once.
fn bytes_of_limit(device: CUdevice, limit: c_int, value: u64) -> Option<u64> {
    let bytes = match limit {
        CU_LIMIT_MALLOC_HEAP_SIZE | CU_LIMIT_PRINTF_FIFO_SIZE => value,
        CU_LIMIT_STACK_SIZE => value
            .saturating_sub(DEFAULT_STACK)
            .saturating_mul(attribute(device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?)
            .saturating_mul(attribute(
                device,
                CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
            )?),
        _ => return None,
    };
    Some(bytes.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX))
}

/// Charges heap, stack and output buffer of the context beyond their defaults, which are part of its own charge.
/// Only stacks shrink before the context ends.
pub(crate) unsafe fn set_limit(
    original: cuCtxSetLimit::Function,
    limit: c_int,
    value: usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(limit, value) };
    let (gpu, process) = match (target_of_current_context(), Process::get()) {
        (Target::Limited(gpu), Some(process)) => (gpu, process),
        (Target::Denied, _) => return CUDA_ERROR_OUT_OF_MEMORY,
        _ => return call(),
    };
    let known = current_context()
        .zip(current_device())
        .and_then(|(context, device)| {
            Some((context, bytes_of_limit(device, limit, value as u64)?))
        });
    let Some((context, bytes)) = known else {
        return call();
    };
    let key = context.rotate_left(8) ^ u64::from(limit.unsigned_abs());
    let charged = process.limits.get(key).map_or(0, |charge| charge.bytes);
    let is_default = charged == 0 && limit_of_context(limit) >= Some(value as u64);
    if bytes <= charged || is_default {
        let result = call();
        if result == CUDA_SUCCESS && limit == CU_LIMIT_STACK_SIZE && bytes < charged {
            let fewer = |charge: &Charge| (bytes != 0).then_some(Charge { bytes, ..*charge });
            let before = process.limits.change(key, fewer);
            let before = before.map_or(0, |charge| charge.bytes);
            gpu.release(before.saturating_sub(bytes));
        }
        return result;
    }
    // libcuda allocates the new size before it frees the old one.
    if !reserve(gpu, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    if result != CUDA_SUCCESS {
        gpu.release(bytes);
        return result;
    }
    let before = process.limits.remove(key);
    gpu.release(before.map_or(0, |charge| charge.bytes));
    let charge = Charge {
        bytes,
        gpu: gpu.index(),
        context,
    };
    process.limits.insert(key, charge);
    result
}

/// Removes the charges of modules and limits of a context that ends.
pub(crate) fn end_context(process: &Process, context: u64, freed: &mut FreedBytes) {
    let ends = |charge: &Charge| charge.context == context;
    for map in [&process.modules, &process.limits] {
        map.remove_all(ends, |_, charge| freed.add(charge.gpu, charge.bytes));
    }
}
