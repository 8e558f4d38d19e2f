//! Model of the small cluster of `explain`.

use serde_json::{Value, json};

use super::*;
use drava_allocator::cluster::Cluster;
use drava_explanation::fixture::{settings, snapshot};

fn model(snapshot: &Snapshot) -> Value {
    let view = view(
        snapshot,
        &Use::default(),
        Some(&settings()),
        Limits::default(),
        Vec::new(),
    );
    serde_json::to_value(view).expect("JSON")
}

#[test]
fn adds_up_allocations() {
    let model = model(&snapshot());
    assert_eq!(
        model["totals"],
        json!({
            "nodes": 1, "readyNodes": 1, "gpus": {"shared": 1, "whole": 1},
            "memory": {"allocated": 104_u64 << 30, "total": 160_u64 << 30},
            "cores": {"allocated": 130, "total": 200}, "claims": 3,
        })
    );
    let gpu = &model["nodes"][0]["gpus"][0];
    assert_eq!(gpu["state"], "shared");
    assert_eq!(
        gpu["claims"][0],
        json!({
            "name": "default/a", "namespace": "default", "device": "gpu-0-vgpu", "access": "share",
            "memory": 8_u64 << 30, "cores": 30, "pods": ["a-pod"],
        })
    );
    assert_eq!(model["nodes"][0]["gpus"][1]["claims"][0]["access"], "whole");
}

#[test]
fn sums_tenants_with_their_queue() {
    let model = model(&snapshot());
    let tenants = model["tenants"].as_array().expect("tenants");
    assert_eq!(tenants.len(), 1);
    let tenant = &tenants[0];
    assert_eq!(
        (&tenant["whole"], &tenant["shares"], &tenant["pods"]),
        (&json!(1), &json!(2), &json!(2))
    );
    assert_eq!(tenant["memory"], json!(104_u64 << 30));
    let queue = model["queue"].as_array().expect("a queue");
    assert_eq!(tenant["pending"], json!(queue.len()));
}

#[test]
fn gives_reason_of_each_queued_pod() {
    let model = model(&snapshot());
    let queue = model["queue"].as_array().expect("a queue");
    let of = |name: &str| {
        let found = queue.iter().find(|pod| pod["pod"] == name);
        found.unwrap_or_else(|| panic!("{name} is not queued"))
    };
    assert_eq!(of("big")["reason"], "InsufficientMemory");
    assert_eq!(
        of("big")["requests"],
        json!(["vgpu.drava.dev: memory 60Gi"])
    );
    assert_eq!(of("feasible")["state"], "Feasible");
    assert_eq!(of("feasible").get("reason"), None);
    assert_eq!(of("wrong")["reason"], "InvalidRequest");
    assert_eq!(of("early")["state"], "WaitingForClaim");
    assert!(!queue.iter().any(|pod| pod["pod"] == "without-claim"));
    assert!(!queue.iter().any(|pod| pod["pod"] == "a-pod"));
    let reasons = model["reasons"].as_array().expect("reasons");
    let counts: Vec<u64> = reasons
        .iter()
        .filter_map(|reason| reason["pods"].as_u64())
        .collect();
    assert!(counts.is_sorted_by(|one, next| one >= next), "{reasons:?}");
}

#[test]
fn counts_each_queued_pod_once() {
    let mut snapshot = snapshot();
    let gated = json!({
        "metadata": {"name": "gated", "namespace": "default", "uid": "gated"},
        "spec": {
            "schedulingGates": [{"name": "example.com/quota"}],
            "containers": [{"name": "c", "resources": {"claims": [{"name": "gpu"}]}}],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "feasible"}],
        },
    });
    snapshot
        .pods
        .push(serde_json::from_value(gated).expect("a pod"));
    let model = model(&snapshot);
    let queue = model["queue"].as_array().expect("a queue");
    let mut expected: BTreeMap<&str, u64> = BTreeMap::new();
    for pod in queue {
        let code = pod.get("reason").unwrap_or(&pod["state"]);
        *expected.entry(code.as_str().expect("a code")).or_default() += 1;
    }
    for code in ["Gated", "Feasible", "ClaimMissing"] {
        assert!(expected.contains_key(code), "{code}: {queue:?}");
    }
    let reasons = model["reasons"].as_array().expect("reasons");
    let counted: BTreeMap<&str, u64> = reasons
        .iter()
        .map(|reason| {
            assert_ne!(reason["meaning"], "", "{reason}");
            let code = reason["code"].as_str().expect("a code");
            (code, reason["pods"].as_u64().expect("a number"))
        })
        .collect();
    assert_eq!(counted, expected);
}

#[test]
fn gives_reasons_of_controller_if_it_cannot_explain() {
    let mut snapshot = snapshot();
    let pods = snapshot.pods.iter_mut();
    for pod in pods.filter(|pod| pod.metadata.name.as_deref() == Some("big")) {
        let condition = json!({"conditions": [{
            "type": "gpu.drava.dev/Allocated", "status": "False", "reason": "GpuUnschedulable",
            "message": "0/1 nodes: 1 InsufficientMemory (60 GiB requested)",
        }]});
        pod.status = Some(serde_json::from_value(condition).expect("a status"));
    }
    let view = view(
        &snapshot,
        &Use::default(),
        None,
        Limits::default(),
        vec!["a notice".to_owned()],
    );
    let model = serde_json::to_value(view).expect("JSON");
    assert_eq!(model["notices"], json!(["a notice"]));
    let queue = model["queue"].as_array().expect("a queue");
    let of = |name: &str| queue.iter().find(|pod| pod["pod"] == name).expect("queued");
    assert_eq!(
        (&of("big")["reason"], &of("big")["summary"]),
        (
            &json!("InsufficientMemory"),
            &json!("0/1 nodes: 1 InsufficientMemory (60 GiB requested)")
        )
    );
    assert_eq!(of("feasible")["state"], "Unknown");
    assert_eq!(of("feasible").get("reason"), None);
}

#[test]
fn shows_claims_of_user_who_may_not_list_slices() {
    let limits = Limits {
        namespace: Some("default".to_owned()),
        hidden: [Limits::SLICES].into(),
        details: Vec::new(),
    };
    let mut snapshot = snapshot();
    snapshot.cluster = Cluster::default();
    let model = serde_json::to_value(view(&snapshot, &Use::default(), None, limits, Vec::new()))
        .expect("JSON");
    assert_eq!(model["nodes"], json!([]));
    assert_eq!(model["limits"]["hidden"], json!(["resourceslices"]));
    assert_eq!(model["own"].as_array().map(Vec::len), Some(2));
    assert_eq!(model["own"][0]["memory"]["allocated"], json!(24_u64 << 30));
    let tenant = &model["tenants"][0];
    assert_eq!(
        (&tenant["shares"], &tenant["whole"], &tenant["memory"]),
        (&json!(2), &json!(1), &json!(24_u64 << 30))
    );
}

#[test]
fn names_cores_of_requests_gpu_time() {
    let model = model(&snapshot());
    let queue = model["queue"].as_array().expect("a queue");
    let wrong = queue.iter().find(|pod| pod["pod"] == "wrong");
    assert_eq!(
        wrong.expect("queued")["requests"],
        json!(["vgpu.drava.dev: GPU time 101%"])
    );
}

#[test]
fn orders_nodes_by_number() {
    let mut snapshot = snapshot();
    for name in ["n10", "n2"] {
        let slice = json!({"metadata": {"name": name}, "spec": {
            "driver": "gpu.drava.dev", "nodeName": name, "devices": [],
            "pool": {"name": format!("{name}/gpus"), "generation": 1, "resourceSliceCount": 2},
        }});
        let slice = serde_json::from_value(slice).expect("a slice");
        snapshot.cluster.upsert_slice(&slice);
    }
    let model = model(&snapshot);
    let nodes = model["nodes"].as_array().expect("nodes");
    let names: Vec<_> = nodes.iter().map(|node| node["name"].clone()).collect();
    assert_eq!(names, ["n1", "n2", "n10"]);
}

#[test]
fn shows_free_gpu_with_reservation_as_reserved() {
    let mut snapshot = snapshot();
    snapshot
        .cluster
        .remove_claim(&("default".to_owned(), "w".to_owned()));
    let reserve = |claim: &str| {
        let reservations = json!([{
            "namespace": "default", "pod": "big", "claim": claim, "purpose": "HeadOfQueue",
            "devices": [{"request": "gpu", "pool": "n1/gpus", "device": "gpu-1-vgpu"}],
        }]);
        serde_json::from_value(reservations).expect("reservations")
    };
    snapshot.reservations = reserve("big");
    let reserved = &model(&snapshot)["nodes"][0]["gpus"][1];
    assert_eq!(reserved["state"], "reserved");
    assert_eq!(reserved["reserved"], json!(["default/big"]));
    let queue = model(&snapshot)["queue"].clone();
    let mut queue = queue.as_array().into_iter().flatten();
    let big = queue.find(|pod| pod["pod"] == "big");
    assert_eq!(
        big.expect("queued")["reserved"],
        json!(["gpu-1-vgpu of pool n1/gpus"])
    );
    // The leader has not removed the reservation of an allocated claim so far.
    snapshot.reservations = reserve("a");
    assert_eq!(model(&snapshot)["nodes"][0]["gpus"][1]["state"], "free");
}

#[test]
fn shows_faults_and_cordons_of_whole_gpus() {
    let rule = |device: &str, key: &str| {
        let rule = json!({
            "metadata": {"name": format!("{device}-{key}").replace('/', "-")},
            "spec": {
                "deviceSelector": {"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device},
                "taint": {"key": format!("gpu.drava.dev/{key}"), "value": "v", "effect": "NoSchedule"},
            },
        });
        serde_json::from_value(rule).expect("a rule")
    };
    let mut snapshot = snapshot();
    snapshot
        .cluster
        .upsert_taint_rule(&rule("gpu-0-vgpu", "unhealthy"));
    snapshot
        .cluster
        .upsert_taint_rule(&rule("gpu-1", "cordoned"));
    let first = model(&snapshot);
    let gpus = &first["nodes"][0]["gpus"];
    assert_eq!(gpus[0]["state"], "unhealthy");
    assert_eq!(
        gpus[0]["taints"],
        json!([{"kind": "unhealthy", "taint": "gpu.drava.dev/unhealthy=v:NoSchedule", "isWholeGpu": true}])
    );
    assert_eq!(gpus[1]["state"], "whole", "its claim stays");
    snapshot
        .cluster
        .remove_claim(&("default".to_owned(), "w".to_owned()));
    let second = model(&snapshot);
    assert_eq!(second["nodes"][0]["gpus"][1]["state"], "excluded");
}

#[test]
fn shows_conditions_of_nodes() {
    let mut snapshot = snapshot();
    let mut set = |status: &str, unschedulable: bool| {
        let node = json!({
            "metadata": {"name": "n1"}, "spec": {"unschedulable": unschedulable},
            "status": {"conditions": [{"type": "Ready", "status": status}]},
        });
        let node = serde_json::from_value(node).expect("a node");
        snapshot.cluster.upsert_node(&node);
        model(&snapshot)["nodes"][0]["condition"].clone()
    };
    assert_eq!(set("True", false), "ready");
    assert_eq!(set("True", true), "cordoned");
    assert_eq!(set("False", true), "notReady");
    snapshot.cluster.remove_node("n1");
    assert_eq!(model(&snapshot)["nodes"][0]["condition"], "unknown");
}
