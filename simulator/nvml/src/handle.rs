//! Handles of GPUs, MIG devices and instances: numbers of pointer size, validated at every use,
//! never dereferenced.
//!
//! A handle encodes GPU and instance: it is equal for all callers, and invalid once the instance is
//! destroyed. As in the real library, an instance recreated at the same placement has the old
//! handle.

use nvml_wrapper_sys::bindings::{nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t};

use simulator_machine::description::{GpuDescription, GpuInstanceProfile, GpuModel};
use simulator_machine::protocol::{
    ComputeInstanceState, GpuIndex, GpuInstanceState, GpuState, InstanceId, ReportedValue,
};

use crate::abi::{NvmlResult, function};
use crate::error::NvmlError;
use crate::library::{Library, library};

/// Start of the handles of GPUs, above every mappable address.
const GPUS: usize = 0x0100_6e76_6d6c_0000;
/// Start of the handles of MIG devices, GPU instances and compute instances.
const MIG_DEVICES: usize = 0x0100_6e76_6e00_0000;
const GPU_INSTANCES: usize = MIG_DEVICES + 0x0100_0000;
const COMPUTE_INSTANCES: usize = GPU_INSTANCES + 0x0100_0000;

/// A valid handle of a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) library: &'static Library,
    pub(crate) gpu: GpuIndex,
}

/// Bits of the ids within a GPU: GPU instance, then compute instance.
const GPU_INSTANCE_SHIFT: u32 = 8;
const GPU_SHIFT: u32 = 16;

/// A valid handle of a GPU or MIG device.
#[derive(Clone, Debug)]
pub(crate) enum AnyDevice {
    /// A whole GPU.
    Gpu(Device),
    /// A compute instance.
    Mig(MigDevice),
}

/// A valid handle of a MIG device.
#[derive(Clone, Debug)]
pub(crate) struct MigDevice {
    pub(crate) gpu_instance: GpuInstance,
    pub(crate) compute: ComputeInstanceState,
}

impl MigDevice {
    pub(crate) fn id(&self) -> InstanceId {
        InstanceId {
            gpu_instance: self.gpu_instance.state.id,
            compute: self.compute.id,
        }
    }

    pub(crate) fn device(&self) -> Device {
        self.gpu_instance.device
    }
}

/// A valid handle of a GPU instance.
#[derive(Clone, Debug)]
pub(crate) struct GpuInstance {
    pub(crate) device: Device,
    pub(crate) state: GpuInstanceState,
}

impl GpuInstance {
    pub(crate) fn profile(&self) -> NvmlResult<&'static GpuInstanceProfile> {
        let mig = self.device.model()?.mig.as_ref();
        mig.and_then(|mig| mig.profile(self.state.profile))
            .ok_or(NvmlError::Unknown)
    }
}

pub(crate) fn mig_handle(gpu: GpuIndex, instance: InstanceId) -> nvmlDevice_t {
    std::ptr::without_provenance_mut(MIG_DEVICES.wrapping_add(encode(gpu, instance)))
}

pub(crate) fn gpu_instance_handle(gpu: GpuIndex, gpu_instance: u32) -> nvmlGpuInstance_t {
    let id = InstanceId {
        gpu_instance,
        compute: 0,
    };
    std::ptr::without_provenance_mut(GPU_INSTANCES.wrapping_add(encode(gpu, id)))
}

pub(crate) fn compute_instance_handle(
    gpu: GpuIndex,
    instance: InstanceId,
) -> nvmlComputeInstance_t {
    std::ptr::without_provenance_mut(COMPUTE_INSTANCES.wrapping_add(encode(gpu, instance)))
}

fn encode(gpu: GpuIndex, instance: InstanceId) -> usize {
    // A machine has at most 64 GPUs, a GPU fewer than 16 instances of either kind.
    let code = gpu.0 << GPU_SHIFT | instance.gpu_instance << GPU_INSTANCE_SHIFT | instance.compute;
    usize::try_from(code).unwrap_or(usize::MAX)
}

/// Decodes a handle; `None` outside the range.
fn decode(address: usize, range: usize) -> Option<(GpuIndex, InstanceId)> {
    let code = u32::try_from(address.wrapping_sub(range)).ok()?;
    if code >> 24 != 0 {
        return None;
    }
    let instance = InstanceId {
        gpu_instance: code >> GPU_INSTANCE_SHIFT & 0xff,
        compute: code & 0xff,
    };
    Some((GpuIndex(code >> GPU_SHIFT), instance))
}

/// Resolves a handle of a GPU or MIG device.
pub(crate) fn any_device(handle: nvmlDevice_t) -> NvmlResult<AnyDevice> {
    let library = library()?;
    match decode(handle.addr(), MIG_DEVICES) {
        Some((gpu, id)) => Ok(AnyDevice::Mig(find_compute(library, gpu, id)?)),
        None => Ok(AnyDevice::Gpu(device(handle)?)),
    }
}

pub(crate) fn gpu_instance(handle: nvmlGpuInstance_t) -> NvmlResult<GpuInstance> {
    let library = library()?;
    let (gpu, id) = decode(handle.addr(), GPU_INSTANCES).ok_or(NvmlError::InvalidArgument)?;
    find_gpu_instance(library, gpu, id.gpu_instance)
}

pub(crate) fn compute_instance(handle: nvmlComputeInstance_t) -> NvmlResult<MigDevice> {
    let library = library()?;
    let (gpu, id) = decode(handle.addr(), COMPUTE_INSTANCES).ok_or(NvmlError::InvalidArgument)?;
    find_compute(library, gpu, id)
}

fn find_gpu_instance(
    library: &'static Library,
    gpu: GpuIndex,
    gpu_instance: u32,
) -> NvmlResult<GpuInstance> {
    if !library.visible().contains(&gpu) {
        return Err(NvmlError::InvalidArgument);
    }
    let device = Device { library, gpu };
    let instances = library.mig(gpu)?.gpu_instances;
    let state = instances
        .into_iter()
        .find(|instance| instance.id == gpu_instance);
    let state = state.ok_or(NvmlError::InvalidArgument)?;
    Ok(GpuInstance { device, state })
}

/// The MIG devices whose device nodes this process can see.
pub(crate) fn visible_devices(
    library: &'static Library,
    gpu: GpuIndex,
) -> NvmlResult<Vec<MigDevice>> {
    let device = Device { library, gpu };
    let mut devices = Vec::new();
    for state in library.mig(gpu)?.gpu_instances {
        for compute in &state.compute_instances {
            let id = InstanceId {
                gpu_instance: state.id,
                compute: compute.id,
            };
            if library.sees_instance(gpu, id) {
                let gpu_instance = GpuInstance {
                    device,
                    state: state.clone(),
                };
                let compute = compute.clone();
                devices.push(MigDevice {
                    gpu_instance,
                    compute,
                });
            }
        }
    }
    Ok(devices)
}

fn find_compute(library: &'static Library, gpu: GpuIndex, id: InstanceId) -> NvmlResult<MigDevice> {
    let gpu_instance = find_gpu_instance(library, gpu, id.gpu_instance)?;
    let computes = &gpu_instance.state.compute_instances;
    let compute = computes.iter().find(|compute| compute.id == id.compute);
    let compute = compute.cloned().ok_or(NvmlError::InvalidArgument)?;
    Ok(MigDevice {
        gpu_instance,
        compute,
    })
}

pub(crate) fn handle(gpu: GpuIndex) -> nvmlDevice_t {
    let index = usize::try_from(gpu.0).unwrap_or(usize::MAX);
    std::ptr::without_provenance_mut(GPUS.wrapping_add(index))
}

/// Resolves a handle of a GPU. Rejects MIG devices: most functions are for whole GPUs.
pub(crate) fn device(handle: nvmlDevice_t) -> NvmlResult<Device> {
    let library = library()?;
    let index = handle.addr().wrapping_sub(GPUS);
    let gpu = u32::try_from(index).map(GpuIndex).ok();
    let gpu = gpu.filter(|gpu| library.visible().contains(gpu));
    let gpu = gpu.ok_or(NvmlError::InvalidArgument)?;
    Ok(Device { library, gpu })
}

impl Device {
    pub(crate) fn model(&self) -> NvmlResult<&'static GpuModel> {
        self.library.model(self.gpu)
    }

    pub(crate) fn described(&self) -> NvmlResult<&'static GpuDescription> {
        self.library.gpu(self.gpu)
    }

    pub(crate) fn state(&self) -> NvmlResult<GpuState> {
        let state = self.library.state(self.gpu)?;
        match state.failing.get(function()) {
            Some(code) => Err((*code).into()),
            None => Ok(state),
        }
    }

    /// Returns the state if the GPU reports this value.
    pub(crate) fn reporting(&self, value: ReportedValue) -> NvmlResult<GpuState> {
        let state = self.state()?;
        match state.unsupported.contains(&value) {
            true => Err(NvmlError::NotSupported),
            false => Ok(state),
        }
    }

    /// NVML index: the position among the GPUs visible to this process.
    pub(crate) fn index(&self) -> NvmlResult<u32> {
        let position = self
            .library
            .visible()
            .iter()
            .position(|gpu| *gpu == self.gpu);
        position
            .and_then(|position| u32::try_from(position).ok())
            .ok_or(NvmlError::InvalidArgument)
    }
}
