//! Preference of GpuPolicies for shares or partitions.

use drava_api::policy::GpuPolicy;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::{BINPACK, allocate};
use crate::cluster::Cluster;
use crate::fixture::{cluster, node, object, pod_request, request};

fn set_policy(cluster: &mut Cluster, spec: &Value) {
    let policy: GpuPolicy = object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuPolicy", "metadata": {"name": "p"}, "spec": spec,
    }));
    cluster.upsert_policy(&policy);
}

/// Adds a node with GPUs of 40 GiB that serve shares, or partitions with 10 and 20 GiB.
fn add_mixed(cluster: &mut Cluster, name: &str, gpus: usize) {
    let taints = json!([{"key": "gpu.drava.dev/managed", "value": "true", "effect": "NoSchedule"}]);
    let counters = |range: std::ops::Range<usize>| {
        let counters = range.map(|slice| (format!("slice-{slice}"), json!({"value": "1"})));
        Value::Object(counters.collect())
    };
    let device = |gpu: usize, suffix: &str, kind: &str, capacity: Value, slices| {
        json!({
            "name": format!("gpu-{gpu}-{suffix}"),
            "attributes": {"type": {"string": kind}, "uuid": {"string": format!("GPU-{name}-{gpu}")}},
            "capacity": {"memory": capacity},
            "consumesCounters": [{"counterSet": format!("gpu-{gpu}"), "counters": counters(slices)}],
            "taints": taints,
        })
    };
    let range =
        json!({"default": "40Gi", "validRange": {"min": "1Mi", "max": "40Gi", "step": "1Mi"}});
    let devices: Vec<_> = (0..gpus)
        .flat_map(|gpu| {
            let memory = json!({"value": "40Gi", "requestPolicy": range});
            let mut share = device(gpu, "vgpu", "vgpu", memory, 0..4);
            share["allowMultipleAllocations"] = json!(true);
            [
                share,
                device(gpu, "small", "mig", json!({"value": "10Gi"}), 0..1),
                device(gpu, "large", "mig", json!({"value": "20Gi"}), 2..4),
            ]
        })
        .collect();
    let sets: Vec<_> = (0..gpus)
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": counters(0..4)}))
        .collect();
    cluster.upsert_node(&node(name));
    for (index, (field, content)) in [("sharedCounters", sets), ("devices", devices)]
        .into_iter()
        .enumerate()
    {
        cluster.upsert_slice(&object(json!({
            "metadata": {"name": format!("{name}-{index}"), "resourceVersion": "1"},
            "spec": {
                "driver": "gpu.drava.dev", "nodeName": name, field: content,
                "pool": {"name": format!("{name}/gpus"), "generation": 1, "resourceSliceCount": 2},
            },
        })));
    }
}

fn mixed(gpus: usize) -> Cluster {
    let mut cluster = cluster(&[]);
    cluster.upsert_class(object(json!({
        "metadata": {"name": "fraction.drava.dev"},
        "spec": {"selectors": [{"cel": {"expression":
            r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type in ["vgpu", "mig"]"#
        }}]},
    })));
    add_mixed(&mut cluster, "n1", gpus);
    cluster
}

fn fraction(name: &str, memory: &str) -> ResourceClaim {
    request(
        name,
        &json!({"deviceClassName": "fraction.drava.dev", "capacity": {"requests": {"memory": memory}}}),
    )
}

fn take(cluster: &mut Cluster, name: &str, memory: &str) -> String {
    allocate(cluster, &[fraction(name, memory)], BINPACK).unwrap()[0].clone()
}

#[test]
fn prefers_shares_or_partitions() {
    for (spec, devices) in [
        (json!({}), ["n1/gpu-0-vgpu", "n1/gpu-0-vgpu"]),
        (
            json!({"prefer": "vgpu"}),
            ["n1/gpu-0-vgpu", "n1/gpu-0-vgpu"],
        ),
        (
            json!({"prefer": "mig"}),
            ["n1/gpu-0-small", "n1/gpu-1-small"],
        ),
    ] {
        let mut cluster = mixed(2);
        set_policy(&mut cluster, &spec);
        assert_eq!(
            [
                take(&mut cluster, "a", "5Gi"),
                take(&mut cluster, "b", "5Gi")
            ],
            devices,
            "{spec}"
        );
    }
}

#[test]
fn prefers_used_gpu_and_least_surplus_memory_with_fit() {
    let mut cluster = mixed(2);
    set_policy(&mut cluster, &json!({"prefer": "mig"}));
    assert_eq!(take(&mut cluster, "first", "5Gi"), "n1/gpu-0-small");
    set_policy(&mut cluster, &json!({"prefer": "fit"}));
    // A partition of the GPU in use, although a share would fit exactly.
    assert_eq!(take(&mut cluster, "a", "15Gi"), "n1/gpu-0-large");
    // The other GPU is unused for both kinds: the share has no memory beyond the request.
    assert_eq!(take(&mut cluster, "b", "15Gi"), "n1/gpu-1-vgpu");
}

#[test]
fn prefers_node_with_preferred_kind() {
    let mut cluster = mixed(1);
    add_mixed(&mut cluster, "n2", 1);
    set_policy(&mut cluster, &json!({"prefer": "vgpu"}));
    assert_eq!(take(&mut cluster, "a", "5Gi"), "n1/gpu-0-vgpu");
    set_policy(&mut cluster, &json!({"prefer": "mig"}));
    // Binpack alone would select n1.
    assert_eq!(take(&mut cluster, "b", "5Gi"), "n2/gpu-0-small");
}

#[test]
fn explains_preference() {
    let mut cluster = mixed(1);
    set_policy(&mut cluster, &json!({"prefer": "mig"}));
    let reason = |cluster: &Cluster, memory: &str| {
        let request = pod_request(cluster, &[fraction("a", memory)]);
        let placement = cluster.decide(&request, BINPACK).unwrap();
        placement.reason(&placement.claims[0])
    };
    assert_eq!(
        reason(&cluster, "5Gi"),
        "node n1: only feasible node; gpu-0-small: only feasible GPU; a partition, prefer mig; smallest partition with the \
         requested capacity, 10 GiB; rules out 0 others"
    );
    assert_eq!(
        reason(&cluster, "30Gi"),
        "node n1: only feasible node; gpu-0: only feasible GPU; a share, prefer mig, but no partition can serve the request"
    );
}
