//! Model of the small cluster of `explain`.

use serde_json::{Value, json};

use super::*;
use drava_explanation::fixture::{settings, snapshot};

fn model(snapshot: &Snapshot) -> Value {
    serde_json::to_value(view(snapshot, Some(&settings()), Vec::new())).expect("JSON")
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
    assert_eq!(of("big")["nodes"], json!({"InsufficientMemory": 1}));
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
    let first = reasons.iter().map(|reason| reason["pods"].as_u64());
    assert!(first.is_sorted_by(|one, next| one >= next), "{reasons:?}");
}

#[test]
fn lists_queue_without_reasons_if_it_cannot_explain() {
    let view = view(&snapshot(), None, vec!["a notice".to_owned()]);
    let model = serde_json::to_value(view).expect("JSON");
    assert_eq!(model["notices"], json!(["a notice"]));
    let queue = model["queue"].as_array().expect("a queue");
    assert!(queue.iter().any(|pod| pod["pod"] == "big"));
    assert!(queue.iter().all(|pod| pod.get("summary").is_none()));
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
