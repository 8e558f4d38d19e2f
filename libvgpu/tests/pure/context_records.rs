//! The records of the contexts of a process with several GPUs.

use std::mem::MaybeUninit;

use crate::contexts::Contexts;

/// One context on each GPU of a machine.
const CONTEXTS: usize = 8;

fn none() -> Contexts {
    // SAFETY: all zeroes is no record.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// Handles as an allocator returns them, whose hashes are equal.
fn colliding() -> Vec<u64> {
    let first = 0x7f00_0000_0000;
    let hash = |handle: u64| handle.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58;
    let handles = (0..).map(|number| first + number * 16);
    let equal = handles.filter(|handle| hash(*handle) == hash(first));
    equal.take(CONTEXTS + 1).collect()
}

fn codes(handles: &[u64]) -> impl Iterator<Item = (u64, u8)> {
    handles.iter().copied().zip(3..)
}

/// Otherwise a program that alternates between its GPUs queries the device of the context at each launch.
#[test]
fn keeps_record_of_one_context_per_gpu() {
    let contexts = none();
    let handles = colliding();
    let handles = &handles[..CONTEXTS];
    for (handle, code) in codes(handles) {
        contexts.set(handle, Some(code));
    }
    for (handle, code) in codes(handles) {
        assert_eq!(contexts.code_of(handle), Some(code));
    }
}

#[test]
fn replaces_record_when_all_entries_are_used() {
    let contexts = none();
    for (handle, code) in codes(&colliding()) {
        contexts.set(handle, Some(code));
        assert_eq!(contexts.code_of(handle), Some(code));
    }
}

#[test]
fn forgets_context_and_keeps_records_probed_after_it() {
    let contexts = none();
    let handles = colliding();
    for (handle, code) in codes(&handles[..3]) {
        contexts.set(handle, Some(code));
    }
    contexts.forget(|handle| handle == handles[0]);
    contexts.set(handles[1], None);
    let known = handles.iter().map(|handle| contexts.code_of(*handle));
    assert_eq!(known.take(3).collect::<Vec<_>>(), [None, None, Some(5)]);
    // The handle recurs on another GPU, and has one record.
    contexts.set(handles[2], Some(9));
    contexts.set(handles[2], None);
    assert_eq!(contexts.code_of(handles[2]), None);
}

/// A handle that does not fit in a word would be that of another context.
#[test]
fn records_no_handle_that_does_not_fit() {
    let contexts = none();
    for handle in [8, 1 << 62] {
        contexts.set(handle, Some(3));
        assert_eq!(contexts.code_of(handle), None, "{handle:#x}");
    }
}
