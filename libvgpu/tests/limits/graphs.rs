//! Memory of graphs, charged at launch.

use crate::test_process::{CONTEXT_BYTES, Container, GIB, MIB};

#[test]
fn launches_graph_only_if_its_node_memory_fits() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let exec = process.ok(&format!("graph 3 {} 1", 100 * MIB))[0];
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    let kept = container.ledger_bytes() - CONTEXT_BYTES;
    assert!(kept >= 100 * MIB, "{kept}");
    assert_eq!(process.memory_info().0, GIB - kept);
    // The second launch uses the memory that the first one cached.
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    assert_eq!(container.ledger_bytes() - CONTEXT_BYTES, kept);
    let large = process.ok(&format!("graph 3 {} 0", 400 * MIB))[0];
    process.denied(&format!("launch {large}"));
    assert!(container.ledger_bytes() - CONTEXT_BYTES <= GIB);
    process.ok(&format!("destroyexec {exec}"));
}

#[test]
fn trims_graph_memory_before_denying() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let exec = process.ok(&format!("graph 2 {} 1", 400 * MIB))[0];
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    process.alloc(GIB);
    assert_eq!(container.ledger_bytes(), GIB + CONTEXT_BYTES);
    process.denied(&format!("launch {exec}"));
    assert_eq!(container.ledger_bytes(), GIB + CONTEXT_BYTES);
}

#[test]
fn keeps_charge_for_memory_allocated_by_graph() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let exec = process.ok(&format!("graph 1 {} 0", 600 * MIB))[0];
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    assert_eq!(container.ledger_bytes(), 600 * MIB + CONTEXT_BYTES);
    assert_eq!(process.memory_info().0, GIB - 600 * MIB);
    process.denied(&format!("alloc {}", 500 * MIB));
    process.ok(&format!("destroyexec {exec}"));
    process.denied(&format!("alloc {}", 500 * MIB));
}

/// Launches of one executable graph are ordered, so they need its memory once.
#[test]
fn relaunches_graph_before_first_launch_completes() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let word = process.alloc(2 * MIB);
    let streams = [(); 2].map(|()| process.ok("stream")[0]);
    let exec = process.ok(&format!("graph 1 {} 1", 600 * MIB))[0];
    let other = process.ok(&format!("graph 1 {} 1", 500 * MIB))[0];
    process.ok(&format!("stall {} {word}", streams[0]));
    let taken = CONTEXT_BYTES + 602 * MIB;
    for stream in streams.into_iter().cycle().take(6) {
        process.ok(&format!("launchin {exec} {stream}"));
        assert_eq!(container.ledger_bytes(), taken);
        assert_eq!(process.memory_info().0, GIB - 602 * MIB);
    }
    // Another graph cannot use the memory of the running one.
    process.denied(&format!("launchin {other} {}", streams[1]));
    process.denied(&format!("alloc {}", 500 * MIB));
    assert_eq!(container.ledger_bytes(), taken);
    process.ok(&format!("set {word}"));
    process.ok("sync");
    process.ok(&format!("launchin {other} {}", streams[1]));
    process.ok("sync");
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 502 * MIB);
    process.ok(&format!("launchin {exec} {}", streams[1]));
    process.ok("sync");
    assert_eq!(container.ledger_bytes(), taken);
    assert_eq!(process.memory_info().0, GIB - 602 * MIB);
}

/// Two graphs that run concurrently each need their own memory.
#[test]
fn charges_relaunched_graphs_for_their_combined_memory() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let word = process.alloc(2 * MIB);
    let streams = [(); 2].map(|()| process.ok("stream")[0]);
    let execs = [300, 200].map(|mib| process.ok(&format!("graph 1 {} 1", mib * MIB))[0]);
    process.ok(&format!("stall {} {word}", streams[0]));
    process.ok(&format!("stall {} {word}", streams[1]));
    for _ in 0..4 {
        for (exec, stream) in execs.into_iter().zip(streams) {
            process.ok(&format!("launchin {exec} {stream}"));
        }
    }
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 502 * MIB);
    // There is room for a third graph, and all three can be launched again.
    let third = process.ok(&format!("graph 1 {} 1", 500 * MIB))[0];
    process.ok(&format!("launchin {third} {}", streams[0]));
    for exec in [execs[0], third, execs[1]] {
        process.ok(&format!("launchin {exec} {}", streams[0]));
    }
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 1002 * MIB);
    assert_eq!(process.memory_info().0, 22 * MIB);
    process.denied(&format!("alloc {}", 24 * MIB));
    process.ok(&format!("set {word}"));
    process.ok("sync");
    process.alloc(GIB - 2 * MIB);
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + GIB);
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
#[test]
fn charges_graph_uploaded_at_instantiation() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.denied(&format!("graph 2 {} 0 1", 600 * MIB));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES);
    let exec = process.ok(&format!("graph 2 {} 0 1", 400 * MIB))[0];
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 800 * MIB);
    assert_eq!(process.memory_info().0, GIB - 800 * MIB);
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 800 * MIB);
    process.denied(&format!("graph 1 {} 1 1", 300 * MIB));
    process.denied(&format!("alloc {}", 300 * MIB));
    assert_eq!(process.memory_info().0, GIB - 800 * MIB);
}

/// An uploaded graph counts as launched.
#[test]
fn relaunches_other_graph_after_upload() {
    let container = Container::with_memory(502 * MIB);
    let mut process = container.process();
    let word = process.alloc(2 * MIB);
    let stream = process.ok("stream")[0];
    process.ok(&format!("stall {stream} {word}"));
    let exec = process.ok(&format!("graph 1 {} 1", 200 * MIB))[0];
    process.ok(&format!("launchin {exec} {stream}"));
    process.ok(&format!("graph 1 {} 1 1", 300 * MIB));
    assert_eq!(process.memory_info().0, 0);
    process.ok(&format!("launchin {exec} {stream}"));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 502 * MIB);
    process.ok(&format!("set {word}"));
}

/// A denied launch returns the memory that was reserved for it.
#[test]
fn keeps_account_unchanged_by_denied_launch() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let word = process.alloc(2 * MIB);
    let stream = process.ok("stream")[0];
    let exec = process.ok(&format!("graph 1 {} 1", 400 * MIB))[0];
    let smaller = process.ok(&format!("graph 1 {} 1", 300 * MIB))[0];
    // Both were launched, and their memory was released.
    process.ok(&format!("launch {smaller}"));
    process.ok("sync");
    let all = process.alloc(GIB - 2 * MIB);
    process.ok(&format!("free {all}"));
    process.ok(&format!("stall {stream} {word}"));
    process.ok(&format!("launchin {exec} {stream}"));
    // The smaller graph may later need its memory in addition.
    let rest = process.alloc(400 * MIB);
    process.denied(&format!("launchin {exec} {stream}"));
    assert_eq!(process.memory_info().0, 222 * MIB);
    process.ok(&format!("free {rest}"));
    process.ok(&format!("launchin {exec} {stream}"));
    process.ok(&format!("set {word}"));
    process.ok("sync");
    process.alloc(GIB - 2 * MIB);
}

/// The driver has more memory for graphs than the library knows of, so the library does not rely on its reuse.
#[test]
fn reuses_no_memory_of_graph_launched_by_address() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let word = process.alloc(2 * MIB);
    let stream = process.ok("stream")[0];
    let launch = process.ok("addressof cuGraphLaunch")[0];
    let unseen = process.ok(&format!("graph 1 {} 0", 200 * MIB))[0];
    process.ok(&format!("launchat {unseen} {launch}"));
    let exec = process.ok(&format!("graph 1 {} 1", 300 * MIB))[0];
    process.ok(&format!("stall {stream} {word}"));
    process.ok(&format!("launchin {exec} {stream}"));
    assert_eq!(process.memory_info().0, GIB - 502 * MIB);
    let rest = process.alloc(300 * MIB);
    process.denied(&format!("launchin {exec} {stream}"));
    process.ok(&format!("free {rest}"));
    process.ok(&format!("launchin {exec} {stream}"));
    assert_eq!(container.ledger_bytes(), CONTEXT_BYTES + 502 * MIB);
    process.ok(&format!("set {word}"));
}
