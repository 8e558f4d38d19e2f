//! Commands of CUDA clients to their GPUs, passed through the [`channel`](crate::channel).

use super::ContextId;

/// Nanoseconds of the monotonic clock.
pub type Nanos = u64;

/// A command of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Submission time on the client's clock (`CLOCK_MONOTONIC`).
    pub at: Nanos,
    /// Context of the stream.
    pub context: ContextId,
    /// Stream cell.
    pub stream: u32,
    /// Ticket of the work in its stream.
    pub ticket: u64,
    /// Action.
    pub action: Action,
}

/// The action of a [`Command`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Append work to the stream.
    Submit(Work),
    /// The host function with this ticket has returned.
    HostDone,
}

/// Direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the GPU.
    ToGpu,
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
