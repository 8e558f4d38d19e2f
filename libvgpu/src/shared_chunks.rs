//! Memory that several processes use: exported to or opened from other processes, by pointer.
//!
//! Another process keeps more alive than the allocation: the pool chunk or the block around it. So chunks and
//! blocks are counted, each once however many allocations in it are shared.

use core::sync::atomic::AtomicU32;

use crate::charge_map::{Charge, ChargeMap};
use crate::guard::Guard;

/// Shared allocations and their chunks. All zeroes is none.
pub(crate) struct SharedChunks {
    guard: AtomicU32,
    /// By pointer; `bytes` is the reference count, `context` the chunk.
    pointers: ChargeMap,
    /// By address; `context` is the number of pointers.
    chunks: ChargeMap,
    /// By pointer; `context` is the context whose end closes it, if any.
    contexts: ChargeMap,
}

/// A shared allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) pointer: u64,
    /// Index of the GPU's first share.
    pub(crate) card: u8,
    pub(crate) chunk: Chunk,
    /// The context whose end closes it, 0 if none.
    pub(crate) context: u64,
}

/// Memory around an allocation: a pool chunk, a block, or the allocation itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl SharedChunks {
    /// Returns whether the pointer is shared.
    pub(crate) fn contains(&self, pointer: u64) -> bool {
        self.pointers.get(pointer).is_some()
    }

    /// Adds a reference to a pointer; for the first pointer into its chunk, after `pay` has charged the chunk.
    /// Returns `false` if `pay` fails.
    ///
    /// Other threads that share the same chunk wait meanwhile: they use it without a charge only if it is charged.
    pub(crate) fn add(&self, shared: Shared, pay: impl FnOnce(u64) -> bool) -> bool {
        let _guard = Guard::acquire(&self.guard);
        let is_paid = !self.note(shared) || pay(shared.chunk.bytes);
        if !is_paid {
            self.forget(shared.pointer);
        }
        is_paid
    }

    /// As [`SharedChunks::add`], for a pointer that is shared at most once and free of charge.
    pub(crate) fn add_once(&self, shared: Shared, first: impl FnOnce(u64)) {
        let _guard = Guard::acquire(&self.guard);
        if !self.contains(shared.pointer) && self.note(shared) {
            first(shared.chunk.bytes);
        }
    }

    /// Removes a reference to a pointer. Passes its chunk to `give_back` after the last pointer into it.
    pub(crate) fn remove(&self, pointer: u64, give_back: impl FnOnce(Charge)) {
        // Most pointers are not shared.
        if self.contains(pointer) {
            let _guard = Guard::acquire(&self.guard);
            self.forget(pointer).map(give_back);
        }
    }

    /// Removes all references that belong to a destroyed context. Passes each chunk to `give_back` after the last
    /// pointer into it.
    pub(crate) fn end_context(&self, context: u64, mut give_back: impl FnMut(Charge)) {
        let _guard = Guard::acquire(&self.guard);
        self.contexts.remove_all(
            |charge| charge.context == context,
            |pointer, _| {
                while self.contains(pointer) {
                    self.forget(pointer).map(&mut give_back);
                }
            },
        );
    }

    /// Returns `true` for the first pointer into its chunk. The caller holds the guard.
    fn note(&self, shared: Shared) -> bool {
        let Shared {
            pointer,
            card,
            chunk,
            context,
        } = shared;
        let once_more = |charge: &Charge| {
            Some(Charge {
                bytes: charge.bytes.saturating_add(1),
                ..*charge
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
        let one_more = |charge: &Charge| {
            Some(Charge {
                context: charge.context.saturating_add(1),
                ..*charge
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

    /// Returns the chunk after the last pointer into it. The caller holds the guard.
    fn forget(&self, pointer: u64) -> Option<Charge> {
        let times = self.pointers.change(pointer, |charge| {
            let bytes = charge.bytes.saturating_sub(1);
            Some(Charge { bytes, ..*charge }).filter(|remaining| remaining.bytes != 0)
        })?;
        if times.bytes > 1 {
            return None;
        }
        self.contexts.remove(pointer);
        let chunk = self.chunks.change(times.context, |charge| {
            let context = charge.context.saturating_sub(1);
            Some(Charge { context, ..*charge }).filter(|remaining| remaining.context != 0)
        })?;
        (chunk.context <= 1).then_some(chunk)
    }
}
