//! Several processes, threads and children under one limit.

use crate::interposer;
use crate::test_process::{CONTEXT_BYTES, Container, GIB, MIB, TestProcess, wait_until};

#[test]
fn shares_limit_among_processes() {
    let container = Container::with_memory(2 * GIB);
    let mut processes: Vec<TestProcess> = (0..6).map(|_| container.process()).collect();
    let step = 3 * MIB;
    for process in &mut processes {
        process.send(&format!("threads 4 {step}"));
    }
    let allocations: i64 = processes
        .iter_mut()
        .map(|process| {
            process
                .receive()
                .split(' ')
                .nth(1)
                .unwrap()
                .parse::<i64>()
                .unwrap()
        })
        .sum();
    // The driver rounds each allocation to 4 MiB.
    assert_eq!(allocations.cast_unsigned() * 4 * MIB, 2 * GIB);
    assert_eq!(container.ledger_bytes(), 2 * GIB + 6 * CONTEXT_BYTES);
    for process in &mut processes {
        process.denied(&format!("alloc {step}"));
        assert_eq!(process.memory_info(), (0, 2 * GIB));
    }
}

#[test]
fn reclaims_memory_of_exited_process() {
    let container = Container::with_memory(GIB);
    let mut first = container.process();
    let mut second = container.process();
    first.alloc(GIB);
    second.denied("alloc 1");
    assert!(first.end().success());
    container.wait_for_ledger_bytes(CONTEXT_BYTES);
    second.alloc(GIB);
}

#[test]
fn reclaims_memory_of_killed_process() {
    let container = Container::with_memory(GIB);
    let mut survivor = container.process();
    for _ in 0..3 {
        let mut victim = container.process();
        victim.alloc(GIB);
        survivor.denied("alloc 1");
        victim.kill();
        container.wait_for_ledger_bytes(CONTEXT_BYTES);
        let allocation = survivor.alloc(GIB);
        survivor.ok(&format!("free {allocation}"));
    }
}

#[test]
fn reports_memory_of_dead_process_as_free() {
    let container = Container::with_memory(GIB);
    let mut survivor = container.process();
    let mut victim = container.process();
    victim.alloc(GIB);
    assert_eq!(survivor.memory_info().0, 0);
    victim.kill();
    assert_eq!(survivor.memory_info().0, GIB);
}

#[test]
fn starts_process_after_reclaiming_dead_ones() {
    let container = Container::with_memory(GIB);
    let mut victim = container.process();
    victim.alloc(GIB);
    victim.kill();
    container.wait_for_ledger_bytes(0);
    container.process().alloc(GIB);
}

#[test]
fn counts_forked_child_separately() {
    let container = Container::with_memory(GIB);
    // Forks after the limits are read but before the driver is initialized: CUDA does not support fork afterwards.
    let mut process = container.start("dlsym");
    assert_eq!(process.request("lookup cuMemAlloc_v2"), "0 libvgpu.so");
    let parent = u32::try_from(process.pid()).unwrap();
    let child = u32::try_from(process.ok("fork")[0]).unwrap();
    process.init(0);
    process.alloc(GIB);
    process.denied("alloc 1");
    let used: Vec<(u32, u64)> = container
        .processes_of("share")
        .iter()
        .map(|process| (process.owner.pid, process.used_bytes))
        .collect();
    assert_eq!(used, [(parent, 0), (child, GIB)]);
    container.process().denied("alloc 1");
}

#[test]
fn keeps_parents_charge_while_forked_child_lives() {
    let container = Container::with_memory(GIB);
    let mut other = container.process();
    let mut parent = container.process();
    parent.alloc(GIB);
    let child = parent.ok("forkidle")[0];
    parent.kill();
    // The child inherited the open device files, so the GPU memory is still in use.
    assert_eq!(container.ledger_bytes(), GIB + 2 * CONTEXT_BYTES);
    other.denied("alloc 1");
    // SAFETY: a child of the test process.
    unsafe { libc::kill(i32::try_from(child).unwrap(), libc::SIGKILL) };
    container.wait_for_ledger_bytes(CONTEXT_BYTES);
    wait_until(
        || std::fs::read_link(format!("/proc/{child}/exe")).is_err(),
        || "the child is still alive".into(),
    );
    other.alloc(GIB);
}

#[test]
fn resets_account_on_exec() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB);
    process.send("exec");
    process.init(0);
    assert_eq!(process.memory_info(), (GIB, GIB));
    process.alloc(GIB);
}

/// The node agent identifies processes by start time as well as PID.
#[test]
fn records_owner_in_slot() {
    let container = Container::with_memory(GIB);
    let program = container.run_dir().join(".a) 1 (b) c");
    std::fs::copy(interposer::test_process(), &program).unwrap();
    let mut process = TestProcess::spawn(container.command(&program));
    process.init(0);
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.pid())).unwrap();
    let (_, after) = stat.rsplit_once(") ").unwrap();
    let started: u64 = after.split(' ').nth(19).unwrap().parse().unwrap();
    let [listed] = container.processes_of("share")[..] else {
        panic!("one process")
    };
    assert_eq!(listed.owner.pid, process.pid().cast_unsigned());
    assert_eq!(listed.owner.start_time, started);
}
