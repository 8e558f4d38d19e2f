//! Health events of GPUs.

use std::time::Duration;

use crate::{GpuUuid, WatchError};

/// Health event of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The GPU.
    pub card: GpuUuid,
    /// GPU instance; `None` for the whole GPU.
    pub gpu_instance: Option<u32>,
    /// Compute instance; `None` for the whole GPU or GPU instance.
    pub compute_instance: Option<u32>,
    /// Kind of the event.
    pub kind: EventKind,
}

/// Kinds of events (`nvmlEventType*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// A critical error with this XID number.
    Xid(u64),
    /// An uncorrectable memory error.
    DoubleBitEcc,
    /// MIG instances were created or destroyed.
    MigConfigChange,
    /// The GPU is unavailable.
    Unavailable,
    /// The NVIDIA driver requests a recovery action (reset, reboot, drain).
    RecoveryAction(u64),
    /// The GPU has fallen off the bus. Reported once; the GPU is no longer watched.
    Lost,
    /// Another kind, by its bit in `nvml.h`.
    Other(u64),
}

/// Blocking source of events.
pub trait EventSource: Send {
    /// Waits up to `timeout` for the next event; `None` after the timeout.
    ///
    /// # Errors
    /// [`WatchError::Wait`]; the caller must open a new source.
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, WatchError>;
}
