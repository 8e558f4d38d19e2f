//! Objects for tests.

use http::Response;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::client::Body;
use serde_json::{Value, json};

pub(crate) mod random;

/// Response of an API server: `found` with 200, else a failure with this status code.
pub(crate) fn response(code: u16, found: &Value) -> Response<Body> {
    let failure = json!({"kind": "Status", "code": code, "message": "denied", "reason": ""});
    let body = if code == 200 { found } else { &failure };
    let response = Response::builder().status(code);
    response
        .body(Body::from(body.to_string().into_bytes()))
        .unwrap()
}

/// Returns whether a request asks for an answer with the metadata alone.
pub(crate) fn wants_metadata(headers: &http::HeaderMap) -> bool {
    let accepted = headers.get("accept").and_then(|value| value.to_str().ok());
    accepted.is_some_and(|accepted| accepted.contains("as=PartialObjectMetadata;"))
}

/// Returns the answer with the metadata of an object alone.
pub(crate) fn metadata_of(found: &Value) -> Value {
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata", "metadata": found["metadata"]})
}

pub(crate) fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("valid object")
}

pub(crate) fn node(name: &str) -> Node {
    object(json!({
        "metadata": {"name": name, "uid": name},
        "status": {
            "allocatable": {"cpu": "8", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
}

/// Slice of a node with one shareable GPU of 80 GiB.
pub(crate) fn slice(node: &str) -> ResourceSlice {
    object(json!({
        "metadata": {"name": format!("slice-{node}"), "resourceVersion": "1"},
        "spec": {
            "driver": "gpu.drava.dev", "nodeName": node,
            "pool": {"name": format!("{node}/gpus"), "generation": 1, "resourceSliceCount": 1},
            "devices": [{
                "name": "gpu-0-vgpu", "allowMultipleAllocations": true,
                "attributes": {"type": {"string": "vgpu"}, "uuid": {"string": format!("GPU-{node}")}},
                "capacity": {
                    "memory": {"value": "80Gi"},
                    "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0"}}},
                },
            }],
        },
    }))
}

pub(crate) fn class() -> DeviceClass {
    object(json!({
        "metadata": {"name": "vgpu.drava.dev"},
        "spec": {
            "selectors": [{"cel": {"expression": r#"device.driver == "gpu.drava.dev""#}}],
            "config": [{"opaque": {"driver": "gpu.drava.dev", "parameters": {
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "priority": 10,
            }}}],
        },
    }))
}

pub(crate) fn claim(name: &str, memory: &str) -> ResourceClaim {
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": memory}},
        }}]}},
    }))
}

/// Pod with these scheduling gates.
pub(crate) fn gated_pod(name: &str, claims: &[&str], gates: &[&str]) -> Pod {
    let mut pod = pod(name, claims);
    let gates = gates.iter().map(|gate| object(json!({"name": gate})));
    pod.spec.get_or_insert_default().scheduling_gates = Some(gates.collect());
    pod
}

pub(crate) fn pod(name: &str, claims: &[&str]) -> Pod {
    let entries: Vec<_> = claims
        .iter()
        .map(|claim| json!({"name": claim, "resourceClaimName": claim}))
        .collect();
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("pod-{name}")},
        "spec": {
            "schedulerName": "default-scheduler",
            "resourceClaims": entries,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}}}],
        },
        "status": {"phase": "Pending"},
    }))
}
