//! Data types of the GPUs of a node.

use std::fmt;

use crate::{Fabric, Mig, Status};

/// UUID of a GPU in NVML's spelling: `GPU-` and a lowercase UUID.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(String);

impl GpuUuid {
    /// Returns the UUID with this text, which is not validated.
    #[must_use]
    pub fn new(uuid: impl Into<String>) -> Self {
        Self(uuid.into())
    }

    /// Returns the UUID as text.
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

/// NVML's inventory of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Version of the kernel driver, such as `580.65.06`.
    pub driver_version: String,
    /// Newest CUDA version that the NVIDIA driver supports; `None` if unknown.
    pub cuda_driver_version: Option<CudaVersion>,
    /// Version of the NVML library, such as `13.580.65.06`.
    pub nvml_version: String,
    /// Whether confidential computing is on.
    pub confidential_computing: bool,
    /// Readable GPUs, by NVML index. A GPU that does not answer any longer is listed as it was read last.
    pub gpus: Vec<Gpu>,
    /// GPUs that NVML counts but that could not be read. [`Status::Timeout`]: the GPU does not answer.
    pub faults: Vec<GpuFault>,
}

/// A GPU that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFault {
    /// NVML index.
    pub index: u32,
    /// UUID, if it was readable.
    pub gpu: Option<GpuUuid>,
    /// The query that failed.
    pub query: &'static str,
    /// Cause.
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

/// One physical GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// NVML index; can change at a reboot.
    pub index: u32,
    /// Number of the device file `/dev/nvidia<minor>`.
    pub minor: u32,
    /// UUID.
    pub uuid: GpuUuid,
    /// Marketing name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Brand, such as `Nvidia` or `GeForce`; `Unknown` if unknown.
    pub brand: String,
    /// Architecture, such as `Hopper`; `Unknown` if newer than this build.
    pub architecture: String,
    /// CUDA compute capability.
    pub compute_capability: ComputeCapability,
    /// PCI address as in sysfs (`0000:1b:00.0`: four-digit domain, lowercase).
    pub pci_bus_id: String,
    /// Nearest NUMA node; `None` if unknown.
    pub numa_node: Option<u32>,
    /// GPU memory.
    pub memory: Memory,
    /// Number of streaming multiprocessors, derived from NVML's core count; `None` if unknown.
    pub multiprocessors: Option<u32>,
    /// Addressing mode; `None` if unknown.
    pub addressing_mode: Option<AddressingMode>,
    /// Compute mode.
    pub compute_mode: ComputeMode,
    /// Whether processes use the GPU through the Multi-Process Service.
    pub has_mps_clients: bool,
    /// Multi-Instance GPU.
    pub mig: Mig,
    /// NVLink fabric of the GPU; `None` without one.
    pub fabric: Option<Fabric>,
}

impl Gpu {
    /// Returns whether the user-space files of a newer NVIDIA driver work with the kernel driver of the GPU.
    ///
    /// NVIDIA: "only with NVIDIA Data Center GPUs, on select NGC Server Ready SKUs of RTX cards, and Jetson boards" (CUDA
    /// Compatibility, forward compatibility). On others CUDA ends with error 804. NVML does not tell which RTX cards are ready, so
    /// that a list of the others would end programs that run with the driver's own files, by minor version compatibility.
    #[must_use]
    pub fn has_forward_compatibility(&self) -> bool {
        // Names of data center GPUs until and since Ampere.
        const DATA_CENTER: [&str; 2] = ["Tesla", "Nvidia"];
        DATA_CENTER.contains(&self.brand.as_str())
    }
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

/// GPU memory of a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CgroupMemory {
    /// The most that its processes can allocate; `None` without a limit.
    pub limit_bytes: Option<u64>,
    /// Memory that counts against the limit.
    pub used_bytes: u64,
}

/// Memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Dedicated memory.
    Dedicated {
        /// Total.
        total_bytes: u64,
        /// Reserved by the NVIDIA driver, not allocatable. 0 if NVML lacks `nvmlDeviceGetMemoryInfo_v2`.
        reserved_bytes: u64,
        /// In use, without `reserved_bytes`.
        used_bytes: u64,
    },
    /// The GPU shares the host's memory and reports no size (GB10).
    NotSupported,
}

/// Addressing mode of a GPU (`nvmlDeviceAddressingModeType_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressingMode {
    /// Neither HMM nor ATS.
    None,
    /// Heterogeneous memory management: system memory through page faults.
    Hmm,
    /// Address translation services: one page table with the CPU.
    Ats,
}

/// Compute mode: which processes may create contexts (`nvmlComputeMode_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time.
    ExclusiveProcess,
    /// No process.
    Prohibited,
    /// Unknown, or newer than this build.
    Unknown,
}

/// Repair of faulty memory: remapping of rows since Ampere, retirement of pages before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MemoryRepair {
    /// A repair takes effect at the next reset of the GPU.
    pub is_pending: bool,
    /// A row could not be remapped: the GPU must be replaced.
    pub has_failed: bool,
}
