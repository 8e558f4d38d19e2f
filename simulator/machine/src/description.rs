//! The machine file: the GPUs of a machine and all values they report.
//!
//! Parsed once. A [`MachineDescription`] is consistent: every GPU names a model, UUIDs and bus ids
//! are unique, placements fit the memory axis. Unknown fields are rejected by name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

mod bus_id;
mod memory_limits;
mod mig;
mod node;

pub use bus_id::BusId;
pub use memory_limits::{MEMORY_LIMITS_RELEASE, MemoryLimitBackend, MemoryLimits};
pub use mig::{
    ComputeInstanceProfile, GpuInstanceProfile, GpuInstanceProfileKind, Mig, MigSwitch, Placements,
};

/// One mebibyte in bytes.
pub const MIB: u64 = 1 << 20;

macro_rules! machines {
    ($($(#[$meta:meta])* $name:ident = $file:literal;)*) => {
        $($(#[$meta])* pub const $name: &str = include_str!(concat!("../machines/", $file, ".yaml"));)*

        /// Every bundled machine file with its name.
        pub const BUNDLED: &[(&str, &str)] = &[$(($file, $name)),*];
    };
}

machines! {
    /// Two A30: a placement axis of four memory slices.
    A30X2 = "a30x2";
    /// Eight A100 40 GB.
    A100_40X8 = "a100-40gbx8";
    /// Eight A100 80 GB.
    A100_80X8 = "a100-80gbx8";
    /// Two H100 80 GB, the default of tests and of the demo.
    H100X2 = "h100x2";
    /// Eight H200.
    H200X8 = "h200x8";
    /// Eight B200.
    B200X8 = "b200x8";
    /// Two RTX PRO 6000: a placement axis of twelve memory slices.
    RTX_PRO_6000X2 = "rtx-pro-6000x2";
    /// One Tesla T4: no MIG.
    T4 = "t4";
    /// One RTX 4090: a consumer GPU.
    RTX_4090 = "rtx-4090";
    /// One GB10: no memory of its own.
    GB10 = "gb10";
}

/// A machine, as described by its file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MachineDescription {
    /// Version of the kernel driver, as `nvidia-smi` prints it (`580.65.06`).
    pub driver_version: String,
    /// Version of the NVML library (`13.580.65.06`).
    pub nvml_version: String,
    /// Highest CUDA version the driver supports.
    pub cuda_version: DottedVersion,
    /// Which processes a caller sees in NVML's process lists.
    #[serde(default)]
    pub process_ids: ProcessIds,
    /// Device nodes of MIG capabilities.
    #[serde(default)]
    pub capability_nodes: CapabilityNodes,
    /// Checkpoints of processes.
    #[serde(default)]
    pub checkpoints: Checkpoints,
    /// Memory limits of cgroups.
    #[serde(default)]
    pub memory_limits: MemoryLimits,
    /// What calls do beside their purpose.
    #[serde(default)]
    pub side_effects: SideEffects,
    /// Multi-process service.
    #[serde(default)]
    pub mps: Mps,
    /// NVSwitches, if the machine has any as PCI devices.
    #[serde(default)]
    pub nvswitches: Option<NvSwitches>,
    /// GPU models by name; names are local to the file.
    pub models: BTreeMap<String, GpuModel>,
    /// GPUs in PCI order: the index is the minor number.
    pub gpus: Vec<GpuDescription>,
}

/// What NVML's process lists contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessIds {
    /// The processes in the caller's PID namespace, by their PIDs there: drivers since the 515
    /// branch.
    #[default]
    Translated,
    /// Every process, by the daemon's PID: older drivers.
    Host,
    /// Nothing for callers in another PID namespace than the daemon's.
    HiddenInContainers,
}

/// Who creates the device nodes of MIG capabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CapabilityNodes {
    /// Programs that use an instance, as on a real machine: no node exists after its creation.
    #[default]
    OnDemand,
    /// The machine, with each instance.
    Created,
}

/// What drivers do differently with checkpoints of processes. The default is the less friendly behavior.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Checkpoints {
    /// Time for which NVML still shows the memory of a checkpointed process, and the process.
    pub nvml_delay_milliseconds: u64,
    /// Whether a process whose restore failed is in the state `CU_PROCESS_STATE_FAILED`, as the header of CUDA documents it.
    /// Driver 580.95 reports it as checkpointed.
    pub shows_failure: bool,
}

impl Default for Checkpoints {
    fn default() -> Self {
        Self {
            nvml_delay_milliseconds: 500,
            shows_failure: false,
        }
    }
}

/// NVSwitches of a machine: PCI devices that connect the GPUs of a baseboard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvSwitches {
    /// PCI device id in the high half, vendor id (`10de`) in the low half.
    pub pci_device_id: u32,
    /// PCI address of each.
    pub bus_ids: Vec<BusId>,
}

/// What calls of libcuda do beside their purpose, as on hardware. Each can be left out, for comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct SideEffects {
    /// Whether a load of code waits for the kernels of its context.
    pub loads_wait: bool,
    /// Whether unsafe calls fail during a capture and invalidate it.
    pub unsafe_calls_invalidate_captures: bool,
    /// Whether contexts take more memory for kernels after their creation: local memory, heap, buffers of `printf` and of
    /// profilers.
    pub contexts_grow: bool,
}

impl Default for SideEffects {
    fn default() -> Self {
        Self {
            loads_wait: true,
            unsafe_calls_invalidate_captures: true,
            contexts_grow: true,
        }
    }
}

/// The multi-process service of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Mps {
    /// Whether the driver root has its programs; some driver packages leave them out.
    pub installed: bool,
}

impl Default for Mps {
    fn default() -> Self {
        Self { installed: true }
    }
}

/// `major.minor`, as in compute capability 9.0 and CUDA 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DottedVersion {
    /// Before the dot.
    pub major: u32,
    /// After the dot.
    pub minor: u32,
}

impl TryFrom<String> for DottedVersion {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let parsed = text
            .split_once('.')
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        match parsed {
            Some((major, minor)) => Ok(Self { major, minor }),
            None => Err(format!(
                "version {text:?} must have the form \"major.minor\", quoted"
            )),
        }
    }
}

impl From<DottedVersion> for String {
    fn from(version: DottedVersion) -> Self {
        format!("{}.{}", version.major, version.minor)
    }
}

/// Properties shared by all GPUs of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuModel {
    /// Product name as NVML reports it.
    pub name: String,
    /// Brand as NVML reports it.
    pub brand: Brand,
    /// Chip generation.
    pub architecture: Architecture,
    /// CUDA compute capability.
    pub compute_capability: DottedVersion,
    /// PCI device id in the high half, vendor id (`10de`) in the low half.
    pub pci_device_id: u32,
    /// PCI subsystem id, composed as [`Self::pci_device_id`].
    pub pci_subsystem_id: u32,
    /// Board part number.
    pub board_part_number: String,
    /// VBIOS version.
    pub vbios_version: String,
    /// Memory properties.
    pub memory: Memory,
    /// Compute properties.
    pub compute: Compute,
    /// Maximum clocks.
    pub clocks_mhz: Clocks,
    /// Power draw.
    pub power_milliwatts: Power,
    /// Temperatures.
    pub temperature_celsius: Temperature,
    /// PCIe link.
    pub pcie: Pcie,
    /// Whether the memory has ECC, which is reported as enabled.
    pub ecc: bool,
    /// Memory addressing mode.
    #[serde(default)]
    pub addressing_mode: AddressingMode,
    /// NVLink ports; `None` if the model has none.
    #[serde(default)]
    pub nvlink: Option<NvLink>,
    /// MIG table; `None` if the model has no MIG.
    #[serde(default)]
    pub mig: Option<Mig>,
    /// Costs and errors of real GPUs that the simulation leaves out by default.
    #[serde(default)]
    pub perturbation: Perturbation,
}

/// Costs and errors of real GPUs. The default has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Perturbation {
    /// Largest deviation of a time slice from its mean, percent.
    pub slice_deviation_percent: u32,
    /// Time of an event on its stream.
    pub event_nanoseconds: u64,
    /// Whether contexts record events also in the time slices of others.
    pub records_out_of_slice: bool,
    /// Delay of NVML's utilization samples.
    pub nvml_delay_milliseconds: u64,
    /// NVML rounds utilization down to a multiple of this; 0 counts as 1.
    pub nvml_step_percent: u32,
}

/// Memory of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Memory {
    /// Total size.
    pub total_bytes: u64,
    /// Reserved by driver and firmware.
    pub reserved_bytes: u64,
    /// Taken by the CUDA context of one process, without allocations.
    pub context_bytes: u64,
    /// Taken by a module when its first function is loaded.
    pub module_bytes: u64,
    /// Width of the memory bus.
    pub bus_width_bits: u32,
    /// Peak bandwidth; sets the duration of copies and memsets.
    pub bytes_per_second: u64,
    /// Whether NVML reports memory: false on GPUs that share system memory.
    #[serde(default = "reported")]
    pub reported_by_nvml: bool,
}

fn reported() -> bool {
    true
}

impl Memory {
    /// Memory for contexts and allocations.
    #[must_use]
    pub fn usable_bytes(&self) -> u64 {
        self.total_bytes - self.reserved_bytes
    }
}

/// Compute properties of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compute {
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// CUDA cores on all of them.
    pub cores: u32,
    /// Resident threads per multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// Time slice of a context while another one waits. Measured on an H200, assumed for other models.
    pub time_slice_microseconds: u32,
    /// Time of a switch between contexts, in which nothing runs. Measured on an H200, assumed for other models.
    pub context_switch_microseconds: u32,
    /// Copy engines (`CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT`).
    pub copy_engines: u32,
}

/// Maximum clocks of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Clocks {
    /// Graphics and SM clock.
    pub graphics: u32,
    /// Memory clock.
    pub memory: u32,
    /// Video clock.
    pub video: u32,
}

/// Power draw of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Power {
    /// Idle.
    pub idle: u32,
    /// Power limit, and the draw of a fully busy GPU.
    pub limit: u32,
}

/// Temperatures of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Temperature {
    /// Idle.
    pub idle: u32,
    /// Fully busy.
    pub busy: u32,
    /// Slowdown threshold.
    pub slowdown: u32,
    /// Shutdown threshold.
    pub shutdown: u32,
}

/// PCIe link of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Pcie {
    /// Generation.
    pub generation: u32,
    /// Lanes.
    pub width: u32,
}

/// NVLink ports of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NvLink {
    /// Generation.
    pub version: u32,
    /// Active links.
    pub links: u32,
}

/// NVML's brand names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "names of NVML")]
pub enum Brand {
    Nvidia,
    Tesla,
    GeforceRtx,
    NvidiaRtx,
}

/// Chip generations, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "names of NVML")]
pub enum Architecture {
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
}

/// How the GPU addresses system memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AddressingMode {
    /// Not supported.
    #[default]
    None,
    /// Heterogeneous memory management, in software.
    Hmm,
    /// Address translation service, in hardware (GH200, GB10).
    Ats,
}

/// One GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuDescription {
    /// Key into [`MachineDescription::models`].
    pub model: String,
    /// With the prefix `GPU-`.
    pub uuid: String,
    /// Serial number; `None` for consumer GPUs.
    #[serde(default)]
    pub serial: Option<String>,
    /// PCI address, `domain:bus:device.function`.
    pub bus_id: BusId,
    /// NUMA node, if known.
    #[serde(default)]
    pub numa_node: Option<u32>,
    /// NVLink fabric of the GPU.
    #[serde(default)]
    pub fabric: Option<Fabric>,
    /// Whether MIG mode is on when the machine starts; Ampere GPUs store it.
    #[serde(default)]
    pub mig_enabled: bool,
}

/// Membership in an NVLink fabric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Fabric {
    /// UUID of the fabric's cluster.
    pub cluster_uuid: String,
    /// Clique within the cluster: GPUs of one clique reach each other.
    pub clique: u32,
}

/// Error of a machine file.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// The file cannot be read.
    #[error("cannot read machine file {path}")]
    Read {
        /// Path of the file.
        path: String,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// The text is not YAML of the expected schema; the message names field and line.
    #[error("machine file: {0}")]
    Parse(String),
    /// The text contradicts itself.
    #[error("machine file: {0}")]
    Inconsistent(String),
}

impl MachineDescription {
    /// Returns whether a GPU can be used only while the fabric manager runs, although NVML reports no fabric of it: GPUs on
    /// NVSwitches before Hopper.
    #[must_use]
    pub fn needs_unreported_fabric(&self, gpu: &GpuDescription) -> bool {
        let model = self.model(gpu);
        self.nvswitches.is_some()
            && gpu.fabric.is_none()
            && model.nvlink.is_some()
            && model.architecture < Architecture::Hopper
    }

    /// Reads and validates a machine file.
    ///
    /// # Errors
    /// If the file cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, DescriptionError> {
        let text = std::fs::read_to_string(path).map_err(|source| DescriptionError::Read {
            path: path.display().to_string(),
            source,
        })?;
        Self::parse(&text)
    }

    /// Parses and validates the text of a machine file.
    ///
    /// # Errors
    /// If the text is invalid.
    pub fn parse(text: &str) -> Result<Self, DescriptionError> {
        let description: Self = serde_saphyr::from_str(text)
            .map_err(|error| DescriptionError::Parse(error.to_string()))?;
        description
            .check()
            .map_err(DescriptionError::Inconsistent)?;
        Ok(description)
    }

    /// Returns the model of a GPU.
    ///
    /// # Panics
    /// Never: [`Self::parse`] validated the model names.
    #[must_use]
    pub fn model(&self, gpu: &GpuDescription) -> &GpuModel {
        #[expect(clippy::expect_used, reason = "`parse` rejected unknown model names")]
        self.models.get(&gpu.model).expect("a valid model name")
    }

    fn check(&self) -> Result<(), String> {
        self.check_memory_limits()?;
        for (name, model) in &self.models {
            let memory = &model.memory;
            if memory.reserved_bytes >= memory.total_bytes {
                return Err(format!(
                    "models.{name}.memory: reservedBytes {} must be less than totalBytes {}",
                    memory.reserved_bytes, memory.total_bytes
                ));
            }
            if model.compute.multiprocessors == 0 || model.compute.time_slice_microseconds == 0 {
                return Err(format!(
                    "models.{name}.compute: multiprocessors and timeSliceMicroseconds must be at least 1"
                ));
            }
            if model.perturbation.slice_deviation_percent >= 100 {
                return Err(format!(
                    "models.{name}.perturbation: sliceDeviationPercent must be less than 100"
                ));
            }
            if memory.bytes_per_second == 0 {
                return Err(format!(
                    "models.{name}.memory: bytesPerSecond must be at least 1"
                ));
            }
            if let Some(mig) = &model.mig {
                mig.check()
                    .map_err(|error| format!("models.{name}.mig: {error}"))?;
            }
        }
        let mut uuids = BTreeSet::new();
        let mut bus_ids = BTreeSet::new();
        let switches = self.nvswitches.iter();
        for bus_id in switches.flat_map(|switches| &switches.bus_ids) {
            if !bus_ids.insert(*bus_id) {
                return Err(format!("nvswitches.busIds: duplicate {bus_id}"));
            }
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            if !self.models.contains_key(&gpu.model) {
                return Err(format!(
                    "gpus[{index}].model: unknown model {:?}",
                    gpu.model
                ));
            }
            let model = self.models.get(&gpu.model);
            if gpu.mig_enabled && model.is_none_or(|model| model.mig.is_none()) {
                return Err(format!(
                    "gpus[{index}].migEnabled: model {:?} has no MIG",
                    gpu.model
                ));
            }
            if !gpu.uuid.starts_with("GPU-") || gpu.uuid.len() != 40 {
                return Err(format!(
                    "gpus[{index}].uuid: {:?} must be \"GPU-\" followed by a UUID",
                    gpu.uuid
                ));
            }
            if !uuids.insert(&gpu.uuid) {
                return Err(format!("gpus[{index}].uuid: duplicate {}", gpu.uuid));
            }
            if !bus_ids.insert(gpu.bus_id) {
                return Err(format!("gpus[{index}].busId: duplicate {}", gpu.bus_id));
            }
        }
        if self.gpus.len() > 64 {
            return Err(format!(
                "gpus: {} exceed the maximum of 64",
                self.gpus.len()
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
