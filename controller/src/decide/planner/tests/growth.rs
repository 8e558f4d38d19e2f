//! How the work of the planner grows with the cluster: its steps at one size and at twice that size.

use drava_allocator::steps;
use drava_api::listed::{Change, DeletedObject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::json;

use super::cluster::{TestCluster, applied};
use super::hard_pods::add_node;
use crate::fixture::{claim, object, pod};
use crate::operate::metrics::NodeMetrics;

const SIZE: usize = 16;

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

/// Returns a cluster of nodes with a GPU each, on each of which an allocation waits for its pod.
fn allocated(nodes: usize) -> TestCluster {
    let names: Vec<String> = (0..nodes).map(|index| format!("n{index:03}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut cluster = TestCluster::new(&names);
    for name in &names {
        cluster.add_pod_with_claim(name, "60Gi");
    }
    assert_eq!(cluster.settle().len(), nodes);
    cluster
}

#[test]
fn deletion_of_node_concerns_its_allocations_only() {
    assert_no_growth(|nodes| {
        let mut cluster = allocated(nodes);
        let deleted = DeletedObject {
            name: "n001".to_owned(),
            ..DeletedObject::default()
        };
        let delete = || cluster.planner.node(Change::Deleted(deleted));
        let (steps, ()) = steps::of(delete);
        let (_, releases) = cluster.actions();
        assert_eq!(releases.len(), 1);
        assert_eq!(releases[0].reason.to_string(), "node n001 does not exist");
        steps
    });
}

#[test]
fn oldest_undelivered_version_is_found_among_those() {
    assert_no_growth(|nodes| {
        let mut cluster = allocated(nodes);
        cluster.add_pod_with_claim("last", "8Gi");
        let (mut jobs, _) = cluster.actions();
        cluster.write(jobs.remove(0));
        let oldest = || cluster.planner.commitments.ledger.oldest_undelivered();
        let (steps, oldest) = steps::of(oldest);
        assert_eq!(oldest, Some(cluster.now));
        steps
    });
}

#[test]
fn metrics_visit_changed_nodes_only() {
    assert_no_growth(|nodes| {
        let mut cluster = allocated(nodes);
        assert_eq!(cluster.planner.changed_node_metrics().len(), nodes);
        cluster.add_pod_with_claim("last", "8Gi");
        assert_eq!(cluster.settle(), ["last → n000"]);
        let (steps, changed) = steps::of(|| cluster.planner.changed_node_metrics());
        let changed: Vec<&str> = changed.keys().map(String::as_str).collect();
        assert_eq!(changed, ["n000"]);
        steps
    });
}

#[test]
fn deleted_node_has_no_metrics() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let of = |cluster: &mut TestCluster| cluster.planner.changed_node_metrics();
    assert_eq!(of(&mut cluster).len(), 2);
    cluster.delete_node("n1");
    let changed = of(&mut cluster);
    assert_eq!(changed, [("n1".to_owned(), NodeMetrics::default())].into());
}

/// Returns a cluster of two nodes, with a pod on each that is within its minimum runtime, and pods that could evict them.
fn in_minimum_runtime(urgent: usize) -> TestCluster {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    cluster.planner.policy(applied(object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "p", "uid": "p"},
        "spec": {"preemption": {"minimumRuntimeSeconds": 3600}},
    }))));
    cluster.add_running(&[("low-1", "60Gi", 0), ("low-2", "60Gi", 0)]);
    for index in 0..urgent {
        cluster.add_pod_of_priority(&format!("urgent-{index}"), "70Gi", 10);
    }
    cluster
}

#[test]
fn minimum_runtimes_are_determined_once_for_equal_pods() {
    assert_no_growth(|urgent| {
        let mut cluster = in_minimum_runtime(urgent);
        let (steps, (jobs, _)) = steps::of(|| cluster.actions());
        assert!(jobs.is_empty() && cluster.evictions.is_empty());
        steps
    });
}

/// Returns a cluster of nodes with two GPUs, each full of one pod.
fn full(nodes: usize) -> TestCluster {
    let mut cluster = TestCluster::new(&[]);
    for index in 0..nodes {
        add_node(&mut cluster, &format!("n{index:03}"), 2);
    }
    for index in 0..2 * nodes {
        let name = format!("low-{index:03}");
        cluster.add_claim(claim(&name, "70Gi"));
        let mut pod = pod(&name, &[&name]);
        let created = jiff::Timestamp::from_second(index.try_into().unwrap()).unwrap();
        pod.metadata.creation_timestamp = Some(Time(created));
        cluster.add_pod(pod);
        let placed = cluster.settle();
        cluster.bind(placed[0].split_once(" → ").unwrap());
    }
    cluster
}

#[test]
fn second_search_for_victims_asks_changed_nodes_only() {
    assert_no_growth(|nodes| {
        let mut cluster = full(nodes);
        let mut search = |name: &str| {
            cluster.add_pod_of_priority(name, "35Gi", 10);
            let (steps, _) = steps::of(|| cluster.settle());
            cluster.refuse_eviction("PodDisruptionBudget");
            cluster.end(name);
            cluster.actions();
            steps
        };
        search("first");
        search("second")
    });
}
