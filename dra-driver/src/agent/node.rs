//! Input and output of the agent: limits pages, usage regions, file events, NVML, findings.

use rustix::time::{ClockId, clock_gettime};

pub mod enforcement_events;
pub mod gpu;
pub mod nvml_observer;
pub mod region_watch;
pub mod tracked_share;
pub mod usage_region;

/// Returns `CLOCK_MONOTONIC` in microseconds, the clock of pages and regions.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000 + nanos.unwrap_or(0) / 1_000
}

/// Identifies a share in the agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShareKey(pub u32);
