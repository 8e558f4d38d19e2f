//! Gated pods.

use std::time::Duration;

use drava_api::names::ALLOCATION_GATE;
use serde_json::json;

use super::cluster::{RELEASE_AFTER, TestCluster, applied};
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
    cluster.reject("p");
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

/// Cluster with this number of equal gated pods, of which more than 1,000 fit.
fn backlog(count: usize) -> TestCluster {
    let nodes: Vec<String> = (0..10).map(|index| format!("n{index}")).collect();
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let mut cluster = TestCluster::new(&nodes);
    let mut template = (
        claim("p", "100Mi"),
        gated_pod("p", &["p"], &[ALLOCATION_GATE]),
    );
    template.1.spec.as_mut().unwrap().containers[0].resources = None;
    for index in 0..count {
        let name = format!("p{index:05}");
        let (mut claim, mut pod) = template.clone();
        claim.metadata.name = Some(name.clone());
        claim.metadata.uid = Some(format!("uid-{name}"));
        cluster.observe(claim);
        pod.metadata.name = Some(name.clone());
        pod.metadata.uid = Some(format!("pod-{name}"));
        let entry = &mut pod.spec.as_mut().unwrap().resource_claims.as_mut().unwrap()[0];
        entry.resource_claim_name = Some(name);
        cluster.add_pod(pod);
    }
    cluster
}

/// Writes the next allocations, and the watch delivers them. Returns the names of their pods.
fn write_next(cluster: &mut TestCluster) -> Vec<String> {
    let (jobs, releases) = cluster.actions();
    assert!(releases.is_empty(), "{releases:?}");
    let mut names = Vec::new();
    for job in jobs {
        names.push(job.pods[0].pod.name.clone().unwrap());
        cluster.write(job);
    }
    for name in &names {
        let claim = cluster.claims[name].clone();
        cluster.planner.claim(applied(claim), cluster.now);
    }
    names
}

#[test]
fn removes_first_gate_before_it_decides_for_others() {
    for count in [200, 3_000, 30_000] {
        let mut cluster = backlog(count);
        let written = write_next(&mut cluster);
        assert!(written.len() < count, "others are undecided");
        cluster.actions();
        let ungated = cluster.finish_gate_removals(None);
        assert_eq!(
            ungated.first(),
            Some(&"p00000".to_owned()),
            "of {count} pods"
        );
    }
}

#[test]
fn removes_gate_of_highest_priority_first() {
    let mut cluster = backlog(200);
    cluster.add_claim(claim("urgent", "100Mi"));
    let mut urgent = gated_pod("urgent", &["urgent"], &[ALLOCATION_GATE]);
    urgent.spec.as_mut().unwrap().priority = Some(1000);
    cluster.add_pod(urgent);
    assert_eq!(write_next(&mut cluster)[0], "urgent");
    cluster.actions();
    assert_eq!(cluster.finish_gate_removals(None)[0], "urgent");
}

#[test]
fn gated_pod_keeps_its_allocation() {
    let mut cluster = backlog(80);
    for _ in 0..2 {
        write_next(&mut cluster);
    }
    // The removals of the gates are not executed, or have no turn.
    for _ in 0..10 {
        cluster.advance(RELEASE_AFTER);
        let (jobs, releases) = cluster.actions();
        assert!(jobs.is_empty() && releases.is_empty(), "{releases:?}");
    }
    assert!(!cluster.gate_removals.is_empty());
    let mut ungated = 0;
    while !cluster.gate_removals.is_empty() {
        for name in cluster.finish_gate_removals(None) {
            cluster.add_pod(pod(&name, &[&name]));
            cluster.reject(&name);
            ungated += 1;
        }
        assert!(
            cluster.actions().1.is_empty(),
            "the time-outs have just started"
        );
    }
    assert_eq!(ungated, 80);
    cluster.advance(RELEASE_AFTER);
    assert_eq!(cluster.actions().1.len(), 80);
}

#[test]
fn late_gate_removal_ends_no_back_off() {
    let mut cluster = cluster_with_gated_pod(&[ALLOCATION_GATE]);
    cluster.settle();
    // kube-scheduler has rejected the pod before the response to the removal of its gate arrives.
    for name in ["a", "b"] {
        cluster.deallocate(name);
    }
    cluster.add_pod(pod("p", &["a", "b"]));
    cluster.actions();
    cluster.finish_gate_removals(None);
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.settle(), ["p → n1"]);
}
