//! What a card keeps of processes beyond their end.

use serde::{Deserialize, Serialize};

/// About the accounting of one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccountingRequest {
    /// Whether it is on, and for whom there are statistics.
    State,
    /// Switches it; a new state forgets what was kept.
    SetMode {
        /// Whether processes that start from now on are kept.
        enabled: bool,
    },
    /// Forgets processes that are gone.
    Clear,
    /// What is kept of a process.
    Stats {
        /// Which process.
        pid: u32,
    },
}

/// What the accounting of one card knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AccountingReply {
    /// To [`AccountingRequest::State`].
    State {
        /// Whether it is on.
        enabled: bool,
        /// Processes with statistics, the oldest first.
        pids: Vec<u32>,
    },
    /// To [`AccountingRequest::Stats`].
    Stats(AccountingStats),
}

/// Statistics of one process on one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccountingStats {
    /// Part of its life in which a kernel of it was running.
    pub gpu_percent: u32,
    /// Part of its life in which memory was read or written.
    pub memory_percent: u32,
    /// The most memory that it had at once.
    pub max_bytes: u64,
    /// When it started to use the card, in nanoseconds of the monotonic clock.
    pub started: u64,
    /// How long it did, in nanoseconds; 0 while it does.
    pub nanos: u64,
    /// Whether it still does.
    pub running: bool,
}
