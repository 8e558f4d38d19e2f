//! Outcomes of advancing time.

use crate::protocol::{ContextId, Nanos};

/// An outcome of advancing time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A stream completed everything up to a ticket.
    Completed {
        /// Context.
        context: ContextId,
        /// Stream cell.
        stream: u32,
        /// Last completed ticket.
        ticket: u64,
    },
    /// An event was reached.
    Recorded {
        /// Context.
        context: ContextId,
        /// Event cell.
        event: u32,
        /// Recording number.
        recording: u64,
        /// Time on the GPU.
        at: Nanos,
    },
    /// A host function is due; [`super::Engine::host_done`] must follow.
    HostCall {
        /// Context.
        context: ContextId,
        /// Stream cell.
        stream: u32,
        /// The work's ticket.
        ticket: u64,
    },
}
