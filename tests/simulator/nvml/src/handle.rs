//! Handles of GPUs, MIG devices and instances: numbers of pointer size, validated at every use,
//! never dereferenced.
//!
//! A handle encodes GPU and instance: it is equal for all callers, and invalid once the instance is
//! destroyed. As in the real library, an instance recreated at the same placement has the old
//! handle.

use nvml_wrapper_sys::bindings::{nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t};

use simulator_machine::description::{CardDescription, CardModel, GpuInstanceProfile};
use simulator_machine::protocol::{
    CardIndex, CardState, ComputeInstanceState, GpuInstanceState, InstanceId, ReportedValue,
};

use crate::abi::NvmlResult;
use crate::error::NvmlError;
use crate::library::{Library, library};

/// Start of the handles of GPUs, above every mappable address.
const CARDS: usize = 0x0100_6e76_6d6c_0000;
/// Start of the handles of MIG devices, GPU instances and compute instances.
const MIG_DEVICES: usize = 0x0100_6e76_6e00_0000;
const GPU_INSTANCES: usize = MIG_DEVICES + 0x0100_0000;
const COMPUTE_INSTANCES: usize = GPU_INSTANCES + 0x0100_0000;

/// A valid handle of a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Device {
    pub(crate) library: &'static Library,
    pub(crate) card: CardIndex,
}

/// Bits of the ids within a GPU: GPU instance, then compute instance.
const GPU_SHIFT: u32 = 8;
const CARD_SHIFT: u32 = 16;

/// A valid handle of a GPU or MIG device.
#[derive(Clone, Debug)]
pub(crate) enum AnyDevice {
    /// A whole GPU.
    Card(Device),
    /// A compute instance.
    Mig(MigDevice),
}

/// A valid handle of a MIG device.
#[derive(Clone, Debug)]
pub(crate) struct MigDevice {
    pub(crate) gpu: GpuInstance,
    pub(crate) compute: ComputeInstanceState,
}

impl MigDevice {
    pub(crate) fn id(&self) -> InstanceId {
        InstanceId {
            gpu: self.gpu.state.id,
            compute: self.compute.id,
        }
    }

    pub(crate) fn device(&self) -> Device {
        self.gpu.device
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

pub(crate) fn mig_handle(card: CardIndex, instance: InstanceId) -> nvmlDevice_t {
    std::ptr::without_provenance_mut(MIG_DEVICES.wrapping_add(encode(card, instance)))
}

pub(crate) fn gpu_instance_handle(card: CardIndex, gpu: u32) -> nvmlGpuInstance_t {
    let id = InstanceId { gpu, compute: 0 };
    std::ptr::without_provenance_mut(GPU_INSTANCES.wrapping_add(encode(card, id)))
}

pub(crate) fn compute_instance_handle(
    card: CardIndex,
    instance: InstanceId,
) -> nvmlComputeInstance_t {
    std::ptr::without_provenance_mut(COMPUTE_INSTANCES.wrapping_add(encode(card, instance)))
}

fn encode(card: CardIndex, instance: InstanceId) -> usize {
    // A machine has at most 64 GPUs, a GPU fewer than 16 instances of either kind.
    let code = card.0 << CARD_SHIFT | instance.gpu << GPU_SHIFT | instance.compute;
    usize::try_from(code).unwrap_or(usize::MAX)
}

/// Decodes a handle; `None` outside the range.
fn decode(address: usize, range: usize) -> Option<(CardIndex, InstanceId)> {
    let code = u32::try_from(address.wrapping_sub(range)).ok()?;
    if code >> 24 != 0 {
        return None;
    }
    let instance = InstanceId {
        gpu: code >> GPU_SHIFT & 0xff,
        compute: code & 0xff,
    };
    Some((CardIndex(code >> CARD_SHIFT), instance))
}

/// Resolves a handle of a GPU or MIG device.
pub(crate) fn any_device(handle: nvmlDevice_t) -> NvmlResult<AnyDevice> {
    let library = library()?;
    match decode(handle.addr(), MIG_DEVICES) {
        Some((card, id)) => Ok(AnyDevice::Mig(find_compute(library, card, id)?)),
        None => Ok(AnyDevice::Card(device(handle)?)),
    }
}

pub(crate) fn gpu_instance(handle: nvmlGpuInstance_t) -> NvmlResult<GpuInstance> {
    let library = library()?;
    let (card, id) = decode(handle.addr(), GPU_INSTANCES).ok_or(NvmlError::InvalidArgument)?;
    find_gpu(library, card, id.gpu)
}

pub(crate) fn compute_instance(handle: nvmlComputeInstance_t) -> NvmlResult<MigDevice> {
    let library = library()?;
    let (card, id) = decode(handle.addr(), COMPUTE_INSTANCES).ok_or(NvmlError::InvalidArgument)?;
    find_compute(library, card, id)
}

fn find_gpu(library: &'static Library, card: CardIndex, gpu: u32) -> NvmlResult<GpuInstance> {
    if !library.visible().contains(&card) {
        return Err(NvmlError::InvalidArgument);
    }
    let device = Device { library, card };
    let instances = library.mig(card)?.gpu_instances;
    let state = instances.into_iter().find(|instance| instance.id == gpu);
    let state = state.ok_or(NvmlError::InvalidArgument)?;
    Ok(GpuInstance { device, state })
}

/// The MIG devices whose device nodes this process can see.
pub(crate) fn visible_devices(
    library: &'static Library,
    card: CardIndex,
) -> NvmlResult<Vec<MigDevice>> {
    let device = Device { library, card };
    let mut devices = Vec::new();
    for state in library.mig(card)?.gpu_instances {
        for compute in &state.compute_instances {
            let id = InstanceId {
                gpu: state.id,
                compute: compute.id,
            };
            if library.sees_instance(card, id) {
                let gpu = GpuInstance {
                    device,
                    state: state.clone(),
                };
                let compute = compute.clone();
                devices.push(MigDevice { gpu, compute });
            }
        }
    }
    Ok(devices)
}

fn find_compute(
    library: &'static Library,
    card: CardIndex,
    id: InstanceId,
) -> NvmlResult<MigDevice> {
    let gpu = find_gpu(library, card, id.gpu)?;
    let computes = &gpu.state.compute_instances;
    let compute = computes.iter().find(|compute| compute.id == id.compute);
    let compute = compute.cloned().ok_or(NvmlError::InvalidArgument)?;
    Ok(MigDevice { gpu, compute })
}

pub(crate) fn handle(card: CardIndex) -> nvmlDevice_t {
    let index = usize::try_from(card.0).unwrap_or(usize::MAX);
    std::ptr::without_provenance_mut(CARDS.wrapping_add(index))
}

/// Resolves a handle of a GPU. Rejects MIG devices: most functions are for whole GPUs.
pub(crate) fn device(handle: nvmlDevice_t) -> NvmlResult<Device> {
    let library = library()?;
    let index = handle.addr().wrapping_sub(CARDS);
    let card = u32::try_from(index).map(CardIndex).ok();
    let card = card.filter(|card| library.visible().contains(card));
    let card = card.ok_or(NvmlError::InvalidArgument)?;
    Ok(Device { library, card })
}

impl Device {
    pub(crate) fn model(&self) -> NvmlResult<&'static CardModel> {
        self.library.model(self.card)
    }

    pub(crate) fn described(&self) -> NvmlResult<&'static CardDescription> {
        self.library.card(self.card)
    }

    pub(crate) fn state(&self) -> NvmlResult<CardState> {
        self.library.state(self.card)
    }

    /// Returns the state if the GPU reports this value.
    pub(crate) fn reporting(&self, value: ReportedValue) -> NvmlResult<CardState> {
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
            .position(|card| *card == self.card);
        position
            .and_then(|position| u32::try_from(position).ok())
            .ok_or(NvmlError::InvalidArgument)
    }
}
