//! Metering: a share gets its part of the GPU's time.
//!
//! | Question | Module |
//! |---|---|
//! | Has this thread GPU time left? | [`lease`] |
//! | If not, when does the share have some? | [`admission`] |
//! | What does a launch cost? | [`costs`], learned from [`samples`] |
//! | May events be used now? | [`capture`] |
//! | Which GPU executes the launch? | [`gpus`] |
//!
//! A launch is charged the cost of its kind before it is made. While the thread's lease covers the cost, the launch
//! touches no memory that other threads write, and makes no system call. Otherwise the share's debt bucket grants
//! GPU time; a launch of a share in debt waits, outside of any lock.
//!
//! Invariants:
//! - A launch into a stream that is being captured is neither charged nor delayed.
//! - While a known capture is active in the process, no launch waits and no event is used.
//! - If GPU time cannot be counted (no region, no memory for state), launches are admitted: memory is denied instead.
//! - No launch waits without end: the launches of a process that run are together charged at most [`MAX_BELIEVED_NS`]
//!   until they end, so the debt is repaid while they run. A launch that waited for [`MAX_ADMISSION_WAIT_US`] is admitted
//!   if the share has no rate, or if a launch in flight runs for longer than is believed of its kind, since that launch
//!   may wait for this one.
//!
//! [`MAX_BELIEVED_NS`]: drava_vgpu_abi::cost::MAX_BELIEVED_NS
//! [`MAX_ADMISSION_WAIT_US`]: drava_vgpu_abi::bucket::MAX_ADMISSION_WAIT_US

use drava_vgpu_abi::cost::{Cost, LaunchKind};

use crate::driver_api::cuda::{CUDA_SUCCESS, CUdevice, CUresult, CUstream};
use crate::limits::gpu::Gpu;
use crate::limits::shares::{MAX_SHARES, Shares};

mod admission;
mod capture;
mod contexts;
mod costs;
mod counted_time;
mod events;
mod gpus;
mod lease;
mod samples;
mod stream;

use capture::Captures;
pub(crate) use capture::relaxed;
use costs::Costs;
use counted_time::CountedTime;
use gpus::{Gpus, Known};
use lease::Leases;
use samples::Samples;
pub(crate) use stream::{Legacy, NullStream, PerThread};

/// Metering state of a process. All zeroes is a process without launches.
///
/// The words that each launch reads and few launches write are in one cache line: the end of the first field and the
/// beginning of the second.
#[repr(C, align(64))]
pub(crate) struct Meter {
    pub(crate) captures: Captures,
    gpus: Gpus,
    leases: Leases,
    costs: Costs,
    samples: Samples,
    /// Elapsed time of launches, including time slices of other shares; known if the share notifies the agent.
    durations: Costs,
    /// By [`Gpu::index`]: each GPU's share has its own counter.
    counted_times: [CountedTime; MAX_SHARES],
}

/// Result of [`Meter::try_fast_path`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum FastPath {
    /// The launch is charged.
    Admitted,
    /// The launch needs [`Meter::launch`].
    Miss,
}

impl Meter {
    /// Charges a launch to the thread's lease if the lease covers it.
    ///
    /// Reads four cache lines and writes one, the lease, which no other thread touches.
    #[inline(always)]
    pub(crate) fn try_fast_path(&self, kind: LaunchKind) -> FastPath {
        let gpu = match self.gpus.known() {
            Known::Metered(gpu) => gpu,
            Known::NotMetered => return FastPath::Admitted,
            Known::Unknown => return FastPath::Miss,
        };
        let lease = self.leases.of_this_thread(gpu);
        if !self.captures.needs_attention() && lease.spend(self.costs.get(kind)) {
            FastPath::Admitted
        } else {
            FastPath::Miss
        }
    }

    /// Makes a launch with `call` once the share may make it. `metered_gpu` returns the GPU of a device if its time
    /// is metered, one of `shares`.
    pub(crate) fn launch(
        &self,
        kind: LaunchKind,
        stream: CUstream,
        shares: &'static Shares,
        metered_gpu: impl Fn(CUdevice) -> Option<Gpu>,
        call: impl FnOnce() -> CUresult,
    ) -> CUresult {
        let gpu = self.gpus.find(metered_gpu);
        let Some(gpu) = gpu.and_then(|gpu| Gpu::at(shares, gpu)) else {
            return call();
        };
        if self.captures.is_capturing(stream) {
            return call();
        }
        let lease = self.leases.of_this_thread(gpu.index());
        let charged_ns = self.admit(gpu, kind, lease);
        let Some(sample) = self.start_sample(gpu, kind, stream, lease, charged_ns) else {
            return call();
        };
        let result = call();
        self.end_sample(sample, stream, result == CUDA_SUCCESS);
        result
    }

    /// Returns the learned cost of a kind, nanoseconds.
    pub(crate) fn known_cost_ns(&self, kind: LaunchKind) -> Option<u64> {
        let cost = self.costs.get(kind);
        (cost.samples() != 0).then(|| cost.ns())
    }

    /// Replaces the learned cost of a kind by `cost`.
    pub(crate) fn expect(&self, kind: LaunchKind, cost: Cost) {
        self.costs.set(kind, cost);
        self.durations.forget(kind);
    }

    /// Marks the learned cost of a kind as possibly outdated.
    pub(crate) fn mark_stale(&self, kind: LaunchKind) {
        self.costs.change(kind, Cost::marked_stale);
        self.durations.change(kind, Cost::marked_stale);
    }

    /// As [`Meter::mark_stale`], for all kinds: handles of unloaded functions recur.
    pub(crate) fn mark_all_stale(&self) {
        self.costs.mark_all_stale();
        self.durations.mark_all_stale();
    }

    /// Destroys the events of contexts for which `ends` is true, before the contexts end.
    pub(crate) fn begin_end_of_contexts(&self, ends: impl Fn(u64) -> bool) {
        self.samples.forget(ends);
    }

    /// Drops the records of contexts for which `has_ended` is true: their handles, and those of their streams, recur.
    pub(crate) fn end_contexts(&self, has_ended: impl Fn(u64) -> bool) {
        self.captures.end_contexts(&has_ended);
        self.gpus.forget(has_ended);
    }
}
