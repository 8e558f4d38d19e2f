//! Decisions in time slices.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::fixture::{claim, class, node, object, pod};

#[test]
fn decides_for_every_pod_in_slices_under_churn() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_slice_over = |_| true;
    for name in ["a", "b", "c"] {
        cluster.add_pod_with_claim(name, "100Gi");
    }
    cluster.add_pod_with_claim("d", "8Gi");
    let mut jobs = Vec::new();
    for _ in 0..4 {
        // Activates all pods.
        cluster.planner.class(applied(class()));
        cluster.advance(Duration::from_millis(100));
        assert!(jobs.is_empty());
        jobs = cluster.actions().0;
        let deadline = cluster.planner.next_deadline();
        assert!(deadline.is_some_and(|deadline| deadline <= cluster.now) || !jobs.is_empty());
    }
    assert_eq!(
        jobs.len(),
        1,
        "one decision per slice, and none is repeated before the last"
    );
}

/// Returns the number of decisions that a change causes while two pods wait that fit on no node.
fn decisions_after(change: impl FnOnce(&mut TestCluster)) -> u64 {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut cpu_only: Pod = pod("cpu", &[]);
    cpu_only.spec.as_mut().unwrap().node_name = Some("n2".to_owned());
    cluster.add_pod(cpu_only);
    cluster.add_claim(claim("unused", "1Gi"));
    cluster.add_pod_with_claim("small", "8Gi");
    cluster.add_pod_with_claim("a", "100Gi");
    cluster.add_pod_with_claim("b", "100Gi");
    assert_eq!(cluster.settle(), ["small → n1"]);
    let before = cluster.planner.decisions();
    change(&mut cluster);
    cluster.settle();
    cluster.planner.decisions() - before
}

#[test]
fn unrelated_changes_cause_no_decision() {
    assert_eq!(decisions_after(|cluster| cluster.delete_pod("cpu")), 0);
    assert_eq!(decisions_after(|cluster| cluster.delete_claim("unused")), 0);
    assert_eq!(
        decisions_after(|cluster| cluster.planner.node(applied(node("n1")))),
        0,
        "an unchanged node"
    );
    assert_eq!(
        decisions_after(|cluster| cluster.planner.namespace(applied(object(json!({
            "metadata": {"name": "other", "uid": "other", "labels": {"a": "b"}},
        }))))),
        0
    );
    let of_claim = decisions_after(|cluster| cluster.observe(claim("a", "100Gi")));
    assert_eq!(of_claim, 1, "only the pod of a changed claim");
    assert_eq!(
        decisions_after(|cluster| cluster.end("small")),
        2,
        "a release may help all that wait"
    );
}
