//! Which pod is served when, and what is taken meanwhile.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::world::World;
use crate::action::JobFailure;
use crate::fixture::{claim, object, pod};
use crate::planner::MAX_WRITING;

#[test]
fn nothing_is_decided_on_half_a_picture() {
    let mut world = World::new(&["n1"]);
    world.planner.synced = false;
    world.wish("a", "8Gi");
    assert!(world.actions().0.is_empty());
    assert_eq!(world.planner.next_deadline(), None);
    world.planner.set_synced();
    assert_eq!(world.settle(), ["a → n1"]);
}

#[test]
fn an_allocation_has_all_that_kube_scheduler_needs() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "8Gi");
    let (mut jobs, _) = world.actions();
    let job = jobs.remove(0);
    assert_eq!(
        serde_json::to_value(&job.writes[0].allocation).unwrap(),
        json!({
            "allocationTimestamp": "2026-01-01T00:00:00Z",
            "devices": {
                "results": [{
                    "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
                    "shareID": "share-1", "consumedCapacity": {"memory": "8Gi", "cores": "0"},
                }],
                "config": [{"source": "FromClass", "opaque": {"driver": "gpu.drava.dev", "parameters": {
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "priority": 10,
                }}}],
            },
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": ["n1"]},
            ]}]},
        })
    );
}

#[test]
fn what_is_being_written_is_taken() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "50Gi");
    world.wish("b", "50Gi");
    let (jobs, _) = world.actions();
    assert_eq!(
        jobs.len(),
        1,
        "the second does not fit beside the first, which is on its way"
    );
    assert_eq!(
        world.told_about("Pod/b"),
        ["0/1 nodes: 1 InsufficientMemory (most free memory 30 GiB on n1/gpu-0)"]
    );
    assert_eq!(
        world.told_about("ResourceClaim/b").len(),
        1,
        "the claim says so, too"
    );
}

#[test]
fn a_freed_card_wakes_who_waits() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "50Gi");
    assert_eq!(world.settle(), ["a → n1"]);
    world.reserve("a", "a");
    world.wish("b", "50Gi");
    assert!(world.settle().is_empty());
    world.pod_gone("a");
    world.claim_gone("a");
    assert_eq!(world.settle(), ["b → n1"]);
}

#[test]
fn higher_priority_and_greater_age_go_first() {
    let mut world = World::new(&["n1"]);
    for (name, priority, created) in [("young", 0, 20), ("old", 0, 10), ("important", 5, 30)] {
        world.add_claim(claim(name, "70Gi"));
        let mut pod = pod(name, &[name]);
        pod.metadata.creation_timestamp =
            Some(object(json!(format!("2026-01-01T00:00:{created}Z"))));
        pod.spec.as_mut().unwrap().priority = Some(priority);
        world.add_pod(pod);
    }
    assert_eq!(world.settle(), ["important → n1"]);
    world.pod_gone("important");
    world.claim_gone("important");
    assert_eq!(world.settle(), ["old → n1"]);
}

#[test]
fn pods_that_share_a_claim_are_planned_together_and_written_once() {
    let mut world = World::new(&["n1", "n2"]);
    // Only three CPUs are left on the first node.
    let mut busy = pod("busy", &[]);
    busy.spec = Some(object(
        json!({"nodeName": "n1", "containers": [{"name": "c", "resources": {"requests": {"cpu": "5"}}}]}),
    ));
    world.add_pod(busy);
    world.add_claim(claim("shared", "8Gi"));
    for name in ["p1", "p2", "p3", "p4"] {
        world.add_pod(pod(name, &["shared"]));
    }
    let (jobs, _) = world.actions();
    assert_eq!(jobs.len(), 1);
    assert_eq!(jobs[0].node, "n2", "four pods do not fit on the first");
    assert!(
        world.actions().0.is_empty(),
        "the others wait for the outcome"
    );
    for job in jobs {
        world.write(job);
    }
    assert!(world.settle().is_empty(), "all are served");
}

#[test]
fn a_failed_write_frees_what_it_took_and_is_tried_again_later() {
    let mut world = World::new(&["n1"]);
    world.wish("a", "70Gi");
    let (mut jobs, _) = world.actions();
    let failure = JobFailure {
        message: "refused".to_owned(),
        tell: true,
    };
    world.end(jobs.remove(0), Vec::new(), Some(failure));
    world.wish("b", "70Gi");
    assert_eq!(
        world.settle(),
        ["b → n1"],
        "what the failed write had taken is free"
    );
    assert_eq!(world.told_about("Pod/a")[0], "refused");
    world.pod_gone("b");
    world.claim_gone("b");
    assert!(world.settle().is_empty(), "a pause after the failure");
    world.pass(Duration::from_secs(1));
    assert_eq!(world.settle(), ["a → n1"]);
}

#[test]
fn pods_of_others_are_left_alone() {
    let mut world = World::new(&["n1"]);
    for name in ["scheduler", "gated", "ended", "deleted", "none", "running"] {
        world.add_claim(claim(name, "1Gi"));
    }
    let change = |name: &str, change: fn(&mut Pod)| {
        let mut pod = pod(name, &[name]);
        change(&mut pod);
        pod
    };
    world.add_pod(change("scheduler", |pod| {
        pod.spec.as_mut().unwrap().scheduler_name = Some("volcano".to_owned())
    }));
    world.add_pod(change("gated", |pod| {
        pod.spec.as_mut().unwrap().scheduling_gates =
            Some(vec![object(json!({"name": "example.com/later"}))]);
    }));
    world.add_pod(change("ended", |pod| {
        pod.status.as_mut().unwrap().phase = Some("Failed".to_owned())
    }));
    world.add_pod(change("deleted", |pod| {
        pod.metadata.deletion_timestamp = Some(object(json!("2026-01-01T00:00:00Z")))
    }));
    world.add_pod(change("running", |pod| {
        pod.status.as_mut().unwrap().phase = Some("Running".to_owned())
    }));
    world.add_pod(pod("none", &[]));
    assert!(world.settle().is_empty());
    assert!(world.told.is_empty());
    // Whoever names the node has bypassed the scheduler, and waits for the claim.
    world.add_claim(claim("named", "1Gi"));
    world.add_pod(change("named", |pod| {
        let spec = pod.spec.as_mut().unwrap();
        spec.scheduler_name = Some("volcano".to_owned());
        spec.node_name = Some("n1".to_owned());
    }));
    assert_eq!(world.settle(), ["named → n1"]);
}

#[test]
fn a_claim_made_for_another_pod_is_not_used() {
    let mut world = World::new(&["n1"]);
    let mut owned = claim("p-gpu-x", "8Gi");
    owned.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "an-earlier-p", "controller": true,
    }))]);
    world.add_claim(owned.clone());
    let mut templated = pod("p", &[]);
    templated.spec.as_mut().unwrap().resource_claims = Some(vec![object(
        json!({"name": "gpu", "resourceClaimTemplateName": "t"}),
    )]);
    world.add_pod(templated.clone());
    assert!(world.settle().is_empty(), "the claim is not yet made");
    templated.status = Some(object(
        json!({"phase": "Pending", "resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "p-gpu-x"}]}),
    ));
    world.add_pod(templated);
    assert!(world.settle().is_empty(), "not this pod's");
    owned.metadata.owner_references.as_mut().unwrap()[0].uid = "pod-p".to_owned();
    world.observe(owned);
    assert_eq!(world.settle(), ["p → n1"]);
}

#[test]
fn many_pods_are_written_a_few_at_a_time() {
    let mut world = World::new(&["n1"]);
    for index in 0..100 {
        let name = format!("p{index:03}");
        let mut small = pod(&name, &[&name]);
        small.spec.as_mut().unwrap().containers[0].resources = None;
        world.add_claim(claim(&name, "1Mi"));
        world.add_pod(small);
    }
    let (jobs, _) = world.actions();
    assert_eq!(jobs.len(), MAX_WRITING);
    for job in jobs {
        world.write(job);
    }
    assert_eq!(world.settle().len(), 100 - MAX_WRITING);
}
