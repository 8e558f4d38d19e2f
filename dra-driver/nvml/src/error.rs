//! Errors, one type per operation.

use std::path::PathBuf;

use crate::{GpuUuid, Status};

/// NVML could not be loaded or initialized.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot initialize NVML from {path}")]
pub struct OpenError {
    /// Path of the library.
    pub path: PathBuf,
    /// Cause.
    #[source]
    pub status: Status,
}

/// The inventory could not be read.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot read {query} from NVML")]
pub struct InventoryError {
    /// The query that failed.
    pub query: &'static str,
    /// Cause.
    #[source]
    pub status: Status,
}

/// An operation on one GPU failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot {operation} of GPU {gpu}")]
pub struct GpuError {
    /// The operation, such as "read the processes".
    pub operation: String,
    /// The GPU.
    pub gpu: GpuUuid,
    /// Cause.
    #[source]
    pub status: Status,
}

/// Events could not be registered or received.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WatchError {
    /// NVML could not create an event set.
    #[error("cannot create an NVML event set")]
    Create(#[source] Status),
    /// A GPU could not be registered.
    #[error("cannot watch GPU {gpu} for events")]
    Register {
        /// The GPU.
        gpu: GpuUuid,
        /// Cause.
        #[source]
        status: Status,
    },
    /// Waiting failed; the source cannot be used again.
    #[error("cannot wait for NVML events")]
    Wait(#[source] Status),
}
