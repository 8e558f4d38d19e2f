//! Memory that several processes use: made available to others, or opened of theirs, pointer by pointer.
//!
//! What lives on with another process is not always the allocation but the chunk of a pool, or the block, that it lies
//! in, so those are counted, each once however much of it is shared.

use crate::held::{Held, HeldMap};

/// Shared allocations and their chunks. All zeroes is none.
pub(crate) struct SharedChunks {
    /// By pointer; `bytes` is how often, `context` the chunk.
    pointers: HeldMap,
    /// By address; `context` is how many pointers.
    chunks: HeldMap,
}

/// What an allocation lies in: a chunk of a pool, a block, or memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl SharedChunks {
    /// Whether the pointer is shared.
    pub(crate) fn has(&self, pointer: u64) -> bool {
        self.pointers.get(pointer).is_some()
    }

    /// Notes that a pointer into a chunk of that card is shared once more. `true` if it is the first one into it. The
    /// caller excludes others that note something.
    pub(crate) fn add(&self, pointer: u64, card: u8, chunk: Chunk) -> bool {
        let once_more = |held: &Held| {
            Some(Held {
                bytes: held.bytes.saturating_add(1),
                ..*held
            })
        };
        if self.pointers.change(pointer, once_more).is_some() {
            return false;
        }
        let first = Held {
            bytes: 1,
            card,
            context: chunk.address,
        };
        self.pointers.insert(pointer, first);
        self.add_to_chunk(card, chunk)
    }

    fn add_to_chunk(&self, card: u8, chunk: Chunk) -> bool {
        let one_more = |held: &Held| {
            Some(Held {
                context: held.context.saturating_add(1),
                ..*held
            })
        };
        if self.chunks.change(chunk.address, one_more).is_some() {
            return false;
        }
        let first = Held {
            bytes: chunk.bytes,
            card,
            context: 1,
        };
        self.chunks.insert(chunk.address, first);
        true
    }

    /// Notes that a pointer is shared no more, or once less. Returns its chunk if no other pointer into that is. The
    /// caller excludes others that note something.
    pub(crate) fn remove(&self, pointer: u64) -> Option<Held> {
        let times = self.pointers.change(pointer, |held| {
            let bytes = held.bytes.saturating_sub(1);
            Some(Held { bytes, ..*held }).filter(|left| left.bytes != 0)
        })?;
        if times.bytes > 1 {
            return None;
        }
        let chunk = self.chunks.change(times.context, |held| {
            let context = held.context.saturating_sub(1);
            Some(Held { context, ..*held }).filter(|left| left.context != 0)
        })?;
        (chunk.context <= 1).then_some(chunk)
    }
}
