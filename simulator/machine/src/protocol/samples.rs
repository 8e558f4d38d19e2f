//! Utilization by sampling period.

use serde::{Deserialize, Serialize};

/// One closed sampling period.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleState {
    /// End of the period, nanoseconds of the monotonic clock.
    pub end: u64,
    /// Time with any kernel running, percent.
    pub gpu_percent: u32,
    /// Time with memory access, percent.
    pub memory_percent: u32,
    /// Processes with a running kernel, by PID.
    pub processes: Vec<ProcessSample>,
}

/// One process in one sampling period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSample {
    /// PID as the daemon sees it, or translated for the caller.
    pub pid: u32,
    /// Time with a kernel of the process running, percent.
    pub gpu_percent: u32,
    /// Time with memory access of the process, percent.
    pub memory_percent: u32,
}

/// Counters of a GPU or GPU instance since the machine started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountersState {
    /// Time of the counters, nanoseconds of the monotonic clock.
    pub at: u64,
    /// Time with any kernel running.
    pub busy_nanos: u64,
    /// Occupied time, summed over all multiprocessors.
    pub multiprocessor_nanos: u128,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
}
