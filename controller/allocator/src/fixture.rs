//! Objects for the tests: nodes with cards in the coupled model, classes, claims, pods.

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

use crate::ask::PodAsk;
use crate::cluster::Cluster;

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the fixture is an object of its kind")
}

/// A ready node with 8 CPUs.
pub(crate) fn node(name: &str) -> Node {
    object(json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "allocatable": {"cpu": "8", "memory": "32Gi", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
}

/// The slices of a node whose cards have this many GiB each: counters apart, then whole cards and their shares.
pub(crate) fn slices(node: &str, cards_gib: &[u64]) -> Vec<ResourceSlice> {
    let pool = json!({"name": format!("{node}/gpus"), "generation": 1, "resourceSliceCount": 2});
    let counters: Vec<_> = (0..cards_gib.len())
        .map(|card| json!({"name": format!("gpu-{card}"), "counters": {"card": {"value": "1"}}}))
        .collect();
    let devices: Vec<_> = cards_gib
        .iter()
        .enumerate()
        .flat_map(|(card, gib)| devices(node, card, *gib))
        .collect();
    let slice = |index: u32, content: Value| {
        let mut spec = json!({"driver": "gpu.drava.dev", "nodeName": node, "pool": pool});
        if let (Some(spec), Value::Object(content)) = (spec.as_object_mut(), content) {
            spec.extend(content);
        }
        object(json!({
            "metadata": {"name": format!("0000{index}-{node}"), "resourceVersion": "1"},
            "spec": spec,
        }))
    };
    vec![
        slice(0, json!({"sharedCounters": counters})),
        slice(1, json!({"devices": devices})),
    ]
}

fn devices(node: &str, card: usize, gib: u64) -> [Value; 2] {
    let attributes = |kind: &str| {
        json!({
            "type": {"string": kind},
            "uuid": {"string": format!("GPU-{node}-{card}")},
            "index": {"int": card},
            "productName": {"string": if gib > 20 { "NVIDIA H100" } else { "Tesla T4" }},
        })
    };
    let consumes =
        json!([{"counterSet": format!("gpu-{card}"), "counters": {"card": {"value": "1"}}}]);
    let taints = json!([{"key": "gpu.drava.dev/managed", "value": "true", "effect": "NoSchedule"}]);
    let memory = format!("{gib}Gi");
    [
        json!({
            "name": format!("gpu-{card}"),
            "attributes": attributes("gpu"),
            "capacity": {"memory": {"value": memory}, "cores": {"value": "100"}},
            "consumesCounters": consumes,
            "taints": taints,
        }),
        json!({
            "name": format!("gpu-{card}-vgpu"),
            "allowMultipleAllocations": true,
            "attributes": attributes("vgpu"),
            "capacity": {
                "memory": {"value": memory, "requestPolicy": {"default": memory, "validRange": {"min": "1Mi", "max": memory, "step": "1Mi"}}},
                "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0", "max": "100", "step": "1"}}},
                "slots": {"value": "10", "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}}},
            },
            "consumesCounters": consumes,
            "taints": taints,
        }),
    ]
}

/// The chart's classes.
pub(crate) fn classes() -> Vec<DeviceClass> {
    ["gpu", "vgpu"]
        .map(|kind| {
            class(
                &format!("{kind}.drava.dev"),
                &format!(r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "{kind}""#),
            )
        })
        .to_vec()
}

/// A class with one selector.
pub(crate) fn class(name: &str, expression: &str) -> DeviceClass {
    object(
        json!({"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}),
    )
}

/// A claim in namespace `default` with this `spec.devices`.
pub(crate) fn claim(name: &str, devices: &Value) -> ResourceClaim {
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "resourceVersion": "1"},
        "spec": {"devices": devices},
    }))
}

/// A claim with one request.
pub(crate) fn request(name: &str, exactly: &Value) -> ResourceClaim {
    claim(
        name,
        &json!({"requests": [{"name": "gpu", "exactly": exactly}]}),
    )
}

/// A claim for one share.
pub(crate) fn share(name: &str, memory: &str, cores: &str) -> ResourceClaim {
    request(
        name,
        &json!({"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": memory, "cores": cores}}}),
    )
}

/// A pod whose only container sees the claims of these names.
pub(crate) fn pod(name: &str, claims: &[&str]) -> Pod {
    let entries: Vec<_> = claims
        .iter()
        .map(|claim| json!({"name": claim, "resourceClaimName": claim}))
        .collect();
    let seen: Vec<_> = claims.iter().map(|claim| json!({"name": claim})).collect();
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("pod-{name}")},
        "spec": {
            "resourceClaims": entries,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}, "claims": seen}}],
        },
    }))
}

/// A cluster with the chart's classes and these nodes.
pub(crate) fn cluster(nodes: &[(&str, &[u64])]) -> Cluster {
    let mut cluster = Cluster::default();
    for class in classes() {
        cluster.upsert_class(class);
    }
    for (name, cards) in nodes {
        cluster.upsert_node(&node(name));
        for slice in slices(name, cards) {
            cluster.upsert_slice(&slice);
        }
    }
    cluster
}

/// What a pod with these claims asks for.
pub(crate) fn ask(cluster: &Cluster, claims: &[ResourceClaim]) -> PodAsk {
    let names: Vec<_> = claims
        .iter()
        .map(|claim| claim.metadata.name.as_deref().unwrap_or_default())
        .collect();
    let named: Vec<_> = names.iter().copied().zip(claims).collect();
    PodAsk::new(
        &pod("p", &names),
        &named,
        &cluster.classes,
        &cluster.selectors,
    )
    .expect("the claims are sound")
}
