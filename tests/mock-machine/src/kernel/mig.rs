//! Requests about the partitioning of cards, and what it means for their contexts.

use std::collections::BTreeMap;

use crate::protocol::{CardIndex, ClientKind, ContextId, MigReply, MigRequest, Refusal, Reply};

use super::ledger::round_up;
use super::{ClientId, Kernel};

mod partitions;

pub(super) use partitions::Partitions;

impl Kernel {
    /// Answers a request about a card's partitioning.
    pub(super) fn mig(
        &mut self,
        client: ClientId,
        index: CardIndex,
        request: MigRequest,
    ) -> Result<Reply, Refusal> {
        let used = self.bytes_by_context(index);
        let used_bytes = |context| used.get(&context).copied().unwrap_or(0);
        if let MigRequest::SetMode { enabled } = request {
            let others = self.is_open_elsewhere(client);
            let partitions = &mut self.card_mut(index)?.partitions;
            let activation = partitions.set_mode(enabled, !used.is_empty(), others)?;
            return Ok(Reply::Mig(MigReply::Switched(activation)));
        }
        if let MigRequest::Enter { context, .. } = request {
            self.own_context(client, context)?;
        }
        let partitions = &mut self.card_mut(index)?.partitions;
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
                gpu,
                profile,
                start,
            } => MigReply::Created(partitions.create_compute_instance(gpu, profile, start)?),
            MigRequest::RemainingComputeInstances { gpu, profile } => {
                MigReply::Capacity(partitions.remaining_compute_instances(gpu, profile)?)
            }
            MigRequest::DestroyGpuInstance { gpu } => {
                partitions.destroy_gpu_instance(gpu)?;
                return Ok(Reply::Done);
            }
            MigRequest::DestroyComputeInstance { instance } => {
                partitions.destroy_compute_instance(instance)?;
                return Ok(Reply::Done);
            }
            MigRequest::Enter { context, instance } => {
                partitions.enter(context, instance, used_bytes(context), used_bytes)?;
                return Ok(Reply::Done);
            }
        };
        Ok(Reply::Mig(reply))
    }

    /// Resets a card, as `nvidia-smi --gpu-reset` does: only when nobody computes on it.
    ///
    /// # Errors
    /// When there is no such card or somebody uses it.
    pub fn reset(&mut self, index: CardIndex) -> Result<(), Refusal> {
        if !self.bytes_by_context(index).is_empty() {
            return Err(Refusal::InUse);
        }
        self.card_mut(index)?.partitions.reset();
        Ok(())
    }

    /// Refuses memory that the GPU instance of a context does not have.
    pub(super) fn check_instance_memory(
        &self,
        index: CardIndex,
        context: ContextId,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let partitions = &self.card(index)?.partitions;
        let Some(instance) = partitions.instance_of(context) else {
            return Ok(());
        };
        let used = self.bytes_by_context(index);
        partitions.check_room(instance.gpu, round_up(bytes), |context| {
            used.get(&context).copied().unwrap_or(0)
        })
    }

    /// Whether a program other than the one behind a connection has NVML open.
    fn is_open_elsewhere(&self, client: ClientId) -> bool {
        let asking = self.clients.get(&client).map(|client| client.pid);
        self.clients
            .values()
            .any(|other| other.kind == Some(ClientKind::Nvml) && Some(other.pid) != asking)
    }

    /// Memory of each context of a card.
    pub(super) fn bytes_by_context(&self, index: CardIndex) -> BTreeMap<ContextId, u64> {
        let of_card = self.contexts.iter().filter(|(_, one)| one.card == index);
        of_card
            .map(|(id, context)| (*id, self.context_bytes(*id, context)))
            .collect()
    }
}
