//! Memory of graphs: taken when they are launched.

use crate::subject::{CONTEXT_BYTES, Container, GIB, MIB};

#[test]
fn a_graph_is_launched_if_the_memory_of_its_nodes_fits() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let exec = process.ok(&format!("graph 3 {} 1", 100 * MIB))[0];
    assert_eq!(container.taken(), CONTEXT_BYTES);
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    let kept = container.taken() - CONTEXT_BYTES;
    assert!(kept >= 100 * MIB, "{kept}");
    assert_eq!(process.memory_info().0, GIB - kept);
    // Once more, with what was kept.
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    assert_eq!(container.taken() - CONTEXT_BYTES, kept);
    let large = process.ok(&format!("graph 3 {} 0", 400 * MIB))[0];
    process.refused(&format!("launch {large}"));
    assert!(container.taken() - CONTEXT_BYTES <= GIB);
    process.ok(&format!("destroyexec {exec}"));
}

#[test]
fn what_graphs_keep_is_given_back_before_anything_is_refused() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let exec = process.ok(&format!("graph 2 {} 1", 400 * MIB))[0];
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    process.alloc(GIB);
    assert_eq!(container.taken(), GIB + CONTEXT_BYTES);
    process.refused(&format!("launch {exec}"));
    assert_eq!(container.taken(), GIB + CONTEXT_BYTES);
}

#[test]
fn memory_that_a_graph_leaves_behind_stays_counted() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let exec = process.ok(&format!("graph 1 {} 0", 600 * MIB))[0];
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    assert_eq!(container.taken(), 600 * MIB + CONTEXT_BYTES);
    assert_eq!(process.memory_info().0, GIB - 600 * MIB);
    process.refused(&format!("alloc {}", 500 * MIB));
    process.ok(&format!("destroyexec {exec}"));
    process.refused(&format!("alloc {}", 500 * MIB));
}
