//! Evictions for pods of higher priority.

use std::time::Duration;

use super::cluster::{TestCluster, applied, member};
use crate::fixture::{claim, node, pod, slice};

/// A node whose GPU is full of pods of priority 0, and a pod of priority 10.
fn full() -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("low-1", "40Gi", 0), ("low-2", "40Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "30Gi", 10);
    assert!(cluster.settle().is_empty());
    cluster
}

#[test]
fn evicts_needed_pods_and_allocates_their_devices() {
    let mut cluster = full();
    assert_eq!(cluster.evict(), ["low-1 for urgent"]);
    assert!(cluster.settle().is_empty(), "the victim has not ended");
    assert!(cluster.evictions.is_empty(), "once");
    cluster.end("low-1");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    let message = "WaitingForDeletion: the pod fits on n1 when the pods that are being deleted there have ended";
    assert_eq!(
        cluster.messages_of("Pod/urgent"),
        [message, "evicted default/low-1 (priority 0)"]
    );
    assert_eq!(
        cluster.messages_of("Pod/low-1"),
        ["evicted for pod default/urgent (priority 10)"]
    );
}

#[test]
fn unbound_pod_loses_its_allocation_instead_of_its_life() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_of_priority("low", "70Gi", 0);
    assert_eq!(cluster.settle(), ["low → n1"]);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    assert!(cluster.actions().0.is_empty());
    let (jobs, releases) = cluster.actions();
    assert!(jobs.is_empty() && cluster.evictions.is_empty());
    assert_eq!(releases.len(), 1);
    cluster.release(&releases[0]);
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    assert_eq!(
        cluster.messages_of("Pod/low")[0],
        "the allocation of claim default/low on n1 was released for pod default/urgent (priority 10); the pod waits again"
    );
    // It avoids no node and has no back-off: no scheduler has rejected it.
    cluster.end("urgent");
    assert_eq!(cluster.settle(), ["low → n1"]);
}

#[test]
fn evicts_victim_that_is_bound_before_its_release() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_of_priority("low", "70Gi", 0);
    assert_eq!(cluster.settle(), ["low → n1"]);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    cluster.actions();
    let (_, releases) = cluster.actions();
    assert_eq!(releases.len(), 1);
    // kube-scheduler has reserved the claim in the meantime, so the release fails.
    cluster.bind(("low", "n1"));
    let reserved = cluster.claims["low"].clone();
    cluster.release_finished(&releases[0], Some(reserved));
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for urgent"]);
}

#[test]
fn evicts_bound_pod_whose_reservation_is_not_observed() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_of_priority("low", "70Gi", 0);
    assert_eq!(cluster.settle(), ["low → n1"]);
    let mut bound = cluster.pods["low"].clone();
    bound.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
    cluster.add_pod(bound);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for urgent"]);
}

#[test]
fn pod_that_replaces_another_loses_the_allocation_of_that_one() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_of_priority("low", "70Gi", 0);
    assert_eq!(cluster.settle(), ["low → n1"]);
    cluster.delete_pod("low");
    let mut next = pod("next", &["low"]);
    next.spec.as_mut().unwrap().priority = Some(0);
    cluster.add_pod(next);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    let mut releases = cluster.actions().1;
    releases.append(&mut cluster.actions().1);
    assert_eq!(releases.len(), 1);
    cluster.release(&releases[0]);
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    assert_eq!(
        cluster.messages_of("Pod/next")[0],
        "the allocation of claim default/low on n1 was released for pod default/urgent (priority 10); the pod waits again"
    );
}

#[test]
fn evicts_only_strictly_lower_priority() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("equal", "50Gi", 10), ("lower", "30Gi", 9)]);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "50 GiB stay in use");
    cluster.add_pod_of_priority("small", "20Gi", 10);
    cluster.settle();
    assert!(
        cluster
            .evict()
            .iter()
            .all(|evicted| evicted.starts_with("lower for"))
    );
}

#[test]
fn evicts_no_pod_in_vain() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("low", "40Gi", 0)]);
    cluster.add_pod_of_priority("giant", "100Gi", 10);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
}

#[test]
fn never_evicts_with_preemption_policy_never() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_claim(claim("polite", "30Gi"));
    let mut polite = pod("polite", &["polite"]);
    let spec = polite.spec.as_mut().unwrap();
    spec.priority = Some(10);
    spec.preemption_policy = Some("Never".to_owned());
    cluster.add_pod(polite);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
    cluster.end("low");
    assert_eq!(cluster.settle(), ["polite → n1"]);
}

#[test]
fn evicts_nothing_when_preemption_is_off() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.world.settings.preemption = false;
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "30Gi", 10);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
}

#[test]
fn holds_freed_devices_across_change_of_leader() {
    let mut cluster = full();
    cluster.evict();
    cluster.add_pod_of_priority("a-new-small", "30Gi", 0);
    cluster.change_leader();
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "the evicted pod is enough");
    cluster.end("low-1");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}

#[test]
fn waits_for_deleted_pods_before_it_evicts_others() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_running(&[("low-1", "70Gi", 0), ("low-2", "70Gi", 0)]);
    cluster.start_deletion("low-1");
    cluster.add_pod_of_priority("urgent", "70Gi", 10);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
    // A user has deleted it: nothing was preempted.
    assert_eq!(
        cluster.messages_of("Pod/urgent"),
        [
            "WaitingForDeletion: the pod fits on n1 when the pods that are being deleted there have ended"
        ]
    );
}

#[test]
fn evicts_further_pods_when_deleted_pod_does_not_end() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_running(&[("low-1", "70Gi", 0), ("low-2", "70Gi", 0)]);
    let mut stuck = cluster.pods["low-1"].clone();
    // More than 30 s after the grace period.
    stuck.metadata.deletion_timestamp = Some(crate::fixture::object(serde_json::json!(
        "2025-12-31T23:59:29Z"
    )));
    cluster.add_pod(stuck);
    cluster.add_pod_of_priority("urgent", "70Gi", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low-2 for urgent"]);
}

#[test]
fn gives_devices_back_when_victim_is_protected() {
    let mut cluster = full();
    cluster.refuse_eviction("the budget allows no disruption");
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "backoff");
    let blocked = "cannot evict pod default/low-1: the budget allows no disruption";
    assert!(cluster.messages_of("Pod/urgent").contains(&blocked));
    cluster.advance(Duration::from_secs(1));
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low-2 for urgent"], "another victim");
}

#[test]
fn tries_protected_victim_again_after_a_minute() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "30Gi", 10);
    let start = cluster.now;
    for _ in 0..2 {
        assert!(cluster.settle().is_empty());
        cluster.refuse_eviction("the budget allows no disruption");
        loop {
            assert!(cluster.settle().is_empty());
            if !cluster.evictions.is_empty() {
                break;
            }
            let deadline = cluster.planner.next_deadline().unwrap();
            assert!(deadline > cluster.now, "no busy loop");
            cluster.now = deadline;
        }
    }
    assert_eq!(cluster.now - start, Duration::from_secs(120));
}

#[test]
fn pod_that_was_not_bound_evicts_no_more() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_running(&[("low-1", "70Gi", 0), ("low-2", "70Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "30Gi", 10);
    assert!(cluster.settle().is_empty());
    let evicted = cluster.evict();
    assert_eq!(evicted.len(), 1);
    cluster.end(evicted[0].split_once(" for").unwrap().0);
    assert_eq!(cluster.settle().len(), 1);
    // kube-scheduler does not bind the pod, and another pod takes the node.
    cluster.deallocate("urgent");
    cluster.add_pod_of_priority("other", "70Gi", 10);
    assert_eq!(cluster.settle().len(), 1);
    cluster.advance(Duration::from_secs(2));
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "one attempt");
    // A changed node makes it try again.
    let mut changed = node("n1");
    changed.metadata.labels = Some([("changed".to_owned(), String::new())].into());
    cluster.planner.node(applied(changed));
    let mut changed = node("n2");
    changed.metadata.labels = Some([("changed".to_owned(), String::new())].into());
    cluster.planner.node(applied(changed));
    cluster.settle();
    assert_eq!(cluster.evict().len(), 1);
}

#[test]
fn counts_shared_claim_with_all_its_pods() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("shared", "70Gi"));
    for (name, priority) in [("low", 0), ("high", 10)] {
        let mut pod = pod(name, &["shared"]);
        pod.spec.as_mut().unwrap().priority = Some(priority);
        cluster.add_pod(pod);
    }
    cluster.settle();
    for name in ["low", "high"] {
        cluster.bind((name, "n1"));
    }
    let consumers = serde_json::json!([
        {"resource": "pods", "name": "low", "uid": "pod-low"},
        {"resource": "pods", "name": "high", "uid": "pod-high"},
    ]);
    let mut shared = cluster.claims["shared"].clone();
    shared.status.as_mut().unwrap().reserved_for = Some(crate::fixture::object(consumers));
    cluster.observe(shared);
    cluster.add_pod_of_priority("urgent", "30Gi", 5);
    cluster.settle();
    assert!(
        cluster.evictions.is_empty(),
        "the other pod keeps the claim"
    );
    cluster.add_pod_of_priority("vip", "30Gi", 20);
    cluster.settle();
    assert_eq!(cluster.evict(), ["high for vip", "low for vip"]);
}

#[test]
fn evicts_whole_gang_or_its_elastic_member() {
    let running = |min: &str| {
        let mut cluster = TestCluster::new(&["n1"]);
        for name in ["m-1", "m-2"] {
            cluster.add_member(name, "40Gi", min);
        }
        for placed in cluster.settle() {
            cluster.bind(placed.split_once(" → ").unwrap());
        }
        cluster.add_pod_of_priority("urgent", "30Gi", 10);
        cluster.settle();
        cluster.evict()
    };
    assert_eq!(running("2"), ["m-1 for urgent", "m-2 for urgent"]);
    assert_eq!(running("1"), ["m-2 for urgent"]);
}

#[test]
fn gang_evicts_for_all_its_members() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("low-1", "40Gi", 0), ("low-2", "40Gi", 0)]);
    for name in ["m-1", "m-2"] {
        cluster.add_claim(claim(name, "30Gi"));
        let mut pod = member(pod(name, &[name]), "2");
        pod.spec.as_mut().unwrap().priority = Some(10);
        cluster.add_pod(pod);
    }
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low-1 for m-1", "low-2 for m-1"]);
    cluster.end("low-1");
    assert!(cluster.settle().is_empty(), "no partial gang");
    cluster.end("low-2");
    assert_eq!(cluster.settle(), ["m-1 → n1", "m-2 → n1"]);
}

#[test]
fn uses_new_node_instead_of_waiting_for_victims() {
    let mut cluster = full();
    cluster.evict();
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle(), ["urgent → n2"]);
}

#[test]
fn gang_evicts_only_needed_pods() {
    let mut cluster = TestCluster::new(&["n1"]);
    // The end of the bystander of low priority makes room for one member, that of the gang for all.
    cluster.add_running(&[("bystander", "20Gi", 1)]);
    for name in ["v-1", "v-2"] {
        cluster.add_claim(claim(name, "30Gi"));
        let mut pod = member(pod(name, &[name]), "2");
        pod.spec.as_mut().unwrap().priority = Some(5);
        cluster.add_pod(pod);
    }
    for placed in cluster.settle() {
        cluster.bind(placed.split_once(" → ").unwrap());
    }
    for name in ["m-1", "m-2", "m-3"] {
        cluster.add_claim(claim(name, "20Gi"));
        let mut pod = pod(name, &[name]);
        pod.spec.as_mut().unwrap().priority = Some(10);
        let annotations = [
            ("gpu.drava.dev/gang", "urgent"),
            ("gpu.drava.dev/gang-min", "3"),
        ];
        let annotations = annotations.map(|(name, value)| (name.to_owned(), value.to_owned()));
        pod.metadata.annotations = Some(annotations.into());
        cluster.add_pod(pod);
    }
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["v-1 for m-1", "v-2 for m-1"]);
}

#[test]
fn evicts_no_other_pod_while_claims_are_released() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[
        ("v-1", "30Gi", 0),
        ("v-2", "20Gi", 0),
        ("bystander", "30Gi", 5),
    ]);
    cluster.add_pod_of_priority("urgent", "50Gi", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["v-1 for urgent", "v-2 for urgent"]);
    // The pods end before kube-controller-manager releases their claims.
    cluster.delete_pod("v-1");
    cluster.delete_pod("v-2");
    assert!(cluster.settle().is_empty());
    cluster.delete_claim("v-1");
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "one claim is released");
    cluster.delete_claim("v-2");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}

#[test]
fn evicts_others_when_claim_of_ended_pod_is_not_released() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_running(&[("low-1", "70Gi", 0), ("low-2", "70Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "70Gi", 10);
    assert!(cluster.settle().is_empty());
    let victim = cluster.evict().remove(0).replace(" for urgent", "");
    cluster.delete_pod(&victim);
    // A decision for all pods.
    cluster.planner.node(applied(node("n3")));
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "the claim may be released");
    cluster.now += Duration::from_secs(31);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict().len(), 1);
}

#[test]
fn new_leader_expects_claims_of_pods_that_ended_before() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("ended", "40Gi", 0), ("bystander", "40Gi", 5)]);
    cluster.advance(Duration::from_secs(60));
    cluster.finish_pod("ended");
    cluster.add_pod_of_priority("urgent", "40Gi", 10);
    cluster.advance(Duration::from_secs(20));
    cluster.change_leader();
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "the claim may be released");
    // Counted from the end of the pod, not from the change of the leader.
    cluster.advance(Duration::from_secs(11));
    cluster.change_leader();
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["bystander for urgent"]);
}

/// Sets the limits of evictions of the whole cluster.
fn limit(cluster: &mut TestCluster, limits: &serde_json::Value) {
    cluster
        .planner
        .policy(applied(crate::fixture::object(serde_json::json!({
            "metadata": {"name": "limits", "uid": "limits", "resourceVersion": "1"},
            "spec": {"preemption": limits},
        }))));
}

/// Lets the time pass until a pod is evicted, and returns the seconds since the start.
fn wait_for_eviction(cluster: &mut TestCluster) -> u64 {
    loop {
        assert!(cluster.settle().is_empty());
        if !cluster.evictions.is_empty() {
            return (cluster.now - cluster.start).as_secs();
        }
        let deadline = cluster.planner.next_deadline().unwrap();
        assert!(deadline > cluster.now, "no busy loop");
        cluster.now = deadline;
    }
}

#[test]
fn keeps_victims_until_their_minimum_runtime() {
    let mut cluster = TestCluster::new(&["n1"]);
    limit(
        &mut cluster,
        &serde_json::json!({"minimumRuntimeSeconds": 90}),
    );
    // Both are bound at the start.
    cluster.add_running(&[("low-1", "40Gi", 0), ("low-2", "40Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "30Gi", 10);
    assert_eq!(wait_for_eviction(&mut cluster), 90);
    assert_eq!(cluster.evict(), ["low-1 for urgent"]);
}

#[test]
fn evicts_after_the_delay_of_the_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    limit(&mut cluster, &serde_json::json!({"delaySeconds": 40}));
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_claim(claim("urgent", "30Gi"));
    let mut urgent = pod("urgent", &["urgent"]);
    urgent.spec.as_mut().unwrap().priority = Some(10);
    let created = crate::fixture::object(serde_json::json!("2026-01-01T00:00:05Z"));
    urgent.metadata.creation_timestamp = Some(created);
    cluster.add_pod(urgent);
    assert_eq!(wait_for_eviction(&mut cluster), 45);
}

#[test]
fn takes_free_devices_before_the_delay() {
    let mut cluster = TestCluster::new(&["n1"]);
    limit(&mut cluster, &serde_json::json!({"delaySeconds": 3600}));
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_claim(claim("urgent", "30Gi"));
    let mut urgent = pod("urgent", &["urgent"]);
    let created = crate::fixture::object(serde_json::json!("2026-01-01T00:00:00Z"));
    urgent.metadata.creation_timestamp = Some(created);
    urgent.spec.as_mut().unwrap().priority = Some(10);
    cluster.add_pod(urgent);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty(), "the delay is not over");
    cluster.end("low");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}

#[test]
fn chooses_no_victims_again_while_an_eviction_is_in_flight() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("low", "70Gi", 0)]);
    cluster.add_pod_of_priority("urgent", "60Gi", 10);
    assert!(cluster.settle().is_empty());
    let eviction = cluster.evictions.remove(0);
    // A younger pod on a new node would be the better victim.
    let mut younger = pod("younger", &["younger"]);
    younger.spec.as_mut().unwrap().priority = Some(20);
    let created = crate::fixture::object(serde_json::json!("2026-01-01T00:00:20Z"));
    younger.metadata.creation_timestamp = Some(created);
    cluster.add_claim(claim("younger", "70Gi"));
    cluster.add_pod(younger.clone());
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    assert_eq!(cluster.settle(), ["younger → n2"]);
    younger.spec.as_mut().unwrap().priority = Some(0);
    cluster.pods.insert("younger".to_owned(), younger);
    cluster.bind(("younger", "n2"));
    for _ in 0..5 {
        cluster.advance(Duration::from_secs(31));
        assert!(cluster.settle().is_empty());
        assert!(
            cluster.evictions.is_empty(),
            "the first eviction has not ended"
        );
    }
    cluster.evictions.push(eviction);
    assert_eq!(cluster.evict(), ["low for urgent"]);
    assert!(cluster.settle().is_empty());
    assert!(cluster.evictions.is_empty());
    cluster.end("low");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}

#[test]
fn pod_that_may_not_evict_silences_no_other() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut labeled = node("n2");
    labeled.metadata.labels = Some([("only".to_owned(), "n2".to_owned())].into());
    cluster.planner.node(applied(labeled));
    let add = |cluster: &mut TestCluster,
               name: &str,
               memory: &str,
               priority,
               policy: Option<&str>,
               is_on_n2| {
        cluster.add_claim(claim(name, memory));
        let mut pod = pod(name, &[name]);
        let spec = pod.spec.as_mut().unwrap();
        spec.priority = Some(priority);
        spec.preemption_policy = policy.map(str::to_owned);
        if is_on_n2 {
            spec.node_selector = Some([("only".to_owned(), "n2".to_owned())].into());
        }
        cluster.add_pod(pod);
    };
    add(&mut cluster, "vip", "80Gi", 30, None, true);
    assert_eq!(cluster.settle(), ["vip → n2"]);
    cluster.bind(("vip", "n2"));
    cluster.add_running(&[("leaving", "10Gi", 0), ("low", "70Gi", 0)]);
    cluster.start_deletion("leaving");
    // The head of the queue waits for the other node.
    add(&mut cluster, "head", "75Gi", 20, Some("Never"), true);
    add(&mut cluster, "a-polite", "75Gi", 10, Some("Never"), false);
    add(&mut cluster, "b-entitled", "75Gi", 10, None, false);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for b-entitled"]);
}
