//! Reservations of the head of the queue.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::cluster::{TestCluster, member};
use super::hard_pods::{add_hard, add_node, add_pod, shares};
use crate::decide::queue::pending_pod::HEAD_PATIENCE;
use crate::fixture::{claim, object, pod};

/// Adds a pod that was created at this second.
fn add_aged(cluster: &mut TestCluster, name: &str, memory: &str, second: u64) {
    cluster.add_claim(claim(name, memory));
    cluster.add_pod(aged(name, second));
}

fn aged(name: &str, second: u64) -> Pod {
    let mut pod = pod(name, &[name]);
    let created = json!(format!(
        "2026-01-01T00:{:02}:{:02}Z",
        second / 60,
        second % 60
    ));
    pod.metadata.creation_timestamp = Some(object(created));
    pod
}

fn bind_all(cluster: &mut TestCluster) -> Vec<String> {
    let placed = cluster.settle();
    for placement in &placed {
        cluster.bind(placement.split_once(" → ").unwrap());
    }
    placed
}

#[test]
fn large_pod_is_not_starved_by_small_pods() {
    let mut cluster = TestCluster::new(&["n1"]);
    let small = |index: u64| format!("small-{index:02}");
    for index in 0..4 {
        add_aged(&mut cluster, &small(index), "20Gi", index);
    }
    assert_eq!(bind_all(&mut cluster).len(), 4);
    add_aged(&mut cluster, "large", "70Gi", 5);
    assert!(bind_all(&mut cluster).is_empty());
    // Every ten seconds a small pod ends, and a small pod arrives.
    let mut placed = Vec::new();
    for step in 0..8 {
        cluster.advance(Duration::from_secs(10));
        add_aged(&mut cluster, &small(step + 4), "20Gi", 10 * step + 10);
        if step < 4 {
            cluster.end(&small(step));
        }
        placed.extend(bind_all(&mut cluster));
        if placed.contains(&"large → n1".to_owned()) {
            break;
        }
    }
    assert_eq!(placed, ["large → n1"], "no small pod before the large one");
}

#[test]
fn elastic_member_does_not_wait_for_its_own_reservation() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (second, name) in (1..).zip(["m-1", "m-2", "m-3"]) {
        cluster.add_claim(claim(name, "36Gi"));
        cluster.add_pod(member(aged(name, second), "2"));
    }
    // m-3 reserves with the age of its gang, which becomes younger when the older members are bound.
    assert_eq!(bind_all(&mut cluster), ["m-1 → n1", "m-2 → n1"]);
    assert!(bind_all(&mut cluster).is_empty());
    cluster.end("m-1");
    assert_eq!(bind_all(&mut cluster), ["m-3 → n1"]);
}

#[test]
fn backfills_devices_that_head_does_not_wait_for() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    add_aged(&mut cluster, "a", "60Gi", 2);
    add_aged(&mut cluster, "b", "30Gi", 1);
    assert_eq!(bind_all(&mut cluster).len(), 2);
    // The head waits for the end of the newer pod, a.
    add_aged(&mut cluster, "head", "75Gi", 10);
    add_aged(&mut cluster, "small-1", "20Gi", 20);
    add_aged(&mut cluster, "small-2", "20Gi", 30);
    let node_of_a = cluster.claims["a"]
        .status
        .clone()
        .unwrap()
        .allocation
        .unwrap();
    let pool = &node_of_a.devices.unwrap().results.unwrap()[0].pool;
    let other = if pool == "n1/gpus" { "n2" } else { "n1" };
    let expected = ["small-1", "small-2"].map(|pod| format!("{pod} → {other}"));
    assert_eq!(bind_all(&mut cluster), expected);
    cluster.end("a");
    assert_eq!(bind_all(&mut cluster).len(), 1, "the head");
}

#[test]
fn higher_priority_ignores_reservation_behind() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "60Gi", 0)]);
    cluster.add_pod_of_priority("head", "70Gi", 0);
    cluster.add_pod_of_priority("small", "10Gi", 0);
    assert!(cluster.settle().is_empty(), "reserved for the head");
    cluster.add_pod_of_priority("urgent", "10Gi", 5);
    assert_eq!(cluster.settle(), ["urgent → n1"]);
    assert!(cluster.evictions.is_empty());
}

#[test]
fn next_pod_takes_over_when_head_is_deleted() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "60Gi", 0)]);
    cluster.add_pod_of_priority("head", "70Gi", 0);
    cluster.add_pod_of_priority("small", "10Gi", 0);
    assert!(cluster.settle().is_empty());
    cluster.end("head");
    assert_eq!(cluster.settle(), ["small → n1"]);
}

#[test]
fn head_that_never_fits_reserves_nothing() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_of_priority("giant", "100Gi", 9);
    cluster.add_pod_of_priority("small", "10Gi", 0);
    assert_eq!(cluster.settle(), ["small → n1"]);
}

#[test]
fn head_leaves_devices_idle_for_a_limited_time() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("endless", "60Gi", 0)]);
    cluster.add_pod_of_priority("head", "70Gi", 0);
    cluster.add_pod_of_priority("small", "10Gi", 0);
    assert!(cluster.settle().is_empty());
    while cluster.now - cluster.start < HEAD_PATIENCE {
        let deadline = cluster.planner.next_deadline().unwrap();
        assert!(deadline > cluster.now, "no busy loop");
        cluster.now = deadline;
        let placed = cluster.settle();
        assert_eq!(
            placed.is_empty(),
            cluster.now - cluster.start < HEAD_PATIENCE
        );
    }
    assert!(cluster.claims["small"].status.is_some(), "no pod has ended");
}

#[test]
fn new_leader_reserves_before_it_decides_behind() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("running", "60Gi", 0)]);
    cluster.add_pod_of_priority("head", "70Gi", 0);
    assert!(cluster.settle().is_empty());
    cluster.add_pod_of_priority("small", "10Gi", 0);
    cluster.change_leader();
    assert!(cluster.settle().is_empty());
    cluster.end("running");
    assert_eq!(cluster.settle(), ["head → n1", "small → n1"]);
}

#[test]
fn pod_ahead_opens_no_reservation_for_pods_behind() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_running(&[("other", "60Gi", 20), ("low", "70Gi", 0)]);
    assert_ne!(node_of(&cluster, "other"), node_of(&cluster, "low"));
    cluster.is_slice_over = |_| true;
    cluster.add_pod_of_priority("large", "75Gi", 10);
    for index in 0..3 {
        cluster.add_pod_of_priority(&format!("small-{index}"), "5Gi", 0);
    }
    cluster.actions();
    assert_eq!(cluster.evict(), ["low for large"]);
    // It ignores the reservation, but needs none of its devices.
    cluster.add_pod_of_priority("urgent", "20Gi", 15);
    let mut placed = Vec::new();
    for _ in 0..10 {
        for job in cluster.actions().0 {
            let pod = &job.pods[0];
            placed.push(format!(
                "{} → {}",
                pod.pod.name.as_deref().unwrap(),
                pod.node
            ));
            cluster.write(job);
        }
        cluster.deliver_claims();
    }
    let node = node_of(&cluster, "other");
    assert_eq!(placed, [format!("urgent → {node}")]);
    let node = node_of(&cluster, "low");
    cluster.end("low");
    cluster.is_slice_over = |_| false;
    let placed = cluster.settle();
    assert_eq!(placed[0], format!("large → {node}"));
}

/// Returns the node of an allocated claim.
fn node_of(cluster: &TestCluster, claim: &str) -> String {
    let claim = serde_json::to_value(&cluster.claims[claim]).unwrap();
    let pool = &claim["status"]["allocation"]["devices"]["results"][0]["pool"];
    pool.as_str().unwrap().replace("/gpus", "")
}

/// Pod of a revision of Deployment `server`.
fn replica(name: &str, hash: &str) -> Pod {
    let mut pod = pod(name, &[name]);
    pod.metadata.labels = Some([("pod-template-hash".to_owned(), hash.to_owned())].into());
    pod.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("server-{hash}"), "uid": hash, "controller": true,
    }))]);
    pod.spec.as_mut().unwrap().restart_policy = Some("Always".to_owned());
    pod
}

#[test]
fn rollout_blocked_by_its_surge_says_so_and_holds_nothing() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    for name in ["server-a-1", "server-a-2"] {
        cluster.add_claim(claim(name, "70Gi"));
        cluster.add_pod(replica(name, "a"));
    }
    assert_eq!(bind_all(&mut cluster).len(), 2);
    cluster.add_claim(claim("server-b-1", "70Gi"));
    cluster.add_pod(replica("server-b-1", "b"));
    assert!(bind_all(&mut cluster).is_empty());
    assert_eq!(
        cluster.messages_of("Pod/server-b-1"),
        [
            "RolloutBlocked: the pod fits when pods of another revision of Deployment server have ended, and the rollout ends \
             them only when this pod is ready; set strategy.rollingUpdate.maxSurge: 0 with maxUnavailable: 1, or strategy.type: \
             Recreate"
        ]
    );
    for name in ["bystander-1", "bystander-2"] {
        cluster.add_pod_of_priority(name, "8Gi", 0);
    }
    assert_eq!(
        bind_all(&mut cluster).len(),
        2,
        "no pod frees what the surge waits for"
    );
    // The rollout goes on when an old pod is deleted.
    cluster.end("server-a-1");
    assert_eq!(bind_all(&mut cluster).len(), 1);
}

#[test]
fn head_reserves_nothing_before_a_service_ends_for_it() {
    let mut cluster = TestCluster::new(&["n1"]);
    for name in ["service-1", "service-2", "service-3"] {
        cluster.add_claim(claim(name, "20Gi"));
        let mut pod = pod(name, &[name]);
        pod.spec.as_mut().unwrap().restart_policy = Some("Always".to_owned());
        cluster.add_pod(pod);
    }
    assert_eq!(bind_all(&mut cluster).len(), 3);
    cluster.add_pod_of_priority("head", "70Gi", 5);
    cluster.planner.world.settings.preemption = false;
    assert!(cluster.settle().is_empty());
    cluster.add_pod_of_priority("small-1", "5Gi", 0);
    assert_eq!(bind_all(&mut cluster), ["small-1 → n1"]);
    cluster.end("service-1");
    assert!(cluster.settle().is_empty());
    cluster.add_pod_of_priority("small-2", "5Gi", 0);
    assert!(cluster.settle().is_empty(), "pods end for the head");
    assert_eq!(
        cluster.messages_of("Pod/small-2"),
        [
            "Reserved: the pod fits on n1, but its devices are reserved for pod default/head, the head of the queue"
        ]
    );
    for name in ["service-2", "service-3", "small-1"] {
        cluster.end(name);
    }
    assert_eq!(cluster.settle(), ["head → n1", "small-2 → n1"]);
}

/// A search that its turn has cut short tells nothing about equal pods.
#[test]
fn search_cut_short_hides_no_reservation_from_equal_pods() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "large", 19);
    let mut device = shares("one", 1, "79Gi");
    let expression = "device.attributes['gpu.drava.dev'].index == 18";
    device["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    add_pod(&mut cluster, "low", &json!({"requests": [device]}));
    assert_eq!(cluster.settle(), ["low → large"]);
    cluster.bind(("low", "large"));
    add_pod(
        &mut cluster,
        "head",
        &json!({"requests": [shares("all", 19, "79Gi")]}),
    );
    let mut head = cluster.pods["head"].clone();
    head.spec.as_mut().unwrap().priority = Some(10);
    cluster.add_pod(head);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evictions.len(), 1, "the node is reserved");
    add_node(&mut cluster, "small", 16);
    let mut devices = shares("all", 16, "1Gi");
    let expression = "device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-small')";
    devices["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    add_pod(&mut cluster, "other", &json!({"requests": [devices]}));
    assert_eq!(cluster.settle(), ["other → small"]);
    cluster.bind(("other", "small"));
    // Whether they would fit on the small node without the other pod is the work of a turn, for the first of them.
    for name in ["hard-0", "hard-1"] {
        add_hard(&mut cluster, name, 0);
    }
    assert!(cluster.settle().is_empty());
    let text = "the pod fits on large, but its devices are reserved for pod default/head";
    let messages = ["Pod/hard-0", "Pod/hard-1"].map(|pod| cluster.messages_of(pod).join("; "));
    assert!(
        messages.iter().any(|message| message.contains(text)),
        "{messages:?}"
    );
}

/// Returns the texts of the events and the condition of a small pod of the namespace, behind a pod or a gang of namespace `team-a`
/// for which devices are reserved.
fn texts_behind_head(namespace: &str, is_gang: bool) -> Vec<String> {
    let mut cluster = TestCluster::new(&["n1"]);
    let add = |cluster: &mut TestCluster, namespace: &str, name: &str, memory: &str, is_member| {
        let (mut claim, mut pod) = (claim(name, memory), pod(name, &[name]));
        if is_member {
            pod = member(pod, "1");
        }
        claim.metadata.namespace = Some(namespace.to_owned());
        pod.metadata.namespace = Some(namespace.to_owned());
        cluster.add_claim(claim);
        cluster.add_pod(pod);
        cluster.settle()
    };
    let placed = add(&mut cluster, "team-a", "runs", "60Gi", false);
    assert_eq!(placed, ["runs → n1"]);
    cluster.bind(("runs", "n1"));
    assert!(add(&mut cluster, "team-a", "head", "70Gi", is_gang).is_empty());
    assert!(add(&mut cluster, namespace, "small", "10Gi", false).is_empty());
    let events = cluster.events.iter();
    let of_small = events.filter(|(object, ..)| object.ends_with("/small"));
    let conditions = cluster.pod_conditions.iter();
    let of_small_pod = conditions.filter(|update| update.pod.uid.as_deref() == Some("pod-small"));
    of_small
        .map(|(_, _, message)| message.clone())
        .chain(of_small_pod.filter_map(|update| update.condition.message.clone()))
        .collect()
}

/// Events and conditions are read by those who may read one namespace.
#[test]
fn names_no_owner_of_another_namespace() {
    for (namespace, is_gang, owner) in [
        ("team-a", false, "pod team-a/head"),
        ("team-a", true, "gang team-a/g"),
        ("team-b", false, "a pod of another namespace"),
        ("team-b", true, "a gang of another namespace"),
    ] {
        let text = format!(
            "Reserved: the pod fits on n1, but its devices are reserved for {owner}, the head of the queue"
        );
        assert_eq!(
            texts_behind_head(namespace, is_gang),
            [text.clone(), text.clone(), text],
            "events of pod and claim, and condition"
        );
    }
}
