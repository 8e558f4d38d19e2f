//! Metrics of a share. Pure: reads what one check of the GPU has shown.
//!
//! Usage regions belong to tenants. A tenant that writes false numbers falsifies the metrics of its own share only.

use drava_api::condition::ConditionReason;
use drava_vgpu_abi::snapshot::ProcessUsage;

use super::detection::{GpuProcess, RegionView, SuspectedViolation};
use super::usage_counters::UsageCounters;
use crate::node::claim::{ClaimUid, ShareId};

/// What of the GPU the cores of a share are a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CoresOf {
    /// Its time, which is measured.
    Time,
    /// Its multiprocessors: the programs of several shares run at once, and nothing measures their time.
    Multiprocessors,
    /// Nothing: its time is neither limited nor measured.
    Nothing,
}

/// Metrics of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareMetrics {
    /// The claim.
    pub claim: ClaimUid,
    /// The share.
    pub share: ShareId,
    /// Memory limit; `None` without a limit.
    pub limit_bytes: Option<u64>,
    /// Part of it beyond the guarantee; `None` for a share that gets its guarantee only.
    pub burst_bytes: Option<u64>,
    /// What it lends of its guarantee; `None` for a share that does not lend.
    pub lent_bytes: Option<u64>,
    /// Its cores, percent.
    pub guaranteed_percent: u32,
    /// What these are a part of.
    pub cores_of: CoresOf,
    /// GPU time used.
    pub gpu_time_us: u64,
    /// Time that launches have waited.
    pub throttled_us: u64,
    /// GPU time used lately, percent of the GPU.
    pub utilization_percent: u32,
    /// Since when it has used no GPU time, µs of `CLOCK_MONOTONIC`; `None` if it has lately.
    pub idle_since_us: Option<u64>,
    /// Values of the last check.
    pub figures: Figures,
}

/// A violation of the limits of a share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareViolation {
    /// The claim.
    pub claim: ClaimUid,
    /// The share.
    pub share: ShareId,
    /// Reason of the condition `Enforced`.
    pub reason: ConditionReason,
}

/// Values of a share at one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// Memory charged.
    pub used_bytes: u64,
    /// Highest memory charged.
    pub peak_bytes: u64,
    /// Part of `used_bytes` that libcuda uses for itself beyond its reserve.
    pub driver_bytes: u64,
    /// Memory of the processes by NVML; `None` when NVML did not report.
    pub processes_bytes: Option<u64>,
    /// Allocations denied.
    pub denied: u64,
    /// Processes that use libvgpu.
    pub registered: u64,
    /// Processes on the GPU without libvgpu.
    pub escaped: u64,
    /// Time of the last demand for GPU time, µs of `CLOCK_MONOTONIC`; 0 is never.
    pub last_demand_us: u64,
}

/// Returns the values of the share `id` from its region and from the processes that NVML lists on the GPU.
pub fn figures<Id: Ord + Copy>(
    id: Id,
    region: &RegionView,
    listed: Option<&[GpuProcess<Id>]>,
    suspected: &[(Id, SuspectedViolation)],
) -> Figures {
    // A process that was killed keeps its slot until another process reclaims it.
    let is_alive = |process: &&ProcessUsage| {
        listed.is_none_or(|listed| listed.iter().any(|l| l.owner == process.owner))
    };
    let driver_bytes = region.processes.iter().map(|process| process.driver_bytes);
    let is_escape = |(owner, found): &&(Id, SuspectedViolation)| {
        *owner == id && matches!(found, SuspectedViolation::NotCounted { .. })
    };
    Figures {
        used_bytes: region.total_bytes,
        peak_bytes: region.peak_bytes,
        driver_bytes: driver_bytes
            .fold(0, u64::saturating_add)
            .min(region.total_bytes),
        processes_bytes: listed.map(|listed| {
            let own = listed
                .iter()
                .filter(|process| process.shares.first() == Some(&id));
            own.filter_map(|process| process.used_bytes)
                .fold(0, u64::saturating_add)
        }),
        denied: region.denied,
        registered: region.processes.iter().filter(is_alive).count() as u64,
        escaped: suspected.iter().filter(is_escape).count() as u64,
        last_demand_us: region.last_demand_us,
    }
}

/// Sums of the counters of processes, which end with their processes.
#[derive(Debug)]
pub struct CounterTotals {
    counters: UsageCounters,
    gpu_time_us: u64,
    throttled_us: u64,
    period: Period,
}

/// Minimum period over which utilization is measured, µs.
const UTILIZATION_PERIOD_US: u64 = 500_000;

/// The period over which utilization is measured.
#[derive(Debug, Default)]
struct Period {
    /// When it started, and the GPU time used until then; `None` before the first update.
    start: Option<(u64, u64)>,
    /// Utilization over the previous period.
    percent: u32,
}

impl Period {
    /// Ends the period if it is long enough.
    fn update(&mut self, now_us: u64, gpu_time_us: u64) {
        let Some((start_us, before_us)) = self.start else {
            self.start = Some((now_us, gpu_time_us));
            return;
        };
        let elapsed_us = now_us.saturating_sub(start_us);
        if elapsed_us < UTILIZATION_PERIOD_US {
            return;
        }
        let used_us = gpu_time_us.saturating_sub(before_us);
        // GPU time is counted when a kernel ends, so a long one counts in one period.
        let percent = used_us.saturating_mul(100) / elapsed_us;
        self.percent = u32::try_from(percent.min(100)).unwrap_or(100);
        self.start = Some((now_us, gpu_time_us));
    }
}

impl Default for CounterTotals {
    fn default() -> Self {
        Self {
            // A restart of the node driver loses only ended processes.
            counters: UsageCounters::counting_earlier(),
            gpu_time_us: 0,
            throttled_us: 0,
            period: Period::default(),
        }
    }
}

impl CounterTotals {
    /// Adds what the processes have used since the last call.
    pub fn update(&mut self, now_us: u64, processes: &[ProcessUsage]) {
        let delta = self.counters.advance(processes);
        self.gpu_time_us = self.gpu_time_us.saturating_add(delta.used_us);
        self.throttled_us = self.throttled_us.saturating_add(delta.throttled_us);
        self.period.update(now_us, self.gpu_time_us);
    }

    /// Returns the GPU time used lately, percent of the GPU.
    #[must_use]
    pub fn utilization_percent(&self) -> u32 {
        self.period.percent
    }

    /// Returns the GPU time used, µs.
    #[must_use]
    pub fn gpu_time_us(&self) -> u64 {
        self.gpu_time_us
    }

    /// Returns the time that launches have waited, µs.
    #[must_use]
    pub fn throttled_us(&self) -> u64 {
        self.throttled_us
    }
}
