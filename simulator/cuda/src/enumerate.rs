//! Devices of a process: the GPUs whose device nodes are visible, or one MIG device, filtered by
//! `CUDA_VISIBLE_DEVICES`.
//!
//! A client of an MPS server sees the GPUs of the server, with the multiprocessors that it
//! may use.
//!
//! As on hardware, a process uses at most one MIG device. Whole GPUs have precedence; otherwise the
//! process gets the first visible MIG device of the first such GPU.

use std::os::fd::OwnedFd;

use simulator_machine::client::Connection;
use simulator_machine::description::{GpuDescription, GpuModel, MachineDescription};
use simulator_machine::protocol::{
    ComputeInstanceState, GpuIndex, GpuInstanceState, InstanceId, MigReply, MigRequest, MigState,
    Reply, Request,
};
use simulator_machine::root::DriverRoot;

use crate::mps::MpsShare;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) gpu: GpuIndex,
    /// The GPU's memory file.
    pub(crate) memory: OwnedFd,
    /// The MIG device; `None` for a whole GPU.
    pub(crate) instance: Option<Instance>,
    /// The model with the limit of an MPS client.
    pub(crate) limited: Option<GpuModel>,
}

/// A MIG device.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) id: InstanceId,
    /// With the prefix `MIG-`.
    pub(crate) uuid: String,
    /// The GPU's model with the values of the instance.
    pub(crate) model: GpuModel,
}

/// A visible GPU and its usable parts.
struct Candidate {
    gpu: GpuIndex,
    memory: OwnedFd,
    uuid: String,
    parts: Parts,
}

enum Parts {
    Whole,
    Instances(Vec<Instance>),
}

/// Returns the devices of this process in CUDA order.
pub(crate) fn devices(
    connection: &mut Connection,
    root: &DriverRoot,
    machine: &MachineDescription,
    memory: Vec<OwnedFd>,
    mps: Option<&MpsShare>,
) -> Vec<Device> {
    let gpus = (0..).map(GpuIndex).zip(memory).zip(&machine.gpus);
    let is_served = |gpu: &GpuIndex| mps.is_none_or(|share| share.gpus.contains(gpu));
    let visible = gpus.filter(|((gpu, _), _)| root.sees(*gpu) && is_served(gpu));
    let candidates = visible.map(|((gpu, memory), description)| Candidate {
        gpu,
        memory,
        uuid: description.uuid.clone(),
        parts: parts(connection, root, machine, gpu, description),
    });
    let candidates: Vec<Candidate> = candidates.collect();
    let mut devices = match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => selected_devices(candidates, &list),
        Err(_) => default_devices(candidates),
    };
    if let Some(share) = mps {
        for device in &mut devices {
            device.limited = limited_model(machine, device, share);
        }
    }
    devices
}

/// The model of a device with the multiprocessors that an MPS client may use.
fn limited_model(
    machine: &MachineDescription,
    device: &Device,
    share: &MpsShare,
) -> Option<GpuModel> {
    let index = usize::try_from(device.gpu.0).ok()?;
    let mut model = machine.model(machine.gpus.get(index)?).clone();
    let all = model.compute.multiprocessors;
    model.compute.multiprocessors = share.percentage.multiprocessors(all);
    Some(model)
}

fn parts(
    connection: &mut Connection,
    root: &DriverRoot,
    machine: &MachineDescription,
    gpu: GpuIndex,
    description: &GpuDescription,
) -> Parts {
    let model = machine.model(description);
    let request = Request::Mig {
        gpu,
        request: MigRequest::State,
    };
    // A GPU that does not answer is listed and fails when used.
    let state = match model.mig.as_ref().map(|_| connection.request(&request)) {
        Some(Ok(Reply::Mig(MigReply::State(state)))) if state.enabled => state,
        _ => return Parts::Whole,
    };
    Parts::Instances(instances(model, root, gpu, &state))
}

fn instances(
    model: &GpuModel,
    root: &DriverRoot,
    gpu: GpuIndex,
    state: &MigState,
) -> Vec<Instance> {
    let mut found = Vec::new();
    for gpu_instance in &state.gpu_instances {
        for compute in &gpu_instance.compute_instances {
            let id = InstanceId {
                gpu_instance: gpu_instance.id,
                compute: compute.id,
            };
            if root.sees_instance(gpu, id)
                && let Some(model) = instance_model(model, gpu_instance, compute)
            {
                let uuid = compute.uuid.clone();
                found.push(Instance { id, uuid, model });
            }
        }
    }
    found
}

/// The GPU's model as a program in one of its instances sees it.
fn instance_model(
    gpu: &GpuModel,
    gpu_instance: &GpuInstanceState,
    compute: &ComputeInstanceState,
) -> Option<GpuModel> {
    let table = gpu.mig.as_ref()?;
    let profile = table.profile(gpu_instance.profile)?;
    let name = match compute.slices == profile.slices {
        true => profile.name.clone(),
        false => format!("{}c.{}", compute.slices, profile.name),
    };
    let mut model = gpu.clone();
    model.name = format!("{} MIG {name}", gpu.name);
    model.memory.total_bytes = profile.memory_bytes();
    model.memory.reserved_bytes = 0;
    // An instance has its own memory slices and their share of the bandwidth.
    let (own, all) = (profile.placements.size, table.memory_slices.max(1));
    model.memory.bytes_per_second = gpu.memory.bytes_per_second / u64::from(all) * u64::from(own);
    model.compute.cores = gpu.compute.cores / gpu.compute.multiprocessors * compute.multiprocessors;
    model.compute.multiprocessors = compute.multiprocessors;
    model.compute.copy_engines = profile.copy_engines;
    model.mig = None;
    model.nvlink = None;
    Some(model)
}

fn default_devices(candidates: Vec<Candidate>) -> Vec<Device> {
    let mut whole = Vec::new();
    let mut first_instance = None;
    for Candidate {
        gpu, memory, parts, ..
    } in candidates
    {
        let instance = match parts {
            Parts::Whole => None,
            Parts::Instances(instances) => match instances.into_iter().next() {
                Some(instance) => Some(instance),
                None => continue,
            },
        };
        let device = Device {
            gpu,
            memory,
            instance,
            limited: None,
        };
        match device.instance {
            None => whole.push(device),
            Some(_) => first_instance = first_instance.or(Some(device)),
        }
    }
    if whole.is_empty() {
        whole.extend(first_instance);
    }
    whole
}

/// Selects by ordinals and UUID prefixes, up to the first without a match. A MIG device is the only
/// one.
fn selected_devices(candidates: Vec<Candidate>, list: &str) -> Vec<Device> {
    let mut names = list.split(',').map(str::trim);
    if let Some(name) = names.next().filter(|name| name.starts_with("MIG-")) {
        return named_instance(candidates, name).into_iter().collect();
    }
    let uuids: Vec<(GpuIndex, String)> = candidates
        .iter()
        .map(|candidate| (candidate.gpu, candidate.uuid.clone()))
        .collect();
    let mut left: Vec<Option<Device>> = default_devices(candidates).into_iter().map(Some).collect();
    let mut selected = Vec::new();
    for name in list.split(',').map(str::trim) {
        let position = match name.parse::<usize>() {
            Ok(ordinal) => Some(ordinal),
            Err(_) if name.starts_with("GPU-") => left.iter().position(|device| {
                let gpu = device.as_ref().map(|device| device.gpu);
                let mut uuids = uuids.iter();
                uuids.any(|(other, uuid)| Some(*other) == gpu && uuid.starts_with(name))
            }),
            Err(_) => None,
        };
        match position.and_then(|position| left.get_mut(position)?.take()) {
            Some(device) => selected.push(device),
            None => break,
        }
    }
    selected
}

fn named_instance(candidates: Vec<Candidate>, name: &str) -> Option<Device> {
    candidates.into_iter().find_map(|candidate| {
        let Parts::Instances(instances) = candidate.parts else {
            return None;
        };
        let instance = instances
            .into_iter()
            .find(|instance| instance.uuid.starts_with(name))?;
        Some(Device {
            gpu: candidate.gpu,
            memory: candidate.memory,
            instance: Some(instance),
            limited: None,
        })
    })
}
