//! Decisions for pods whose devices can be combined in many ways.

use std::sync::Arc;
use std::time::Instant;

use drava_allocator::searched::{SearchedNodes, Undecided};
use drava_allocator::turn::Turn;
use serde_json::json;

use super::super::demand::Demand;
use super::cluster::TestCluster;
use super::hard_pods::{
    GPUS, add_hard, add_node, add_partitioned_node, add_running, add_six, use_partitions,
};
use crate::fixture::object;

#[test]
fn finds_gpu_with_six_partitions_at_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, [2, 2, 2, 2, 2, 2, 2, 0]);
    add_six(&mut cluster);
    let (start, before) = (Instant::now(), cluster.planner.work());
    assert_eq!(cluster.settle(), ["six → mig"]);
    let (time, units) = (start.elapsed(), cluster.planner.work() - before);
    assert!(units < 5_000, "{units} units of work in {time:?}");
}

/// What the decisions for a pod with many combinations cost, and how long they delay a pod that is due at the same time.
#[derive(Debug, Default)]
struct Delay {
    /// Turns until the other pod was allocated.
    turns_of_other: usize,
    turns: usize,
    /// Units of work in the longest turn.
    longest: u64,
}

/// Decides turn by turn until no decision is due. The pod needs six partitions of one GPU; `used` partitions of each are in use.
fn decide_six(used: [usize; GPUS], priority: i32) -> (TestCluster, Delay) {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, used);
    add_six(&mut cluster);
    let mut six = cluster.pods["six"].clone();
    six.spec.as_mut().unwrap().priority = Some(priority);
    cluster.add_pod(six);
    cluster.add_pod_with_claim("z-other", "8Gi");
    cluster.is_slice_over = |_| true;
    let mut delay = Delay::default();
    let start = Instant::now();
    loop {
        delay.turns += 1;
        assert!(delay.turns < 100, "the decisions end");
        let before = cluster.planner.work();
        let jobs = cluster.actions().0;
        delay.longest = delay.longest.max(cluster.planner.work() - before);
        let has_jobs = !jobs.is_empty();
        for job in jobs {
            if job.pods[0].uid == "pod-z-other" {
                delay.turns_of_other = delay.turns;
            }
            cluster.write(job);
        }
        if has_jobs {
            cluster.deliver_claims();
        }
        let deadline = cluster.planner.next_deadline();
        if deadline.is_none_or(|deadline| deadline > cluster.now) {
            break;
        }
    }
    println!("{used:?}: {delay:?} in {:?}", start.elapsed());
    (cluster, delay)
}

#[test]
fn pod_with_many_combinations_delays_others_by_one_turn() {
    // One GPU has six partitions left. None has: pods of the same priority stay, one of a lower priority ends.
    let cases = [
        ([2, 2, 2, 2, 2, 2, 2, 0], 0, 0),
        ([2; GPUS], 0, 0),
        ([2; GPUS], 10, 1),
    ];
    for (used, priority, evicted) in cases {
        let (mut cluster, delay) = decide_six(used, priority);
        assert!(delay.turns_of_other <= 2, "{delay:?}");
        assert!(delay.longest < 60_000, "{delay:?}");
        assert_eq!(cluster.evict().len(), evicted, "victims");
    }
}

#[test]
fn every_node_is_searched_with_a_quota() {
    let mut cluster = TestCluster::new(&[]);
    let quota = json!({"namespaces": ["default"], "limit": {"devices": 1000}});
    cluster.set_quota("team", &quota);
    for name in ["a", "b", "c"] {
        add_node(&mut cluster, name, 16);
    }
    add_node(&mut cluster, "d", 18);
    add_hard(&mut cluster, "hard", 0);
    // Each call is one turn of the decision.
    cluster.is_slice_over = |_| true;
    let mut turns = 0;
    let mut jobs = Vec::new();
    while jobs.is_empty() {
        turns += 1;
        assert!(turns < 10, "{:?}", cluster.messages_of("Pod/hard"));
        jobs = cluster.actions().0;
    }
    assert_eq!(jobs[0].pods[0].node, "d", "the last node");
    assert!(turns > 1, "the others are searched in turns before");
}

/// Verdicts are kept from turn to turn for a pod whose containers also have devices of allocated claims, and they may be
/// outdated.
#[test]
fn outdated_verdict_rejects_no_equal_pod() {
    let mut cluster = TestCluster::new(&[]);
    add_node(&mut cluster, "other", 1);
    add_running(&mut cluster, "default", "holder", ("other", 0));
    for name in ["a", "b"] {
        add_node(&mut cluster, name, 16);
    }
    add_hard(&mut cluster, "hard", 0);
    let mut pod = cluster.pods["hard"].clone();
    let spec = pod.spec.as_mut().unwrap();
    let held = json!({"name": "held", "resourceClaimName": "holder"});
    spec.resource_claims.as_mut().unwrap().push(object(held));
    let resources = spec.containers[0].resources.as_mut().unwrap();
    let used = resources.claims.as_mut().unwrap();
    used.push(object(json!({"name": "held"})));
    cluster.add_pod(pod);
    let Demand::Devices(request) = cluster.planner.demand("pod-hard") else {
        panic!("the pod needs devices");
    };
    let mut request = request.pod_request;
    // Decides for the pod, and adds GPUs to node a after the first turn.
    let mut decide = |cluster: &mut TestCluster| {
        let mut searched = SearchedNodes::default();
        for _ in 0..10 {
            request.searched = Some(Arc::new(searched.clone()));
            let planner = &mut cluster.planner;
            match planner.decide_once(&request, &mut Turn::limited()) {
                Ok(placement) => return Some(placement.node),
                Err(Undecided::Rejected(_)) => return None,
                Err(Undecided::Suspended(suspended)) => searched.extend(suspended.searched),
            }
            add_node(cluster, "a", 18);
        }
        panic!("the decision ends");
    };
    assert_eq!(decide(&mut cluster), None, "nothing was found on a before");
    assert_eq!(decide(&mut cluster).as_deref(), Some("a"));
}

#[test]
fn decision_that_goes_on_searches_changed_node_again() {
    let mut cluster = TestCluster::new(&[]);
    let quota = json!({"namespaces": ["default"], "limit": {"devices": 1000}});
    cluster.set_quota("team", &quota);
    for name in ["a", "b"] {
        add_node(&mut cluster, name, 16);
    }
    add_hard(&mut cluster, "first", 0);
    add_hard(&mut cluster, "twin", 10);
    let claim = cluster.claims["twin"].clone();
    cluster.delete_claim("twin");
    cluster.is_slice_over = |_| true;
    // The twin has no claim so far, and the first turn of the other one finds nothing on node a.
    for _ in 0..2 {
        assert!(cluster.actions().0.is_empty());
    }
    assert!(cluster.planner.backlog.queue.is_suspended("pod-first"));
    cluster.observe(claim);
    add_node(&mut cluster, "a", 18);
    cluster.is_slice_over = |_| false;
    let jobs = cluster.actions().0;
    let placed: Vec<_> = jobs.iter().map(|job| &job.pods[0]).collect();
    assert_eq!(placed.len(), 1);
    assert_eq!(
        (placed[0].uid.as_str(), placed[0].node.as_str()),
        ("pod-first", "a"),
        "what it has found there before is outdated"
    );
}
