//! Which devices a process has: cards whose nodes it sees, or one MIG device, as
//! `CUDA_VISIBLE_DEVICES` chooses.
//!
//! As on hardware, a process computes on at most one MIG device: whole cards come first, and
//! without any the first MIG device of the first card whose nodes the process sees.

use std::os::fd::OwnedFd;

use simulator_machine::client::Connection;
use simulator_machine::description::{CardDescription, CardModel, MachineDescription};
use simulator_machine::protocol::{
    CardIndex, ComputeInstanceState, ContextId, GpuInstanceState, InstanceId, MigReply, MigRequest,
    MigState, Reply, Request,
};
use simulator_machine::root::DriverRoot;

use crate::abi::Answer;
use crate::driver::Driver;
use crate::error::CudaError;

/// A device that this process may use.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) card: CardIndex,
    /// The card's memory.
    pub(crate) memory: OwnedFd,
    /// The part of the card that it is; none for all of it.
    pub(crate) instance: Option<Instance>,
}

/// A MIG device.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    pub(crate) id: InstanceId,
    /// `MIG-` and a UUID.
    pub(crate) uuid: String,
    /// The card's model with the figures of the instance.
    pub(crate) model: CardModel,
}

impl Instance {
    /// Makes a new context one of this instance; if that has no memory left, it is destroyed.
    pub(crate) fn enter(&self, driver: &Driver, card: CardIndex, context: ContextId) -> Answer {
        let instance = self.id;
        let request = MigRequest::Enter { context, instance };
        let entered = driver.request(&Request::Mig { card, request });
        if entered.is_err() {
            driver.request(&Request::DestroyContext { context })?;
        }
        entered.map(drop)
    }

    /// Free and total memory of the GPU instance.
    pub(crate) fn memory_info(&self, driver: &Driver, card: CardIndex) -> Answer<(u64, u64)> {
        let request = MigRequest::State;
        let reply = driver.request(&Request::Mig { card, request })?;
        let Reply::Mig(MigReply::State(state)) = reply else {
            return Err(CudaError::Unknown);
        };
        let mut gpus = state.gpu_instances.iter();
        let gpu = gpus.find(|gpu| gpu.id == self.id.gpu);
        let used = gpu.ok_or(CudaError::InvalidDevice)?.used_bytes;
        let total = self.model.memory.usable_bytes();
        Ok((total.saturating_sub(used), total))
    }
}

/// One card and what of it can be used.
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

/// The devices of this process, in CUDA's order.
pub(crate) fn devices(
    connection: &mut Connection,
    root: &DriverRoot,
    machine: &MachineDescription,
    memory: Vec<OwnedFd>,
) -> Vec<Device> {
    let cards = (0..).map(CardIndex).zip(memory).zip(&machine.cards);
    let seen = cards.filter(|((card, _), _)| root.sees(*card));
    let candidates = seen.map(|((card, memory), described)| Candidate {
        card,
        memory,
        uuid: described.uuid.clone(),
        parts: parts(connection, root, machine, card, described),
    });
    let candidates: Vec<Candidate> = candidates.collect();
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(list) => chosen(candidates, &list),
        Err(_) => by_default(candidates),
    }
}

fn parts(
    connection: &mut Connection,
    root: &DriverRoot,
    machine: &MachineDescription,
    card: CardIndex,
    described: &CardDescription,
) -> Parts {
    let model = machine.model(described);
    let request = Request::Mig {
        card,
        request: MigRequest::State,
    };
    // A card that cannot answer is there, and fails when it is used.
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
                && let Some(model) = part_of(model, gpu, compute)
            {
                let uuid = compute.uuid.clone();
                found.push(Instance { id, uuid, model });
            }
        }
    }
    found
}

/// The model of a card as a program in one of its instances sees it.
fn part_of(
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
    // Its memory slices are its own, and with them their part of the bandwidth.
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

fn by_default(candidates: Vec<Candidate>) -> Vec<Device> {
    let mut whole = Vec::new();
    let mut first_part = None;
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
            Some(_) => first_part = first_part.or(Some(device)),
        }
    }
    if whole.is_empty() {
        whole.extend(first_part);
    }
    whole
}

/// Ordinals and UUID prefixes, up to the first that names nothing. A MIG device is the only one.
fn chosen(candidates: Vec<Candidate>, list: &str) -> Vec<Device> {
    let mut names = list.split(',').map(str::trim);
    if let Some(name) = names.next().filter(|name| name.starts_with("MIG-")) {
        return part_named(candidates, name).into_iter().collect();
    }
    let uuids: Vec<(CardIndex, String)> = candidates
        .iter()
        .map(|candidate| (candidate.card, candidate.uuid.clone()))
        .collect();
    let mut left: Vec<Option<Device>> = by_default(candidates).into_iter().map(Some).collect();
    let mut chosen = Vec::new();
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
            Some(device) => chosen.push(device),
            None => break,
        }
    }
    chosen
}

fn part_named(candidates: Vec<Candidate>, name: &str) -> Option<Device> {
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
