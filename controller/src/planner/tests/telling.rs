//! What users are told, and how often.

use std::time::Duration;

use serde_json::json;

use super::world::{World, applied};
use crate::fixture::{object, slice};

#[test]
fn the_same_text_is_said_once() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "100Gi");
    world.settle();
    for _ in 0..5 {
        world.pass(Duration::from_secs(20));
        world.planner.node(applied(object(json!({
            "metadata": {"name": "n2", "labels": {"changed": format!("{:?}", world.now)}},
        }))));
        world.settle();
    }
    assert_eq!(
        world.told_about("Pod/a"),
        [
            "0/1 nodes: 1 InsufficientMemory (requested memory 100 GiB exceeds the largest GPU, 80 GiB on n1/gpu-0)"
        ]
    );
    // A new node is news.
    world.planner.slice(applied(slice("n2")));
    world.settle();
    assert_eq!(world.told_about("Pod/a").len(), 2);
}

#[test]
fn a_malformed_pool_is_named_once() {
    let mut world = World::new(&["n1", "n2"]);
    let mut broken = slice("n1");
    broken.metadata.resource_version = Some("2".to_owned());
    let devices = broken.spec.devices.as_mut().unwrap();
    devices.push(devices[0].clone());
    world.planner.slice(applied(broken));
    world.wish("a", "8Gi");
    assert_eq!(world.settle(), ["a → n2"]);
    world.settle();
    assert_eq!(
        world.told_about("Node/n1"),
        ["pool n1/gpus is excluded from allocation: slice slice-n1: duplicate device gpu-0-vgpu"]
    );
}
