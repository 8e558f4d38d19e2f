//! Decisions in time slices.

use std::collections::BTreeSet;
use std::time::Duration;

use drava_allocator::searched::Undecided;
use drava_allocator::turn::Turn;
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use super::super::demand::Demand;
use super::cluster::{TestCluster, applied};
use super::hard_pods::{add_hard, add_node, add_pod, request, shares};
use crate::fixture::{claim, class, node, object, pod, slice};
use crate::pods::pod_condition::PodConditionUpdate;

#[test]
fn decides_for_every_pod_in_slices_under_churn() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_slice_over = |_| true;
    for name in ["a", "b", "c"] {
        cluster.add_pod_with_claim(name, "100Gi");
    }
    cluster.add_pod_with_claim("d", "8Gi");
    let mut jobs = Vec::new();
    for _ in 0..4 {
        cluster.planner.backlog.activate_all = true;
        cluster.advance(Duration::from_millis(100));
        assert!(jobs.is_empty());
        jobs = cluster.actions().0;
        let deadline = cluster.planner.next_deadline();
        assert!(deadline.is_some_and(|deadline| deadline <= cluster.now) || !jobs.is_empty());
    }
    assert_eq!(
        jobs.len(),
        1,
        "one decision per slice, and none is repeated before the last"
    );
}

#[test]
fn new_pod_of_high_priority_precedes_rest_of_round() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.is_slice_over = |_| true;
    for name in ["a", "b", "c"] {
        cluster.add_pod_with_claim(name, "100Gi");
    }
    assert!(cluster.actions().0.is_empty(), "a does not fit");
    cluster.add_pod_of_priority("urgent", "8Gi", 1000);
    assert_eq!(cluster.actions().0[0].pods[0].uid, "pod-urgent");
}

#[test]
fn equal_rejected_pods_cost_one_search() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.add_pod_with_claim("filler", "70Gi");
    cluster.settle();
    for index in 0..200 {
        cluster.add_pod_with_claim(&format!("w{index}"), "100Gi");
    }
    let checks = cluster.planner.node_checks();
    let decisions = cluster.planner.decisions();
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.planner.decisions() - decisions, 200);
    let checks = cluster.planner.node_checks() - checks;
    assert!(checks <= 20, "{checks} checks of nodes for 200 equal pods");
    assert_eq!(
        cluster.messages_of("Pod/w0"),
        cluster.messages_of("Pod/w199"),
        "each has its reason"
    );
}

/// Adds a pod of this priority with a claim whose selector takes nearly a turn for each device.
fn add_costly(cluster: &mut TestCluster, name: &str, matches: bool, priority: i32) {
    let list = format!("[{}]", vec!["1"; 140].join(","));
    let of_gpu = "device.attributes['gpu.drava.dev'].uuid != ''";
    let expression = format!("{list}.all(x, {list}.all(y, x == y)) && {of_gpu} && {matches}");
    let mut costly = claim(name, "8Gi");
    let devices = costly.spec.as_mut().unwrap().devices.as_mut();
    let requests = devices.unwrap().requests.as_mut();
    let exactly = requests.unwrap()[0].exactly.as_mut().unwrap();
    exactly.selectors = Some(vec![object(json!({"cel": {"expression": expression}}))]);
    cluster.add_claim(costly);
    let mut pod = pod(name, &[name]);
    pod.spec.as_mut().unwrap().priority = Some(priority);
    cluster.add_pod(pod);
}

#[test]
fn costly_selectors_delay_no_other_pod() {
    let mut cluster = TestCluster::new(&["n1", "n2", "n3", "n4"]);
    // Each call is one decision, or one turn of it.
    cluster.is_slice_over = |_| true;
    for index in 0..20 {
        add_costly(&mut cluster, &format!("costly-{index}"), false, 0);
    }
    for _ in 0..20 {
        assert!(cluster.actions().0.is_empty());
    }
    assert!(
        cluster.events.is_empty(),
        "no event before the end of the decision"
    );
    let conditions = std::mem::take(&mut cluster.pod_conditions);
    let of = |update: &PodConditionUpdate| update.pod.name.clone().unwrap();
    let explained: BTreeSet<String> = conditions.iter().map(of).collect();
    assert_eq!((explained.len(), conditions.len()), (20, 20));
    let message = conditions[0].condition.message.as_ref().unwrap();
    assert!(message.starts_with("CostlySelectors: "), "{message}");
    for name in ["usual", "later"] {
        cluster.add_pod_with_claim(name, "8Gi");
        let checks = cluster.planner.node_checks();
        let mut jobs = Vec::new();
        while jobs.is_empty() {
            jobs = cluster.actions().0;
        }
        let checks = cluster.planner.node_checks() - checks;
        assert!(
            checks <= 15,
            "{checks} checks of nodes for {name}, and a turn"
        );
        for job in jobs {
            assert_eq!(job.pods[0].uid, format!("pod-{name}"));
            cluster.write(job);
        }
        cluster.deliver_claims();
    }
    let decisions = cluster.planner.decisions();
    while cluster
        .planner
        .next_deadline()
        .is_some_and(|deadline| deadline <= cluster.now)
    {
        assert!(
            cluster.planner.decisions() - decisions < 200,
            "the decisions end"
        );
        cluster.actions();
    }
    for index in 0..20 {
        let messages = cluster.messages_of(&format!("Pod/costly-{index}"));
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(messages[0].contains("SelectorMismatch"), "{messages:?}");
    }
}

#[test]
fn suspended_search_for_room_evicts_nothing() {
    let mut cluster = TestCluster::new(&["n1", "n2", "n3", "n4"]);
    // With a quota, no selector is evaluated for a node whose CPUs are used, until the search simulates an eviction.
    let quota = json!({"namespaces": ["default"], "limit": {"memory": "1Ti"}});
    cluster.set_quota("team", &quota);
    for (name, priority) in [("a", 3), ("b", 2), ("c", 1), ("d", 0)] {
        cluster.add_claim(claim(name, "8Gi"));
        let mut running = pod(name, &[name]);
        let spec = running.spec.as_mut().unwrap();
        spec.priority = Some(priority);
        spec.containers[0].resources = Some(object(json!({"requests": {"cpu": "8"}})));
        cluster.add_pod(running);
        let placed = cluster.settle();
        cluster.bind(placed[0].split_once(" → ").unwrap());
    }
    cluster.is_slice_over = |_| true;
    add_costly(&mut cluster, "urgent", true, 10);
    let mut turns = 0;
    while cluster.evictions.is_empty() {
        let reservations = cluster.planner.commitments.ledger.reservations().count();
        assert_eq!(reservations, 0, "in turn {turns}");
        assert!(cluster.actions().0.is_empty());
        turns += 1;
        assert!(turns < 20, "the search ends");
    }
    assert_eq!(cluster.evict(), ["d for urgent"], "the lowest priority");
    assert!(turns > 1, "the search was suspended");
}

/// Returns how often a node was checked for one more pod, with that number of nodes.
fn checks_of_one_decision(nodes: usize) -> u64 {
    let names: Vec<String> = (0..nodes).map(|index| format!("n{index:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut cluster = TestCluster::new(&names);
    cluster.add_pod_with_claim("first", "8Gi");
    cluster.settle();
    let before = cluster.planner.node_checks();
    cluster.add_pod_with_claim("second", "8Gi");
    assert_eq!(cluster.settle(), ["second → n000"]);
    cluster.planner.node_checks() - before
}

#[test]
fn cost_of_decision_is_independent_of_number_of_nodes() {
    let few = checks_of_one_decision(10);
    assert_eq!(few, checks_of_one_decision(300));
    assert!(few <= 8, "{few}");
}

/// Returns the number of decisions that a change causes while two pods wait that fit on no node.
fn decisions_after(change: impl FnOnce(&mut TestCluster)) -> u64 {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut cpu_only: Pod = pod("cpu", &[]);
    cpu_only.spec.as_mut().unwrap().node_name = Some("n2".to_owned());
    cluster.add_pod(cpu_only);
    cluster.add_claim(claim("unused", "1Gi"));
    cluster.add_pod_with_claim("small", "8Gi");
    cluster.add_pod_with_claim("a", "100Gi");
    cluster.add_pod_with_claim("b", "100Gi");
    assert_eq!(cluster.settle(), ["small → n1"]);
    let before = cluster.planner.decisions();
    change(&mut cluster);
    cluster.settle();
    cluster.planner.decisions() - before
}

#[test]
fn unrelated_changes_cause_no_decision() {
    assert_eq!(decisions_after(|cluster| cluster.delete_pod("cpu")), 0);
    assert_eq!(decisions_after(|cluster| cluster.delete_claim("unused")), 0);
    assert_eq!(
        decisions_after(|cluster| cluster.planner.node(applied(node("n1")))),
        0,
        "an unchanged node"
    );
    assert_eq!(
        decisions_after(|cluster| cluster.planner.namespace(applied(object(json!({
            "metadata": {"name": "other", "uid": "other", "labels": {"a": "b"}},
        }))))),
        0
    );
    let of_claim = decisions_after(|cluster| cluster.observe(claim("a", "100Gi")));
    assert_eq!(of_claim, 1, "only the pod of a changed claim");
    assert_eq!(
        decisions_after(|cluster| cluster.end("small")),
        2,
        "a release may help all that wait"
    );
}

#[test]
fn changes_wake_only_pods_that_they_can_help() {
    let bound = |name: &str, claims: &[&str]| {
        let mut pod = pod(name, claims);
        pod.spec.as_mut().unwrap().node_name = Some("n2".to_owned());
        pod
    };
    assert_eq!(
        decisions_after(|cluster| cluster.add_pod(bound("other", &[]))),
        0,
        "a pod without devices has no victim"
    );
    assert_eq!(
        decisions_after(|cluster| cluster.planner.slice(applied(slice("n1")))),
        0,
        "an unchanged slice"
    );
    assert_eq!(
        decisions_after(|cluster| cluster.planner.class(applied(class()))),
        0,
        "an unchanged class"
    );
    let transition = |generations: &[(i64, i64)]| {
        let slices: Vec<_> = generations
            .iter()
            .map(|(generation, index)| {
                let mut slice = slice("n1");
                slice.metadata.name = Some(format!("slice-n1-{index}"));
                slice.metadata.resource_version = Some((generation * 10 + index).to_string());
                slice.spec.pool.generation = *generation;
                slice.spec.pool.resource_slice_count = 2;
                if *index > 0 {
                    slice.spec.devices = None;
                }
                slice
            })
            .collect();
        decisions_after(|cluster| {
            for slice in slices {
                cluster.planner.slice(applied(slice));
                cluster.settle();
            }
        })
    };
    assert_eq!(transition(&[(2, 0)]), 0, "an incomplete pool");
    assert_eq!(transition(&[(2, 0), (2, 1)]), 3, "once per completed pool");
    let other_label = |name: &str| {
        let mut node = node(name);
        node.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        node
    };
    assert_eq!(
        decisions_after(|cluster| {
            let mut unfit = pod("picky", &["picky"]);
            let selector = [("a".to_owned(), "b".to_owned())];
            unfit.spec.as_mut().unwrap().node_selector = Some(selector.into());
            cluster.add_claim(claim("picky", "8Gi"));
            cluster.add_pod(unfit);
            assert!(cluster.settle().is_empty());
            cluster.planner.node(applied(other_label("n2")));
            assert_eq!(cluster.actions().0[0].pods[0].node, "n2");
        }),
        2,
        "only those of the pod that the node did not fit"
    );
    // The reasons of the others are renewed a little later.
    assert_eq!(
        decisions_after(|cluster| {
            cluster.planner.node(applied(other_label("n2")));
            cluster.settle();
            cluster.advance(Duration::from_secs(30));
        }),
        3
    );
}

/// The next new node gets the number of a deleted one.
#[test]
fn nodes_of_an_explanation_are_numbered_again_after_a_deletion() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut cordoned = node("n1");
    cordoned.spec.get_or_insert_default().unschedulable = Some(true);
    cluster.planner.node(applied(cordoned));
    cluster.add_pod_with_claim("large", "90Gi");
    assert!(cluster.settle().is_empty());
    let Demand::Devices(request) = cluster.planner.demand("pod-large") else {
        panic!("the pod needs devices");
    };
    let decided = cluster
        .planner
        .decide(&request.pod_request, &mut Turn::endless());
    let Err(Undecided::Rejected(explanation)) = decided else {
        panic!("{decided:?}");
    };
    let before = cluster.planner.unfit_nodes(&explanation);
    assert_eq!(cluster.planner.unfit_nodes(&explanation), before);
    cluster.delete_node("n1");
    assert!(cluster.settle().is_empty());
    let unfit = cluster.planner.unfit_nodes(&explanation);
    let new = cluster.planner.backlog.queue.node_set(["n3"].into_iter());
    assert_ne!(unfit, new);
}

#[test]
fn first_decision_on_many_nodes_takes_turns() {
    const NODES: usize = 4000;
    let mut cluster = TestCluster::new(&[]);
    for index in 0..NODES {
        add_node(&mut cluster, &format!("n{index:03}"), 16);
    }
    // The other pod is like one before.
    cluster.add_pod_with_claim("before", "8Gi");
    assert_eq!(cluster.settle().len(), 1);
    let decisions = cluster.planner.decisions();
    // A node with its first alternative would be better than all others, so every node is evaluated.
    let alternatives = ["79Gi", "41Gi"].map(|memory| {
        let count = if memory == "79Gi" { 17 } else { 16 };
        let mut alternative = shares("all", count, memory)["exactly"].clone();
        alternative["name"] = json!(format!("of-{count}"));
        alternative
    });
    add_pod(
        &mut cluster,
        "large",
        &json!({"requests": [{"name": "all", "firstAvailable": alternatives}]}),
    );
    cluster.add_pod_with_claim("z-other", "8Gi");
    cluster.is_slice_over = |_| true;
    let mut order = Vec::new();
    while order.len() < 2 {
        assert!(
            cluster.planner.decisions() - decisions < 40,
            "the decisions end"
        );
        let before = cluster.planner.work();
        let jobs = cluster.actions().0;
        let units = cluster.planner.work() - before;
        assert!(units < 110_000, "{units} units in a turn");
        order.extend(jobs.into_iter().map(|job| job.pods[0].uid.clone()));
    }
    assert_eq!(
        order,
        ["pod-z-other", "pod-large"],
        "the other pod does not wait"
    );
}

#[test]
fn usual_selectors_do_not_wait_behind_suspended_searches() {
    let mut cluster = TestCluster::new(&[]);
    for name in ["a", "b", "c"] {
        add_node(&mut cluster, name, 16);
    }
    add_hard(&mut cluster, "hard", 0);
    cluster.is_slice_over = |_| true;
    assert!(cluster.actions().0.is_empty());
    assert!(cluster.planner.backlog.queue.is_suspended("pod-hard"));
    add_pod(
        &mut cluster,
        "usual",
        &json!({"requests": [request("r", "device.driver == 'gpu.drava.dev'")]}),
    );
    let jobs = cluster.actions().0;
    assert_eq!(jobs.len(), 1, "in the next turn");
    assert_eq!(jobs[0].pods[0].uid, "pod-usual");
}
