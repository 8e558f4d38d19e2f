//! Pods whose claims do not exist, or cannot be used.

use std::time::Duration;

use drava_api::listed::{Change, DeletedObject};
use drava_api::names::ALLOCATION_GATE;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::fixture::{claim, gated_pod, object, pod};

/// Gated pod with a claim of the template `t`.
fn templated(name: &str) -> Pod {
    let mut pod = gated_pod(name, &[], &[ALLOCATION_GATE]);
    pod.spec.as_mut().unwrap().resource_claims = Some(vec![object(json!({
        "name": "gpu", "resourceClaimTemplateName": "t",
    }))]);
    pod
}

/// kube-controller-manager creates the claim of a pod.
fn create_claim(cluster: &mut TestCluster, name: &str) {
    cluster.add_claim(claim(name, "1Gi"));
    let mut pod = cluster.pods[name].clone();
    pod.status.get_or_insert_default().resource_claim_statuses = Some(vec![object(
        json!({"name": "gpu", "resourceClaimName": name}),
    )]);
    cluster.add_pod(pod);
}

fn add_template(cluster: &mut TestCluster) {
    let template = json!({"metadata": {"name": "t", "namespace": "default"}});
    cluster.planner.template(applied(object(template)));
}

/// Lets time pass until conditions are written. Returns them.
fn wait(cluster: &mut TestCluster) -> Vec<String> {
    for _ in 0..1000 {
        cluster.now = cluster.planner.next_deadline().unwrap().max(cluster.now);
        assert!(cluster.settle().is_empty());
        if !cluster.pod_conditions.is_empty() {
            break;
        }
    }
    let written = std::mem::take(&mut cluster.pod_conditions);
    let mut messages = Vec::new();
    for update in written {
        messages.push(update.condition.message.clone().unwrap());
        let mut pod = cluster.pods[&update.pod.name.unwrap()].clone();
        pod.status.get_or_insert_default().conditions = Some(vec![update.condition]);
        cluster.add_pod(pod);
    }
    messages
}

#[test]
fn claim_that_is_created_in_time_is_not_reported() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_template(&mut cluster);
    cluster.add_pod(templated("a"));
    assert!(cluster.settle().is_empty());
    create_claim(&mut cluster, "a");
    assert_eq!(cluster.settle(), ["a → n1"], "at once");
    assert!(cluster.pod_conditions.is_empty());
    assert!(cluster.messages_of("Pod/a").is_empty());
}

#[test]
fn missing_template_is_reported_within_two_seconds() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(templated("a"));
    assert!(cluster.settle().is_empty());
    let text = "ClaimMissing: claim template t does not exist; create it, or correct the name in spec.resourceClaims";
    assert_eq!(wait(&mut cluster), [text]);
    assert!(cluster.now <= cluster.start + Duration::from_secs(2));
    assert_eq!(cluster.messages_of("Pod/a"), [text], "as an event, too");
    let pending = cluster.planner.metrics().pending;
    assert_eq!(pending[&Some(Reason::ClaimMissing)], 1);
    add_template(&mut cluster);
    create_claim(&mut cluster, "a");
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn refused_claim_is_reported_and_tried_again() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_template(&mut cluster);
    cluster.add_pod(templated("a"));
    assert!(cluster.settle().is_empty());
    let text = "ClaimMissing: claim gpu is not created from its template t; the event FailedResourceClaimCreation of the pod says \
                why, for example a ResourceQuota";
    assert_eq!(wait(&mut cluster), [text]);
    let mut pauses = Vec::new();
    for _ in 0..7 {
        let before = cluster.now;
        assert_eq!(wait(&mut cluster), [text], "the pod changes");
        pauses.push((cluster.now - before).as_secs());
    }
    assert_eq!(pauses, [5, 10, 20, 40, 80, 120, 120]);
    // The quota is free.
    let deleted = DeletedObject {
        namespace: "default".to_owned(),
        name: "other".to_owned(),
        uid: "other".to_owned(),
    };
    let now = cluster.now;
    cluster.planner.claim(Change::Deleted(deleted), now);
    assert_eq!(wait(&mut cluster), [text]);
    assert_eq!(cluster.now, now + Duration::from_secs(1));
    create_claim(&mut cluster, "a");
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn claim_in_deletion_is_reported_at_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut shared = claim("shared", "1Gi");
    shared.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")));
    cluster.add_claim(shared);
    cluster.add_pod(gated_pod("a", &["shared"], &[ALLOCATION_GATE]));
    assert!(cluster.settle().is_empty());
    let text = "ClaimMissing: claim shared is being deleted, and exists until its last pod ends; create it again then, or name \
                another claim";
    assert_eq!(cluster.messages_of("Pod/a"), [text]);
    cluster.delete_claim("shared");
    cluster.add_claim(claim("shared", "1Gi"));
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn claim_of_another_pod_is_reported() {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut generated = claim("other-gpu", "1Gi");
    generated.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "other", "uid": "pod-other", "controller": true,
    }))]);
    cluster.add_claim(generated);
    cluster.add_pod(gated_pod("a", &["other-gpu"], &[ALLOCATION_GATE]));
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.messages_of("Pod/a"),
        [
            "ClaimMissing: claim other-gpu was created for pod other alone; name another claim, or a template"
        ]
    );
}

#[test]
fn pod_without_gate_may_wait_for_another_driver() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(pod("a", &["missing"]));
    assert!(cluster.settle().is_empty());
    cluster.advance(Duration::from_secs(10));
    assert!(cluster.settle().is_empty());
    assert!(cluster.messages_of("Pod/a").is_empty());
}

#[test]
fn missing_claim_that_turns_out_foreign_makes_no_decision_due() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(gated_pod("a", &["x"], &[ALLOCATION_GATE]));
    assert!(cluster.settle().is_empty());
    assert_eq!(wait(&mut cluster).len(), 1);
    let mut foreign = claim("x", "1Gi");
    foreign.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "other", "uid": "other", "controller": true,
    }))]);
    cluster.add_claim(foreign);
    for _ in 0..4 {
        let deadline = cluster.planner.next_deadline();
        cluster.now = deadline.unwrap_or(cluster.now).max(cluster.now);
        assert!(cluster.settle().is_empty());
    }
    let deadline = cluster.planner.next_deadline();
    assert!(
        deadline.is_none_or(|deadline| deadline > cluster.now),
        "the leader would not sleep"
    );
}
