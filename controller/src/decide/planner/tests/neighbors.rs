//! Pods with rules about other pods.

use serde_json::json;

use super::cluster::TestCluster;
use crate::fixture::{claim, object, pod};

/// Adds a pod of an application whose pods keep to different nodes.
fn add_apart(cluster: &mut TestCluster, name: &str) {
    cluster.add_claim(claim(name, "8Gi"));
    let mut pod = pod(name, &[name]);
    pod.metadata.labels = Some(object(json!({"app": "apart"})));
    pod.spec.as_mut().unwrap().affinity = Some(object(json!({
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{
            "topologyKey": "host",
            "labelSelector": {"matchLabels": {"app": "apart"}},
        }]},
    })));
    cluster.add_pod(pod);
}

fn cluster_with_hosts(names: &[&str]) -> TestCluster {
    let mut cluster = TestCluster::new(names);
    for name in names {
        let mut node = crate::fixture::node(name);
        node.metadata.labels = Some(object(json!({"host": name})));
        cluster.planner.node(super::cluster::applied(node));
    }
    cluster
}

#[test]
fn plans_pods_with_anti_affinity_on_different_nodes() {
    let mut cluster = cluster_with_hosts(&["n1", "n2"]);
    for name in ["a", "b", "c"] {
        add_apart(&mut cluster, name);
    }
    assert_eq!(cluster.settle(), ["a → n1", "b → n2"]);
    let reasons = cluster.messages_of("Pod/c").join("; ");
    assert!(
        reasons.contains("2 NodeUnfit (pod anti-affinity excludes the node)"),
        "{reasons}"
    );
    for placement in [("a", "n1"), ("b", "n2")] {
        cluster.bind(placement);
    }
    assert!(cluster.settle().is_empty());
    cluster.end("b");
    assert_eq!(cluster.settle(), ["c → n2"]);
}

#[test]
fn pod_with_affinity_follows_newly_bound_pod() {
    let mut cluster = cluster_with_hosts(&["n1", "n2"]);
    cluster.add_claim(claim("follower", "8Gi"));
    let mut follower = pod("follower", &["follower"]);
    follower.spec.as_mut().unwrap().affinity = Some(object(json!({
        "podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{
            "topologyKey": "host",
            "labelSelector": {"matchLabels": {"app": "cache"}},
        }]},
    })));
    cluster.add_pod(follower);
    assert!(cluster.settle().is_empty());
    let mut cache = pod("cache", &[]);
    cache.metadata.labels = Some(object(json!({"app": "cache"})));
    cache.spec.as_mut().unwrap().node_name = Some("n2".to_owned());
    cluster.add_pod(cache);
    assert_eq!(cluster.settle(), ["follower → n2"]);
}
