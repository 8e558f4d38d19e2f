//! Time slicing between the contexts of one part of a GPU.

use super::Timing;
use crate::protocol::{ContextId, InstanceId, Nanos};

/// A part of a GPU with its own multiprocessors: a compute instance, or `None` for the whole GPU.
/// Parts run concurrently.
pub(super) type Part = Option<InstanceId>;

/// End of slice of an idle holder.
const IDLE: Nanos = 0;

/// Time slicing state of one part.
#[derive(Clone, Copy, Debug)]
pub(super) struct TimeSlicing {
    pub(super) multiprocessors: u32,
    timing: Timing,
    /// Holder and end of its time slice.
    holder: Option<(ContextId, Nanos)>,
    /// End of the last switch between contexts.
    resumes_at: Nanos,
    slices: u64,
}

impl TimeSlicing {
    pub(super) fn new(multiprocessors: u32, timing: Timing) -> Self {
        Self {
            multiprocessors: multiprocessors.max(1),
            timing,
            holder: None,
            resumes_at: 0,
            slices: 0,
        }
    }

    /// Time from which the holder runs, after a switch.
    pub(super) fn resumes_at(&self) -> Nanos {
        self.resumes_at
    }

    pub(super) fn holder(&self) -> Option<ContextId> {
        self.holder.map(|(holder, _)| holder)
    }

    /// Removes a context.
    pub(super) fn forget(&mut self, context: ContextId) {
        if self.holder() == Some(context) {
            self.holder = None;
        }
    }

    /// End of the holder's slice if another context waits.
    pub(super) fn slice_end(&self) -> Nanos {
        self.holder.map_or(IDLE, |(_, end)| end)
    }

    /// Selects the holder at `now`; `contexts_with_work` has the contexts with work, in creation order.
    pub(super) fn hand_over(&mut self, now: Nanos, contexts_with_work: &[ContextId]) {
        if let Some((holder, slice_end)) = self.holder
            && slice_end != IDLE
            && contexts_with_work.contains(&holder)
        {
            if now < slice_end {
                return;
            }
            // A context waiting at the end of the slice would have stopped time there.
            if now > slice_end || !contexts_with_work.iter().any(|other| *other != holder) {
                let slice = self.timing.slice.max(1);
                let slices = (now - slice_end) / slice + 1;
                let next_end = slice_end.saturating_add(slices.saturating_mul(slice));
                self.holder = Some((holder, next_end));
                return;
            }
        }
        let after = self.holder();
        let behind = |context: &&ContextId| after.is_none_or(|after| **context > after);
        let next = contexts_with_work
            .iter()
            .find(behind)
            .or(contexts_with_work.first());
        self.holder = match next {
            Some(context) => {
                if after.is_some_and(|after| after != *context) {
                    self.resumes_at = now.saturating_add(self.timing.context_switch);
                }
                self.slices += 1;
                let slice = self.timing.slice_of(self.slices);
                Some((*context, now.max(self.resumes_at).saturating_add(slice)))
            }
            // No context: the successor of the last holder is next.
            None => after.map(|holder| (holder, IDLE)),
        };
    }
}
