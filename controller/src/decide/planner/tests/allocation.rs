//! Order of decisions, and allocations in flight.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::cluster::TestCluster;
use crate::action::AllocationFailure;
use crate::decide::planner::MAX_IN_FLIGHT;
use crate::fixture::{claim, object, pod};
use crate::watch::Kind;

#[test]
fn waits_for_initial_sync() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.world.unlisted.insert(Kind::Pods);
    cluster.add_pod_with_claim("a", "8Gi");
    assert!(cluster.actions().0.is_empty());
    assert_eq!(cluster.planner.next_deadline(), None);
    cluster.planner.set_synced();
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn writes_allocation_as_kube_scheduler_with_its_record() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "8Gi");
    let (mut jobs, _) = cluster.actions();
    let job = jobs.remove(0);
    assert_eq!(
        serde_json::to_value(&job.pods[0].writes[0].allocation).unwrap(),
        json!({
            "allocationTimestamp": "2026-01-01T00:00:00Z",
            "devices": {
                "results": [{
                    "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
                    "shareID": "share-1", "consumedCapacity": {"memory": "8Gi", "cores": "0"},
                }],
                "config": [{"source": "FromClass", "opaque": {"driver": "gpu.drava.dev", "parameters": {
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "priority": 10,
                }}}, {"source": "FromClass", "opaque": {"driver": "controller.gpu.drava.dev", "parameters": {
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "PlacementRecord", "podUID": "pod-a",
                    "reason": "node n1: only feasible node; gpu-0: only feasible GPU",
                }}}],
            },
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": ["n1"]},
            ]}]},
        })
    );
}

#[test]
fn counts_allocation_in_flight() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "50Gi");
    cluster.add_pod_with_claim("b", "50Gi");
    let (jobs, _) = cluster.actions();
    assert_eq!(
        jobs.len(),
        1,
        "the second pod does not fit with the first in flight"
    );
    assert_eq!(
        cluster.messages_of("Pod/b"),
        ["0/1 nodes: 1 InsufficientMemory (most free memory 30 GiB on n1/gpu-0)"]
    );
    assert_eq!(
        cluster.messages_of("ResourceClaim/b").len(),
        1,
        "the claim has the event, too"
    );
}

#[test]
fn schedules_pending_pod_on_released_gpu() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "50Gi");
    assert_eq!(cluster.settle(), ["a → n1"]);
    cluster.reserve("a", "a");
    cluster.add_pod_with_claim("b", "50Gi");
    assert!(cluster.settle().is_empty());
    cluster.delete_pod("a");
    cluster.delete_claim("a");
    assert_eq!(cluster.settle(), ["b → n1"]);
}

#[test]
fn schedules_by_priority_then_age() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, priority, created) in [("young", 0, 20), ("old", 0, 10), ("urgent", 5, 30)] {
        cluster.add_claim(claim(name, "70Gi"));
        let mut pod = pod(name, &[name]);
        pod.metadata.creation_timestamp =
            Some(object(json!(format!("2026-01-01T00:00:{created}Z"))));
        pod.spec.as_mut().unwrap().priority = Some(priority);
        cluster.add_pod(pod);
    }
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    cluster.delete_pod("urgent");
    cluster.delete_claim("urgent");
    assert_eq!(cluster.settle(), ["old → n1"]);
}

/// The first pod of job `a` is deleted in one of two ways, and created again when a pod of job `b` has waited for a while.
#[test]
fn next_pod_of_a_job_has_the_age_of_one_that_was_deleted_while_it_waited() {
    let add = |cluster: &mut TestCluster, name: &str, job: &str, created: u8| {
        cluster.add_claim(claim(name, "70Gi"));
        let mut pod = pod(name, &[name]);
        let created = format!("2026-01-01T00:00:{created}Z");
        pod.metadata.creation_timestamp = Some(object(json!(created)));
        pod.metadata.owner_references = Some(object(json!([{
            "apiVersion": "batch/v1", "kind": "Job", "name": job, "uid": job, "controller": true,
        }])));
        cluster.add_pod(pod);
    };
    for has_finalizer in [false, true] {
        let mut cluster = TestCluster::new(&["n1"]);
        cluster.add_running(&[("busy", "70Gi", 0)]);
        add(&mut cluster, "a-1", "a", 10);
        add(&mut cluster, "b-1", "b", 20);
        assert!(cluster.settle().is_empty());
        if has_finalizer {
            cluster.start_deletion("a-1");
        }
        cluster.end("a-1");
        assert!(cluster.settle().is_empty());
        add(&mut cluster, "a-2", "a", 30);
        add(&mut cluster, "a-3", "a", 31);
        cluster.end("busy");
        assert_eq!(cluster.settle(), ["a-2 → n1"]);
        cluster.end("a-2");
        // One pod has the age of a-1. a-3 waited already.
        assert_eq!(cluster.settle(), ["b-1 → n1"]);
    }
}

#[test]
fn allocates_shared_claim_once_for_all_pods() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    // Three CPUs are free on the first node.
    let mut busy = pod("busy", &[]);
    busy.spec = Some(object(
        json!({"nodeName": "n1", "containers": [{"name": "c", "resources": {"requests": {"cpu": "5"}}}]}),
    ));
    cluster.add_pod(busy);
    cluster.add_claim(claim("shared", "8Gi"));
    for name in ["p1", "p2", "p3", "p4"] {
        cluster.add_pod(pod(name, &["shared"]));
    }
    let (jobs, _) = cluster.actions();
    assert_eq!(jobs.len(), 1);
    assert_eq!(
        jobs[0].pods[0].node, "n2",
        "four pods do not fit on the first"
    );
    assert!(
        cluster.actions().0.is_empty(),
        "the other pods wait for the outcome"
    );
    for job in jobs {
        cluster.write(job);
    }
    assert!(cluster.settle().is_empty(), "all pods are served");
}

#[test]
fn releases_and_retries_after_failed_write() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "70Gi");
    let (mut jobs, _) = cluster.actions();
    let failure = AllocationFailure {
        message: "rejected".to_owned(),
        is_reportable: true,
    };
    cluster.finish(jobs.remove(0), Vec::new(), Some(failure));
    cluster.add_pod_with_claim("b", "70Gi");
    assert_eq!(
        cluster.settle(),
        ["b → n1"],
        "devices of the failed write are free"
    );
    assert_eq!(cluster.messages_of("Pod/a")[0], "rejected");
    cluster.delete_pod("b");
    cluster.delete_claim("b");
    assert!(cluster.settle().is_empty(), "backoff after the failure");
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn ignores_ineligible_pods() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["gated", "ended", "deleted", "none", "running"] {
        cluster.add_claim(claim(name, "1Gi"));
    }
    let change = |name: &str, change: fn(&mut Pod)| {
        let mut pod = pod(name, &[name]);
        change(&mut pod);
        pod
    };
    cluster.add_pod(change("gated", |pod| {
        pod.spec.as_mut().unwrap().scheduling_gates =
            Some(vec![object(json!({"name": "example.com/later"}))]);
    }));
    cluster.add_pod(change("ended", |pod| {
        pod.status.as_mut().unwrap().phase = Some("Failed".to_owned())
    }));
    cluster.add_pod(change("deleted", |pod| {
        pod.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")))
    }));
    cluster.add_pod(change("running", |pod| {
        pod.status.as_mut().unwrap().phase = Some("Running".to_owned())
    }));
    cluster.add_pod(pod("none", &[]));
    assert!(cluster.settle().is_empty());
    assert!(cluster.events.is_empty());
    // A pod with spec.nodeName bypasses the scheduler; kubelet waits for its claim.
    cluster.add_claim(claim("named", "1Gi"));
    cluster.add_pod(change("named", |pod| {
        let spec = pod.spec.as_mut().unwrap();
        spec.scheduler_name = Some("volcano".to_owned());
        spec.node_name = Some("n1".to_owned());
    }));
    assert_eq!(cluster.settle(), ["named → n1"]);
}

#[test]
fn ignores_claim_of_another_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut owned = claim("p-gpu-x", "8Gi");
    owned.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "an-earlier-p", "controller": true,
    }))]);
    cluster.add_claim(owned.clone());
    let mut templated = pod("p", &[]);
    templated.spec.as_mut().unwrap().resource_claims = Some(vec![object(
        json!({"name": "gpu", "resourceClaimTemplateName": "t"}),
    )]);
    cluster.add_pod(templated.clone());
    assert!(cluster.settle().is_empty(), "the claim does not exist");
    templated.status = Some(object(
        json!({"phase": "Pending", "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x"}]}),
    ));
    cluster.add_pod(templated);
    assert!(
        cluster.settle().is_empty(),
        "the claim belongs to another pod"
    );
    owned.metadata.owner_references.as_mut().unwrap()[0].uid = "pod-p".to_owned();
    cluster.observe(owned);
    assert_eq!(cluster.settle(), ["p → n1"]);
}

#[test]
fn limits_jobs_in_flight() {
    let mut cluster = TestCluster::new(&["n1"]);
    for index in 0..100 {
        let name = format!("p{index:03}");
        let mut small = pod(&name, &[&name]);
        small.spec.as_mut().unwrap().containers[0].resources = None;
        cluster.add_claim(claim(&name, "1Mi"));
        cluster.add_pod(small);
    }
    let (jobs, _) = cluster.actions();
    assert_eq!(jobs.len(), MAX_IN_FLIGHT);
    for job in jobs {
        cluster.write(job);
    }
    assert_eq!(cluster.settle().len(), 100 - MAX_IN_FLIGHT);
}

/// Pod without claims that runs on n1.
fn running_pod(name: &str, cpu: &str) -> k8s_openapi::api::core::v1::Pod {
    let mut pod = pod(name, &[]);
    let spec = pod.spec.as_mut().unwrap();
    spec.node_name = Some("n1".to_owned());
    spec.containers[0].resources = Some(object(json!({"requests": {"cpu": cpu}})));
    pod
}

#[test]
fn decides_nothing_after_end_of_unrelated_pod() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_pod(running_pod("web", "1"));
    for name in ["a", "b", "c"] {
        cluster.add_pod_with_claim(name, "70Gi");
    }
    assert_eq!(cluster.settle().len(), 2);
    cluster.delete_pod("web");
    let due = cluster.planner.backlog.queue.due(cluster.now);
    assert!(
        !cluster.planner.backlog.activate_all && due.is_empty(),
        "{due:?}"
    );
}

#[test]
fn schedules_after_end_of_pod_that_filled_node() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod(running_pod("web", "8"));
    cluster.add_pod_with_claim("a", "8Gi");
    assert!(cluster.settle().is_empty());
    cluster.delete_pod("web");
    assert_eq!(cluster.settle(), ["a → n1"]);
}

#[test]
fn own_claim_follows_the_shared_one() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_claim(claim("shared", "30Gi"));
    cluster.add_claim(claim("a", "10Gi"));
    cluster.add_claim(claim("b", "10Gi"));
    cluster.add_claim(claim("c", "40Gi"));
    cluster.add_pod(pod("a", &["shared", "a"]));
    let placed = cluster.settle();
    let node = placed[0].split_once(" → ").unwrap().1.to_owned();
    cluster.bind(("a", &node));
    cluster.add_pod(pod("b", &["shared", "b"]));
    assert_eq!(cluster.settle(), [format!("b → {node}")]);
    cluster.add_pod(pod("c", &["shared", "c"]));
    assert!(
        cluster.settle().is_empty(),
        "the other node has room, but not the shared claim"
    );
    let messages = cluster.messages_of("Pod/c");
    assert!(
        messages[0].contains("InsufficientMemory")
            && messages[0].contains("claim default/shared is allocated on another node"),
        "{messages:?}"
    );
}

fn allocated_events(cluster: &TestCluster) -> Vec<(&str, &str)> {
    let events = cluster.events.iter();
    events
        .filter(|(_, reason, _)| *reason == "Allocated")
        .map(|(object, _, message)| (object.as_str(), message.as_str()))
        .collect()
}

#[test]
fn publishes_one_event_for_all_claims_of_a_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("a", "8Gi"));
    cluster.add_claim(claim("b", "9Gi"));
    cluster.add_pod(pod("p", &["a", "b"]));
    assert_eq!(cluster.settle(), ["p → n1"]);
    assert_eq!(
        allocated_events(&cluster),
        [(
            "Pod/p",
            "claim a: 8 GiB of memory and best-effort GPU time on n1/gpu-0; node n1: only feasible node; \
             gpu-0: only feasible GPU. claim b: 9 GiB of memory and best-effort GPU time on n1/gpu-0; node n1: \
             only feasible node; gpu-0: only feasible GPU"
        )]
    );
}

#[test]
fn omits_event_of_a_pod_that_was_bound_before_its_turn() {
    let nodes: Vec<String> = (0..40).map(|number| format!("n{number:02}")).collect();
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let mut cluster = TestCluster::new(&nodes);
    for number in 0..300 {
        cluster.add_pod_with_claim(&format!("p{number}"), "8Gi");
    }
    let placed = cluster.settle();
    assert_eq!(placed.len(), 300);
    let published = allocated_events(&cluster).len();
    assert!(
        (1..300).contains(&published),
        "{published} within the budget"
    );
    for pod in &placed {
        cluster.bind(pod.split_once(" → ").unwrap());
    }
    cluster.advance(Duration::from_secs(600));
    cluster.actions();
    assert_eq!(allocated_events(&cluster).len(), published);
}
