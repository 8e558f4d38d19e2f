//! Hooks that count memory: allocations through each function are charged and released.

use crate::start;
use crate::test_process::{CONTEXT_BYTES, Container, GIB, MIB, OUT_OF_MEMORY, TestProcess};

/// Free memory of the share.
fn free(process: &mut TestProcess) -> u64 {
    process.memory_info().0
}

#[test]
fn charges_arrays_of_every_function() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    for create in ["cuArrayCreate", "cuArrayCreate_v2", "cuArray3DCreate"] {
        process.ok(&format!("array 4096 4096 {create}"));
        assert_eq!(free(&mut process), GIB - 64 * MIB, "{create}");
        process.ok("destroyarray");
        assert_eq!(free(&mut process), GIB, "{create}");
        process.denied(&format!("array 32768 16384 {create}"));
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{create}");
    }
}

#[test]
fn releases_memory_of_destroyed_context_by_every_function() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    for create in ["context3", "context4"] {
        process.ok(create);
        process.ok(&format!("alloc {}", 100 * MIB));
        assert_eq!(free(&mut process), GIB - 100 * MIB, "{create}");
        process.ok("destroycontext");
        assert_eq!(free(&mut process), GIB, "{create}");
    }
}

/// The driver detaches only the current context.
#[test]
fn keeps_charge_of_context_that_fails_to_end() {
    const BYTES: u64 = 100 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    for _ in 0..2 {
        process.ok("context3");
        process.ok(&format!("alloc {BYTES}"));
        process.ok("array 4096 4096 cuArrayCreate_v2");
        process.ok("init");
        assert_ne!(process.query("detachcontext")[0], 0);
        let used = BYTES + 64 * MIB;
        assert_eq!(container.ledger_bytes(), 2 * CONTEXT_BYTES + used);
        assert_eq!(free(&mut process), GIB - used);
        process.denied(&format!("alloc {}", GIB - used + 2 * MIB));
        process.ok("destroycontext");
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
        assert_eq!(free(&mut process), GIB);
    }
}

#[test]
fn releases_memory_of_primary_context_by_every_function() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    for end in [
        "cuDevicePrimaryCtxRelease",
        "cuDevicePrimaryCtxRelease_v2",
        "cuDevicePrimaryCtxReset",
        "cuDevicePrimaryCtxReset_v2",
    ] {
        process.ok(&format!("alloc {}", 600 * MIB));
        assert_eq!(free(&mut process), GIB - 600 * MIB, "{end}");
        process.ok(&format!("primary {end}"));
        assert_eq!(free(&mut process), GIB, "{end}");
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{end}");
    }
}

#[test]
fn releases_memory_with_last_green_context() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    for _ in 0..3 {
        // Creates and destroys the primary context.
        process.ok("green");
        assert_eq!(process.memory_info(), (GIB, GIB));
        process.denied(&format!("alloc {}", GIB + MIB));
        process.ok(&format!("alloc {}", 700 * MIB));
        assert_eq!(free(&mut process), GIB - 700 * MIB);
        process.denied(&format!("alloc {}", 700 * MIB));
        process.ok("destroygreen");
        assert_eq!(container.ledger_bytes(), 0);
    }
    process.ok("init");
    assert_eq!(free(&mut process), GIB);
}

#[test]
fn keeps_memory_of_primary_context_after_green_context() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    process.ok("green");
    process.ok(&format!("alloc {}", 300 * MIB));
    process.ok("destroygreen");
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 300 * MIB);
    // Also frees what was allocated in the green context.
    process.ok("primary cuDevicePrimaryCtxRelease_v2");
    assert_eq!(free(&mut process), GIB);
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
}

/// Physical memory that is mapped to a sparse array outlives its handle.
#[test]
fn keeps_charge_for_memory_mapped_to_sparse_array() {
    const BYTES: u64 = 4 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    process.ok("context3");
    let taken = |process: &mut TestProcess, bytes: u64, what: &str| {
        let contexts = 2 * CONTEXT_BYTES;
        assert_eq!(container.ledger_bytes(), contexts + bytes, "{what}");
        assert_eq!(free(process), GIB - bytes, "{what}");
    };
    for map in ["cuMemMapArrayAsync", "cuMemMapArrayAsync_ptsz"] {
        process.ok("sparsearray");
        taken(&mut process, 0, "an array without memory");
        // Unmapped with the ranges that were mapped.
        process.ok(&format!("create {BYTES}"));
        process.ok(&format!("tiles 0 2 0 {map}"));
        process.ok(&format!("tiles 2 1 0 {map}"));
        process.ok("release");
        taken(&mut process, BYTES, map);
        process.ok(&format!("tiles 0 2 1 {map}"));
        taken(&mut process, BYTES, "a part is mapped");
        process.ok(&format!("tiles 2 1 1 {map}"));
        taken(&mut process, 0, "unmapped");
        // Mapping other memory replaces the previous mapping.
        process.ok(&format!("create {BYTES}"));
        process.ok(&format!("tiles 0 2 0 {map}"));
        process.ok("release");
        process.ok(&format!("create {}", 2 * BYTES));
        process.ok(&format!("tiles 0 2 0 {map}"));
        process.ok("release");
        taken(&mut process, 2 * BYTES, "replaced");
        // A failed operation maps nothing.
        process.ok(&format!("create {BYTES}"));
        assert_ne!(process.query(&format!("tiles 0 9 0 {map}"))[0], 0);
        process.ok("release");
        taken(&mut process, 2 * BYTES, "failed");
        // Nor does it end the mapping that it would replace.
        assert_ne!(process.query(&format!("tiles 0 2 0 {map}"))[0], 0);
        taken(&mut process, 2 * BYTES, "released memory");
        // Unmapped with other ranges, the memory stays charged until the array is destroyed.
        process.ok(&format!("tiles 0 1 1 {map}"));
        process.ok(&format!("tiles 1 1 1 {map}"));
        assert_eq!(free(&mut process), GIB - 2 * BYTES);
        process.ok("destroysparse");
        taken(&mut process, 0, "destroyed");
    }
    process.ok("sparsearray");
    process.ok(&format!("create {BYTES}"));
    process.ok("tiles 0 1 0 cuMemMapArrayAsync");
    process.ok("release");
    process.ok("destroycontext");
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    assert_eq!(free(&mut process), GIB, "the array's context ended");
}

#[test]
fn keeps_charge_for_memory_bound_to_multicast_object() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    const BYTES: u64 = 4 * MIB;
    for bind in [
        "cuMulticastBindMem",
        "cuMulticastBindMem_v2",
        "cuMulticastBindAddr",
        "cuMulticastBindAddr_v2",
    ] {
        for end in [format!("unbind {BYTES}"), "releaseobject".to_owned()] {
            process.ok(&format!("object {BYTES}"));
            process.ok(&format!("create {BYTES}"));
            process.ok(&format!("map {BYTES}"));
            process.ok(&format!("bind {bind}"));
            assert_ne!(process.query(&format!("bind {bind}"))[0], 0, "bound");
            process.ok(&format!("unmap {BYTES}"));
            process.ok("release");
            assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + BYTES, "{bind}");
            assert_eq!(free(&mut process), GIB - BYTES, "{bind}");
            process.ok(&end);
            assert_eq!(container.ledger_bytes(), CONTEXT_BYTES, "{bind} {end}");
            assert_eq!(free(&mut process), GIB, "{bind} {end}");
            if end != "releaseobject" {
                process.ok("releaseobject");
            }
        }
    }
}

/// The driver rejects a part of a binding.
#[test]
fn keeps_charge_after_failed_unbind() {
    const BYTES: u64 = 4 * MIB;
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    for is_released_first in [true, false] {
        process.ok(&format!("object {BYTES}"));
        process.ok(&format!("create {BYTES}"));
        process.ok("bind cuMulticastBindMem");
        if is_released_first {
            process.ok("release");
        }
        assert_ne!(process.query(&format!("unbind {}", BYTES / 2))[0], 0);
        if !is_released_first {
            process.ok("release");
        }
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + BYTES);
        assert_eq!(free(&mut process), GIB - BYTES, "{is_released_first}");
        process.ok(&format!("unbind {BYTES}"));
        assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
        assert_eq!(free(&mut process), GIB, "{is_released_first}");
        process.ok("releaseobject");
    }
}

#[test]
fn counts_retained_handle_as_reference() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    const BYTES: u64 = 64 * MIB;
    process.ok(&format!("create {BYTES}"));
    process.ok(&format!("map {BYTES}"));
    process.ok("release");
    process.ok("retain");
    process.ok(&format!("unmap {BYTES}"));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + BYTES);
    assert_eq!(free(&mut process), GIB - BYTES);
    process.ok("release");
    assert_eq!(free(&mut process), GIB);
}

#[test]
fn charges_external_memory_of_another_share() {
    const BYTES: u64 = 64 * MIB;
    let container = Container::with_memory(GIB);
    let mut unlimited = container.unlimited_process();
    let memory = unlimited.ok(&format!("create {BYTES} 0 1"))[0];
    let exported = unlimited.ok(&format!("export {memory}"))[0];
    let mut process = start(&container);
    process.ok("init");
    let import = format!("external {} {exported}", unlimited.pid());
    process.ok(&import);
    assert_eq!(free(&mut process), GIB - BYTES);
    process.ok("destroyexternal");
    assert_eq!(free(&mut process), GIB);
    process.ok(&format!("alloc {}", GIB - BYTES + 2 * MIB));
    process.denied(&import);
}

#[test]
fn charges_external_memory_of_own_share_once() {
    const BYTES: u64 = 64 * MIB;
    let container = Container::with_memory(GIB);
    let mut first = start(&container);
    first.ok("init");
    first.ok(&format!("create {BYTES}"));
    let exported = first.ok("export")[0];
    let mut second = start(&container);
    second.ok("init");
    second.ok(&format!("external {} {exported}", first.pid()));
    assert_eq!(free(&mut second), GIB - BYTES);
}

#[test]
fn charges_memory_opened_by_handle_by_every_function() {
    const BYTES: u64 = 64 * MIB;
    let container = Container::with_memory(GIB);
    let mut unlimited = container.unlimited_process();
    let memory = unlimited.alloc(BYTES);
    let answer = unlimited.request(&format!("ipcget {memory}"));
    let handle = answer.strip_prefix("0 ").unwrap();
    let mut process = start(&container);
    process.ok("init");
    for open in ["cuIpcOpenMemHandle", "cuIpcOpenMemHandle_v2"] {
        process.ok(&format!("ipcopen {open} {handle}"));
        assert_eq!(free(&mut process), GIB - BYTES, "{open}");
        process.ok("ipcclose");
        assert_eq!(free(&mut process), GIB, "{open}");
    }
}

#[test]
fn charges_managed_pools_but_not_host_pools() {
    const HOST: [u32; 2] = [1, 2];
    const MANAGED: [[u32; 2]; 3] = [[2, 1], [2, 0], [2, 2]];
    let container = Container::with_memory(64 * MIB);
    let mut process = start(&container);
    process.ok("init");
    let all = || container.machine.gpu(0).unwrap().used_bytes;
    process.ok(&format!("pool {} {}", HOST[0], HOST[1]));
    process.ok(&format!("frompool {GIB}"));
    process.ok("hostpool");
    process.ok(&format!("frompool {GIB}"));
    assert_eq!(free(&mut process), 64 * MIB);
    for [kind, location] in MANAGED {
        process.ok(&format!("pool {kind} {location}"));
        assert_eq!(
            process.query(&format!("frompool {GIB}"))[0],
            OUT_OF_MEMORY,
            "{location}"
        );
    }
    assert_eq!(all(), CONTEXT_BYTES);
}

#[test]
fn charges_graph_memory_by_every_function() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("prepare");
    for instantiate in [
        "cuGraphInstantiate",
        "cuGraphInstantiate_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphInstantiateWithParams",
        "cuGraphInstantiateWithParams_ptsz",
    ] {
        for (use_it, bytes) in [
            ("cuGraphLaunch", 2 * GIB),
            ("cuGraphLaunch_ptsz", 2 * GIB),
            ("cuGraphUpload", 2 * GIB),
            ("cuGraphUpload_ptsz", 2 * GIB),
        ] {
            process.denied(&format!("graph {instantiate} {use_it} {bytes}"));
        }
    }
    process.ok(&format!(
        "graph cuGraphInstantiate_v2 cuGraphLaunch {}",
        100 * MIB
    ));
}

#[test]
fn keeps_charge_of_checkpointed_process() {
    const BYTES: u64 = 600 * MIB;
    let container = Container::with_memory(GIB);
    let mut first = start(&container);
    first.ok("init");
    first.ok(&format!("alloc {BYTES}"));
    let mut second = start(&container);
    second.ok("init");
    let pid = first.pid();
    let mut change = |what: &str| {
        second.ok(&format!("checkpoint cuCheckpointProcess{what} {pid}"));
    };
    change("Lock");
    change("Checkpoint");
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    second.denied(&format!("alloc {BYTES}"));
    assert_eq!(free(&mut second), GIB - BYTES);
    let mut change = |what: &str| {
        second.ok(&format!("checkpoint cuCheckpointProcess{what} {pid}"));
    };
    change("Restore");
    change("Unlock");
    assert_eq!(container.ledger_bytes(), 2 * CONTEXT_BYTES + BYTES);
    first.ok(&format!("alloc {}", 100 * MIB));
    assert_eq!(free(&mut second), GIB - BYTES - 100 * MIB);
}

#[test]
fn reports_limit_by_oldest_total_memory_function() {
    let container = Container::with_memory(GIB);
    let mut process = start(&container);
    process.ok("init");
    assert_eq!(process.ok("total1")[0].cast_unsigned(), GIB);
}
