//! Blocks that small allocations share, small arrays, and memory of other processes.

use std::mem::MaybeUninit;

use crate::blocks::{self, BLOCK, Blocks, LARGEST_SMALL, SmallArrays};
use crate::imports::Imports;
use crate::process::Process;

const KIB: u64 = 1 << 10;

/// # Safety
/// All zeroes is a value of the type.
unsafe fn zeroes<T>() -> T {
    // SAFETY: the caller says so.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

fn no_blocks() -> Blocks {
    // SAFETY: all zeroes is none.
    unsafe { zeroes() }
}

fn no_arrays() -> SmallArrays {
    // SAFETY: all zeroes is none.
    unsafe { zeroes() }
}

fn no_imports() -> Imports {
    // SAFETY: all zeroes is nothing.
    unsafe { zeroes() }
}

#[test]
fn small_requests_take_steps_and_large_ones_blocks() {
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
fn a_block_is_paid_for_from_its_first_allocation_to_its_last() {
    let (blocks, process) = (no_blocks(), Process::default());
    let base = 0x7f00_0000_0000;
    assert!(!blocks.may_have_room(0, 1));
    assert!(blocks.add(&process, 0, base, 512 * KIB));
    assert!(blocks.may_have_room(0, 1536 * KIB) && !blocks.may_have_room(0, 1537 * KIB));
    assert!(!blocks.may_have_room(1, 1), "another card's");
    assert!(!blocks.add(&process, 0, base + 512 * KIB, 512 * KIB));
    assert!(blocks.add(&process, 0, base + BLOCK, KIB), "another block");
    assert!(!blocks.remove(&process, 0, base, 512 * KIB));
    assert!(blocks.remove(&process, 0, base + 512 * KIB, 512 * KIB));
    assert!(!blocks.remove(&process, 0, base, 512 * KIB), "twice");
    assert!(blocks.remove(&process, 0, base + BLOCK, KIB));
    assert!(!blocks.may_have_room(0, 1));
}

#[test]
fn small_arrays_are_paid_for_until_the_last_is_gone() {
    let arrays = no_arrays();
    assert_eq!(arrays.add(600 * KIB), BLOCK);
    assert_eq!(arrays.add(600 * KIB), 0);
    assert_eq!(arrays.add(KIB), BLOCK, "1 MiB each fill a block");
    arrays.undo(KIB, BLOCK);
    assert_eq!(arrays.remove(600 * KIB), 0, "its place may be a hole");
    assert_eq!(arrays.add(600 * KIB), 0);
    assert_eq!(arrays.remove(600 * KIB), 0);
    assert_eq!(arrays.remove(600 * KIB), BLOCK);
}

#[test]
fn imports_are_paid_for_beyond_what_the_share_has_made_available() {
    let imports = no_imports();
    imports.open(100);
    assert_eq!((imports.missing(100), imports.unpaid()), (0, 100));
    imports.open(50);
    assert_eq!(imports.missing(120), 30);
    imports.charged(30);
    assert_eq!(imports.unpaid(), 120);
    assert_eq!(imports.missing(120), 0);
    assert_eq!(imports.missing(20), 100, "whoever made it available died");
    imports.charged(100);
    imports.open(10);
    imports.charged(10);
    imports.refused(10, 10);
    assert_eq!(imports.close(100), 80);
    assert_eq!(imports.close(50), 50);
    assert_eq!(imports.close(1), 0, "more than was opened");
}
