//! What the planner reports for the metrics.

use drava_api::reason::Reason;

use super::cluster::TestCluster;

#[test]
fn reports_allocated_memory_and_pending_pods_by_reason() {
    let mut cluster = TestCluster::new(&["n1"]);
    let gib = f64::from(1 << 30);
    let memory = |cluster: &TestCluster| {
        let metrics = cluster.planner.metrics();
        let [device] = &metrics.devices[..] else {
            panic!("{metrics:?}");
        };
        assert_eq!(
            (device.node.as_str(), &*device.device),
            ("n1", "gpu-0-vgpu")
        );
        device.amounts["memory"]
    };
    assert_eq!(memory(&cluster), (80.0 * gib, 0.0));
    cluster.add_pod_with_claim("a", "8Gi");
    cluster.add_pod_with_claim("b", "100Gi");
    assert_eq!(cluster.planner.metrics().pending[&None], 2, "undecided");
    cluster.settle();
    assert_eq!(memory(&cluster), (80.0 * gib, 8.0 * gib));
    let pending = cluster.planner.metrics().pending;
    assert_eq!(pending[&Some(Reason::InsufficientMemory)], 1, "{pending:?}");
    assert_eq!(pending.get(&None), Some(&1), "allocated, not bound");
}
