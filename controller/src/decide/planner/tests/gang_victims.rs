//! Victims of gangs, compared with brute force on small clusters.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::cluster::{TestCluster, member};
use crate::fixture::{claim, pod};

/// Nodes with one GPU each.
const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// Memory of a GPU in GiB.
const GPU: u64 = 80;
/// Priority of the gang; no running pod has it.
const GANG_PRIORITY: i32 = 10;

/// A running pod.
#[derive(Debug, Clone)]
struct Running {
    name: String,
    node: String,
    memory: u64,
    priority: i32,
}

/// Returns whether `count` pods with this memory fit when the pods of the set do not run.
fn fit(
    running: &[Running],
    is_ended: impl Fn(&Running) -> bool,
    memory: u64,
    count: usize,
) -> bool {
    let mut used: BTreeMap<&str, u64> = BTreeMap::new();
    for pod in running.iter().filter(|pod| !is_ended(pod)) {
        *used.entry(&pod.node).or_default() += pod.memory;
    }
    let free = NODES.map(|node| GPU - used.get(node).copied().unwrap_or_default());
    let fitting: u64 = free.iter().map(|free| free / memory).sum();
    fitting >= count as u64
}

/// Returns the highest priority in the set that ends only pods of the lowest priorities and is enough.
fn lowest_priority(running: &[Running], memory: u64, count: usize) -> Option<i32> {
    let subsets = 0..1_u32 << running.len();
    let chosen = |subset: u32| {
        running
            .iter()
            .enumerate()
            .filter(move |(index, _)| subset >> index & 1 == 1)
    };
    subsets
        .filter(|subset| {
            let names: Vec<&str> = chosen(*subset).map(|(_, pod)| pod.name.as_str()).collect();
            fit(
                running,
                |pod| names.contains(&pod.name.as_str()),
                memory,
                count,
            )
        })
        .map(|subset| {
            chosen(subset)
                .map(|(_, pod)| pod.priority)
                .max()
                .unwrap_or(i32::MIN)
        })
        .min()
}

proptest! {
    #[test]
    fn gang_of_equal_pods_evicts_as_brute_force_permits(
        pods in prop::collection::vec((1..8_u64, 0..3_i32), 0..10),
        memory in 1..8_u64,
        count in 2..6_usize,
    ) {
        let memory = memory * 10;
        let mut cluster = TestCluster::new(&NODES);
        let mut running = Vec::new();
        for (index, (tens, priority)) in pods.into_iter().enumerate() {
            let name = format!("pod-{index}");
            cluster.add_claim(claim(&name, &format!("{}Gi", tens * 10)));
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
            running.push(Running { name, node, memory: tens * 10, priority });
        }
        cluster.settle();
        cluster.evictions.clear();
        for index in 0..count {
            let name = format!("member-{index}");
            cluster.add_claim(claim(&name, &format!("{memory}Gi")));
            let mut pod = member(pod(&name, &[&name]), &count.to_string());
            pod.spec.as_mut().unwrap().priority = Some(GANG_PRIORITY);
            cluster.add_pod(pod);
        }
        let placed = cluster.settle();
        let evictions = std::mem::take(&mut cluster.evictions);
        let victims: Vec<String> = evictions
            .iter()
            .flat_map(|eviction| &eviction.victims)
            .filter_map(|victim| victim.pod.name.clone())
            .collect();
        let is_victim = |pod: &Running| victims.contains(&pod.name);
        match lowest_priority(&running, memory, count) {
            None => prop_assert!(victims.is_empty(), "{victims:?} make too little room"),
            Some(i32::MIN) => {
                prop_assert!(victims.is_empty(), "the gang fits without {victims:?}");
                prop_assert_eq!(placed.len(), count);
            }
            Some(priority) => {
                prop_assert!(fit(&running, is_victim, memory, count), "{victims:?} are too few");
                for spared in &victims {
                    let is_ended = |pod: &Running| is_victim(pod) && pod.name != *spared;
                    prop_assert!(!fit(&running, is_ended, memory, count), "{spared} is unnecessary");
                }
                let highest = running.iter().filter(|pod| is_victim(pod)).map(|pod| pod.priority).max();
                prop_assert_eq!(highest, Some(priority));
            }
        }
    }
}
