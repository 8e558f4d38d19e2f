//! Gangs: all or nothing.

use std::time::Duration;

use serde_json::json;

use super::cluster::{TestCluster, applied, member};
use crate::action::AllocationFailure;
use crate::fixture::{claim, node, object, pod, slice};

#[test]
fn waits_until_enough_members_exist() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_member("m-1", "10Gi", "3");
    cluster.add_member("m-2", "10Gi", "3");
    assert!(cluster.settle().is_empty());
    assert_eq!(
        cluster.messages_of("Pod/m-2"),
        ["WaitingForGang: gang g: 2 of 3 members exist"]
    );
    cluster.add_member("m-3", "10Gi", "3");
    let (jobs, _) = cluster.actions();
    assert_eq!(jobs.len(), 1, "one job for all");
    assert_eq!(jobs[0].pods.len(), 3);
}

#[test]
fn allocates_all_members_or_none() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "30Gi", "3");
    }
    assert!(cluster.settle().is_empty(), "two of three fit");
    assert_eq!(
        cluster.messages_of("Pod/m-1"),
        [
            "WaitingForGang: gang g: 2 of 3 members fit; pod m-3: 0/1 nodes: \
             1 InsufficientMemory (most free memory 20 GiB on n1/gpu-0)"
        ]
    );
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle().len(), 3);
}

#[test]
fn partial_gang_holds_nothing() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "50Gi", "3");
    }
    assert!(cluster.settle().is_empty());
    cluster.add_pod_with_claim("z-single", "80Gi");
    assert_eq!(cluster.settle(), ["z-single → n1"], "the gang never fits");
}

#[test]
fn counts_members_without_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_member("worker", "10Gi", "2");
    assert!(cluster.settle().is_empty());
    cluster.add_pod(member(pod("launcher", &[]), "2"));
    assert_eq!(cluster.settle(), ["worker → n1"]);
}

#[test]
fn places_elastic_members_as_far_as_they_fit() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_member(name, "30Gi", "2");
    }
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle(), ["m-3 → n2"]);
}

#[test]
fn failed_job_leaves_no_member_allocated() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["m-1", "m-2"] {
        cluster.add_member(name, "30Gi", "2");
    }
    let (mut jobs, _) = cluster.actions();
    let failure = AllocationFailure {
        message: "rejected".to_owned(),
        is_reportable: true,
    };
    cluster.finish(jobs.remove(0), Vec::new(), Some(failure));
    assert!(cluster.settle().is_empty(), "backoff of the gang");
    for name in ["m-1", "m-2"] {
        assert_eq!(cluster.messages_of(&format!("Pod/{name}")), ["rejected"]);
    }
    cluster.advance(Duration::from_secs(1));
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn explains_annotations_without_valid_minimum() {
    for (min, expected) in [
        ("0", "is \"0\"; use a number of pods from 1 on"),
        ("two", "is \"two\""),
        ("-1", "is \"-1\""),
    ] {
        let mut cluster = TestCluster::new(&["n1"]);
        cluster.add_member("m", "10Gi", min);
        assert!(cluster.settle().is_empty());
        let messages = cluster.messages_of("Pod/m");
        assert!(
            messages[0].starts_with("InvalidGang:") && messages[0].contains(expected),
            "{messages:?}"
        );
    }
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("m", "10Gi"));
    let mut pod = member(pod("m", &["m"]), "1");
    let annotations = pod.metadata.annotations.as_mut().unwrap();
    annotations.remove("gpu.drava.dev/gang-min");
    cluster.add_pod(pod);
    assert!(cluster.settle().is_empty());
    assert!(cluster.messages_of("Pod/m")[0].contains("gang-min is missing"));
}

#[test]
fn decides_for_older_gang_before_younger_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, second, is_member) in [("m-1", 10, true), ("single", 20, false), ("m-2", 30, true)] {
        cluster.add_claim(claim(name, "30Gi"));
        let mut pod = pod(name, &[name]);
        if is_member {
            pod = member(pod, "2");
        }
        pod.metadata.creation_timestamp =
            Some(object(json!(format!("2026-01-01T00:00:{second}Z"))));
        cluster.add_pod(pod);
    }
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn gang_has_lowest_priority_of_its_members() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "70Gi", 5)]);
    for (name, priority) in [("m-1", 100), ("m-2", 5)] {
        cluster.add_claim(claim(name, "30Gi"));
        let mut pod = member(pod(name, &[name]), "2");
        pod.spec.as_mut().unwrap().priority = Some(priority);
        cluster.add_pod(pod);
    }
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
}

#[test]
fn members_share_one_claim() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_claim(claim("shared", "30Gi"));
    for name in ["m-1", "m-2"] {
        cluster.add_pod(member(pod(name, &["shared"]), "2"));
    }
    assert_eq!(cluster.settle(), ["m-1 → n1"], "the claim is written once");
}
