//! Work of streams and its outcomes.

use crate::protocol::ContextId;

use super::Nanos;

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the GPU.
    ToCard,
    /// From the GPU to the host.
    ToHost,
}

/// One unit of work. Work of one stream runs in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Occupies multiprocessors.
    Kernel {
        /// Duration while holding the GPU.
        nanos: Nanos,
        /// Number of multiprocessors, between 1 and all.
        multiprocessors: u32,
    },
    /// Occupies a copy engine.
    Copy {
        /// Duration.
        nanos: Nanos,
        /// Copy engine.
        direction: Direction,
    },
    /// Waits until another stream of the context has completed a ticket.
    Wait {
        /// The other stream.
        stream: u32,
        /// Ticket.
        ticket: u64,
    },
    /// Records the time in an event.
    Record {
        /// Event cell.
        event: u32,
        /// Recording number, this one included.
        recording: u64,
    },
    /// Waits until the program has run a host function.
    Host,
}

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
