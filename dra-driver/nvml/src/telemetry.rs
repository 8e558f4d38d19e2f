//! Sensor readings of a GPU.

use crate::{FabricHealth, FabricState, Memory, MemoryRepair, RecoveryAction, Status, Utilization};

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
    /// Returns whether there is a value.
    ///
    /// # Errors
    /// The error of the query, if it failed.
    pub const fn answer(&self) -> Result<bool, &Status> {
        match self {
            Self::Value(_) => Ok(true),
            Self::Absent => Ok(false),
            Self::Failed(status) => Err(status),
        }
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
    /// Health of the NVLink fabric, of the same query.
    pub fabric_health: Sensor<FabricHealth>,
    /// Repair of faulty memory; absent without ECC.
    pub memory_repair: Sensor<MemoryRepair>,
}

impl Telemetry {
    /// Returns the queries that failed, with their errors.
    pub fn failures(&self) -> impl Iterator<Item = (&'static str, &Status)> {
        let all = self.answers().into_iter();
        all.filter_map(|(query, answer)| Some((query, answer.err()?)))
    }

    /// Returns whether a sensor has a value.
    pub(crate) fn has_value(&self) -> bool {
        self.answers().iter().any(|(_, answer)| *answer == Ok(true))
    }

    /// Returns whether each sensor has a value, or the error of its query.
    fn answers(&self) -> [(&'static str, Result<bool, &Status>); 12] {
        [
            ("memory", self.memory.answer()),
            ("utilization", self.utilization.answer()),
            ("temperature", self.temperature_celsius.answer()),
            ("power draw", self.power_milliwatts.answer()),
            ("energy", self.energy_millijoules.answer()),
            ("SM clock", self.sm_clock_mhz.answer()),
            ("memory clock", self.memory_clock_mhz.answer()),
            ("corrected ECC errors", self.ecc_corrected.answer()),
            ("uncorrected ECC errors", self.ecc_uncorrected.answer()),
            ("recovery action", self.recovery_action.answer()),
            ("fabric state", self.fabric.answer()),
            ("memory repair", self.memory_repair.answer()),
        ]
    }
}
