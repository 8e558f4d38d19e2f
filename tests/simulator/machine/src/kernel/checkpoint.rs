//! Checkpoints: a process is locked, its memory taken to the host, brought back, and it goes on.
//!
//! Bytes stay where they are in the cards' memory files, which are never used twice; what changes
//! is that the ledger does not count them. Queued work is still done.

use crate::protocol::{AllocationId, CardIndex, CheckpointAction, ProcessPhase, Refusal, Reply};

use super::{ClientId, Effect, Kernel, memory::Holder};

impl Kernel {
    /// Takes a process off its cards, or brings it back.
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
            (phase, CheckpointAction::Look) => return Ok(Reply::Phase(phase)),
            (ProcessPhase::Running, CheckpointAction::Lock) => ProcessPhase::Locked,
            (ProcessPhase::Locked, CheckpointAction::Unlock) => ProcessPhase::Running,
            (ProcessPhase::Locked, CheckpointAction::Checkpoint) => {
                self.take_away(id)?;
                ProcessPhase::Checkpointed
            }
            (ProcessPhase::Checkpointed, CheckpointAction::Restore) => {
                self.bring_back(id)?;
                ProcessPhase::Locked
            }
            _ => return Err(Refusal::Invalid),
        };
        if let Some(client) = self.clients.get_mut(&id) {
            client.phase = phase;
        }
        let locked = phase != ProcessPhase::Running;
        self.effects.push(Effect::Lock { client: id, locked });
        Ok(Reply::Phase(phase))
    }

    /// Whether a process has no memory on any card for now.
    pub(super) fn is_away(&self, client: ClientId) -> bool {
        let client = self.clients.get(&client);
        client.is_some_and(|client| client.phase == ProcessPhase::Checkpointed)
    }

    /// Memory that nobody but a process holds, and how much there is of each kind on which card.
    fn own_memory(
        &self,
        client: ClientId,
    ) -> Result<Vec<(CardIndex, u64, Option<AllocationId>)>, Refusal> {
        let is_own = |holder: &Holder| match holder {
            Holder::Context(context) => {
                let context = self.contexts.get(context);
                context.is_some_and(|context| context.client == client)
            }
            Holder::Client(holder) => *holder == client,
            Holder::Export(_) => false,
        };
        let mut found = Vec::new();
        for context in self
            .contexts
            .values()
            .filter(|context| context.client == client)
        {
            let bytes = self.card(context.card)?.model.memory.context_bytes;
            found.push((context.card, bytes, None));
        }
        for (id, allocation) in &self.allocations {
            if !allocation.holders.keys().any(is_own) {
                continue;
            }
            // What others hold too cannot go.
            if !allocation.holders.keys().all(is_own) {
                return Err(Refusal::NotSupported);
            }
            found.push((allocation.card, allocation.bytes, Some(*id)));
        }
        Ok(found)
    }

    fn take_away(&mut self, client: ClientId) -> Result<(), Refusal> {
        for (card, bytes, allocation) in self.own_memory(client)? {
            self.card_mut(card)?.ledger.give_back(bytes);
            self.set_away(allocation, true);
        }
        Ok(())
    }

    /// All of it, or nothing.
    fn bring_back(&mut self, client: ClientId) -> Result<(), Refusal> {
        let memory = self.own_memory(client)?;
        for (position, (card, bytes, _)) in memory.iter().enumerate() {
            if let Err(refusal) = self.card_mut(*card)?.ledger.take(*bytes) {
                for (card, bytes, _) in memory.iter().take(position) {
                    self.card_mut(*card)?.ledger.give_back(*bytes);
                }
                return Err(refusal);
            }
        }
        for (_, _, allocation) in memory {
            self.set_away(allocation, false);
        }
        Ok(())
    }

    fn set_away(&mut self, allocation: Option<AllocationId>, away: bool) {
        let allocation = allocation.and_then(|id| self.allocations.get_mut(&id));
        if let Some(allocation) = allocation {
            allocation.away = away;
        }
    }
}
