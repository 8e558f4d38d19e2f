//! Pods whose devices can be combined in many ways, and their nodes.

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::cluster::{TestCluster, applied};
use crate::fixture::{claim, node, object};

pub(super) const GPUS: usize = 8;

/// Selects no device of another node, which lack the other attributes.
pub(super) const IS_PARTITION: &str = "device.attributes['gpu.drava.dev'].type == 'mig'";

/// Adds a node with GPUs of seven partitions each.
pub(super) fn add_partitioned_node(cluster: &mut TestCluster) {
    cluster.planner.node(applied(node("mig")));
    let slices = |range: std::ops::Range<usize>| -> Value {
        range
            .map(|slice| (format!("memory-slice-{slice}"), json!({"value": "1"})))
            .collect()
    };
    let sets: Vec<Value> = (0..GPUS)
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": slices(0..7)}))
        .collect();
    let device = |gpu: usize, start: usize| {
        json!({
            "name": format!("gpu-{gpu}-mig-1g-5gb-{start}"),
            "attributes": {
                "type": {"string": "mig"}, "profile": {"string": "1g.5gb"},
                "uuid": {"string": format!("GPU-{gpu}")}, "index": {"int": gpu},
            },
            "capacity": {"memory": {"value": "4864Mi"}},
            "consumesCounters": [{"counterSet": format!("gpu-{gpu}"), "counters": slices(start..start + 1)}],
        })
    };
    let devices: Vec<Value> = (0..GPUS)
        .flat_map(|gpu| (0..7).map(move |start| device(gpu, start)))
        .collect();
    let pool = json!({"name": "mig/gpus", "generation": 1, "resourceSliceCount": 2});
    for (name, key, content) in [
        ("counters", "sharedCounters", sets),
        ("devices", "devices", devices),
    ] {
        let mut spec = json!({"driver": "gpu.drava.dev", "nodeName": "mig", "pool": pool});
        spec[key] = json!(content);
        let slice = json!({"metadata": {"name": name, "resourceVersion": "1"}, "spec": spec});
        cluster.planner.slice(applied(object(slice)));
    }
}

pub(super) fn request(name: &str, expression: &str) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": "vgpu.drava.dev", "selectors": [{"cel": {"expression": expression}}],
    }})
}

pub(super) fn add_pod(cluster: &mut TestCluster, name: &str, devices: &Value) {
    add_pod_of(cluster, "default", name, devices);
}

pub(super) fn add_pod_of(cluster: &mut TestCluster, namespace: &str, name: &str, devices: &Value) {
    let mut claim = claim(name, "1Gi");
    claim.metadata.namespace = Some(namespace.to_owned());
    claim.spec = Some(object(json!({"devices": devices})));
    cluster.add_claim(claim);
    let requests = devices["requests"].as_array().unwrap();
    let containers: Vec<Value> = requests
        .iter()
        .map(|request| {
            json!({"name": request["name"], "resources": {"claims": [{"name": name, "request": request["name"]}]}})
        })
        .collect();
    let pod: Pod = object(json!({
        "metadata": {"name": name, "namespace": namespace, "uid": format!("pod-{name}")},
        "spec": {
            "schedulerName": "default-scheduler",
            "resourceClaims": [{"name": name, "resourceClaimName": name}],
            "containers": containers,
        },
        "status": {"phase": "Pending"},
    }));
    cluster.add_pod(pod);
}

/// Binds pods that use this many partitions of each GPU.
pub(super) fn use_partitions(cluster: &mut TestCluster, used: [usize; GPUS]) {
    for (gpu, count) in used.into_iter().enumerate() {
        for index in 0..count {
            let name = format!("held-{gpu}-{index}");
            let expression =
                format!("{IS_PARTITION} && device.attributes['gpu.drava.dev'].index == {gpu}");
            let devices = json!({"requests": [request("w", &expression)]});
            add_pod(cluster, &name, &devices);
            let placed = cluster.settle();
            assert_eq!(placed, [format!("{name} → mig")]);
            cluster.bind((&name, "mig"));
        }
    }
}

/// Adds a pod that needs six partitions of one GPU.
pub(super) fn add_six(cluster: &mut TestCluster) {
    let requests: Vec<Value> = (0..6)
        .map(|index| request(&format!("w{index}"), IS_PARTITION))
        .collect();
    let constraint = json!({"matchAttribute": "gpu.drava.dev/uuid"});
    let devices = json!({"requests": requests, "constraints": [constraint]});
    add_pod(cluster, "six", &devices);
}

/// Adds a node with that many shared GPUs of 80 GiB.
pub(super) fn add_node(cluster: &mut TestCluster, name: &str, gpus: u32) {
    cluster.planner.node(applied(node(name)));
    let device = |gpu: u32| {
        json!({
            "name": format!("gpu-{gpu}-vgpu"), "allowMultipleAllocations": true,
            "attributes": {
                "type": {"string": "vgpu"}, "uuid": {"string": format!("GPU-{name}-{gpu}")}, "index": {"int": gpu},
            },
            "capacity": {"memory": {"value": "80Gi"}},
        })
    };
    let pool = json!({"name": format!("{name}/gpus"), "generation": 1, "resourceSliceCount": 1});
    let devices: Vec<Value> = (0..gpus).map(device).collect();
    let spec =
        json!({"driver": "gpu.drava.dev", "nodeName": name, "pool": pool, "devices": devices});
    // A node that is added again has more GPUs.
    let version = gpus.to_string();
    let slice = json!({"metadata": {"name": name, "resourceVersion": version}, "spec": spec});
    cluster.planner.slice(applied(object(slice)));
}

pub(super) fn shares(name: &str, count: u32, memory: &str) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": "vgpu.drava.dev", "count": count, "capacity": {"requests": {"memory": memory}},
    }})
}

/// Adds the pod `small-` of a node, with a small share there.
pub(super) fn add_small(cluster: &mut TestCluster, node: &str) {
    let mut share = shares("one", 1, "10Gi");
    let of_node = format!("device.attributes['gpu.drava.dev'].uuid.startsWith('GPU-{node}-')");
    share["exactly"]["selectors"] = json!([{"cel": {"expression": of_node}}]);
    add_pod(
        cluster,
        &format!("small-{node}"),
        &json!({"requests": [share]}),
    );
}

/// Adds a pod of this priority that needs half of 17 GPUs and a little more, and nearly half of GPU 0. A search gives up on a
/// node with 16 GPUs: another request is so small that the amounts do not tell that they are too few.
pub(super) fn add_hard(cluster: &mut TestCluster, name: &str, priority: i32) {
    add_hard_and_tiny(cluster, name, priority, "1Mi");
}

/// As [`add_hard`], with that much memory in the smallest request.
pub(super) fn add_hard_and_tiny(cluster: &mut TestCluster, name: &str, priority: i32, tiny: &str) {
    let mut requests: Vec<Value> = (0..17)
        .map(|index| shares(&format!("r{index}"), 1, "41Gi"))
        .collect();
    let mut last = shares("last", 1, "39.5Gi");
    let expression = "device.attributes['gpu.drava.dev'].index == 0";
    last["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
    requests.extend([shares("tiny", 1, tiny), last]);
    add_pod(cluster, name, &json!({"requests": requests}));
    let mut pod = cluster.pods[name].clone();
    let spec = pod.spec.as_mut().unwrap();
    spec.priority = Some(priority);
    cluster.add_pod(pod);
}

/// Adds a pod that runs with 6 GiB of a GPU of the node.
pub(super) fn add_running(
    cluster: &mut TestCluster,
    namespace: &str,
    name: &str,
    (node, gpu): (&str, usize),
) {
    add_pod_of(
        cluster,
        namespace,
        name,
        &json!({"requests": [shares("one", 1, "6Gi")]}),
    );
    let mut claim = cluster.claims[name].clone();
    claim.status = Some(object(json!({
        "allocation": {"devices": {"results": [{
            "request": "one", "driver": "gpu.drava.dev", "pool": format!("{node}/gpus"), "device": format!("gpu-{gpu}-vgpu"),
            "shareID": "s", "consumedCapacity": {"memory": "6Gi"},
        }]}},
        "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}],
    })));
    cluster.observe(claim);
    cluster.bind((name, node));
}
