//! Contexts. The first one of a process on a card costs what the driver takes for itself there, and the end of
//! one frees what was allocated in it.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::card::{Card, Target, target_of_device};
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUcontext, CUdevice, CUresult};
use crate::driver::{Library, Original};
use crate::process::{Device, Process};
use crate::table::{
    cuCtxCreate, cuCtxCreate_v3, cuCtxCreate_v4, cuCtxDestroy, cuDevicePrimaryCtxRelease,
    cuDevicePrimaryCtxRetain,
};

static PRIMARY_STATE: Original = Original::new(Library::Cuda, c"cuDevicePrimaryCtxGetState");
type PrimaryState = unsafe extern "C" fn(CUdevice, *mut c_uint, *mut c_int) -> CUresult;

fn is_primary_active(device: CUdevice) -> bool {
    let Some(state) = PRIMARY_STATE.address() else {
        return true;
    };
    // SAFETY: the signature of `cuDevicePrimaryCtxGetState`.
    let state = unsafe { core::mem::transmute::<NonNull<c_void>, PrimaryState>(state) };
    let (mut flags, mut active) = (0, 1);
    // SAFETY: writes two integers.
    unsafe { state(device, &raw mut flags, &raw mut active) };
    active != 0
}

/// Calls `create` with the driver's reserve charged, if the process has no context on the device yet.
fn charged(device: CUdevice, create: impl FnOnce() -> CUresult) -> CUresult {
    let card = match target_of_device(device) {
        Target::Unlimited => return create(),
        Target::Refused => return CUDA_ERROR_OUT_OF_MEMORY,
        Target::Limited(card) => card,
    };
    let state = Process::get()
        .zip(usize::try_from(device).ok())
        .and_then(|(process, ordinal)| process.devices.get(ordinal));
    let Some(state) = state else {
        return create();
    };
    let reserve = card.driver_reserve_bytes();
    let charge = reserve.saturating_add(1);
    let charged = &state.charged;
    if charged
        .compare_exchange(0, charge, Ordering::AcqRel, Ordering::Acquire)
        .is_err()
    {
        return create();
    }
    if card.reserve(reserve).is_err() {
        charged.store(0, Ordering::Release);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    card.count_driver_bytes(reserve);
    let result = create();
    if result != CUDA_SUCCESS {
        uncharge(card, state);
    }
    result
}

fn uncharge(card: Card, state: &Device) {
    let charge = state.charged.swap(0, Ordering::AcqRel);
    card.release(charge.saturating_sub(1));
    card.count_driver_bytes(0);
}

pub(crate) unsafe fn create(
    original: cuCtxCreate::Function,
    context: *mut CUcontext,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    charged(device, || unsafe { original(context, flags, device) })
}

pub(crate) unsafe fn create_v3(
    original: cuCtxCreate_v3::Function,
    context: *mut CUcontext,
    affinity: *mut c_void,
    count: c_int,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    charged(device, || {
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
    charged(device, || {
        // SAFETY: the caller's arguments.
        unsafe { original(context, parameters, flags, device) }
    })
}

pub(crate) unsafe fn destroy(original: cuCtxDestroy::Function, context: CUcontext) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(context) };
    if result == CUDA_SUCCESS {
        release_all_of(context.expose_provenance() as u64);
    }
    result
}

pub(crate) unsafe fn retain_primary(
    original: cuDevicePrimaryCtxRetain::Function,
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    let result = charged(device, || {
        // SAFETY: the caller's arguments.
        unsafe { original(context, device) }
    });
    if result == CUDA_SUCCESS
        && let Some(state) = device_state(device)
    {
        // SAFETY: the driver has written the context.
        let context = unsafe { context.read() }.expose_provenance() as u64;
        state.primary.store(context, Ordering::Release);
    }
    result
}

/// Release and reset: what was allocated in the primary context is gone once it is not active any more.
pub(crate) unsafe fn end_primary(
    original: cuDevicePrimaryCtxRelease::Function,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device) };
    if result == CUDA_SUCCESS
        && !is_primary_active(device)
        && let Some(state) = device_state(device)
    {
        release_all_of(state.primary.load(Ordering::Acquire));
        if let Target::Limited(card) = target_of_device(device) {
            uncharge(card, state);
        }
    }
    result
}

fn device_state(device: CUdevice) -> Option<&'static Device> {
    let ordinal = usize::try_from(device).ok()?;
    Process::get()?.devices.get(ordinal)
}

fn release_all_of(context: u64) {
    let Some(process) = Process::get().filter(|_| context != 0) else {
        return;
    };
    for map in [&process.pointers, &process.arrays] {
        map.remove_all(
            |held| held.context == context,
            |held| {
                if let Some(card) = Card::at(process, held.card) {
                    card.release(held.bytes);
                }
            },
        );
    }
}
