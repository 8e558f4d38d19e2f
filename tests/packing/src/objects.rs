//! Objects of Kubernetes for the nodes and pods of a trace, in the form in which the driver publishes GPUs and users
//! request them.
//!
//! The memory of a GPU is 1,000 MiB here, whatever its model: 1 MiB is a thousandth of the GPU, as in the trace.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::trace::{TraceNode, TracePod};

/// Name of the claim and namespace of a pod.
const CLAIM: &str = "gpu";

fn object<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("build an object")
}

/// Returns the classes of the chart for whole GPUs and for shares.
///
/// # Errors
/// Never for these classes.
pub fn classes() -> Result<Vec<DeviceClass>> {
    let class = |kind: &str| {
        let expression = format!(
            r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "{kind}""#
        );
        object(json!({
            "metadata": {"name": format!("{kind}.drava.dev")},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        }))
    };
    ["gpu", "vgpu"].into_iter().map(class).collect()
}

/// Returns the Node object of a node.
///
/// # Errors
/// When the node has no valid name.
pub fn node(node: &TraceNode) -> Result<Node> {
    object(json!({
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "status": {
            "allocatable": {
                "cpu": format!("{}m", node.cpu_milli),
                "memory": format!("{}Mi", node.memory_mib),
                "pods": "1000",
            },
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }))
}

/// Returns the slices of a node with GPUs.
///
/// # Errors
/// When the node has no valid name.
pub fn slices(node: &TraceNode) -> Result<Vec<ResourceSlice>> {
    let pool =
        json!({"name": format!("{}/gpus", node.name), "generation": 1, "resourceSliceCount": 2});
    let gpus = 0..node.gpus;
    let counters: Vec<_> = gpus
        .clone()
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": {"gpu": {"value": "1"}}}))
        .collect();
    let devices: Vec<_> = gpus.flat_map(|gpu| devices(node, gpu)).collect();
    let slice = |index: u32, content: Value| {
        object(json!({
            "metadata": {"name": format!("{}-{index}", node.name), "resourceVersion": "1"},
            "spec": merge(json!({"driver": "gpu.drava.dev", "nodeName": node.name, "pool": pool}), content),
        }))
    };
    Ok(vec![
        slice(0, json!({"sharedCounters": counters}))?,
        slice(1, json!({"devices": devices}))?,
    ])
}

fn merge(mut base: Value, more: Value) -> Value {
    if let (Some(base), Value::Object(more)) = (base.as_object_mut(), more) {
        base.extend(more);
    }
    base
}

fn devices(node: &TraceNode, gpu: u64) -> [Value; 2] {
    let device = |name: String, kind: &str| {
        json!({
            "name": name,
            "attributes": {
                "type": {"string": kind},
                "uuid": {"string": format!("GPU-{}-{gpu}", node.name)},
                "index": {"int": gpu},
                "productName": {"string": node.model},
            },
            "consumesCounters": [{"counterSet": format!("gpu-{gpu}"), "counters": {"gpu": {"value": "1"}}}],
        })
    };
    let range = json!({"min": "1Mi", "max": "1000Mi", "step": "1Mi"});
    [
        merge(
            device(format!("gpu-{gpu}"), "gpu"),
            json!({"capacity": {"memory": {"value": "1000Mi"}}}),
        ),
        merge(
            device(format!("gpu-{gpu}-vgpu"), "vgpu"),
            json!({
                "allowMultipleAllocations": true,
                "capacity": {"memory": {"value": "1000Mi", "requestPolicy": {"default": "1000Mi", "validRange": range}}},
            }),
        ),
    ]
}

/// Returns a pod with its claim, if it requests GPUs. `id` makes the name unique.
///
/// # Errors
/// When the pod has no valid name.
pub fn pod(pod: &TracePod, id: usize) -> Result<(Pod, Option<ResourceClaim>)> {
    let name = format!("pod-{id}");
    let claim = (pod.gpus > 0).then(|| claim(pod, &name)).transpose()?;
    let mut spec = json!({
        "containers": [{
            "name": "main",
            "resources": {"requests": {
                "cpu": format!("{}m", pod.cpu_milli),
                "memory": format!("{}Mi", pod.memory_mib),
            }},
        }],
    });
    if claim.is_some() {
        spec = merge(
            spec,
            json!({"resourceClaims": [{"name": CLAIM, "resourceClaimName": name}]}),
        );
    }
    let metadata = json!({"name": name, "namespace": "openb", "uid": name});
    Ok((object(json!({"metadata": metadata, "spec": spec}))?, claim))
}

fn claim(pod: &TracePod, name: &str) -> Result<ResourceClaim> {
    let request = match pod.gpu_milli {
        1_000.. => json!({"deviceClassName": "gpu.drava.dev", "count": pod.gpus}),
        milli => json!({
            "deviceClassName": "vgpu.drava.dev",
            "count": pod.gpus,
            "capacity": {"requests": {"memory": format!("{milli}Mi")}},
        }),
    };
    let models: Vec<_> = pod.models().map(|model| format!("{model:?}")).collect();
    let selectors = match models.as_slice() {
        [] => json!({}),
        models => {
            let expression = format!(
                r#"device.attributes["gpu.drava.dev"].productName in [{}]"#,
                models.join(", ")
            );
            json!({"selectors": [{"cel": {"expression": expression}}]})
        }
    };
    object(json!({
        "metadata": {"name": name, "namespace": "openb", "uid": name, "resourceVersion": "1"},
        "spec": {"devices": {"requests": [{"name": CLAIM, "exactly": merge(request, selectors)}]}},
    }))
}
