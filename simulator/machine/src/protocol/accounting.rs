//! Accounting: statistics of processes, kept after their end.

use serde::{Deserialize, Serialize};

/// Accounting request for one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccountingRequest {
    /// Mode, and the processes with statistics.
    State,
    /// Switches accounting; a change clears the statistics.
    SetMode {
        /// Whether processes that start from now on are accounted.
        enabled: bool,
    },
    /// Clears statistics of ended processes.
    Clear,
    /// Statistics of a process.
    Stats {
        /// PID.
        pid: u32,
    },
}

/// Reply to an accounting request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccountingReply {
    /// To [`AccountingRequest::State`].
    State {
        /// Whether accounting is enabled.
        enabled: bool,
        /// Processes with statistics, oldest first.
        pids: Vec<u32>,
    },
    /// To [`AccountingRequest::Stats`].
    Stats(AccountingStats),
}

/// Statistics of one process on one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountingStats {
    /// Fraction of its lifetime with a running kernel.
    pub gpu_percent: u32,
    /// Fraction of its lifetime with memory access.
    pub memory_percent: u32,
    /// Peak memory.
    pub max_bytes: u64,
    /// Start of GPU use, nanoseconds of the monotonic clock.
    pub started: u64,
    /// Duration in nanoseconds; 0 while running.
    pub nanos: u64,
    /// Whether the process is running.
    pub running: bool,
}
