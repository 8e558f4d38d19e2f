//! Threads of one process that ask at the same time: nobody is refused what there is, and nobody gets what there is not.

use drava_vgpu_abi::Limits;

use crate::interposer;
use crate::subject::{CARDS, CONTEXT_BYTES, Container, GIB, KIB, MIB, Subject};

const THREADS: u64 = 4;

/// A process of several threads, with a context on the first card.
fn crowd(container: &Container) -> Subject {
    let mut crowd = Subject::spawn(container.command(interposer::crowd()));
    crowd.init(0);
    crowd
}

/// A process of a tenant with so much memory, as [`crowd`].
fn crowd_with(container: &Container, limit_bytes: u64) -> (tempfile::TempDir, Subject) {
    let tenant = container.tenant(limit_bytes);
    let mut command = container.command(interposer::crowd());
    command.env("DRAVA_RUN_DIR", tenant.path());
    let mut crowd = Subject::spawn(command);
    crowd.init(0);
    (tenant, crowd)
}

/// The share has a chunk for each, and no more. What others may need until it is known where theirs lies keeps nobody
/// from that, nor that a pool has grown for several when the first of them looks.
#[test]
fn threads_that_make_a_pool_grow_get_all_there_is() {
    let container = Container::with_memory(THREADS * 32 * MIB);
    let mut process = crowd(&container);
    for bytes in [20 * MIB, 32 * MIB] {
        let refused = process.ok(&format!("grow {THREADS} 100 {bytes}"))[0];
        assert_eq!(refused, 0, "{bytes}");
        assert_eq!(process.memory_info().1, THREADS * 32 * MIB);
    }
}

/// All of them fit into one block, whichever comes first.
#[test]
fn threads_that_share_a_block_get_it() {
    let container = Container::with_memory(2 * MIB);
    let mut process = crowd(&container);
    let refused = process.ok(&format!("small {THREADS} 100 {}", 64 * KIB))[0];
    assert_eq!(refused, 0);
    assert_eq!(process.memory_info(), (2 * MIB, 2 * MIB));
    assert_eq!(container.taken(), CONTEXT_BYTES);
}

/// What one is refused nobody gets for nothing because the one is still being refused.
#[test]
fn threads_that_open_the_same_memory_are_all_refused_it() {
    let container = Container::with_memory(GIB);
    let (_tenant, mut poor) = crowd_with(&container, 16 * MIB);
    let mut maker = container.process();
    let pool = maker.ok("pool 0 1")[0];
    let descriptor = maker.ok(&format!("exportpool {pool}"))[0];
    poor.ok(&format!("importpool {} {descriptor}", maker.pid()));
    let of_pool = maker.ok(&format!("frompool {MIB} {pool}"))[0];
    let linear = maker.alloc(32 * MIB);
    let ways = [
        ("import", format!("exportpointer {of_pool}")),
        ("open", format!("ipcget {linear}")),
    ];
    for (open, export) in ways {
        let answer = maker.say(&export);
        let handle = answer.strip_prefix("0 ").unwrap();
        let granted = poor.ok(&format!("{open} {handle} {THREADS} 200"))[0];
        assert_eq!(granted, 0, "{open}");
        assert_eq!(poor.memory_info(), (16 * MIB, 16 * MIB), "{open}");
    }
}

/// What one has paid for the others have for nothing.
#[test]
fn threads_that_open_the_same_memory_pay_for_it_once() {
    let container = Container::with_memory(GIB);
    let (_tenant, mut other) = crowd_with(&container, 32 * MIB);
    let mut maker = container.process();
    let linear = maker.alloc(32 * MIB);
    let answer = maker.say(&format!("ipcget {linear}"));
    let handle = answer.strip_prefix("0 ").unwrap();
    let rounds = 200;
    let granted = other.ok(&format!("open {handle} {THREADS} {rounds}"))[0];
    assert_eq!(granted.cast_unsigned(), THREADS * rounds);
    assert_eq!(other.memory_info(), (32 * MIB, 32 * MIB));
}

/// However many make and end the primary context, it is paid for as long as it is there, and nothing is left of that.
#[test]
fn threads_that_make_and_end_the_primary_context_pay_for_it_once() {
    const ROOM: u64 = 8 * MIB;
    let container = Container::new();
    let limits = Limits {
        driver_reserve_bytes: CONTEXT_BYTES,
        ..Limits::memory(CONTEXT_BYTES + THREADS * ROOM)
    };
    container.add_share("share", CARDS[0], &limits);
    let mut process = Subject::spawn(container.command(interposer::crowd()));
    process.ok("initonly");
    let refused = process.ok(&format!("primary {THREADS} 25 {ROOM}"))[0];
    assert_eq!(refused, 0);
    assert_eq!(container.taken(), 0);
    let mut last = container.process();
    assert_eq!(last.memory_info().0, THREADS * ROOM);
    last.alloc(THREADS * ROOM);
    drop(process);
}
