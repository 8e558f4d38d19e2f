//! Events of libcuda, by handle.

use core::ffi::c_uint;
use core::ptr;

use crate::driver_api::cuda::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUevent, CUresult, CUstream};
use crate::driver_api::driver::{Library, Original};

static CREATE: Original<Create> = Original::new(Library::Cuda, c"cuEventCreate");
static DESTROY: Original<OfEvent> = Original::new(Library::Cuda, c"cuEventDestroy_v2");
static RECORD: Original<Record> = Original::new(Library::Cuda, c"cuEventRecord");
static QUERY: Original<OfEvent> = Original::new(Library::Cuda, c"cuEventQuery");
static ELAPSED: Original<Elapsed> = Original::new(Library::Cuda, c"cuEventElapsedTime");

type Create = unsafe extern "C" fn(*mut CUevent, c_uint) -> CUresult;
type OfEvent = unsafe extern "C" fn(CUevent) -> CUresult;
type Record = unsafe extern "C" fn(CUevent, CUstream) -> CUresult;
type Elapsed = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

fn handle(event: u64) -> CUevent {
    ptr::with_exposed_provenance_mut(usize::try_from(event).unwrap_or(0))
}

pub(super) fn create() -> Option<u64> {
    let create = CREATE.get()?;
    let mut event = ptr::null_mut();
    // SAFETY: writes one event; without flags, so that it records the time.
    let result = unsafe { create(&raw mut event, 0) };
    (result == CUDA_SUCCESS).then(|| event.expose_provenance() as u64)
}

pub(super) fn destroy(event: u64) {
    if let Some(destroy) = DESTROY.get() {
        // SAFETY: created by the library, and not used afterwards.
        unsafe { destroy(handle(event)) };
    }
}

pub(super) fn record(event: u64, stream: CUstream) -> bool {
    let Some(record) = RECORD.get() else {
        return false;
    };
    // SAFETY: created by the library; the stream of the program's launch.
    unsafe { record(handle(event), stream) == CUDA_SUCCESS }
}

pub(super) fn query(event: u64) -> CUresult {
    let Some(query) = QUERY.get() else {
        return CUDA_ERROR_NOT_READY;
    };
    // SAFETY: created by the library.
    unsafe { query(handle(event)) }
}

/// Returns the time between two events that were reached, nanoseconds.
pub(super) fn elapsed_ns(start: u64, end: u64) -> Option<i64> {
    let elapsed = ELAPSED.get()?;
    let mut milliseconds = 0f32;
    // SAFETY: created by the library; writes one number.
    let result = unsafe { elapsed(&raw mut milliseconds, handle(start), handle(end)) };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "conversion of a float saturates"
    )]
    (result == CUDA_SUCCESS).then_some((f64::from(milliseconds) * 1e6) as i64)
}
