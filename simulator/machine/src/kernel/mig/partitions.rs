//! MIG of one GPU: mode and instances. Pure.
//!
//! GPU instances occupy disjoint ranges of the memory slice axis, at the placements of the machine
//! file; compute instances occupy compute slices of their GPU instance. Ids are those of the
//! driver: a GPU instance is numbered by size and start, like the node of a binary tree.
//!
//! Invariant: while a context runs in an instance, neither that instance nor its GPU instance can
//! be destroyed, nor MIG mode be changed.

use std::collections::{BTreeMap, BTreeSet};

use crate::description::{
    ComputeInstanceProfile, GpuDescription, GpuInstanceProfile, Mig, MigSwitch,
};
use crate::protocol::{
    ComputeInstanceState, ContextId, GpuInstanceState, InstanceId, MigActivation, MigState, Refusal,
};

/// MIG state of one GPU.
#[derive(Clone, Debug)]
pub(in crate::kernel) struct Partitions {
    /// The model's table; `None` without MIG.
    table: Option<Mig>,
    gpu_uuid: String,
    enabled: bool,
    pending: bool,
    gpu_instances: BTreeMap<u32, GpuInstance>,
    contexts: BTreeMap<ContextId, InstanceId>,
}

#[derive(Clone, Debug)]
struct GpuInstance {
    profile: GpuInstanceProfile,
    start: u32,
    compute_instances: BTreeMap<u32, ComputeInstance>,
}

#[derive(Clone, Debug)]
struct ComputeInstance {
    profile: ComputeInstanceProfile,
    start: u32,
    index: u32,
}

impl GpuInstance {
    /// Start slices at which a compute instance of a size fits.
    fn free_compute_starts(&self, slices: u32) -> Vec<u32> {
        let taken = self.compute_instances.values();
        let taken: Vec<_> = taken.map(|one| (one.start, one.profile.slices)).collect();
        let free = |start: &u32| !taken.iter().any(|other| overlap((*start, slices), *other));
        self.profile
            .compute_starts(slices)
            .into_iter()
            .filter(free)
            .collect()
    }
}

fn overlap((start, size): (u32, u32), (other, other_size): (u32, u32)) -> bool {
    start < other + other_size && other < start + size
}

impl Partitions {
    pub(in crate::kernel) fn new(table: Option<Mig>, gpu: &GpuDescription) -> Self {
        Self {
            table,
            gpu_uuid: gpu.uuid.clone(),
            enabled: gpu.mig_enabled,
            pending: gpu.mig_enabled,
            gpu_instances: BTreeMap::new(),
            contexts: BTreeMap::new(),
        }
    }

    pub(in crate::kernel) fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Returns the state; `used_bytes` maps contexts to their memory.
    pub(in crate::kernel) fn state(&self, used_bytes: impl Fn(ContextId) -> u64) -> MigState {
        let gpu_instances = self.gpu_instances.iter().map(|(&id, gpu_instance)| {
            let inside = self.contexts.iter().filter(|(_, at)| at.gpu_instance == id);
            GpuInstanceState {
                id,
                profile: gpu_instance.profile.id,
                start: gpu_instance.start,
                used_bytes: inside.map(|(context, _)| used_bytes(*context)).sum(),
                compute_instances: self.compute_states(id, gpu_instance),
            }
        });
        MigState {
            enabled: self.enabled,
            pending: self.pending,
            gpu_instances: gpu_instances.collect(),
        }
    }

    fn compute_states(
        &self,
        gpu_instance: u32,
        instance: &GpuInstance,
    ) -> Vec<ComputeInstanceState> {
        let states = instance.compute_instances.iter().map(|(&compute, one)| {
            let id = InstanceId {
                gpu_instance,
                compute,
            };
            ComputeInstanceState {
                id: compute,
                profile: one.profile.id,
                start: one.start,
                slices: one.profile.slices,
                multiprocessors: one.profile.multiprocessors,
                uuid: device_uuid(&self.gpu_uuid, id),
                index: one.index,
            }
        });
        states.collect()
    }

    /// Switches MIG mode, or makes the change pending: while contexts exist, and on GPUs that need
    /// a reset also while other programs have NVML open.
    pub(in crate::kernel) fn set_mode(
        &mut self,
        enabled: bool,
        in_use: bool,
        others: bool,
    ) -> Result<MigActivation, Refusal> {
        let table = self.table.as_ref().ok_or(Refusal::NotSupported)?;
        let waits = match table.switch {
            MigSwitch::Live => in_use,
            MigSwitch::Reset => in_use || others,
        };
        if enabled == self.enabled {
            self.pending = enabled;
            return Ok(MigActivation::Active);
        }
        if !enabled && !self.gpu_instances.is_empty() {
            return Err(Refusal::InUse);
        }
        self.pending = enabled;
        if waits {
            return Ok(MigActivation::InUse);
        }
        self.enabled = enabled;
        Ok(MigActivation::Active)
    }

    /// Resets the GPU: instances are destroyed, the pending mode takes effect.
    pub(in crate::kernel) fn reset(&mut self) {
        self.gpu_instances.clear();
        self.contexts.clear();
        self.enabled = self.pending;
    }

    fn profile(&self, id: u32) -> Result<&GpuInstanceProfile, Refusal> {
        let table = self.table.as_ref().ok_or(Refusal::NotSupported)?;
        if !self.enabled {
            return Err(Refusal::NotSupported);
        }
        table.profile(id).ok_or(Refusal::NotSupported)
    }

    fn axis(&self) -> u32 {
        self.table.as_ref().map_or(0, |table| table.memory_slices)
    }

    /// Returns a compute profile of a GPU instance.
    fn compute_profile(
        &self,
        gpu_instance: &GpuInstance,
        id: u32,
    ) -> Result<ComputeInstanceProfile, Refusal> {
        let table = self.table.as_ref().ok_or(Refusal::NotSupported)?;
        let profile = table.compute_profile(&gpu_instance.profile, id);
        profile.ok_or(Refusal::NotSupported)
    }

    fn gpu_instance(&self, id: u32) -> Result<&GpuInstance, Refusal> {
        self.gpu_instances.get(&id).ok_or(Refusal::NotFound)
    }

    /// Start slices at which a GPU instance fits: free memory slices, compute slices and media
    /// engines, below the profile's maximum number.
    fn free_starts(&self, profile: &GpuInstanceProfile) -> Vec<u32> {
        let existing = || self.gpu_instances.values();
        let of_profile = existing().filter(|gpu_instance| gpu_instance.profile.id == profile.id);
        if of_profile.count() >= usize::try_from(profile.instances).unwrap_or(usize::MAX)
            || self.engines_exhausted(profile)
        {
            return Vec::new();
        }
        let size = profile.placements.size;
        let free = |start: &u32| {
            !existing().any(|gpu_instance| {
                let other = (gpu_instance.start, gpu_instance.profile.placements.size);
                overlap((*start, size), other)
            })
        };
        profile
            .placements
            .starts
            .iter()
            .copied()
            .filter(free)
            .collect()
    }

    /// Returns whether compute slices or media engines are exhausted. The GPU has as many as its
    /// largest profile.
    fn engines_exhausted(&self, profile: &GpuInstanceProfile) -> bool {
        let profiles = self.table.iter().flat_map(|table| &table.profiles);
        let largest = profiles.max_by_key(|profile| (profile.slices, profile.ofa_engines));
        let Some(gpu) = largest else { return true };
        let resources: [fn(&GpuInstanceProfile) -> u32; 5] = [
            |profile| profile.slices,
            |profile| profile.decoders,
            |profile| profile.encoders,
            |profile| profile.jpeg_engines,
            |profile| profile.ofa_engines,
        ];
        resources.iter().any(|resource| {
            let taken: u32 = self
                .gpu_instances
                .values()
                .map(|gpu_instance| resource(&gpu_instance.profile))
                .sum();
            taken + resource(profile) > resource(gpu)
        })
    }

    /// How many more instances of a profile can be created one after another.
    pub(in crate::kernel) fn remaining_gpu_instances(&self, id: u32) -> Result<u32, Refusal> {
        let profile = self.profile(id)?;
        let mut starts = self.free_starts(profile);
        starts.sort_unstable();
        let mut end = 0;
        let mut fitting = 0;
        for start in starts {
            if start >= end {
                fitting += 1;
                end = start + profile.placements.size;
            }
        }
        let same = self.gpu_instances.values();
        let same = same
            .filter(|gpu_instance| gpu_instance.profile.id == id)
            .count();
        let left = profile
            .instances
            .saturating_sub(u32::try_from(same).unwrap_or(u32::MAX));
        Ok(left
            .min(fitting)
            .min(self.left_by_slices(profile.slices.max(1))))
    }

    fn left_by_slices(&self, slices: u32) -> u32 {
        let profiles = self.table.iter().flat_map(|table| &table.profiles);
        let all = profiles.map(|profile| profile.slices).max().unwrap_or(0);
        let taken: u32 = self
            .gpu_instances
            .values()
            .map(|gpu_instance| gpu_instance.profile.slices)
            .sum();
        all.saturating_sub(taken) / slices
    }

    pub(in crate::kernel) fn create_gpu_instance(
        &mut self,
        id: u32,
        wanted: Option<u32>,
    ) -> Result<u32, Refusal> {
        let profile = self.profile(id)?.clone();
        if wanted.is_some_and(|start| !profile.placements.starts.contains(&start)) {
            return Err(Refusal::Invalid);
        }
        let free = self.free_starts(&profile);
        let start = match wanted {
            Some(start) => free.contains(&start).then_some(start),
            // The driver keeps large placements at low starts free.
            None if profile.slices == 1 || profile.slices == 3 => free.iter().max().copied(),
            None => free.iter().min().copied(),
        };
        let start = start.ok_or(Refusal::InsufficientResources)?;
        let id = gpu_instance_id(self.axis(), profile.placements.size, start);
        let instance = GpuInstance {
            profile,
            start,
            compute_instances: BTreeMap::new(),
        };
        self.gpu_instances.insert(id, instance);
        Ok(id)
    }

    pub(in crate::kernel) fn destroy_gpu_instance(&mut self, id: u32) -> Result<(), Refusal> {
        if !self.gpu_instance(id)?.compute_instances.is_empty() {
            return Err(Refusal::InUse);
        }
        self.gpu_instances.remove(&id);
        Ok(())
    }

    pub(in crate::kernel) fn remaining_compute_instances(
        &self,
        gpu_instance: u32,
        profile: u32,
    ) -> Result<u32, Refusal> {
        let gpu_instance = self.gpu_instance(gpu_instance)?;
        let slices = self.compute_profile(gpu_instance, profile)?.slices;
        let free = gpu_instance.free_compute_starts(slices);
        u32::try_from(free.len()).map_err(|_| Refusal::Invalid)
    }

    pub(in crate::kernel) fn create_compute_instance(
        &mut self,
        gpu_instance: u32,
        profile: u32,
        wanted: Option<u32>,
    ) -> Result<u32, Refusal> {
        let index = self.free_index();
        let profile = self.compute_profile(self.gpu_instance(gpu_instance)?, profile)?;
        let gpu_instance = self
            .gpu_instances
            .get_mut(&gpu_instance)
            .ok_or(Refusal::NotFound)?;
        let possible = gpu_instance.profile.compute_starts(profile.slices);
        if wanted.is_some_and(|start| !possible.contains(&start)) {
            return Err(Refusal::Invalid);
        }
        let free = gpu_instance.free_compute_starts(profile.slices);
        let start = match wanted {
            Some(start) => free.contains(&start).then_some(start),
            None => free.first().copied(),
        };
        let start = start.ok_or(Refusal::InsufficientResources)?;
        let used = &gpu_instance.compute_instances;
        let id = (0..).find(|id| !used.contains_key(id));
        let id = id.ok_or(Refusal::InsufficientResources)?;
        let instance = ComputeInstance {
            profile,
            start,
            index,
        };
        gpu_instance.compute_instances.insert(id, instance);
        Ok(id)
    }

    /// The lowest unused MIG device index.
    fn free_index(&self) -> u32 {
        let gpus = self.gpu_instances.values();
        let devices = gpus.flat_map(|gpu_instance| gpu_instance.compute_instances.values());
        let taken: BTreeSet<u32> = devices.map(|device| device.index).collect();
        (0..).find(|index| !taken.contains(index)).unwrap_or(0)
    }

    pub(in crate::kernel) fn destroy_compute_instance(
        &mut self,
        instance: InstanceId,
    ) -> Result<(), Refusal> {
        self.check(instance)?;
        if self.contexts.values().any(|at| *at == instance) {
            return Err(Refusal::InUse);
        }
        if let Some(gpu_instance) = self.gpu_instances.get_mut(&instance.gpu_instance) {
            gpu_instance.compute_instances.remove(&instance.compute);
        }
        Ok(())
    }

    fn check(&self, instance: InstanceId) -> Result<&GpuInstance, Refusal> {
        let gpu_instance = self.gpu_instance(instance.gpu_instance)?;
        let compute = gpu_instance
            .compute_instances
            .contains_key(&instance.compute);
        compute.then_some(gpu_instance).ok_or(Refusal::NotFound)
    }

    /// Moves a context into an instance if its memory fits.
    pub(in crate::kernel) fn enter(
        &mut self,
        context: ContextId,
        instance: InstanceId,
        bytes: u64,
        used_bytes: impl Fn(ContextId) -> u64,
    ) -> Result<(), Refusal> {
        self.check(instance)?;
        if self.contexts.contains_key(&context) {
            return Err(Refusal::Invalid);
        }
        self.require_free_memory(instance.gpu_instance, bytes, used_bytes)?;
        self.contexts.insert(context, instance);
        Ok(())
    }

    /// Multiprocessors of a GPU instance.
    pub(in crate::kernel) fn multiprocessors_of(&self, gpu_instance: u32) -> Result<u32, Refusal> {
        Ok(self.gpu_instance(gpu_instance)?.profile.multiprocessors)
    }

    /// Multiprocessors of a compute instance.
    pub(in crate::kernel) fn multiprocessors(&self, instance: InstanceId) -> Result<u32, Refusal> {
        let gpu_instance = self.check(instance)?;
        let compute = gpu_instance.compute_instances.get(&instance.compute);
        let compute = compute.ok_or(Refusal::NotFound)?;
        Ok(compute.profile.multiprocessors)
    }

    /// Errors if a GPU instance has too little free memory.
    pub(in crate::kernel) fn require_free_memory(
        &self,
        gpu_instance: u32,
        bytes: u64,
        used_bytes: impl Fn(ContextId) -> u64,
    ) -> Result<(), Refusal> {
        let total = self.gpu_instance(gpu_instance)?.profile.memory_bytes();
        let inside = self
            .contexts
            .iter()
            .filter(|(_, at)| at.gpu_instance == gpu_instance);
        let used: u64 = inside.map(|(context, _)| used_bytes(*context)).sum();
        match used.checked_add(bytes) {
            Some(sum) if sum <= total => Ok(()),
            _ => Err(Refusal::OutOfMemory),
        }
    }

    /// Removes a context.
    pub(in crate::kernel) fn leave(&mut self, context: ContextId) {
        self.contexts.remove(&context);
    }

    /// The instance of a context.
    pub(in crate::kernel) fn instance_of(&self, context: ContextId) -> Option<InstanceId> {
        self.contexts.get(&context).copied()
    }
}

/// The driver's id of a placement: whole GPU 0, halves from 1, quarters from 3, eighths from 7.
fn gpu_instance_id(axis: u32, size: u32, start: u32) -> u32 {
    let size = size.max(1);
    (axis / size).saturating_sub(1) + start / size
}

/// UUID of a MIG device, stable for an instance of a GPU.
fn device_uuid(gpu: &str, instance: InstanceId) -> String {
    let text = format!("{gpu}/{}/{}", instance.gpu_instance, instance.compute);
    // FNV-1a from two offsets.
    let hash = |offset: u64| {
        text.bytes().fold(offset, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    let (high, low) = (hash(0xcbf2_9ce4_8422_2325), hash(0x6c62_272e_07bb_0142));
    format!(
        "MIG-{:08x}-{:04x}-5{:03x}-{:04x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xfff,
        0x8000 | ((low >> 48) & 0x3fff),
        low & 0xffff_ffff_ffff
    )
}

#[cfg(test)]
mod tests;
