//! How busy a card was in the sampling periods that its driver remembers.

use serde::{Deserialize, Serialize};

/// One closed sampling period.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleState {
    /// When it closed, in nanoseconds of the monotonic clock.
    pub end: u64,
    /// Percentage of the period in which any kernel ran.
    pub gpu_percent: u32,
    /// Percentage of the period in which memory was read or written.
    pub memory_percent: u32,
    /// Processes that had a kernel running, by PID.
    pub processes: Vec<ProcessSample>,
}

/// One process in one sampling period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessSample {
    /// PID as the daemon sees it, or as the caller does where the machine translates.
    pub pid: u32,
    /// Percentage of the period in which it had a kernel running.
    pub gpu_percent: u32,
    /// Percentage of the period in which it read or wrote memory.
    pub memory_percent: u32,
}

/// What all of a card, or one GPU instance, has done since the start of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountersState {
    /// When this was, in nanoseconds of the monotonic clock.
    pub at: u64,
    /// For how long any kernel was running.
    pub busy_nanos: u64,
    /// For how long multiprocessors were occupied, all of them together.
    pub multiprocessor_nanos: u128,
    /// How many there are.
    pub multiprocessors: u32,
}
