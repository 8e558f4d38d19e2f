//! Stream-ordered memory: a share is charged what its pools reserve.

use drava_vgpu_abi::Limits;

use crate::test_process::{
    CONTEXT_BYTES, Container, GIB, GPUS, MIB, ObjectId, TestProcess, wait_until,
};

fn used(process: &mut TestProcess) -> u64 {
    let (free, total) = process.memory_info();
    total - free
}

#[test]
fn charges_reserved_pool_memory() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let small = process.ok(&format!("async {MIB}"))[0];
    let pool = container.ledger_bytes() - CONTEXT_BYTES;
    assert!(pool >= MIB);
    assert_eq!(used(&mut process), pool);
    let large = process.ok(&format!("async {}", 300 * MIB))[0];
    assert_eq!(used(&mut process), container.ledger_bytes() - CONTEXT_BYTES);
    for allocation in [small, large] {
        process.ok(&format!("freeasync {allocation}"));
    }
    process.ok("sync");
    assert_eq!(used(&mut process), container.ledger_bytes() - CONTEXT_BYTES);
    process.alloc(GIB - used_bytes(&container));
}

fn used_bytes(container: &Container) -> u64 {
    container.ledger_bytes() - CONTEXT_BYTES
}

#[test]
fn denies_pool_allocation_beyond_limit() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("async {}", GIB + 1));
    for _ in 0..1000 {
        if process.query(&format!("async {}", 7 * MIB))[0] != 0 {
            break;
        }
    }
    process.denied(&format!("async {}", 40 * MIB));
    let taken = used_bytes(&container);
    assert!(taken <= GIB, "{taken}");
    assert!(taken >= GIB - 64 * MIB, "{taken}");
    assert_eq!(used(&mut process), taken);
    let mut other = container.process();
    other.denied(&format!("alloc {}", 64 * MIB));
}

#[test]
fn trims_pool_before_denying() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.ok(&format!("keep {GIB}"));
    let allocation = process.ok(&format!("async {}", 900 * MIB))[0];
    process.ok(&format!("freeasync {allocation}"));
    process.ok("sync");
    assert!(
        used_bytes(&container) >= 900 * MIB,
        "the pool caches the memory"
    );
    process.alloc(900 * MIB);
    assert!(used_bytes(&container) <= GIB);
}

#[test]
fn charges_created_pool_until_destroyed() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let pool = process.ok("pool 0")[0];
    let allocation = process.ok(&format!("frompool {} {pool}", 100 * MIB))[0];
    assert!(used(&mut process) >= 100 * MIB);
    assert_eq!(used(&mut process), used_bytes(&container));
    process.ok(&format!("freeasync {allocation}"));
    process.ok("sync");
    process.ok(&format!("destroypool {pool}"));
    assert_eq!(used(&mut process), 0);
    assert_eq!(used_bytes(&container), 0);
}

/// The program may reuse free memory of its pool although the share is full.
#[test]
fn reuses_free_pool_memory_of_full_share() {
    let container = Container::with_memory(32 * MIB);
    let mut process = container.process();
    process.ok(&format!("async {MIB}"));
    let other = process.ok(&format!("async {}", 8 * MIB))[0];
    process.ok(&format!("freeasync {other}"));
    process.ok("sync");
    assert_eq!(process.memory_info().0, 0, "the pool uses the whole limit");
    process.ok(&format!("async {}", 8 * MIB));
    assert_eq!(used_bytes(&container), 32 * MIB);
}

/// CUDA reports nothing about a destroyed pool, so it is assumed to keep its memory.
#[test]
fn keeps_charge_for_pool_destroyed_before_free() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let pool = process.ok("pool 0")[0];
    let allocation = process.ok(&format!("frompool {} {pool}", 100 * MIB))[0];
    process.ok(&format!("destroypool {pool}"));
    let taken = used_bytes(&container);
    assert!(taken >= 100 * MIB, "{taken}");
    assert_eq!(used(&mut process), taken);
    process.denied(&format!("alloc {}", GIB - 96 * MIB));
    process.ok(&format!("freeasync {allocation}"));
    process.ok("sync");
    assert_eq!(used_bytes(&container), 0);
    assert_eq!(used(&mut process), taken);
    process.end();
    assert_eq!(container.process().memory_info().0, GIB);
}

#[test]
fn charges_created_pool_on_its_own_gpu() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(GIB));
    let mut process = container.process();
    process.init(1);
    let pool = process.ok("pool 1")[0];
    process.init(0);
    process.ok(&format!("frompool {} {pool}", 512 * MIB));
    assert_eq!(used(&mut process), 0);
    process.init(1);
    assert!(used(&mut process) >= 512 * MIB);
}

/// A stream allocates from the pool of its own GPU, whatever context is current.
#[test]
fn charges_memory_on_gpu_of_stream() {
    let container = Container::with_memory(GIB);
    container.add_share("other", GPUS[1], &Limits::memory(GIB));
    let mut process = container.process();
    process.init(1);
    let stream = process.ok("stream")[0];
    process.init(0);
    let allocation = process.ok(&format!("asyncin {} {stream}", 512 * MIB))[0];
    assert_eq!(used(&mut process), 0);
    process.denied(&format!("asyncin {} {stream}", 600 * MIB));
    process.alloc(600 * MIB);
    process.ok(&format!("freein {allocation} {stream}"));
    process.ok(&format!("asyncin {} {stream}", 512 * MIB));
    process.init(1);
    assert_eq!(used(&mut process), 512 * MIB);
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 600 * MIB);
}

/// A pool that this process did not create is charged on its own GPU, if that has a share.
#[test]
fn charges_default_pool_on_its_own_gpu() {
    for is_other_limited in [true, false] {
        let container = Container::with_memory(GIB);
        if is_other_limited {
            container.add_share("other", GPUS[1], &Limits::memory(GIB));
        }
        let mut process = container.process();
        process.init(1);
        process.init(0);
        let pools = ["defaultpool 1", "pool 1"].map(|pool| process.ok(pool)[0]);
        for pool in pools {
            process.ok(&format!("frompool {} {pool}", 448 * MIB));
            assert_eq!(used(&mut process), 0);
        }
        let too_much = process.query(&format!("frompool {} {}", 448 * MIB, pools[0]))[0];
        assert_eq!(too_much != 0, is_other_limited);
        process.alloc(600 * MIB);
        if is_other_limited {
            process.init(1);
            assert_eq!(used(&mut process), 896 * MIB);
        }
    }
}

/// The steps of a training program with stream-ordered memory, as PyTorch's `cudaMallocAsync` and RMM make them: weights
/// and optimizer state stay, activations are allocated and freed in every step, and nothing waits for the GPU. The pool
/// has taken all of the share but 16 MiB when the second step begins.
#[test]
fn trains_in_nearly_full_share() {
    let container = Container::with_memory(1040 * MIB);
    let mut process = container.process();
    process.ok(&format!("keep {}", u64::MAX));
    let stream = process.ok("stream")[0];
    let word = process.alloc(2 * MIB);
    for bytes in [200 * MIB, 150 * MIB, 34 * MIB, 3 * MIB] {
        process.ok(&format!("asyncin {bytes} {stream}"));
    }
    let activations = [256, 128, 64, 64, 32, 20, 8, 5, 3, 1];
    for step in 0..20 {
        if step == 1 {
            // The GPU does not get ahead any more.
            process.ok(&format!("stall {stream} {word}"));
            let (free, _) = process.memory_info();
            assert!(free <= 16 * MIB, "{free}");
        }
        let held = activations.map(|mib| {
            let allocate = format!("asyncin {} {stream}", mib * MIB);
            process.ok(&allocate)[0]
        });
        for activation in held.iter().rev() {
            process.ok(&format!("freein {activation} {stream}"));
        }
        if step == 0 {
            let (free, _) = process.memory_info();
            process.alloc(free.saturating_sub(16 * MIB) / (2 * MIB) * (2 * MIB));
        }
    }
    process.ok(&format!("set {word}"));
    process.ok("sync");
}

/// A stream can reuse memory that was freed in it. So a program that only does that is never denied, even with a full
/// share.
#[test]
fn runs_program_within_full_pool() {
    for synchronizes in [false, true] {
        let container = Container::with_memory(64 * MIB);
        let mut process = container.process();
        // Each chunk keeps an allocation.
        let sizes = [3, 5, 1, 7, 2, 4, 6];
        let mut held: Vec<(ObjectId, u64)> = Vec::new();
        for size in sizes.into_iter().cycle() {
            let answer = process.query(&format!("async {}", size * MIB));
            if answer[0] != 0 {
                break;
            }
            held.push((answer[1], size));
        }
        assert_eq!(used_bytes(&container), 64 * MIB);
        for round in 0..200 {
            let (allocation, size) = held.remove((round * 5) % held.len());
            process.ok(&format!("freeasync {allocation}"));
            if synchronizes {
                process.ok("sync");
                assert_eq!(process.memory_info().0, 0);
            }
            // The whole hole, or its larger part in two pieces.
            let sizes = [size / 2, size - size / 2];
            for size in sizes.into_iter().filter(|size| *size != 0) {
                let allocation = process.ok(&format!("async {}", size * MIB))[0];
                held.push((allocation, size));
            }
            assert_eq!(used_bytes(&container), 64 * MIB);
        }
    }
}

/// A share that is full except for memory freed in one stream.
struct Full {
    container: Container,
    process: TestProcess,
    /// A stream that waits for `word`, with 8 MiB freed behind the wait.
    stream: ObjectId,
    word: ObjectId,
}

impl Full {
    fn new() -> Self {
        let container = Container::with_memory(34 * MIB);
        let mut process = container.process();
        let word = process.alloc(2 * MIB);
        let stream = process.ok("stream")[0];
        for _ in 0..3 {
            process.ok(&format!("async {}", 8 * MIB));
        }
        let freed = process.ok(&format!("asyncin {} {stream}", 8 * MIB))[0];
        process.denied(&format!("async {MIB}"));
        assert_eq!(process.memory_info().0, 0);
        process.ok(&format!("stall {stream} {word}"));
        process.ok(&format!("freein {freed} {stream}"));
        Self {
            container,
            process,
            stream,
            word,
        }
    }

    /// Resumes the stream, and waits until another stream can allocate 8 MiB.
    fn go_on(&mut self) {
        self.process.ok(&format!("set {}", self.word));
        let allocate = format!("async {}", 8 * MIB);
        wait_until(
            || self.process.query(&allocate)[0] == 0,
            || "the other stream cannot allocate".to_owned(),
        );
        assert_eq!(used_bytes(&self.container), 34 * MIB);
    }
}

#[test]
fn reuses_freed_memory_after_stream_reaches_free() {
    let mut full = Full::new();
    let process = &mut full.process;
    process.denied(&format!("async {}", 8 * MIB));
    let (stream, bytes) = (full.stream, 8 * MIB);
    let again = process.ok(&format!("asyncin {bytes} {stream}"))[0];
    process.ok(&format!("freein {again} {stream}"));
    process.denied(&format!("async {bytes}"));
    full.go_on();
}

/// `CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC`
#[test]
fn respects_disabled_reuse_across_streams() {
    let mut full = Full::new();
    let process = &mut full.process;
    process.ok(&format!("set {}", full.word));
    process.ok("sync");
    process.ok("policy 2 0");
    process.denied(&format!("async {}", 8 * MIB));
    process.ok("policy 2 1");
    full.go_on();
}

/// After a pool was trimmed, the library does not expect free memory in it.
#[test]
fn assumes_no_free_space_in_trimmed_pool() {
    let container = Container::with_memory(64 * MIB);
    let mut process = container.process();
    let allocation = process.ok(&format!("async {}", 8 * MIB))[0];
    process.ok(&format!("freeasync {allocation}"));
    process.ok("sync");
    assert_eq!(process.memory_info().0, 64 * MIB);
    process.alloc(64 * MIB);
    assert_eq!(process.ok("highest")[0].cast_unsigned(), 32 * MIB);
    process.denied(&format!("async {}", 8 * MIB));
    assert_eq!(process.ok("highest")[0], 0, "the driver was not called");
}

/// A new stream may have the same handle, but is not ordered after the frees of the old one.
#[test]
fn does_not_reuse_memory_freed_in_destroyed_stream() {
    let mut full = Full::new();
    let process = &mut full.process;
    process.ok(&format!("set {}", full.word));
    process.ok(&format!("destroystream {}", full.stream));
    process.denied(&format!("async {}", 8 * MIB));
}

/// A query would invalidate a capture of the stream, and a captured free frees nothing yet.
#[test]
fn does_not_disturb_capture_when_pool_has_free_space() {
    let mut full = Full::new();
    let process = &mut full.process;
    process.ok(&format!("set {}", full.word));
    process.ok("sync");
    let captured = process.ok("capture")[0];
    process.denied(&format!("async {}", 8 * MIB));
    process.ok(&format!("endcapture {captured}"));
    full.go_on();
}

/// The graph allocates at launch.
#[test]
fn takes_nothing_from_pool_for_captured_allocation() {
    let mut full = Full::new();
    let process = &mut full.process;
    let captured = process.ok("capture")[0];
    let allocation = process.ok(&format!("asyncin {} {captured}", 8 * MIB))[0];
    process.ok(&format!("freein {allocation} {captured}"));
    process.ok(&format!("endcapture {captured}"));
    // The capture freed nothing in the pool.
    process.denied(&format!("async {}", 8 * MIB));
    assert_eq!(used_bytes(&full.container), 34 * MIB);
}

/// A chunk stays charged while any allocation is in it.
#[test]
fn charges_memory_retained_by_destroyed_pool() {
    let container = Container::with_memory(288 * MIB);
    let mut process = container.process();
    for count in 1..=8 {
        let pool = process.ok("pool 0")[0];
        process.ok(&format!("frompool 512 {pool}"));
        let freed = process.ok(&format!("frompool {} {pool}", 20 * MIB))[0];
        process.ok(&format!("freeasync {freed}"));
        process.ok(&format!("destroypool {pool}"));
        assert_eq!(used_bytes(&container), count * 32 * MIB);
        assert_eq!(used(&mut process), count * 32 * MIB);
    }
    process.alloc(32 * MIB);
    process.denied("async 512");
    process.denied("alloc 512");
}
