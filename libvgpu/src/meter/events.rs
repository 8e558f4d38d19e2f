//! The driver's events, by number.

use core::ffi::c_uint;
use core::ptr::{self, NonNull};

use crate::cuda::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUevent, CUresult, CUstream};
use crate::driver::{Library, Original};

static CREATE: Original = Original::new(Library::Cuda, c"cuEventCreate");
static DESTROY: Original = Original::new(Library::Cuda, c"cuEventDestroy_v2");
static RECORD: Original = Original::new(Library::Cuda, c"cuEventRecord");
static QUERY: Original = Original::new(Library::Cuda, c"cuEventQuery");
static ELAPSED: Original = Original::new(Library::Cuda, c"cuEventElapsedTime");

type Create = unsafe extern "C" fn(*mut CUevent, c_uint) -> CUresult;
type OfEvent = unsafe extern "C" fn(CUevent) -> CUresult;
type Record = unsafe extern "C" fn(CUevent, CUstream) -> CUresult;
type Elapsed = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

fn handle(event: u64) -> CUevent {
    ptr::with_exposed_provenance_mut(usize::try_from(event).unwrap_or(0))
}

pub(super) fn create() -> Option<u64> {
    let create = CREATE.address()?;
    // SAFETY: the signature of `cuEventCreate`.
    let create = unsafe { core::mem::transmute::<NonNull<_>, Create>(create) };
    let mut event = ptr::null_mut();
    // SAFETY: writes one event; no flags, so that it takes times.
    let result = unsafe { create(&raw mut event, 0) };
    (result == CUDA_SUCCESS).then(|| event.expose_provenance() as u64)
}

pub(super) fn destroy(event: u64) {
    if let Some(destroy) = DESTROY.address() {
        // SAFETY: the signature of `cuEventDestroy_v2`.
        let destroy = unsafe { core::mem::transmute::<NonNull<_>, OfEvent>(destroy) };
        // SAFETY: an event of ours that is not used after this.
        unsafe { destroy(handle(event)) };
    }
}

pub(super) fn record(event: u64, stream: CUstream) -> bool {
    let Some(record) = RECORD.address() else {
        return false;
    };
    // SAFETY: the signature of `cuEventRecord`.
    let record = unsafe { core::mem::transmute::<NonNull<_>, Record>(record) };
    // SAFETY: an event of ours, and the stream that the program launches into.
    unsafe { record(handle(event), stream) == CUDA_SUCCESS }
}

pub(super) fn query(event: u64) -> CUresult {
    let Some(query) = QUERY.address() else {
        return CUDA_ERROR_NOT_READY;
    };
    // SAFETY: the signature of `cuEventQuery`.
    let query = unsafe { core::mem::transmute::<NonNull<_>, OfEvent>(query) };
    // SAFETY: an event of ours.
    unsafe { query(handle(event)) }
}

/// Nanoseconds from one event that was reached to another.
pub(super) fn elapsed_ns(start: u64, end: u64) -> Option<i64> {
    let elapsed = ELAPSED.address()?;
    // SAFETY: the signature of `cuEventElapsedTime`.
    let elapsed = unsafe { core::mem::transmute::<NonNull<_>, Elapsed>(elapsed) };
    let mut milliseconds = 0f32;
    // SAFETY: events of ours; writes one number.
    let result = unsafe { elapsed(&raw mut milliseconds, handle(start), handle(end)) };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "conversion of a float saturates"
    )]
    (result == CUDA_SUCCESS).then_some((f64::from(milliseconds) * 1e6) as i64)
}
