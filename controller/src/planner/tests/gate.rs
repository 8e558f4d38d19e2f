//! Gated pods.

use std::time::Duration;

use drava_api::names::ALLOCATION_GATE;
use serde_json::json;

use super::cluster::{RELEASE_AFTER, TestCluster};
use crate::action::AllocationFailure;
use crate::fixture::{claim, gated_pod, object, pod};

fn cluster_with_gated_pod(gates: &[&str]) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["a", "b"] {
        cluster.add_claim(claim(name, "8Gi"));
    }
    cluster.add_pod(gated_pod("p", &["a", "b"], gates));
    cluster
}

#[test]
fn removes_gate_after_watch_delivers_last_claim() {
    let mut cluster = cluster_with_gated_pod(&[ALLOCATION_GATE]);
    let (mut jobs, _) = cluster.actions();
    assert!(cluster.gate_removals.is_empty(), "the writes are in flight");
    cluster.write(jobs.remove(0));
    cluster.actions();
    assert!(cluster.gate_removals.is_empty(), "the watch lags behind");
    cluster.deliver_claims();
    cluster.actions();
    assert_eq!(cluster.finish_gate_removals(None), ["p"]);
    cluster.actions();
    assert!(cluster.gate_removals.is_empty(), "once");
}

#[test]
fn removes_gate_if_watch_precedes_response() {
    let mut cluster = cluster_with_gated_pod(&[ALLOCATION_GATE]);
    let (mut jobs, _) = cluster.actions();
    let job = jobs.remove(0);
    let written = cluster.written(&job);
    cluster.deliver_claims();
    cluster.actions();
    assert!(cluster.gate_removals.is_empty(), "the job has not ended");
    cluster.finish(job, written, None);
    cluster.actions();
    assert_eq!(cluster.finish_gate_removals(None), ["p"]);
}

#[test]
fn ignores_pod_with_foreign_gate() {
    let mut cluster = cluster_with_gated_pod(&["example.com/quota", ALLOCATION_GATE]);
    assert!(cluster.settle().is_empty());
    assert!(cluster.gate_removals.is_empty());
    assert!(cluster.events.is_empty(), "{:?}", cluster.events);
    cluster.add_pod(gated_pod("p", &["a", "b"], &[ALLOCATION_GATE]));
    assert_eq!(cluster.settle(), ["p → n1"]);
    assert_eq!(cluster.finish_gate_removals(None), ["p"]);
}

#[test]
fn removes_gate_left_by_previous_leader() {
    let mut previous = cluster_with_gated_pod(&[ALLOCATION_GATE]);
    previous.settle();
    assert_eq!(previous.gate_removals.len(), 1);

    let mut cluster = TestCluster::new(&["n1"]);
    for claim in previous.claims.into_values() {
        cluster.add_claim(claim);
    }
    cluster.add_pod(gated_pod("p", &["a", "b"], &[ALLOCATION_GATE]));
    assert!(cluster.settle().is_empty(), "allocated already");
    assert_eq!(cluster.finish_gate_removals(None), ["p"]);
}

#[test]
fn starts_release_timeout_at_gate_removal() {
    let mut cluster = cluster_with_gated_pod(&[ALLOCATION_GATE]);
    cluster.settle();
    cluster.advance(RELEASE_AFTER - Duration::from_secs(1));
    cluster.finish_gate_removals(None);
    cluster.add_pod(pod("p", &["a", "b"]));
    cluster.advance(RELEASE_AFTER - Duration::from_secs(1));
    assert!(cluster.actions().1.is_empty(), "too early");
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.actions().1.len(), 2);
}

#[test]
fn retains_gate_of_infeasible_pod_with_reason() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("a", "500Gi"));
    cluster.add_pod(gated_pod("p", &["a"], &[ALLOCATION_GATE]));
    assert!(cluster.settle().is_empty());
    assert!(cluster.gate_removals.is_empty());
    let messages = cluster.messages_of("Pod/p");
    assert!(messages[0].contains("InsufficientMemory"), "{messages:?}");
}

#[test]
fn removes_gate_of_pod_without_own_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut foreign = claim("a", "8Gi");
    foreign.spec = Some(object(json!({"devices": {"requests": [{
        "name": "gpu",
        "exactly": {
            "deviceClassName": "vgpu.example.com",
            "selectors": [{"cel": {"expression": r#"device.driver == "gpu.example.com""#}}],
        },
    }]}})));
    cluster.add_claim(foreign);
    cluster.add_pod(gated_pod("p", &["a"], &[ALLOCATION_GATE]));
    cluster.actions();
    assert_eq!(cluster.finish_gate_removals(None), ["p"]);
    assert!(cluster.events.is_empty(), "{:?}", cluster.events);
}

#[test]
fn waits_for_missing_claim_of_gated_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(gated_pod("p", &["a"], &[ALLOCATION_GATE]));
    cluster.actions();
    assert!(cluster.gate_removals.is_empty());
    cluster.add_claim(claim("a", "8Gi"));
    assert_eq!(cluster.settle(), ["p → n1"]);
}

#[test]
fn retries_failed_gate_removal_after_backoff() {
    let mut cluster = cluster_with_gated_pod(&[ALLOCATION_GATE]);
    cluster.settle();
    let failure = AllocationFailure {
        message: "cannot remove the scheduling gate: forbidden".to_owned(),
        is_reportable: true,
    };
    cluster.finish_gate_removals(Some(&failure));
    cluster.actions();
    assert!(cluster.gate_removals.is_empty(), "backoff");
    assert_eq!(cluster.messages_of("Pod/p"), [failure.message.as_str()]);
    cluster.advance(Duration::from_secs(1));
    cluster.actions();
    assert_eq!(cluster.finish_gate_removals(None), ["p"]);
}
