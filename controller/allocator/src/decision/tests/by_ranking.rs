//! Decisions by a ranking equal those by an evaluation of all nodes, after any changes of the cluster.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim};
use proptest::prelude::*;
use serde_json::json;

use super::{BINPACK, SPREAD, whole};
use crate::cluster::Cluster;
use crate::explanation::Explanation;
use crate::fixture::{classes, node, object, pod_request, quota, request, share, slices};
use crate::object::ObjectKey;
use crate::placement::{Placement, Policies};
use crate::searched::Undecided;
use crate::turn::Turn;

const NODES: [&str; 5] = ["n0", "n1", "n2", "n3", "n4"];

/// A change of the cluster, or a decision.
#[derive(Debug, Clone)]
enum Step {
    /// A pod with a claim of this shape arrives, spread or not; the node that it avoids, if any.
    Decide(usize, bool, Option<usize>),
    /// The claim at this position is removed.
    Release(prop::sample::Index),
    /// The node publishes these GPUs, GiB.
    Publish(usize, Vec<u64>),
    /// The node publishes nothing any more.
    Withdraw(usize),
    /// The node is cordoned or not.
    Cordon(usize, bool),
    RemoveNode(usize),
    /// A rule taints the first GPU of the node; none does with `None`.
    Taint(Option<usize>),
    /// A quota limits the memory, GiB; none does with `None`.
    Limit(Option<u64>),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let node = 0..NODES.len();
    let gpus = prop::collection::vec(prop_oneof![Just(16_u64), Just(80_u64)], 0..4);
    let step = prop_oneof![
        12 => (0..7_usize, any::<bool>(), prop::option::of(node.clone()))
            .prop_map(|(shape, spread, avoided)| Step::Decide(shape, spread, avoided)),
        3 => any::<prop::sample::Index>().prop_map(Step::Release),
        2 => (node.clone(), gpus).prop_map(|(node, gpus)| Step::Publish(node, gpus)),
        1 => node.clone().prop_map(Step::Withdraw),
        1 => (node.clone(), any::<bool>()).prop_map(|(node, cordon)| Step::Cordon(node, cordon)),
        1 => node.clone().prop_map(Step::RemoveNode),
        1 => prop::option::of(node).prop_map(Step::Taint),
        1 => prop::option::of(0..300_u64).prop_map(Step::Limit),
    ];
    prop::collection::vec(step, 1..60)
}

/// Returns the claim of a shape; none for a pod without claims.
fn claim_of(shape: usize, name: &str) -> Option<ResourceClaim> {
    Some(match shape {
        0 => share(name, "4Gi", "0"),
        1 => share(name, "12Gi", "50"),
        2 => share(name, "60Gi", "0"),
        3 => whole(name),
        4 => request(
            name,
            &json!({"deviceClassName": "gpu.drava.dev", "count": 2}),
        ),
        5 => request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "4Gi"}},
                    "tolerations": [{"key": "example.com/maintenance", "operator": "Exists"}]}),
        ),
        _ => return None,
    })
}

/// The decision without the verdicts on devices, which a ranking does not have.
fn text(decision: &Result<Placement, Explanation>) -> String {
    match decision {
        Ok(placement) => format!("{placement:?}"),
        Err(Explanation::Nodes(verdicts)) => verdicts
            .iter()
            .map(|verdict| {
                format!(
                    "{} {:?} {} {:?}\n",
                    verdict.node, verdict.reason, verdict.detail, verdict.closeness
                )
            })
            .collect(),
        Err(Explanation::Rejected { message, .. }) => message.clone(),
    }
}

fn publish(cluster: &mut Cluster, node: &str, gpus: &[u64], version: usize) {
    for mut slice in slices(node, gpus) {
        slice.metadata.resource_version = Some(version.to_string());
        cluster.upsert_slice(&slice);
    }
}

fn rule(node: &str) -> DeviceTaintRule {
    object(json!({"metadata": {"name": "maintenance"}, "spec": {
        "deviceSelector": {"driver": "gpu.drava.dev", "pool": format!("{node}/gpus"), "device": "gpu-0-vgpu"},
        "taint": {"key": "example.com/maintenance", "effect": "NoSchedule"},
    }}))
}

/// Applies the step. Returns the decision by a ranking and that by an evaluation of all nodes.
fn apply(
    cluster: &mut Cluster,
    claims: &mut Vec<ObjectKey>,
    step: &Step,
    number: usize,
) -> Option<[String; 2]> {
    let name = |node: &usize| NODES[*node];
    match step {
        Step::Decide(shape, spread, avoided) => {
            let policies: Policies = if *spread { SPREAD } else { BINPACK };
            let claim = claim_of(*shape, &format!("c{number}"));
            let mut request = pod_request(cluster, claim.as_slice());
            request.uid = format!("p{number}");
            request.avoided_nodes = avoided.iter().map(|node| name(node).to_owned()).collect();
            let by_ranking = cluster.decide(&request, policies);
            let by_all = cluster.explain(&request, policies);
            if let Ok(placement) = &by_ranking {
                let fits =
                    || cluster.still_fits(&request, placement, policies, &mut Turn::endless());
                assert!(fits(), "{placement:?}");
                cluster.assume(placement);
                cluster.assume_pod(&request.uid, &placement.node, &request.demand);
                if claim.is_some() {
                    claims.push(("default".to_owned(), format!("c{number}")));
                }
            }
            // A limit may leave worse devices of the best node.
            if cluster.quotas().next().is_some() {
                return Some([&by_ranking, &by_all].map(|each| each.is_ok().to_string()));
            }
            return Some([text(&by_ranking), text(&by_all)]);
        }
        Step::Release(_) if claims.is_empty() => {}
        Step::Release(position) => cluster.forget(&claims.remove(position.index(claims.len()))),
        Step::Publish(node, gpus) => publish(cluster, name(node), gpus, number),
        Step::Withdraw(node) => {
            for slice in slices(name(node), &[]) {
                cluster.remove_slice(slice.metadata.name.as_deref().unwrap());
            }
        }
        Step::Cordon(index, cordon) => {
            let mut node: Node = node(name(index));
            node.spec.get_or_insert_default().unschedulable = Some(*cordon);
            cluster.upsert_node(&node);
        }
        Step::RemoveNode(node) => cluster.remove_node(name(node)),
        Step::Taint(Some(node)) => {
            cluster.upsert_taint_rule(&rule(name(node)));
        }
        Step::Taint(None) => {
            cluster.remove_taint_rule("maintenance");
        }
        Step::Limit(Some(gib)) => {
            let spec = json!({"namespaces": ["default"], "limit": {"memory": format!("{gib}Gi")}});
            cluster.upsert_quota(&quota("limit", &spec));
        }
        Step::Limit(None) => {
            cluster.remove_quota("limit");
        }
    }
    None
}

proptest! {
    #[test]
    fn equal_those_by_all_nodes(steps in steps()) {
        let mut cluster = Cluster::default();
        for class in classes() {
            cluster.upsert_class(class);
        }
        for name in NODES {
            cluster.upsert_node(&node(name));
            publish(&mut cluster, name, &[16, 80], 1);
        }
        let mut claims = Vec::new();
        for (number, step) in steps.iter().enumerate() {
            if let Some([by_ranking, by_all]) = apply(&mut cluster, &mut claims, step, number + 2) {
                prop_assert_eq!(by_ranking, by_all, "step {}", number);
            }
        }
    }
}

#[test]
fn decision_with_costly_selector_ends_after_some_turns() {
    let nodes = NODES.map(|name| (name, [80_u64; 4]));
    let nodes: Vec<(&str, &[u64])> = nodes
        .iter()
        .map(|(name, gpus)| (*name, &gpus[..]))
        .collect();
    let cluster = crate::fixture::cluster(&nodes);
    let list = format!("[{}]", vec!["1"; 100].join(","));
    let costly = |result: &str| {
        // One that reads nothing of the GPU is evaluated once for equal devices.
        let of_gpu = "device.attributes['gpu.drava.dev'].uuid != ''";
        let expression = format!("{list}.all(x, {list}.all(y, x == y)) && {of_gpu} && {result}");
        let claim = request(
            "c",
            &json!({"deviceClassName": "gpu.drava.dev", "selectors": [{"cel": {"expression": expression}}]}),
        );
        pod_request(&cluster, &[claim])
    };
    for (result, least_turns) in [
        // Two of five nodes decide.
        ("true", 3),
        ("false", 6),
        // The selector fails.
        ("dyn(1)", 1),
    ] {
        let pod_request = costly(result);
        let mut turns = 1;
        let decision = loop {
            match cluster.decide_in(&pod_request, BINPACK, &mut Turn::limited()) {
                Ok(placement) => break Ok(placement),
                Err(Undecided::Rejected(explanation)) => break Err(explanation),
                Err(Undecided::Suspended(_)) => turns += 1,
            }
            assert!(turns < 100, "the decision ends");
        };
        let expected = cluster.explain(&costly(result), BINPACK);
        assert_eq!(text(&decision), text(&expected), "{result}");
        assert!(turns >= least_turns, "{result}: {turns} turns for 20 GPUs");
    }
}
