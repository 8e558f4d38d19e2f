//! How the work of operations grows with the cluster: its steps at one size and at twice that size.

use drava_api::policy::GpuPolicy;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use serde_json::{Value, json};

use super::{BINPACK, whole};
use crate::cluster::Cluster;
use crate::fixture::{node, object, pod, pod_request, quota, share};
use crate::pod_request::PodRequest;
use crate::steps;
use crate::turn::Turn;

const SIZE: usize = 32;

/// Checks that `operation` takes at most as many steps at twice the size, and a few more.
#[track_caller]
fn assert_no_growth(operation: impl Fn(usize) -> u64) {
    let (small, large) = (operation(SIZE), operation(2 * SIZE));
    assert!(small > 0, "nothing is counted");
    assert!(
        large <= small + 2,
        "{small} steps, {large} at twice the size"
    );
}

/// A cluster of nodes with one GPU each.
fn cluster(nodes: usize) -> Cluster {
    let names: Vec<String> = (0..nodes).map(|index| format!("n{index:03}")).collect();
    let nodes: Vec<(&str, &[u64])> = names
        .iter()
        .map(|name| (name.as_str(), &[80][..]))
        .collect();
    crate::fixture::cluster(&nodes)
}

/// Returns the checks of nodes of a decision. Its verdicts on nodes are not needed.
fn checks(cluster: &Cluster, request: &PodRequest) -> u64 {
    let mut turn = Turn::endless();
    cluster.place_in(request, BINPACK, &mut turn).unwrap();
    turn.node_checks()
}

/// Allocates a claim to a pod of the same name.
fn allocate(cluster: &mut Cluster, request: &PodRequest) {
    let placement = cluster.decide(request, BINPACK).unwrap();
    cluster.assume(&placement);
    cluster.assume_pod(&request.uid, &placement.node, &request.demand);
}

#[test]
fn quota_adds_no_check_of_other_nodes() {
    for limit in ["10Ti", "20Gi", "4Gi"] {
        assert_no_growth(|nodes| {
            let mut cluster = cluster(nodes);
            let spec = json!({"namespaces": ["default"], "limit": {"memory": limit}});
            cluster.upsert_quota(&quota("q", &spec));
            let mut request = pod_request(&cluster, &[share("a", "4Gi", "0")]);
            allocate(&mut cluster, &request);
            request = pod_request(&cluster, &[share("b", "4Gi", "0")]);
            request.uid = "b".to_owned();
            // A quota that is used up is found to be so on each node once.
            checks(&cluster, &request);
            let mut changed = node("n000");
            changed.spec.get_or_insert_default().unschedulable = Some(true);
            cluster.upsert_node(&changed);
            checks(&cluster, &request)
        });
    }
}

#[test]
fn quota_of_other_tenant_shares_the_ranking() {
    let mut cluster = cluster(SIZE);
    for (namespace, limit) in [("default", "1Gi"), ("other", "10Ti")] {
        let spec = json!({"namespaces": [namespace], "limit": {"memory": limit}});
        cluster.upsert_quota(&quota(namespace, &spec));
    }
    let own = share("a", "4Gi", "0");
    let mut other = own.clone();
    other.metadata.namespace = Some("other".to_owned());
    let request = pod_request(&cluster, &[own]);
    assert!(
        checks(&cluster, &request) > 30,
        "every node is evaluated once"
    );
    let request = pod_request(&cluster, &[other]);
    assert!(checks(&cluster, &request) < 10);
}

#[test]
fn decision_for_new_kind_of_claim_evaluates_best_nodes_only() {
    assert_no_growth(|nodes| {
        let mut cluster = cluster(nodes);
        let mut kinds = 0..;
        let mut request = |cluster: &Cluster, memory: String| {
            let name = format!("c{}", kinds.next().unwrap());
            let mut request = pod_request(cluster, &[share(&name, &memory, "0")]);
            request.uid = name;
            request
        };
        // Full nodes, which come first with binpack, and one that is partly allocated.
        let full = (0..nodes / 2).map(|node| format!("{}Mi", 79 * 1024 + node));
        for memory in full.chain(["8Gi".to_owned()]) {
            let request = request(&cluster, memory);
            allocate(&mut cluster, &request);
        }
        let request = request(&cluster, "7Gi".to_owned());
        checks(&cluster, &request)
    });
}

#[test]
fn anti_affinity_of_others_adds_no_walk() {
    assert_no_growth(|pods| {
        let mut cluster = cluster(4);
        for index in 0..pods {
            let mut apart: Pod = pod("apart", &[]);
            apart.metadata.uid = Some(format!("apart-{index}"));
            apart.metadata.labels = Some(object(json!({"app": "apart"})));
            let spec = apart.spec.as_mut().unwrap();
            spec.node_name = Some("n001".to_owned());
            spec.affinity = Some(object(json!({
                "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": {"app": "apart"}},
                }]},
            })));
            cluster.upsert_pod(&apart);
        }
        let request = pod_request(&cluster, &[whole("w")]);
        let (steps, decision) = steps::of(|| cluster.decide_on("n000", &request, BINPACK));
        decision.unwrap();
        steps
    });
}

#[test]
fn new_status_of_running_pod_touches_no_ranking() {
    let mut cluster = cluster(4);
    for memory in ["1Gi", "2Gi", "3Gi"] {
        let request = pod_request(&cluster, &[share("a", memory, "0")]);
        checks(&cluster, &request);
    }
    let mut running = pod("running", &[]);
    running.spec.as_mut().unwrap().node_name = Some("n001".to_owned());
    let (bound, _) = steps::of(|| cluster.upsert_pod(&running));
    assert_eq!(bound, 3, "one for each ranking");
    running.status = Some(object(json!({"phase": "Running"})));
    let (updated, _) = steps::of(|| cluster.upsert_pod(&running));
    assert_eq!(updated, 0);
    cluster.upsert_node(&node("n001"));
    assert_eq!(steps::of(|| cluster.upsert_node(&node("n001"))).0, 0);
}

#[test]
fn taint_rule_of_pool_touches_no_other_node() {
    assert_no_growth(|nodes| {
        let mut cluster = cluster(nodes);
        let request = pod_request(&cluster, &[share("a", "4Gi", "0")]);
        checks(&cluster, &request);
        let pool = cluster.usable_pools().next().unwrap().0.to_owned();
        let rule = object(json!({"metadata": {"name": "r"}, "spec": {
            "deviceSelector": {"driver": "gpu.drava.dev", "pool": pool},
            "taint": {"key": "sick", "effect": "NoSchedule"},
        }}));
        let (mut steps, is_changed) = steps::of(|| cluster.upsert_taint_rule(&rule));
        assert!(is_changed);
        let placed = cluster.decide(&request, BINPACK).unwrap();
        assert_eq!(placed.node, "n001");
        steps += checks(&cluster, &request);
        let (of_removal, is_changed) = steps::of(|| cluster.remove_taint_rule("r"));
        assert!(is_changed);
        assert_eq!(cluster.decide(&request, BINPACK).unwrap().node, "n000");
        steps + of_removal
    });
}

#[test]
fn conflicts_of_policies_are_found_once_for_a_change() {
    let mut cluster = Cluster::default();
    for index in 0..SIZE {
        let labels = json!({"tenant": format!("t{}", index % 2)});
        let metadata = json!({"name": format!("ns-{index}"), "labels": labels});
        let namespace: Namespace = object(json!({"metadata": metadata}));
        cluster.upsert_namespace(&namespace);
    }
    let policy = |name: &str, node: &str, tenant: &str| -> GpuPolicy {
        object(json!({
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": name},
            "spec": {"node": node, "namespaceSelector": {"matchLabels": {"tenant": tenant}}},
        }))
    };
    cluster.upsert_policy(&policy("a", "binpack", "t0"));
    cluster.upsert_policy(&policy("b", "spread", "t1"));
    let (first, conflicts) = steps::of(|| cluster.policy_conflicts().len());
    assert_eq!((first, conflicts), (32, 0), "each namespace once");
    assert_eq!(steps::of(|| cluster.policy_conflicts().len()).0, 0);
    cluster.upsert_policy(&policy("c", "spread", "t0"));
    let conflicts = cluster.policy_conflicts();
    assert_eq!(conflicts.get("c").map(String::as_str), Some("a"));
}

#[test]
fn conflicts_of_policies_follow_namespaces() {
    let mut cluster = Cluster::default();
    for (name, node, label) in [("a", "binpack", "one"), ("b", "spread", "two")] {
        let policy: GpuPolicy = object(json!({
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": name},
            "spec": {"node": node, "namespaceSelector": {"matchLabels": {label: "yes"}}},
        }));
        cluster.upsert_policy(&policy);
    }
    let namespace = |labels: Value| -> Namespace {
        object(json!({"metadata": {"name": "team", "labels": labels}}))
    };
    assert!(cluster.policy_conflicts().is_empty());
    cluster.upsert_namespace(&namespace(json!({"one": "yes", "two": "yes"})));
    assert_eq!(cluster.policy_conflicts()["b"], "a");
    cluster.upsert_namespace(&namespace(json!({"two": "yes"})));
    assert!(cluster.policy_conflicts().is_empty());
    cluster.upsert_namespace(&namespace(json!({"one": "yes", "two": "yes"})));
    assert_eq!(cluster.policy_conflicts()["b"], "a");
    cluster.remove_namespace("team");
    assert!(cluster.policy_conflicts().is_empty());
}
