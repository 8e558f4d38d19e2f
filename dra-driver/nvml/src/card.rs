//! Plain data about a node's cards.

use std::fmt;

use crate::{Mig, Status};

/// UUID of a card as NVML spells it: `GPU-` and a lowercase UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(String);

impl GpuUuid {
    /// Wraps a UUID in NVML's spelling. It is an opaque identity: a wrong one is found nowhere.
    #[must_use]
    pub fn new(uuid: impl Into<String>) -> Self {
        Self(uuid.into())
    }

    /// The UUID as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// All that NVML says about a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Version of the kernel driver, such as `580.65.06`.
    pub driver_version: String,
    /// Newest CUDA version that the driver serves; `None` where NVML does not say.
    pub cuda_driver_version: Option<CudaVersion>,
    /// Version of the NVML library, such as `13.580.65.06`.
    pub nvml_version: String,
    /// Whether the node runs in confidential-computing mode, in which memory cannot be shared.
    pub confidential_computing: bool,
    /// The usable cards, by NVML index.
    pub cards: Vec<Card>,
    /// Cards that NVML counts but that could not be read.
    pub faults: Vec<CardFault>,
}

/// A card that exists but could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CardFault {
    /// NVML index.
    pub index: u32,
    /// The card, where at least its UUID was readable.
    pub card: Option<GpuUuid>,
    /// What was asked last.
    pub what: &'static str,
    /// Why it failed.
    pub status: Status,
}

/// A CUDA version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CudaVersion {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// One physical card.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// NVML index: order on this node now, not an identity.
    pub index: u32,
    /// Number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
    /// Identity of the card.
    pub uuid: GpuUuid,
    /// Marketing name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Brand, such as `Nvidia` or `GeForce`; `Unknown` where NVML does not say.
    pub brand: String,
    /// Architecture, such as `Hopper`; `Unknown` for one newer than this build.
    pub architecture: String,
    /// CUDA compute capability.
    pub compute_capability: ComputeCapability,
    /// PCI address in sysfs spelling (`0000:1b:00.0`: four-digit domain, lowercase).
    pub pci_bus_id: String,
    /// NUMA node whose memory is nearest; `None` where NVML does not say.
    pub numa_node: Option<u32>,
    /// Device memory.
    pub memory: Memory,
    /// Streaming multiprocessors, derived from NVML's core count; `None` where that is unknown.
    pub multiprocessors: Option<u32>,
    /// How the card addresses memory; `None` where NVML does not say.
    pub addressing_mode: Option<AddressingMode>,
    /// Which processes may have contexts.
    pub compute_mode: ComputeMode,
    /// Multi-Instance GPU.
    pub mig: Mig,
    /// The NVLink fabric the card has joined; `None` without one.
    pub fabric: Option<Fabric>,
}

/// CUDA compute capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ComputeCapability {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Device memory of a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Memory of its own.
    Dedicated {
        /// All of it.
        total_bytes: u64,
        /// Kept by the driver; not allocatable. 0 from an NVML without `nvmlDeviceGetMemoryInfo_v2`.
        reserved_bytes: u64,
        /// Allocated now, `reserved_bytes` not included.
        used_bytes: u64,
    },
    /// The card shares the host's memory and gives no figure (GB10).
    NotSupported,
}

/// How a card addresses memory (`nvmlDeviceAddressingModeType_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressingMode {
    /// Neither HMM nor ATS.
    None,
    /// Heterogeneous memory management: system memory through page faults.
    Hmm,
    /// Address translation services: one page table with the CPU.
    Ats,
}

/// Which processes may have contexts (`nvmlComputeMode_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// None.
    Prohibited,
    /// NVML does not say, or a mode newer than this build.
    Unknown,
}

/// Membership in an NVLink fabric (`nvmlGpuFabricInfo_t`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Fabric {
    /// UUID of the fabric's cluster, lowercase with dashes. All zeros where the fabric is that of one node, as on an HGX
    /// board: cards of different nodes with this one are not joined.
    pub cluster_uuid: String,
    /// Clique: cards of one cluster and clique reach each other over NVLink.
    pub clique: u32,
}
