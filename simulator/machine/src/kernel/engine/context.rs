//! One context: its streams and running kernels.

use std::collections::{BTreeMap, VecDeque};

use crate::protocol::{ContextId, Nanos, Work};

use super::Outcome;
use super::time_slicing::Part;

#[derive(Debug, Default)]
pub(super) struct Context {
    /// The whole GPU or an instance.
    pub(super) part: Part,
    /// The MPS server whose client the context is.
    pub(super) membership: Option<Membership>,
    pub(super) streams: BTreeMap<u32, Stream>,
    /// Running kernels by stream.
    pub(super) running: BTreeMap<u32, Running>,
    pub(super) kernels: u64,
    pub(super) busy: Nanos,
}

/// Place of a context among those of an MPS server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Membership {
    /// Context of the server: its time slices are those of all clients.
    pub(super) leader: ContextId,
    /// Most multiprocessors of the context's kernels.
    pub(super) multiprocessors: u32,
}

/// A kernel at the head of a stream that does not run yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    /// Position among all submissions to the GPU.
    pub(super) order: u64,
    pub(super) context: ContextId,
    pub(super) stream: u32,
    pub(super) nanos: Nanos,
    pub(super) multiprocessors: u32,
}

#[derive(Debug, Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Item>,
    completed: u64,
    /// End of the last event.
    blocked_until: Nanos,
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
    pub(super) fn wants(&self, now: Nanos) -> bool {
        self.runs() || self.records(now) || self.unblocks_at(now).is_some()
    }

    /// Time at which an event ends that delays work.
    pub(super) fn unblocks_at(&self, now: Nanos) -> Option<Nanos> {
        let streams = self.streams.values();
        let blocked =
            streams.filter(|stream| stream.blocked_until > now && !stream.queue.is_empty());
        blocked.map(|stream| stream.blocked_until).min()
    }

    /// Whether a stream has reached an event.
    pub(super) fn records(&self, now: Nanos) -> bool {
        self.streams.values().any(|stream| {
            matches!(
                stream.head(now),
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

    /// The context whose time slices this one runs in: its own, or those of its MPS server.
    pub(super) fn holder(&self, id: ContextId) -> ContextId {
        self.membership.map_or(id, |membership| membership.leader)
    }

    /// Kernels at stream heads that do not run yet.
    pub(super) fn candidates(&self, id: ContextId, now: Nanos) -> impl Iterator<Item = Candidate> {
        self.streams.iter().filter_map(move |(&slot, stream)| {
            let Some(Item {
                order,
                work:
                    Work::Kernel {
                        nanos,
                        multiprocessors,
                    },
                ..
            }) = stream.head(now)
            else {
                return None;
            };
            (!self.running.contains_key(&slot)).then_some(Candidate {
                order: *order,
                context: id,
                stream: slot,
                nanos: *nanos,
                multiprocessors: *multiprocessors,
            })
        })
    }

    /// Drops all work.
    pub(super) fn cancel(&mut self) {
        self.streams.clear();
        self.running.clear();
    }

    /// Completes satisfied waits and events, and announces host calls.
    pub(super) fn complete_timeless(
        &mut self,
        id: ContextId,
        now: Nanos,
        has_turn: bool,
        event_time: Nanos,
        outcomes: &mut Vec<Outcome>,
    ) -> bool {
        let mut any = false;
        let slots: Vec<u32> = self.streams.keys().copied().collect();
        for slot in slots {
            while let Some(Item { work, .. }) = self.head(slot, now) {
                let mut blocked_until = 0;
                match work {
                    Work::Wait {
                        stream,
                        ticket: awaited,
                    } if self.completed(stream) >= awaited => {}
                    Work::Record { event, recording } if has_turn => {
                        blocked_until = now.saturating_add(event_time);
                        outcomes.push(Outcome::Recorded {
                            context: id,
                            event,
                            recording,
                            at: now,
                        });
                    }
                    Work::Host => {
                        self.announce(id, slot, outcomes);
                        break;
                    }
                    _ => break,
                }
                if let Some(stream) = self.streams.get_mut(&slot) {
                    stream.finish_head(id, slot, outcomes);
                    stream.blocked_until = stream.blocked_until.max(blocked_until);
                }
                any = true;
            }
        }
        any
    }

    fn head(&self, slot: u32, now: Nanos) -> Option<Item> {
        self.streams.get(&slot)?.head(now).copied()
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
    /// The first work, unless an event delays it.
    pub(super) fn head(&self, now: Nanos) -> Option<&Item> {
        let head = self.queue.front();
        head.filter(|_| self.blocked_until <= now)
    }

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
