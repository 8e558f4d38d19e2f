//! Config of classes and claim as kube-scheduler lists it.

use drava_allocator::cluster::Cluster;
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use serde_json::{Value, json};

use super::*;
use crate::fixture::{class, node, object, pod, slice};

fn config_of(requests: &Value, config: &Value) -> Vec<Value> {
    let mut cluster = Cluster::default();
    let mut plain = class();
    plain.metadata.name = Some("plain.drava.dev".to_owned());
    if let Some(spec) = plain.spec.as_mut() {
        spec.config = None;
    }
    cluster.upsert_class(class());
    cluster.upsert_class(plain);
    cluster.upsert_node(&node("n1"));
    cluster.upsert_slice(&slice("n1"));
    let claim: ResourceClaim = object(json!({
        "metadata": {"name": "c", "namespace": "default", "uid": "u"},
        "spec": {"devices": {"requests": requests, "config": config}},
    }));
    let pod_request = PodRequest::new(
        &pod("p", &["c"]),
        &[("c", &claim)],
        &cluster.classes,
        &cluster.selectors,
    )
    .unwrap();
    let policies = Policies {
        node: NodePlacementPolicy::Binpack,
        gpu: GpuPlacementPolicy::Binpack,
    };
    let placement = cluster.decide(&pod_request, policies).unwrap();
    let allocation = build(
        &claim,
        &placement.claims[0],
        "n1",
        &cluster.classes,
        object(json!("2026-01-01T00:00:00Z")),
        || "s".to_owned(),
    );
    allocation
        .devices
        .and_then(|devices| devices.config)
        .unwrap_or_default()
        .into_iter()
        .map(|entry| {
            json!([
                entry.source,
                entry.requests,
                entry.opaque.unwrap().parameters.0["priority"]
            ])
        })
        .collect()
}

fn request(name: &str, class: &str) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": class, "capacity": {"requests": {"memory": "1Gi"}}}})
}

fn of_claim(requests: &Value, priority: i64) -> Value {
    json!({"requests": requests, "opaque": {"driver": "gpu.drava.dev", "parameters": {
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "priority": priority,
    }}})
}

#[test]
fn lists_class_config_first_and_once() {
    let (shared, plain) = ("vgpu.drava.dev", "plain.drava.dev");
    assert_eq!(
        config_of(
            &json!([request("a", shared), request("b", shared)]),
            &json!([])
        ),
        [json!(["FromClass", null, 10])]
    );
    assert_eq!(
        config_of(
            &json!([
                request("a", shared),
                request("b", plain),
                request("c", shared)
            ]),
            &json!([
                of_claim(&json!([]), -1),
                of_claim(&json!(["b"]), -2),
                of_claim(&json!(["a", "b", "c"]), -3)
            ])
        ),
        [
            json!(["FromClass", ["a", "c"], 10]),
            json!(["FromClaim", [], -1]),
            json!(["FromClaim", ["b"], -2]),
            json!(["FromClaim", null, -3]),
        ]
    );
}

#[test]
fn omits_config_of_unselected_alternatives() {
    let alternatives = json!([{"name": "a", "firstAvailable": [
        {"name": "big", "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "800Gi"}}},
        {"name": "small", "deviceClassName": "plain.drava.dev", "capacity": {"requests": {"memory": "1Gi"}}},
    ]}, request("b", "plain.drava.dev")]);
    assert_eq!(
        config_of(
            &alternatives,
            &json!([
                of_claim(&json!(["a/big"]), -1),
                of_claim(&json!(["a/small"]), -2),
                of_claim(&json!(["a"]), -3)
            ])
        ),
        [
            json!(["FromClaim", ["a/small"], -2]),
            json!(["FromClaim", ["a"], -3])
        ]
    );
}
