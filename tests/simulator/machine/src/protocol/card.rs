//! What NVML can see of a card at one moment.

use std::collections::BTreeSet;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::InstanceId;

/// Snapshot of one card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CardState {
    /// Memory taken by contexts and allocations, without the driver's reserve.
    pub used_bytes: u64,
    /// Processes with a context on the card, by PID.
    pub processes: Vec<ProcessState>,
    /// Share of the last sampling period in which a kernel ran.
    pub utilization: Utilization,
    /// Now.
    pub temperature_celsius: u32,
    /// Now.
    pub power_milliwatts: u32,
    /// Since the machine started.
    pub energy_millijoules: u64,
    /// Clock of graphics engine and multiprocessors, now.
    pub graphics_mhz: u32,
    /// MIG mode is on.
    pub mig_enabled: bool,
    /// Figures that the card does not report.
    pub unsupported: BTreeSet<Figure>,
}

/// A group of figures that a card may not report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the names say what is missing")]
pub enum Figure {
    Memory,
    Processes,
    Utilization,
    Temperature,
    Power,
}

impl FromStr for Figure {
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

/// One process on a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessState {
    /// PID as the daemon sees it.
    pub pid: u32,
    /// Memory of its contexts and allocations.
    pub used_bytes: u64,
    /// Where it runs, on a card in MIG mode. A process in two instances is listed twice.
    pub instance: Option<InstanceId>,
}

/// Percentages over the last sampling period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Utilization {
    /// Time with a kernel running.
    pub gpu_percent: u32,
    /// Time with memory read or written.
    pub memory_percent: u32,
}
