//! Settings of GpuPolicies that refine the placement policies: weights, seed, and preference for shares or partitions.

use drava_api::policy::GpuPolicy;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::{BINPACK, SPREAD, allocate};
use crate::cluster::Cluster;
use crate::fixture::{cluster, node, object, pod_request, request, share};

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

#[test]
fn weighs_memory_cores_and_slots() {
    for (weights, device) in [
        (json!({"memory": 1}), "n1/gpu-0-vgpu"),
        (json!({"cores": 1}), "n1/gpu-1-vgpu"),
        (json!({"memory": 3, "cores": 1}), "n1/gpu-0-vgpu"),
        (json!({"memory": 1, "cores": 3}), "n1/gpu-1-vgpu"),
    ] {
        let mut cluster = cluster(&[("n1", &[80, 80])]);
        allocate(&mut cluster, &[share("a", "40Gi", "10")], SPREAD).unwrap();
        allocate(&mut cluster, &[share("b", "8Gi", "50")], SPREAD).unwrap();
        set_policy(&mut cluster, &json!({"weights": weights}));
        let placed = allocate(&mut cluster, &[share("c", "1Gi", "1")], BINPACK);
        assert_eq!(placed.unwrap(), [device], "{weights}");
    }
    // Two small shares use more slots than one large share.
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    for (name, memory, policies) in [
        ("a", "60Gi", BINPACK),
        ("b", "1Gi", SPREAD),
        ("c", "1Gi", SPREAD),
    ] {
        allocate(&mut cluster, &[share(name, memory, "0")], policies).unwrap();
    }
    set_policy(&mut cluster, &json!({"weights": {"slots": 1}}));
    let request = pod_request(&cluster, &[share("d", "1Gi", "0")]);
    let placement = cluster.decide(&request, BINPACK).unwrap();
    assert_eq!(
        placement.reason(&placement.claims[0]),
        "node n2: binpack: 20% allocated by weight, n1 10%; gpu-0: only feasible GPU"
    );
}

#[test]
fn orders_equal_nodes_and_gpus_by_seed() {
    let place = |seed: Option<u32>| {
        let mut cluster = cluster(&[
            ("n1", &[80, 80, 80, 80]),
            ("n2", &[80, 80, 80, 80]),
            ("n3", &[80, 80, 80, 80]),
        ]);
        set_policy(&mut cluster, &json!({"seed": seed}));
        let request = pod_request(&cluster, &[share("a", "10Gi", "0")]);
        let by_all = cluster.explain(&request, SPREAD).unwrap();
        let placed = allocate(&mut cluster, &[share("a", "10Gi", "0")], SPREAD).unwrap();
        assert_eq!(placed[0].split_once('/').unwrap().0, by_all.node);
        let reason = by_all.reason(&by_all.claims[0]);
        (placed[0].clone(), reason)
    };
    let places: std::collections::BTreeSet<String> =
        (0..40).map(|seed| place(Some(seed)).0).collect();
    assert!(places.len() >= 9, "{places:?}");
    assert_eq!(place(Some(7)), place(Some(7)));
    assert_eq!(place(None).0, "n1/gpu-0-vgpu");
    let (_, reason) = place(Some(7));
    assert_eq!(reason.matches(", first by seed").count(), 2, "{reason}");
}
