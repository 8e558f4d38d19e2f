//! Who has the multiprocessors: contexts of one part of a card take turns.

use crate::protocol::{ContextId, InstanceId};

use super::Nanos;

/// A part of a card with multiprocessors of its own: a compute instance, or none for all of the
/// card. Parts run at the same time.
pub(super) type Part = Option<InstanceId>;

/// End of the slice of a holder that has nothing to do.
const IDLE: Nanos = 0;

/// The turns of one part.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    pub(super) multiprocessors: u32,
    slice: Nanos,
    /// Who holds the part, and until when others have to wait.
    holder: Option<(ContextId, Nanos)>,
}

impl Turns {
    pub(super) fn new(multiprocessors: u32, slice: Nanos) -> Self {
        Self {
            multiprocessors: multiprocessors.max(1),
            slice: slice.max(1),
            holder: None,
        }
    }

    pub(super) fn holder(&self) -> Option<ContextId> {
        self.holder.map(|(holder, _)| holder)
    }

    /// A context is gone.
    pub(super) fn forget(&mut self, context: ContextId) {
        if self.holder() == Some(context) {
            self.holder = None;
        }
    }

    /// Until when the holder cannot lose the part, if somebody else waits for it.
    pub(super) fn slice_end(&self) -> Nanos {
        self.holder.map_or(IDLE, |(_, end)| end)
    }

    /// Gives the part to whoever should have it at `now`; `wanting` are those that have something
    /// to run, in order of creation.
    pub(super) fn hand_over(&mut self, now: Nanos, wanting: &[ContextId]) {
        if let Some((holder, slice_end)) = self.holder
            && slice_end != IDLE
            && wanting.contains(&holder)
        {
            if now < slice_end {
                return;
            }
            // Had anybody waited at the end of the slice, time would have stopped there.
            if now > slice_end || !wanting.iter().any(|other| *other != holder) {
                let slices = (now - slice_end) / self.slice + 1;
                let next_end = slice_end.saturating_add(slices.saturating_mul(self.slice));
                self.holder = Some((holder, next_end));
                return;
            }
        }
        let after = self.holder();
        let behind = |context: &&ContextId| after.is_none_or(|after| **context > after);
        let next = wanting.iter().find(behind).or(wanting.first());
        self.holder = match next {
            Some(context) => Some((*context, now.saturating_add(self.slice))),
            // Nobody: whoever comes after the last holder is first again.
            None => after.map(|holder| (holder, IDLE)),
        };
    }
}
