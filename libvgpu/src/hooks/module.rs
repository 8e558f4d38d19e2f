//! Memory that libcuda allocates for modules and for the limits of a context.
//!
//! An image does not contain the size of its global variables (it may be compressed, or PTX), so loading is measured:
//! the growth of the GPU's used memory that the share's account does not explain. Code and small variables are part
//! of the estimate for a context until they add up to [`LEAST_BYTES`]. On a GPU with several tenants the growth may
//! include memory of another one; therefore a load is denied only if its undo returns the memory.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::sync::atomic::Ordering;

use crate::blocks::BLOCK;
use crate::card::Card;
use crate::charge_map::Charge;
use crate::cuda::{
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_LIMIT_MALLOC_HEAP_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_STACK_SIZE,
    CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUdevice, CUmodule, CUresult,
};
use crate::current::{Target, target_of_current_context};
use crate::device::{current_context, current_device};
use crate::driver::{Library, Original};
use crate::functions::{cuCtxSetLimit, cuModuleLoad, cuModuleLoadDataEx, cuModuleUnload};
use crate::hooks::driver_cache::reserve;
use crate::hooks::freed_bytes::FreedBytes;
use crate::hooks::memory::free_charged;
use crate::hooks::metering;
use crate::hooks::physical_use::{attribute, growth, uncounted_bytes};
use crate::process::Process;

/// Smallest growth that is charged.
const LEAST_BYTES: u64 = 16 << 20;
/// Attempts to load a module while another tenant's memory grows.
const ATTEMPTS: u32 = 3;

/// Charges the uncounted growth since `before` to the module at `key`.
///
/// # Errors
/// The growth, if it exceeds the limit; then nothing is charged.
pub(super) fn charge_growth(
    process: &'static Process,
    card: Card,
    key: u64,
    before: Option<i128>,
) -> Result<(), u64> {
    let uncharged = process
        .uncharged_module_bytes
        .get(usize::from(card.index()));
    let (Some(before), Some(after), Some(uncharged)) = (before, uncounted_bytes(card), uncharged)
    else {
        return Ok(());
    };
    let growth = growth(before, after).saturating_add(uncharged.swap(0, Ordering::Relaxed));
    if growth < LEAST_BYTES {
        uncharged.fetch_add(growth, Ordering::Relaxed);
        return Ok(());
    }
    let bytes = growth.checked_next_multiple_of(BLOCK).unwrap_or(growth);
    if !reserve(card, bytes) {
        return Err(bytes);
    }
    record(process, card, key, bytes);
    Ok(())
}

/// Records that the module at `key` in the current context is charged `bytes`.
pub(super) fn record(process: &Process, card: Card, key: u64, bytes: u64) {
    let charge = Charge {
        bytes,
        card: card.index(),
        context: current_context().unwrap_or(0),
    };
    process.modules.insert(key, charge);
}

/// Loads a module with `call`, which writes it to `module`.
///
/// # Safety
/// `call` calls libcuda, which writes to `module` on success.
unsafe fn load_with(module: *mut CUmodule, call: impl Fn() -> CUresult) -> CUresult {
    let (card, process) = match (target_of_current_context(), Process::get()) {
        (Target::Limited(card), Some(process)) => (card, process),
        _ => return call(),
    };
    for _ in 0..ATTEMPTS {
        let before = uncounted_bytes(card);
        let result = call();
        if result != CUDA_SUCCESS {
            return result;
        }
        // SAFETY: libcuda has written the module.
        let loaded = unsafe { module.read() };
        if charge_growth(process, card, loaded.expose_provenance() as u64, before).is_ok() {
            return result;
        }
        let with_module = uncounted_bytes(card);
        if let Some(unload) = cuModuleUnload::ORIGINAL.get() {
            // SAFETY: just loaded, and unknown to the program.
            unsafe { unload(loaded) };
        }
        // SAFETY: as above; the program must not see it.
        unsafe { module.write(core::ptr::null_mut()) };
        let returned = uncounted_bytes(card).zip(with_module);
        if returned.is_some_and(|(without, with)| growth(without, with) >= LEAST_BYTES) {
            break;
        }
    }
    CUDA_ERROR_OUT_OF_MEMORY
}

pub(crate) unsafe fn load(
    original: cuModuleLoad::Function,
    module: *mut CUmodule,
    path: *const c_char,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(module, path) };
    // SAFETY: the call writes to `module`.
    unsafe { load_with(module, call) }
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
    let call = || unsafe { original(module, image, count, options, values) };
    // SAFETY: the call writes to `module`.
    unsafe { load_with(module, call) }
}

/// As [`load`], from memory.
pub(crate) unsafe fn load_data(
    original: unsafe extern "C" fn(*mut CUmodule, *const c_void) -> CUresult,
    module: *mut CUmodule,
    image: *const c_void,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(module, image) };
    // SAFETY: the call writes to `module`.
    unsafe { load_with(module, call) }
}

pub(crate) unsafe fn unload(original: cuModuleUnload::Function, module: CUmodule) -> CUresult {
    let result = free_charged(
        |process| &process.modules,
        module.expose_provenance() as u64,
        // SAFETY: the caller's arguments.
        || unsafe { original(module) },
        |process, _, charge| {
            if let Some(card) = process.card(charge.card) {
                card.release(charge.bytes);
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

/// Returns the memory for that value of a limit; `None` if the limit takes no memory. A stack exists for each
/// thread that the GPU can run at once.
fn bytes_of_limit(device: CUdevice, limit: c_int, value: u64) -> Option<u64> {
    let bytes = match limit {
        CU_LIMIT_MALLOC_HEAP_SIZE | CU_LIMIT_PRINTF_FIFO_SIZE => value,
        CU_LIMIT_STACK_SIZE => value
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
/// They never shrink before the context ends.
pub(crate) unsafe fn set_limit(
    original: cuCtxSetLimit::Function,
    limit: c_int,
    value: usize,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(limit, value) };
    let (card, process) = match (target_of_current_context(), Process::get()) {
        (Target::Limited(card), Some(process)) => (card, process),
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
        return call();
    }
    // libcuda allocates the new size before it frees the old one.
    if !reserve(card, bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    if result != CUDA_SUCCESS {
        card.release(bytes);
        return result;
    }
    let before = process.limits.remove(key);
    card.release(before.map_or(0, |charge| charge.bytes));
    let charge = Charge {
        bytes,
        card: card.index(),
        context,
    };
    process.limits.insert(key, charge);
    result
}

/// Removes the charges of modules and limits of a context that ends.
pub(crate) fn end_context(process: &Process, context: u64, freed: &mut FreedBytes) {
    let ends = |charge: &Charge| charge.context == context;
    for map in [&process.modules, &process.limits] {
        map.remove_all(ends, |_, charge| freed.add(charge.card, charge.bytes));
    }
}
