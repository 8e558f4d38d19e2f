//! Objects for tests: nodes with GPUs that are allocatable whole or shared, classes, claims, pods.

use drava_api::quota::GpuQuota;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::pod_request::PodRequest;

pub(crate) fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("valid object")
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

/// Slices of a node with GPUs of this memory: one with the counters, one with the devices.
pub(crate) fn slices(node: &str, gpus_gib: &[u64]) -> Vec<ResourceSlice> {
    let pool = json!({"name": format!("{node}/gpus"), "generation": 1, "resourceSliceCount": 2});
    let counters: Vec<_> = (0..gpus_gib.len())
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": {"gpu": {"value": "1"}}}))
        .collect();
    let devices: Vec<_> = gpus_gib
        .iter()
        .enumerate()
        .flat_map(|(gpu, gib)| devices(node, gpu, *gib))
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

fn devices(node: &str, gpu: usize, gib: u64) -> [Value; 2] {
    let attributes = |kind: &str| {
        json!({
            "type": {"string": kind},
            "uuid": {"string": format!("GPU-{node}-{gpu}")},
            "index": {"int": gpu},
            "productName": {"string": if gib > 20 { "NVIDIA H100" } else { "Tesla T4" }},
        })
    };
    let consumes =
        json!([{"counterSet": format!("gpu-{gpu}"), "counters": {"gpu": {"value": "1"}}}]);
    let taints = json!([{"key": "gpu.drava.dev/managed", "value": "true", "effect": "NoSchedule"}]);
    let memory = format!("{gib}Gi");
    [
        json!({
            "name": format!("gpu-{gpu}"),
            "attributes": attributes("gpu"),
            "capacity": {"memory": {"value": memory}, "cores": {"value": "100"}},
            "consumesCounters": consumes,
            "taints": taints,
        }),
        json!({
            "name": format!("gpu-{gpu}-vgpu"),
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

/// Profiles of an A100 40GB: name, memory in MiB, first slices, slices, copy engines, decoders, media extensions.
type Profile = (&'static str, u64, &'static [u32], u32, u32, u32, u32);

const A100: [Profile; 7] = [
    ("1g.5gb", 4864, &[6, 5, 4, 3, 2, 1, 0], 1, 1, 0, 0),
    ("1g.5gb+me", 4864, &[6, 5, 4, 3, 2, 1, 0], 1, 1, 1, 1),
    ("1g.10gb", 9856, &[6, 4, 2, 0], 2, 1, 1, 0),
    ("2g.10gb", 9856, &[4, 2, 0], 2, 2, 1, 0),
    ("3g.20gb", 19968, &[4, 0], 4, 3, 2, 0),
    ("4g.20gb", 19968, &[0], 4, 4, 2, 0),
    ("7g.40gb", 40192, &[0], 8, 7, 5, 0),
];

/// Slices of a node with A100 40GB GPUs in MIG mode.
pub(crate) fn partitioned_slices(node: &str, gpus: usize) -> Vec<ResourceSlice> {
    let pool = json!({"name": format!("{node}/gpus"), "generation": 1, "resourceSliceCount": 2});
    let amount = |value: u32| json!({"value": value.to_string()});
    let memory_slices = |range: std::ops::Range<u32>| -> serde_json::Map<String, Value> {
        range
            .map(|slice| (format!("memory-slice-{slice}"), amount(1)))
            .collect()
    };
    let with_engines = |mut counters: serde_json::Map<String, Value>, engines: [u32; 3]| {
        let names = ["copy-engines", "decoders", "media-extensions"];
        let engines = names
            .into_iter()
            .zip(engines)
            .filter(|(_, value)| *value > 0);
        counters.extend(engines.map(|(name, value)| (name.to_owned(), amount(value))));
        counters
    };
    let counters: Vec<_> = (0..gpus)
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": with_engines(memory_slices(0..8), [7, 5, 1])}))
        .collect();
    let device = |gpu: usize, profile: Profile, start: u32| {
        let (name, mib, _, size, copy, decoders, media) = profile;
        json!({
            "name": drava_api::names::mig_device(u32::try_from(gpu).unwrap_or_default(), name, start),
            "attributes": {
                "type": {"string": "mig"},
                "uuid": {"string": format!("GPU-{node}-{gpu}")},
                "profile": {"string": name},
            },
            "capacity": {"memory": {"value": format!("{mib}Mi")}},
            "consumesCounters": [{
                "counterSet": format!("gpu-{gpu}"),
                "counters": with_engines(memory_slices(start..start + size), [copy, decoders, media]),
            }],
            "taints": [{"key": "gpu.drava.dev/managed", "value": "true", "effect": "NoSchedule"}],
        })
    };
    let devices: Vec<_> = (0..gpus)
        .flat_map(|gpu| A100.map(|profile| (gpu, profile)))
        .flat_map(|(gpu, profile)| {
            profile
                .2
                .iter()
                .map(move |start| device(gpu, profile, *start))
        })
        .collect();
    let slice = |name: &str, content: (&str, Value)| {
        let mut spec = json!({"driver": "gpu.drava.dev", "nodeName": node, "pool": pool});
        spec[content.0] = content.1;
        object(json!({
            "metadata": {"name": format!("{name}-{node}"), "resourceVersion": "1"},
            "spec": spec,
        }))
    };
    vec![
        slice("counters", ("sharedCounters", json!(counters))),
        slice("devices", ("devices", json!(devices))),
    ]
}

/// The chart's classes.
pub(crate) fn classes() -> Vec<DeviceClass> {
    ["gpu", "vgpu", "mig"]
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

/// A claim with one share.
pub(crate) fn share(name: &str, memory: &str, cores: &str) -> ResourceClaim {
    request(
        name,
        &json!({"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": memory, "cores": cores}}}),
    )
}

/// A quota with this spec.
pub(crate) fn quota(name: &str, spec: &Value) -> GpuQuota {
    object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
        "metadata": {"name": name, "uid": format!("uid-{name}")},
        "spec": spec,
    }))
}

/// A pod with one container that uses these claims.
pub(crate) fn pod(name: &str, claims: &[&str]) -> Pod {
    let entries: Vec<_> = claims
        .iter()
        .map(|claim| json!({"name": claim, "resourceClaimName": claim}))
        .collect();
    let used: Vec<_> = claims.iter().map(|claim| json!({"name": claim})).collect();
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("pod-{name}")},
        "spec": {
            "resourceClaims": entries,
            "containers": [{"name": "main", "resources": {"requests": {"cpu": "1"}, "claims": used}}],
        },
    }))
}

/// A cluster with the chart's classes and these nodes.
pub(crate) fn cluster(nodes: &[(&str, &[u64])]) -> Cluster {
    let mut cluster = Cluster::default();
    for class in classes() {
        cluster.upsert_class(class);
    }
    for (name, gpus) in nodes {
        cluster.upsert_node(&node(name));
        for slice in slices(name, gpus) {
            cluster.upsert_slice(&slice);
        }
    }
    cluster
}

/// Request of a pod with these claims.
pub(crate) fn pod_request(cluster: &Cluster, claims: &[ResourceClaim]) -> PodRequest {
    let names: Vec<_> = claims
        .iter()
        .map(|claim| claim.metadata.name.as_deref().unwrap_or_default())
        .collect();
    let named: Vec<_> = names.iter().copied().zip(claims).collect();
    PodRequest::new(
        &pod("p", &names),
        &named,
        &cluster.classes,
        &cluster.selectors,
    )
    .expect("valid claims")
}
