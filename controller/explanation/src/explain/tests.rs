//! All states of a pod, in one small cluster.

use drava_allocator::observed::Observed;
use serde_json::json;

use super::*;
use crate::fixture::{object, settings, snapshot};

fn explained(name: &str) -> Report {
    super::pod(&mut snapshot(), "default", name, &settings()).unwrap()
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
    let error = super::pod(&mut snapshot(), "default", "nope", &settings()).unwrap_err();
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
    let report = super::pod(&mut snapshot, "default", "feasible", &settings()).expect("a report");
    assert_eq!(report.state, State::Infeasible);
    assert_eq!(
        report.summary,
        "0/1 nodes: 1 QuotaExceeded (quota team-a: memory 104 GiB of 104 GiB used, 1 GiB requested)"
    );
}

/// Explains the pod `b`, whose claim is allocated, after a change of the snapshot.
fn explained_after(change: impl FnOnce(&mut Snapshot)) -> Report {
    let mut snapshot = snapshot();
    change(&mut snapshot);
    super::pod(&mut snapshot, "default", "b", &settings()).unwrap()
}

fn claim_of_b(snapshot: &mut Snapshot) -> &mut ResourceClaim {
    let pod = snapshot.pods.iter().find(|pod| is(pod, "default", "b"));
    let name = pod::claims(pod.unwrap()).find_map(|(_, object)| object.map(str::to_owned));
    let mut claims = snapshot.claims.iter_mut();
    claims.find(|claim| claim.metadata.name == name).unwrap()
}

#[test]
fn claim_in_deletion_is_no_allocation() {
    let report = explained_after(|snapshot| {
        claim_of_b(snapshot).metadata.deletion_timestamp =
            Some(object(json!("2026-01-01T00:00:00Z")));
    });
    assert_eq!(report.state, State::WaitingForClaim);
    assert!(
        report.summary.contains("is being deleted"),
        "{}",
        report.summary
    );
    assert_eq!(report.reason, Some(Reason::ClaimMissing));
}

#[test]
fn allocated_pod_with_our_gate_waits_for_the_controller() {
    let report = explained_after(|snapshot| {
        let mut pods = snapshot.pods.iter_mut();
        let pod = pods.find(|pod| is(pod, "default", "b")).unwrap();
        let gates = vec![object(json!({"name": names::ALLOCATION_GATE}))];
        pod.spec.as_mut().unwrap().scheduling_gates = Some(gates);
    });
    assert_eq!(report.state, State::Allocated);
    assert!(
        report
            .summary
            .contains("the controller removes the scheduling gate")
            && !report.summary.contains("kube-scheduler"),
        "{}",
        report.summary
    );
}

#[test]
fn names_unreadable_claim() {
    let report = explained_after(|snapshot| {
        let claim = claim_of_b(snapshot);
        let name = claim.metadata.name.take().unwrap();
        snapshot.unreadable = vec![(
            "ResourceClaim".to_owned(),
            format!("default/{name}: spec: odd"),
        )];
    });
    assert!(
        report.summary.contains("cannot be read (spec: odd)"),
        "{}",
        report.summary
    );
}

/// Explains a pod whose condition has this status and message.
fn explained_with_condition(name: &str, status: &str, message: &str) -> Report {
    let mut snapshot = snapshot();
    let mut pods = snapshot.pods.iter_mut();
    let pod = pods.find(|pod| is(pod, "default", name)).unwrap();
    pod.status = Some(object(json!({"phase": "Pending", "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"},
        {"type": "gpu.drava.dev/Allocated", "status": status, "reason": "GpuUnschedulable", "message": message},
    ]})));
    pod.trim();
    super::pod(&mut snapshot, "default", name, &settings()).unwrap()
}

#[test]
fn names_reservation_for_another_pod() {
    let text = "Reserved: the pod fits on n1, but its devices are reserved for pod default/head, the head of the queue";
    let report = explained_with_condition("feasible", "False", text);
    assert_eq!(
        (report.state, report.summary.as_str()),
        (State::Waiting, text)
    );
    assert_eq!(report.reason, Some(Reason::Reserved));
    assert_eq!(report.text(), format!("pod default/feasible: {text}\n"));
    let report = explained_with_condition("big", "False", text);
    assert_eq!(
        (report.state, report.summary.as_str()),
        (State::Infeasible, text)
    );
    assert!(!report.blockers.is_empty(), "what the cluster shows");
    let mut own = explained_with_condition("feasible", "False", text);
    own.hide_other_namespaces();
    assert_eq!(own.summary, text);
    let mut other =
        explained_with_condition("feasible", "False", &text.replace("default/", "other/"));
    other.hide_other_namespaces();
    assert_eq!(
        other.summary,
        "Reserved: the pod fits on n1, but its devices are reserved for a pod of another namespace, the head of the queue"
    );
    let two = text.replace("default/head", "default/head and pod other/x");
    let mut two = explained_with_condition("feasible", "False", &two);
    two.hide_other_namespaces();
    assert_eq!(two.summary, other.summary);
    let gang = text.replace("pod default/head", "gang other/g");
    let mut gang = explained_with_condition("feasible", "False", &gang);
    gang.hide_other_namespaces();
    assert!(
        gang.summary.contains("for a gang of another namespace,"),
        "{}",
        gang.summary
    );
}

#[test]
fn condition_about_nodes_gives_way_to_the_cluster() {
    let full = "0/1 nodes: 1 InsufficientMemory (most free memory 1 GiB on n1/gpu-0)";
    let report = explained_with_condition("feasible", "False", full);
    assert_eq!(report.state, State::Feasible, "memory was freed meanwhile");
    let report = explained_with_condition("feasible", "True", "Reserved: for another pod");
    assert_eq!(report.state, State::Feasible);
}

#[test]
fn names_class_that_is_misspelled() {
    let mut snapshot = snapshot();
    let claim = snapshot.claims.iter_mut();
    let mut claim = claim.filter(|claim| claim.metadata.name.as_deref() == Some("feasible"));
    claim.next().unwrap().spec = Some(object(json!({"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.io"}},
    ]}})));
    let report = super::pod(&mut snapshot, "default", "feasible", &settings()).unwrap();
    assert_eq!(report.state, State::Rejected);
    assert_eq!(
        report.summary,
        "UnknownClass: claim default/feasible: request gpu: device class vgpu.drava.io does not exist; did you mean \
         vgpu.drava.dev?"
    );
}

#[test]
fn names_template_that_is_missing() {
    let mut snapshot = snapshot();
    let pod = snapshot
        .pods
        .iter_mut()
        .find(|pod| is(pod, "default", "feasible"));
    let spec = pod.unwrap().spec.as_mut().unwrap();
    spec.resource_claims = Some(vec![object(
        json!({"name": "gpu", "resourceClaimTemplateName": "nosuch"}),
    )]);
    let summary = |snapshot: &mut Snapshot| {
        super::pod(snapshot, "default", "feasible", &settings())
            .unwrap()
            .summary
    };
    assert!(
        summary(&mut snapshot)
            .starts_with("claim gpu is not created from its template nosuch; create")
    );
    snapshot.templates = Some([].into());
    assert!(summary(&mut snapshot).starts_with("claim template nosuch does not exist"));
    snapshot.templates = Some([("default".to_owned(), "nosuch".to_owned())].into());
    assert!(
        summary(&mut snapshot)
            .starts_with("claim gpu is not created from its template nosuch; the event")
    );
}

#[test]
fn gives_no_gang_member_a_time() {
    let mut snapshot = snapshot();
    let pod = snapshot
        .pods
        .iter_mut()
        .find(|pod| is(pod, "default", "feasible"));
    pod.unwrap().metadata.annotations =
        Some([(names::GANG_ANNOTATION.to_owned(), "g".to_owned())].into());
    let report = super::pod(&mut snapshot, "default", "feasible", &settings()).unwrap();
    assert_eq!(
        report.summary,
        "node n1 is feasible for this pod; its gang g is allocated when enough members fit at the same time, so explain the \
         others, too"
    );
}

#[test]
fn notes_likely_mistakes() {
    let mut snapshot = snapshot();
    let mut pods = snapshot.pods.iter_mut();
    let pod = pods.find(|pod| is(pod, "default", "b")).unwrap();
    pod.spec.as_mut().unwrap().containers[0].resources = None;
    let text = super::pod(&mut snapshot, "default", "b", &settings())
        .unwrap()
        .text();
    assert!(
        text.ends_with("note: spec.resourceClaims[0]: no container names claim gpu, so none gets its GPUs; add resources: \
                        {claims: [{name: gpu}]} to a container\n"),
        "{text}"
    );
}
