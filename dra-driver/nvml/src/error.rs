//! One error type per operation, each with what was attempted on which library or card.

use std::path::PathBuf;

use crate::{GpuUuid, Status};

/// NVML could not be loaded or initialised.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot initialise NVML from {path}")]
pub struct OpenError {
    /// The library that was tried.
    pub path: PathBuf,
    /// Why it failed.
    #[source]
    pub status: Status,
}

/// NVML could not say which cards exist.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read {what} from NVML")]
pub struct InventoryError {
    /// The fact that could not be read.
    pub what: &'static str,
    /// Why it failed.
    #[source]
    pub status: Status,
}

/// An operation on one card failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot {operation} of card {card}")]
pub struct CardError {
    /// What was attempted, such as "read the processes".
    pub operation: String,
    /// The card.
    pub card: GpuUuid,
    /// Why it failed.
    #[source]
    pub status: Status,
}

/// Watching for events could not start, or broke.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// NVML gave no event set.
    #[error("cannot create an NVML event set")]
    Create(#[source] Status),
    /// One card refused.
    #[error("cannot watch card {card} for events")]
    Register {
        /// The card.
        card: GpuUuid,
        /// Why it failed.
        #[source]
        status: Status,
    },
    /// Waiting failed; the source is of no more use.
    #[error("cannot wait for NVML events")]
    Wait(#[source] Status),
}
