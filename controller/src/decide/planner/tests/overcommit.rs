//! GPUs of which more is allocated than they have.

use drava_api::listed::Change;
use serde_json::json;

use super::cluster::TestCluster;
use crate::fixture::{claim, object, slice};

const EVENT: &str =
    "GPU GPU-n1 on node n1: more is allocated than the GPU has, to claims default/a, default/b";

/// Returns whether the metrics show the only GPU as over-committed.
fn is_overcommitted(cluster: &mut TestCluster) -> bool {
    let nodes = cluster.planner.changed_node_metrics();
    let mut devices = nodes.values().flat_map(|node| &node.devices);
    devices.any(|device| device.is_overcommitted())
}

/// Another writer allocates the memory of the only GPU.
fn allocate(cluster: &mut TestCluster, name: &str, memory: &str, seconds: u32) {
    let mut claim = claim(name, memory);
    claim.status = Some(object(json!({"allocation": {
        "allocationTimestamp": format!("2026-01-01T00:00:{seconds:02}Z"),
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": name,
            "consumedCapacity": {"memory": memory, "cores": "0", "slots": "1"},
        }]},
    }})));
    cluster.observe(claim);
}

#[test]
fn releases_newest_unreserved_allocation_of_overcommitted_gpu() {
    let mut cluster = TestCluster::new(&["n1"]);
    allocate(&mut cluster, "b", "50Gi", 2);
    allocate(&mut cluster, "a", "50Gi", 1);
    allocate(&mut cluster, "c", "1Gi", 0);
    let (_, releases) = cluster.actions();
    let names = |index: usize| {
        releases
            .get(index)
            .map(|release| release.claim.metadata.name.as_deref())
    };
    assert_eq!(
        (names(0), names(1)),
        (Some(Some("b")), None),
        "the newest only"
    );
    assert_eq!(
        releases[0].reason.to_string(),
        "GPU GPU-n1 is over-committed"
    );
    assert!(cluster.actions().1.is_empty(), "the release is in flight");
    cluster.release(&releases[0]);
    assert!(cluster.actions().1.is_empty(), "the GPU holds the rest");
}

#[test]
fn reports_reserved_overcommit_at_pods_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, second) in [("a", 1), ("b", 2)] {
        allocate(&mut cluster, name, "50Gi", second);
        cluster.reserve(name, name);
    }
    for _ in 0..3 {
        assert!(cluster.actions().1.is_empty(), "reserved allocations stay");
    }
    for pod in ["Pod/a", "Pod/b"] {
        assert_eq!(cluster.messages_of(pod), [EVENT]);
    }
}

/// The metrics have series for shareable devices alone.
#[test]
fn metrics_show_gpu_that_two_claims_have_whole() {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut whole = slice("n1");
    let mut device = serde_json::to_value(&whole.spec.devices.as_ref().unwrap()[0]).unwrap();
    device["name"] = "gpu-0".into();
    device["attributes"]["type"]["string"] = "gpu".into();
    device["allowMultipleAllocations"] = false.into();
    whole.spec.devices.as_mut().unwrap().push(object(device));
    whole.metadata.resource_version = Some("2".to_owned());
    cluster.planner.slice(Change::Applied(Box::new(whole)));
    for name in ["a", "b"] {
        assert!(!is_overcommitted(&mut cluster));
        let mut claim = claim(name, "80Gi");
        claim.status = Some(object(json!({"allocation": {"devices": {"results": [
            {"request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0"},
        ]}}})));
        cluster.observe(claim);
    }
    assert!(is_overcommitted(&mut cluster));
}
