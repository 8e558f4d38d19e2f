//! Contexts. The first one of a process on a card costs what the driver takes for itself there, and the end of
//! one frees what was allocated in it.

use core::ffi::{c_int, c_uint, c_void};
use core::ptr::NonNull;
use core::sync::atomic::Ordering;

use crate::card::{Card, Target, target_of_device};
use crate::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS, CUcontext, CUdevice, CUresult};
use crate::driver::{Library, Original};
use crate::held::Held;
use crate::hooks::kept::take;
use crate::hooks::memory::{free_held, give_back_linear};
use crate::hooks::{array, green};
use crate::meter;
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

/// What a context costs before it is made.
enum Cost {
    Nothing,
    Charged(Card, u64),
}

/// Takes what the driver will take for a context.
fn pay(device: CUdevice) -> Result<Cost, CUresult> {
    let card = match target_of_device(device) {
        Target::Unlimited => return Ok(Cost::Nothing),
        Target::Refused => return Err(CUDA_ERROR_OUT_OF_MEMORY),
        Target::Limited(card) => card,
    };
    let reserve = card.driver_reserve_bytes();
    if !take(card, reserve) {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    card.add_driver_bytes(reserve);
    Ok(Cost::Charged(card, reserve))
}

fn pay_back(card: Card, bytes: u64) {
    card.subtract_driver_bytes(bytes);
    card.release(bytes);
}

/// Makes a context with `make`, which writes it to `context`.
fn charged(device: CUdevice, context: *mut CUcontext, make: impl FnOnce() -> CUresult) -> CUresult {
    let cost = match pay(device) {
        Ok(cost) => cost,
        Err(result) => return result,
    };
    let result = make();
    let Cost::Charged(card, bytes) = cost else {
        return result;
    };
    if result == CUDA_SUCCESS {
        let held = Held {
            bytes,
            card: card.index(),
            context: 0,
        };
        // SAFETY: the driver has written the context.
        let context = unsafe { context.read() }.expose_provenance() as u64;
        card.process().contexts.insert(context, held);
    } else {
        pay_back(card, bytes);
    }
    result
}

pub(crate) unsafe fn create(
    original: cuCtxCreate::Function,
    context: *mut CUcontext,
    flags: c_uint,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    charged(device, context, || unsafe {
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
    charged(device, context, || {
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
    charged(device, context, || {
        // SAFETY: the caller's arguments.
        unsafe { original(context, parameters, flags, device) }
    })
}

pub(crate) unsafe fn destroy(original: cuCtxDestroy::Function, context: CUcontext) -> CUresult {
    meter::forget_context(context.expose_provenance() as u64);
    let key = context.expose_provenance() as u64;
    free_held(
        |process| &process.contexts,
        key,
        || {
            // SAFETY: the caller's arguments.
            let result = unsafe { original(context) };
            meter::forget_card_of(|context| context == key);
            if result == CUDA_SUCCESS {
                release_all_of(key);
            }
            result
        },
        |process, _, held| {
            if let Some(card) = Card::at(process, held.card) {
                pay_back(card, held.bytes);
            }
        },
    )
}

pub(crate) unsafe fn retain_primary(
    original: cuDevicePrimaryCtxRetain::Function,
    context: *mut CUcontext,
    device: CUdevice,
) -> CUresult {
    // SAFETY: the caller's arguments.
    let call = || unsafe { original(context, device) };
    let Some(state) = device_state(device) else {
        return charged(device, context, call);
    };
    let result = retain(device, call);
    if result == CUDA_SUCCESS {
        // SAFETY: the driver has written the context.
        let context = unsafe { context.read() }.expose_provenance() as u64;
        state.primary.store(context, Ordering::Release);
    }
    result
}

/// Retains the primary context with `call`. It is made when it is first retained and whenever it was released or reset
/// since then.
pub(crate) fn retain(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some(state) = device_state(device) else {
        return call();
    };
    // Whoever marks it as charged pays for it, the others of this process do not.
    let is_first = state
        .charged
        .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire)
        .is_ok();
    if is_first {
        make_primary(state, device, call)
    } else {
        call()
    }
}

/// Makes the primary context with `make`; `state.charged` is the caller's.
fn make_primary(state: &Device, device: CUdevice, make: impl FnOnce() -> CUresult) -> CUresult {
    let cost = match pay(device) {
        Ok(cost) => cost,
        Err(result) => {
            state.charged.store(0, Ordering::Release);
            return result;
        }
    };
    let result = make();
    let mut charge = 0;
    match cost {
        Cost::Charged(_, bytes) if result == CUDA_SUCCESS => charge = bytes.saturating_add(1),
        Cost::Charged(card, bytes) => pay_back(card, bytes),
        Cost::Nothing => {}
    }
    state.charged.store(charge, Ordering::Release);
    result
}

/// Release and reset: what was allocated in the primary context is gone once it is not active any more.
pub(crate) unsafe fn end_primary(
    original: cuDevicePrimaryCtxRelease::Function,
    device: CUdevice,
) -> CUresult {
    meter::forget_all_contexts();
    // SAFETY: the caller's arguments.
    let result = unsafe { original(device) };
    meter::forget_card_of(|_| true);
    if result == CUDA_SUCCESS {
        look_at_primary(device);
    }
    result
}

/// After a release: returns the charge of the primary context, and of what was allocated in it and in its parts, if it
/// is not active any more.
pub(crate) fn look_at_primary(device: CUdevice) {
    let Some(state) = device_state(device).filter(|_| !is_primary_active(device)) else {
        return;
    };
    release_all_of(state.primary.load(Ordering::Acquire));
    if let Some(process) = Process::get() {
        green::end_parts(process, device, release_all_of);
    }
    let charge = state.charged.swap(0, Ordering::AcqRel);
    if let Target::Limited(card) = target_of_device(device) {
        pay_back(card, charge.saturating_sub(1));
    }
}

fn device_state(device: CUdevice) -> Option<&'static Device> {
    let ordinal = usize::try_from(device).ok()?;
    Process::get()?.devices.get(ordinal)
}

fn release_all_of(context: u64) {
    let Some(process) = Process::get().filter(|_| context != 0) else {
        return;
    };
    let ends = |held: &Held| held.context == context;
    process.pointers.remove_all(ends, |pointer, held| {
        give_back_linear(process, pointer, held);
    });
    process.room.forget_all();
    process.arrays.remove_all(ends, |array, held| {
        array::give_back_array(process, array, held)
    });
}
