//! Pods whose devices can be combined in many ways.

use std::time::{Duration, Instant};

use drava_allocator::turn;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::cluster::{TestCluster, applied};
use crate::fixture::{claim, node, object};

const GPUS: usize = 8;
/// Selects no device of another node, which lack the other attributes.
const IS_PARTITION: &str = "device.attributes['gpu.drava.dev'].type == 'mig'";

/// Adds a node with GPUs of seven partitions each.
fn add_partitioned_node(cluster: &mut TestCluster) {
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

fn request(name: &str, expression: &str) -> Value {
    json!({"name": name, "exactly": {
        "deviceClassName": "vgpu.drava.dev", "selectors": [{"cel": {"expression": expression}}],
    }})
}

fn add_pod(cluster: &mut TestCluster, name: &str, devices: &Value) {
    let mut claim = claim(name, "1Gi");
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
        "metadata": {"name": name, "namespace": "default", "uid": format!("pod-{name}")},
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
fn use_partitions(cluster: &mut TestCluster, used: [usize; GPUS]) {
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
fn add_six(cluster: &mut TestCluster) {
    let requests: Vec<Value> = (0..6)
        .map(|index| request(&format!("w{index}"), IS_PARTITION))
        .collect();
    let constraint = json!({"matchAttribute": "gpu.drava.dev/uuid"});
    let devices = json!({"requests": requests, "constraints": [constraint]});
    add_pod(cluster, "six", &devices);
}

#[test]
fn finds_gpu_with_six_partitions_at_once() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, [2, 2, 2, 2, 2, 2, 2, 0]);
    add_six(&mut cluster);
    let start = Instant::now();
    assert_eq!(cluster.settle(), ["six → mig"]);
    let (time, units) = (start.elapsed(), turn::checked());
    assert!(units < 5_000, "{units} units of work in {time:?}");
}

#[test]
fn search_for_victims_is_as_limited_as_decision() {
    let mut cluster = TestCluster::new(&["n1"]);
    add_partitioned_node(&mut cluster);
    use_partitions(&mut cluster, [2; GPUS]);
    add_six(&mut cluster);
    cluster.add_pod_with_claim("other", "8Gi");
    let start = Instant::now();
    assert_eq!(cluster.settle(), ["other → n1"]);
    let time = start.elapsed();
    assert!(time < Duration::from_secs(20), "{time:?}");
    let messages = cluster.messages_of("Pod/six");
    assert!(!messages.is_empty(), "the pod has its reason");
    assert!(
        messages.iter().all(|text| !text.contains("SearchLimit")),
        "{messages:?}"
    );
}
