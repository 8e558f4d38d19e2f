//! Decisions for gangs that take turns.

use serde_json::json;

use super::cluster::{TestCluster, member};
use super::hard_pods::{add_hard, add_hard_and_tiny, add_node, add_pod, add_small, shares};

#[test]
fn gang_of_hard_pods_is_placed_after_some_turns() {
    for has_quota in [false, true] {
        let mut cluster = TestCluster::new(&[]);
        if has_quota {
            let quota = json!({"namespaces": ["default"], "limit": {"devices": 1000}});
            cluster.set_quota("team", &quota);
        }
        for (name, gpus) in [("a", 16), ("b", 18), ("c", 16), ("d", 18)] {
            add_node(&mut cluster, name, gpus);
        }
        for name in ["m-1", "m-2"] {
            add_hard(&mut cluster, name, 0);
            let pod = member(cluster.pods[name].clone(), "2");
            cluster.add_pod(pod);
        }
        cluster.is_slice_over = |_| true;
        let mut turns = 0;
        let mut jobs = Vec::new();
        while jobs.is_empty() {
            turns += 1;
            assert!(turns < 20, "{:?}", cluster.messages_of("Pod/m-1"));
            jobs = cluster.actions().0;
        }
        let nodes: Vec<_> = jobs[0].pods.iter().map(|pod| pod.node.as_str()).collect();
        assert_eq!(nodes, ["b", "d"], "quota: {has_quota}");
    }
}

#[test]
fn gang_that_searches_in_vain_beside_its_first_member_is_rejected() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "large", 18);
    // The first node in the order of names, so that nothing is left when the search has ended.
    add_node(&mut cluster, "another", 1);
    let mut whole = shares("whole", 2, "79Gi");
    let expression = "device.attributes['gpu.drava.dev'].index >= 16";
    whole["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    add_pod(&mut cluster, "m-1", &json!({"requests": [whole]}));
    // A search gives up on what the first member leaves.
    add_hard(&mut cluster, "m-2", 0);
    for name in ["m-1", "m-2"] {
        let pod = member(cluster.pods[name].clone(), "2");
        cluster.add_pod(pod);
    }
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    loop {
        turns += 1;
        assert!(turns < 10, "{:?}", cluster.messages_of("Pod/m-1"));
        assert!(cluster.actions().0.is_empty());
        if !cluster.planner.backlog.queue.is_suspended("pod-m-1") {
            break;
        }
    }
    assert!(turns > 1, "the searches take turns");
    let messages = cluster.messages_of("Pod/m-1");
    let last = messages.last().copied().unwrap_or_default();
    assert!(last.contains("1 of 2 members fit"), "{messages:?}");
}

/// Units of work in a turn, at most: those after which others have their turn, and the last search.
const TURN_UNITS: u64 = 200_000;

#[test]
fn gang_of_many_hard_pods_delays_others_by_one_turn() {
    const MEMBERS: usize = 4;
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "a", 1);
    add_node(&mut cluster, "small", 16);
    for index in 0..MEMBERS {
        add_node(&mut cluster, &format!("large-{index}"), 18);
        let name = format!("m-{index}");
        // Pods that are not equal share no searches.
        add_hard_and_tiny(&mut cluster, &name, 0, &format!("{}Mi", index + 1));
        let pod = member(cluster.pods[&name].clone(), &MEMBERS.to_string());
        cluster.add_pod(pod);
    }
    cluster.add_pod_with_claim("z-other", "8Gi");
    cluster.is_slice_over = |_| true;
    let (mut turns, mut turns_of_other) = (0, 0);
    loop {
        turns += 1;
        assert!(turns < 60, "{:?}", cluster.messages_of("Pod/m-0"));
        let before = cluster.planner.work();
        let jobs = cluster.actions().0;
        let units = cluster.planner.work() - before;
        assert!(units < TURN_UNITS, "{units} units in turn {turns}");
        let Some(job) = jobs.into_iter().next() else {
            continue;
        };
        if job.pods.len() == MEMBERS {
            break;
        }
        assert_eq!(job.pods[0].uid, "pod-z-other");
        turns_of_other = turns;
        cluster.write(job);
        cluster.deliver_claims();
    }
    assert!((1..=2).contains(&turns_of_other), "{turns_of_other}");
}

#[test]
fn search_for_victims_of_gang_takes_turns() {
    const NODES: i32 = 150;
    const MEMBERS: i32 = 12;
    let mut cluster = TestCluster::new(&[]);
    let add = |cluster: &mut TestCluster, name: &str, memory: &str, priority: i32| {
        let whole_node = json!({"requests": [shares("all", 16, memory)]});
        add_pod(cluster, name, &whole_node);
        let mut pod = cluster.pods[name].clone();
        pod.spec.as_mut().unwrap().priority = Some(priority);
        pod
    };
    for index in 0..NODES {
        let name = format!("n{index:03}");
        add_node(&mut cluster, &name, 16);
        let pod = add(&mut cluster, &name, "41Gi", NODES - index);
        cluster.add_pod(pod);
        // The end of a small pod alone is not enough, so the victims of no node are known without trials.
        add_small(&mut cluster, &name);
    }
    for placed in cluster.settle() {
        let (pod, node) = placed.split_once(" → ").unwrap();
        cluster.bind((pod, node));
    }
    for index in 0..MEMBERS {
        // The victims for pods that are not equal are searched for each.
        let memory = format!("{}Mi", 41 * 1024 + index);
        let pod = add(&mut cluster, &format!("m-{index:02}"), &memory, NODES + 1);
        cluster.add_pod(member(pod, &MEMBERS.to_string()));
    }
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    while cluster.evictions.is_empty() {
        turns += 1;
        assert!(turns < 40, "the search ends");
        let before = cluster.planner.work();
        assert!(cluster.actions().0.is_empty());
        let units = cluster.planner.work() - before;
        assert!(units < TURN_UNITS, "{units} units in turn {turns}");
    }
    let lowest: Vec<String> = (NODES - MEMBERS..NODES)
        .map(|index| format!("n{index:03} for m-00"))
        .collect();
    assert_eq!(cluster.evict(), lowest, "the lowest priorities");
    assert!(turns > 1, "decisions for other pods come between");
}
