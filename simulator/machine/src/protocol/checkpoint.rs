//! Process checkpoints.

use serde::{Deserialize, Serialize};

/// Checkpoint action.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointAction {
    /// Query the state.
    Look,
    /// Lock: calls block. Refused as in use while work is queued; the calls block already, and the request is repeated.
    Lock,
    /// End a lock that was refused: calls resume.
    EndLock,
    /// Move the memory to the host.
    Checkpoint,
    /// Restore the memory.
    Restore,
    /// Unlock: calls resume.
    Unlock,
}

/// State of a process: `CUprocessState`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessPhase {
    /// Running.
    #[default]
    Running,
    /// Calls block.
    Locked,
    /// Calls block, and the process has no GPU memory.
    Checkpointed,
    /// As checkpointed, for good: a restore failed.
    Failed,
}
