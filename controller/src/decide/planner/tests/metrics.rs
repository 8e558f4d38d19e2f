//! What the planner reports for the metrics.

use std::collections::BTreeMap;

use drava_api::reason::Reason;

use super::cluster::TestCluster;
use crate::fixture::{claim, pod};

#[test]
fn reports_allocated_memory_and_pending_pods_by_reason() {
    let mut cluster = TestCluster::new(&["n1"]);
    let gib = f64::from(1 << 30);
    let memory = |cluster: &mut TestCluster| {
        let nodes = cluster.planner.changed_node_metrics();
        let [device] = &nodes["n1"].devices[..] else {
            panic!("{nodes:?}");
        };
        assert_eq!(&*device.device, "gpu-0-vgpu");
        device.amounts["memory"]
    };
    assert_eq!(memory(&mut cluster), (80.0 * gib, 0.0));
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.add_pod_with_claim("b", "100Gi");
    assert_eq!(cluster.planner.metrics().pending[&None], 2, "undecided");
    cluster.settle();
    assert_eq!(memory(&mut cluster), (80.0 * gib, 8.0 * gib));
    let pending = cluster.planner.metrics().pending;
    assert_eq!(pending[&Some(Reason::InsufficientMemory)], 1, "{pending:?}");
    assert_eq!(pending.get(&None), Some(&1), "allocated, not bound");
}

#[test]
fn measures_free_memory_on_partly_allocated_gpus() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut nodes = BTreeMap::new();
    let mut ratios = |cluster: &mut TestCluster| {
        nodes.extend(cluster.planner.changed_node_metrics());
        ["n1", "n2"].map(|node| nodes[node].free_memory.unwrap().fragmentation_ratio())
    };
    assert_eq!(ratios(&mut cluster), [0.0, 0.0], "all GPUs are free");
    cluster.add_pod_with_claim("a", "20Gi");
    assert_eq!(cluster.settle(), ["a → n1"]);
    assert_eq!(
        ratios(&mut cluster),
        [1.0, 0.0],
        "no whole GPU of n1 is free"
    );
    cluster.add_pod_with_claim("b", "60Gi");
    assert_eq!(cluster.settle(), ["b → n1"]);
    assert_eq!(ratios(&mut cluster), [0.0, 0.0], "n1 is full");
}

#[test]
fn counts_gangs_by_state() {
    let mut cluster = TestCluster::new(&["n1"]);
    let gangs = |cluster: &TestCluster| {
        let gangs = cluster.planner.metrics().gangs;
        (gangs.pending, gangs.running)
    };
    assert_eq!(gangs(&cluster), (0, 0));
    for name in ["m-1", "m-2"] {
        cluster.add_member(name, "20Gi", "2");
    }
    assert_eq!(gangs(&cluster), (1, 0));
    for placed in cluster.settle() {
        assert_eq!(gangs(&cluster), (1, 0), "a member is not bound");
        cluster.bind(placed.split_once(" → ").unwrap());
    }
    assert_eq!(gangs(&cluster), (0, 1));
    cluster.end("m-1");
    cluster.end("m-2");
    assert_eq!(gangs(&cluster), (0, 0));
}

#[test]
fn counts_releases_by_kube_scheduler_only() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    for name in ["a", "b"] {
        cluster.add_claim(claim(name, "8Gi"));
    }
    cluster.add_pod(pod("p", &["a", "b"]));
    cluster.settle();
    let count = |cluster: &TestCluster| cluster.planner.metrics().scheduler_releases;
    assert_eq!(count(&cluster), 0);
    cluster.deallocate("a");
    assert_eq!(count(&cluster), 1);
    let (_, releases) = cluster.actions();
    cluster.release(&releases[0]);
    assert_eq!(count(&cluster), 1, "its own release does not count");
}

#[test]
fn ledger_drifts_until_the_watch_delivers_a_write() {
    let mut cluster = TestCluster::new(&["n1"]);
    let drift = |cluster: &TestCluster| cluster.planner.metrics().oldest_undelivered;
    cluster.add_pod_with_claim("a", "8Gi");
    assert_eq!(drift(&cluster), None);
    for job in cluster.actions().0 {
        cluster.write(job);
    }
    assert_eq!(drift(&cluster), Some(cluster.now), "written, not delivered");
    cluster.deliver_claims();
    assert_eq!(drift(&cluster), None);
}
