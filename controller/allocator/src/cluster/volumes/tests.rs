//! A pod with a volume in a cluster with nodes in two zones.

use k8s_openapi::api::core::v1::{Node, Pod};
use serde_json::{Value, json};

use super::*;

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn node(name: &str, zone: &str) -> NodeInfo {
    let node: Node = object(json!({"metadata": {"name": name, "labels": {"zone": zone}}}));
    NodeInfo::of(&node)
}

fn pod(volume: &Value) -> PodDemand {
    let pod: Pod = object(json!({
        "metadata": {"name": "p", "namespace": "team"},
        "spec": {"containers": [], "volumes": [volume]},
    }));
    PodDemand::of(&pod)
}

fn claim(name: &str, spec: &Value) -> PersistentVolumeClaim {
    object(json!({"metadata": {"name": name, "namespace": "team"}, "spec": spec}))
}

/// Returns whether the nodes in zone a and zone b admit the pod.
fn admitted(cluster: &Cluster, pod: &PodDemand) -> [bool; 2] {
    [("n1", "a"), ("n2", "b")]
        .map(|(name, zone)| cluster.admits_volumes(name, &node(name, zone), pod).is_ok())
}

fn volume_in_zone_b() -> PersistentVolume {
    object(
        json!({"metadata": {"name": "v"}, "spec": {"nodeAffinity": {"required": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]}],
        }}}}),
    )
}

#[test]
fn follows_bound_volume() {
    let mut cluster = Cluster::default();
    let data = pod(&json!({"name": "d", "persistentVolumeClaim": {"claimName": "data"}}));
    assert_eq!(admitted(&cluster, &data), [true, true], "unknown claim");
    cluster.upsert_volume_claim(&claim("data", &json!({"volumeName": "v"})));
    assert_eq!(admitted(&cluster, &data), [true, true], "unknown volume");
    cluster.upsert_volume(&volume_in_zone_b());
    assert_eq!(admitted(&cluster, &data), [false, true]);
    let obstacle = cluster.admits_volumes("n1", &node("n1", "a"), &data);
    assert_eq!(
        obstacle.unwrap_err(),
        "the volume of PersistentVolumeClaim data is not accessible"
    );
    let other = pod(&json!({"name": "d", "emptyDir": {}}));
    assert_eq!(admitted(&cluster, &other), [true, true]);
    cluster.remove_volume("v");
    assert_eq!(admitted(&cluster, &data), [true, true]);
}

#[test]
fn follows_generated_claim_of_ephemeral_volume() {
    let mut cluster = Cluster::default();
    cluster.upsert_volume(&volume_in_zone_b());
    cluster.upsert_volume_claim(&claim("p-scratch", &json!({"volumeName": "v"})));
    let scratch =
        pod(&json!({"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": {}}}}));
    assert_eq!(admitted(&cluster, &scratch), [false, true]);
}

#[test]
fn respects_topologies_of_class_that_waits_for_pod() {
    let mut cluster = Cluster::default();
    let data = pod(&json!({"name": "d", "persistentVolumeClaim": {"claimName": "data"}}));
    cluster.upsert_volume_claim(&claim("data", &json!({"storageClassName": "zonal"})));
    let class = |mode: &str| -> StorageClass {
        object(json!({
            "metadata": {"name": "zonal"}, "provisioner": "example.com", "volumeBindingMode": mode,
            "allowedTopologies": [{"matchLabelExpressions": [{"key": "zone", "values": ["a"]}]}],
        }))
    };
    cluster.upsert_storage_class(&class("WaitForFirstConsumer"));
    assert_eq!(admitted(&cluster, &data), [true, false]);
    cluster.upsert_storage_class(&class("Immediate"));
    assert_eq!(admitted(&cluster, &data), [true, true]);
}

#[test]
fn follows_zone_labels_of_volume() {
    let mut cluster = Cluster::default();
    cluster.upsert_volume_claim(&claim("data", &json!({"volumeName": "v"})));
    let data = pod(&json!({"name": "d", "persistentVolumeClaim": {"claimName": "data"}}));
    let node = |labels: &Value| -> NodeInfo {
        NodeInfo::of(&object::<Node>(
            json!({"metadata": {"name": "n", "labels": labels}}),
        ))
    };
    let (zone, old) = (
        "topology.kubernetes.io/zone",
        "failure-domain.beta.kubernetes.io/zone",
    );
    for (volume, labels, is_accessible) in [
        (json!({zone: "a"}), json!({zone: "a"}), true),
        (json!({zone: "a"}), json!({zone: "b"}), false),
        (json!({zone: "a__b"}), json!({zone: "b"}), true),
        (json!({zone: "a__"}), json!({zone: "b"}), true),
        (json!({old: "a"}), json!({zone: "b"}), false),
        (json!({old: "a"}), json!({zone: "a"}), true),
        (
            json!({zone: "a"}),
            json!({"topology.kubernetes.io/region": "a"}),
            false,
        ),
        (json!({zone: "a"}), json!({}), true),
    ] {
        cluster.upsert_volume(&object(
            json!({"metadata": {"name": "v", "labels": volume}}),
        ));
        let admitted = cluster.admits_volumes("n", &node(&labels), &data);
        assert_eq!(admitted.is_ok(), is_accessible, "{volume} {labels}");
    }
}
