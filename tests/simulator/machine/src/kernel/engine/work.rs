//! What streams have to do, and what comes of it.

use crate::protocol::ContextId;

use super::Nanos;

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the card.
    ToCard,
    /// From the card to the host.
    ToHost,
}

/// One piece of work of a stream. Work of one stream is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Occupies multiprocessors for a while.
    Kernel {
        /// How long, when it has the card.
        nanos: Nanos,
        /// How many it needs; at least 1, and at most what there are.
        multiprocessors: u32,
    },
    /// Occupies a copy engine for a while.
    Copy {
        /// How long.
        nanos: Nanos,
        /// Which engine.
        direction: Direction,
    },
    /// Waits until another stream of the context has completed a ticket.
    Wait {
        /// The other stream.
        stream: u32,
        /// Its ticket.
        ticket: u64,
    },
    /// Notes the time in an event.
    Record {
        /// Which event.
        event: u32,
        /// How often it was recorded, this time included.
        recording: u64,
    },
    /// Waits until the program has run a host function.
    Host,
}

/// What happened while time passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A stream completed everything up to a ticket.
    Completed {
        /// Whose.
        context: ContextId,
        /// Which stream.
        stream: u32,
        /// Up to where.
        ticket: u64,
    },
    /// An event was reached.
    Recorded {
        /// Whose.
        context: ContextId,
        /// Which event.
        event: u32,
        /// Which recording.
        recording: u64,
        /// When.
        at: Nanos,
    },
    /// A host function is to be run, then [`super::Engine::host_done`] called.
    HostCall {
        /// Whose.
        context: ContextId,
        /// Which stream waits for it.
        stream: u32,
        /// The work's ticket.
        ticket: u64,
    },
}
