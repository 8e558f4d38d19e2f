//! Keys of the streams in which memory is freed, and their devices.
//!
//! A handle identifies a stream only during its lifetime, and the handle of a default stream means another stream
//! in each context, or in each thread.

use core::ptr;

use crate::driver_api::cuda::{
    CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, CUDA_SUCCESS, CUcontext, CUdevice, CUresult, CUstream,
};
use crate::driver_api::device::{current_context, current_device};
use crate::driver_api::driver::{Library, Original};
use crate::hooks::metering;
use crate::system::sys;

/// Marks of keys that are not handles; handles are below them.
const LEGACY: u64 = 1 << 63;
const PER_THREAD: u64 = 1 << 62;
/// Position of the thread ID, which is below 2²² on Linux.
const THREAD_SHIFT: u32 = 40;

static QUERY: Original<Query> = Original::new(Library::Cuda, c"cuStreamQuery");
type Query = unsafe extern "C" fn(CUstream) -> CUresult;

static GET_DEVICE: Original<GetDevice> = Original::new(Library::Cuda, c"cuStreamGetDevice");
type GetDevice = unsafe extern "C" fn(CUstream, *mut CUdevice) -> CUresult;

static GET_CONTEXT: Original<GetContext> = Original::new(Library::Cuda, c"cuStreamGetCtx");
type GetContext = unsafe extern "C" fn(CUstream, *mut CUcontext) -> CUresult;
static PUSH: Original<Push> = Original::new(Library::Cuda, c"cuCtxPushCurrent_v2");
type Push = unsafe extern "C" fn(CUcontext) -> CUresult;
static POP: Original<Pop> = Original::new(Library::Cuda, c"cuCtxPopCurrent_v2");
type Pop = unsafe extern "C" fn(*mut CUcontext) -> CUresult;

/// Returns the device of a stream. A default stream belongs to the current context.
pub(crate) fn device_of(stream: CUstream) -> Option<CUdevice> {
    if stream.is_null() || [CU_STREAM_LEGACY, CU_STREAM_PER_THREAD].contains(&stream) {
        return current_device();
    }
    let Some(get) = GET_DEVICE.get() else {
        // Before CUDA 12.8.
        return device_of_context(stream);
    };
    let mut device = 0;
    // SAFETY: writes one device.
    let result = unsafe { get(stream, &raw mut device) };
    if result == CUDA_SUCCESS {
        Some(device)
    } else {
        current_device()
    }
}

/// Returns the device of the stream's context, which is made current for the query.
fn device_of_context(stream: CUstream) -> Option<CUdevice> {
    let (Some(get), Some(push), Some(pop)) = (GET_CONTEXT.get(), PUSH.get(), POP.get()) else {
        return current_device();
    };
    let mut context = ptr::null_mut();
    // SAFETY: writes one context.
    if unsafe { get(stream, &raw mut context) } != CUDA_SUCCESS {
        return current_device();
    }
    if current_context() == Some(context.expose_provenance() as u64) {
        return current_device();
    }
    // SAFETY: the context was just returned by libcuda.
    if unsafe { push(context) } != CUDA_SUCCESS {
        return current_device();
    }
    let device = current_device();
    // SAFETY: pops the pushed context and writes it.
    unsafe { pop(&raw mut context) };
    device
}

/// Returns a key that identifies the stream of this thread; `None` without a context.
pub(crate) fn key_of(stream: CUstream) -> Option<u64> {
    if stream.is_null() || stream == CU_STREAM_LEGACY {
        return Some(LEGACY | current_context()?);
    }
    if stream == CU_STREAM_PER_THREAD {
        let thread = u64::from(sys::thread_id()).wrapping_shl(THREAD_SHIFT);
        return Some(PER_THREAD | (current_context()? ^ thread));
    }
    Some(stream.expose_provenance() as u64)
}

/// Returns whether a stream has completed its present work. Always `false` for default streams, which have no
/// handle of their own, and during a capture, which the query would invalidate.
pub(crate) fn has_passed(key: u64) -> bool {
    if key & (LEGACY | PER_THREAD) != 0 {
        return false;
    }
    usize::try_from(key).is_ok_and(|address| is_idle(ptr::with_exposed_provenance_mut(address)))
}

/// Queries a stream that was used and not destroyed (see [`crate::hooks::pool::forget_stream`]), except during a capture.
fn is_idle(stream: CUstream) -> bool {
    let Some(query) = QUERY.get() else {
        return false;
    };
    // SAFETY: the caller's stream.
    metering::outside_captures(|| unsafe { query(stream) }) == Some(CUDA_SUCCESS)
}
