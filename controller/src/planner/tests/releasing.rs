//! Allocations that nobody uses, or that are gone.

use std::time::Duration;

use drava_allocator::cluster::object_key;
use serde_json::json;

use super::world::{RELEASE_AFTER, World, applied};
use crate::change::{Change, Gone};
use crate::fixture::{claim, object, pod};

#[test]
fn an_allocation_that_nobody_reserves_is_released_and_planned_elsewhere() {
    let mut world = World::new(&["n1", "n2"]);
    world.wish("a", "8Gi");
    assert_eq!(world.settle(), ["a → n1"]);
    world.pass(RELEASE_AFTER - Duration::from_secs(1));
    assert!(world.actions().1.is_empty(), "too early");
    assert_eq!(
        world.planner.next_deadline(),
        Some(world.now + Duration::from_secs(1))
    );
    world.pass(Duration::from_secs(1));
    let (_, releases) = world.actions();
    assert_eq!(releases.len(), 1);
    assert!(world.actions().1.is_empty(), "once");
    world.carry_out(&releases[0]);
    assert!(world.settle().is_empty(), "a pause first");
    assert_eq!(
        world.told_about("Pod/a"),
        [
            "claim a had devices on node n1, but the pod was not bound there; planning again, that node last"
        ]
    );
    world.pass(Duration::from_secs(2));
    assert_eq!(world.settle(), ["a → n2"]);
    world.reserve("a", "a");
    world.pass(RELEASE_AFTER * 2);
    assert!(
        world.actions().1.is_empty(),
        "a reserved claim is never released"
    );
}

#[test]
fn a_release_that_failed_is_tried_again() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "8Gi");
    world.settle();
    world.pass(RELEASE_AFTER);
    let (_, releases) = world.actions();
    world
        .planner
        .released(&object_key(&releases[0].claim.metadata), None, world.now);
    assert!(world.actions().1.is_empty());
    world.pass(Duration::from_secs(5));
    assert_eq!(world.actions().1.len(), 1);
}

#[test]
fn an_allocation_taken_back_by_kube_scheduler_is_planned_again_with_its_siblings() {
    let mut world = World::new(&["n1", "n2"]);
    for name in ["a", "b"] {
        world.add_claim(claim(name, "8Gi"));
    }
    world.add_pod(pod("p", &["a", "b"]));
    assert_eq!(world.settle(), ["p → n1"]);
    world.deallocate("a");
    let (jobs, releases) = world.actions();
    assert!(jobs.is_empty());
    assert_eq!(releases.len(), 1, "the other claim of the pod goes, too");
    assert_eq!(releases[0].claim.metadata.name.as_deref(), Some("b"));
    world.carry_out(&releases[0]);
    world.pass(Duration::from_secs(10));
    assert_eq!(world.settle(), ["p → n2"]);
}

#[test]
fn a_pod_that_vanishes_frees_its_devices() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "70Gi");
    world.settle();
    world.pod_gone("a");
    world.wish("b", "70Gi");
    assert!(world.settle().is_empty());
    world.pass(Duration::from_secs(2));
    let (_, releases) = world.actions();
    assert_eq!(releases[0].why, "no pod waits for it");
    world.carry_out(&releases[0]);
    assert_eq!(world.settle(), ["b → n1"]);
}

#[test]
fn a_node_that_vanishes_frees_its_devices() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "8Gi");
    world.settle();
    world.planner.node(Change::Gone(Gone {
        name: "n1".to_owned(),
        ..Gone::default()
    }));
    let (_, releases) = world.actions();
    assert_eq!(releases[0].why, "the node is gone");
}

#[test]
fn allocations_of_others_are_left_alone() {
    let mut world = World::new(&["n1"]);
    let mut foreign = claim("a", "8Gi");
    foreign.status = Some(object(json!({"allocation": {"devices": {"results": [{
        "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
        "shareID": "x", "consumedCapacity": {"memory": "60Gi"},
    }]}}})));
    world.add_claim(foreign);
    world.pass(RELEASE_AFTER * 2);
    assert!(world.actions().1.is_empty());
    world.wish("b", "30Gi");
    assert!(world.settle().is_empty(), "but what they hold counts");
}

#[test]
fn late_events_do_not_undo_what_is_known() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "70Gi");
    let before = world.claims["a"].clone();
    world.settle();
    // The event of the creation arrives after the answer to the write.
    world.planner.claim(applied(before), world.now);
    world.wish("b", "70Gi");
    assert!(world.settle().is_empty());
    assert!(
        world.told_about("Pod/a").is_empty(),
        "nothing was taken back"
    );
    world.pass(Duration::from_secs(10));
    assert!(world.settle().is_empty(), "nothing is planned again");
}
