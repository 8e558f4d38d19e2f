//! Messages between libraries and the daemon.
//!
//! Both sides are built from this file. [`PROTOCOL`] changes with every message change, so that the
//! daemon rejects a library of another build at its first message.

use serde::{Deserialize, Serialize};

use crate::description::MachineDescription;

mod accounting;
mod checkpoint;
mod command;
mod compute_mode;
mod gpu;
mod memory_limits;
mod mig;
mod mps;
mod samples;

pub use accounting::{AccountingReply, AccountingRequest, AccountingStats};
pub use checkpoint::{CheckpointAction, ProcessPhase};
pub use command::{Action, Command, Direction, Nanos, Work};
pub use compute_mode::ComputeMode;
pub use gpu::{GpuState, ProcessState, ReportedValue, Utilization};
pub use memory_limits::{CgroupMemory, MemoryLimitsRequest, MemoryLimitsState};
pub use mig::{
    ComputeInstanceState, GpuInstanceState, InstanceId, MigActivation, MigReply, MigRequest,
    MigState,
};
pub use mps::{
    MpsClientState, MpsReply, MpsRequest, MpsServerKey, MpsServerState, MpsStatus, ThreadPercentage,
};
pub use samples::{CountersState, ProcessSample, SampleState};

/// Version of the messages below.
pub const PROTOCOL: u32 = 12;

/// Index of a GPU on its machine, equal to its minor number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GpuIndex(pub u32);

/// A CUDA context, unique on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ContextId(pub u64);

/// A range of physical memory, unique on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct AllocationId(pub u64);

/// Memory exported as a file descriptor, unique on the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ExportId(pub u64);

/// Library type of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientKind {
    /// `libnvidia-ml.so.1`: queries.
    Nvml,
    /// One event set of `libnvidia-ml.so.1`: receives [`Reply::Event`]s.
    EventSet,
    /// `libcuda.so.1`: holds contexts and memory.
    Cuda,
    /// A program of the multi-process service.
    Mps,
    /// The fabric manager: GPUs on NVSwitches are ready as long as it is connected.
    FabricManager,
}

/// From a library to the daemon; each gets exactly one [`Reply`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`PROTOCOL`] of the library.
        protocol: u32,
        /// Library type.
        kind: ClientKind,
    },
    /// Everything that NVML reports about one GPU.
    GpuState {
        /// GPU index.
        gpu: GpuIndex,
    },
    /// Sampling periods of a GPU closed after a time, oldest first.
    Samples {
        /// GPU index.
        gpu: GpuIndex,
        /// In nanoseconds of the monotonic clock.
        since: u64,
    },
    /// Counters of a GPU or of one GPU instance since the start.
    Counters {
        /// GPU index.
        gpu: GpuIndex,
        /// GPU instance; `None` for the whole GPU.
        gpu_instance: Option<u32>,
    },
    /// Accounting of a GPU.
    Accounting {
        /// GPU index.
        gpu: GpuIndex,
        /// Accounting request.
        request: AccountingRequest,
    },
    /// Memory limits of a cgroup on a GPU.
    MemoryLimits {
        /// GPU index.
        gpu: GpuIndex,
        /// Directory of the cgroup.
        cgroup: String,
        /// Request about its limits.
        request: MemoryLimitsRequest,
    },
    /// Checkpoint action on a process.
    Checkpoint {
        /// PID.
        pid: u32,
        /// Action.
        action: CheckpointAction,
    },
    /// Tells whether this process has managed memory, which is in host memory and unknown to the daemon otherwise.
    SetManaged {
        /// Whether it has.
        is_used: bool,
    },
    /// MIG of a GPU.
    Mig {
        /// GPU index.
        gpu: GpuIndex,
        /// MIG request.
        request: MigRequest,
    },
    /// Sets the compute mode of a GPU; only for administrators.
    SetComputeMode {
        /// GPU index.
        gpu: GpuIndex,
        /// New mode.
        mode: ComputeMode,
    },
    /// Multi-process service.
    Mps(MpsRequest),
    /// Registers for [`Reply::Event`]s of a GPU.
    RegisterEvents {
        /// GPU index.
        gpu: GpuIndex,
    },
    /// Creates a context, which takes GPU memory.
    CreateContext {
        /// GPU index.
        gpu: GpuIndex,
    },
    /// Destroys a context and frees its allocations.
    DestroyContext {
        /// Context.
        context: ContextId,
    },
    /// Allocates physical memory, rounded up to [`crate::kernel::PAGE_BYTES`].
    Allocate {
        /// Owner of the memory.
        context: ContextId,
        /// Size.
        bytes: u64,
    },
    /// Frees memory.
    Free {
        /// Allocation.
        allocation: AllocationId,
    },
    /// Allocates physical memory without a context; this process holds it once.
    CreateMemory {
        /// GPU index.
        gpu: GpuIndex,
        /// Size, rounded up like [`Self::Allocate`].
        bytes: u64,
    },
    /// Releases one hold of this process.
    Release {
        /// Allocation.
        allocation: AllocationId,
    },
    /// Allows other processes to [`Self::Open`] memory of this one.
    Share {
        /// Allocation.
        allocation: AllocationId,
    },
    /// Holds memory shared by another process.
    Open {
        /// Allocation.
        allocation: AllocationId,
    },
    /// Requests a descriptor that holds memory of this process.
    Export {
        /// Allocation.
        allocation: AllocationId,
    },
    /// Holds the memory of the descriptor in the message.
    Import,
    /// Free and total memory, as `cuMemGetInfo` reports them.
    MemoryInfo {
        /// GPU index.
        gpu: GpuIndex,
    },
}

/// From the daemon to a library.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Hello`]. For a CUDA client the message carries the memory file descriptors of
    /// all GPUs in order.
    Welcome {
        /// The simulated machine.
        machine: Box<MachineDescription>,
    },
    /// To [`Request::GpuState`].
    GpuState(Box<GpuState>),
    /// To [`Request::Samples`].
    Samples(Vec<SampleState>),
    /// To [`Request::Counters`].
    Counters(CountersState),
    /// To [`Request::Accounting`], if it has a result.
    Accounting(AccountingReply),
    /// To [`Request::Checkpoint`]: the new state of the process.
    Phase(ProcessPhase),
    /// To [`MemoryLimitsRequest::Get`].
    MemoryLimits {
        /// The limits.
        limits: MemoryLimitsState,
        /// Memory that counts against them.
        used_bytes: u64,
    },
    /// To [`Request::Mig`], if it has a result.
    Mig(MigReply),
    /// To [`Request::Mps`], if it has a result.
    Mps(MpsReply),
    /// To [`Request::CreateContext`].
    ContextCreated {
        /// The new context.
        context: ContextId,
    },
    /// To [`Request::Allocate`].
    Allocated {
        /// The new allocation.
        allocation: AllocationId,
        /// Offset in the GPU's memory file.
        offset: u64,
        /// Size after rounding.
        bytes: u64,
    },
    /// To [`Request::Open`] and [`Request::Import`].
    Opened {
        /// GPU of the memory.
        gpu: GpuIndex,
        /// The allocation, with one more hold of this process.
        allocation: AllocationId,
        /// Offset in the GPU's memory file.
        offset: u64,
        /// Size.
        bytes: u64,
    },
    /// To [`Request::Export`]; the message carries the descriptor.
    Exported {
        /// Id of the export.
        export: ExportId,
    },
    /// To [`Request::MemoryInfo`].
    MemoryInfo {
        /// Free memory.
        free_bytes: u64,
        /// Usable memory.
        total_bytes: u64,
    },
    /// Unsolicited: an event that the client registered for.
    Event(GpuEvent),
    /// The request succeeded without a result.
    Done,
    /// The request was rejected; nothing changed.
    Refused(Refusal),
}

/// An event of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum GpuEvent {
    /// The driver logged a critical error.
    Xid {
        /// GPU index.
        gpu: GpuIndex,
        /// Xid code.
        code: u64,
        /// GPU instance; `None` for the whole GPU.
        instance: Option<u32>,
    },
    /// An uncorrectable memory error.
    DoubleBitEcc {
        /// GPU index.
        gpu: GpuIndex,
    },
}

impl GpuEvent {
    /// The GPU.
    #[must_use]
    pub const fn gpu(self) -> GpuIndex {
        match self {
            Self::Xid { gpu, .. } | Self::DoubleBitEcc { gpu } => gpu,
        }
    }
}

/// Why the daemon rejected a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// The library has another protocol version.
    #[error("protocol version mismatch between library and daemon; rebuild both")]
    Protocol,
    /// No such GPU, context or allocation, or owned by another process.
    #[error("no such object")]
    NotFound,
    /// The GPU's memory is full.
    #[error("GPU memory is full")]
    OutOfMemory,
    /// The GPU fell off the bus.
    #[error("the GPU is lost")]
    Lost,
    /// In use.
    #[error("in use")]
    InUse,
    /// No free slices, engines or placements.
    #[error("insufficient resources")]
    InsufficientResources,
    /// Not supported by the GPU or its current mode.
    #[error("not supported")]
    NotSupported,
    /// The process cannot be restored any more: an earlier restore failed.
    #[error("an earlier restore failed")]
    Failed,
    /// Only administrators may do this.
    #[error("no permission")]
    NoPermission,
    /// The compute mode of the GPU does not let this process use it.
    #[error("the GPU is unavailable in its compute mode")]
    Unavailable,
    /// The MPS server takes no client now.
    #[error("the MPS server takes no client")]
    MpsNotReady,
    /// The MPS server has as many clients as the hardware allows.
    #[error("the MPS server has the most clients")]
    MpsFull,
    /// This MPS client has failed and must end.
    #[error("the MPS client has failed")]
    MpsFailed,
    /// Malformed or out of order.
    #[error("invalid request")]
    Invalid,
}
