//! One process and its memory limit.

use drava_vgpu_abi::{Limits, MemoryPolicy};

use crate::test_process::{
    CONTEXT_BYTES, Container, GIB, GPUS, KIB, MIB, OUT_OF_MEMORY, TestProcess,
};

#[test]
fn enforces_limit_to_the_byte() {
    let container = Container::with_memory(8 * GIB);
    let mut process = container.process();
    assert_eq!(process.memory_info(), (8 * GIB, 8 * GIB));
    let all = process.alloc(8 * GIB);
    process.denied("alloc 1");
    assert_eq!(process.memory_info(), (0, 8 * GIB));
    process.ok(&format!("free {all}"));
    assert_eq!(process.memory_info(), (8 * GIB, 8 * GIB));
    process.denied(&format!("alloc {}", 8 * GIB + 1));
    process.alloc(8 * GIB);
}

#[test]
fn reaches_limit_in_small_steps() {
    let container = Container::with_memory(64 * MIB);
    let mut process = container.process();
    // The room beside the last one is free for sure only while a whole block is.
    assert_eq!(process.fill(MIB), 63 * MIB);
    let mut other = container.process();
    other.denied("alloc 1");
}

#[test]
fn denies_without_calling_the_driver() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let before = container.ledger_bytes();
    process.denied(&format!("alloc {}", GIB + 1));
    process.denied(&format!("managed {}", GIB + 1));
    process.denied(&format!("pitch {} 4", GIB));
    assert_eq!(container.ledger_bytes(), before);
}

#[test]
fn refunds_allocation_denied_by_driver() {
    // More than the GPU has, so that only the driver can deny it.
    let container = Container::with_memory(200 * GIB);
    let mut process = container.process();
    let (free, _) = process.memory_info();
    for _ in 0..3 {
        process.denied(&format!("alloc {}", 100 * GIB));
    }
    assert_eq!(process.memory_info().0, free);
    process.ok(&format!("alloc {}", 10 * GIB));
}

#[test]
fn denies_sizes_that_would_overflow() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for bytes in [u64::MAX, u64::MAX - 511, 1 << 63, 1 << 48] {
        process.denied(&format!("alloc {bytes}"));
    }
    process.denied(&format!("pitch {} {}", 1u64 << 33, 1u64 << 33));
    process.alloc(GIB);
}

#[test]
fn forwards_free_of_unknown_pointer() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let held = process.alloc(GIB);
    let answer = process.query("freeraw 4096");
    assert_ne!(answer[0], 0, "the driver rejects an unknown pointer");
    assert_eq!(process.query("freeraw 0")[0], 0, "the driver accepts null");
    process.denied("alloc 1");
    process.ok(&format!("free {held}"));
    assert_ne!(process.query(&format!("free {held}"))[0], 0, "freed twice");
    assert_eq!(process.memory_info().0, GIB);
}

#[test]
fn charges_and_frees_every_kind_of_linear_memory() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for command in [
        format!("alloc {}", 100 * MIB),
        format!("managed {}", 100 * MIB),
        format!("pitch {} 1024", 100 * KIB),
    ] {
        let allocation = process.ok(&command)[0];
        assert_eq!(process.memory_info().0, GIB - 100 * MIB, "{command}");
        process.ok(&format!("free {allocation}"));
        assert_eq!(process.memory_info().0, GIB, "{command}");
    }
}

/// The 32-bit functions from before CUDA 3.2: no address of a 64-bit process fits, but a request beyond the limit is
/// denied before the driver reports that.
#[test]
fn counts_requests_by_oldest_functions() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("alloc1 {}", 2 * GIB));
    let answer = process.query(&format!("alloc1 {}", 4 * MIB))[0];
    assert!(!matches!(answer, 0 | OUT_OF_MEMORY), "{answer}");
    assert_eq!(process.memory_info(), (GIB, GIB));
}

/// Rows are padded; the charge is the driver's pitch times the height.
#[test]
fn charges_padded_rows_at_their_pitch() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    for (width, height) in [(100, 100_000), (513, 4096), (511, 3)] {
        let allocation = process.ok(&format!("pitch {width} {height}"))[0];
        let taken = container.ledger_bytes() - CONTEXT_BYTES;
        assert_eq!(process.memory_info().0, GIB - taken, "{width}");
        process.ok(&format!("free {allocation}"));
        assert_eq!(process.memory_info().0, GIB, "{width}");
    }
    // At 100 bytes per row it would fit.
    process.denied(&format!("pitch 100 {}", GIB / 256));
}

#[test]
fn keeps_charge_when_driver_fails_to_free() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let allocation = process.alloc(GIB);
    let first = process.ok("capture")[0];
    // During a stream capture in global mode the driver does not free.
    let result = process.query(&format!("free {allocation}"))[0];
    process.query(&format!("endcapture {first}"));
    assert_ne!(result, 0, "freed during a capture");
    process.denied("alloc 1");
    process.ok(&format!("free {allocation}"));
    assert_eq!(process.memory_info().0, GIB);
}

#[test]
fn releases_memory_of_destroyed_context() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(100 * MIB);
    let context = process.ok("context 0")[0];
    process.alloc(300 * MIB);
    assert_eq!(process.memory_info().0, GIB - 400 * MIB);
    process.ok(&format!("destroy {context}"));
    let mut other = container.process();
    assert_eq!(other.memory_info().0, GIB - 100 * MIB);
    process.ok("releaseprimary 0");
    assert_eq!(other.memory_info().0, GIB);
}

/// The legacy way to end a context, which exists while something is attached to it.
#[test]
fn releases_context_after_last_detach() {
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_BYTES,
        ..Limits::memory(4 * GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = container.process();
    for attached in 0..3 {
        let context = process.ok("context 0")[0];
        process.alloc(300 * MIB);
        for _ in 0..attached {
            process.ok("attach");
        }
        let (free, taken) = (4 * GIB - 2 * CONTEXT_BYTES - 300 * MIB, 2 * CONTEXT_BYTES);
        for _ in 0..attached {
            process.ok(&format!("detach {context}"));
            assert_eq!(process.memory_info().0, free);
            assert_eq!(container.ledger_bytes(), taken + 300 * MIB);
        }
        process.ok(&format!("detach {context}"));
        assert_eq!(process.memory_info().0, 4 * GIB - CONTEXT_BYTES);
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    }
}

/// A program may read `errno` after driver calls.
#[test]
fn preserves_errno_when_counting_and_denying() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    // A process whose liveness the library checks.
    let _other = container.process();
    let answer = process.query(&format!("errno {}", 600 * MIB));
    assert_eq!(answer, [0, 77]);
    let answer = process.query(&format!("errno {}", 600 * MIB));
    assert_eq!(answer, [2, 77]);
}

#[test]
fn spills_plain_allocations_to_host() {
    let container = Container::new();
    let limits = Limits {
        memory_policy: MemoryPolicy::Spill,
        ..Limits::memory(GIB)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = container.process();
    process.alloc(GIB);
    let spilt = process.alloc(GIB);
    assert_eq!(container.ledger_bytes(), GIB + CONTEXT_BYTES);
    assert_eq!(process.memory_info(), (0, GIB));
    process.ok(&format!("free {spilt}"));
    assert_eq!(process.memory_info(), (0, GIB));
    // Requests for device memory are still denied.
    process.denied(&format!("async {}", 40 * MIB));
}

#[test]
fn charges_holes_between_small_allocations() {
    let container = Container::with_memory(66 * MIB);
    let mut process = container.process();
    // Keeps one allocation of eight in each block, so the driver cannot release the blocks.
    let allocations: Vec<_> = (0..256).map(|_| process.alloc(256 * KIB)).collect();
    process.alloc(2 * MIB);
    process.denied("alloc 1048576");
    for (index, allocation) in allocations.iter().enumerate() {
        if index % 8 != 0 {
            process.ok(&format!("free {allocation}"));
        }
    }
    assert_eq!(container.ledger_bytes() - CONTEXT_BYTES, 66 * MIB);
    assert_eq!(process.memory_info().0, 0);
    process.denied(&format!("alloc {}", 2 * MIB));
    // Whether a request fits into a hole is known only after it was made.
    process.denied(&format!("alloc {}", 256 * KIB));
    for allocation in allocations.iter().step_by(8) {
        process.ok(&format!("free {allocation}"));
    }
    assert_eq!(process.memory_info().0, 64 * MIB);
    process.alloc(256 * KIB);
    assert_eq!(process.memory_info().0, 62 * MIB);
}

/// The records of an object are removed before the call that frees it, and restored if the call fails.
#[test]
fn keeps_charges_after_failed_calls() {
    const BYTES: u64 = 32 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = container.process();

    let handle = process.ok(&format!("create {BYTES} 0 1"))[0];
    let address = process.ok(&format!("reserve {}", 2 * BYTES))[0];
    process.ok(&format!("map {address} {BYTES} {handle} 0"));
    process.ok(&format!("release {handle}"));
    assert_ne!(
        process.query(&format!("unmap {address} {}", 2 * BYTES))[0],
        0
    );
    assert_eq!(process.memory_info().0, GIB - BYTES);
    process.ok(&format!("unmap {address} {BYTES}"));
    assert_eq!(process.memory_info().0, GIB);

    // All references of the memory are in the range.
    let handle = process.ok(&format!("create {} 0 1", 2 * MIB))[0];
    let address = process.ok(&format!("reserve {}", 128 * MIB))[0];
    let mapped = 80 * MIB;
    for offset in (0..mapped).step_by(2 << 20) {
        process.ok(&format!("map {address} {} {handle} {offset}", 2 * MIB));
    }
    process.ok(&format!("release {handle}"));
    assert_ne!(
        process.query(&format!("unmap {address} {}", 128 * MIB))[0],
        0
    );
    assert_eq!(process.memory_info().0, GIB - 2 * MIB);
    process.ok(&format!("unmap {address} {mapped}"));
    assert_eq!(process.memory_info().0, GIB);

    let primary = process.init(0);
    let pointer = process.alloc(BYTES);
    assert_ne!(process.query(&format!("destroy {primary}"))[0], 0);
    assert_eq!(process.memory_info().0, GIB - BYTES);

    let answer = process.request(&format!("ipcget {pointer}"));
    let exported = answer.strip_prefix("0 ").unwrap();
    let stream = process.ok("capture")[0];
    assert_ne!(process.query(&format!("free {pointer}"))[0], 0);
    process.query(&format!("endcapture {stream}"));
    // The export is not charged to another process of the share.
    let mut other = container.process();
    let opened = other.ok(&format!("ipcopen {exported}"))[0];
    assert_eq!(other.memory_info().0, GIB - BYTES);
    other.ok(&format!("ipcclose {opened}"));
    process.ok(&format!("free {pointer}"));
    assert_eq!(process.memory_info().0, GIB);
}

/// The last references of memory, in an array or a multicast object that a failed call does not end.
#[test]
fn keeps_charges_of_memory_in_objects_after_failed_calls() {
    const BYTES: u64 = 4 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let check = |process: &mut TestProcess, used_bytes: u64, what: &str| {
        assert_eq!(process.memory_info().0, GIB - used_bytes, "{what}");
    };

    let handle = process.ok(&format!("create {BYTES} 0 1"))[0];
    let array = process.ok("sparse")[0];
    process.ok(&format!("tiles {array} {handle} 0 3"));
    process.ok(&format!("release {handle}"));
    let stream = process.ok("capture")[0];
    assert_ne!(process.query(&format!("destroyarray {array}"))[0], 0);
    process.query(&format!("endcapture {stream}"));
    check(&mut process, BYTES, "array not destroyed");
    process.ok(&format!("destroyarray {array}"));
    check(&mut process, 0, "array destroyed");

    let handle = process.ok(&format!("create {BYTES} 0 1"))[0];
    let object = process.ok(&format!("object {handle} {BYTES}"))[0];
    let address = process.ok(&format!("reserve {}", 2 * BYTES))[0];
    process.ok(&format!("map {address} {BYTES} {object} 0"));
    process.ok(&format!("release {object}"));
    process.ok(&format!("release {handle}"));
    let too_long = format!("unmap {address} {}", 2 * BYTES);
    assert_ne!(process.query(&too_long)[0], 0);
    check(&mut process, BYTES, "object not unmapped");
    process.ok(&format!("unmap {address} {BYTES}"));
    check(&mut process, 0, "object unmapped");
}

/// All references of memory that other processes have, or may have, open, in one call that fails.
#[test]
fn keeps_charges_of_shared_memory_after_failed_calls() {
    const BYTES: u64 = 128 * MIB;
    let container = Container::with_memory(GIB);
    let tenant = container.tenant(BYTES + 2 * MIB);
    let mut exporter = container.process();
    let handle = exporter.ok(&format!("create {BYTES} 0 1"))[0];
    let descriptor = exporter.ok(&format!("export {handle}"))[0];
    let mut importer = container.process_of(&tenant);
    let import = format!("import {} {descriptor}", exporter.pid());
    let imported = importer.ok(&import)[0];
    for (process, memory, limit_bytes) in [
        (&mut exporter, handle, GIB),
        (&mut importer, imported, BYTES + 2 * MIB),
    ] {
        let address = process.ok(&format!("reserve {}", 3 * BYTES))[0];
        for offset in [0, BYTES] {
            process.ok(&format!("map {address} {BYTES} {memory} {offset}"));
        }
        process.ok(&format!("release {memory}"));
        let too_long = format!("unmap {address} {}", 3 * BYTES);
        assert_ne!(process.query(&too_long)[0], 0);
        assert_eq!(process.memory_info().0, limit_bytes - BYTES);
        process.ok(&format!("unmap {address} {}", 2 * BYTES));
        // An open descriptor keeps the charge of its process.
        let left = if limit_bytes == GIB { BYTES } else { 0 };
        assert_eq!(process.memory_info().0, limit_bytes - left);
    }
    exporter.ok(&format!("close {descriptor}"));
    assert_eq!(exporter.memory_info().0, GIB);
}
