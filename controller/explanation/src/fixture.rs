//! A small cluster for tests.

use drava_allocator::placement::Policies;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::names;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use crate::explain::Settings;
use crate::snapshot::Snapshot;

/// The default settings of the controller.
#[must_use]
pub fn settings() -> Settings {
    Settings {
        policies: Policies {
            node: NodePlacementPolicy::Binpack,
            gpu: GpuPlacementPolicy::Binpack,
        },
        schedulers: vec!["default-scheduler".to_owned()],
    }
}

pub(crate) fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("valid fixture")
}

/// A node with two GPUs: claims a and b share the first, claim w has the whole second.
#[must_use]
pub fn snapshot() -> Snapshot {
    snapshot_with(claims())
}

/// Adds a condition that is True to the status of a claim's device, if that is a share.
fn add_condition(claim: &mut ResourceClaim, kind: &str, reason: &str) -> bool {
    let mut value = serde_json::to_value(&*claim).expect("JSON");
    let result = value["status"]["allocation"]["devices"]["results"][0].clone();
    if result["shareID"].is_null() {
        return false;
    }
    let before = &value["status"]["devices"][0]["conditions"];
    let mut conditions = before.as_array().cloned().unwrap_or_default();
    conditions.push(json!({
        "type": kind, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
    }));
    value["status"]["devices"] = json!([{
        "driver": names::DRIVER, "pool": result["pool"], "device": result["device"], "shareID": result["shareID"],
        "conditions": conditions,
    }]);
    *claim = serde_json::from_value(value).expect("a claim");
    true
}

/// Marks a claim as idle since the beginning of 2026, if it has a share.
pub fn idle(claim: &mut ResourceClaim) {
    add_condition(claim, "Idle", "NoGpuTime");
}

/// Suspends a claim for a pod, if it has a share.
pub fn suspend(claim: &mut ResourceClaim) {
    if !add_condition(claim, "Suspended", "Suspended") {
        return;
    }
    let mut value = serde_json::to_value(&*claim).expect("JSON");
    value["metadata"]["labels"][names::SUSPEND_LABEL] = json!(names::SUSPEND);
    value["metadata"]["annotations"][names::SUSPENDED_FOR_ANNOTATION] = json!("pod default/urgent");
    *claim = serde_json::from_value(value).expect("a claim");
}

/// Makes a claim a companion of the base with a UID, which goes with a pod whose UID is its name.
pub fn make_companion(claim: &mut ResourceClaim, base: &str, pod: &str) {
    let label = (names::COMPANION_LABEL.to_owned(), base.to_owned());
    claim.metadata.labels = Some([label].into());
    let owner =
        json!([{"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": pod, "controller": true}]);
    claim.metadata.owner_references = Some(object(owner));
}

fn claims() -> Vec<ResourceClaim> {
    vec![
        claim(
            "a",
            "vgpu",
            &json!({"memory": "8Gi", "cores": "30"}),
            Some(("gpu-0-vgpu", Some("a-pod"))),
        ),
        claim(
            "b",
            "vgpu",
            &json!({"memory": "16Gi", "cores": "0"}),
            Some(("gpu-0-vgpu", None)),
        ),
        claim("w", "gpu", &json!(null), Some(("gpu-1", Some("w-pod")))),
        claim("big", "vgpu", &json!({"memory": "60Gi"}), None),
        claim("feasible", "vgpu", &json!({"memory": "1Gi"}), None),
        claim("wrong", "vgpu", &json!({"cores": "101"}), None),
        claim("open", "open", &json!(null), None),
    ]
}

/// Returns the cluster with these claims instead of its own.
pub fn snapshot_with(claims: Vec<ResourceClaim>) -> Snapshot {
    let node = json!({"metadata": {"name": "n1"}, "status": {
        "allocatable": {"cpu": "8", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}],
    }});
    let class = |kind: &str| {
        object(
            json!({"metadata": {"name": format!("{kind}.drava.dev")}, "spec": {"selectors": [{"cel": {"expression":
            format!(r#"device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "{kind}""#)}}]}}),
        )
    };
    let mut pods: Vec<Pod> = ["big", "feasible", "wrong", "b"]
        .iter()
        .map(|name| pod(name, Some(name)))
        .collect();
    pods.push(pod("open", Some("open")));
    let mut volcano = pod("volcano", Some("feasible"));
    volcano.spec.as_mut().expect("a spec").scheduler_name = Some("volcano".to_owned());
    pods.push(volcano);
    let mut extended = pod("extended", None);
    extended.spec.as_mut().expect("a spec").containers[0].resources = Some(object(
        json!({"limits": {"deviceclass.resource.kubernetes.io/gpu.drava.dev": "1"}}),
    ));
    pods.push(extended);
    pods.push(pod("without-claim", None));
    pods.push(pod("early", Some("missing")));
    let mut placed = pod("a-pod", Some("a"));
    placed.spec.as_mut().expect("a spec").node_name = Some("n1".to_owned());
    pods.push(placed);
    Snapshot::new(
        &[object(node)],
        &slices(),
        &[],
        &[
            class("gpu"),
            class("vgpu"),
            object(json!({"metadata": {"name": "open.drava.dev"}, "spec": {}})),
        ],
        claims,
        pods,
    )
}

/// The slices of its node: two GPUs, each whole and for shares, with counters.
pub fn slices() -> [k8s_openapi::api::resource::v1::ResourceSlice; 2] {
    let consumes = |gpu: u32| json!([{"counterSet": format!("gpu-{gpu}"), "counters": {"gpu": {"value": "1"}}}]);
    let devices: Vec<_> = (0..2)
        .flat_map(|gpu| {
            let attributes = |kind: &str| {
                json!({"type": {"string": kind}, "uuid": {"string": format!("GPU-{gpu}")}, "productName": {"string": "NVIDIA H100"}})
            };
            [
                json!({"name": format!("gpu-{gpu}"), "attributes": attributes("gpu"), "consumesCounters": consumes(gpu),
                    "capacity": {"memory": {"value": "80Gi"}, "cores": {"value": "100"}}}),
                json!({"name": format!("gpu-{gpu}-vgpu"), "attributes": attributes("vgpu"), "consumesCounters": consumes(gpu), "allowMultipleAllocations": true,
                    "capacity": {
                        "memory": {"value": "80Gi"},
                        "cores": {"value": "100", "requestPolicy": {"default": "0", "validRange": {"min": "0"}}},
                        "slots": {"value": "10", "requestPolicy": {"default": "1", "validRange": {"min": "1"}}},
                    }}),
            ]
        })
        .collect();
    let counters: Vec<_> = (0..2)
        .map(|gpu| json!({"name": format!("gpu-{gpu}"), "counters": {"gpu": {"value": "1"}}}))
        .collect();
    let pool = json!({"name": "n1/gpus", "generation": 1, "resourceSliceCount": 2});
    [
        object(json!({"metadata": {"name": "s0"}, "spec": {
            "driver": "gpu.drava.dev", "nodeName": "n1", "pool": pool, "sharedCounters": counters,
        }})),
        object(json!({"metadata": {"name": "s1"}, "spec": {
            "driver": "gpu.drava.dev", "nodeName": "n1", "pool": pool, "devices": devices,
        }})),
    ]
}

fn claim(
    name: &str,
    class: &str,
    capacity: &Value,
    allocated: Option<(&str, Option<&str>)>,
) -> ResourceClaim {
    let mut exactly = json!({"deviceClassName": format!("{class}.drava.dev")});
    if capacity.is_object() {
        exactly["capacity"] = json!({"requests": capacity});
    }
    let mut claim = json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    });
    if let Some((device, pod)) = allocated {
        let mut result = json!({"request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device});
        if capacity.is_object() {
            let mut consumed = capacity.clone();
            consumed["slots"] = json!("1");
            result["shareID"] = json!("s");
            result["consumedCapacity"] = consumed;
        }
        claim["status"] = json!({"allocation": {"devices": {"results": [result]}}});
        if let Some(pod) = pod {
            claim["status"]["reservedFor"] = json!([{"resource": "pods", "name": pod, "uid": pod}]);
            let opaque = json!({"driver": "controller.gpu.drava.dev", "parameters": {
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "PlacementRecord", "podUID": pod,
                "reason": "node n1: only feasible node; gpu-0:\u{1b} binpack: 40% of memory allocated, gpu-1 0%",
            }});
            claim["status"]["allocation"]["devices"]["config"] =
                json!([{"source": "FromClass", "opaque": opaque}]);
        }
    }
    object(claim)
}

fn pod(name: &str, claim: Option<&str>) -> Pod {
    let claims: Vec<_> = claim
        .iter()
        .map(|claim| json!({"name": "gpu", "resourceClaimName": claim}))
        .collect();
    let containers: Vec<_> = claim.iter().map(|_| json!({"name": "gpu"})).collect();
    object(json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"containers": [{"name": "c", "resources": {"claims": containers}}], "resourceClaims": claims},
    }))
}
