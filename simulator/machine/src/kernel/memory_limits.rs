//! Memory limits of cgroups.
//!
//! Memory counts in the cgroup in which its process was when it was allocated, until it is freed: a process that moves to
//! another cgroup leaves its memory behind, as with the controllers of the kernel. Contexts count, managed memory does not.

use std::collections::BTreeMap;

use crate::description::MemoryLimitBackend;
use crate::protocol::{
    CgroupMemory, GpuIndex, MemoryLimitsRequest, MemoryLimitsState, Refusal, Reply,
};

use super::status::LimitStatus;
use super::{ClientId, Kernel, ledger};

/// Limits by GPU and cgroup.
pub(super) type MemoryLimits = BTreeMap<(GpuIndex, String), MemoryLimitsState>;

impl Kernel {
    /// Sets the cgroup of a process; `None` if it is unknown.
    pub fn set_cgroup(&mut self, client: ClientId, cgroup: Option<String>) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.cgroup = cgroup;
        }
    }

    /// Cgroups with limits.
    pub fn limited_cgroups(&self) -> impl Iterator<Item = &str> {
        self.memory_limits.keys().map(|(_, cgroup)| cgroup.as_str())
    }

    /// Removes the limits of a cgroup that does not exist any more. With `dmem`, guaranteed memory outlives the cgroup.
    pub fn forget_cgroup(&mut self, gone: &str) {
        let is_dmem = self.backend() == MemoryLimitBackend::Dmem;
        self.memory_limits
            .retain(|(_, cgroup), limits| cgroup != gone || (is_dmem && limits.soft_bytes > 0));
    }

    fn backend(&self) -> MemoryLimitBackend {
        self.description.memory_limits.backend
    }

    /// Answers a request about an existing cgroup.
    pub(super) fn memory_limits(
        &mut self,
        index: GpuIndex,
        cgroup: &str,
        request: MemoryLimitsRequest,
    ) -> Result<Reply, Refusal> {
        let in_mig_mode = self.gpu(index)?.partitions.is_enabled();
        if in_mig_mode || self.backend() == MemoryLimitBackend::None {
            return Err(Refusal::NotSupported);
        }
        let key = (index, cgroup.to_owned());
        match request {
            MemoryLimitsRequest::Get => {
                let limits = self.memory_limits.get(&key).copied();
                Ok(Reply::MemoryLimits {
                    limits: limits.unwrap_or(MemoryLimitsState::NONE),
                    used_bytes: self.cgroup_bytes(index, cgroup),
                })
            }
            MemoryLimitsRequest::Set(limits) => {
                if limits.soft_bytes > limits.hard_bytes {
                    return Err(Refusal::Invalid);
                }
                // A limit below the present use refuses further allocations and takes nothing back.
                if limits == MemoryLimitsState::NONE {
                    self.memory_limits.remove(&key);
                } else {
                    self.memory_limits.insert(key, limits);
                }
                Ok(Reply::Done)
            }
        }
    }

    /// Memory of a GPU that counts against a limit of `limited`.
    fn cgroup_bytes(&self, index: GpuIndex, limited: &str) -> u64 {
        let backend = self.backend();
        let counts = |cgroup: &Option<String>| {
            cgroup
                .as_deref()
                .is_some_and(|of| backend.covers(limited, of))
        };
        let allocations = self.allocations.values();
        let allocated: u64 = allocations
            .filter(|one| one.gpu == index && !one.is_checkpointed && counts(&one.cgroup))
            .map(|one| one.bytes)
            .sum();
        let contexts = self.contexts.values().filter(|context| {
            context.gpu == index && !self.is_checkpointed(context.client) && counts(&context.cgroup)
        });
        let overhead = self
            .gpu(index)
            .map_or(0, |gpu| ledger::round_up(gpu.model.memory.context_bytes));
        allocated + overhead * contexts.count() as u64
    }

    pub(super) fn cgroup_of(&self, client: ClientId) -> Option<String> {
        self.clients.get(&client)?.cgroup.clone()
    }

    /// Errors if memory would exceed a limit that covers a process. A process in an unknown cgroup gets no memory of a GPU
    /// with limits.
    pub(super) fn check_cgroup_memory(
        &self,
        index: GpuIndex,
        client: ClientId,
        bytes: u64,
    ) -> Result<(), Refusal> {
        let own = self.clients.get(&client);
        let own = own.and_then(|client| client.cgroup.as_deref());
        let bytes = ledger::round_up(bytes);
        for ((gpu, cgroup), limits) in &self.memory_limits {
            if *gpu != index || own.is_some_and(|own| !self.backend().covers(cgroup, own)) {
                continue;
            }
            let used = self.cgroup_bytes(index, cgroup);
            if own.is_none() || used.saturating_add(bytes) > limits.hard_bytes {
                return Err(Refusal::OutOfMemory);
            }
        }
        Ok(())
    }

    /// The memory of the own cgroup of a process. Limits of its ancestors are enforced and not shown.
    pub(super) fn own_cgroup_memory(
        &self,
        index: GpuIndex,
        client: ClientId,
    ) -> Option<CgroupMemory> {
        let cgroup = self.cgroup_of(client)?;
        let used_bytes = self.cgroup_bytes(index, &cgroup);
        let limits = self.memory_limits.get(&(index, cgroup))?;
        (limits.hard_bytes != MemoryLimitsState::NO_LIMIT).then_some(CgroupMemory {
            hard_bytes: limits.hard_bytes,
            used_bytes,
        })
    }

    /// Limits of a GPU with their use.
    pub(super) fn limits_of(&self, index: GpuIndex) -> Vec<LimitStatus> {
        let of_gpu = self
            .memory_limits
            .iter()
            .filter(|((gpu, _), _)| *gpu == index);
        let shown = of_gpu.map(|((_, cgroup), limits)| LimitStatus {
            cgroup: cgroup.clone(),
            limits: *limits,
            used_bytes: self.cgroup_bytes(index, cgroup),
        });
        shown.collect()
    }
}
