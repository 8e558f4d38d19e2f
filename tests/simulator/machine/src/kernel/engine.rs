//! The compute side of one card in simulated time: time slices between contexts, streams that
//! overlap by the multiprocessors they need, copy engines, and how busy all of that was.
//!
//! Pure and deterministic: time only moves in [`Engine::advance`]. The daemon moves it with the
//! clock; a controller's test can move it as fast as it likes.
//!
//! Model. A context holds its part of the card for a time slice, or until it has nothing to run;
//! then the next one in order of creation does. The part is all of the card, or in MIG mode a
//! compute instance; parts run side by side, each on multiprocessors of its own. Within the holder
//! the first work of every stream is a candidate; kernels start in order of submission as long as
//! multiprocessors are left, run at full speed, and stop progressing while another context holds
//! the part; events are reached while no other one is running. Copies between host and card use one
//! engine per direction and GPU instance, whoever holds the part. Nothing else takes time.

use std::collections::{BTreeMap, VecDeque};

use crate::protocol::{ContextId, InstanceId};

use super::Nanos;

mod context;
mod samples;
mod turns;
mod work;

use context::{Context, Item};
use samples::{Busy, Samples};
pub use samples::{Counters, SAMPLE_PERIOD, Sample};
use turns::{Part, Turns};
pub use work::{Direction, Outcome, Work};

/// The compute side of one card.
#[derive(Debug)]
pub struct Engine {
    multiprocessors: u32,
    slice: Nanos,
    now: Nanos,
    contexts: BTreeMap<ContextId, Context>,
    /// All of the card, and the instances that contexts run in.
    parts: BTreeMap<Part, Turns>,
    /// By GPU instance.
    copies: BTreeMap<(Option<u32>, Direction), Copy>,
    next_order: u64,
    samples: Samples,
}

#[derive(Clone, Copy, Debug)]
struct Copy {
    context: ContextId,
    stream: u32,
    end: Nanos,
}

impl Engine {
    /// An idle card.
    #[must_use]
    pub fn new(multiprocessors: u32, slice: Nanos, now: Nanos) -> Self {
        let multiprocessors = multiprocessors.max(1);
        Self {
            multiprocessors,
            slice,
            now,
            contexts: BTreeMap::new(),
            parts: BTreeMap::from([(None, Turns::new(multiprocessors, slice))]),
            copies: BTreeMap::new(),
            next_order: 0,
            samples: Samples::new(now),
        }
    }

    /// Adds a context, which runs on all of the card.
    pub fn add_context(&mut self, context: ContextId) {
        self.contexts.entry(context).or_default();
    }

    /// Lets a context that has nothing to run yet run in an instance with so many multiprocessors.
    pub fn enter(&mut self, context: ContextId, instance: InstanceId, multiprocessors: u32) {
        if let Some(entering) = self.contexts.get_mut(&context) {
            entering.part = Some(instance);
            let turns = Turns::new(multiprocessors.min(self.multiprocessors), self.slice);
            self.parts.entry(Some(instance)).or_insert(turns);
        }
    }

    /// Removes a context with everything it had to do.
    pub fn remove_context(&mut self, context: ContextId) {
        let removed = self.contexts.remove(&context);
        self.copies.retain(|_, copy| copy.context != context);
        for turns in self.parts.values_mut() {
            turns.forget(context);
        }
        if let Some(Context {
            part: Some(left), ..
        }) = removed
            && !self.contexts.values().any(|other| other.part == Some(left))
        {
            self.parts.remove(&Some(left));
        }
    }

    /// The engine's time.
    #[must_use]
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// For how long any kernel was running so far.
    #[must_use]
    pub fn busy(&self) -> Nanos {
        self.samples.of(None).busy
    }

    /// What all of the card, or one GPU instance, has done so far.
    #[must_use]
    pub fn counters(&self, gpu: Option<u32>) -> Counters {
        self.samples.of(gpu)
    }

    /// How many kernels a context completed, and for how long it held its part with one running.
    #[must_use]
    pub fn usage(&self, context: ContextId) -> (u64, Nanos) {
        self.contexts
            .get(&context)
            .map_or((0, 0), |context| (context.kernels, context.busy))
    }

    /// Closed sampling periods, oldest first.
    #[must_use]
    pub fn samples(&self) -> &VecDeque<Sample> {
        self.samples.closed()
    }

    /// Appends work to a stream, at the current time. Tickets of a stream must rise. False when
    /// there is no such context or the stream holds more than any program has in flight.
    #[must_use]
    pub fn submit(&mut self, context: ContextId, stream: u32, ticket: u64, work: Work) -> bool {
        const MOST: usize = 1 << 16;
        let order = self.next_order;
        let Some(context) = self.contexts.get_mut(&context) else {
            return false;
        };
        let queue = &mut context.streams.entry(stream).or_default().queue;
        if queue.len() >= MOST {
            return false;
        }
        self.next_order += 1;
        queue.push_back(Item {
            ticket,
            order,
            work,
            announced: false,
        });
        true
    }

    /// The host function at the head of a stream has run.
    pub fn host_done(&mut self, context: ContextId, stream: u32, ticket: u64) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.host_done(stream, ticket);
        }
    }

    /// Moves time forward and reports what happened, in order. Earlier times do nothing.
    pub fn advance(&mut self, to: Nanos, outcomes: &mut Vec<Outcome>) {
        loop {
            self.settle(outcomes);
            let step = self.next_change().map_or(to, |next| next.min(to));
            if step <= self.now {
                return;
            }
            self.pass(step);
        }
    }

    /// When something will change by itself, if nothing is submitted.
    #[must_use]
    pub fn next_change(&self) -> Option<Nanos> {
        let copies = self.copies.values().map(|copy| copy.end);
        let parts = self.parts.iter();
        let held = parts.filter_map(|(part, turns)| {
            let holder = turns.holder()?;
            let running = self.contexts.get(&holder)?.running.values();
            let shortest = running.map(|running| running.left).min()?;
            let end = self.now.saturating_add(shortest);
            Some(match self.wanting(*part).any(|other| other != holder) {
                true => end.min(turns.slice_end().max(self.now)),
                false => end,
            })
        });
        copies.chain(held).min()
    }

    /// Contexts of a part that have something to run, in order of creation.
    fn wanting(&self, part: Part) -> impl Iterator<Item = ContextId> {
        let contexts = self.contexts.iter();
        let wanting = contexts.filter(move |(_, context)| context.part == part && context.wants());
        wanting.map(|(id, _)| *id)
    }

    /// Lets time pass in which nothing changes but what is left of running work.
    fn pass(&mut self, to: Nanos) {
        let length = to - self.now;
        let mut busy = Vec::new();
        for (part, turns) in &self.parts {
            if let Some(holder) = turns.holder()
                && let Some(context) = self.contexts.get_mut(&holder)
                && !context.running.is_empty()
            {
                for running in context.running.values_mut() {
                    running.left = running.left.saturating_sub(length);
                }
                context.busy += length;
                busy.push(Busy {
                    context: holder,
                    gpu: part.map(|instance| instance.gpu),
                    occupied: context.occupied(),
                    // A whole card with anything to run counts as busy, an instance for its part.
                    share: part.map_or(self.multiprocessors, |_| turns.multiprocessors),
                });
            }
        }
        self.samples
            .account(self.now, to, self.multiprocessors, &busy);
        self.now = to;
    }

    /// Completes what is done, starts what can start and hands the parts over, until nothing more
    /// changes at this time.
    fn settle(&mut self, outcomes: &mut Vec<Outcome>) {
        let mut rounds: u32 = 0;
        loop {
            while self.complete(outcomes) | self.start() {
                rounds += 1;
                // Each completes something, of which there is an end.
                debug_assert!(rounds < 1 << 24, "the engine does not settle");
            }
            let parts: Vec<Part> = self.parts.keys().copied().collect();
            for part in parts {
                let wanting: Vec<ContextId> = self.wanting(part).collect();
                if let Some(turns) = self.parts.get_mut(&part) {
                    turns.hand_over(self.now, &wanting);
                }
            }
            // A new holder may have come to an event first.
            let holders = self.parts.values().filter_map(Turns::holder);
            let mut holders = holders.filter_map(|holder| self.contexts.get(&holder));
            if !holders.any(Context::records) {
                return;
            }
        }
    }

    /// Takes finished and timeless work from the heads of streams. True when there was any.
    fn complete(&mut self, outcomes: &mut Vec<Outcome>) -> bool {
        let now = self.now;
        let mut any = false;
        self.copies.retain(|_, copy| {
            let done = copy.end <= now;
            let context = self.contexts.get_mut(&copy.context);
            if done
                && let Some(stream) =
                    context.and_then(|context| context.streams.get_mut(&copy.stream))
            {
                stream.finish_head(copy.context, copy.stream, outcomes);
                any = true;
            }
            !done
        });
        // The time of an event is written by what runs kernels, so in the turn of its context.
        let holders = self.parts.iter();
        let holders = holders.filter_map(|(part, turns)| Some((*part, turns.holder()?)));
        let runs = |holder: &ContextId| self.contexts.get(holder).is_some_and(Context::runs);
        let runners: BTreeMap<Part, ContextId> =
            holders.filter(|(_, holder)| runs(holder)).collect();
        for (&id, context) in &mut self.contexts {
            any |= context.complete_kernels(id, outcomes);
            let runner = runners.get(&context.part);
            let has_turn = runner.is_none_or(|runner| *runner == id);
            any |= context.complete_timeless(id, now, has_turn, outcomes);
        }
        any
    }

    /// Starts kernels and copies. True when one was started that takes no time.
    fn start(&mut self) -> bool {
        let mut timeless = false;
        for (id, context) in &mut self.contexts {
            let turns = self.parts.get(&context.part);
            timeless |= context.start_kernels(turns.map_or(0, |turns| turns.multiprocessors));
            let gpu = context.part.map(|instance| instance.gpu);
            for (&slot, stream) in &context.streams {
                if let Some(Item {
                    work: Work::Copy { nanos, direction },
                    ..
                }) = stream.queue.front()
                {
                    let busy = self
                        .copies
                        .values()
                        .any(|copy| (copy.context, copy.stream) == (*id, slot));
                    if !busy && !self.copies.contains_key(&(gpu, *direction)) {
                        let copy = Copy {
                            context: *id,
                            stream: slot,
                            end: self.now.saturating_add(*nanos),
                        };
                        self.copies.insert((gpu, *direction), copy);
                        timeless |= *nanos == 0;
                    }
                }
            }
        }
        timeless
    }
}

#[cfg(test)]
mod tests;
