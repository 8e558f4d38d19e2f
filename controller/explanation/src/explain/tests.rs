//! All states of a pod, in one small cluster.

use serde_json::json;

use super::*;
use crate::fixture::{object, settings, snapshot};

fn explained(name: &str) -> Report {
    super::pod(&snapshot(), "default", name, &settings()).unwrap()
}

#[test]
fn reports_each_state() {
    let cases = [
        (
            "without-claim",
            State::NoGpuRequest,
            "the pod requests no devices of gpu.drava.dev",
        ),
        (
            "a-pod",
            State::Placed,
            "bound to node n1 with gpu-0-vgpu of pool n1/gpus",
        ),
        (
            "b",
            State::Allocated,
            "allocated gpu-0-vgpu of pool n1/gpus; kube-scheduler has not bound the pod",
        ),
        (
            "early",
            State::WaitingForClaim,
            "claim missing does not exist",
        ),
        ("feasible", State::Feasible, "node n1 is feasible"),
        (
            "wrong",
            State::Rejected,
            "InvalidRequest: claim default/wrong: request gpu: capacity cores: 101 exceeds 100",
        ),
        (
            "open",
            State::Rejected,
            "DriverUnspecified: claim default/open: request gpu: no selector of device class open.drava.dev",
        ),
        (
            "volcano",
            State::Rejected,
            "SchedulerNotServed: the controller allocates for pods of default-scheduler, this pod has schedulerName volcano",
        ),
        (
            "extended",
            State::Rejected,
            "ExtendedResource: container c requests deviceclass.resource.kubernetes.io/gpu.drava.dev",
        ),
        (
            "big",
            State::Infeasible,
            "0/1 nodes: 1 InsufficientMemory (most free memory 56 GiB on n1/gpu-0)",
        ),
    ];
    for (name, state, summary) in cases {
        let report = explained(name);
        assert_eq!(report.state, state, "{name}");
        assert!(
            report.summary.starts_with(summary),
            "{name}: {}",
            report.summary
        );
    }
}

#[test]
fn lists_blockers_by_gpu() {
    assert_eq!(
        explained("big").text(),
        "\
pod default/big: 0/1 nodes: 1 InsufficientMemory (most free memory 56 GiB on n1/gpu-0)

NODE   DEVICE       REASON               DETAIL
n1     gpu-0-vgpu   InsufficientMemory   most free memory 56 GiB on n1/gpu-0
n1     gpu-1-vgpu   ExclusiveConflict    n1/gpu-1 is allocated exclusively
"
    );
    let json = serde_json::to_value(explained("big")).unwrap();
    assert_eq!(json["state"], "Infeasible");
    assert_eq!(json["reasons"], json!({"InsufficientMemory": 1}));
}

#[test]
fn explains_placement_with_recorded_reason() {
    assert_eq!(
        explained("a-pod").text(),
        "\
pod default/a-pod: bound to node n1 with gpu-0-vgpu of pool n1/gpus
claim default/a, at allocation: node n1: only feasible node; gpu-0:  binpack: 40% of memory allocated, gpu-1 0%
"
    );
    let json = serde_json::to_value(explained("a-pod")).unwrap();
    assert_eq!(json["placements"][0]["claim"], "default/a");
}

#[test]
fn reports_missing_placement_reason() {
    let text = explained("b").text();
    assert!(
        text.ends_with(
            "claim default/b: no reason recorded; the controller has not allocated the claim\n"
        ),
        "{text}"
    );
}

#[test]
fn suggests_namespace_for_unknown_pod() {
    let error = super::pod(&snapshot(), "default", "nope", &settings()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot find pod nope in namespace default; use -n for another namespace"
    );
}

#[test]
fn names_quota_with_figures() {
    let mut snapshot = snapshot();
    let quota = object(json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota", "metadata": {"name": "team-a"},
        "spec": {"namespaces": ["default"], "limit": {"memory": "104Gi"}},
    }));
    snapshot.cluster.upsert_quota(&quota);
    let report = super::pod(&snapshot, "default", "feasible", &settings()).expect("a report");
    assert_eq!(report.state, State::Infeasible);
    assert_eq!(
        report.summary,
        "0/1 nodes: 1 QuotaExceeded (quota team-a: memory 104 GiB of 104 GiB used, 1 GiB requested)"
    );
}
