//! Memory that libcuda caches for the process without an allocation in it: in memory pools, and for graphs.
//!
//! [`crate::accounts::cache_charge`] defines its charge. It is trimmed before a denial.

use core::sync::atomic::Ordering;

use crate::accounts::cache_charge::{Cache, CacheCharge, Report, Settled};
use crate::accounts::charge_map::ChargeMap;
use crate::driver_api::cuda::{CUDA_ERROR_OUT_OF_MEMORY, CUresult};
use crate::hooks::exported;
use crate::limits::gpu::Gpu;
use crate::process::Process;
use crate::system::guard::GateGuard;

pub(crate) mod graphs;
pub(crate) mod pools;

/// Updates the charges after libcuda returned cached memory to the GPU, or other processes closed memory.
pub(crate) fn refresh(gpu: Gpu) {
    exported::settle(Process::of(gpu), gpu);
    graphs::refresh(gpu);
    pools::refresh(gpu);
}

/// Reserves `bytes`; before a denial, waits for pending reservations, trims the caches, and waits for memory of the share that
/// other shares use.
pub(crate) fn reserve(gpu: Gpu, bytes: u64) -> bool {
    reserve_with(gpu, bytes, || gpu.reserve(bytes).is_ok())
}

/// Counts a denial and returns its error.
pub(crate) fn deny(gpu: Gpu) -> CUresult {
    gpu.count_denied();
    CUDA_ERROR_OUT_OF_MEMORY
}

/// As [`reserve`], with another way to reserve.
pub(crate) fn reserve_with(gpu: Gpu, bytes: u64, reserve: impl Fn() -> bool) -> bool {
    let pending = &Process::of(gpu).pending_reservations;
    let attempt = || pending.reserve(&reserve).then_some(());
    let is_taken = attempt().is_some()
        || (trim_all(gpu) && attempt().is_some())
        || gpu.await_lent(bytes, attempt).is_some();
    if !is_taken {
        gpu.count_denied();
    }
    is_taken
}

/// As [`reserve`], for a call that may need less. A denial is not counted: the caller may have an alternative.
#[inline]
pub(crate) fn reserve_ahead(gpu: Gpu, bytes: u64) -> Option<GateGuard<'static>> {
    let pending = &Process::of(gpu).pending_reservations;
    let begin = || {
        if pending.is_certain(|| gpu.certainly_lacks(bytes)) {
            return None;
        }
        pending.begin_reserving(|| gpu.reserve(bytes).is_ok())
    };
    begin()
        .or_else(|| trim_all(gpu).then(begin)?)
        .or_else(|| gpu.await_lent(bytes, begin))
}

/// Trims all caches; returns `false` if there are none.
fn trim_all(gpu: Gpu) -> bool {
    let has_exported = exported::settle(Process::of(gpu), gpu);
    let (has_pools, has_graphs) = (pools::trim_all(gpu), graphs::trim_all(gpu));
    has_exported || has_pools || has_graphs
}

/// Adds a reservation to the cache at `key` for a call in flight. The caller holds the guard of the caches.
fn add_reservation(gpu: Gpu, caches: &ChargeMap<Cache>, key: u64, reserved_bytes: u64) {
    let more = |growth: CacheCharge| growth.add_reservation(reserved_bytes).on(gpu.index());
    let known = caches.change(key, |cache| Some(more(CacheCharge::of(cache))));
    if known.is_none() {
        caches.insert(key, more(CacheCharge::default()));
    }
}

/// Queries the size of a cache. The caller holds no lock: libcuda may take long.
fn query(process: &Process, size: impl FnOnce() -> Option<u64>) -> Option<Report> {
    let before = process.cache_queries.fetch_add(1, Ordering::SeqCst);
    Some(Report {
        query: before.saturating_add(1),
        bytes: size()?,
    })
}

/// Records a report of the cache at `key`, and returns the size in the latest one. The caller holds the guard of the
/// caches.
fn latest_bytes(process: &Process, key: u64, report: Option<Report>) -> Option<u64> {
    let (report, reports) = (report?, &process.cache_reports);
    let known = reports.change(key, |known| Some(known.latest(report)));
    if known.is_none() {
        reports.insert(key, report);
    }
    Some(known.unwrap_or(report).latest(report).bytes)
}

/// Sets the charge of the cache at `key` to the reported size. Ends a call that reserved `reserved_bytes`. Without a
/// report, as in a context with a sticky error, `grown_bytes` of the reservation stay charged. The caller holds the guard
/// of the caches.
///
/// Returns the charge before and after.
fn settle(
    gpu: Gpu,
    caches: &ChargeMap<Cache>,
    key: u64,
    reserved_bytes: u64,
    grown_bytes: u64,
    has_bytes: Option<u64>,
) -> (u64, u64) {
    let settle = |growth: CacheCharge| {
        let unreported = growth.charged_bytes.saturating_add(grown_bytes);
        growth.settle(reserved_bytes, has_bytes.unwrap_or(unreported))
    };
    let (mut before, mut settled) = (CacheCharge::default(), None::<Settled>);
    caches.change(key, |cache| {
        before = CacheCharge::of(cache);
        let settled = settled.insert(settle(before));
        Some(settled.charge.on(gpu.index()))
    });
    let settled = settled.unwrap_or_else(|| {
        let settled = settle(before);
        // A cache without a report is gone.
        if has_bytes.is_some() {
            caches.insert(key, settled.charge.on(gpu.index()));
        }
        settled
    });
    gpu.correct(settled.from, settled.to);
    (before.charged_bytes, settled.charge.charged_bytes)
}
