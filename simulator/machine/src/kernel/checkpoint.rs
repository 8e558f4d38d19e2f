//! Checkpoints: lock, checkpoint to host memory, restore, unlock.
//!
//! Bytes stay in the GPU memory files, whose ranges are never reused; only the ledger changes, and NVML shows that late.
//! A lock waits for queued work. A process whose restore failed has no way back, as on hardware.

use std::collections::BTreeMap;

use crate::protocol::{
    AllocationId, CheckpointAction, GpuIndex, ProcessPhase, ProcessState, Refusal, Reply,
};

use super::ledger::round_up;
use super::{Client, ClientId, Effect, Kernel, memory::Holder};

impl Kernel {
    /// Executes a checkpoint action on a process.
    pub(super) fn checkpoint(
        &mut self,
        pid: u32,
        action: CheckpointAction,
    ) -> Result<Reply, Refusal> {
        let has_context = |client: &ClientId| {
            let mut contexts = self.contexts.values();
            contexts.any(|context| context.client == *client)
        };
        let mut clients = self.clients.iter().filter(|(_, client)| client.pid == pid);
        let found = clients.find(|(id, _)| has_context(id));
        let (&id, client) = found.ok_or(Refusal::NotFound)?;
        let phase = match (client.phase, action) {
            (ProcessPhase::Failed, CheckpointAction::Look)
                if !self.description.checkpoints.shows_failure =>
            {
                return Ok(Reply::Phase(ProcessPhase::Checkpointed));
            }
            (phase, CheckpointAction::Look) => return Ok(Reply::Phase(phase)),
            (_, CheckpointAction::Lock) if client.membership.is_some() => {
                return Err(Refusal::NotSupported);
            }
            (ProcessPhase::Running, CheckpointAction::Lock) if self.has_work(id) => {
                self.effects.push(Effect::Lock {
                    client: id,
                    locked: true,
                });
                return Err(Refusal::InUse);
            }
            (ProcessPhase::Running, CheckpointAction::Lock) => ProcessPhase::Locked,
            (ProcessPhase::Running, CheckpointAction::EndLock) => ProcessPhase::Running,
            (ProcessPhase::Locked, CheckpointAction::Unlock) => ProcessPhase::Running,
            (ProcessPhase::Locked, CheckpointAction::Checkpoint) => {
                self.checkpoint_memory(id)?;
                ProcessPhase::Checkpointed
            }
            (ProcessPhase::Checkpointed, CheckpointAction::Restore) => {
                let restored = self.restore_memory(id);
                if restored.is_err()
                    && let Some(client) = self.clients.get_mut(&id)
                {
                    client.phase = ProcessPhase::Failed;
                }
                restored?;
                ProcessPhase::Locked
            }
            (ProcessPhase::Failed, CheckpointAction::Restore) => return Err(Refusal::Failed),
            _ => return Err(Refusal::Invalid),
        };
        if let Some(client) = self.clients.get_mut(&id) {
            client.phase = phase;
        }
        let locked = phase != ProcessPhase::Running;
        self.effects.push(Effect::Lock { client: id, locked });
        Ok(Reply::Phase(phase))
    }

    /// Returns whether a process is checkpointed, for good or not.
    pub(super) fn is_checkpointed(&self, client: ClientId) -> bool {
        let client = self.clients.get(&client);
        client.is_some_and(|client| {
            matches!(
                client.phase,
                ProcessPhase::Checkpointed | ProcessPhase::Failed
            )
        })
    }

    /// Returns whether a process has work on a GPU.
    pub(super) fn has_work(&self, client: ClientId) -> bool {
        let contexts = self.contexts.iter();
        let mut own = contexts.filter(|(_, context)| context.client == client);
        own.any(|(id, context)| {
            let gpu = self.gpu(context.gpu);
            gpu.is_ok_and(|gpu| !gpu.engine.is_idle(*id))
        })
    }

    /// Memory that only this process holds, by GPU.
    fn own_memory(
        &self,
        client: ClientId,
    ) -> Result<Vec<(GpuIndex, u64, Option<AllocationId>)>, Refusal> {
        let is_own = |holder: &Holder| match holder {
            Holder::Context(context) => {
                let context = self.contexts.get(context);
                context.is_some_and(|context| context.client == client)
            }
            Holder::Client(holder) => *holder == client,
            Holder::Export(_) => false,
        };
        let mut found = Vec::new();
        let contexts = self.contexts.iter();
        for (id, context) in contexts.filter(|(_, context)| context.client == client) {
            let gpu = self.gpu(context.gpu)?;
            // MIG instances cannot be checkpointed.
            if gpu.partitions.instance_of(*id).is_some() {
                return Err(Refusal::NotSupported);
            }
            let bytes = gpu.model.memory.context_bytes;
            found.push((context.gpu, bytes, None));
        }
        for (id, allocation) in &self.allocations {
            if !allocation.holders.keys().any(is_own) {
                continue;
            }
            // Memory with other holders cannot be checkpointed.
            if !allocation.holders.keys().all(is_own) {
                return Err(Refusal::NotSupported);
            }
            found.push((allocation.gpu, allocation.bytes, Some(*id)));
        }
        Ok(found)
    }

    fn checkpoint_memory(&mut self, client: ClientId) -> Result<(), Refusal> {
        let owner = self.clients.get(&client).ok_or(Refusal::NotFound)?;
        if owner.uses_managed {
            return Err(Refusal::NotSupported);
        }
        let mut freed: BTreeMap<GpuIndex, u64> = BTreeMap::new();
        for (gpu, bytes, allocation) in self.own_memory(client)? {
            self.gpu_mut(gpu)?.ledger.free(bytes);
            self.set_checkpointed(allocation, true);
            *freed.entry(gpu).or_default() += round_up(bytes);
        }
        let delay = self.description.checkpoints.nvml_delay_milliseconds;
        let until = self.now.saturating_add(delay.saturating_mul(1_000_000));
        if let Some(client) = self.clients.get_mut(&client) {
            client.vanishing = (freed, until);
        }
        Ok(())
    }

    /// Checkpointed processes that NVML still shows.
    pub(super) fn vanishing(&self, gpu: GpuIndex) -> Vec<ProcessState> {
        let clients = self.clients.values();
        let shown = clients.filter(|client| client.vanishing.1 > self.now);
        let state = |client: &Client| {
            Some(ProcessState {
                pid: client.pid,
                used_bytes: *client.vanishing.0.get(&gpu)?,
                instance: None,
                is_mps_client: false,
            })
        };
        shown.filter_map(state).collect()
    }

    /// Restores all memory or none.
    fn restore_memory(&mut self, client: ClientId) -> Result<(), Refusal> {
        let memory = self.own_memory(client)?;
        let mut restored: BTreeMap<GpuIndex, u64> = BTreeMap::new();
        for (gpu, bytes, _) in &memory {
            *restored.entry(*gpu).or_default() += round_up(*bytes);
        }
        for (gpu, bytes) in restored {
            self.check_cgroup_memory(gpu, client, bytes)?;
        }
        for (position, (gpu, bytes, _)) in memory.iter().enumerate() {
            if let Err(refusal) = self.gpu_mut(*gpu)?.ledger.take(*bytes) {
                for (gpu, bytes, _) in memory.iter().take(position) {
                    self.gpu_mut(*gpu)?.ledger.free(*bytes);
                }
                return Err(refusal);
            }
        }
        for (_, _, allocation) in memory {
            self.set_checkpointed(allocation, false);
        }
        if let Some(client) = self.clients.get_mut(&client) {
            client.vanishing = Default::default();
        }
        Ok(())
    }

    fn set_checkpointed(&mut self, allocation: Option<AllocationId>, is_checkpointed: bool) {
        let allocation = allocation.and_then(|id| self.allocations.get_mut(&id));
        if let Some(allocation) = allocation {
            allocation.is_checkpointed = is_checkpointed;
        }
    }
}
