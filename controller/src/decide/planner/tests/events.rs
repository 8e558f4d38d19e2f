//! Events and their repetition.

use std::time::Duration;

use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::fixture::{object, slice};

#[test]
fn publishes_unchanged_text_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "100Gi");
    cluster.settle();
    for _ in 0..5 {
        cluster.advance(Duration::from_secs(20));
        cluster.planner.node(applied(object(json!({
            "metadata": {"name": "n2", "labels": {"changed": format!("{:?}", cluster.now)}},
        }))));
        cluster.settle();
    }
    assert_eq!(
        cluster.messages_of("Pod/a"),
        [
            "0/1 nodes: 1 InsufficientMemory (requested memory 100 GiB exceeds the largest GPU, 80 GiB on n1/gpu-0)"
        ]
    );
    // A new node changes the text.
    cluster.planner.slice(applied(slice("n2")));
    cluster.settle();
    assert_eq!(cluster.messages_of("Pod/a").len(), 2);
}

#[test]
fn reports_malformed_pool_once() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut broken = slice("n1");
    broken.metadata.resource_version = Some("2".to_owned());
    let devices = broken.spec.devices.as_mut().unwrap();
    devices.push(devices[0].clone());
    cluster.planner.slice(applied(broken));
    cluster.add_pod_with_claim("a", "8Gi");
    assert_eq!(cluster.settle(), ["a → n2"]);
    cluster.settle();
    assert_eq!(
        cluster.messages_of("Node/n1"),
        ["pool n1/gpus is excluded from allocation: slice slice-n1: duplicate device gpu-0-vgpu"]
    );
}
