//! Memory that several processes use: exported to or opened from other processes, by pointer.
//!
//! Another process keeps more alive than the allocation: the pool chunk or the block around it. So chunks and
//! blocks are counted, each once however many allocations in it are shared.

use core::sync::atomic::AtomicU32;

use crate::accounts::charge_map::{ChargeMap, record};
use crate::system::guard::Guard;

record! {
    /// A shared pointer.
    SharedPointer {
        /// Address of the chunk.
        chunk,
        /// Index of the GPU's first share.
        gpu,
        /// How often it is exported or open.
        references,
    }
}

record! {
    /// A chunk with shared pointers.
    SharedChunk {
        bytes,
        /// Index of the GPU's first share.
        gpu,
        /// Shared pointers into it.
        pointers,
    }
}

record! {
    /// A pointer that is closed with a context.
    OpenedIn {
        /// 0.
        unused,
        /// Index of the GPU's first share.
        gpu,
        context,
    }
}

/// Shared allocations and their chunks. All zeroes is none.
pub(crate) struct SharedChunks {
    guard: AtomicU32,
    /// By pointer.
    pointers: ChargeMap<SharedPointer>,
    /// By address.
    chunks: ChargeMap<SharedChunk>,
    /// By pointer, for those that the end of a context closes.
    contexts: ChargeMap<OpenedIn>,
}

/// A shared allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) pointer: u64,
    /// Index of the GPU's first share.
    pub(crate) gpu: u8,
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
    pub(crate) fn remove(&self, pointer: u64, give_back: impl FnOnce(SharedChunk)) {
        // Most pointers are not shared.
        if self.contains(pointer) {
            let _guard = Guard::acquire(&self.guard);
            self.forget(pointer).map(give_back);
        }
    }

    /// Removes all references that belong to a destroyed context. Passes each chunk to `give_back` after the last
    /// pointer into it.
    pub(crate) fn end_context(&self, context: u64, mut give_back: impl FnMut(SharedChunk)) {
        let _guard = Guard::acquire(&self.guard);
        self.contexts.remove_all(
            |opened| opened.context == context,
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
            gpu,
            chunk,
            context,
        } = shared;
        let once_more = |known: &SharedPointer| {
            Some(SharedPointer {
                references: known.references.saturating_add(1),
                ..*known
            })
        };
        if self.pointers.change(pointer, once_more).is_some() {
            return false;
        }
        let first = SharedPointer {
            chunk: chunk.address,
            gpu,
            references: 1,
        };
        self.pointers.insert(pointer, first);
        if context != 0 {
            let ends = OpenedIn {
                unused: 0,
                gpu,
                context,
            };
            self.contexts.insert(pointer, ends);
        }
        self.add_to_chunk(gpu, chunk)
    }

    fn add_to_chunk(&self, gpu: u8, chunk: Chunk) -> bool {
        let one_more = |known: &SharedChunk| {
            Some(SharedChunk {
                pointers: known.pointers.saturating_add(1),
                ..*known
            })
        };
        if self.chunks.change(chunk.address, one_more).is_some() {
            return false;
        }
        let first = SharedChunk {
            bytes: chunk.bytes,
            gpu,
            pointers: 1,
        };
        self.chunks.insert(chunk.address, first);
        true
    }

    /// Returns the chunk after the last pointer into it. The caller holds the guard.
    fn forget(&self, pointer: u64) -> Option<SharedChunk> {
        let before = self.pointers.change(pointer, |known| {
            let references = known.references.saturating_sub(1);
            let remaining = SharedPointer {
                references,
                ..*known
            };
            (references != 0).then_some(remaining)
        })?;
        if before.references > 1 {
            return None;
        }
        self.contexts.remove(pointer);
        let chunk = self.chunks.change(before.chunk, |known| {
            let pointers = known.pointers.saturating_sub(1);
            (pointers != 0).then_some(SharedChunk { pointers, ..*known })
        })?;
        (chunk.pointers <= 1).then_some(chunk)
    }
}
