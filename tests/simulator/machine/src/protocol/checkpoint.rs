//! Taking a process off its cards for a while.

use serde::{Deserialize, Serialize};

/// What becomes of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointAction {
    /// Nothing: the question is how it is.
    Look,
    /// Its calls wait from now on.
    Lock,
    /// Its memory goes to the host.
    Checkpoint,
    /// Its memory comes back.
    Restore,
    /// Its calls go on.
    Unlock,
}

/// How a process is: `CUprocessState`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProcessPhase {
    /// As ever.
    #[default]
    Running,
    /// Its calls wait.
    Locked,
    /// Its calls wait, and it has no memory on any card.
    Checkpointed,
}
