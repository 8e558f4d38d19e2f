//! Which shares are suspended, compared with brute force on small clusters where only some pods may be suspended.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{allow, suspended_pods};
use crate::decide::planner::tests::cluster::TestCluster;
use crate::fixture::{claim, pod};

/// Nodes with one GPU each.
const NODES: [&str; 2] = ["n1", "n2"];
/// Memory of a GPU in GiB.
const GPU: u64 = 80;
const URGENT: i32 = 10;

/// A running pod.
#[derive(Debug, Clone)]
struct Running {
    name: String,
    node: String,
    memory: u64,
    priority: i32,
    is_allowed: bool,
}

/// Returns whether a pod with this memory fits on a node when the pods of the set use nothing.
fn fits(running: &[Running], without: &BTreeSet<&str>, memory: u64) -> bool {
    NODES.iter().any(|node| {
        let rest = running
            .iter()
            .filter(|pod| pod.node == *node && !without.contains(&*pod.name));
        rest.map(|pod| pod.memory).sum::<u64>() + memory <= GPU
    })
}

/// Returns the cost of a set: its highest priority, then the number of pods with it, then of those with the next, and so on.
fn cost(running: &[Running], set: &BTreeSet<&str>) -> Vec<i32> {
    let pods = running.iter().filter(|pod| set.contains(&*pod.name));
    let mut priorities: Vec<i32> = pods.map(|pod| pod.priority).collect();
    priorities.sort_unstable_by(|one, other| other.cmp(one));
    priorities
}

/// Returns the least highest priority of a set that makes room, and whether there is one.
fn best<'a>(running: &'a [Running], memory: u64, may: impl Fn(&Running) -> bool) -> Option<i32> {
    let candidates: Vec<&'a Running> = running.iter().filter(|pod| may(pod)).collect();
    let subsets = 0..1_u32 << candidates.len();
    let sets = subsets.map(|subset| {
        let chosen = candidates.iter().enumerate();
        let chosen = chosen.filter(|(index, _)| subset >> index & 1 == 1);
        chosen
            .map(|(_, pod)| &*pod.name)
            .collect::<BTreeSet<&str>>()
    });
    let enough = sets.filter(|set| fits(running, set, memory));
    enough
        .map(|set| cost(running, &set).first().copied().unwrap_or(i32::MIN))
        .min()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn suspends_the_least_that_makes_room_and_evicts_only_without_it(
        pods in prop::collection::vec((1..7_u64, 0..3_i32, any::<bool>()), 1..8),
        memory in 2..9_u64,
    ) {
        let memory = memory * 10;
        let mut cluster = TestCluster::new(&NODES);
        let mut running = Vec::new();
        for (index, (tens, priority, is_allowed)) in pods.into_iter().enumerate() {
            let name = format!("pod-{index}");
            let mut claim = claim(&name, &format!("{}Gi", tens * 10));
            if is_allowed {
                allow(&mut claim);
            }
            cluster.add_claim(claim);
            let mut added = pod(&name, &[&name]);
            let spec = added.spec.as_mut().unwrap();
            spec.priority = Some(priority);
            spec.preemption_policy = Some("Never".to_owned());
            cluster.add_pod(added);
            let placed = cluster.settle();
            let Some((_, node)) = placed.first().and_then(|placed| placed.split_once(" → ")) else {
                cluster.end(&name);
                continue;
            };
            let node = node.to_owned();
            cluster.bind((&name, &node));
            running.push(Running { name, node, memory: tens * 10, priority, is_allowed });
        }
        cluster.settle();
        prop_assert!(cluster.suspensions.is_empty() && cluster.evictions.is_empty(), "by pods that may not preempt");
        cluster.add_pod_of_priority("urgent", &format!("{memory}Gi"), URGENT);
        let placed = cluster.settle();
        let suspended = suspended_pods(&mut cluster);
        let evicted: Vec<String> = cluster.evict();
        if fits(&running, &BTreeSet::new(), memory) {
            prop_assert_eq!(placed.len(), 1);
            prop_assert!(suspended.is_empty() && evicted.is_empty());
            return Ok(());
        }
        let by_suspension = best(&running, memory, |pod| pod.is_allowed);
        let by_eviction = best(&running, memory, |_| true);
        match by_suspension {
            None => {
                prop_assert!(suspended.is_empty(), "{suspended:?}");
                prop_assert_eq!(evicted.is_empty(), by_eviction.is_none());
            }
            Some(least) => {
                prop_assert!(evicted.is_empty(), "{evicted:?} although suspension is enough");
                let set: BTreeSet<&str> = suspended.iter().map(String::as_str).collect();
                prop_assert!(running.iter().all(|pod| pod.is_allowed || !set.contains(&*pod.name)), "{set:?}");
                prop_assert!(fits(&running, &set, memory), "{set:?} is not enough");
                prop_assert_eq!(cost(&running, &set)[0], least, "{:?}", set);
                for spared in &set {
                    let mut fewer = set.clone();
                    fewer.remove(spared);
                    prop_assert!(!fits(&running, &fewer, memory), "{spared} is suspended in vain");
                }
            }
        }
    }
}
