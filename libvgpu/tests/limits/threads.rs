//! Concurrent requests of threads of one process: available memory is granted, memory beyond the limit is denied.

use drava_vgpu_abi::Limits;

use crate::interposer;
use crate::test_process::{CONTEXT_BYTES, Container, GIB, GPUS, KIB, MIB, TestProcess};

const THREADS: u64 = 4;

/// A process of several threads, with a context on the first GPU.
fn threaded_process(container: &Container) -> TestProcess {
    let mut process = TestProcess::spawn(container.command(interposer::threads()));
    process.init(0);
    process
}

/// A [`threaded_process`] of a tenant with a memory limit.
fn process_of_tenant(container: &Container, limit_bytes: u64) -> (tempfile::TempDir, TestProcess) {
    let tenant = container.tenant(limit_bytes);
    let mut command = container.command(interposer::threads());
    command.env("DRAVA_RUN_DIR", tenant.path());
    let mut process = TestProcess::spawn(command);
    process.init(0);
    (tenant, process)
}

/// The limit has exactly one chunk per thread. Neither the temporary reservations of other threads nor a pool that grew
/// for several threads before the first one checks may cause a denial.
#[test]
fn grants_whole_limit_to_threads_growing_a_pool() {
    let container = Container::with_memory(THREADS * 32 * MIB);
    let mut process = threaded_process(&container);
    for bytes in [20 * MIB, 32 * MIB] {
        let denied = process.ok(&format!("grow {THREADS} 100 {bytes}"))[0];
        assert_eq!(denied, 0, "{bytes}");
        assert_eq!(process.memory_info().1, THREADS * 32 * MIB);
    }
}

/// Calls that natively leave the captures of other threads alone do so with free memory in a pool, and with graph memory.
#[test]
fn leaves_captures_of_other_threads_alone() {
    const CALLS: [&str; 4] = ["free memory", "NVML", "graph launch", "denied memory"];
    let container = Container::with_memory(GIB);
    for (call, name) in CALLS.iter().enumerate() {
        let mut process = threaded_process(&container);
        let [denied, invalid] = process.ok(&format!("captures {call} 20"))[..] else {
            panic!("two numbers");
        };
        assert_eq!(denied, if call == 3 { 60 } else { 0 }, "{name}");
        assert_eq!(invalid, 0, "{name}");
    }
}

/// Memory that other threads, processes and tenants allocate meanwhile is not charged to a module.
#[test]
fn loads_modules_beside_churning_memory() {
    const MODULES: u64 = 300;
    let container = Container::with_memory(8 * GIB);
    let mut process = threaded_process(&container);
    let mut other = threaded_process(&container);
    let (_tenant, mut neighbour) = process_of_tenant(&container, 8 * GIB);
    let (free_before, _) = process.memory_info();
    for churning in [&mut process, &mut other, &mut neighbour] {
        churning.ok(&format!("churn {GIB}"));
    }
    assert_eq!(process.ok(&format!("load {MODULES}"))[0], 0, "denied");
    for churning in [&mut process, &mut other, &mut neighbour] {
        churning.ok("calm");
    }
    let charged = free_before - process.memory_info().0;
    assert!(charged <= 16 * MIB, "{charged}");
}

/// A library fits into the share of the current GPU, and not into that of another one. A thread that relies on the charges of
/// another one gets no kernel either.
#[test]
fn denies_kernel_beyond_limit_of_other_gpu_to_all_threads() {
    const ROUNDS: u64 = 1000;
    let container = Container::with_memory(4 * GIB);
    container.add_share("second", GPUS[1], &Limits::memory(GIB));
    let mut process = threaded_process(&container);
    process.init(1);
    process.init(0);
    let free = process.memory_info().0;
    let denied = process.ok(&format!("kernels {THREADS} {ROUNDS} {}", 2 * GIB))[0];
    assert_eq!(u64::try_from(denied), Ok(THREADS * ROUNDS));
    assert_eq!(process.memory_info().0, free);
    let denied = process.ok(&format!("kernels {THREADS} {ROUNDS} {}", GIB / 2))[0];
    assert_eq!(denied, 0);
    assert_eq!(process.memory_info().0, free);
}

/// All allocations fit into one block, in any order. Each needs room for another one until its address is known.
#[test]
fn grants_shared_block_to_all_threads() {
    let container = Container::with_memory(4 * MIB);
    let mut process = threaded_process(&container);
    let denied = process.ok(&format!("small {THREADS} 100 {}", 64 * KIB))[0];
    assert_eq!(denied, 0);
    assert_eq!(process.memory_info(), (4 * MIB, 4 * MIB));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
}

/// While one thread's request is being denied, no other thread gets the memory without a charge.
#[test]
fn denies_every_thread_opening_memory_beyond_limit() {
    let container = Container::with_memory(GIB);
    let (_tenant, mut limited) = process_of_tenant(&container, 16 * MIB);
    let mut exporter = container.process();
    let pool = exporter.ok("pool 0 1")[0];
    let descriptor = exporter.ok(&format!("exportpool {pool}"))[0];
    limited.ok(&format!("importpool {} {descriptor}", exporter.pid()));
    let of_pool = exporter.ok(&format!("frompool {MIB} {pool}"))[0];
    let linear = exporter.alloc(32 * MIB);
    let ways = [
        ("import", format!("exportpointer {of_pool}")),
        ("open", format!("ipcget {linear}")),
    ];
    for (open, export) in ways {
        let answer = exporter.request(&export);
        let handle = answer.strip_prefix("0 ").unwrap();
        let granted = limited.ok(&format!("{open} {handle} {THREADS} 200"))[0];
        assert_eq!(granted, 0, "{open}");
        assert_eq!(limited.memory_info(), (16 * MIB, 16 * MIB), "{open}");
    }
}

/// One charge covers all threads.
#[test]
fn charges_memory_opened_by_several_threads_once() {
    let container = Container::with_memory(GIB);
    let (_tenant, mut other) = process_of_tenant(&container, 32 * MIB);
    let mut exporter = container.process();
    let linear = exporter.alloc(32 * MIB);
    let answer = exporter.request(&format!("ipcget {linear}"));
    let handle = answer.strip_prefix("0 ").unwrap();
    let rounds = 200;
    let granted = other.ok(&format!("open {handle} {THREADS} {rounds}"))[0];
    assert_eq!(granted.cast_unsigned(), THREADS * rounds);
    assert_eq!(other.memory_info(), (32 * MIB, 32 * MIB));
}

/// A query of all pools by one thread must not record a pool that another thread destroys meanwhile.
#[test]
fn releases_charge_of_pool_destroyed_during_query() {
    let container = Container::with_memory(THREADS * 64 * MIB);
    let mut process = threaded_process(&container);
    let [denied, left] = process.ok(&format!("pools {THREADS} 200 {MIB}"))[..] else {
        panic!("two numbers");
    };
    assert_eq!((denied, left), (0, 0));
}

/// The primary context is charged once while it exists, however many threads create and destroy it, and not afterwards.
#[test]
fn charges_primary_context_once_for_several_threads() {
    const ROOM: u64 = 8 * MIB;
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_BYTES,
        ..Limits::memory(CONTEXT_BYTES + THREADS * ROOM)
    };
    container.add_share("share", GPUS[0], &limits);
    let mut process = TestProcess::spawn(container.command(interposer::threads()));
    process.ok("initonly");
    let denied = process.ok(&format!("primary {THREADS} 25 {ROOM}"))[0];
    assert_eq!(denied, 0);
    assert_eq!(container.ledger_bytes(), 0);
    let mut last = container.process();
    assert_eq!(last.memory_info().0, THREADS * ROOM);
    last.alloc(THREADS * ROOM);
    drop(process);
}

/// The end of a context does not release the charges of the next context with the same handle.
#[test]
fn keeps_charge_in_context_with_recurring_handle() {
    const BYTES: u64 = 256 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = TestProcess::spawn(container.command(interposer::threads()));
    process.ok("initonly");
    let [recurred, uncharged] = process.ok(&format!("recur 100 {BYTES}"))[..] else {
        panic!("two numbers");
    };
    assert!(recurred > 0, "no handle recurred");
    assert_eq!(uncharged, 0, "of {recurred}");
    assert_eq!(container.ledger_bytes(), 0);
}

/// The end of mappings does not release the charges of new memory with the same handles.
#[test]
fn keeps_charge_of_memory_with_recurring_handle() {
    for end in ["unmap", "unmaptiles", "destroyarray", "releaseobject"] {
        let container = Container::with_memory(GIB);
        let mut process = threaded_process(&container);
        let [recurred, miscounted] = process.ok(&format!("{end} 40"))[..] else {
            panic!("two numbers");
        };
        assert!(recurred > 0, "{end}: no handle recurred");
        assert_eq!(miscounted, 0, "{end}");
        assert_eq!(process.memory_info(), (GIB, GIB), "{end}");
    }
}

/// Mappings that libcuda does not end keep the charge of the memory while another thread releases its handle.
#[test]
fn keeps_charge_of_memory_that_other_threads_fail_to_unmap() {
    let container = Container::with_memory(GIB);
    let mut process = threaded_process(&container);
    assert_eq!(process.ok("failunmap 3000")[0], 0);
}
