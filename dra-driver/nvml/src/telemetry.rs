//! Sensor readings of a GPU.

use crate::{FabricState, Memory, MemoryRepair, RecoveryAction, Status, Utilization};

/// Reading of one sensor.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Sensor<T> {
    /// The value.
    Value(T),
    /// The GPU or the NVIDIA driver has no such sensor.
    #[default]
    Absent,
    /// The query failed. The value is unknown, the other sensors are not affected.
    Failed(Status),
}

impl<T: Copy> Sensor<T> {
    /// Returns the value; `None` without one.
    pub const fn value(&self) -> Option<T> {
        match self {
            Self::Value(value) => Some(*value),
            Self::Absent | Self::Failed(_) => None,
        }
    }
}

impl<T> Sensor<T> {
    /// Returns the error of a query that failed.
    pub const fn failure(&self) -> Option<&Status> {
        match self {
            Self::Failed(status) => Some(status),
            Self::Value(_) | Self::Absent => None,
        }
    }

    const fn has_value(&self) -> bool {
        matches!(self, Self::Value(_))
    }
}

/// Readings of a GPU at about one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Telemetry {
    /// GPU memory.
    pub memory: Sensor<Memory>,
    /// Utilization in NVML's last sample period; absent in MIG mode.
    pub utilization: Sensor<Utilization>,
    /// Temperature, degrees Celsius.
    pub temperature_celsius: Sensor<u32>,
    /// Power draw, mW.
    pub power_milliwatts: Sensor<u32>,
    /// Energy since the NVIDIA driver was loaded, mJ; absent before Volta.
    pub energy_millijoules: Sensor<u64>,
    /// Clock of the streaming multiprocessors, MHz.
    pub sm_clock_mhz: Sensor<u32>,
    /// Clock of the memory, MHz.
    pub memory_clock_mhz: Sensor<u32>,
    /// Corrected ECC errors since the NVIDIA driver was loaded; absent without ECC.
    pub ecc_corrected: Sensor<u64>,
    /// Uncorrected ECC errors since the NVIDIA driver was loaded; absent without ECC.
    pub ecc_uncorrected: Sensor<u64>,
    /// Action that the NVIDIA driver requests for the recovery of the GPU; absent if it does not report one (before 565).
    pub recovery_action: Sensor<RecoveryAction>,
    /// Registration with the NVLink fabric; absent for a GPU without NVSwitch, or alone, and before Hopper.
    pub fabric: Sensor<FabricState>,
    /// Repair of faulty memory; absent without ECC.
    pub memory_repair: Sensor<MemoryRepair>,
}

impl Telemetry {
    /// Returns the queries that failed, with their errors.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, &Status)> {
        [
            ("memory", self.memory.failure()),
            ("utilization", self.utilization.failure()),
            ("temperature", self.temperature_celsius.failure()),
            ("power draw", self.power_milliwatts.failure()),
            ("energy", self.energy_millijoules.failure()),
            ("SM clock", self.sm_clock_mhz.failure()),
            ("memory clock", self.memory_clock_mhz.failure()),
            ("corrected ECC errors", self.ecc_corrected.failure()),
            ("uncorrected ECC errors", self.ecc_uncorrected.failure()),
            ("recovery action", self.recovery_action.failure()),
            ("fabric state", self.fabric.failure()),
            ("memory repair", self.memory_repair.failure()),
        ]
        .into_iter()
        .filter_map(|(query, failure)| Some((query, failure?)))
    }

    /// Returns whether a sensor has a value.
    pub(crate) fn has_value(&self) -> bool {
        self.memory.has_value()
            || self.utilization.has_value()
            || self.temperature_celsius.has_value()
            || self.power_milliwatts.has_value()
            || self.energy_millijoules.has_value()
            || self.sm_clock_mhz.has_value()
            || self.memory_clock_mhz.has_value()
            || self.ecc_corrected.has_value()
            || self.ecc_uncorrected.has_value()
            || self.recovery_action.has_value()
            || self.fabric.has_value()
            || self.memory_repair.has_value()
    }
}
