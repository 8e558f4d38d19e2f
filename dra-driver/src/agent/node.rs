//! Input and output of the agent: limits pages, usage regions, file events, NVML, findings.

pub mod enforcement_events;
pub mod gpu;
pub mod limits_page;
pub mod nvml_observer;
pub mod region_watch;
pub mod tracked_share;
pub mod usage_region;

/// Identifies a share in the agent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShareKey(pub u32);
