//! MIG requests and their effect on contexts.

use std::collections::BTreeMap;

use crate::protocol::{
    ClientKind, ContextId, GpuIndex, InstanceId, MigReply, MigRequest, MigState, Refusal, Reply,
};

use super::ledger::round_up;
use super::{ClientId, Kernel};

/// An administrator's program, which has no connection.
const ADMINISTRATOR: ClientId = ClientId(u64::MAX);

mod partitions;

pub(super) use partitions::Partitions;

impl Kernel {
    /// Handles a MIG request.
    pub(super) fn mig(
        &mut self,
        client: ClientId,
        index: GpuIndex,
        request: MigRequest,
    ) -> Result<Reply, Refusal> {
        let used = self.bytes_by_context(index);
        let used_bytes = |context| used.get(&context).copied().unwrap_or(0);
        if let MigRequest::SetMode { enabled } = request {
            let others = self.is_open_elsewhere(client);
            let in_use = self.is_in_use(index);
            let partitions = &mut self.gpu_mut(index)?.partitions;
            let activation = partitions.set_mode(enabled, in_use, others)?;
            return Ok(Reply::Mig(MigReply::Switched(activation)));
        }
        if let MigRequest::Enter { context, .. } = request {
            self.own_context(client, context)?;
        }
        let gpu = self.gpu_mut(index)?;
        let partitions = &mut gpu.partitions;
        let reply = match request {
            MigRequest::State => MigReply::State(partitions.state(used_bytes)),
            MigRequest::SetMode { .. } => return Err(Refusal::Invalid),
            MigRequest::CreateGpuInstance { profile, start } => {
                MigReply::Created(partitions.create_gpu_instance(profile, start)?)
            }
            MigRequest::RemainingGpuInstances { profile } => {
                MigReply::Capacity(partitions.remaining_gpu_instances(profile)?)
            }
            MigRequest::CreateComputeInstance {
                gpu_instance,
                profile,
                start,
            } => MigReply::Created(partitions.create_compute_instance(
                gpu_instance,
                profile,
                start,
            )?),
            MigRequest::RemainingComputeInstances {
                gpu_instance,
                profile,
            } => MigReply::Capacity(partitions.remaining_compute_instances(gpu_instance, profile)?),
            MigRequest::DestroyGpuInstance { gpu_instance } => {
                partitions.destroy_gpu_instance(gpu_instance)?;
                return Ok(Reply::Done);
            }
            MigRequest::DestroyComputeInstance { instance } => {
                partitions.destroy_compute_instance(instance)?;
                return Ok(Reply::Done);
            }
            MigRequest::Enter { context, instance } => {
                partitions.enter(context, instance, used_bytes(context), used_bytes)?;
                let multiprocessors = partitions.multiprocessors(instance)?;
                gpu.engine.enter(context, instance, multiprocessors);
                return Ok(Reply::Done);
            }
        };
        Ok(Reply::Mig(reply))
    }

    /// Changes the MIG mode or the instances of a GPU, like `nvidia-smi mig`.
    ///
    /// # Errors
    /// If the request is rejected.
    pub fn administer(&mut self, index: GpuIndex, request: MigRequest) -> Result<(), Refusal> {
        self.mig(ADMINISTRATOR, index, request).map(drop)
    }

    /// MIG state of a GPU.
    #[must_use]
    pub fn mig_state(&self, index: GpuIndex) -> Option<MigState> {
        let used = self.bytes_by_context(index);
        let used_bytes = |context| used.get(&context).copied().unwrap_or(0);
        Some(self.gpu(index).ok()?.partitions.state(used_bytes))
    }

    /// Resets a GPU, like `nvidia-smi --gpu-reset`.
    ///
    /// # Errors
    /// If the GPU does not exist or is in use.
    pub fn reset(&mut self, index: GpuIndex) -> Result<(), Refusal> {
        if self.is_in_use(index) {
            return Err(Refusal::InUse);
        }
        let gpu = self.gpu_mut(index)?;
        gpu.partitions.reset();
        gpu.reset_energy();
        gpu.faults.recovery_action = 0;
        gpu.faults.repair_pending = false;
        Ok(())
    }

    /// Errors if the GPU instance of a context has too little memory.
    pub(super) fn check_instance_memory(
        &self,
        index: GpuIndex,
        context: ContextId,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let partitions = &self.gpu(index)?.partitions;
        let Some(instance) = partitions.instance_of(context) else {
            return Ok(());
        };
        let used = self.bytes_by_context(index);
        partitions.require_free_memory(instance.gpu_instance, round_up(bytes), |context| {
            used.get(&context).copied().unwrap_or(0)
        })
    }

    /// Returns whether another program has NVML open.
    fn is_open_elsewhere(&self, client: ClientId) -> bool {
        let asking = self.clients.get(&client).map(|client| client.pid);
        self.clients
            .values()
            .any(|other| other.kind == Some(ClientKind::Nvml) && Some(other.pid) != asking)
    }

    /// Returns whether a GPU has contexts or allocations.
    fn is_in_use(&self, index: GpuIndex) -> bool {
        self.contexts.values().any(|context| context.gpu == index)
            || !self.bytes_by_client(index).is_empty()
    }

    /// Memory by context. Memory charged to a process counts for its first context: in MIG mode all
    /// contexts of a process are in one instance.
    pub(super) fn bytes_by_context(&self, index: GpuIndex) -> BTreeMap<ContextId, u64> {
        let of_gpu = self.contexts.iter().filter(|(_, one)| one.gpu == index);
        let mut bytes: BTreeMap<ContextId, u64> = of_gpu
            .map(|(id, context)| (*id, self.context_bytes(*id, context)))
            .collect();
        for (client, on_account) in self.bytes_by_client(index) {
            if let Some(first) = self.first_context(client, index) {
                *bytes.entry(first).or_default() += on_account;
            }
        }
        bytes
    }

    /// The context that represents a process on a GPU.
    fn first_context(&self, client: ClientId, index: GpuIndex) -> Option<ContextId> {
        let mut contexts = self.contexts.iter();
        let first = contexts.find(|(_, one)| one.client == client && one.gpu == index);
        first.map(|(id, _)| *id)
    }

    /// The instance of a process on a GPU in MIG mode.
    pub(super) fn instance_of_client(
        &self,
        client: ClientId,
        index: GpuIndex,
    ) -> Option<InstanceId> {
        let context = self.first_context(client, index)?;
        self.gpu(index).ok()?.partitions.instance_of(context)
    }
}
