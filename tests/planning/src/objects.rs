//! Objects of Kubernetes: nodes, slices in the form that the node driver publishes for H100, claims and pods.

use anyhow::{Context, Result};
use drava_api::names;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

/// Namespace of claims and pods.
pub const NAMESPACE: &str = "throughput";
/// GPUs of each node.
pub const GPUS: usize = 8;
/// GPUs whose partitions fit into one slice: devices that consume counters are at most 64.
const GPUS_PER_SLICE: usize = 2;
/// Memory slices of a GPU.
const MEMORY_SLICES: usize = 8;
/// Profile, memory slices, copy engines, memory in MiB and first memory slices of the placements on an H100.
const PARTITIONS: [(&str, usize, usize, usize, &[usize]); 7] = [
    ("1g.10gb", 1, 1, 9_984, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.10gb+me", 1, 1, 9_984, &[0, 1, 2, 3, 4, 5, 6]),
    ("1g.20gb", 2, 1, 20_096, &[0, 2, 4, 6]),
    ("2g.20gb", 2, 2, 20_096, &[0, 2, 4]),
    ("3g.40gb", 4, 3, 40_448, &[0, 4]),
    ("4g.40gb", 4, 4, 40_448, &[0]),
    ("7g.80gb", 8, 8, 81_008, &[0]),
];

/// What the nodes publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// 16 devices: each GPU whole and shareable.
    Shares,
    /// 216 devices: also each placement of each MIG profile.
    Partitions,
}

impl Shape {
    /// Returns the name in the results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shares => "shares",
            Self::Partitions => "partitions",
        }
    }

    /// Returns the request of a pod that fits: a share with 8 GiB, or a partition with 30 GiB.
    pub fn request(self) -> Value {
        match self {
            Self::Shares => share("8Gi"),
            Self::Partitions => json!({
                "deviceClassName": names::class::MIG,
                "selectors": [{"cel": {"expression":
                    r#"device.capacity["gpu.drava.dev"].memory.compareTo(quantity("30Gi")) >= 0"#}}],
            }),
        }
    }

    /// Returns how many of these pods fit on that number of nodes.
    pub const fn room(self, nodes: usize) -> usize {
        match self {
            Self::Shares => nodes * GPUS * 9,
            Self::Partitions => nodes * GPUS * 2,
        }
    }
}

/// Who allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The controller: devices are tainted, and the admission webhook's gate is on the pods.
    Managed,
    /// kube-scheduler.
    Native,
}

/// Returns the request of a share with that memory.
pub fn share(memory: &str) -> Value {
    json!({
        "deviceClassName": names::class::VGPU,
        "capacity": {"requests": {"memory": memory, "cores": "5"}},
    })
}

/// Returns an object of this content.
///
/// # Errors
/// When it is not one.
pub fn object<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).context("build an object")
}

/// Returns the classes of the chart.
///
/// # Errors
/// Never for valid names.
pub fn classes() -> Result<Vec<DeviceClass>> {
    let class = |(name, kind): (&str, &str)| {
        let expression = format!(
            r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "{kind}""#
        );
        object(json!({
            "metadata": {"name": name},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        }))
    };
    let classes = [(names::class::VGPU, "vgpu"), (names::class::MIG, "mig")];
    classes.into_iter().map(class).collect()
}

/// Returns the name of a node.
pub fn node_name(index: usize) -> String {
    format!("bench-{index:05}")
}

/// Returns a node that is ready.
///
/// # Errors
/// Never for valid names.
pub fn node(index: usize) -> Result<Node> {
    let name = node_name(index);
    object(json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {
            "capacity": {"cpu": "128", "memory": "1Ti", "pods": "1000"},
            "allocatable": {"cpu": "128", "memory": "1Ti", "pods": "1000"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "Bench", "message": "object without kubelet"}],
        },
    }))
}

/// Returns the slices of a node.
///
/// # Errors
/// Never for valid names.
pub fn slices(index: usize, shape: Shape, mode: Mode) -> Result<Vec<ResourceSlice>> {
    let gpus: Vec<usize> = (0..GPUS).collect();
    let counters = gpus
        .iter()
        .map(|gpu| json!({"name": counter_set(*gpu), "counters": counters(0..MEMORY_SLICES, 8)}))
        .collect();
    let mut contents = vec![("sharedCounters", Value::Array(counters))];
    let per_slice = match shape {
        Shape::Shares => GPUS,
        Shape::Partitions => GPUS_PER_SLICE,
    };
    for gpus in gpus.chunks(per_slice) {
        let devices = gpus
            .iter()
            .flat_map(|gpu| devices(index, *gpu, shape, mode));
        contents.push(("devices", devices.collect()));
    }
    let node = node_name(index);
    let pool = json!({
        "name": format!("{node}/gpus"), "generation": 1, "resourceSliceCount": contents.len(),
    });
    let slices = contents.into_iter().enumerate();
    slices
        .map(|(number, (field, content))| {
            object(json!({
                "metadata": {"name": format!("{node}-{number}")},
                "spec": {"driver": names::DRIVER, "nodeName": node, "pool": pool, field: content},
            }))
        })
        .collect()
}

fn counter_set(gpu: usize) -> String {
    format!("gpu-{gpu}")
}

/// Counters of memory slices, of copy engines and of the rest of the GPU in the same part.
fn counters(memory: std::ops::Range<usize>, engines: usize) -> Value {
    let value = |value: usize| json!({"value": value.to_string()});
    let slices = memory.map(|slice| (format!("memory-slice-{slice}"), value(1)));
    let engines = [
        ("copy-engines".to_owned(), value(engines)),
        ("decoders".to_owned(), value(engines.min(7))),
        ("jpeg-engines".to_owned(), value(engines.min(7))),
    ];
    Value::Object(slices.chain(engines).collect::<Map<_, _>>())
}

fn devices(node: usize, gpu: usize, shape: Shape, mode: Mode) -> Vec<Value> {
    let name = counter_set(gpu);
    let whole = json!({"memory": {"value": "81008Mi"}, "cores": {"value": "100"}});
    let range = |default: &str, max: &str, step: &str| {
        json!({
            "value": max,
            "requestPolicy": {"default": default, "validRange": {"min": if step == "1" {"0"} else {step}, "max": max, "step": step}},
        })
    };
    let shared = json!({
        "memory": range("80480Mi", "80480Mi", "1Mi"),
        "cores": range("0", "100", "1"),
        "slots": {"value": "10", "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}}},
    });
    let all = counters(0..MEMORY_SLICES, 8);
    let device = |name: String, kind: &str, profile: &str, capacity: Value, counters: &Value| {
        let mut device = json!({
            "name": name,
            "attributes": attributes(node, gpu, kind, profile),
            "capacity": capacity,
            "consumesCounters": [{"counterSet": counter_set(gpu), "counters": counters}],
        });
        if mode == Mode::Managed {
            device["taints"] =
                json!([{"key": names::MANAGED_TAINT, "value": "true", "effect": "NoSchedule"}]);
        }
        device
    };
    let mut shareable = device(format!("{name}-vgpu"), "vgpu", "none", shared, &all);
    shareable["allowMultipleAllocations"] = json!(true);
    let mut devices = vec![device(name.clone(), "gpu", "none", whole, &all), shareable];
    if shape == Shape::Partitions {
        for (profile, slices, engines, memory, starts) in PARTITIONS {
            for start in starts {
                let counters = counters(*start..start + slices, engines);
                let id = profile.replace(['.', '+'], "-");
                let capacity = json!({"memory": {"value": format!("{memory}Mi")}});
                let name = format!("{name}-mig-{id}-{start}");
                devices.push(device(name, "mig", profile, capacity, &counters));
            }
        }
    }
    devices
}

fn attributes(node: usize, gpu: usize, kind: &str, profile: &str) -> Value {
    json!({
        "addressingMode": {"string": "hmm"},
        "architecture": {"string": "Hopper"},
        "brand": {"string": "Nvidia"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "cudaDriverVersion": {"version": "13.0.0"},
        "driverVersion": {"version": "580.65.6"},
        "index": {"int": gpu},
        "memoryMib": {"int": 81_559},
        "minor": {"int": gpu},
        "mode": {"string": "auto"},
        "nvlinkDomain": {"string": format!("domain-{node}")},
        "oversubscribed": {"bool": false},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "profile": {"string": profile},
        "resource.kubernetes.io/numaNode": {"int": gpu / 4},
        "resource.kubernetes.io/pciBusID": {"string": format!("0000:{gpu:02x}:00.0")},
        "resource.kubernetes.io/pcieRoot": {"string": format!("pci0000:{gpu:02x}")},
        "type": {"string": kind},
        "uuid": {"string": format!("GPU-{node}-{gpu}")},
    })
}

/// Returns a claim with one request.
///
/// # Errors
/// Never for valid names.
pub fn claim(name: &str, request: &Value) -> Result<ResourceClaim> {
    object(json!({
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
    }))
}

/// Returns a pod with the claim of its name.
///
/// # Errors
/// Never for valid names.
pub fn pod(name: &str, is_gated: bool) -> Result<Pod> {
    let gates = if is_gated {
        json!([{"name": names::ALLOCATION_GATE}])
    } else {
        json!([])
    };
    object(json!({
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "schedulingGates": gates,
            "automountServiceAccountToken": false,
            "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            "containers": [{
                "name": "main", "image": "none",
                "resources": {"requests": {"cpu": "10m"}, "claims": [{"name": "gpu"}]},
            }],
        },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_have_the_devices_of_the_published_shape() {
        for (shape, slices_of_node, devices_of_node) in
            [(Shape::Shares, 2, 16), (Shape::Partitions, 5, 27 * GPUS)]
        {
            let slices = slices(0, shape, Mode::Managed).unwrap();
            assert_eq!(slices.len(), slices_of_node);
            let devices = slices
                .iter()
                .map(|slice| slice.spec.devices.as_ref().map_or(0, Vec::len));
            assert!(devices.clone().all(|count| count <= 64));
            assert_eq!(devices.sum::<usize>(), devices_of_node);
        }
    }
}
