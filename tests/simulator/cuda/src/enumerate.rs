//! Devices of a process: the GPUs whose device nodes are visible, or one MIG device, filtered by
//! `CUDA_VISIBLE_DEVICES`.
//!
//! As on hardware, a process uses at most one MIG device. Whole GPUs have precedence; otherwise the
//! process gets the first visible MIG device of the first such GPU.

use std::os::fd::OwnedFd;

use simulator_machine::client::Connection;
use simulator_machine::description::{CardDescription, CardModel, MachineDescription};
use simulator_machine::protocol::{
    CardIndex, ComputeInstanceState, GpuInstanceState, InstanceId, MigReply, MigRequest, MigState,
    Reply, Request,
};
use simulator_machine::root::DriverRoot;

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) card: CardIndex,
    /// The GPU's memory file.
    pub(crate) memory: OwnedFd,
    /// The MIG device; `None` for a whole GPU.
    pub(crate) instance: Option<Instance>,
}

/// A MIG device.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) id: InstanceId,
    /// With the prefix `MIG-`.
    pub(crate) uuid: String,
    /// The GPU's model with the values of the instance.
    pub(crate) model: CardModel,
}

/// A visible GPU and its usable parts.
struct Candidate {
    card: CardIndex,
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
) -> Vec<Device> {
    let cards = (0..).map(CardIndex).zip(memory).zip(&machine.cards);
    let visible = cards.filter(|((card, _), _)| root.sees(*card));
    let candidates = visible.map(|((card, memory), description)| Candidate {
        card,
        memory,
        uuid: description.uuid.clone(),
        parts: parts(connection, root, machine, card, description),
    });
    let candidates: Vec<Candidate> = candidates.collect();
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => selected_devices(candidates, &list),
        Err(_) => default_devices(candidates),
    }
}

fn parts(
    connection: &mut Connection,
    root: &DriverRoot,
    machine: &MachineDescription,
    card: CardIndex,
    description: &CardDescription,
) -> Parts {
    let model = machine.model(description);
    let request = Request::Mig {
        card,
        request: MigRequest::State,
    };
    // A GPU that does not answer is listed and fails when used.
    let state = match model.mig.as_ref().map(|_| connection.request(&request)) {
        Some(Ok(Reply::Mig(MigReply::State(state)))) if state.enabled => state,
        _ => return Parts::Whole,
    };
    Parts::Instances(instances(model, root, card, &state))
}

fn instances(
    model: &CardModel,
    root: &DriverRoot,
    card: CardIndex,
    state: &MigState,
) -> Vec<Instance> {
    let mut found = Vec::new();
    for gpu in &state.gpu_instances {
        for compute in &gpu.compute_instances {
            let id = InstanceId {
                gpu: gpu.id,
                compute: compute.id,
            };
            if root.sees_instance(card, id)
                && let Some(model) = instance_model(model, gpu, compute)
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
    card: &CardModel,
    gpu: &GpuInstanceState,
    compute: &ComputeInstanceState,
) -> Option<CardModel> {
    let table = card.mig.as_ref()?;
    let profile = table.profile(gpu.profile)?;
    let name = match compute.slices == profile.slices {
        true => profile.name.clone(),
        false => format!("{}c.{}", compute.slices, profile.name),
    };
    let mut model = card.clone();
    model.name = format!("{} MIG {name}", card.name);
    model.memory.total_bytes = profile.memory_bytes();
    model.memory.reserved_bytes = 0;
    // An instance has its own memory slices and their share of the bandwidth.
    let (own, all) = (profile.placements.size, table.memory_slices.max(1));
    model.memory.bytes_per_second = card.memory.bytes_per_second / u64::from(all) * u64::from(own);
    model.compute.cores =
        card.compute.cores / card.compute.multiprocessors * compute.multiprocessors;
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
        card,
        memory,
        parts,
        ..
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
            card,
            memory,
            instance,
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
    let uuids: Vec<(CardIndex, String)> = candidates
        .iter()
        .map(|candidate| (candidate.card, candidate.uuid.clone()))
        .collect();
    let mut left: Vec<Option<Device>> = default_devices(candidates).into_iter().map(Some).collect();
    let mut selected = Vec::new();
    for name in list.split(',').map(str::trim) {
        let position = match name.parse::<usize>() {
            Ok(ordinal) => Some(ordinal),
            Err(_) if name.starts_with("GPU-") => left.iter().position(|device| {
                let card = device.as_ref().map(|device| device.card);
                let mut uuids = uuids.iter();
                uuids.any(|(other, uuid)| Some(*other) == card && uuid.starts_with(name))
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
            card: candidate.card,
            memory: candidate.memory,
            instance: Some(instance),
        })
    })
}
