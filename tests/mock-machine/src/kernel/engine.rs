//! The compute side of one card in simulated time: time slices between contexts, streams that
//! overlap by the multiprocessors they need, copy engines, and how busy all of that was.
//!
//! Pure and deterministic: time only moves in [`Engine::advance`]. The daemon moves it with the
//! clock; a controller's test can move it as fast as it likes.
//!
//! Model. A context holds the card for a time slice, or until it has nothing to run; then the next
//! one in order of creation does. Within the holder the first work of every stream is a candidate;
//! kernels start in order of submission as long as multiprocessors are left, run at full speed, and
//! stop progressing while another context holds the card; events are reached while no other one is
//! running. Copies between host and card use one engine per direction, whoever holds the card.
//! Nothing else takes time.

use std::collections::{BTreeMap, VecDeque};

use crate::protocol::ContextId;

use super::Nanos;

mod samples;

use samples::Samples;
pub use samples::{SAMPLE_PERIOD, Sample};

/// Which way a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    /// From the host to the card.
    ToCard,
    /// From the card to the host.
    ToHost,
}

/// One piece of work of a stream. Work of one stream is done in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Occupies multiprocessors for a while.
    Kernel {
        /// How long, when it has the card.
        nanos: Nanos,
        /// How many it needs; at least 1, and at most what the card has.
        multiprocessors: u32,
    },
    /// Occupies a copy engine for a while.
    Copy {
        /// How long.
        nanos: Nanos,
        /// Which engine.
        direction: Direction,
    },
    /// Waits until another stream of the context has completed a ticket.
    Wait {
        /// The other stream.
        stream: u32,
        /// Its ticket.
        ticket: u64,
    },
    /// Notes the time in an event.
    Record {
        /// Which event.
        event: u32,
        /// How often it was recorded, this time included.
        recording: u64,
    },
    /// Waits until the program has run a host function.
    Host,
}

/// What happened while time passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A stream completed everything up to a ticket.
    Completed {
        /// Whose.
        context: ContextId,
        /// Which stream.
        stream: u32,
        /// Up to where.
        ticket: u64,
    },
    /// An event was reached.
    Recorded {
        /// Whose.
        context: ContextId,
        /// Which event.
        event: u32,
        /// Which recording.
        recording: u64,
        /// When.
        at: Nanos,
    },
    /// A host function is to be run, then [`Engine::host_done`] called.
    HostCall {
        /// Whose.
        context: ContextId,
        /// Which stream waits for it.
        stream: u32,
        /// The work's ticket.
        ticket: u64,
    },
}

/// End of the slice of a holder that has nothing to do.
const IDLE: Nanos = 0;

/// The compute side of one card.
#[derive(Debug)]
pub struct Engine {
    multiprocessors: u32,
    slice: Nanos,
    now: Nanos,
    contexts: BTreeMap<ContextId, Context>,
    /// Who holds the card, and until when others have to wait.
    holder: Option<(ContextId, Nanos)>,
    copies: BTreeMap<Direction, Copy>,
    next_order: u64,
    samples: Samples,
    busy: Nanos,
}

#[derive(Debug, Default)]
struct Context {
    streams: BTreeMap<u32, Stream>,
    /// Kernels that have started, by stream.
    running: BTreeMap<u32, Running>,
    kernels: u64,
    busy: Nanos,
}

#[derive(Debug, Default)]
struct Stream {
    queue: VecDeque<Item>,
    completed: u64,
}

#[derive(Clone, Copy, Debug)]
struct Item {
    ticket: u64,
    /// Position among all submissions to this card.
    order: u64,
    work: Work,
    /// Whether a host call for it was announced.
    announced: bool,
}

#[derive(Clone, Copy, Debug)]
struct Running {
    left: Nanos,
    multiprocessors: u32,
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
        Self {
            multiprocessors: multiprocessors.max(1),
            slice: slice.max(1),
            now,
            contexts: BTreeMap::new(),
            holder: None,
            copies: BTreeMap::new(),
            next_order: 0,
            samples: Samples::new(now),
            busy: 0,
        }
    }

    /// Adds a context.
    pub fn add_context(&mut self, context: ContextId) {
        self.contexts.entry(context).or_default();
    }

    /// Removes a context with everything it had to do.
    pub fn remove_context(&mut self, context: ContextId) {
        self.contexts.remove(&context);
        self.copies.retain(|_, copy| copy.context != context);
        if self.holder.is_some_and(|(holder, _)| holder == context) {
            self.holder = None;
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
        self.busy
    }

    /// How many kernels a context completed, and for how long it held the card with one running.
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
        let streams = self
            .contexts
            .get_mut(&context)
            .map(|context| &mut context.streams);
        let Some(stream) = streams.and_then(|streams| streams.get_mut(&stream)) else {
            return;
        };
        if let Some(Item {
            ticket: head,
            work: work @ Work::Host,
            announced: true,
            ..
        }) = stream.queue.front_mut()
            && *head == ticket
        {
            // Becomes a wait that is over.
            *work = Work::Wait {
                stream: 0,
                ticket: 0,
            };
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
        let held = self.holder.and_then(|(holder, slice_end)| {
            let shortest = self
                .contexts
                .get(&holder)?
                .running
                .values()
                .map(|running| running.left)
                .min()?;
            let end = self.now.saturating_add(shortest);
            Some(if self.others_wait(holder) {
                end.min(slice_end.max(self.now))
            } else {
                end
            })
        });
        copies.chain(held).min()
    }

    /// Lets time pass in which nothing changes but what is left of running work.
    fn pass(&mut self, to: Nanos) {
        let length = to - self.now;
        let mut busy = None;
        if let Some((holder, _)) = self.holder
            && let Some(context) = self.contexts.get_mut(&holder)
            && !context.running.is_empty()
        {
            for running in context.running.values_mut() {
                running.left = running.left.saturating_sub(length);
            }
            context.busy += length;
            self.busy += length;
            busy = Some(holder);
        }
        self.samples.account(self.now, to, busy);
        self.now = to;
    }

    /// Completes what is done, starts what can start and hands the card over, until nothing more
    /// changes at this time.
    fn settle(&mut self, outcomes: &mut Vec<Outcome>) {
        let mut rounds: u32 = 0;
        loop {
            while self.complete(outcomes) | self.start() {
                rounds += 1;
                // Each completes something, of which there is an end.
                debug_assert!(rounds < 1 << 24, "the engine does not settle");
            }
            self.hand_over();
            // A new holder may have come to an event first.
            let holder = self
                .holder
                .and_then(|(holder, _)| self.contexts.get(&holder));
            if !holder.is_some_and(Context::records) {
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
        let runner = self
            .holder
            .map(|(holder, _)| holder)
            .filter(|holder| self.contexts.get(holder).is_some_and(Context::runs));
        for (&id, context) in &mut self.contexts {
            let running = &mut context.running;
            let kernels = &mut context.kernels;
            running.retain(|stream, running| {
                if running.left > 0 {
                    return true;
                }
                if let Some(queue) = context.streams.get_mut(stream) {
                    queue.finish_head(id, *stream, outcomes);
                    *kernels += 1;
                    any = true;
                }
                false
            });
            let has_turn = runner.is_none_or(|runner| runner == id);
            any |= context.complete_timeless(id, now, has_turn, outcomes);
        }
        any
    }

    /// Starts kernels and copies. True when one was started that takes no time.
    fn start(&mut self) -> bool {
        let mut timeless = false;
        for (id, context) in &mut self.contexts {
            timeless |= context.start_kernels(self.multiprocessors);
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
                    if !busy && !self.copies.contains_key(direction) {
                        let end = self.now.saturating_add(*nanos);
                        self.copies.insert(
                            *direction,
                            Copy {
                                context: *id,
                                stream: slot,
                                end,
                            },
                        );
                        timeless |= *nanos == 0;
                    }
                }
            }
        }
        timeless
    }

    /// Gives the card to whoever should have it now.
    fn hand_over(&mut self) {
        if let Some((holder, slice_end)) = self.holder
            && slice_end != IDLE
            && self.contexts.get(&holder).is_some_and(Context::wants)
        {
            if self.now < slice_end {
                return;
            }
            // Had anybody waited at the end of the slice, time would have stopped there.
            if self.now > slice_end || !self.others_wait(holder) {
                let slices = (self.now - slice_end) / self.slice + 1;
                let next_end = slice_end.saturating_add(slices.saturating_mul(self.slice));
                self.holder = Some((holder, next_end));
                return;
            }
        }
        let after = self.holder.map(|(holder, _)| holder);
        let runnable = || {
            self.contexts
                .iter()
                .filter(|(_, context)| context.wants())
                .map(|(id, _)| *id)
        };
        let next = runnable()
            .find(|id| after.is_none_or(|after| *id > after))
            .or_else(|| runnable().next());
        self.holder = match next {
            Some(context) => Some((context, self.now.saturating_add(self.slice))),
            // Nobody: whoever comes after the last holder is first again.
            None => self.holder.map(|(holder, _)| (holder, IDLE)),
        };
    }

    fn others_wait(&self, holder: ContextId) -> bool {
        self.contexts
            .iter()
            .any(|(id, context)| *id != holder && context.wants())
    }
}

impl Context {
    /// Whether it waits for its turn, or has it.
    fn wants(&self) -> bool {
        self.runs() || self.records()
    }

    /// Whether a stream has come to an event.
    fn records(&self) -> bool {
        self.streams.values().any(|stream| {
            matches!(
                stream.queue.front(),
                Some(Item {
                    work: Work::Record { .. },
                    ..
                })
            )
        })
    }

    fn runs(&self) -> bool {
        !self.running.is_empty()
    }

    /// Starts kernels at the heads of streams, oldest first, while multiprocessors are left.
    fn start_kernels(&mut self, available: u32) -> bool {
        let mut left = available.saturating_sub(
            self.running
                .values()
                .map(|running| running.multiprocessors)
                .sum(),
        );
        let mut candidates: Vec<(u64, u32, Nanos, u32)> = Vec::new();
        for (&slot, stream) in &self.streams {
            if let Some(Item {
                order,
                work:
                    Work::Kernel {
                        nanos,
                        multiprocessors,
                    },
                ..
            }) = stream.queue.front()
                && !self.running.contains_key(&slot)
            {
                candidates.push((*order, slot, *nanos, (*multiprocessors).clamp(1, available)));
            }
        }
        candidates.sort_unstable();
        let mut timeless = false;
        for (_, slot, nanos, multiprocessors) in candidates {
            if nanos == 0 {
                self.running.insert(
                    slot,
                    Running {
                        left: 0,
                        multiprocessors: 0,
                    },
                );
                timeless = true;
            } else if multiprocessors <= left {
                left -= multiprocessors;
                self.running.insert(
                    slot,
                    Running {
                        left: nanos,
                        multiprocessors,
                    },
                );
            } else {
                // The card places blocks in order: a later kernel does not overtake.
                left = 0;
            }
        }
        timeless
    }

    /// Waits that are over, events, and host calls to announce.
    fn complete_timeless(
        &mut self,
        id: ContextId,
        now: Nanos,
        has_turn: bool,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let mut any = false;
        let slots: Vec<u32> = self.streams.keys().copied().collect();
        for slot in slots {
            while let Some(Item { work, .. }) = self.head(slot) {
                match work {
                    Work::Wait {
                        stream,
                        ticket: awaited,
                    } if self.completed(stream) >= awaited => {}
                    Work::Record { event, recording } if has_turn => {
                        outcomes.push(Outcome::Recorded {
                            context: id,
                            event,
                            recording,
                            at: now,
                        })
                    }
                    Work::Host => {
                        self.announce(id, slot, outcomes);
                        break;
                    }
                    _ => break,
                }
                if let Some(stream) = self.streams.get_mut(&slot) {
                    stream.finish_head(id, slot, outcomes);
                }
                any = true;
            }
        }
        any
    }

    fn head(&self, slot: u32) -> Option<Item> {
        self.streams.get(&slot)?.queue.front().copied()
    }

    fn completed(&self, slot: u32) -> u64 {
        self.streams.get(&slot).map_or(0, |stream| stream.completed)
    }

    fn announce(&mut self, context: ContextId, slot: u32, outcomes: &mut Vec<Outcome>) {
        let head = self
            .streams
            .get_mut(&slot)
            .and_then(|stream| stream.queue.front_mut());
        if let Some(item) = head
            && !item.announced
        {
            item.announced = true;
            outcomes.push(Outcome::HostCall {
                context,
                stream: slot,
                ticket: item.ticket,
            });
        }
    }
}

impl Stream {
    fn finish_head(&mut self, context: ContextId, stream: u32, outcomes: &mut Vec<Outcome>) {
        if let Some(item) = self.queue.pop_front() {
            self.completed = item.ticket;
            outcomes.push(Outcome::Completed {
                context,
                stream,
                ticket: item.ticket,
            });
        }
    }
}

#[cfg(test)]
mod tests;
