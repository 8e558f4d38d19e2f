//! What a library asks the daemon and what it gets back.
//!
//! Both sides are built from this file; [`PROTOCOL`] is bumped when a message changes, so that a
//! library of another build is refused at its first message instead of being misread.

use serde::{Deserialize, Serialize};

use crate::description::MachineDescription;

mod accounting;
mod card;
mod checkpoint;
mod mig;
mod samples;

pub use accounting::{AccountingReply, AccountingRequest, AccountingStats};
pub use card::{CardState, Figure, ProcessState, Utilization};
pub use checkpoint::{CheckpointAction, ProcessPhase};
pub use mig::{
    ComputeInstanceState, GpuInstanceState, InstanceId, MigActivation, MigReply, MigRequest,
    MigState,
};
pub use samples::{CountersState, ProcessSample, SampleState};

/// Version of the messages below.
pub const PROTOCOL: u32 = 7;

/// Index of a card on its machine; equal to its minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CardIndex(pub u32);

/// A CUDA context, unique on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContextId(pub u64);

/// A range of physical memory, unique on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AllocationId(pub u64);

/// Memory that a file descriptor stands for, unique on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExportId(pub u64);

/// Which library a connection belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientKind {
    /// `libnvidia-ml.so.1`: watches.
    Nvml,
    /// One event set of `libnvidia-ml.so.1`: is sent [`Reply::Event`]s.
    EventSet,
    /// `libcuda.so.1`: holds contexts and memory.
    Cuda,
}

/// From a library to the daemon; each gets exactly one [`Reply`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`PROTOCOL`] of the library.
        protocol: u32,
        /// Which library.
        kind: ClientKind,
    },
    /// Everything NVML reports about one card at this moment.
    CardState {
        /// Which card.
        card: CardIndex,
    },
    /// The sampling periods of a card that closed after a time, oldest first.
    Samples {
        /// Which card.
        card: CardIndex,
        /// In nanoseconds of the monotonic clock.
        since: u64,
    },
    /// What a card, or one GPU instance of it, has done since the start.
    Counters {
        /// Which card.
        card: CardIndex,
        /// Which GPU instance; all of the card without one.
        gpu: Option<u32>,
    },
    /// Something about what a card keeps of processes.
    Accounting {
        /// Which card.
        card: CardIndex,
        /// What.
        request: AccountingRequest,
    },
    /// Takes a process off its cards, or brings it back.
    Checkpoint {
        /// Which process.
        pid: u32,
        /// What becomes of it.
        action: CheckpointAction,
    },
    /// Something about a card's partitioning.
    Mig {
        /// Which card.
        card: CardIndex,
        /// What.
        request: MigRequest,
    },
    /// Asks for [`Reply::Event`]s about a card.
    RegisterEvents {
        /// Which card.
        card: CardIndex,
    },
    /// Creates a context, which takes memory on its card.
    CreateContext {
        /// Which card.
        card: CardIndex,
    },
    /// Destroys a context and frees what was allocated in it.
    DestroyContext {
        /// Which context.
        context: ContextId,
    },
    /// Takes physical memory, rounded up to [`crate::kernel::PAGE_BYTES`].
    Allocate {
        /// The context that the memory belongs to.
        context: ContextId,
        /// How much.
        bytes: u64,
    },
    /// Gives memory back.
    Free {
        /// Which memory.
        allocation: AllocationId,
    },
    /// Takes physical memory that belongs to no context; this process holds it once.
    CreateMemory {
        /// Which card.
        card: CardIndex,
        /// How much; rounded up as for [`Self::Allocate`].
        bytes: u64,
    },
    /// Ends one of this process's holds.
    Release {
        /// Which memory.
        allocation: AllocationId,
    },
    /// Lets other processes [`Self::Open`] memory of this one.
    Share {
        /// Which memory.
        allocation: AllocationId,
    },
    /// Holds memory that another process shares.
    Open {
        /// Which memory.
        allocation: AllocationId,
    },
    /// Asks for a descriptor that holds memory of this process.
    Export {
        /// Which memory.
        allocation: AllocationId,
    },
    /// Holds what a descriptor stands for; the message carries it.
    Import,
    /// Free and total memory, as `cuMemGetInfo` reports them.
    MemoryInfo {
        /// Which card.
        card: CardIndex,
    },
}

/// From the daemon to a library.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Hello`]. For a CUDA client the message carries file descriptors: the memory
    /// of each card, in order.
    Welcome {
        /// The machine that the daemon simulates.
        machine: Box<MachineDescription>,
    },
    /// To [`Request::CardState`].
    CardState(Box<CardState>),
    /// To [`Request::Samples`].
    Samples(Vec<SampleState>),
    /// To [`Request::Counters`].
    Counters(CountersState),
    /// To [`Request::Accounting`], where it has a result.
    Accounting(AccountingReply),
    /// To [`Request::Checkpoint`]: how the process is now.
    Phase(ProcessPhase),
    /// To [`Request::Mig`], where it has a result.
    Mig(MigReply),
    /// To [`Request::CreateContext`].
    ContextCreated {
        /// The new context.
        context: ContextId,
    },
    /// To [`Request::Allocate`].
    Allocated {
        /// The new allocation.
        allocation: AllocationId,
        /// Where its bytes lie in the card's memory file.
        offset: u64,
        /// Its size after rounding.
        bytes: u64,
    },
    /// To [`Request::Open`] and [`Request::Import`].
    Opened {
        /// Whose memory it is.
        card: CardIndex,
        /// Which memory; one more hold of this process.
        allocation: AllocationId,
        /// Where its bytes lie in the card's memory file.
        offset: u64,
        /// Its size.
        bytes: u64,
    },
    /// To [`Request::Export`]; the message carries the descriptor.
    Exported {
        /// What the daemon knows it by.
        export: ExportId,
    },
    /// To [`Request::MemoryInfo`].
    MemoryInfo {
        /// Not taken by anyone.
        free_bytes: u64,
        /// Usable in all.
        total_bytes: u64,
    },
    /// To no request: something happened that the client registered for.
    Event(CardEvent),
    /// The request was done and has no result.
    Done,
    /// The request was refused; nothing changed.
    Refused(Refusal),
}

/// Something that happened to a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CardEvent {
    /// The driver logged a critical error.
    Xid {
        /// Which card.
        card: CardIndex,
        /// Xid code.
        code: u64,
    },
}

/// Why the daemon refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The library was built for another version of the protocol.
    #[error("the library and the daemon come from different builds")]
    Protocol,
    /// No such card, context or allocation, or one of another process.
    #[error("no such object")]
    NotFound,
    /// The card's memory is physically full.
    #[error("the card's memory is full")]
    OutOfMemory,
    /// The card fell off the bus.
    #[error("the card is lost")]
    Lost,
    /// Somebody uses it.
    #[error("in use")]
    InUse,
    /// No slices, engines or places are left.
    #[error("insufficient resources")]
    InsufficientResources,
    /// The card or its present mode does not have this.
    #[error("not supported")]
    NotSupported,
    /// Malformed or out of order.
    #[error("invalid request")]
    Invalid,
}
