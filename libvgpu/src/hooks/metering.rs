//! The process's meter, for the hooks of launches and captures.

use drava_vgpu_abi::cost::{Cost, LaunchKind};

use crate::current::{Target, target_of};
use crate::driver_api::cuda::{CUdevice, CUresult, CUstream};
use crate::driver_api::device::uuid_of;
use crate::limits::gpu::Gpu;
use crate::meter::{FastPath, Meter};
pub(crate) use crate::meter::{Legacy, NullStream, PerThread, relaxed};
use crate::process::Process;

/// Makes a launch of the kind with the call once the share may make it.
///
/// A macro, because the call is written twice: after the fast path no argument needs to be saved for it.
macro_rules! metered {
    ($kind:expr, $stream:expr, $call:expr) => {{
        let kind = $kind;
        match $crate::hooks::metering::try_fast_path(kind) {
            $crate::meter::FastPath::Admitted => $call,
            $crate::meter::FastPath::Miss => {
                $crate::hooks::metering::launch(kind, $stream, move || $call)
            }
        }
    }};
}
pub(crate) use metered;

/// See [`Meter::try_fast_path`].
#[inline(always)]
pub(crate) fn try_fast_path(kind: LaunchKind) -> FastPath {
    // A process with a known GPU has read its limits; a forked child knows none.
    match Process::mapped() {
        Some(process) => process.meter.try_fast_path(kind),
        None => FastPath::Miss,
    }
}

/// See [`Meter::launch`].
#[cold]
#[inline(never)]
pub(crate) fn launch(
    kind: LaunchKind,
    stream: CUstream,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(process) = Process::get() else {
        return call();
    };
    let metered_gpu = |device| metered_gpu(process, device);
    process
        .meter
        .launch(kind, stream, &process.shares, metered_gpu, call)
}

/// Returns the GPU of a device if its time is metered.
fn metered_gpu(process: &'static Process, device: CUdevice) -> Option<Gpu> {
    let uuid = uuid_of(device)?;
    match target_of(process, uuid, u32::try_from(device).ok()) {
        Target::Limited(gpu) if gpu.is_metered() => Some(gpu),
        Target::Limited(_) | Target::Unlimited | Target::Denied => None,
    }
}

fn meter() -> Option<&'static Meter> {
    Process::get().map(|process| &process.meter)
}

/// See [`Meter::known_cost_ns`].
pub(crate) fn known_cost_ns(kind: LaunchKind) -> Option<u64> {
    meter()?.known_cost_ns(kind)
}

/// See [`Meter::expect`].
pub(crate) fn expect(kind: LaunchKind, cost: Cost) {
    if let Some(meter) = meter() {
        meter.expect(kind, cost);
    }
}

/// See [`Meter::mark_stale`].
pub(crate) fn mark_stale(kind: LaunchKind) {
    if let Some(meter) = meter() {
        meter.mark_stale(kind);
    }
}

/// See [`Meter::mark_all_stale`].
pub(crate) fn mark_all_stale() {
    if let Some(meter) = meter() {
        meter.mark_all_stale();
    }
}

/// See [`Meter::begin_end_of_contexts`].
pub(crate) fn begin_end_of_contexts(ends: impl Fn(u64) -> bool) {
    if let Some(meter) = meter() {
        meter.begin_end_of_contexts(ends);
    }
}

/// See [`Meter::end_contexts`].
pub(crate) fn end_contexts(has_ended: impl Fn(u64) -> bool) {
    if let Some(meter) = meter() {
        meter.end_contexts(has_ended);
    }
}

/// Begins a capture of the stream with `call`.
pub(crate) fn begin_capture(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    match meter() {
        Some(meter) => meter.captures.begin(stream, call),
        None => call(),
    }
}

/// Ends a capture of the stream with `call`, successful or not.
pub(crate) fn end_capture(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if let Some(meter) = meter()
        && !meter.captures.is_capturing(stream)
    {
        meter.captures.end(stream);
    }
    result
}

/// Drops a destroyed stream.
pub(crate) fn forget_stream(stream: CUstream) {
    if let Some(meter) = meter() {
        meter.captures.end(stream);
    }
}

/// Returns whether the stream is being captured.
pub(crate) fn is_capturing(stream: CUstream) -> bool {
    meter().is_some_and(|meter| meter.captures.is_capturing(stream))
}

/// Calls libcuda for the library itself, unless a capture is active.
pub(crate) fn outside_captures<T>(calls: impl FnOnce() -> T) -> Option<T> {
    meter()?.captures.outside(calls)
}
