//! State and decisions of the kernel driver. Pure.
//!
//! Time is an argument; side effects are returned as [`Effect`]s. One daemon owns the state, so a
//! killed client leaves either the state before its request or after it; [`Kernel::disconnect`]
//! frees the rest.
//!
//! Invariant: [`Gpu::ledger`](gpu) equals the context overheads of live connections on that GPU
//! plus the allocations held by them or by exported descriptors.

use std::collections::{BTreeMap, BTreeSet};

use crate::description::MachineDescription;
use crate::protocol::{
    Action, AllocationId, ClientKind, Command, ContextId, GpuEvent, GpuIndex, GpuState, InstanceId,
    Nanos, PROTOCOL, ProcessPhase, ProcessState, Refusal, Reply, Request,
};

mod accounting;
mod checkpoint;
mod compute_mode;
pub mod engine;
mod faults;
mod gpu;
mod ledger;
mod memory;
mod memory_limits;
mod mig;
mod mps;
mod samples;
mod status;

pub use accounting::ACCOUNTED_PROCESSES;
use engine::Outcome;
pub use faults::Faults;
use gpu::Gpu;
pub use ledger::PAGE_BYTES;
use memory::{Allocation, Holder};
use memory_limits::MemoryLimits;
use mps::{Membership, MpsServers};
pub use status::{GpuStatus, LimitStatus, MachineStatus, ProcessStatus};

/// Id of one connection, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// A side effect for the server to carry out.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Discard the bytes of freed memory.
    Forget {
        /// GPU index.
        gpu: GpuIndex,
        /// Offset in the GPU's memory file.
        offset: u64,
        /// Size.
        bytes: u64,
    },
    /// Publish that a stream completed a ticket.
    Completed {
        /// Owner of the channel.
        client: ClientId,
        /// Stream cell.
        stream: u32,
        /// Last completed ticket.
        ticket: u64,
    },
    /// Publish that an event was reached.
    Recorded {
        /// Owner of the channel.
        client: ClientId,
        /// Event cell.
        event: u32,
        /// Recording number.
        recording: u64,
        /// Time on the GPU.
        at: Nanos,
    },
    /// Announce that a host function may run.
    HostCall {
        /// Owner of the channel.
        client: ClientId,
        /// Stream cell.
        stream: u32,
        /// Ticket.
        ticket: u64,
    },
    /// Lock or unlock the calls of a process.
    Lock {
        /// Owner of the channel.
        client: ClientId,
        /// Whether the calls are locked.
        locked: bool,
    },
    /// Make the calls of an MPS client fail from now on.
    Fail {
        /// Owner of the channel.
        client: ClientId,
        /// `CUresult`.
        error: u32,
    },
    /// Send an unsolicited message.
    Push {
        /// Receiver.
        client: ClientId,
        /// Message.
        message: Reply,
    },
}

/// State of the machine.
#[derive(Debug)]
pub struct Kernel {
    description: MachineDescription,
    gpus: Vec<Gpu>,
    clients: BTreeMap<ClientId, Client>,
    contexts: BTreeMap<ContextId, Context>,
    allocations: BTreeMap<AllocationId, Allocation>,
    memory_limits: MemoryLimits,
    mps_servers: MpsServers,
    next_id: u64,
    /// Time of the present request.
    now: Nanos,
    effects: Vec<Effect>,
}

#[derive(Debug)]
struct Client {
    pid: u32,
    /// Cgroup at the last request.
    cgroup: Option<String>,
    kind: Option<ClientKind>,
    phase: ProcessPhase,
    /// Whether it has managed memory.
    uses_managed: bool,
    /// Memory by GPU that the last checkpoint freed, and until when NVML shows it.
    vanishing: (BTreeMap<GpuIndex, u64>, Nanos),
    /// GPUs whose events the client registered for.
    watched: BTreeSet<GpuIndex>,
    /// Set for a client of an MPS server.
    membership: Option<Membership>,
}

#[derive(Debug)]
struct Context {
    client: ClientId,
    gpu: GpuIndex,
    /// Cgroup in which it was created.
    cgroup: Option<String>,
}

impl Kernel {
    /// Creates an idle machine, started at `now`.
    #[must_use]
    pub fn new(description: MachineDescription, now: Nanos) -> Self {
        let gpus = description
            .gpus
            .iter()
            .map(|gpu| Gpu::new(description.model(gpu).clone(), gpu, now))
            .collect();
        Self {
            description,
            gpus,
            clients: BTreeMap::new(),
            contexts: BTreeMap::new(),
            allocations: BTreeMap::new(),
            memory_limits: MemoryLimits::new(),
            mps_servers: MpsServers::default(),
            next_id: 1,
            now,
            effects: Vec::new(),
        }
    }

    /// The machine.
    #[must_use]
    pub fn description(&self) -> &MachineDescription {
        &self.description
    }

    /// Adds a connection; the server chose the id.
    pub fn connect(&mut self, client: ClientId, pid: u32) {
        let watched = BTreeSet::new();
        let known = Client {
            pid,
            cgroup: None,
            kind: None,
            phase: ProcessPhase::default(),
            uses_managed: false,
            vanishing: Default::default(),
            watched,
            membership: None,
        };
        self.clients.insert(client, known);
    }

    /// Removes a connection whose last holder closed it, and frees everything it held.
    pub fn disconnect(&mut self, client: ClientId) {
        self.end_mps(client);
        let earlier: Vec<u64> = self
            .gpus
            .iter()
            .map(|gpu| gpu.ledger.taken_bytes())
            .collect();
        let contexts: Vec<ContextId> = self
            .contexts
            .iter()
            .filter(|(_, context)| context.client == client)
            .map(|(id, _)| *id)
            .collect();
        for context in contexts {
            self.destroy_context(context);
        }
        self.release_all(Holder::Client(client));
        for (gpu, earlier_bytes) in self.gpus.iter_mut().zip(earlier) {
            gpu.ledger.note_exit(earlier_bytes);
        }
        self.clients.remove(&client);
    }

    /// Takes the effects since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Raises an event for all registered clients.
    ///
    /// # Errors
    /// If the GPU does not exist.
    pub fn raise(&mut self, event: GpuEvent) -> Result<(), Refusal> {
        let gpu = event.gpu();
        self.gpu(gpu)?;
        let watchers = self
            .clients
            .iter()
            .filter(|(_, client)| client.watched.contains(&gpu));
        let push = |(client, _): (&ClientId, &Client)| Effect::Push {
            client: *client,
            message: Reply::Event(event),
        };
        self.effects.extend(watchers.map(push));
        Ok(())
    }

    /// PIDs of all connections.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.clients.values().map(|client| client.pid)
    }

    /// Library type of a client.
    #[must_use]
    pub fn kind(&self, client: ClientId) -> Option<ClientKind> {
        self.clients.get(&client)?.kind
    }

    /// Sets the time of the next requests. The time of the GPUs follows by [`Self::advance`], once earlier commands are executed.
    pub fn set_now(&mut self, now: Nanos) {
        self.now = now;
    }

    /// Advances the GPUs' time.
    pub fn advance(&mut self, now: Nanos) {
        let mut outcomes = Vec::new();
        for gpu in &mut self.gpus {
            gpu.engine.advance(now, &mut outcomes);
        }
        self.publish(&outcomes);
    }

    /// Time of the next change without input.
    #[must_use]
    pub fn next_change(&self) -> Option<Nanos> {
        self.gpus
            .iter()
            .filter_map(|gpu| gpu.engine.next_change())
            .min()
    }

    /// Executes a command from a channel at its claimed time, bounded by the settled past and the
    /// present. Commands for a destroyed context have no effect.
    ///
    /// # Errors
    /// If a stream holds more work than any program queues.
    pub fn command(
        &mut self,
        client: ClientId,
        command: Command,
        now: Nanos,
    ) -> Result<(), Refusal> {
        let Ok(index) = self
            .own_context(client, command.context)
            .map(|context| context.gpu)
        else {
            return Ok(());
        };
        if self.has_failed(client) {
            return Ok(());
        }
        let engine = &mut self.gpu_mut(index)?.engine;
        let mut outcomes = Vec::new();
        engine.advance(command.at.min(now), &mut outcomes);
        let Command {
            context,
            stream,
            ticket,
            ..
        } = command;
        let accepted = match command.action {
            Action::Submit(work) => engine.submit(context, stream, ticket, work),
            Action::HostDone => {
                engine.host_done(context, stream, ticket);
                true
            }
        };
        self.publish(&outcomes);
        if accepted {
            Ok(())
        } else {
            Err(Refusal::Invalid)
        }
    }

    fn publish(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let (Outcome::Completed { context, .. }
            | Outcome::Recorded { context, .. }
            | Outcome::HostCall { context, .. }) = outcome;
            let Some(client) = self.contexts.get(context).map(|context| context.client) else {
                continue;
            };
            self.effects.push(match *outcome {
                Outcome::Completed { stream, ticket, .. } => Effect::Completed {
                    client,
                    stream,
                    ticket,
                },
                Outcome::Recorded {
                    event,
                    recording,
                    at,
                    ..
                } => Effect::Recorded {
                    client,
                    event,
                    recording,
                    at,
                },
                Outcome::HostCall { stream, ticket, .. } => Effect::HostCall {
                    client,
                    stream,
                    ticket,
                },
            });
        }
    }

    /// Answers one request.
    pub fn handle(&mut self, client: ClientId, request: &Request) -> Reply {
        self.answer(client, request).unwrap_or_else(Reply::Refused)
    }

    fn answer(&mut self, client: ClientId, request: &Request) -> Result<Reply, Refusal> {
        if let Request::Hello { protocol, kind } = *request {
            return self.hello(client, protocol, kind);
        }
        self.kind(client).ok_or(Refusal::Invalid)?;
        self.check_faults(request)?;
        match *request {
            Request::Hello { .. } => Err(Refusal::Invalid),
            Request::GpuState { gpu } => self.gpu_state(client, gpu),
            Request::Samples { gpu, since } => self.samples(gpu, since),
            Request::Checkpoint { pid, action } => self.checkpoint(pid, action),
            Request::SetManaged { is_used } => {
                let owner = self.clients.get_mut(&client).ok_or(Refusal::NotFound)?;
                owner.uses_managed = is_used;
                Ok(Reply::Done)
            }
            Request::MemoryLimits {
                gpu,
                ref cgroup,
                request,
            } => self.memory_limits(gpu, cgroup, request),
            Request::Counters { gpu, gpu_instance } => self.counters(gpu, gpu_instance),
            Request::Accounting { gpu, request } => self.accounting(gpu, request),
            Request::Mig { gpu, request } => self.mig(client, gpu, request),
            Request::SetComputeMode { gpu, mode } => {
                self.gpu_mut(gpu)?.compute_mode = mode;
                Ok(Reply::Done)
            }
            Request::Mps(ref request) => self.mps(client, request),
            Request::RegisterEvents { gpu } => {
                self.gpu(gpu)?;
                let watcher = self.clients.get_mut(&client).ok_or(Refusal::NotFound)?;
                watcher.watched.insert(gpu);
                Ok(Reply::Done)
            }
            Request::CreateContext { gpu } => self.create_context(client, gpu),
            Request::DestroyContext { context } => {
                self.own_context(client, context)?;
                self.destroy_context(context);
                Ok(Reply::Done)
            }
            Request::Allocate { context, bytes } => self.allocate(client, context, bytes),
            Request::Free { allocation } => self.free(client, allocation),
            Request::CreateMemory { gpu, bytes } => self.create_memory(client, gpu, bytes),
            Request::Release { allocation } => self.release(client, allocation),
            Request::Share { allocation } => self.share(client, allocation),
            Request::Open { allocation } => self.open(client, allocation),
            Request::Export { allocation } => self.export(client, allocation),
            // The server handles descriptors.
            Request::Import => Err(Refusal::Invalid),
            Request::MemoryInfo { gpu } => {
                let cgroup = self.own_cgroup_memory(gpu, client);
                let ledger = &self.gpu(gpu)?.ledger;
                let (free, usable) = (ledger.free_bytes(), ledger.usable_bytes());
                Ok(Reply::MemoryInfo {
                    free_bytes: cgroup.map_or(free, |cgroup| {
                        free.min(cgroup.hard_bytes.saturating_sub(cgroup.used_bytes))
                    }),
                    total_bytes: cgroup.map_or(usable, |cgroup| usable.min(cgroup.hard_bytes)),
                })
            }
        }
    }

    fn hello(
        &mut self,
        client: ClientId,
        protocol: u32,
        kind: ClientKind,
    ) -> Result<Reply, Refusal> {
        if protocol != PROTOCOL {
            return Err(Refusal::Protocol);
        }
        let known = self.clients.get_mut(&client).ok_or(Refusal::NotFound)?;
        if known.kind.replace(kind).is_some() {
            return Err(Refusal::Invalid);
        }
        Ok(Reply::Welcome {
            machine: Box::new(self.description.clone()),
        })
    }

    fn create_context(&mut self, client: ClientId, index: GpuIndex) -> Result<Reply, Refusal> {
        let place = self.place_in_server(client, index)?;
        self.check_compute_mode(client, index)?;
        let bytes = self.gpu(index)?.model.memory.context_bytes;
        self.check_cgroup_memory(index, client, bytes)?;
        self.gpu_mut(index)?.ledger.take(bytes)?;
        let cgroup = self.cgroup_of(client);
        let context = ContextId(self.id());
        let pid = self.clients.get(&client).map_or(0, |client| client.pid);
        let engine = &mut self.gpu_mut(index)?.engine;
        match place {
            Some((leader, multiprocessors)) => {
                engine.add_client(context, leader, multiprocessors);
            }
            None => engine.add_context(context),
        }
        let created = Context {
            client,
            gpu: index,
            cgroup,
        };
        self.contexts.insert(context, created);
        self.account_start(index, pid);
        Ok(Reply::ContextCreated { context })
    }

    fn destroy_context(&mut self, id: ContextId) {
        let Some(context) = self.contexts.remove(&id) else {
            return;
        };
        let busy = self
            .gpu(context.gpu)
            .map_or(0, |gpu| gpu.engine.usage(id).1);
        let pid_of = |client: &ClientId| self.clients.get(client).map(|client| client.pid);
        let pid = pid_of(&context.client).unwrap_or(0);
        let others =
            |other: &Context| other.gpu == context.gpu && pid_of(&other.client) == Some(pid);
        let is_last = !self.contexts.values().any(others);
        self.account_end(context.gpu, pid, busy, is_last);
        self.release_all(Holder::Context(id));
        let away = self.is_checkpointed(context.client);
        if let Ok(gpu) = self.gpu_mut(context.gpu) {
            if !away {
                gpu.ledger.free(gpu.model.memory.context_bytes);
            }
            gpu.engine.remove_context(id);
            gpu.partitions.leave(id);
        }
    }

    fn gpu_state(&self, client: ClientId, index: GpuIndex) -> Result<Reply, Refusal> {
        let gpu = self.gpu(index)?;
        let sensors = gpu.sensors();
        let vanishing = self.vanishing(index);
        let vanishing_bytes: u64 = vanishing.iter().map(|process| process.used_bytes).sum();
        let mut processes = [self.processes(index), vanishing].concat();
        processes.sort_by_key(|process| process.pid);
        Ok(Reply::GpuState(Box::new(GpuState {
            // Others may have taken some of it already.
            used_bytes: (gpu.ledger.taken_bytes() + vanishing_bytes).min(gpu.ledger.usable_bytes()),
            processes,
            utilization: sensors.utilization,
            temperature_celsius: sensors.temperature_celsius,
            power_milliwatts: sensors.power_milliwatts,
            energy_millijoules: sensors.energy_millijoules,
            graphics_mhz: gpu.model.clocks_mhz.graphics,
            compute_mode: gpu.compute_mode,
            mig_enabled: gpu.partitions.is_enabled(),
            recovery_action: gpu.faults.recovery_action,
            cgroup_memory: self.own_cgroup_memory(index, client),
            fabric_state: self.fabric_state(index)?,
            fabric_health_mask: gpu.faults.fabric_health_mask,
            repair_pending: gpu.faults.repair_pending,
            repair_failed: gpu.faults.repair_failed,
            unsupported: gpu.faults.unsupported.clone(),
            failing: gpu.faults.failing.clone(),
        })))
    }

    /// State of the registration with the fabric. The manager is needed on machines whose NVML does not report it.
    fn fabric_state(&self, index: GpuIndex) -> Result<Option<u8>, Refusal> {
        /// `NVML_GPU_FABRIC_STATE_NOT_STARTED`
        const NOT_STARTED: u8 = 1;
        let place = usize::try_from(index.0).map_err(|_| Refusal::NotFound)?;
        let described = self.description.gpus.get(place).ok_or(Refusal::NotFound)?;
        let is_manager = |client: &Client| client.kind == Some(ClientKind::FabricManager);
        let waits = self.description.needs_unreported_fabric(described)
            && !self.clients.values().any(is_manager);
        Ok(match waits {
            true => Some(NOT_STARTED),
            false => self.gpu(index)?.faults.fabric_state,
        })
    }

    /// Processes with a context or memory on a GPU, by PID.
    fn processes(&self, index: GpuIndex) -> Vec<ProcessState> {
        let mut used: BTreeMap<(u32, Option<InstanceId>, bool), u64> = BTreeMap::new();
        for (id, context) in &self.contexts {
            if context.gpu != index || self.is_checkpointed(context.client) {
                continue;
            }
            let Some(client) = self.clients.get(&context.client) else {
                continue;
            };
            let instance = self.gpu(index).ok();
            let instance = instance.and_then(|gpu| gpu.partitions.instance_of(*id));
            let is_mps_client = client.membership.is_some();
            let used = used.entry((client.pid, instance, is_mps_client));
            *used.or_default() += self.context_bytes(*id, context);
        }
        for (client, bytes) in self.bytes_by_client(index) {
            let instance = self.instance_of_client(client, index);
            if let Some(client) = self.clients.get(&client) {
                let is_mps_client = client.membership.is_some();
                *used
                    .entry((client.pid, instance, is_mps_client))
                    .or_default() += bytes;
            }
        }
        let state = |((pid, instance, is_mps_client), used_bytes)| ProcessState {
            pid,
            used_bytes,
            instance,
            is_mps_client,
        };
        used.into_iter().map(state).collect()
    }

    fn own_context(&self, client: ClientId, context: ContextId) -> Result<&Context, Refusal> {
        self.contexts
            .get(&context)
            .filter(|context| context.client == client)
            .ok_or(Refusal::NotFound)
    }

    fn gpu(&self, index: GpuIndex) -> Result<&Gpu, Refusal> {
        let index = usize::try_from(index.0).map_err(|_| Refusal::NotFound)?;
        self.gpus.get(index).ok_or(Refusal::NotFound)
    }

    fn gpu_mut(&mut self, index: GpuIndex) -> Result<&mut Gpu, Refusal> {
        let index = usize::try_from(index.0).map_err(|_| Refusal::NotFound)?;
        self.gpus.get_mut(index).ok_or(Refusal::NotFound)
    }

    fn id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}

#[cfg(test)]
mod tests;
