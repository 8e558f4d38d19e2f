//! Memory that several processes use: made available to others, or opened of theirs, pointer by pointer.
//!
//! What lives on with another process is not always the allocation but the chunk of a pool, or the block, that it lies
//! in, so those are counted, each once however much of it is shared.

use core::sync::atomic::AtomicU32;

use crate::charge_map::{Charge, ChargeMap};
use crate::guard::Guard;

/// Shared allocations and their chunks. All zeroes is none.
pub(crate) struct SharedChunks {
    guard: AtomicU32,
    /// By pointer; `bytes` is how often, `context` the chunk.
    pointers: ChargeMap,
    /// By address; `context` is how many pointers.
    chunks: ChargeMap,
    /// By pointer; `context` is the one with whose end it is shared no more, if there is one.
    contexts: ChargeMap,
}

/// A pointer into memory that is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) pointer: u64,
    /// Index of the card's first share.
    pub(crate) card: u8,
    pub(crate) chunk: Chunk,
    /// With whose end it is shared no more, 0 if with none's.
    pub(crate) context: u64,
}

/// What an allocation lies in: a chunk of a pool, a block, or memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl SharedChunks {
    /// Whether the pointer is shared.
    pub(crate) fn contains(&self, pointer: u64) -> bool {
        self.pointers.get(pointer).is_some()
    }

    /// Notes that a pointer into a chunk of that card is shared once more, if it is the first one into it once `pay` has
    /// paid for that. `false` if it could not.
    ///
    /// Others that share the same wait meanwhile: they have it for nothing only if it is paid for.
    pub(crate) fn add(&self, shared: Shared, pay: impl FnOnce(u64) -> bool) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let is_paid = !self.note(shared) || pay(shared.chunk.bytes);
        if !is_paid {
            self.forget(shared.pointer);
        }
        is_paid
    }

    /// As [`SharedChunks::add`], of what is shared once however often that is said, and costs nothing.
    pub(crate) fn add_once(&self, shared: Shared, first: impl FnOnce(u64)) {
        let _guard = Guard::acquire(&self.guard);
        if !self.contains(shared.pointer) && self.note(shared) {
            first(shared.chunk.bytes);
        }
    }

    /// Notes that a pointer is shared no more, or once less. Hands its chunk to `give_back` if no other pointer into that
    /// is.
    pub(crate) fn remove(&self, pointer: u64, give_back: impl FnOnce(Charge)) {
        // Most are not shared.
        if self.contains(pointer) {
            let _guard = Guard::acquire(&self.guard);
            self.forget(pointer).map(give_back);
        }
    }

    /// A context has ended: what was shared in it is no more, however often it was. Hands each chunk to `give_back` into
    /// which no other pointer is shared.
    pub(crate) fn end_context(&self, context: u64, mut give_back: impl FnMut(Charge)) {
        let _guard = Guard::acquire(&self.guard);
        self.contexts.remove_all(
            |held| held.context == context,
            |pointer, _| {
                while self.contains(pointer) {
                    self.forget(pointer).map(&mut give_back);
                }
            },
        );
    }

    /// `true` if it is the first one into its chunk. The caller holds the guard.
    fn note(&self, shared: Shared) -> bool {
        let Shared {
            pointer,
            card,
            chunk,
            context,
        } = shared;
        let once_more = |held: &Charge| {
            Some(Charge {
                bytes: held.bytes.saturating_add(1),
                ..*held
            })
        };
        if self.pointers.change(pointer, once_more).is_some() {
            return false;
        }
        let first = Charge {
            bytes: 1,
            card,
            context: chunk.address,
        };
        self.pointers.insert(pointer, first);
        if context != 0 {
            let ends = Charge {
                bytes: 0,
                card,
                context,
            };
            self.contexts.insert(pointer, ends);
        }
        self.add_to_chunk(card, chunk)
    }

    fn add_to_chunk(&self, card: u8, chunk: Chunk) -> bool {
        let one_more = |held: &Charge| {
            Some(Charge {
                context: held.context.saturating_add(1),
                ..*held
            })
        };
        if self.chunks.change(chunk.address, one_more).is_some() {
            return false;
        }
        let first = Charge {
            bytes: chunk.bytes,
            card,
            context: 1,
        };
        self.chunks.insert(chunk.address, first);
        true
    }

    /// The chunk, if no pointer into it is shared any more. The caller holds the guard.
    fn forget(&self, pointer: u64) -> Option<Charge> {
        let times = self.pointers.change(pointer, |held| {
            let bytes = held.bytes.saturating_sub(1);
            Some(Charge { bytes, ..*held }).filter(|left| left.bytes != 0)
        })?;
        if times.bytes > 1 {
            return None;
        }
        self.contexts.remove(pointer);
        let chunk = self.chunks.change(times.context, |held| {
            let context = held.context.saturating_sub(1);
            Some(Charge { context, ..*held }).filter(|left| left.context != 0)
        })?;
        (chunk.context <= 1).then_some(chunk)
    }
}
