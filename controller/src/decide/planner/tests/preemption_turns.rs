//! Searches for pods to evict that take turns.

use std::time::{Duration, Instant};

use drava_allocator::steps;
use serde_json::json;

use super::cluster::{TestCluster, member};
use super::hard_pods::{
    GPUS, add_hard, add_node, add_partitioned_node, add_pod, add_six, add_small, shares,
    use_partitions,
};

#[test]
fn search_for_victims_is_as_limited_as_decision() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, [2; GPUS]);
    add_six(&mut cluster);
    cluster.add_pod_with_claim("other", "8Gi");
    let start = Instant::now();
    assert_eq!(cluster.settle(), ["other → n1"]);
    let time = start.elapsed();
    assert!(time < Duration::from_secs(20), "{time:?}");
    let messages = cluster.messages_of("Pod/six");
    assert!(!messages.is_empty(), "the pod has its reason");
    assert!(
        messages.iter().all(|text| !text.contains("SearchLimit")),
        "{messages:?}"
    );
}

#[test]
fn node_of_which_search_gave_up_leaves_preemption_to_others() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "large", 18);
    add_pod(
        &mut cluster,
        "low",
        &json!({"requests": [shares("all", 18, "79Gi")]}),
    );
    assert_eq!(cluster.settle(), ["low → large"]);
    cluster.bind(("low", "large"));
    add_node(&mut cluster, "small", 16);
    add_hard(&mut cluster, "hard", 10);
    assert!(cluster.settle().is_empty());
    assert_eq!(cluster.evict(), ["low for hard"]);
}

/// Number of nodes that [`add_nodes_full_of_one_pod`] adds.
const FULL_NODES: i32 = 400;

/// Adds nodes full of one pod each, of a lower priority than those before; beside it a small pod of the lowest priority, if
/// wished, whose end alone is not enough for such a pod.
fn add_nodes_full_of_one_pod(cluster: &mut TestCluster, has_small: bool) {
    let whole_node = json!({"requests": [shares("all", 16, "41Gi")]});
    for index in 0..FULL_NODES {
        let name = format!("n{index:03}");
        add_node(cluster, &name, 16);
        add_pod(cluster, &name, &whole_node);
        let mut pod = cluster.pods[&name].clone();
        let spec = pod.spec.as_mut().unwrap();
        spec.priority = Some(FULL_NODES - index);
        cluster.add_pod(pod);
        if has_small {
            add_small(cluster, &name);
        }
    }
    for placed in cluster.settle() {
        let (pod, node) = placed.split_once(" → ").unwrap();
        assert_eq!(pod.trim_start_matches("small-"), node);
        cluster.bind((pod, node));
    }
    add_pod(cluster, "urgent", &whole_node);
    let mut urgent = cluster.pods["urgent"].clone();
    urgent.spec.as_mut().unwrap().priority = Some(FULL_NODES + 1);
    cluster.add_pod(urgent);
    cluster.is_slice_over = |_| true;
}

#[test]
fn search_for_victims_ends_where_no_other_node_can_be_better() {
    let mut cluster = TestCluster::new(&[]);
    add_nodes_full_of_one_pod(&mut cluster, false);
    let before = cluster.planner.work();
    assert!(cluster.actions().0.is_empty());
    assert_eq!(cluster.evict(), ["n399 for urgent"], "in the first turn");
    let units = cluster.planner.work() - before;
    // Each node is looked at in the decision and in the search, and the end of the pods of one of them is tried.
    let most = 60 * u64::from(FULL_NODES.unsigned_abs());
    assert!(units < most, "{units} units");
}

#[test]
fn search_for_victims_takes_turns() {
    let mut cluster = TestCluster::new(&[]);
    add_nodes_full_of_one_pod(&mut cluster, true);
    let mut turns = 0;
    while cluster.evictions.is_empty() {
        turns += 1;
        assert!(turns < 20, "the search ends");
        let before = cluster.planner.work();
        assert!(cluster.actions().0.is_empty());
        let units = cluster.planner.work() - before;
        assert!(units < 200_000, "{units} units in turn {turns}");
    }
    assert_eq!(cluster.evict(), ["n399 for urgent"], "the lowest priority");
    assert!(turns > 1, "a decision for another pod comes between");
    let messages: Vec<_> = cluster
        .pod_conditions
        .iter()
        .filter_map(|update| update.condition.message.as_deref())
        .filter(|message| message.starts_with("CostlySearch"))
        .collect();
    assert_eq!(
        messages,
        [
            "CostlySearch: many nodes are checked for each pod of the gang, or many pods could end for this one; the checks go on \
         after the decisions for other pods"
        ]
    );
}

/// Returns the number of turns in which a pod searches for its victims, and their steps. `others` nodes are full of pods of a
/// higher priority.
fn search_in_turns(others: usize) -> (u64, u64) {
    let mut cluster = TestCluster::new(&[]);
    for index in 0..others {
        let node = format!("other-{index}");
        add_node(&mut cluster, &node, 1);
        add_pod(
            &mut cluster,
            &node,
            &json!({"requests": [shares("all", 1, "79Gi")]}),
        );
        let mut pod = cluster.pods[&node].clone();
        pod.spec.as_mut().unwrap().priority = Some(20);
        cluster.add_pod(pod);
        assert_eq!(cluster.settle(), [format!("{node} → {node}")]);
        cluster.bind((&node, &node));
    }
    let mut victims = Vec::new();
    for (node, gpus, memory) in [
        ("small-0", 16, "1Gi"),
        ("small-1", 16, "1Gi"),
        ("small-2", 16, "1Gi"),
        ("z-large", 18, "79Gi"),
    ] {
        add_node(&mut cluster, node, gpus);
        let mut devices = shares("all", gpus, memory);
        let of_node = format!("device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-{node}')");
        devices["exactly"]["selectors"] = json!([{"cel": {"expression": of_node}}]);
        let name = format!("on-{node}");
        add_pod(&mut cluster, &name, &json!({"requests": [devices]}));
        victims.extend(cluster.settle());
        cluster.bind((&name, node));
    }
    assert_eq!(victims.len(), 4, "{victims:?}");
    // On each small node the search gives up, which is the work of a turn: of the decision, and of the search for victims.
    add_hard(&mut cluster, "urgent", 10);
    cluster.is_slice_over = |_| true;
    let (mut turns, mut steps) = (0, 0);
    while cluster.evictions.is_empty() {
        turns += 1;
        assert!(turns < 20, "the search ends");
        let (of_turn, (jobs, _)) = steps::of(|| cluster.actions());
        assert!(jobs.is_empty());
        steps += of_turn;
    }
    assert_eq!(cluster.evict(), ["on-z-large for urgent"]);
    (turns, steps)
}

#[test]
fn search_for_victims_goes_on_where_its_turn_ended() {
    let (turns, steps) = search_in_turns(16);
    assert!(turns > 5, "{turns}");
    // Each turn goes on with other nodes: the claim and the device of each are visited once.
    let (as_many, more) = search_in_turns(32);
    assert_eq!(turns, as_many);
    assert!(more <= steps + 2 * 16, "{steps}, then {more}");
}

/// Adds nodes with 18 GPUs, each full of one pod, of a lower priority than those before.
fn add_full_nodes(cluster: &mut TestCluster, nodes: i32) {
    for index in 0..nodes {
        let node = format!("n{index}");
        add_node(cluster, &node, 18);
        let name = format!("on-{node}");
        add_pod(
            cluster,
            &name,
            &json!({"requests": [shares("all", 18, "79Gi")]}),
        );
        let mut pod = cluster.pods[&name].clone();
        pod.spec.as_mut().unwrap().priority = Some(nodes - index);
        cluster.add_pod(pod);
        assert_eq!(cluster.settle(), [format!("{name} → {node}")]);
        cluster.bind((&name, &node));
    }
}

/// The search on the last node uses up a turn; another one has the time to place the pods by the victims that were found before.
#[test]
fn hard_pods_are_placed_by_victims_found_in_earlier_turns() {
    for members in [1, 2] {
        let mut cluster = TestCluster::new(&[]);
        add_full_nodes(&mut cluster, members);
        add_node(&mut cluster, "z-small", 16);
        add_pod(
            &mut cluster,
            "other",
            &json!({"requests": [shares("all", 16, "2Gi")]}),
        );
        assert_eq!(cluster.settle(), ["other → z-small"]);
        cluster.bind(("other", "z-small"));
        for index in 0..members {
            let name = format!("hard-{index}");
            add_hard(&mut cluster, &name, 10);
            if members > 1 {
                let pod = cluster.pods[&name].clone();
                cluster.add_pod(member(pod, &members.to_string()));
            }
        }
        assert!(cluster.settle().is_empty());
        let all: Vec<String> = (0..members)
            .map(|index| format!("on-n{index} for hard-0"))
            .collect();
        assert_eq!(cluster.evict(), all);
    }
}
