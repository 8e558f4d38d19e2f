//! Compute engine of one GPU in simulated time: time slices between contexts, concurrent streams,
//! copy engines, busy time.
//!
//! Pure and deterministic: time moves only in [`Engine::advance`]. The daemon advances it with the
//! clock; tests may advance it faster.
//!
//! Model. A context holds its part of the GPU for a time slice or until it is idle; then the next
//! context in creation order holds it. A part is the whole GPU or, in MIG mode, a compute instance;
//! parts run concurrently on their own multiprocessors. Within the holder the first work of every
//! stream is a candidate: kernels start in submission order while multiprocessors are free, run at
//! full speed, and pause while another context holds the part. Events are reached while no other
//! context runs. Copies between host and GPU use one engine per direction and GPU instance,
//! independent of the holder. Nothing else takes time, except what [`Timing`] adds.
//!
//! The clients of an MPS server are one holder: their contexts run in the time slices of the server's context, at the same time,
//! each on at most its part of the multiprocessors. A kernel that would fill more takes longer in proportion.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::protocol::{ContextId, Direction, InstanceId, Nanos, Work};

mod context;
mod outcome;
mod placement;
mod samples;
mod time_slicing;
mod timing;

use context::{Context, Item, Membership};
pub use outcome::Outcome;
use samples::{BusyPart, Samples};
pub use samples::{Counters, SAMPLE_PERIOD, Sample};
use time_slicing::{Part, TimeSlicing};
pub use timing::Timing;

/// Compute engine of one GPU.
#[derive(Debug)]
pub struct Engine {
    multiprocessors: u32,
    timing: Timing,
    now: Nanos,
    contexts: BTreeMap<ContextId, Context>,
    /// The whole GPU, and instances with contexts.
    parts: BTreeMap<Part, TimeSlicing>,
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
    /// Creates an idle engine.
    #[must_use]
    pub fn new(multiprocessors: u32, timing: Timing, now: Nanos) -> Self {
        let multiprocessors = multiprocessors.max(1);
        Self {
            multiprocessors,
            timing,
            now,
            contexts: BTreeMap::new(),
            parts: BTreeMap::from([(None, TimeSlicing::new(multiprocessors, timing))]),
            copies: BTreeMap::new(),
            next_order: 0,
            samples: Samples::new(now),
        }
    }

    /// Adds a context, on the whole GPU.
    pub fn add_context(&mut self, context: ContextId) {
        self.contexts.entry(context).or_default();
    }

    /// Adds a context of a client of an MPS server: it runs in the time slices of `leader`, the server's context, on at most
    /// this number of multiprocessors.
    pub fn add_client(&mut self, context: ContextId, leader: ContextId, multiprocessors: u32) {
        let multiprocessors = multiprocessors.clamp(1, self.multiprocessors);
        self.contexts.entry(context).or_default().membership = Some(Membership {
            leader,
            multiprocessors,
        });
    }

    /// Drops the work of a context.
    pub fn cancel(&mut self, context: ContextId) {
        self.copies.retain(|_, copy| copy.context != context);
        if let Some(context) = self.contexts.get_mut(&context) {
            context.cancel();
        }
    }

    /// Moves an idle context to an instance with this number of multiprocessors.
    pub fn enter(&mut self, context: ContextId, instance: InstanceId, multiprocessors: u32) {
        if let Some(entering) = self.contexts.get_mut(&context) {
            entering.part = Some(instance);
            let turns = TimeSlicing::new(multiprocessors.min(self.multiprocessors), self.timing);
            self.parts.entry(Some(instance)).or_insert(turns);
        }
    }

    /// Removes a context with its queued work.
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

    /// Time with any kernel running.
    #[must_use]
    pub fn busy(&self) -> Nanos {
        self.samples.of(None).busy
    }

    /// Counters of the whole GPU or of one GPU instance.
    #[must_use]
    pub fn counters(&self, gpu_instance: Option<u32>) -> Counters {
        self.samples.of(gpu_instance)
    }

    /// Completed kernels of a context, and the time in which it held its part with a kernel
    /// running.
    #[must_use]
    pub fn usage(&self, context: ContextId) -> (u64, Nanos) {
        self.contexts
            .get(&context)
            .map_or((0, 0), |context| (context.kernels, context.busy))
    }

    /// Returns whether a context has no work.
    #[must_use]
    pub fn is_idle(&self, context: ContextId) -> bool {
        let streams = self.contexts.get(&context).map(|context| &context.streams);
        let mut streams = streams.into_iter().flat_map(BTreeMap::values);
        streams.all(|stream| stream.queue.is_empty())
    }

    /// Closed sampling periods, oldest first.
    #[must_use]
    pub fn samples(&self) -> &VecDeque<Sample> {
        self.samples.closed()
    }

    /// Appends work to a stream at the current time. Tickets of a stream must increase. Returns
    /// false if the context does not exist or the stream holds more work than any program queues.
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

    /// Reports that the host function at the head of a stream has returned.
    pub fn host_done(&mut self, context: ContextId, stream: u32, ticket: u64) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.host_done(stream, ticket);
        }
    }

    /// Advances time and reports outcomes in order. Earlier times have no effect.
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

    /// Time of the next change without submissions.
    #[must_use]
    pub fn next_change(&self) -> Option<Nanos> {
        let copies = self.copies.values().map(|copy| copy.end);
        let contexts = self.contexts.values();
        let blocked = contexts.filter_map(|context| context.unblocks_at(self.now));
        let switches = self.parts.values().map(TimeSlicing::resumes_at);
        let switches = switches.filter(|resumes| *resumes > self.now);
        let parts = self.parts.iter();
        let held = parts.filter_map(|(part, turns)| {
            let holder = turns.holder()?;
            let members = self.members(holder);
            let running = members.flat_map(|(_, context)| context.running.values());
            let shortest = running.map(|running| running.left).min()?;
            let end = turns.resumes_at().max(self.now).saturating_add(shortest);
            Some(
                match self.holders_with_work(*part).any(|other| other != holder) {
                    true => end.min(turns.slice_end().max(self.now)),
                    false => end,
                },
            )
        });
        copies.chain(held).chain(blocked).chain(switches).min()
    }

    /// Holders of a part with work to run, in creation order; a holder with several contexts may be there several times.
    fn holders_with_work(&self, part: Part) -> impl Iterator<Item = ContextId> {
        let contexts = self.contexts.iter();
        let contexts_with_work =
            contexts.filter(move |(_, context)| context.part == part && context.wants(self.now));
        contexts_with_work.map(|(id, context)| context.holder(*id))
    }

    /// The contexts that run in the time slices of a holder.
    fn members(&self, holder: ContextId) -> impl Iterator<Item = (&ContextId, &Context)> {
        let contexts = self.contexts.iter();
        contexts.filter(move |(id, context)| context.holder(**id) == holder)
    }

    /// Advances over a span without changes other than progress of running work.
    fn pass(&mut self, to: Nanos) {
        let length = to - self.now;
        let mut busy = Vec::new();
        for (id, context) in &mut self.contexts {
            let Some(turns) = self.parts.get(&context.part) else {
                continue;
            };
            let has_turn =
                turns.holder() == Some(context.holder(*id)) && turns.resumes_at() <= self.now;
            if !has_turn || context.running.is_empty() {
                continue;
            }
            for running in context.running.values_mut() {
                running.left = running.left.saturating_sub(length);
            }
            context.busy += length;
            busy.push(BusyPart {
                context: *id,
                gpu_instance: context.part.map(|instance| instance.gpu_instance),
                occupied: context.occupied(),
                // The whole GPU counts as busy with any work, an instance with its fraction.
                share: context
                    .part
                    .map_or(self.multiprocessors, |_| turns.multiprocessors),
            });
        }
        self.samples
            .account(self.now, to, self.multiprocessors, &busy);
        self.now = to;
    }

    /// Completes and starts work and hands parts over until nothing changes at this time.
    fn settle(&mut self, outcomes: &mut Vec<Outcome>) {
        let mut rounds: u32 = 0;
        loop {
            while self.complete(outcomes) | self.start() {
                rounds += 1;
                // Terminates: each round completes work.
                debug_assert!(rounds < 1 << 24, "the engine does not settle");
            }
            let parts: Vec<Part> = self.parts.keys().copied().collect();
            for part in parts {
                let holders: BTreeSet<ContextId> = self.holders_with_work(part).collect();
                let holders: Vec<ContextId> = holders.into_iter().collect();
                if let Some(turns) = self.parts.get_mut(&part) {
                    turns.hand_over(self.now, &holders);
                }
            }
            // A new holder may have reached an event first.
            let parts = self.parts.values();
            let running = parts.filter(|turns| turns.resumes_at() <= self.now);
            let holders = running.filter_map(TimeSlicing::holder);
            let mut members = holders.flat_map(|holder| self.members(holder));
            if !members.any(|(_, context)| context.records(self.now)) {
                return;
            }
        }
    }

    /// Completes finished and zero-time work at stream heads. Returns whether there was any.
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
        for (&id, context) in &mut self.contexts {
            any |= context.complete_kernels(id, outcomes);
            // The GPU writes event times, so only while the context holds its part.
            let turns = self.parts.get(&context.part);
            let holder = Some(context.holder(id));
            let has_turn =
                turns.is_none_or(|turns| turns.holder() == holder && turns.resumes_at() <= now);
            let records = has_turn || self.timing.records_out_of_slice;
            any |= context.complete_timeless(id, now, records, self.timing.event, outcomes);
        }
        any
    }

    /// Starts kernels and copies. Returns whether any of them takes no time.
    fn start(&mut self) -> bool {
        let mut timeless = self.start_kernels();
        for (id, context) in &mut self.contexts {
            let gpu_instance = context.part.map(|instance| instance.gpu_instance);
            for (&slot, stream) in &context.streams {
                if let Some(Item {
                    work: Work::Copy { nanos, direction },
                    ..
                }) = stream.head(self.now)
                {
                    let busy = self
                        .copies
                        .values()
                        .any(|copy| (copy.context, copy.stream) == (*id, slot));
                    if !busy && !self.copies.contains_key(&(gpu_instance, *direction)) {
                        let copy = Copy {
                            context: *id,
                            stream: slot,
                            end: self.now.saturating_add(*nanos),
                        };
                        self.copies.insert((gpu_instance, *direction), copy);
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
