//! Health events of cards.

use std::time::Duration;

use crate::{GpuUuid, WatchError};

/// Something that happened to a card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The card.
    pub card: GpuUuid,
    /// GPU instance it is about; `None` for the whole card.
    pub gpu_instance: Option<u32>,
    /// Compute instance it is about; `None` for the whole card or GPU instance.
    pub compute_instance: Option<u32>,
    /// What happened.
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
    /// The card is unavailable.
    Unavailable,
    /// The driver asks for a recovery action (reset, reboot, drain).
    RecoveryAction(u64),
    /// The card is gone from the bus. It is told once, and the card is watched no more.
    Lost,
    /// Another kind, by its bit in `nvml.h`.
    Other(u64),
}

/// A stream of events. It blocks, so it lives on a thread of its own.
pub trait EventSource: Send {
    /// Waits up to `timeout`. `Ok(None)` means that nothing happened, so the caller can look at its stop flag.
    ///
    /// # Errors
    /// [`WatchError::Wait`]; the source is of no more use then and watching must start anew.
    fn next(&mut self, timeout: Duration) -> Result<Option<Event>, WatchError>;
}
