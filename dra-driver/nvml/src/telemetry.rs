//! Sensor readings of a GPU.

use crate::{FabricState, Memory, MemoryRepair, RecoveryAction, Utilization};

/// Readings of a GPU at about one moment. `None` where the GPU or the NVIDIA driver has no such sensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Telemetry {
    /// GPU memory.
    pub memory: Memory,
    /// Utilization in NVML's last sample period; `None` in MIG mode.
    pub utilization: Option<Utilization>,
    /// Temperature, degrees Celsius.
    pub temperature_celsius: Option<u32>,
    /// Power draw, mW.
    pub power_milliwatts: Option<u32>,
    /// Energy since the NVIDIA driver was loaded, mJ; `None` before Volta.
    pub energy_millijoules: Option<u64>,
    /// Clock of the streaming multiprocessors, MHz.
    pub sm_clock_mhz: Option<u32>,
    /// Clock of the memory, MHz.
    pub memory_clock_mhz: Option<u32>,
    /// Corrected ECC errors since the NVIDIA driver was loaded; `None` without ECC.
    pub ecc_corrected: Option<u64>,
    /// Uncorrected ECC errors since the NVIDIA driver was loaded; `None` without ECC.
    pub ecc_uncorrected: Option<u64>,
    /// Action that the NVIDIA driver requests for the recovery of the GPU; `None` if it does not report one (before 565).
    pub recovery_action: Option<RecoveryAction>,
    /// Registration with the NVLink fabric; `None` for a GPU without NVSwitch, or alone, and before Hopper.
    pub fabric: Option<FabricState>,
    /// Repair of faulty memory; `None` without ECC.
    pub memory_repair: Option<MemoryRepair>,
}
