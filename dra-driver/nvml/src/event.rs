//! Health events of GPUs.

use std::time::Duration;

use crate::{GpuUuid, WatchError};

/// Health event of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The GPU.
    pub gpu: GpuUuid,
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
    /// The recovery action that the NVIDIA driver requests has changed.
    RecoveryAction(RecoveryAction),
    /// The GPU has fallen off the bus. Reported once; the GPU is no longer watched.
    Lost,
    /// Another kind, by its bit in `nvml.h`.
    Other(u64),
}

/// Action that the NVIDIA driver requests for the recovery of a GPU (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RecoveryAction {
    /// None; the GPU works.
    None,
    /// Reset of the GPU.
    GpuReset,
    /// Reboot of the node.
    NodeReboot,
    /// End of all peer-to-peer traffic; a later reset restores it.
    DrainP2p,
    /// End of all programs, then reset of the GPU.
    DrainAndReset,
    /// An action newer than this build.
    Other(u64),
}

impl RecoveryAction {
    /// Converts NVML's value.
    #[must_use]
    pub const fn from_value(value: u64) -> Self {
        match value {
            0 => Self::None,
            1 => Self::GpuReset,
            2 => Self::NodeReboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            other => Self::Other(other),
        }
    }
}

/// Blocking source of events.
pub trait EventSource: Send {
    /// Waits up to `timeout` for the next event; `None` after the timeout.
    ///
    /// # Errors
    /// [`WatchError::Wait`]; the caller must open a new source.
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, WatchError>;
}
