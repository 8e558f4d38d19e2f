//! Physical memory: allocation, holders, charging.
//!
//! Memory lives until its last holder releases it: the allocating context, a process that created,
//! imported or opened it, or an exported file descriptor. It is charged to the allocating holder
//! while that one holds it, then to another holder. Memory held only by descriptors is allocated
//! and charged to no process.

use std::collections::BTreeMap;

use crate::protocol::{AllocationId, ContextId, ExportId, GpuIndex, Refusal, Reply};

use super::{ClientId, Context, Effect, Kernel, ledger};

/// Allocated memory.
#[derive(Debug)]
pub(super) struct Allocation {
    pub(super) gpu: GpuIndex,
    offset: u64,
    pub(super) bytes: u64,
    /// Holders with their hold counts; never empty.
    pub(super) holders: BTreeMap<Holder, u32>,
    /// The allocating holder.
    payer: Holder,
    /// The context in which a process allocated it, and so the GPU instance that is charged.
    taken_in: Option<ContextId>,
    /// Whether other processes may open it by id.
    shared: bool,
    /// Cgroup in which it was allocated.
    pub(super) cgroup: Option<String>,
    /// Whether it is checkpointed: see [`super::checkpoint`].
    pub(super) is_checkpointed: bool,
}

/// A holder of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Holder {
    /// Until freed or the context is destroyed.
    Context(ContextId),
    /// Until released or the process is gone.
    Client(ClientId),
    /// Until the last copy of the descriptor is closed.
    Export(ExportId),
}

impl Allocation {
    fn hold(&mut self, holder: Holder) {
        *self.holders.entry(holder).or_default() += 1;
    }

    /// Removes a holder. Returns whether it was one.
    fn remove_holder(&mut self, holder: Holder) -> bool {
        let Some(count) = self.holders.get_mut(&holder) else {
            return false;
        };
        *count -= 1;
        if *count == 0 {
            self.holders.remove(&holder);
        }
        true
    }

    /// The charged holder.
    fn account(&self) -> Option<Holder> {
        if self.holders.contains_key(&self.payer) {
            return Some(self.taken_in.map_or(self.payer, Holder::Context));
        }
        let mut others = self.holders.keys().copied();
        others.find(|holder| !matches!(holder, Holder::Export(_)))
    }
}

impl Kernel {
    /// Allocates memory on a context's GPU.
    pub(super) fn allocate(
        &mut self,
        client: ClientId,
        context: ContextId,
        bytes: u64,
    ) -> Result<Reply, Refusal> {
        let gpu = self.own_context(client, context)?.gpu;
        self.check_instance_memory(gpu, context, bytes)?;
        self.check_cgroup_memory(gpu, client, bytes)?;
        let cgroup = self.cgroup_of(client);
        self.take(gpu, Holder::Context(context), None, (bytes, cgroup))
    }

    /// Allocates memory of a GPU without a context.
    pub(super) fn create_memory(
        &mut self,
        client: ClientId,
        gpu: GpuIndex,
        bytes: u64,
    ) -> Result<Reply, Refusal> {
        let mut of_client = self.contexts.iter();
        let context = of_client.find(|(_, one)| one.client == client && one.gpu == gpu);
        let context = context.map(|(id, _)| *id);
        if let Some(context) = context {
            self.check_instance_memory(gpu, context, bytes)?;
        }
        self.check_cgroup_memory(gpu, client, bytes)?;
        let cgroup = self.cgroup_of(client);
        self.take(gpu, Holder::Client(client), context, (bytes, cgroup))
    }

    fn take(
        &mut self,
        index: GpuIndex,
        holder: Holder,
        taken_in: Option<ContextId>,
        (bytes, cgroup): (u64, Option<String>),
    ) -> Result<Reply, Refusal> {
        let gpu = self.gpu_mut(index)?;
        let bytes = gpu.ledger.take(bytes)?;
        let offset = gpu.place(bytes);
        let allocation = AllocationId(self.id());
        let record = Allocation {
            gpu: index,
            offset,
            bytes,
            holders: BTreeMap::from([(holder, 1)]),
            payer: holder,
            taken_in,
            shared: false,
            cgroup,
            is_checkpointed: false,
        };
        self.allocations.insert(allocation, record);
        self.account_memory(index);
        Ok(Reply::Allocated {
            allocation,
            offset,
            bytes,
        })
    }

    /// Frees memory allocated in a context.
    pub(super) fn free(&mut self, client: ClientId, id: AllocationId) -> Result<Reply, Refusal> {
        let holders = self.allocations.get(&id).ok_or(Refusal::NotFound)?;
        let own = holders.holders.keys().copied().find(|holder| match holder {
            Holder::Context(context) => self.own_context(client, *context).is_ok(),
            Holder::Client(_) | Holder::Export(_) => false,
        });
        self.remove_holder(id, own.ok_or(Refusal::NotFound)?)
    }

    /// Releases one hold of a process.
    pub(super) fn release(&mut self, client: ClientId, id: AllocationId) -> Result<Reply, Refusal> {
        self.remove_holder(id, Holder::Client(client))
    }

    fn remove_holder(&mut self, id: AllocationId, holder: Holder) -> Result<Reply, Refusal> {
        let allocation = self.allocations.get_mut(&id).ok_or(Refusal::NotFound)?;
        if !allocation.remove_holder(holder) {
            return Err(Refusal::NotFound);
        }
        self.free_unheld(id);
        Ok(Reply::Done)
    }

    /// Releases everything that a holder holds.
    pub(super) fn release_all(&mut self, holder: Holder) {
        if let Holder::Context(gone) = holder {
            for allocation in self.allocations.values_mut() {
                allocation.taken_in = allocation.taken_in.filter(|context| *context != gone);
            }
        }
        let held: Vec<AllocationId> = self
            .allocations
            .iter_mut()
            .filter_map(|(id, allocation)| allocation.holders.remove(&holder).map(|_| *id))
            .collect();
        held.into_iter().for_each(|id| self.free_unheld(id));
    }

    /// Frees memory without holders.
    fn free_unheld(&mut self, id: AllocationId) {
        let unheld = |allocation: &Allocation| allocation.holders.is_empty();
        if !self.allocations.get(&id).is_some_and(unheld) {
            return;
        }
        let Some(Allocation {
            gpu: index,
            offset,
            bytes,
            is_checkpointed,
            ..
        }) = self.allocations.remove(&id)
        else {
            return;
        };
        if !is_checkpointed && let Ok(gpu) = self.gpu_mut(index) {
            gpu.ledger.free(bytes);
        }
        self.effects.push(Effect::Forget {
            gpu: index,
            offset,
            bytes,
        });
    }

    /// Allows other processes to open memory by id.
    pub(super) fn share(&mut self, client: ClientId, id: AllocationId) -> Result<Reply, Refusal> {
        self.require_held(client, id)?.shared = true;
        Ok(Reply::Done)
    }

    /// Adds a hold on shared memory.
    pub(super) fn open(&mut self, client: ClientId, id: AllocationId) -> Result<Reply, Refusal> {
        let allocation = self.allocations.get_mut(&id);
        let allocation = allocation.filter(|allocation| allocation.shared);
        let allocation = allocation.ok_or(Refusal::NotFound)?;
        allocation.hold(Holder::Client(client));
        Ok(opened(id, allocation))
    }

    /// Creates an export that holds memory of a process.
    pub(super) fn export(&mut self, client: ClientId, id: AllocationId) -> Result<Reply, Refusal> {
        self.require_held(client, id)?;
        let export = ExportId(self.id());
        self.require_held(client, id)?.hold(Holder::Export(export));
        Ok(Reply::Exported { export })
    }

    /// Removes the hold of a descriptor whose last copy was closed.
    pub fn unexport(&mut self, export: ExportId) {
        self.release_all(Holder::Export(export));
    }

    /// Adds a hold on the memory of a descriptor.
    pub fn import(&mut self, client: ClientId, export: ExportId) -> Reply {
        let holds =
            |allocation: &&mut Allocation| allocation.holders.contains_key(&Holder::Export(export));
        let mut allocations = self.allocations.iter_mut();
        match allocations.find_map(|(id, one)| Some(one).filter(holds).map(|one| (*id, one))) {
            Some((id, allocation)) => {
                allocation.hold(Holder::Client(client));
                opened(id, allocation)
            }
            None => Reply::Refused(Refusal::NotFound),
        }
    }

    /// Errors unless a process or one of its contexts holds the memory.
    fn require_held(
        &mut self,
        client: ClientId,
        id: AllocationId,
    ) -> Result<&mut Allocation, Refusal> {
        let contexts = &self.contexts;
        let own = |holder: &Holder| match holder {
            Holder::Context(context) => contexts
                .get(context)
                .is_some_and(|context| context.client == client),
            Holder::Client(holder) => *holder == client,
            Holder::Export(_) => false,
        };
        let allocation = self.allocations.get_mut(&id);
        allocation
            .filter(|allocation| allocation.holders.keys().any(own))
            .ok_or(Refusal::NotFound)
    }

    /// Memory charged to a context: its overhead and its allocations.
    pub(super) fn context_bytes(&self, id: ContextId, context: &Context) -> u64 {
        let overhead = self
            .gpu(context.gpu)
            .map_or(0, |gpu| ledger::round_up(gpu.model.memory.context_bytes));
        overhead + self.bytes_of(context.gpu, Holder::Context(id))
    }

    /// Memory of a GPU charged to a holder.
    fn bytes_of(&self, gpu: GpuIndex, holder: Holder) -> u64 {
        self.allocations
            .values()
            .filter(|one| one.gpu == gpu && !one.is_checkpointed && one.account() == Some(holder))
            .map(|allocation| allocation.bytes)
            .sum()
    }

    /// Memory of a GPU charged to processes without a context.
    pub(super) fn bytes_by_client(&self, gpu: GpuIndex) -> BTreeMap<ClientId, u64> {
        let mut bytes = BTreeMap::new();
        for allocation in self
            .allocations
            .values()
            .filter(|one| one.gpu == gpu && !one.is_checkpointed)
        {
            if let Some(Holder::Client(client)) = allocation.account() {
                *bytes.entry(client).or_default() += allocation.bytes;
            }
        }
        bytes
    }
}

fn opened(allocation: AllocationId, record: &Allocation) -> Reply {
    Reply::Opened {
        gpu: record.gpu,
        allocation,
        offset: record.offset,
        bytes: record.bytes,
    }
}
