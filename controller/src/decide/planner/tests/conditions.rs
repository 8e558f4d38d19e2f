//! Conditions of waiting pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_api::listed::{Change, DeletedObject};
use drava_api::names::ALLOCATED_CONDITION;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::fixture::{node, object, pod, slice};

/// Executes the writes of conditions; returns the pod and the status and message of each.
fn write_conditions(cluster: &mut TestCluster) -> Vec<(String, String, String)> {
    let mut written = Vec::new();
    for update in std::mem::take(&mut cluster.pod_conditions) {
        let name = update.pod.name.unwrap();
        let condition = update.condition;
        let message = condition.message.clone().unwrap();
        written.push((name.clone(), condition.status.clone(), message));
        let mut pod = cluster.pods[&name].clone();
        let status = pod.status.get_or_insert_default();
        let conditions = status.conditions.get_or_insert_default();
        conditions.retain(|other| other.type_ != condition.type_);
        conditions.push(condition);
        cluster.add_pod(pod);
    }
    written
}

#[test]
fn condition_tells_why_pod_waits_until_it_is_allocated() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("first", "60Gi");
    assert_eq!(cluster.settle(), ["first → n1"]);
    assert!(write_conditions(&mut cluster).is_empty(), "it did not wait");
    cluster.add_pod_with_claim("second", "60Gi");
    cluster.settle();
    let written = write_conditions(&mut cluster);
    assert_eq!(written.len(), 1, "{written:?}");
    let (name, status, message) = &written[0];
    assert_eq!((name.as_str(), status.as_str()), ("second", "False"));
    assert_eq!(
        cluster.messages_of("Pod/second"),
        [message.as_str()],
        "as the event"
    );
    let decisions = cluster.planner.decisions();
    cluster.settle();
    assert_eq!(cluster.planner.decisions(), decisions, "its own change");
    // A new leader publishes the event again, but the condition is the same.
    cluster.change_leader();
    cluster.settle();
    assert!(write_conditions(&mut cluster).is_empty());
    cluster.end("first");
    assert_eq!(cluster.settle(), ["second → n1"]);
    cluster.settle();
    let written = write_conditions(&mut cluster);
    assert_eq!(
        written,
        [("second".to_owned(), "True".to_owned(), String::new())]
    );
    cluster.settle();
    assert!(write_conditions(&mut cluster).is_empty(), "once");
}

/// A cluster with pods that never fit; their events and those of their claims exceed the budget.
fn cluster_with_waiting(count: usize) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    for index in 0..count {
        cluster.add_pod_with_claim(&format!("w{index:04}"), "100Gi");
    }
    cluster
}

/// Returns the messages of the events of each pod since this one.
fn events_of_pods(cluster: &TestCluster, since: usize) -> BTreeMap<String, Vec<String>> {
    let mut events: BTreeMap<_, Vec<String>> = BTreeMap::new();
    for (regarding, _, message) in &cluster.events[since..] {
        if let Some(name) = regarding.strip_prefix("Pod/") {
            let of_pod = events.entry(name.to_owned()).or_default();
            of_pod.push(message.clone());
        }
    }
    events
}

#[test]
fn first_conditions_need_no_budget_of_events() {
    let mut cluster = cluster_with_waiting(2999);
    // The condition of a pod that has lost its allocation says the contrary.
    cluster.add_pod_with_claim("x", "100Gi");
    let mut lost = pod("x", &["x"]);
    let status = json!({"phase": "Pending", "conditions": [{"type": ALLOCATED_CONDITION, "status": "True"}]});
    lost.status = Some(object(status));
    cluster.add_pod(lost);
    cluster.settle();
    let pods = cluster.pod_conditions.iter();
    let pods: BTreeSet<_> = pods.map(|update| update.pod.uid.clone()).collect();
    assert_eq!((pods.len(), cluster.pod_conditions.len()), (3000, 3000));
    assert!(events_of_pods(&cluster, 0).len() <= 1000, "the budget");
    // The watch lags.
    cluster.advance(Duration::from_secs(30));
    cluster.settle();
    assert_eq!(write_conditions(&mut cluster).len(), 3000, "once");
    let mut events = BTreeMap::new();
    for _ in 0..200 {
        events = events_of_pods(&cluster, 0);
        if events.len() == 3000 {
            break;
        }
        cluster.advance(Duration::from_secs(10));
        cluster.settle();
    }
    assert_eq!(events.len(), 3000, "no event is lost");
    assert!(events.values().all(|messages| messages.len() == 1));
    assert!(cluster.pod_conditions.is_empty(), "nothing has changed");
}

#[test]
fn later_conditions_are_written_with_events() {
    let mut cluster = cluster_with_waiting(600);
    cluster.settle();
    let mut conditions: BTreeMap<String, String> = BTreeMap::new();
    let mut events = BTreeMap::new();
    let mut show = |cluster: &mut TestCluster| {
        let written = write_conditions(cluster).into_iter();
        let written: BTreeMap<_, _> = written.map(|(pod, _, message)| (pod, message)).collect();
        conditions.extend(written.clone());
        (written, conditions.clone())
    };
    assert_eq!(show(&mut cluster).0.len(), 600);
    // A new node changes the texts; the budget is used up.
    cluster.planner.node(applied(node("n2")));
    cluster.planner.slice(applied(slice("n2")));
    let (mut seen, mut is_done) = (0, false);
    for _ in 0..300 {
        if is_done {
            break;
        }
        cluster.settle();
        let new_events = events_of_pods(&cluster, seen);
        seen = cluster.events.len();
        let (written, conditions) = show(&mut cluster);
        for (pod, messages) in &new_events {
            assert_eq!(messages.last(), conditions.get(pod), "as old as the event");
        }
        assert!(written.keys().all(|pod| new_events.contains_key(pod)));
        events.extend(new_events);
        is_done = conditions.values().all(|text| text.starts_with("0/2"));
        cluster.advance(Duration::from_secs(2));
    }
    assert!(is_done, "the newest reason");
    assert_eq!(events.len(), 600);
}

#[test]
fn reason_that_changes_back_replaces_condition_in_flight() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "100Gi");
    cluster.settle();
    write_conditions(&mut cluster);
    cluster.planner.node(applied(node("n2")));
    let mut written = |slice: Change<ResourceSlice>| {
        cluster.planner.slice(slice);
        cluster.settle();
        // The time between two texts with other figures.
        cluster.advance(Duration::from_secs(60));
        cluster.settle();
        let updates = std::mem::take(&mut cluster.pod_conditions).into_iter();
        let written: Vec<String> = updates
            .map(|update| update.condition.message.unwrap())
            .collect();
        let events = cluster.messages_of("Pod/a").len();
        (written.concat(), events)
    };
    let (changed, events) = written(applied(slice("n2")));
    assert!(changed.starts_with("0/2") && events == 2, "{changed}");
    let n2 = DeletedObject {
        name: "slice-n2".to_owned(),
        ..DeletedObject::default()
    };
    let (back, events) = written(Change::Deleted(n2));
    assert!(back.starts_with("0/1") && events == 3, "{back}");
}

#[test]
fn allocation_replaces_condition_in_flight() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_running(&[("first", "60Gi", 0)]);
    cluster.add_pod_with_claim("second", "60Gi");
    cluster.settle();
    let statuses = |cluster: &TestCluster| -> Vec<String> {
        let updates = cluster.pod_conditions.iter();
        updates
            .map(|update| update.condition.status.clone())
            .collect()
    };
    assert_eq!(statuses(&cluster), ["False"]);
    cluster.end("first");
    assert_eq!(cluster.settle(), ["second → n1"]);
    // The watch shows two versions of the bound pod.
    cluster.bind(("second", "n1"));
    cluster.bind(("second", "n1"));
    cluster.settle();
    assert_eq!(statuses(&cluster), ["False", "True"]);
    cluster.settle();
    write_conditions(&mut cluster);
    cluster.settle();
    assert!(cluster.pod_conditions.is_empty());
}

#[test]
fn writes_condition_of_bound_pod_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "100Gi");
    cluster.settle();
    cluster.pod_conditions.clear();
    // The watch shows two versions before the next decision.
    cluster.bind(("a", "n1"));
    cluster.bind(("a", "n1"));
    cluster.settle();
    let written = cluster.pod_conditions.iter();
    let written: Vec<&str> = written
        .map(|update| update.condition.status.as_str())
        .collect();
    assert_eq!(written, ["True"]);
}

#[test]
fn writes_condition_again_that_watch_never_shows() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "100Gi");
    let mut written = || {
        cluster.advance(Duration::from_secs(60));
        cluster.planner.backlog.activate_all = true;
        cluster.settle();
        std::mem::take(&mut cluster.pod_conditions).len()
    };
    assert_eq!(written(), 1);
    assert!((0..4).all(|_| written() == 0), "in flight");
    assert_eq!((0..8).map(|_| written()).sum::<usize>(), 1, "rejected");
}

#[test]
fn writes_condition_again_that_was_removed() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "100Gi");
    let created = cluster.pods["a"].clone();
    cluster.settle();
    assert_eq!(write_conditions(&mut cluster).len(), 1);
    cluster.add_pod(created);
    cluster.planner.backlog.activate_all = true;
    cluster.settle();
    assert_eq!(write_conditions(&mut cluster).len(), 1);
}
