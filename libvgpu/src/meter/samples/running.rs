//! Launches in flight: the charge for their time so far, and whether one may wait for a later launch.

use core::sync::atomic::Ordering;

use drava_vgpu_abi::cost::{Cost, LaunchKind, MAX_BELIEVED_NS};

use super::pair::Pair;
use crate::driver_api::cuda::CUDA_SUCCESS;
use crate::limits::gpu::Gpu;
use crate::meter::Meter;
use crate::meter::admission::own_time;
use crate::meter::events::query;

impl Meter {
    /// Charges a running launch for its time so far. The launches in flight of the process on one GPU are together
    /// charged at most [`MAX_BELIEVED_NS`] beyond what was paid in advance.
    pub(super) fn charge_running(&self, gpu: Gpu, pair: &Pair, now: u64) {
        if pair.started_us.load(Ordering::Relaxed) == 0 {
            if query(pair.start.load(Ordering::Relaxed)) == CUDA_SUCCESS {
                pair.started_us.store(now, Ordering::Relaxed);
            }
            return;
        }
        let run_ns = run_ns(gpu, pair, now).min(MAX_BELIEVED_NS);
        if let Some(kind) = LaunchKind::of_number(pair.kind.load(Ordering::Relaxed)) {
            self.costs.change(kind, |cost| {
                if cost.samples() == 0 && run_ns > cost.ns() {
                    Cost::guess(run_ns)
                } else {
                    cost
                }
            });
        }
        let charged = pair.charged_ns.load(Ordering::Relaxed);
        // Launches in flight may overlap, and may wait for later ones.
        let others = self.samples.in_flight(gpu, 0).ns.saturating_sub(charged);
        let run_ns = run_ns.min(MAX_BELIEVED_NS.saturating_sub(others));
        if run_ns > charged {
            pair.charged_ns.store(run_ns, Ordering::Relaxed);
            self.settle(gpu, charged, run_ns);
        }
    }

    /// Returns whether a launch in flight runs for longer than is believed of its kind: it may wait for a later one.
    pub(in crate::meter) fn has_overrun(&self, gpu: Gpu, now: u64) -> bool {
        self.samples.pending(gpu).any(|pair| {
            let kind = LaunchKind::of_number(pair.kind.load(Ordering::Relaxed));
            let cost = kind.map_or(Cost::UNKNOWN, |kind| self.costs.get(kind));
            let run_ns = run_ns(gpu, pair, now);
            cost.believed_ns(run_ns) < run_ns
        })
    }
}

/// Returns how long a launch in flight runs since a poll found it started, without the time slices of other shares.
fn run_ns(gpu: Gpu, pair: &Pair, now_us: u64) -> u64 {
    match pair.started_us.load(Ordering::Relaxed) {
        0 => 0,
        started_us => own_time(gpu).of_ns(now_us.saturating_sub(started_us).saturating_mul(1_000)),
    }
}
