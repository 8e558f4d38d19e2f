//! NVML snapshot of one GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{CgroupMemory, ComputeMode, InstanceId};

/// Snapshot of one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GpuState {
    /// Memory of contexts and allocations, without the driver's reserve.
    pub used_bytes: u64,
    /// Memory of the caller's cgroup, if that one has a limit.
    pub cgroup_memory: Option<CgroupMemory>,
    /// Processes with a context on the GPU, by PID.
    pub processes: Vec<ProcessState>,
    /// Utilization in the last sampling period.
    pub utilization: Utilization,
    /// Current value.
    pub temperature_celsius: u32,
    /// Current value.
    pub power_milliwatts: u32,
    /// Since the machine started.
    pub energy_millijoules: u64,
    /// Current clock of graphics engine and multiprocessors.
    pub graphics_mhz: u32,
    /// Which processes may create contexts.
    pub compute_mode: ComputeMode,
    /// Whether MIG mode is on.
    pub mig_enabled: bool,
    /// Recovery action that the driver requests (`nvmlDeviceGpuRecoveryAction_t`); 0 is none.
    pub recovery_action: u32,
    /// State of the registration with the fabric (`nvmlGpuFabricState_t`); `None` is completed. NVML reports none before Hopper.
    pub fabric_state: Option<u8>,
    /// Health of the NVLink fabric (`NVML_GPU_FABRIC_HEALTH_MASK_*`).
    pub fabric_health_mask: u32,
    /// Whether a repair of the memory waits for a reset.
    pub repair_pending: bool,
    /// Whether a row of the memory could not be remapped.
    pub repair_failed: bool,
    /// Values that the GPU does not report.
    pub unsupported: BTreeSet<ReportedValue>,
    /// NVML functions that fail, by name, with their `nvmlReturn_t`.
    pub failing: BTreeMap<String, u32>,
}

/// A group of values that a GPU may not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names are self-explanatory")]
pub enum ReportedValue {
    Memory,
    Processes,
    Utilization,
    Temperature,
    Power,
}

impl FromStr for ReportedValue {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "memory" => Ok(Self::Memory),
            "processes" => Ok(Self::Processes),
            "utilization" => Ok(Self::Utilization),
            "temperature" => Ok(Self::Temperature),
            "power" => Ok(Self::Power),
            name => Err(format!(
                "{name:?} is none of memory, processes, utilization, temperature, power"
            )),
        }
    }
}

/// One process on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessState {
    /// PID as the daemon sees it.
    pub pid: u32,
    /// Memory of its contexts and allocations.
    pub used_bytes: u64,
    /// Instance, in MIG mode. A process in two instances is listed twice.
    pub instance: Option<InstanceId>,
    /// Whether it is a client of an MPS server.
    pub is_mps_client: bool,
}

/// Percentages over the last sampling period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Utilization {
    /// Time with a kernel running, percent.
    pub gpu_percent: u32,
    /// Time with memory access, percent.
    pub memory_percent: u32,
}
