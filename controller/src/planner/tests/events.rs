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

/// Executes the writes of conditions; returns the pod and the status and message of each.
fn write_conditions(cluster: &mut TestCluster) -> Vec<(String, String, String)> {
    let mut written = Vec::new();
    for update in std::mem::take(&mut cluster.pod_conditions) {
        let name = update.pod.name.unwrap();
        let condition = update.condition;
        let message = condition.message.clone().unwrap();
        written.push((name.clone(), condition.status.clone(), message));
        let mut pod = cluster.pods[&name].clone();
        let status = pod.status.get_or_insert_default();
        let conditions = status.conditions.get_or_insert_default();
        conditions.retain(|other| other.type_ != condition.type_);
        conditions.push(condition);
        cluster.add_pod(pod);
    }
    written
}

#[test]
fn condition_tells_why_pod_waits_until_it_is_allocated() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("first", "60Gi");
    assert_eq!(cluster.settle(), ["first → n1"]);
    assert!(write_conditions(&mut cluster).is_empty(), "it did not wait");
    cluster.add_pod_with_claim("second", "60Gi");
    cluster.settle();
    let written = write_conditions(&mut cluster);
    assert_eq!(written.len(), 1, "{written:?}");
    let (name, status, message) = &written[0];
    assert_eq!((name.as_str(), status.as_str()), ("second", "False"));
    assert_eq!(
        cluster.messages_of("Pod/second"),
        [message.as_str()],
        "as the event"
    );
    let decisions = cluster.planner.decisions();
    cluster.settle();
    assert_eq!(cluster.planner.decisions(), decisions, "its own change");
    // A new leader publishes the event again, but the condition is the same.
    cluster.change_leader();
    cluster.settle();
    assert!(write_conditions(&mut cluster).is_empty());
    cluster.end("first");
    assert_eq!(cluster.settle(), ["second → n1"]);
    cluster.settle();
    let written = write_conditions(&mut cluster);
    assert!(!written.is_empty());
    assert!(
        written
            .iter()
            .all(|(name, status, _)| name == "second" && status == "True")
    );
    cluster.settle();
    assert!(write_conditions(&mut cluster).is_empty(), "once");
}
