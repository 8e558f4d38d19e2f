//! One context: its streams and running kernels.

use std::collections::{BTreeMap, VecDeque};

use crate::protocol::{ContextId, Nanos, Work};

use super::Outcome;
use super::time_slicing::Part;

#[derive(Debug, Default)]
pub(super) struct Context {
    /// The whole GPU or an instance.
    pub(super) part: Part,
    pub(super) streams: BTreeMap<u32, Stream>,
    /// Running kernels by stream.
    pub(super) running: BTreeMap<u32, Running>,
    pub(super) kernels: u64,
    pub(super) busy: Nanos,
}

#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Item>,
    completed: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) ticket: u64,
    /// Position among all submissions to this GPU.
    pub(super) order: u64,
    pub(super) work: Work,
    /// Whether the host call was announced.
    pub(super) announced: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub(super) left: Nanos,
    pub(super) multiprocessors: u32,
}

impl Context {
    /// Multiprocessors occupied by running kernels.
    pub(super) fn occupied(&self) -> u32 {
        let running = self.running.values();
        running.map(|running| running.multiprocessors).sum()
    }

    /// Reports that the host function at the head of a stream has returned.
    pub(super) fn host_done(&mut self, stream: u32, ticket: u64) {
        let Some(stream) = self.streams.get_mut(&stream) else {
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
            // Becomes a satisfied wait.
            *work = Work::Wait {
                stream: 0,
                ticket: 0,
            };
        }
    }

    /// Completes finished kernels at stream heads. Returns whether there were any.
    pub(super) fn complete_kernels(&mut self, id: ContextId, outcomes: &mut Vec<Outcome>) -> bool {
        let mut any = false;
        let (streams, kernels) = (&mut self.streams, &mut self.kernels);
        self.running.retain(|stream, running| {
            if running.left > 0 {
                return true;
            }
            if let Some(queue) = streams.get_mut(stream) {
                queue.finish_head(id, *stream, outcomes);
                *kernels += 1;
                any = true;
            }
            false
        });
        any
    }

    /// Whether the context competes for its part.
    pub(super) fn wants(&self) -> bool {
        self.runs() || self.records()
    }

    /// Whether a stream has reached an event.
    pub(super) fn records(&self) -> bool {
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

    pub(super) fn runs(&self) -> bool {
        !self.running.is_empty()
    }

    /// Starts kernels at stream heads, oldest first, while multiprocessors are free.
    pub(super) fn start_kernels(&mut self, available: u32) -> bool {
        let mut left = available.saturating_sub(self.occupied());
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
                candidates.push((
                    *order,
                    slot,
                    *nanos,
                    (*multiprocessors).clamp(1, available.max(1)),
                ));
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
                // Blocks are placed in order: a later kernel does not overtake.
                left = 0;
            }
        }
        timeless
    }

    /// Completes satisfied waits and events, and announces host calls.
    pub(super) fn complete_timeless(
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
    pub(super) fn finish_head(
        &mut self,
        context: ContextId,
        stream: u32,
        outcomes: &mut Vec<Outcome>,
    ) {
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
