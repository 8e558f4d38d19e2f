//! What searches for victims keep for others: histories with and without it.

use proptest::prelude::*;

use super::cluster::{TestCluster, member};
use super::hard_pods::add_node;
use crate::decide::planner::room::HolderCosts;
use crate::fixture::{claim, pod};

/// A change of the cluster.
#[derive(Debug, Clone)]
enum Step {
    /// A pod comes, with that many devices of this memory.
    Comes {
        priority: i32,
        tens: u64,
        devices: i64,
        is_member: bool,
    },
    /// One of the pods that came before ends.
    Ends(usize),
    /// One of them is being deleted.
    IsDeleted(usize),
    /// Another pod uses the claim of one of them, too.
    Shares(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..4_i32, 1..9_u64, 1..3_i64, prop::bool::weighted(0.1)).prop_map(
            |(priority, tens, devices, is_member)| Step::Comes { priority, tens, devices, is_member }
        ),
        1 => (0..8_usize).prop_map(Step::Ends),
        1 => (0..8_usize).prop_map(Step::IsDeleted),
        1 => (0..8_usize).prop_map(Step::Shares),
    ]
}

/// Decides until nothing is due; binds the pods that are placed. Returns them, and the victims.
fn decide(cluster: &mut TestCluster) -> Vec<String> {
    let mut decided = Vec::new();
    for _ in 0..20 {
        let (jobs, releases) = cluster.actions();
        let evicted = cluster.evict();
        if jobs.is_empty() && releases.is_empty() && evicted.is_empty() {
            return decided;
        }
        decided.extend(evicted);
        for release in releases {
            decided.push(format!("{:?} released", release.claim.metadata.name));
            cluster.release(&release);
        }
        let mut placed = Vec::new();
        for job in jobs {
            let names = job.pods.iter();
            placed.extend(names.map(|pod| (pod.pod.name.clone().unwrap(), pod.node.clone())));
            cluster.write(job);
        }
        cluster.deliver_claims();
        for (name, node) in placed {
            decided.push(format!("{name} → {node}"));
            cluster.bind((&name, &node));
        }
    }
    panic!("the planner does not settle");
}

/// Returns what is decided after each step.
fn history(steps: &[Step], is_kept: bool) -> Vec<Vec<String>> {
    let mut cluster = TestCluster::new(&["n1"]);
    for (node, gpus) in [("n2", 2), ("n3", 3)] {
        add_node(&mut cluster, node, gpus);
    }
    let mut names: Vec<String> = Vec::new();
    let mut decided = Vec::new();
    for (index, step) in steps.iter().enumerate() {
        let name = format!("p{index:02}");
        match step {
            Step::Comes {
                priority,
                tens,
                devices,
                is_member,
            } => {
                let mut claim = claim(&name, &format!("{}Gi", tens * 10));
                let spec = claim.spec.as_mut().unwrap();
                for request in spec
                    .devices
                    .iter_mut()
                    .flat_map(|devices| devices.requests.iter_mut().flatten())
                {
                    request.exactly.as_mut().unwrap().count = Some(*devices);
                }
                cluster.add_claim(claim);
                let mut pod = pod(&name, &[&name]);
                pod.spec.as_mut().unwrap().priority = Some(*priority);
                if *is_member {
                    pod = member(pod, "1");
                }
                cluster.add_pod(pod);
                names.push(name);
            }
            Step::Ends(of) if *of < names.len() => cluster.end(&names.remove(*of)),
            Step::IsDeleted(of) if *of < names.len() => cluster.start_deletion(&names[*of]),
            Step::Shares(of) if *of < names.len() => {
                let mut pod = pod(&name, &[&names[*of]]);
                pod.spec.as_mut().unwrap().priority = Some(0);
                cluster.add_pod(pod);
            }
            Step::Ends(_) | Step::IsDeleted(_) | Step::Shares(_) => continue,
        }
        if !is_kept {
            cluster.planner.backlog.holder_costs = HolderCosts::default();
        }
        decided.push(decide(&mut cluster));
    }
    decided
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn evicts_as_without_what_earlier_searches_have_found(
        steps in prop::collection::vec(step(), 0..24),
    ) {
        prop_assert_eq!(history(&steps, true), history(&steps, false));
    }
}
