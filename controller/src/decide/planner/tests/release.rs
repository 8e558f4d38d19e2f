//! Unreserved and lost allocations.

use std::time::Duration;

use drava_api::listed::{Change, DeletedObject};
use drava_api::names::ALLOCATION_GATE;
use k8s_openapi::api::core::v1::PodStatus;
use serde_json::json;

use super::cluster::{RELEASE_AFTER, TestCluster, applied};
use crate::action::event::ReleaseReason;
use crate::fixture::{claim, gated_pod, object, pod};

#[test]
fn releases_unreserved_allocation_and_avoids_node() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_pod_with_claim("a", "8Gi");
    assert_eq!(cluster.settle(), ["a → n1"]);
    cluster.reject("a");
    cluster.advance(RELEASE_AFTER - Duration::from_secs(1));
    assert!(cluster.actions().1.is_empty(), "too early");
    assert_eq!(
        cluster.planner.next_deadline(),
        Some(cluster.now + Duration::from_secs(1))
    );
    cluster.advance(Duration::from_secs(1));
    let (_, releases) = cluster.actions();
    assert_eq!(releases.len(), 1);
    assert!(cluster.actions().1.is_empty(), "once");
    cluster.release(&releases[0]);
    assert!(cluster.settle().is_empty(), "backoff");
    assert_eq!(
        cluster.messages_of("Pod/a"),
        [
            "claim default/a: the allocation on node n1 was released, because the pod was not bound there; \
             allocating again, node n1 last"
        ]
    );
    cluster.advance(Duration::from_secs(2));
    assert_eq!(cluster.settle(), ["a → n2"]);
    cluster.reserve("a", "a");
    cluster.advance(RELEASE_AFTER * 2);
    assert!(
        cluster.actions().1.is_empty(),
        "a reserved claim is not released"
    );
}

#[test]
fn retries_failed_release() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    cluster.reject("a");
    cluster.advance(RELEASE_AFTER);
    let (_, releases) = cluster.actions();
    cluster.release_finished(&releases[0], None);
    assert!(cluster.actions().1.is_empty());
    cluster.advance(Duration::from_secs(5));
    assert_eq!(cluster.actions().1.len(), 1);
}

#[test]
fn releases_siblings_of_lost_allocation() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    for name in ["a", "b"] {
        cluster.add_claim(claim(name, "8Gi"));
    }
    cluster.add_pod(pod("p", &["a", "b"]));
    assert_eq!(cluster.settle(), ["p → n1"]);
    cluster.deallocate("a");
    let (jobs, releases) = cluster.actions();
    assert!(jobs.is_empty());
    assert_eq!(
        releases.len(),
        1,
        "the other claim of the pod is released, too"
    );
    assert_eq!(releases[0].claim.metadata.name.as_deref(), Some("b"));
    cluster.release(&releases[0]);
    cluster.advance(Duration::from_secs(10));
    assert_eq!(cluster.settle(), ["p → n2"]);
}

#[test]
fn releases_devices_of_deleted_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "70Gi");
    cluster.settle();
    cluster.delete_pod("a");
    cluster.add_pod_with_claim("b", "70Gi");
    assert!(cluster.settle().is_empty());
    cluster.advance(Duration::from_secs(2));
    let (_, releases) = cluster.actions();
    assert_eq!(releases[0].reason, ReleaseReason::NoPendingPod);
    cluster.release(&releases[0]);
    assert_eq!(cluster.settle(), ["b → n1"]);
}

#[test]
fn releases_devices_of_deleted_node() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    cluster.planner.node(Change::Deleted(DeletedObject {
        name: "n1".to_owned(),
        ..DeletedObject::default()
    }));
    let (_, releases) = cluster.actions();
    assert_eq!(releases[0].reason.to_string(), "node n1 does not exist");
}

#[test]
fn keeps_allocations_of_other_controllers() {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut foreign = claim("a", "8Gi");
    foreign.status = Some(object(json!({"allocation": {"devices": {"results": [{
        "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
        "shareID": "x", "consumedCapacity": {"memory": "60Gi"},
        "tolerations": [{"key": "gpu.drava.dev/managed", "operator": "Exists"}],
    }]}}})));
    cluster.add_claim(foreign);
    cluster.advance(RELEASE_AFTER * 2);
    assert!(cluster.actions().1.is_empty());
    cluster.add_pod_with_claim("b", "30Gi");
    assert!(cluster.settle().is_empty(), "foreign allocations count");
}

#[test]
fn ignores_late_events() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "70Gi");
    let before = cluster.claims["a"].clone();
    cluster.settle();
    // The event of the creation arrives after the response to the write.
    cluster.planner.claim(applied(before), cluster.now);
    cluster.add_pod_with_claim("b", "70Gi");
    assert!(cluster.settle().is_empty());
    assert!(
        cluster.messages_of("Pod/a").is_empty(),
        "no allocation is lost"
    );
    cluster.advance(Duration::from_secs(10));
    assert!(cluster.settle().is_empty(), "no pod is scheduled again");
}

#[test]
fn reaches_only_node_that_accepts_pod() {
    let nodes: Vec<String> = (0..12).map(|index| format!("n{index:02}")).collect();
    let mut cluster = TestCluster::new(&nodes.iter().map(String::as_str).collect::<Vec<_>>());
    cluster.add_pod_with_claim("a", "8Gi");
    let start = cluster.now;
    let mut tried = Vec::new();
    while tried.last().map(String::as_str) != Some("a → n11") {
        assert!(tried.len() < nodes.len(), "{tried:?}");
        tried.extend(cluster.settle());
        cluster.reject("a");
        cluster.advance(RELEASE_AFTER);
        let (_, releases) = cluster.actions();
        for release in &releases {
            cluster.release(release);
        }
        cluster.advance(Duration::from_secs(2));
    }
    assert_eq!(
        cluster.now - start,
        12 * (RELEASE_AFTER + Duration::from_secs(2))
    );
}

#[test]
fn selects_avoided_node_after_its_change() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_pod_with_claim("a", "8Gi");
    assert_eq!(cluster.settle(), ["a → n1"]);
    cluster.deallocate("a");
    let mut changed = crate::fixture::node("n1");
    changed.status.as_mut().unwrap().allocatable = Some(object(json!({"cpu": "9", "pods": "110"})));
    cluster.planner.node(applied(changed));
    cluster.advance(Duration::from_secs(2));
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn roll_back_is_no_refusal_of_node() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_pod_with_claim("a", "8Gi");
    let (mut jobs, _) = cluster.actions();
    let job = jobs.remove(0);
    // The watch shows the allocation and its roll-back before the outcome of the job.
    let mut allocated = cluster.claims["a"].clone();
    allocated.status = Some(object(
        json!({"allocation": job.pods[0].writes[0].allocation}),
    ));
    cluster.observe(allocated);
    cluster.deallocate("a");
    let failure = crate::action::AllocationFailure {
        message: "claim default/b: rejected".to_owned(),
        is_reportable: false,
    };
    cluster.finish(job, Vec::new(), Some(failure));
    cluster.advance(Duration::from_secs(2));
    assert_eq!(cluster.settle(), ["a → n1"], "n1 is not avoided");
    assert!(cluster.messages_of("Pod/a").is_empty());
}

#[test]
fn ignores_outcome_of_deleted_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "70Gi");
    let (mut jobs, _) = cluster.actions();
    let job = jobs.remove(0);
    let mut written = cluster.claims["a"].clone();
    written.metadata.resource_version = Some("1000".to_owned());
    written.status = Some(object(
        json!({"allocation": job.pods[0].writes[0].allocation}),
    ));
    cluster.delete_pod("a");
    cluster.delete_claim("a");
    cluster.finish(job, vec![written], None);
    cluster.add_pod_with_claim("b", "70Gi");
    assert_eq!(
        cluster.settle(),
        ["b → n1"],
        "the deleted claim holds nothing"
    );
}

#[test]
fn releases_after_tenant_removes_annotation() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    let mut claim = cluster.claims["a"].clone();
    claim.metadata.annotations = None;
    cluster.observe(claim);
    cluster.reject("a");
    cluster.advance(RELEASE_AFTER);
    assert_eq!(cluster.actions().1.len(), 1);
}

#[test]
fn releases_allocation_whose_annotation_was_deleted() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    let mut claim = cluster.claims["a"].clone();
    claim.metadata.annotations = None;
    cluster.observe(claim);
    // Also a new leader knows whose allocation it is.
    cluster.change_leader();
    cluster.delete_pod("a");
    cluster.advance(RELEASE_AFTER);
    assert_eq!(cluster.actions().1.len(), 1);
}

#[test]
fn freezes_releases_without_sign_of_scheduler() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_scheduler_active = false;
    // They were rejected where they were allocated before.
    for name in ["a", "b", "c"] {
        cluster.add_pod(pod(name, &[name]));
        cluster.reject(name);
    }
    cluster.actions();
    cluster.advance(Duration::from_secs(1));
    for name in ["a", "b", "c"] {
        cluster.add_claim(claim(name, "8Gi"));
        cluster.settle();
    }
    cluster.advance(RELEASE_AFTER * 2);
    assert!(cluster.actions().1.is_empty(), "kube-scheduler is down");
    let deadline = cluster.planner.next_deadline().unwrap();
    assert!(deadline > cluster.now, "the loop must not spin");
    // It is back: the others have the whole time-out from now on.
    cluster.reserve("a", "a");
    assert!(cluster.actions().1.is_empty());
    cluster.advance(RELEASE_AFTER - Duration::from_secs(1));
    assert!(cluster.actions().1.is_empty());
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.actions().1.len(), 2, "b and c");
}

#[test]
fn releases_within_bound_without_sign_of_scheduler() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_scheduler_active = false;
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    cluster.advance(RELEASE_AFTER * 5 - Duration::from_secs(1));
    assert!(cluster.actions().1.is_empty());
    let deadline = cluster.planner.next_deadline();
    assert_eq!(deadline, Some(cluster.now + Duration::from_secs(1)));
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.actions().1.len(), 1);
}

#[test]
fn frozen_releases_do_not_keep_devices_of_deleted_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_scheduler_active = false;
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    cluster.advance(RELEASE_AFTER * 2);
    assert!(cluster.actions().1.is_empty());
    cluster.delete_pod("a");
    let (_, releases) = cluster.actions();
    assert_eq!(releases[0].reason, ReleaseReason::NoPendingPod);
}

#[test]
fn rejection_of_pod_is_sign_of_scheduler() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_scheduler_active = false;
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.settle();
    cluster.advance(RELEASE_AFTER);
    let mut gated = cluster.pods["a"].clone();
    gated.status = Some(rejected_because("SchedulingGated"));
    cluster.add_pod(gated);
    assert!(
        cluster.actions().1.is_empty(),
        "the API server sets this reason"
    );
    cluster.reject("a");
    assert_eq!(cluster.actions().1.len(), 1, "the time-out is over");
}

#[test]
fn pod_that_no_scheduler_binds_waits_behind_others() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a-stuck", "70Gi");
    assert_eq!(cluster.settle(), ["a-stuck → n1"]);
    cluster.reject("a-stuck");
    cluster.add_pod_with_claim("b-waiting", "70Gi");
    assert!(cluster.settle().is_empty());
    cluster.advance(RELEASE_AFTER);
    let releases = cluster.actions().1;
    cluster.release(&releases[0]);
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.settle(), ["b-waiting → n1"]);
    // Alone it is not allocated again at once either, and less often each time.
    cluster.end("b-waiting");
    let mut waits = Vec::new();
    for _ in 0..3 {
        let start = cluster.now;
        while cluster.settle().is_empty() {
            cluster.advance(Duration::from_secs(1));
        }
        waits.push((cluster.now - start).as_secs());
        cluster.advance(RELEASE_AFTER);
        let releases = cluster.actions().1;
        cluster.release(&releases[0]);
    }
    let messages = cluster.messages_of("Pod/a-stuck");
    let expected = "NotBound: scheduler default-scheduler did not bind the pod to n1 within 60 s; the pod waits behind others \
                    and is tried there again later: see in the events of the pod and of its group or queue why it is not admitted";
    assert!(messages.contains(&expected), "{messages:?}");
    assert!(
        waits[0] >= 58 && waits[1] >= 119 && waits[2] >= 239,
        "{waits:?}"
    );
}

#[test]
fn freed_devices_wake_pod_that_waits_behind_others() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_pod_with_claim("runs-1", "70Gi");
    cluster.settle();
    cluster.bind(("runs-1", "n1"));
    cluster.add_pod_with_claim("stuck", "70Gi");
    assert_eq!(cluster.settle(), ["stuck → n2"]);
    cluster.reject("stuck");
    cluster.advance(RELEASE_AFTER);
    let releases = cluster.actions().1;
    cluster.release(&releases[0]);
    cluster.advance(Duration::from_secs(1));
    assert!(cluster.settle().is_empty(), "not on n2 again for a while");
    let messages = cluster.messages_of("Pod/stuck");
    assert!(
        messages.last().unwrap().starts_with("NotBound: "),
        "{messages:?}"
    );
    cluster.end("runs-1");
    assert_eq!(cluster.settle(), ["stuck → n1"], "at once");
}

/// A pod whose gate was removed after its allocation.
fn ungated(cluster: &mut TestCluster, name: &str) {
    cluster.add_claim(claim(name, "8Gi"));
    let mut gated = gated_pod(name, &[name], &[ALLOCATION_GATE]);
    gated.status = Some(rejected_because("SchedulingGated"));
    cluster.add_pod(gated.clone());
    cluster.settle();
    assert_eq!(cluster.finish_gate_removals(None), [name]);
    gated.spec.as_mut().unwrap().scheduling_gates = None;
    cluster.add_pod(gated);
    cluster.settle();
}

fn rejected_because(reason: &str) -> PodStatus {
    object(json!({"phase": "Pending", "conditions": [{
        "type": "PodScheduled", "status": "False", "reason": reason, "message": "0/1 nodes are available",
    }]}))
}

#[test]
fn pod_in_backlog_of_scheduler_keeps_its_allocation() {
    let mut cluster = TestCluster::new(&["n1"]);
    ungated(&mut cluster, "waits");
    ungated(&mut cluster, "tried");
    cluster.reject("tried");
    // kube-scheduler is alive, and binds other pods.
    cluster.advance(RELEASE_AFTER);
    let releases = cluster.actions().1;
    let names: Vec<_> = releases
        .iter()
        .map(|release| release.claim.metadata.name.as_deref().unwrap())
        .collect();
    assert_eq!(names, ["tried"]);
    cluster.advance(RELEASE_AFTER * 4 - Duration::from_secs(1));
    assert!(
        cluster.actions().1.is_empty(),
        "no scheduler has tried the pod"
    );
    cluster.advance(Duration::from_secs(1));
    let releases = cluster.actions().1;
    assert_eq!(
        releases[0].claim.metadata.name.as_deref(),
        Some("waits"),
        "not for ever"
    );
    assert_eq!(
        releases[0].reason.to_string(),
        "not reserved within 300 s: kube-scheduler did not bind the pod to node n1"
    );
}

#[test]
fn finished_pod_with_static_claim_blocks_no_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("static", "70Gi"));
    cluster.add_pod(pod("first", &["static"]));
    assert_eq!(cluster.settle(), ["first → n1"]);
    cluster.bind(("first", "n1"));
    cluster.finish_pod("first");
    cluster.deallocate("static");
    cluster.add_pod(pod("second", &["static"]));
    assert_eq!(cluster.settle(), ["second → n1"]);
    // kube-controller-manager reserves the allocated claim for every bound pod that references it, also a finished one, and then
    // releases it, because that pod has finished.
    for _ in 0..3 {
        cluster.reserve("static", "first");
        cluster.advance(RELEASE_AFTER * 10);
        assert!(cluster.settle().is_empty(), "the claim is allocated");
        cluster.deallocate("static");
        assert_eq!(cluster.settle(), ["second → n1"], "at once");
    }
    assert!(cluster.messages_of("Pod/second").is_empty());
    // While only the finished pod has the claim, a pod of higher priority waits and evicts no pod.
    cluster.reserve("static", "first");
    cluster.delete_pod("second");
    cluster.add_pod_of_priority("urgent", "20Gi", 10);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evict().is_empty());
    cluster.deallocate("static");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}
