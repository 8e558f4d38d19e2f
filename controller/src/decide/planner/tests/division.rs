//! Pods with shares of the multiprocessors of a GPU, which exclude shares of its time.

use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::fixture::{claim, class, object, pod};

const CLASS: &str = "spatial.example.com";

/// A node on whose GPU two pods of priority 0 have a quarter of the multiprocessors each.
fn divided() -> TestCluster {
    let mut cluster = TestCluster::new(&["n1"]);
    let mut spatial = class();
    spatial.metadata.name = Some(CLASS.to_owned());
    let config = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": "spatial"});
    let config = json!([{"opaque": {"driver": "gpu.drava.dev", "parameters": config}}]);
    spatial.spec.as_mut().unwrap().config = Some(object(config));
    cluster.planner.class(applied(spatial));
    for name in ["low-1", "low-2"] {
        let mut claim = claim(name, "20Gi");
        let spec = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
        let request = &mut spec.requests.as_mut().unwrap()[0];
        request.exactly.as_mut().unwrap().device_class_name = CLASS.to_owned();
        cluster.add_claim(claim);
        let mut pod = pod(name, &[name]);
        pod.spec.as_mut().unwrap().priority = Some(0);
        cluster.add_pod(pod);
        assert_eq!(cluster.settle(), [format!("{name} → n1")]);
        cluster.bind((name, "n1"));
    }
    cluster
}

/// Its memory would be free.
#[test]
fn evicts_all_spatial_shares_for_a_share_of_time() {
    let mut cluster = divided();
    cluster.add_pod_of_priority("urgent", "20Gi", 10);
    assert!(cluster.settle().is_empty());
    let mut evicted = cluster.evict();
    evicted.sort();
    assert_eq!(evicted, ["low-1 for urgent", "low-2 for urgent"]);
    cluster.end("low-1");
    assert!(cluster.settle().is_empty(), "one of them is still there");
    cluster.end("low-2");
    assert_eq!(cluster.settle(), ["urgent → n1"]);
}

/// Its programs read their part when they start.
#[test]
fn multiprocessors_of_a_running_share_do_not_grow() {
    let mut cluster = divided();
    let mut companion = claim("more", "10Gi");
    companion.metadata.labels = Some(
        [(
            "gpu.drava.dev/companion-of".to_owned(),
            "uid-low-1".to_owned(),
        )]
        .into(),
    );
    companion.metadata.owner_references = Some(vec![object(json!({
        "apiVersion": "v1", "kind": "Pod", "name": "low-1", "uid": "pod-low-1", "controller": true,
    }))]);
    let amounts = |cores: &str| json!({"requests": {"memory": "10Gi", "cores": cores}});
    // A node profile may give cores to those that ask for none: the placement counts.
    for (cores, grows) in [("10", false), ("0", true)] {
        let spec = companion.spec.as_mut().unwrap().devices.as_mut().unwrap();
        let exactly = spec.requests.as_mut().unwrap()[0].exactly.as_mut().unwrap();
        exactly.device_class_name = CLASS.to_owned();
        exactly.capacity = Some(object(amounts(cores)));
        cluster.add_claim(companion.clone());
        let grown = cluster.settle();
        assert_eq!(!grown.is_empty(), grows, "{cores} cores: {grown:?}");
        if !grows {
            let messages = cluster.messages_of("ResourceClaim/more").join("\n");
            assert!(
                messages.contains("InvalidCompanion: claim more adds cores"),
                "{messages}"
            );
            cluster.delete_claim("more");
        }
    }
}

#[test]
fn names_division_to_pod_that_waits_for_it() {
    let mut cluster = divided();
    cluster.add_pod_of_priority("patient", "20Gi", 0);
    assert!(cluster.settle().is_empty() && cluster.evict().is_empty());
    let messages = cluster.messages_of("Pod/patient").join("\n");
    assert!(
        messages.contains("the multiprocessors of n1/gpu-0"),
        "{messages}"
    );
}
