//! Reading of the inventory.

use std::sync::Arc;

use nvml_wrapper::enum_wrappers::device::ComputeMode as NvmlComputeMode;
use nvml_wrapper::enums::device::DeviceArchitecture;
use nvml_wrapper::{Device, cuda_driver_version_major, cuda_driver_version_minor};
use nvml_wrapper_sys::bindings as sys;

use super::readings::Reading;
use super::{Handle, Shared, call, handle_of, optional, struct_version};
use crate::{
    AddressingMode, ComputeCapability, ComputeMode, CudaVersion, Fabric, FabricHealth, FabricState,
    Gpu, GpuFault, GpuUuid, Inventory, InventoryError, Memory, Mig, Status,
};

impl Shared {
    pub(super) fn inventory(self: &Arc<Self>) -> Result<Inventory, InventoryError> {
        let failed = |query| move |status: Status| InventoryError { query, status };
        let count = self
            .nvml
            .device_count()
            .map_err(|e| failed("the number of GPUs")(e.into()))?;
        let driver_version = self
            .nvml
            .sys_driver_version()
            .map_err(|e| failed("the driver version")(e.into()))?;
        let nvml_version = self
            .nvml
            .sys_nvml_version()
            .map_err(|e| failed("the version of NVML")(e.into()))?;
        let cuda_driver_version =
            optional(self.nvml.sys_cuda_driver_version().map_err(Status::from))
                .map_err(failed("the CUDA driver version"))?
                .map(|version| CudaVersion {
                    major: cuda_driver_version_major(version).unsigned_abs(),
                    minor: cuda_driver_version_minor(version).unsigned_abs(),
                });

        let (read, faults) = self.read_gpus(count);
        let handle = |(gpu, handle): &(Gpu, Handle)| (gpu.uuid.clone(), *handle);
        *self.handles() = read.iter().map(handle).collect();
        let gpus = read.into_iter().map(|(gpu, _)| gpu).collect();
        Ok(Inventory {
            driver_version,
            cuda_driver_version,
            nvml_version,
            confidential_computing: self.confidential_computing(),
            gpus,
            faults,
        })
    }

    /// Reads a GPU.
    pub(super) fn read_gpu(&self, index: u32) -> Reading {
        let mut progress = Progress {
            uuid: None,
            query: "the handle",
        };
        self.gpu(index, &mut progress).map_err(|status| GpuFault {
            index,
            gpu: progress.uuid,
            query: progress.query,
            status,
        })
    }

    fn gpu(&self, index: u32, progress: &mut Progress) -> Result<(Gpu, Handle), Status> {
        let device = self.nvml.device_by_index(index)?;
        let handle = handle_of(&device);
        let uuid = GpuUuid::new(progress.required("the UUID", || device.uuid())?);
        progress.uuid = Some(uuid.clone());
        let capability = progress.required("the compute capability", || {
            device.cuda_compute_capability()
        })?;
        let compute_capability = ComputeCapability {
            major: capability.major.unsigned_abs(),
            minor: capability.minor.unsigned_abs(),
        };
        let memory = progress.required("the memory", || self.memory(handle))?;
        let gpu = Gpu {
            index,
            minor: progress.required("the minor number", || device.minor_number())?,
            uuid,
            name: progress.required("the name", || device.name())?,
            brand: progress
                .optional("the brand", || device.brand())?
                .map_or("Unknown".into(), |brand| format!("{brand:?}")),
            architecture: progress
                .optional("the architecture", || device.architecture())?
                .as_ref()
                .map_or("Unknown", architecture)
                .to_owned(),
            compute_capability,
            pci_bus_id: progress
                .required("the PCI address", || device.pci_info())
                .map(|pci| pci_address(&pci.bus_id))?,
            numa_node: progress
                .optional("the NUMA node", || numa_node(&device))?
                .flatten(),
            memory,
            multiprocessors: progress
                .optional("the number of cores", || device.num_cores())?
                .and_then(|cores| multiprocessors(cores, compute_capability)),
            addressing_mode: progress
                .optional("the addressing mode", || self.addressing_mode(handle))?
                .flatten(),
            compute_mode: progress
                .optional("the compute mode", || device.compute_mode())?
                .map_or(ComputeMode::Unknown, compute_mode),
            has_mps_clients: progress
                .optional("the MPS processes", || self.mps_processes(handle))?
                .is_some_and(|processes| !processes.is_empty()),
            mig: progress.required("the MIG mode", || self.mig(&device, handle, memory))?,
            fabric: progress
                .optional("the fabric", || self.fabric(handle))?
                .flatten(),
        };
        Ok((gpu, handle))
    }

    pub(super) fn memory(&self, handle: Handle) -> Result<Memory, Status> {
        let mut v2 = sys::nvmlMemory_v2_t {
            version: struct_version::<sys::nvmlMemory_v2_t>(2),
            total: 0,
            reserved: 0,
            free: 0,
            used: 0,
        };
        if optional(call!(
            self.lib(),
            nvmlDeviceGetMemoryInfo_v2(handle.0, &raw mut v2)
        ))?
        .is_some()
        {
            return Ok(dedicated(v2.total, v2.reserved, v2.used));
        }
        let mut v1 = sys::nvmlMemory_t {
            total: 0,
            free: 0,
            used: 0,
        };
        let v1 = optional(call!(
            self.lib(),
            nvmlDeviceGetMemoryInfo(handle.0, &raw mut v1)
        ))?
        .map(|()| v1);
        Ok(v1.map_or(Memory::NotSupported, |v1| dedicated(v1.total, 0, v1.used)))
    }

    fn addressing_mode(&self, handle: Handle) -> Result<Option<AddressingMode>, Status> {
        let mut mode = sys::nvmlDeviceAddressingMode_t {
            version: struct_version::<sys::nvmlDeviceAddressingMode_t>(1),
            value: 0,
        };
        call!(
            self.lib(),
            nvmlDeviceGetAddressingMode(handle.0, &raw mut mode)
        )?;
        Ok(match mode.value {
            sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_NONE => {
                Some(AddressingMode::None)
            }
            sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_HMM => {
                Some(AddressingMode::Hmm)
            }
            sys::nvmlDeviceAddressingModeType_t_NVML_DEVICE_ADDRESSING_MODE_ATS => {
                Some(AddressingMode::Ats)
            }
            _ => None,
        })
    }

    fn mig(&self, device: &Device<'_>, handle: Handle, memory: Memory) -> Result<Mig, Status> {
        let Some(mode) = optional(device.mig_mode().map_err(Status::from))? else {
            return Ok(Mig::NotCapable);
        };
        Ok(Mig::Capable {
            enabled: mode.current == sys::NVML_DEVICE_MIG_ENABLE,
            pending: mode.pending == sys::NVML_DEVICE_MIG_ENABLE,
            profiles: self.profiles(handle, memory)?,
        })
    }

    fn fabric(&self, handle: Handle) -> Result<Option<Fabric>, Status> {
        let info = self.fabric_info(handle)?;
        let is_registered = fabric_state(&info) == Some(FabricState::Completed);
        Ok(is_registered.then(|| Fabric {
            cluster_uuid: dashed(info.clusterUuid),
            clique: info.cliqueId,
        }))
    }

    /// Returns the registration with the fabric and its health; `None` without a fabric.
    pub(super) fn fabric_state(
        &self,
        handle: Handle,
    ) -> Result<Option<(FabricState, FabricHealth)>, Status> {
        let info = optional(self.fabric_info(handle))?;
        Ok(info.and_then(|info| {
            let health = FabricHealth {
                mask: info.healthMask,
                summary: info.healthSummary,
            };
            Some((fabric_state(&info)?, health))
        }))
    }

    /// Reads the registration in the newest version that the driver knows: 3 is that of the binding, 2 is its prefix, and
    /// drivers before CUDA 12.4, such as the long-lived 535, have only the call without a version.
    fn fabric_info(&self, handle: Handle) -> Result<sys::nvmlGpuFabricInfoV_t, Status> {
        let mut info = sys::nvmlGpuFabricInfoV_t {
            version: 0,
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        for version in [
            struct_version::<sys::nvmlGpuFabricInfo_v3_t>(3),
            struct_version::<sys::nvmlGpuFabricInfo_v2_t>(2),
        ] {
            info.version = version;
            let read = call!(
                self.lib(),
                nvmlDeviceGetGpuFabricInfoV(handle.0, &raw mut info)
            );
            if optional(read)?.is_some() {
                return Ok(info);
            }
        }
        let mut first = sys::nvmlGpuFabricInfo_t {
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
        };
        call!(
            self.lib(),
            nvmlDeviceGetGpuFabricInfo(handle.0, &raw mut first)
        )?;
        Ok(sys::nvmlGpuFabricInfoV_t {
            version: 0,
            clusterUuid: first.clusterUuid,
            status: first.status,
            cliqueId: first.cliqueId,
            state: first.state,
            healthMask: 0,
            healthSummary: 0,
        })
    }

    fn confidential_computing(&self) -> bool {
        let mut settings = sys::nvmlSystemConfComputeSettings_t {
            version: struct_version::<sys::nvmlSystemConfComputeSettings_t>(1),
            environment: 0,
            ccFeature: 0,
            devToolsMode: 0,
            multiGpuMode: 0,
        };
        // Off for drivers without the query and nodes without the feature.
        call!(
            self.lib(),
            nvmlSystemGetConfComputeSettings(&raw mut settings)
        )
        .is_ok()
            && settings.ccFeature == sys::NVML_CC_SYSTEM_FEATURE_ENABLED
    }
}

/// Returns the registration; `None` for a GPU that has no fabric (state "not supported") or a state newer than this build.
fn fabric_state(info: &sys::nvmlGpuFabricInfoV_t) -> Option<FabricState> {
    match u32::from(info.state) {
        sys::NVML_GPU_FABRIC_STATE_NOT_STARTED => Some(FabricState::NotStarted),
        sys::NVML_GPU_FABRIC_STATE_IN_PROGRESS => Some(FabricState::InProgress),
        sys::NVML_GPU_FABRIC_STATE_COMPLETED
            if info.status == sys::nvmlReturn_enum_NVML_SUCCESS =>
        {
            Some(FabricState::Completed)
        }
        sys::NVML_GPU_FABRIC_STATE_COMPLETED => Some(FabricState::Failed(info.status)),
        _ => None,
    }
}

/// Progress of reading a GPU, for [`GpuFault`].
struct Progress {
    uuid: Option<GpuUuid>,
    query: &'static str,
}

impl Progress {
    /// Reads a value that every GPU has.
    fn required<T, E: Into<Status>>(
        &mut self,
        query: &'static str,
        read: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, Status> {
        self.query = query;
        read().map_err(Into::into)
    }

    /// Reads a value that the GPU or driver may lack.
    fn optional<T, E: Into<Status>>(
        &mut self,
        query: &'static str,
        read: impl FnOnce() -> Result<T, E>,
    ) -> Result<Option<T>, Status> {
        optional(self.required(query, read))
    }
}

fn dedicated(total_bytes: u64, reserved_bytes: u64, used_bytes: u64) -> Memory {
    Memory::Dedicated {
        total_bytes,
        reserved_bytes,
        used_bytes,
    }
}

/// Returns the lowest of the nearest NUMA nodes.
fn numa_node(device: &Device<'_>) -> Result<Option<u32>, Status> {
    /// Words of the node set: 1024 nodes, the maximum of Linux.
    const WORDS: usize = 1024 / u64::BITS as usize;
    let set = device.memory_affinity(WORDS, sys::NVML_AFFINITY_SCOPE_NODE)?;
    Ok(lowest_bit(&set))
}

fn lowest_bit(words: &[u64]) -> Option<u32> {
    (0..)
        .step_by(64)
        .zip(words)
        .find(|(_, word)| **word != 0)
        .map(|(base, word)| base + word.trailing_zeros())
}

/// Returns the number of multiprocessors for NVML's number of cores. Cores per multiprocessor are by compute capability
/// (CUDA C++ Programming Guide, table of arithmetic throughput); `None` for a newer architecture.
fn multiprocessors(cores: u32, capability: ComputeCapability) -> Option<u32> {
    let per_multiprocessor = match (capability.major, capability.minor) {
        (3, _) => 192,
        (5, _) | (6, 1 | 2) | (8, 6 | 7 | 9) | (9..=12, _) => 128,
        (6 | 8, 0) | (7, _) => 64,
        _ => return None,
    };
    (cores > 0 && cores.is_multiple_of(per_multiprocessor)).then(|| cores / per_multiprocessor)
}

fn architecture(architecture: &DeviceArchitecture) -> &'static str {
    match architecture {
        DeviceArchitecture::Kepler => "Kepler",
        DeviceArchitecture::Maxwell => "Maxwell",
        DeviceArchitecture::Pascal => "Pascal",
        DeviceArchitecture::Volta => "Volta",
        DeviceArchitecture::Turing => "Turing",
        DeviceArchitecture::Ampere => "Ampere",
        DeviceArchitecture::Ada => "Ada Lovelace",
        DeviceArchitecture::Hopper => "Hopper",
        DeviceArchitecture::Blackwell => "Blackwell",
        DeviceArchitecture::Unknown => "Unknown",
    }
}

fn compute_mode(mode: NvmlComputeMode) -> ComputeMode {
    match mode {
        NvmlComputeMode::Default => ComputeMode::Default,
        NvmlComputeMode::ExclusiveThread | NvmlComputeMode::ExclusiveProcess => {
            ComputeMode::ExclusiveProcess
        }
        NvmlComputeMode::Prohibited => ComputeMode::Prohibited,
    }
}

/// Converts NVML's `00000000:1B:00.0` to the `0000:1b:00.0` of sysfs and Kubernetes. A domain above 16 bits (Hyper-V,
/// VMD) keeps eight digits.
fn pci_address(bus_id: &str) -> String {
    let lower = bus_id.to_ascii_lowercase();
    match lower.split_once(':') {
        Some((domain, rest)) if domain.len() == 8 => match domain.strip_prefix("0000") {
            Some(short) => format!("{short}:{rest}"),
            None => lower,
        },
        _ => lower,
    }
}

/// Formats the bytes of a UUID.
fn dashed(bytes: [u8; 16]) -> String {
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let (a, rest) = hex.split_at(8);
    let (b, rest) = rest.split_at(4);
    let (c, rest) = rest.split_at(4);
    let (d, e) = rest.split_at(4);
    format!("{a}-{b}-{c}-{d}-{e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_pci_addresses_as_sysfs() {
        for (nvml, sysfs) in [
            ("00000000:1B:00.0", "0000:1b:00.0"),
            ("0000FFFF:00:1E.0", "ffff:00:1e.0"),
            ("00010000:00:00.0", "00010000:00:00.0"),
            ("0000:1B:00.0", "0000:1b:00.0"),
            ("odd", "odd"),
        ] {
            assert_eq!(pci_address(nvml), sysfs);
        }
    }

    #[test]
    fn derives_multiprocessors_from_cores() {
        let capability = |major, minor| ComputeCapability { major, minor };
        assert_eq!(
            multiprocessors(16896, capability(9, 0)),
            Some(132),
            "H100 SXM"
        );
        assert_eq!(multiprocessors(6912, capability(8, 0)), Some(108), "A100");
        assert_eq!(multiprocessors(2560, capability(7, 5)), Some(40), "T4");
        assert_eq!(
            multiprocessors(2560, capability(99, 0)),
            None,
            "unknown architecture"
        );
        assert_eq!(
            multiprocessors(100, capability(9, 0)),
            None,
            "not an integer"
        );
        assert_eq!(multiprocessors(0, capability(9, 0)), None);
    }

    #[test]
    fn finds_lowest_set_bit_of_node_set() {
        assert_eq!(lowest_bit(&[0, 0]), None);
        assert_eq!(lowest_bit(&[0b110, 0]), Some(1));
        assert_eq!(lowest_bit(&[0, 1 << 5]), Some(69));
    }

    #[test]
    fn formats_uuid_bytes() {
        let bytes = [0xde, 0xad, 0xbe, 0xef, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
        assert_eq!(dashed(bytes), "deadbeef-0001-0203-0405-060708090a0b");
    }
}
