//! Which streams of the process are being captured, and when events may be used.
//!
//! In the global capture mode, an event call by any thread of the process spoils a capture that another thread is
//! making, even if it concerns neither. So our own calls stop before a capture begins:
//!
//! ```text
//! beginning:  captures += 1 │ wait until no own call is under way │ ask the driver to begin
//! own call:   own calls += 1 │ if captures is 0: make it          │ own calls −= 1
//! ```
//!
//! Both sides write before they read, so at least one sees the other. In addition own calls are made in the relaxed
//! capture mode, for captures that began without our knowledge.

use core::ffi::c_int;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::cuda::{
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_LEGACY, CUDA_SUCCESS,
    CUresult, CUstream,
};
use crate::driver::{Library, Original};
use crate::process::Process;
use crate::sys;

/// Captures at the same time whose streams are known; further ones are only counted.
const STREAMS: usize = 64;

static IS_CAPTURING: Original = Original::new(Library::Cuda, c"cuStreamIsCapturing");
static EXCHANGE_MODE: Original = Original::new(Library::Cuda, c"cuThreadExchangeStreamCaptureMode");

type IsCapturing = unsafe extern "C" fn(CUstream, *mut c_int) -> CUresult;
type ExchangeMode = unsafe extern "C" fn(*mut c_int) -> CUresult;

/// All zeroes is none.
#[repr(C)]
pub(crate) struct Captures {
    /// Far from the last two, which each launch reads.
    own_calls: AtomicU32,
    streams: [AtomicU64; STREAMS],
    active: AtomicU32,
    /// Launches that all are to be sampled, see [`super::samples`].
    stretch: AtomicU32,
}

impl Captures {
    /// Whether launches must be looked at more closely: something is being captured or sampled in a row.
    #[inline]
    pub(crate) fn needs_attention(&self) -> bool {
        self.active.load(Ordering::Relaxed) | self.stretch.load(Ordering::Relaxed) != 0
    }

    /// Whether any stream is being captured.
    pub(crate) fn is_any(&self) -> bool {
        self.active.load(Ordering::SeqCst) != 0
    }

    /// Returns whether the stream is being captured. libcuda is asked, because captures also begin by functions that
    /// are not hooked.
    pub(crate) fn is_capturing(&self, stream: CUstream) -> bool {
        // The legacy stream cannot be captured, and a query of it can invalidate captures.
        if stream.is_null() || stream == CU_STREAM_LEGACY {
            return false;
        }
        let Some(ask) = IS_CAPTURING.address() else {
            return false;
        };
        // SAFETY: the signature of `cuStreamIsCapturing`.
        let ask = unsafe { core::mem::transmute::<NonNull<_>, IsCapturing>(ask) };
        let mut status = CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the program is about to launch into that stream; writes one number.
        let result = unsafe { ask(stream, &raw mut status) };
        result == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE
    }

    fn begin(&self, stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
        self.active.fetch_add(1, Ordering::SeqCst);
        while self.own_calls.load(Ordering::SeqCst) != 0 {
            sys::yield_now();
        }
        let result = call();
        if result == CUDA_SUCCESS {
            self.note(stream);
        } else {
            self.active.fetch_sub(1, Ordering::SeqCst);
        }
        result
    }

    fn note(&self, stream: CUstream) {
        let stream = key_of(stream);
        for place in &self.streams {
            if place
                .compare_exchange(0, stream, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                return;
            }
        }
    }

    /// A capture of that stream is over, if there was one.
    fn end(&self, stream: CUstream) {
        let stream = key_of(stream);
        for place in &self.streams {
            if place
                .compare_exchange(stream, 0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                self.active.fetch_sub(1, Ordering::SeqCst);
                return;
            }
        }
    }

    /// Makes calls of our own to the driver if nothing is being captured, in the relaxed mode.
    pub(crate) fn without<T>(&self, calls: impl FnOnce() -> T) -> Option<T> {
        self.own_calls.fetch_add(1, Ordering::SeqCst);
        let result = if self.is_any() {
            None
        } else {
            let mode = exchange_mode(CU_STREAM_CAPTURE_MODE_RELAXED);
            let result = calls();
            if let Some(mode) = mode {
                exchange_mode(mode);
            }
            Some(result)
        };
        self.own_calls.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Begins a row of `launches` that are all sampled.
    pub(crate) fn begin_stretch(&self, launches: u32) {
        self.stretch.store(launches, Ordering::Relaxed);
    }

    /// How many launches of a row are left, this one included; 0 if there is no row.
    pub(crate) fn step_stretch(&self) -> u32 {
        let left = self.stretch.load(Ordering::Relaxed);
        if left != 0 {
            self.stretch
                .store(left.saturating_sub(1), Ordering::Relaxed);
        }
        left
    }
}

/// A handle that is not zero.
fn key_of(stream: CUstream) -> u64 {
    (stream.expose_provenance() as u64).max(1)
}

fn exchange_mode(mode: c_int) -> Option<c_int> {
    let exchange = EXCHANGE_MODE.address()?;
    // SAFETY: the signature of `cuThreadExchangeStreamCaptureMode`.
    let exchange = unsafe { core::mem::transmute::<NonNull<_>, ExchangeMode>(exchange) };
    let mut mode = mode;
    // SAFETY: reads and writes one number.
    let result = unsafe { exchange(&raw mut mode) };
    (result == CUDA_SUCCESS).then_some(mode)
}

/// Begins a capture of that stream with `call`.
pub(crate) fn begin(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    match Process::get() {
        Some(process) => process.meter.captures.begin(stream, call),
        None => call(),
    }
}

/// That stream is gone.
pub(crate) fn forget(stream: CUstream) {
    if let Some(process) = Process::get() {
        process.meter.captures.end(stream);
    }
}

/// Ends a capture of that stream, whether or not anything comes of it.
pub(crate) fn end(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if let Some(process) = Process::get()
        && !process.meter.captures.is_capturing(stream)
    {
        process.meter.captures.end(stream);
    }
    result
}

/// Whether that stream is being captured.
pub(crate) fn is_capturing(stream: CUstream) -> bool {
    Process::get().is_some_and(|process| process.meter.captures.is_capturing(stream))
}

/// Makes calls of our own to the driver if nothing is being captured.
pub(crate) fn while_nothing_is_captured<T>(calls: impl FnOnce() -> T) -> Option<T> {
    Process::get()?.meter.captures.without(calls)
}
