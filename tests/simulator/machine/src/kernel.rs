//! The kernel driver's state and every decision about it.
//!
//! Pure: time comes in as an argument, what must happen outside comes out as [`Effect`]s. The
//! state is owned by one daemon, so a client that is killed between two instructions leaves either
//! the state before its request or the one after it; [`Kernel::disconnect`] frees the rest.
//!
//! Invariant: what [`Card::ledger`](Card) counts as taken equals the sum of the context overheads of
//! live connections on that card and of the allocations that they or exported descriptors hold.

use std::collections::{BTreeMap, BTreeSet};

use crate::channel::{Action, Command};
use crate::description::MachineDescription;
use crate::protocol::{
    AllocationId, CardEvent, CardIndex, CardState, ClientKind, ContextId, InstanceId, PROTOCOL,
    ProcessPhase, ProcessState, Refusal, Reply, Request,
};

mod accounting;
mod card;
mod checkpoint;
pub mod engine;
mod faults;
mod ledger;
mod memory;
mod mig;
mod samples;
mod status;

pub use accounting::ACCOUNTED_PROCESSES;
use card::Card;
use engine::Outcome;
pub use faults::Faults;
pub use ledger::PAGE_BYTES;
use memory::{Allocation, Holder};
pub use status::{CardStatus, MachineStatus, ProcessStatus};

/// Nanoseconds of a monotonic clock.
pub type Nanos = u64;

/// One connection, by a number that is never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u64);

/// What the server must do after a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Drop the bytes of freed memory.
    Forget {
        /// Which card.
        card: CardIndex,
        /// First byte in the card's memory file.
        offset: u64,
        /// How many.
        bytes: u64,
    },
    /// Publish that a stream completed a ticket.
    Completed {
        /// Whose channel.
        client: ClientId,
        /// Which stream.
        stream: u32,
        /// Up to where.
        ticket: u64,
    },
    /// Publish that an event was reached.
    Recorded {
        /// Whose channel.
        client: ClientId,
        /// Which event.
        event: u32,
        /// Which recording.
        recording: u64,
        /// When.
        at: Nanos,
    },
    /// Announce that a host function may run.
    HostCall {
        /// Whose channel.
        client: ClientId,
        /// In which stream.
        stream: u32,
        /// Its ticket.
        ticket: u64,
    },
    /// Let a process's calls wait, or go on.
    Lock {
        /// Whose channel.
        client: ClientId,
        /// Whether they wait.
        locked: bool,
    },
    /// Send a message that answers no request.
    Push {
        /// To whom.
        client: ClientId,
        /// What.
        message: Reply,
    },
}

/// State of the machine.
#[derive(Debug)]
pub struct Kernel {
    description: MachineDescription,
    cards: Vec<Card>,
    clients: BTreeMap<ClientId, Client>,
    contexts: BTreeMap<ContextId, Context>,
    allocations: BTreeMap<AllocationId, Allocation>,
    next_id: u64,
    effects: Vec<Effect>,
}

#[derive(Debug)]
struct Client {
    pid: u32,
    kind: Option<ClientKind>,
    phase: ProcessPhase,
    /// Cards whose events the client wants.
    watched: BTreeSet<CardIndex>,
}

#[derive(Debug)]
struct Context {
    client: ClientId,
    card: CardIndex,
}

impl Kernel {
    /// A machine with nothing running, started `now`.
    #[must_use]
    pub fn new(description: MachineDescription, now: Nanos) -> Self {
        let cards = description
            .cards
            .iter()
            .map(|card| Card::new(description.model(card).clone(), &card.uuid, now))
            .collect();
        Self {
            description,
            cards,
            clients: BTreeMap::new(),
            contexts: BTreeMap::new(),
            allocations: BTreeMap::new(),
            next_id: 1,
            effects: Vec::new(),
        }
    }

    /// The machine.
    #[must_use]
    pub fn description(&self) -> &MachineDescription {
        &self.description
    }

    /// A process opened a connection, for which the server chose a number.
    pub fn connect(&mut self, client: ClientId, pid: u32) {
        let watched = BTreeSet::new();
        let known = Client {
            pid,
            kind: None,
            phase: ProcessPhase::default(),
            watched,
        };
        self.clients.insert(client, known);
    }

    /// The last holder closed a connection: everything it held is freed.
    pub fn disconnect(&mut self, client: ClientId) {
        let contexts: Vec<ContextId> = self
            .contexts
            .iter()
            .filter(|(_, context)| context.client == client)
            .map(|(id, _)| *id)
            .collect();
        for context in contexts {
            self.destroy_context(context);
        }
        self.let_go_all(Holder::Client(client));
        self.clients.remove(&client);
    }

    /// What the server has to do since the last call.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Raises an event for everyone who watches the card.
    ///
    /// # Errors
    /// When there is no such card.
    pub fn raise(&mut self, event: CardEvent) -> Result<(), Refusal> {
        let CardEvent::Xid { card, .. } = event;
        self.card(card)?;
        let watchers = self
            .clients
            .iter()
            .filter(|(_, client)| client.watched.contains(&card));
        let push = |(client, _): (&ClientId, &Client)| Effect::Push {
            client: *client,
            message: Reply::Event(event),
        };
        self.effects.extend(watchers.map(push));
        Ok(())
    }

    /// PIDs of all that have a connection.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.clients.values().map(|client| client.pid)
    }

    /// Which library a client said it is.
    #[must_use]
    pub fn kind(&self, client: ClientId) -> Option<ClientKind> {
        self.clients.get(&client)?.kind
    }

    /// Moves the cards' time forward.
    pub fn advance(&mut self, now: Nanos) {
        let mut outcomes = Vec::new();
        for card in &mut self.cards {
            card.engine.advance(now, &mut outcomes);
        }
        self.publish(&outcomes);
    }

    /// When something will happen by itself.
    #[must_use]
    pub fn next_change(&self) -> Option<Nanos> {
        self.cards
            .iter()
            .filter_map(|card| card.engine.next_change())
            .min()
    }

    /// Carries out what a client wrote into its channel, at the time it says it did, as far as
    /// that is not in the future or in a past that is settled. A command for a context that was
    /// just destroyed goes nowhere.
    ///
    /// # Errors
    /// When a stream holds more work than any program has in flight.
    pub fn command(
        &mut self,
        client: ClientId,
        command: Command,
        now: Nanos,
    ) -> Result<(), Refusal> {
        let Ok(index) = self
            .own_context(client, command.context)
            .map(|context| context.card)
        else {
            return Ok(());
        };
        let engine = &mut self.card_mut(index)?.engine;
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
            Request::CardState { card } => self.card_state(card),
            Request::Samples { card, since } => self.samples(card, since),
            Request::Checkpoint { pid, action } => self.checkpoint(pid, action),
            Request::Counters { card, gpu } => self.counters(card, gpu),
            Request::Accounting { card, request } => self.accounting(card, request),
            Request::Mig { card, request } => self.mig(client, card, request),
            Request::RegisterEvents { card } => {
                self.card(card)?;
                let watcher = self.clients.get_mut(&client).ok_or(Refusal::NotFound)?;
                watcher.watched.insert(card);
                Ok(Reply::Done)
            }
            Request::CreateContext { card } => self.create_context(client, card),
            Request::DestroyContext { context } => {
                self.own_context(client, context)?;
                self.destroy_context(context);
                Ok(Reply::Done)
            }
            Request::Allocate { context, bytes } => self.allocate(client, context, bytes),
            Request::Free { allocation } => self.free(client, allocation),
            Request::CreateMemory { card, bytes } => self.create_memory(client, card, bytes),
            Request::Release { allocation } => self.release(client, allocation),
            Request::Share { allocation } => self.share(client, allocation),
            Request::Open { allocation } => self.open(client, allocation),
            Request::Export { allocation } => self.export(client, allocation),
            // The server's business: it knows descriptors.
            Request::Import => Err(Refusal::Invalid),
            Request::MemoryInfo { card } => {
                let card = self.card(card)?;
                Ok(Reply::MemoryInfo {
                    free_bytes: card.ledger.free_bytes(),
                    total_bytes: card.ledger.usable_bytes(),
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

    fn create_context(&mut self, client: ClientId, index: CardIndex) -> Result<Reply, Refusal> {
        let card = self.card_mut(index)?;
        card.ledger.take(card.model.memory.context_bytes)?;
        let context = ContextId(self.id());
        let pid = self.clients.get(&client).map_or(0, |client| client.pid);
        self.card_mut(index)?.engine.add_context(context);
        self.contexts.insert(
            context,
            Context {
                client,
                card: index,
            },
        );
        self.account_start(index, pid);
        Ok(Reply::ContextCreated { context })
    }

    fn destroy_context(&mut self, id: ContextId) {
        let Some(context) = self.contexts.remove(&id) else {
            return;
        };
        let busy = self
            .card(context.card)
            .map_or(0, |card| card.engine.usage(id).1);
        let pid_of = |client: &ClientId| self.clients.get(client).map(|client| client.pid);
        let pid = pid_of(&context.client).unwrap_or(0);
        let others =
            |other: &Context| other.card == context.card && pid_of(&other.client) == Some(pid);
        let is_last = !self.contexts.values().any(others);
        self.account_end(context.card, pid, busy, is_last);
        self.let_go_all(Holder::Context(id));
        let away = self.is_away(context.client);
        if let Ok(card) = self.card_mut(context.card) {
            if !away {
                card.ledger.give_back(card.model.memory.context_bytes);
            }
            card.engine.remove_context(id);
            card.partitions.leave(id);
        }
    }

    fn card_state(&self, index: CardIndex) -> Result<Reply, Refusal> {
        let card = self.card(index)?;
        let figures = card.sensors();
        Ok(Reply::CardState(Box::new(CardState {
            used_bytes: card.ledger.taken_bytes(),
            processes: self.processes(index),
            utilization: figures.utilization,
            temperature_celsius: figures.temperature_celsius,
            power_milliwatts: figures.power_milliwatts,
            energy_millijoules: figures.energy_millijoules,
            graphics_mhz: card.model.clocks_mhz.graphics,
            mig_enabled: card.partitions.is_enabled(),
            unsupported: card.faults.unsupported.clone(),
        })))
    }

    /// Processes with a context or memory on a card, by PID.
    fn processes(&self, index: CardIndex) -> Vec<ProcessState> {
        let mut used: BTreeMap<(u32, Option<InstanceId>), u64> = BTreeMap::new();
        for (id, context) in &self.contexts {
            if context.card != index || self.is_away(context.client) {
                continue;
            }
            let Some(client) = self.clients.get(&context.client) else {
                continue;
            };
            let instance = self.card(index).ok();
            let instance = instance.and_then(|card| card.partitions.instance_of(*id));
            *used.entry((client.pid, instance)).or_default() += self.context_bytes(*id, context);
        }
        for (client, bytes) in self.bytes_by_client(index) {
            let instance = self.instance_of_client(client, index);
            if let Some(client) = self.clients.get(&client) {
                *used.entry((client.pid, instance)).or_default() += bytes;
            }
        }
        let state = |((pid, instance), used_bytes)| ProcessState {
            pid,
            used_bytes,
            instance,
        };
        used.into_iter().map(state).collect()
    }

    fn own_context(&self, client: ClientId, context: ContextId) -> Result<&Context, Refusal> {
        self.contexts
            .get(&context)
            .filter(|context| context.client == client)
            .ok_or(Refusal::NotFound)
    }

    fn card(&self, index: CardIndex) -> Result<&Card, Refusal> {
        let index = usize::try_from(index.0).map_err(|_| Refusal::NotFound)?;
        self.cards.get(index).ok_or(Refusal::NotFound)
    }

    fn card_mut(&mut self, index: CardIndex) -> Result<&mut Card, Refusal> {
        let index = usize::try_from(index.0).map_err(|_| Refusal::NotFound)?;
        self.cards.get_mut(index).ok_or(Refusal::NotFound)
    }

    fn id(&mut self) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        id
    }
}

#[cfg(test)]
mod tests;
