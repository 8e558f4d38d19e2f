//! Stream-ordered memory: what pools have reserved counts.

use drava_vgpu_abi::Limits;

use crate::subject::{CARDS, CONTEXT_BYTES, Container, GIB, MIB, Subject};

fn used(process: &mut Subject) -> u64 {
    let (free, total) = process.memory_info();
    total - free
}

#[test]
fn what_a_pool_reserves_is_charged_and_what_it_gives_back_is_not() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let small = process.ok(&format!("async {MIB}"))[0];
    let pool = container.taken() - CONTEXT_BYTES;
    assert!(pool >= MIB);
    assert_eq!(used(&mut process), pool);
    let large = process.ok(&format!("async {}", 300 * MIB))[0];
    assert_eq!(used(&mut process), container.taken() - CONTEXT_BYTES);
    for place in [small, large] {
        process.ok(&format!("freeasync {place}"));
    }
    process.ok("sync");
    assert_eq!(used(&mut process), container.taken() - CONTEXT_BYTES);
    process.alloc(GIB - used_bytes(&container));
}

fn used_bytes(container: &Container) -> u64 {
    container.taken() - CONTEXT_BYTES
}

#[test]
fn pools_do_not_exceed_the_limit() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.refused(&format!("async {}", GIB + 1));
    for _ in 0..1000 {
        if process.ask(&format!("async {}", 7 * MIB))[0] != 0 {
            break;
        }
    }
    process.refused(&format!("async {}", 40 * MIB));
    let taken = used_bytes(&container);
    assert!(taken <= GIB, "{taken}");
    assert!(taken >= GIB - 64 * MIB, "{taken}");
    assert_eq!(used(&mut process), taken);
    let mut other = container.process();
    other.refused(&format!("alloc {}", 64 * MIB));
}

#[test]
fn a_pool_that_keeps_memory_is_trimmed_before_anything_is_refused() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.ok(&format!("keep {GIB}"));
    let place = process.ok(&format!("async {}", 900 * MIB))[0];
    process.ok(&format!("freeasync {place}"));
    process.ok("sync");
    assert!(used_bytes(&container) >= 900 * MIB, "the pool keeps it");
    process.alloc(900 * MIB);
    assert!(used_bytes(&container) <= GIB);
}

#[test]
fn a_pool_of_its_own_counts_on_its_card_until_it_is_destroyed() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let pool = process.ok("pool 0")[0];
    let place = process.ok(&format!("frompool {} {pool}", 100 * MIB))[0];
    assert!(used(&mut process) >= 100 * MIB);
    assert_eq!(used(&mut process), used_bytes(&container));
    process.ok(&format!("freeasync {place}"));
    process.ok("sync");
    process.ok(&format!("destroypool {pool}"));
    assert_eq!(used(&mut process), 0);
    assert_eq!(used_bytes(&container), 0);
}

/// What a pool has and does not use is the program's, though nothing more could be reserved.
#[test]
fn a_full_share_lives_on_within_its_pool() {
    let container = Container::with_memory(32 * MIB);
    let mut process = container.process();
    process.ok(&format!("async {MIB}"));
    let other = process.ok(&format!("async {}", 8 * MIB))[0];
    process.ok(&format!("freeasync {other}"));
    process.ok("sync");
    assert_eq!(process.memory_info().0, 0, "the pool has all of it");
    process.ok(&format!("async {}", 8 * MIB));
    assert_eq!(used_bytes(&container), 32 * MIB);
}

#[test]
fn a_pool_that_is_destroyed_before_its_memory_is_freed_stays_charged() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let pool = process.ok("pool 0")[0];
    process.ok(&format!("frompool {} {pool}", 100 * MIB));
    process.ok(&format!("destroypool {pool}"));
    let taken = used_bytes(&container);
    assert!(taken >= 100 * MIB, "{taken}");
    assert!(used(&mut process) >= 100 * MIB);
    process.refused(&format!("alloc {}", GIB - 96 * MIB));
}

#[test]
fn a_pool_counts_on_its_own_card_whatever_context_asks() {
    let container = Container::with_memory(GIB);
    container.add_share("other", CARDS[1], &Limits::memory(GIB));
    let mut process = container.process();
    process.init(1);
    let pool = process.ok("pool 1")[0];
    process.init(0);
    process.ok(&format!("frompool {} {pool}", 512 * MIB));
    assert_eq!(used(&mut process), 0);
    process.init(1);
    assert!(used(&mut process) >= 512 * MIB);
}
