//! Captures of the process's streams, and when events may be used.
//!
//! In the global capture mode, an event call by any thread of the process invalidates a capture by another thread,
//! even if the call concerns neither. So the library's own calls stop before a capture begins:
//!
//! ```text
//! capture:   active += 1    │ wait until own calls is 0      │ ask libcuda to begin
//! own call:  own calls += 1 │ if active is 0: make the call  │ own calls −= 1
//! ```
//!
//! Both sides write before they read, so at least one sees the other. In addition, own calls are made in the relaxed
//! capture mode, and libcuda is asked about the stream before an event is recorded in it: captures also begin by
//! functions without a hook.
//!
//! An own call blocks while its stream is full, possibly until the capturing thread proceeds. So the wait is bounded;
//! after it, only the relaxed mode protects the capture.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::driver_api::cuda::{
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_LEGACY, CUDA_SUCCESS,
    CUresult, CUstream,
};
use crate::driver_api::device::current_context;
use crate::driver_api::driver::{Library, Original};
use crate::system::guard;

/// Concurrent captures whose streams are recorded; further ones are only counted.
const CAPTURES: usize = 64;

static IS_CAPTURING: Original<IsCapturing> = Original::new(Library::Cuda, c"cuStreamIsCapturing");
static EXCHANGE_MODE: Original<ExchangeMode> =
    Original::new(Library::Cuda, c"cuThreadExchangeStreamCaptureMode");

type IsCapturing = unsafe extern "C" fn(CUstream, *mut c_int) -> CUresult;
type ExchangeMode = unsafe extern "C" fn(*mut c_int) -> CUresult;

/// The known captures. All zeroes is none.
#[repr(C)]
pub(crate) struct Captures {
    /// Far from the last two fields, which each launch reads.
    own_calls: AtomicU32,
    captures: [Capture; CAPTURES],
    active: AtomicU32,
    /// Remaining launches of a run of sampled launches, see [`super::samples`].
    run: AtomicU32,
}

/// A stream that is being captured. All zeroes is none.
struct Capture {
    stream: AtomicU64,
    /// The context in which the capture began, 0 if none.
    context: AtomicU64,
}

impl Captures {
    /// Returns whether launches need the slow path: a capture or a run of samples is active.
    #[inline]
    pub(super) fn needs_attention(&self) -> bool {
        self.active.load(Ordering::Relaxed) | self.run.load(Ordering::Relaxed) != 0
    }

    /// Returns whether a known capture is active.
    pub(super) fn is_any(&self) -> bool {
        self.active.load(Ordering::SeqCst) != 0
    }

    /// Returns whether the stream is being captured, according to libcuda.
    pub(crate) fn is_capturing(&self, stream: CUstream) -> bool {
        // The legacy stream cannot be captured, and a query of it can invalidate captures.
        if stream.is_null() || stream == CU_STREAM_LEGACY {
            return false;
        }
        let Some(is_capturing) = IS_CAPTURING.get() else {
            return false;
        };
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the program uses the stream in its call; writes one number.
        let result = unsafe { is_capturing(stream, &raw mut status) };
        result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE
    }

    /// Begins a capture of the stream with `call`.
    pub(crate) fn begin(&self, stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
        self.active.fetch_add(1, Ordering::SeqCst);
        guard::wait(|| self.own_calls.load(Ordering::SeqCst) == 0);
        let result = call();
        if result == CUDA_SUCCESS {
            self.add(stream);
        } else {
            self.active.fetch_sub(1, Ordering::SeqCst);
        }
        result
    }

    fn add(&self, stream: CUstream) {
        let free = self.captures.iter().find(|capture| {
            let taken = capture.stream.compare_exchange(
                0,
                key_of(stream),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            taken.is_ok()
        });
        if let Some(capture) = free {
            let context = current_context().unwrap_or(0);
            capture.context.store(context, Ordering::Release);
        }
    }

    /// Ends the capture of the stream, if there is one.
    pub(crate) fn end(&self, stream: CUstream) {
        let stream = key_of(stream);
        self.end_first(|capture| capture.stream.load(Ordering::Acquire) == stream);
    }

    /// Ends the captures of streams that ended with their contexts.
    pub(super) fn end_contexts(&self, has_ended: impl Fn(u64) -> bool) {
        let is_over = |capture: &Capture| {
            let context = capture.context.load(Ordering::Acquire);
            context != 0 && has_ended(context)
        };
        while self.end_first(is_over) {}
    }

    /// Ends the first capture for which `is_over` is true. Returns `false` if there is none.
    fn end_first(&self, is_over: impl Fn(&Capture) -> bool) -> bool {
        let Some(capture) = self.captures.iter().find(|capture| is_over(capture)) else {
            return false;
        };
        capture.context.store(0, Ordering::Relaxed);
        if capture.stream.swap(0, Ordering::AcqRel) != 0 {
            self.active.fetch_sub(1, Ordering::SeqCst);
        }
        true
    }

    /// Makes own calls to libcuda in the relaxed mode, unless a known capture is active.
    pub(crate) fn outside<T>(&self, calls: impl FnOnce() -> T) -> Option<T> {
        self.own_calls.fetch_add(1, Ordering::SeqCst);
        let result = if self.is_any() {
            None
        } else {
            Some(relaxed(calls))
        };
        self.own_calls.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Begins a run of `launches` that are all sampled.
    pub(super) fn begin_run(&self, launches: u32) {
        self.run.store(launches, Ordering::Relaxed);
    }

    /// Counts a launch of a run and returns the remaining launches with it; 0 without a run.
    pub(super) fn step_run(&self) -> u32 {
        let remaining = self.run.load(Ordering::Relaxed);
        if remaining != 0 {
            self.run
                .store(remaining.saturating_sub(1), Ordering::Relaxed);
        }
        remaining
    }
}

/// Returns the handle, not zero.
fn key_of(stream: CUstream) -> u64 {
    (stream.expose_provenance() as u64).max(1)
}

/// Makes calls to libcuda that concern no captured stream and leave the captures of all threads alone.
pub(crate) fn relaxed<T>(calls: impl FnOnce() -> T) -> T {
    let mode = exchange_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
    let result = calls();
    if let Some(mode) = mode {
        exchange_mode(mode);
    }
    result
}

fn exchange_mode(mode: c_int) -> Option<c_int> {
    let exchange = EXCHANGE_MODE.get()?;
    let mut mode = mode;
    // SAFETY: reads and writes one number.
    let result = unsafe { exchange(&raw mut mode) };
    (result == CUDA_SUCCESS).then_some(mode)
}
