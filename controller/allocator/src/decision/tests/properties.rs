//! Properties of any cluster and any sequence of claims.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::{BINPACK, SPREAD};
use crate::capacity::Amounts;
use crate::cluster::Cluster;
use crate::fixture::{classes, cluster, node, pod_request, request, share, slices};
use crate::placement::Placement;
use crate::usage::DeviceAccess;

/// One step of a sequence.
#[derive(Debug, Clone)]
enum Step {
    Share {
        memory_gib: u64,
        cores: u64,
        count: u64,
    },
    Whole {
        count: u64,
    },
    /// Releases the claim at this position.
    Release(prop::sample::Index),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (1..50_u64, 0..60_u64, 1..3_u64).prop_map(|(memory_gib, cores, count)| Step::Share { memory_gib, cores, count }),
        1 => (1..3_u64).prop_map(|count| Step::Whole { count }),
        2 => any::<prop::sample::Index>().prop_map(Step::Release),
    ];
    prop::collection::vec(step, 1..40)
}

fn nodes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(
        prop::collection::vec(prop_oneof![Just(16_u64), Just(80_u64)], 1..4),
        1..4,
    )
}

/// Devices of one claim: GPU, and memory and cores of a share. Computed from results, without the allocator's usage.
type Devices = Vec<(String, Option<(u64, u64)>)>;

fn devices_of(placement: &Placement) -> Devices {
    let whole_units = |amounts: &Amounts, name: &str| {
        amounts
            .get(name)
            .and_then(|amount| amount.to_u64_rounded_up())
            .unwrap_or_default()
    };
    placement.claims[0]
        .devices
        .iter()
        .map(|placed| {
            let amounts = match &placed.access {
                DeviceAccess::Share(amounts, _) | DeviceAccess::Suspended(amounts) => Some((
                    whole_units(amounts, "memory"),
                    whole_units(amounts, "cores"),
                )),
                DeviceAccess::Exclusive | DeviceAccess::Admin(_) => None,
            };
            (placed.device.gpu.to_string(), amounts)
        })
        .collect()
}

/// Checks every GPU independently: whole for one claim, or shares within its capacity.
fn check(
    all: &BTreeMap<String, Devices>,
    gpus: &BTreeMap<String, u64>,
) -> Result<(), TestCaseError> {
    let mut by_gpu: BTreeMap<&str, Vec<Option<(u64, u64)>>> = BTreeMap::new();
    for (gpu, amounts) in all.values().flatten() {
        by_gpu.entry(gpu).or_default().push(*amounts);
    }
    for (gpu, claims) in by_gpu {
        let whole = claims.iter().filter(|amounts| amounts.is_none()).count();
        prop_assert!(
            whole == 0 || claims.len() == 1,
            "{gpu} is allocated whole and shared"
        );
        let (memory, cores) = claims
            .iter()
            .flatten()
            .fold((0, 0), |sum, share| (sum.0 + share.0, sum.1 + share.1));
        prop_assert!(memory <= gpus[gpu] << 30, "{gpu}: {memory} bytes");
        prop_assert!(cores <= 100, "{gpu}: {cores}% cores");
        prop_assert!(claims.len() <= 10, "{gpu}: {} shares", claims.len());
    }
    Ok(())
}

/// Returns whether a node has enough feasible GPUs by the same rules.
fn is_feasible(step: &Step, all: &BTreeMap<String, Devices>, gpus: &BTreeMap<String, u64>) -> bool {
    let mut feasible_by_node: BTreeMap<&str, u64> = BTreeMap::new();
    for (gpu, gib) in gpus {
        let claims: Vec<_> = all
            .values()
            .flatten()
            .filter(|(allocated, _)| allocated == gpu)
            .map(|(_, amounts)| amounts)
            .collect();
        let (memory, cores) = claims
            .iter()
            .copied()
            .flatten()
            .fold((0, 0), |sum, share| (sum.0 + share.0, sum.1 + share.1));
        let is_feasible = match step {
            Step::Share {
                memory_gib,
                cores: requested,
                ..
            } => {
                claims.iter().all(|amounts| amounts.is_some())
                    && claims.len() < 10
                    && memory + (memory_gib << 30) <= gib << 30
                    && cores + requested <= 100
            }
            Step::Whole { .. } => claims.is_empty(),
            Step::Release(_) => false,
        };
        let node = gpu.split('-').nth(1).unwrap_or_default();
        *feasible_by_node.entry(node).or_default() += u64::from(is_feasible);
    }
    let count = match step {
        Step::Share { count, .. } | Step::Whole { count } => *count,
        Step::Release(_) => return false,
    };
    feasible_by_node.values().any(|feasible| *feasible >= count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// No GPU is overcommitted, and no request is rejected while it is feasible.
    #[test]
    fn allocates_exactly_what_is_feasible(shape in nodes(), steps in steps(), spread in any::<bool>()) {
        let policies = if spread { SPREAD } else { BINPACK };
        let named: Vec<(String, Vec<u64>)> =
            shape.into_iter().enumerate().map(|(index, gpus)| (format!("n{index}"), gpus)).collect();
        let borrowed: Vec<(&str, &[u64])> = named.iter().map(|(name, gpus)| (name.as_str(), gpus.as_slice())).collect();
        let mut cluster = cluster(&borrowed);
        let gpus: BTreeMap<String, u64> = named
            .iter()
            .flat_map(|(node, gpus)| gpus.iter().enumerate().map(move |(gpu, gib)| (format!("GPU-{node}-{gpu}"), *gib)))
            .collect();
        let mut all: BTreeMap<String, Devices> = BTreeMap::new();
        for (index, step) in steps.iter().enumerate() {
            let name = format!("c{index}");
            let claim = match step {
                Step::Release(which) => {
                    if !all.is_empty() {
                        let name = which.get(&all.keys().cloned().collect::<Vec<_>>()).clone();
                        all.remove(&name);
                        cluster.forget(&("default".to_owned(), name));
                    }
                    continue;
                }
                Step::Share { memory_gib, cores, count } => request(&name, &json!({"deviceClassName": "vgpu.drava.dev", "count": count,
                    "capacity": {"requests": {"memory": format!("{memory_gib}Gi"), "cores": cores.to_string()}}})),
                Step::Whole { count } => request(&name, &json!({"deviceClassName": "gpu.drava.dev", "count": count})),
            };
            let request = pod_request(&cluster, &[claim]);
            let decision = cluster.decide(&request, policies);
            let again = cluster.decide(&request, policies);
            prop_assert_eq!(decision.as_ref().map(devices_of).ok(), again.as_ref().map(devices_of).ok(), "not deterministic");
            match decision {
                Ok(placement) => {
                    cluster.assume(&placement);
                    all.insert(name, devices_of(&placement));
                    check(&all, &gpus)?;
                }
                Err(explanation) => {
                    prop_assert!(!is_feasible(step, &all, &gpus), "rejected although feasible: {}", explanation.summary());
                    let nodes = named.len();
                    let prefix = format!("0/{nodes} nodes: ");
                    prop_assert!(explanation.summary().starts_with(&prefix));
                }
            }
        }
    }

    /// The decision does not depend on the order of events.
    #[test]
    fn decides_independently_of_event_order(seed in any::<prop::sample::Index>(), memory in 1..90_u64) {
        let ordered = cluster(&[("n1", &[80, 16]), ("n2", &[80]), ("n3", &[16])]);
        let mut shuffled = Cluster::default();
        let mut objects: Vec<_> = [("n1", &[80, 16][..]), ("n2", &[80]), ("n3", &[16])]
            .iter()
            .flat_map(|(name, gpus)| slices(name, gpus))
            .collect();
        let distance = seed.index(objects.len());
        objects.rotate_left(distance);
        objects.reverse();
        for slice in &objects {
            shuffled.upsert_slice(slice);
        }
        for name in ["n3", "n1", "n2"] {
            shuffled.upsert_node(&node(name));
        }
        for class in classes() {
            shuffled.upsert_class(class);
        }
        let claim = share("a", &format!("{memory}Gi"), "10");
        let outcome = |cluster: &Cluster| {
            cluster
                .decide(&pod_request(cluster, std::slice::from_ref(&claim)), BINPACK)
                .map(|placement| (placement.node.clone(), devices_of(&placement)))
                .map_err(|explanation| explanation.summary())
        };
        prop_assert_eq!(outcome(&ordered), outcome(&shuffled));
    }
}
