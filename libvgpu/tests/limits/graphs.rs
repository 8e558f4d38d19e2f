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

/// Launches of one executable graph come after each other, so they need its memory once.
#[test]
fn a_graph_is_launched_again_before_its_first_launch_is_over() {
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
        assert_eq!(container.taken(), taken);
        assert_eq!(process.memory_info().0, GIB - 602 * MIB);
    }
    // What the first one uses is no other graph's.
    process.refused(&format!("launchin {other} {}", streams[1]));
    process.refused(&format!("alloc {}", 500 * MIB));
    assert_eq!(container.taken(), taken);
    process.ok(&format!("tell {word}"));
    process.ok("sync");
    process.ok(&format!("launchin {other} {}", streams[1]));
    process.ok("sync");
    assert_eq!(container.taken(), CONTEXT_BYTES + 502 * MIB);
    process.ok(&format!("launchin {exec} {}", streams[1]));
    process.ok("sync");
    assert_eq!(container.taken(), taken);
    assert_eq!(process.memory_info().0, GIB - 602 * MIB);
}

/// Of two graphs that are at work at the same time, each has its own.
#[test]
fn graphs_that_are_launched_again_have_what_all_of_them_need() {
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
    assert_eq!(container.taken(), CONTEXT_BYTES + 502 * MIB);
    // There is room for a third one, and all three can be launched again.
    let third = process.ok(&format!("graph 1 {} 1", 500 * MIB))[0];
    process.ok(&format!("launchin {third} {}", streams[0]));
    for exec in [execs[0], third, execs[1]] {
        process.ok(&format!("launchin {exec} {}", streams[0]));
    }
    assert_eq!(container.taken(), CONTEXT_BYTES + 1002 * MIB);
    assert_eq!(process.memory_info().0, 22 * MIB);
    process.refused(&format!("alloc {}", 24 * MIB));
    process.ok(&format!("tell {word}"));
    process.ok("sync");
    process.alloc(GIB - 2 * MIB);
    assert_eq!(container.taken(), CONTEXT_BYTES + GIB);
}

/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`
#[test]
fn a_graph_that_is_uploaded_as_it_is_made_has_its_memory_from_then_on() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    process.refused(&format!("graph 2 {} 0 1", 600 * MIB));
    assert_eq!(container.taken(), CONTEXT_BYTES);
    let exec = process.ok(&format!("graph 2 {} 0 1", 400 * MIB))[0];
    assert_eq!(container.taken(), CONTEXT_BYTES + 800 * MIB);
    assert_eq!(process.memory_info().0, GIB - 800 * MIB);
    process.ok(&format!("launch {exec}"));
    process.ok("sync");
    assert_eq!(container.taken(), CONTEXT_BYTES + 800 * MIB);
    process.refused(&format!("graph 1 {} 1 1", 300 * MIB));
    process.refused(&format!("alloc {}", 300 * MIB));
    assert_eq!(process.memory_info().0, GIB - 800 * MIB);
}

/// It counts as one that was launched.
#[test]
fn a_graph_that_was_uploaded_keeps_no_other_from_being_launched_again() {
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
    assert_eq!(container.taken(), CONTEXT_BYTES + 502 * MIB);
    process.ok(&format!("tell {word}"));
}

/// What was lent to a launch that is refused is not kept.
#[test]
fn a_launch_that_is_refused_leaves_the_account_as_it_was() {
    let container = Container::with_memory(GIB);
    let mut process = container.process();
    let word = process.alloc(2 * MIB);
    let stream = process.ok("stream")[0];
    let exec = process.ok(&format!("graph 1 {} 1", 400 * MIB))[0];
    let smaller = process.ok(&format!("graph 1 {} 1", 300 * MIB))[0];
    // Both were launched, and what they had is given back.
    process.ok(&format!("launch {smaller}"));
    process.ok("sync");
    let all = process.alloc(GIB - 2 * MIB);
    process.ok(&format!("free {all}"));
    process.ok(&format!("stall {stream} {word}"));
    process.ok(&format!("launchin {exec} {stream}"));
    // The smaller one might come to need its memory beside that.
    let rest = process.alloc(400 * MIB);
    process.refused(&format!("launchin {exec} {stream}"));
    assert_eq!(process.memory_info().0, 222 * MIB);
    process.ok(&format!("free {rest}"));
    process.ok(&format!("launchin {exec} {stream}"));
    process.ok(&format!("tell {word}"));
    process.ok("sync");
    process.alloc(GIB - 2 * MIB);
}

/// The driver has more than is known of its graphs, so it is not relied on to keep to that.
#[test]
fn what_is_launched_by_address_serves_no_other_graph() {
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
    process.refused(&format!("launchin {exec} {stream}"));
    process.ok(&format!("free {rest}"));
    process.ok(&format!("launchin {exec} {stream}"));
    assert_eq!(container.taken(), CONTEXT_BYTES + 502 * MIB);
    process.ok(&format!("tell {word}"));
}
