//! Allocations of pools that several processes use: made available to others, or imported from them.
//!
//! What lives on with another process is not the allocation but the chunk that it lies in, so chunks are counted, each
//! once however many of its allocations are shared.

use crate::held::{Held, HeldMap};

/// Shared allocations and their chunks. All zeroes is none.
pub(crate) struct SharedChunks {
    /// By pointer; `bytes` is how often, `context` the chunk.
    pointers: HeldMap,
    /// By address; `context` is how many pointers.
    chunks: HeldMap,
}

/// A chunk of a pool, or of what may be one.
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
    /// caller holds the process's guard.
    pub(crate) fn add(&self, pointer: u64, card: u8, chunk: Chunk) -> bool {
        let before = self.pointers.remove(pointer);
        let times = before.map_or(0, |held| held.bytes).saturating_add(1);
        let context = before.map_or(chunk.address, |held| held.context);
        let held = Held {
            bytes: times,
            card,
            context,
        };
        self.pointers.insert(pointer, held);
        before.is_none() && self.add_to_chunk(card, chunk)
    }

    fn add_to_chunk(&self, card: u8, chunk: Chunk) -> bool {
        let before = self.chunks.remove(chunk.address);
        let held = before.unwrap_or(Held {
            bytes: chunk.bytes,
            card,
            context: 0,
        });
        let more = Held {
            context: held.context.saturating_add(1),
            ..held
        };
        self.chunks.insert(chunk.address, more);
        before.is_none()
    }

    /// Notes that a pointer is shared no more, or once less. Returns its chunk if no other pointer into that is. The
    /// caller holds the process's guard.
    pub(crate) fn remove(&self, pointer: u64) -> Option<Held> {
        let held = self.pointers.remove(pointer)?;
        let times = held.bytes.saturating_sub(1);
        if times != 0 {
            let left = Held {
                bytes: times,
                ..held
            };
            self.pointers.insert(pointer, left);
            return None;
        }
        let chunk = self.chunks.remove(held.context)?;
        let pointers = chunk.context.saturating_sub(1);
        if pointers == 0 {
            return Some(chunk);
        }
        let left = Held {
            context: pointers,
            ..chunk
        };
        self.chunks.insert(held.context, left);
        None
    }
}
