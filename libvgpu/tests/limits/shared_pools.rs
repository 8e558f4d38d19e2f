//! Memory of pools that processes share.

use crate::shared_memory::{BYTES, create, map, object_id, send, taken};
use crate::test_process::{CONTEXT_BYTES, Container, GIB, MIB, ObjectId, TestProcess};

/// A pool with shareable allocations, and the same pool in other processes.
fn shared_pool<const N: usize>(
    exporter: &mut TestProcess,
    others: [&mut TestProcess; N],
) -> (ObjectId, [ObjectId; N]) {
    let pool = exporter.ok("pool 0 1")[0];
    let descriptor = exporter.ok(&format!("exportpool {pool}"))[0];
    let import = format!("importpool {} {descriptor}", exporter.pid());
    (pool, others.map(|other| other.ok(&import)[0]))
}

/// Imports an allocation of a pool that another process exported.
fn import(
    from: &mut TestProcess,
    pointer: ObjectId,
    to: &mut TestProcess,
    pool: ObjectId,
) -> String {
    let answer = from.request(&format!("exportpointer {pointer}"));
    let data = answer.strip_prefix("0 ").unwrap().to_owned();
    to.request(&format!("importpointer {pool} {data}"))
}

#[test]
fn keeps_charge_for_shared_pool_of_dead_process() {
    let container = Container::with_memory(GIB);
    let mut third = container.process();
    let mut one = container.process();
    let mut other = container.process();
    let (pool, [imported]) = shared_pool(&mut one, [&mut other]);
    let large = one.ok(&format!("frompool {} {pool}", 100 * MIB))[0];
    let small = [1, 2].map(|mib| one.ok(&format!("frompool {} {pool}", mib * MIB))[0]);
    one.ok(&format!("frompool {} {pool}", 300 * MIB));
    let open = [large, small[0], small[1]]
        .map(|pointer| object_id(&import(&mut one, pointer, &mut other, imported)));
    // Memory of the own share is charged once.
    assert_eq!(other.memory_info().0, GIB - 432 * MIB);
    one.kill();
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 2)
        .unwrap();
    assert_eq!(taken(&container), 132 * MIB);
    assert_eq!(third.memory_info().0, GIB - 132 * MIB);
    third.denied(&format!("alloc {}", GIB - 130 * MIB));
    let rest = third.alloc(GIB - 132 * MIB);
    third.ok(&format!("free {rest}"));
    // A chunk stays open until its last allocation is closed, by either function.
    other.ok(&format!("free {}", open[1]));
    assert_eq!(third.memory_info().0, GIB - 132 * MIB);
    other.ok(&format!("freeasync {}", open[0]));
    assert_eq!(third.memory_info().0, GIB - 32 * MIB);
    other.ok(&format!("freeasync {}", open[2]));
    assert_eq!((third.memory_info().0, taken(&container)), (GIB, 0));
}

#[test]
fn charges_imported_pool_memory_to_both_shares() {
    let container = Container::with_memory(GIB);
    let (large, small) = (container.tenant(GIB), container.tenant(16 * MIB));
    let mut one = container.process();
    let mut other = container.process_of(&large);
    let mut limited = container.process_of(&small);
    let (pool, [imported, limited_pool]) = shared_pool(&mut one, [&mut other, &mut limited]);
    let pointer = one.ok(&format!("frompool {MIB} {pool}"))[0];
    let open = object_id(&import(&mut one, pointer, &mut other, imported));
    assert_eq!(one.memory_info().0, GIB - 32 * MIB);
    assert_eq!(other.memory_info().0, GIB - 32 * MIB);
    // Imported again, it stays open until it is freed as many times.
    let again = object_id(&import(&mut one, pointer, &mut other, imported));
    other.ok(&format!("free {again}"));
    assert_eq!(other.memory_info().0, GIB - 32 * MIB);
    let answer = import(&mut one, pointer, &mut limited, limited_pool);
    assert!(answer.starts_with("2 "), "{answer}");
    assert_eq!(limited.memory_info().0, 16 * MIB);
    other.ok(&format!("free {open}"));
    assert_eq!(other.memory_info().0, GIB);
    // The denied import was not kept either.
    one.kill();
    container
        .machine
        .wait_for_gpu(0, |gpu| gpu.processes.len() == 2)
        .unwrap();
    assert_eq!(container.ledger_bytes(), 2 * CONTEXT_BYTES);
}

/// Exported memory that is freed is no longer shared: other memory is charged in full.
#[test]
fn excludes_freed_pool_memory_from_shared_chunks() {
    let container = Container::with_memory(GIB);
    let large = container.tenant(GIB);
    let mut unlimited = container.process_of(&large);
    let handle = create(&mut unlimited, BYTES);
    let mut one = container.process();
    let pool = one.ok("pool 0 1")[0];
    let pointer = one.ok(&format!("frompool {BYTES} {pool}"))[0];
    for _ in 0..2 {
        let answer = one.request(&format!("exportpointer {pointer}"));
        assert!(answer.starts_with("0 "), "{answer}");
    }
    one.ok(&format!("freeasync {pointer}"));
    one.ok("sync");
    assert_eq!(one.memory_info().0, GIB);
    let mut other = container.process();
    let imported = send(&mut unlimited, handle, &mut other);
    map(&mut other, imported, BYTES);
    assert_eq!(other.memory_info().0, GIB - BYTES);
}
