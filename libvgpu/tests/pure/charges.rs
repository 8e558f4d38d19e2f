//! Blocks of small allocations, and memory of other processes.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use crate::accounts::blocks::{self, BLOCK, Blocks, LARGEST_SMALL};
use crate::accounts::pool_free_space::{CHUNK, PoolFreeSpace, SizeChange, chunk_around};
use crate::accounts::shared_chunks::{Chunk, Shared, SharedChunks};
use crate::limits::imports::Imports;

const KIB: u64 = 1 << 10;

/// # Safety
/// All zeroes is a value of the type.
unsafe fn zeroes<T>() -> T {
    // SAFETY: the caller guarantees it.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn no_blocks() -> Blocks {
    // SAFETY: all zeroes is a valid value.
    unsafe { zeroes() }
}

/// A pointer on device 5 that no end of a context invalidates.
fn lasting(pointer: u64, chunk: Chunk) -> Shared {
    Shared {
        pointer,
        gpu: 5,
        chunk,
        context: 0,
    }
}

fn no_imports() -> Imports {
    // SAFETY: all zeroes is a valid value.
    unsafe { zeroes() }
}

#[test]
fn rounds_small_requests_to_steps_and_large_to_blocks() {
    for (bytes, taken) in [
        (0, 0),
        (1, 512),
        (512, 512),
        (513, 1024),
        (LARGEST_SMALL, LARGEST_SMALL),
        (LARGEST_SMALL + 1, BLOCK),
        (BLOCK + 1, 2 * BLOCK),
        (u64::MAX, u64::MAX),
    ] {
        assert_eq!(blocks::rounded(bytes), taken, "{bytes}");
    }
    assert!(blocks::is_small(LARGEST_SMALL) && !blocks::is_small(BLOCK));
}

#[test]
fn charges_block_from_first_to_last_allocation() {
    let blocks = no_blocks();
    let base = 0x7f00_0000_0000;
    assert!(blocks.add(base));
    assert!(!blocks.add(base + 512 * KIB));
    assert!(blocks.add(base + BLOCK), "another block");
    assert!(!blocks.remove(base));
    assert!(blocks.remove(base + 512 * KIB));
    assert!(!blocks.remove(base), "twice");
    assert!(blocks.remove(base + BLOCK));
}

#[test]
fn charges_imports_beyond_exported_bytes() {
    let imports = no_imports();
    imports.open(100);
    assert_eq!(
        (imports.missing_bytes(100), imports.uncharged_bytes()),
        (0, 100)
    );
    imports.open(50);
    assert_eq!(imports.missing_bytes(120), 30);
    imports.add_charged(30);
    assert_eq!(imports.uncharged_bytes(), 120);
    assert_eq!(imports.missing_bytes(120), 0);
    assert_eq!(imports.missing_bytes(20), 100, "the exporting process died");
    imports.add_charged(100);
    imports.open(10);
    imports.add_charged(10);
    imports.undo_open(10, 10);
    assert_eq!(imports.close(100), 80);
    assert_eq!(imports.close(50), 50);
    assert_eq!(imports.close(1), 0, "more than was opened");
}

#[test]
fn returns_memory_left_open_once() {
    let imports = no_imports();
    imports.leave_open(30);
    imports.leave_open(12);
    assert_eq!(imports.take_left_open(), 42);
    assert_eq!(imports.take_left_open(), 0);
}

#[test]
fn counts_shared_chunk_once() {
    // SAFETY: all zeroes is a valid value.
    let shared: SharedChunks = unsafe { zeroes() };
    let chunk = chunk_around(3 * CHUNK + 512, KIB);
    assert_eq!((chunk.address, chunk.bytes), (3 * CHUNK, CHUNK));
    let large = chunk_around(512, CHUNK - KIB);
    assert_eq!((large.address, large.bytes), (512, CHUNK), "whole pages");
    let charged = Cell::new(0);
    let add = |pointer, chunk| {
        assert!(shared.add(lasting(pointer, chunk), |bytes| {
            charged.set(charged.get() + bytes);
            true
        }));
        charged.get()
    };
    let returned = Cell::new(0);
    let remove = |pointer| {
        shared.remove(pointer, |chunk| {
            assert_eq!(chunk.gpu, 5);
            returned.set(returned.get() + chunk.bytes);
        });
        returned.get()
    };
    assert_eq!(add(1, chunk), CHUNK);
    assert_eq!(add(2, chunk), CHUNK, "the same chunk");
    assert_eq!(add(1, chunk), CHUNK, "the same pointer");
    assert_eq!(add(3, large), 2 * CHUNK);
    assert!(shared.contains(1) && !shared.contains(4));
    assert_eq!(remove(1), 0, "the pointer is still open once");
    assert_eq!(remove(1), 0, "the other pointer keeps the chunk open");
    assert_eq!(remove(1), 0, "the pointer is not open any more");
    assert!(!shared.contains(1));
    assert_eq!(remove(2), CHUNK);
    assert_eq!(remove(3), 2 * CHUNK);
    assert_eq!(add(2, chunk), 3 * CHUNK, "added again");
    assert!(!shared.add(lasting(4, large), |_| false));
    assert!(!shared.contains(4));
    assert_eq!(add(4, large), 4 * CHUNK);
    for pointer in [5, 6, 5] {
        shared.add_once(lasting(pointer, chunk_around(7 * CHUNK, KIB)), |bytes| {
            charged.set(charged.get() + bytes);
        });
        assert_eq!(charged.get(), 5 * CHUNK);
    }
    assert_eq!(remove(5), 2 * CHUNK);
    assert_eq!(remove(6), 3 * CHUNK);
}

/// While the charge of one thread is being denied, the other threads get nothing; once it is granted, they are not
/// charged.
#[test]
fn charges_one_of_several_threads_sharing_memory() {
    // SAFETY: all zeroes is a valid value.
    let shared: SharedChunks = unsafe { zeroes() };
    let chunk = chunk_around(CHUNK, KIB);
    let rounds = if cfg!(miri) { 5 } else { 500 };
    let (open, most) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..4 {
            let (shared, open, most) = (&shared, &open, &most);
            scope.spawn(move || {
                for round in 0..rounds {
                    let is_charged = (round + thread) % 2 == 0;
                    let is_open = shared.add(lasting(1, chunk), |_| {
                        thread::yield_now();
                        if is_charged {
                            most.fetch_max(open.fetch_add(1, Relaxed) + 1, Relaxed);
                        }
                        is_charged
                    });
                    if is_open {
                        assert_eq!(open.load(Relaxed), 1, "the memory is open without a charge");
                        shared.remove(1, |_| {
                            open.fetch_sub(1, Relaxed);
                        });
                    }
                }
            });
        }
    });
    assert_eq!((open.into_inner(), most.into_inner()), (0, 1));
    assert!(!shared.contains(1));
}

#[test]
fn closes_opened_memory_with_its_context() {
    // SAFETY: all zeroes is a valid value.
    let shared: SharedChunks = unsafe { zeroes() };
    let add = |pointer, chunk: u64, context| {
        let shared_in = Shared {
            context,
            ..lasting(pointer, chunk_around(chunk * CHUNK, KIB))
        };
        assert!(shared.add(shared_in, |_| true));
    };
    let end = |context| {
        let mut chunks = Vec::new();
        shared.end_context(context, |chunk| {
            assert_eq!((chunk.gpu, chunk.bytes), (5, CHUNK));
            chunks.push(chunk);
        });
        chunks.len()
    };
    // Two imports of the same pointer and two of one chunk; one of each remains.
    add(1, 1, 7);
    add(1, 1, 7);
    add(2, 2, 7);
    add(3, 2, 8);
    add(4, 3, 0);
    add(5, 4, 7);
    shared.remove(5, |_| {});
    // The same address, opened in another context.
    add(5, 4, 8);
    assert_eq!(end(9), 0);
    assert_eq!(end(7), 1, "the chunk of the first");
    assert_eq!(
        [1, 2, 3, 4, 5].map(|pointer| shared.contains(pointer)),
        [false, false, true, true, true]
    );
    assert_eq!(end(7), 0);
    assert_eq!(end(8), 2);
    assert!(shared.contains(4));
    shared.remove(4, |chunk| assert_eq!(chunk.bytes, CHUNK));
    assert!(!shared.contains(4));
}

#[test]
fn finds_chunk_of_pool_pointer() {
    // SAFETY: all zeroes is a valid value.
    let room: PoolFreeSpace = unsafe { zeroes() };
    let change = SizeChange {
        before_bytes: 0,
        after_bytes: CHUNK,
    };
    room.allocate(1, 7, CHUNK + 512, 3, change);
    assert_eq!(room.chunk_of(CHUNK), None);
    let (gpu, chunk) = room.chunk_of(CHUNK + 512).unwrap();
    assert_eq!((gpu, chunk.address, chunk.bytes), (7, CHUNK, CHUNK));
}
