//! Memory of pools that processes share with each other.

use crate::sharing::{BYTES, create, map, place_of, send, taken};
use crate::subject::{CONTEXT_BYTES, Container, GIB, MIB, Place, Subject};

/// A pool whose allocations can be shared, and the same in other processes.
fn share_a_pool<const N: usize>(
    maker: &mut Subject,
    others: [&mut Subject; N],
) -> (Place, [Place; N]) {
    let pool = maker.ok("pool 0 1")[0];
    let descriptor = maker.ok(&format!("exportpool {pool}"))[0];
    let import = format!("importpool {} {descriptor}", maker.pid());
    (pool, others.map(|other| other.ok(&import)[0]))
}

/// Imports memory of a pool as another process has exported it.
fn import(from: &mut Subject, pointer: Place, to: &mut Subject, pool: Place) -> String {
    let answer = from.say(&format!("exportpointer {pointer}"));
    let data = answer.strip_prefix("0 ").unwrap().to_owned();
    to.say(&format!("importpointer {pool} {data}"))
}

#[test]
fn memory_of_a_shared_pool_that_outlives_its_maker_stays_charged() {
    let container = Container::with_memory(GIB);
    let mut third = container.process();
    let mut one = container.process();
    let mut other = container.process();
    let (pool, [imported]) = share_a_pool(&mut one, [&mut other]);
    let large = one.ok(&format!("frompool {} {pool}", 100 * MIB))[0];
    let small = [1, 2].map(|mib| one.ok(&format!("frompool {} {pool}", mib * MIB))[0]);
    one.ok(&format!("frompool {} {pool}", 300 * MIB));
    let open = [large, small[0], small[1]]
        .map(|pointer| place_of(&import(&mut one, pointer, &mut other, imported)));
    // Of the share's own, it is paid for once.
    assert_eq!(other.memory_info().0, GIB - 432 * MIB);
    one.kill();
    container
        .machine
        .wait_for_card(0, |card| card.processes.len() == 2)
        .unwrap();
    assert_eq!(taken(&container), 132 * MIB);
    assert_eq!(third.memory_info().0, GIB - 132 * MIB);
    third.refused(&format!("alloc {}", GIB - 130 * MIB));
    let rest = third.alloc(GIB - 132 * MIB);
    third.ok(&format!("free {rest}"));
    // A chunk is open until the last of it is closed, in whichever way.
    other.ok(&format!("free {}", open[1]));
    assert_eq!(third.memory_info().0, GIB - 132 * MIB);
    other.ok(&format!("freeasync {}", open[0]));
    assert_eq!(third.memory_info().0, GIB - 32 * MIB);
    other.ok(&format!("freeasync {}", open[2]));
    assert_eq!((third.memory_info().0, taken(&container)), (GIB, 0));
}

#[test]
fn memory_of_another_shares_pool_is_paid_for_by_both() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(16 * MIB));
    let mut one = container.process();
    let mut other = container.process_of(&large);
    let mut poor = container.process_of(&small);
    let (pool, [imported, poors]) = share_a_pool(&mut one, [&mut other, &mut poor]);
    let pointer = one.ok(&format!("frompool {MIB} {pool}"))[0];
    let open = place_of(&import(&mut one, pointer, &mut other, imported));
    assert_eq!(one.memory_info().0, GIB - 32 * MIB);
    assert_eq!(other.memory_info().0, GIB - 32 * MIB);
    // Imported again, it is open until it is freed as often.
    let again = place_of(&import(&mut one, pointer, &mut other, imported));
    other.ok(&format!("free {again}"));
    assert_eq!(other.memory_info().0, GIB - 32 * MIB);
    let answer = import(&mut one, pointer, &mut poor, poors);
    assert!(answer.starts_with("2 "), "{answer}");
    assert_eq!(poor.memory_info().0, 16 * MIB);
    other.ok(&format!("free {open}"));
    assert_eq!(other.memory_info().0, GIB);
    // What was refused was not kept either.
    one.kill();
    container
        .machine
        .wait_for_card(0, |card| card.processes.len() == 2)
        .unwrap();
    assert_eq!(container.taken(), 2 * CONTEXT_BYTES);
}

/// What was made available and is freed is available no more: other memory is paid for in full.
#[test]
fn what_a_pool_has_freed_is_not_available_to_others() {
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut neighbour = container.process_of(&large);
    let handle = create(&mut neighbour, BYTES);
    let mut one = container.process();
    let pool = one.ok("pool 0 1")[0];
    let pointer = one.ok(&format!("frompool {BYTES} {pool}"))[0];
    for _ in 0..2 {
        let answer = one.say(&format!("exportpointer {pointer}"));
        assert!(answer.starts_with("0 "), "{answer}");
    }
    one.ok(&format!("freeasync {pointer}"));
    one.ok("sync");
    assert_eq!(one.memory_info().0, GIB);
    let mut other = container.process();
    let imported = send(&mut neighbour, handle, &mut other);
    map(&mut other, imported, BYTES);
    assert_eq!(other.memory_info().0, GIB - BYTES);
}
