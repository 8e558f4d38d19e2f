//! Several processes, threads and children under one limit.

use crate::interposer;
use crate::subject::{CONTEXT_BYTES, Container, GIB, MIB, Subject, wait_until};

#[test]
fn processes_together_reach_the_limit_and_never_exceed_it() {
    let container = Container::with_memory(2 * GIB);
    let mut processes: Vec<Subject> = (0..6).map(|_| container.process()).collect();
    let step = 3 * MIB;
    for process in &mut processes {
        process.send(&format!("threads 4 {step}"));
    }
    let allocations: i64 = processes
        .iter_mut()
        .map(|process| {
            process
                .hear()
                .split(' ')
                .nth(1)
                .unwrap()
                .parse::<i64>()
                .unwrap()
        })
        .sum();
    // The driver rounds each to 4 MiB.
    assert_eq!(allocations.cast_unsigned() * 4 * MIB, 2 * GIB);
    assert_eq!(container.taken(), 2 * GIB + 6 * CONTEXT_BYTES);
    for process in &mut processes {
        process.refused(&format!("alloc {step}"));
        assert_eq!(process.memory_info(), (0, 2 * GIB));
    }
}

#[test]
fn a_process_that_ends_returns_its_memory() {
    let container = Container::with_memory(GIB);
    let mut first = container.process();
    let mut second = container.process();
    first.alloc(GIB);
    second.refused("alloc 1");
    assert!(first.end().success());
    container.wait_until_taken(CONTEXT_BYTES);
    second.alloc(GIB);
}

#[test]
fn a_killed_process_returns_its_memory() {
    let container = Container::with_memory(GIB);
    let mut survivor = container.process();
    for _ in 0..3 {
        let mut victim = container.process();
        victim.alloc(GIB);
        survivor.refused("alloc 1");
        victim.kill();
        container.wait_until_taken(CONTEXT_BYTES);
        let place = survivor.alloc(GIB);
        survivor.ok(&format!("free {place}"));
    }
}

#[test]
fn memory_of_the_dead_is_seen_as_free_without_asking_for_it() {
    let container = Container::with_memory(GIB);
    let mut survivor = container.process();
    let mut victim = container.process();
    victim.alloc(GIB);
    assert_eq!(survivor.memory_info().0, 0);
    victim.kill();
    assert_eq!(survivor.memory_info().0, GIB);
}

#[test]
fn a_process_that_starts_finds_what_the_dead_left() {
    let container = Container::with_memory(GIB);
    let mut victim = container.process();
    victim.alloc(GIB);
    victim.kill();
    container.wait_until_taken(0);
    container.process().alloc(GIB);
}

#[test]
fn a_forked_child_counts_for_itself() {
    let container = Container::with_memory(GIB);
    // Forked after the limits were found but before the driver is initialised: CUDA does not survive a fork.
    let mut process = container.start("dlsym");
    assert_eq!(process.say("lookup cuMemAlloc_v2"), "0 libvgpu.so");
    let parent = u32::try_from(process.pid()).unwrap();
    let child = u32::try_from(process.ok("fork")[0]).unwrap();
    process.init(0);
    process.alloc(GIB);
    process.refused("alloc 1");
    let used: Vec<(u32, u64)> = container
        .processes_of("share")
        .iter()
        .map(|process| (process.owner.pid, process.used_bytes))
        .collect();
    assert_eq!(used, [(parent, 0), (child, GIB)]);
    container.process().refused("alloc 1");
}

#[test]
fn a_forked_child_that_lives_keeps_its_parents_memory_taken() {
    let container = Container::with_memory(GIB);
    let mut other = container.process();
    let mut parent = container.process();
    parent.alloc(GIB);
    let child = parent.ok("forkidle")[0];
    parent.kill();
    // The child has inherited the open device files, so the memory is still taken on the card.
    assert_eq!(container.taken(), GIB + 2 * CONTEXT_BYTES);
    other.refused("alloc 1");
    // SAFETY: the subject's own child.
    unsafe { libc::kill(i32::try_from(child).unwrap(), libc::SIGKILL) };
    container.wait_until_taken(CONTEXT_BYTES);
    wait_until(
        || std::fs::read_link(format!("/proc/{child}/exe")).is_err(),
        || "the child lives".into(),
    );
    other.alloc(GIB);
}

#[test]
fn a_program_that_replaces_itself_starts_anew() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.alloc(GIB);
    process.send("exec");
    process.init(0);
    assert_eq!(process.memory_info(), (GIB, GIB));
    process.alloc(GIB);
}

/// The node agent tells processes apart by when they started, whatever they are called.
#[test]
fn a_slot_says_whose_it_is() {
    let container = Container::with_memory(GIB);
    let program = container.run_dir().join(".a) 1 (b) c");
    std::fs::copy(interposer::subject(), &program).unwrap();
    let mut process = Subject::spawn(container.command(&program));
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
