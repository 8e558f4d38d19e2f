//! Which processes may use a GPU.

use serde::{Deserialize, Serialize};

/// Compute mode of a GPU (`nvmlComputeMode_t`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeMode {
    /// All processes.
    #[default]
    Default,
    /// One process, which may be an MPS server with its clients.
    ExclusiveProcess,
    /// None.
    Prohibited,
}
