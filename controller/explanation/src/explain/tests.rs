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

/// Of a pod that was bound with such claims, the node driver refuses to prepare them.
#[test]
fn explains_container_with_spatial_and_other_claim() {
    let mut snapshot = snapshot();
    let spatial = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": "spatial"});
    let config = json!([{"source": "FromClass", "opaque": {"driver": "gpu.drava.dev", "parameters": spatial}}]);
    let allocation = snapshot.claims[0]
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut();
    allocation.unwrap().devices.as_mut().unwrap().config = Some(object(config));
    let mut pod = |name: &str, with_other: bool| {
        let pods = &mut snapshot.pods;
        let pod = pods
            .iter_mut()
            .find(|pod| pod.metadata.name.as_deref() == Some(name));
        let spec = pod.unwrap().spec.as_mut().unwrap();
        let entries = spec.resource_claims.as_mut().unwrap();
        entries.push(object(json!({"name": "other", "resourceClaimName": "b"})));
        if with_other {
            let resources = spec.containers[0].resources.as_mut().unwrap();
            resources
                .claims
                .as_mut()
                .unwrap()
                .push(object(json!({"name": "other"})));
        }
        super::pod(&mut snapshot, "default", name, &settings()).unwrap()
    };
    assert_eq!(pod("a-pod", false).state, State::Placed);
    let report = pod("a-pod", true);
    assert_eq!(report.state, State::Rejected);
    let start =
        "IncompatibleClaims: claim default/a: the container \"c\" has the claim default/b too";
    assert!(report.summary.starts_with(start), "{}", report.summary);
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
}

/// Reserves the free memory of GPU 0 for a claim of these pods.
fn reserved_for(owners: &[(&str, &str)]) -> Snapshot {
    let mut snapshot = snapshot();
    for (namespace, pod) in owners {
        let mut claim = snapshot.claims[3].clone();
        claim.metadata.namespace = Some((*namespace).to_owned());
        claim.metadata.name = Some((*pod).to_owned());
        claim.metadata.uid = Some(format!("{namespace}-{pod}"));
        snapshot.claims.push(claim);
        snapshot.reservations.push(object(json!({
            "namespace": namespace, "pod": pod, "claim": pod, "purpose": "HeadOfQueue",
            "devices": [{"request": "gpu", "pool": "n1/gpus", "device": "gpu-0-vgpu",
                "capacity": {"memory": "56Gi", "cores": "0", "slots": "1"}}],
        })));
    }
    snapshot
}

/// Who may read one namespace learns no name of another, whatever the condition of the pod says.
#[test]
fn hides_for_whom_devices_are_reserved() {
    let condition = "Reserved: the pod fits on n1, but its devices are reserved for a pod of another namespace, the head";
    for (owners, named, hidden) in [
        (&[("default", "x")][..], "pod default/x", "pod default/x"),
        (
            &[("other", "secret")],
            "pod other/secret",
            "a pod of another namespace",
        ),
        (
            &[("default", "x"), ("other", "secret"), ("third", "secret")],
            "pod default/x and pod other/secret and pod third/secret",
            "a pod of another namespace and pod default/x",
        ),
    ] {
        for message in [None, Some(condition)] {
            let mut snapshot = reserved_for(owners);
            if let Some(message) = message {
                let mut pods = snapshot.pods.iter_mut();
                let pod = pods.find(|pod| is(pod, "default", "feasible")).unwrap();
                pod.status = Some(object(json!({"conditions": [
                    {"type": "gpu.drava.dev/Allocated", "status": "False", "message": message},
                ]})));
            }
            let mut report = super::pod(&mut snapshot, "default", "feasible", &settings()).unwrap();
            let text = |owners: &str| {
                format!(
                    "Reserved: the pod fits on n1, but its devices are reserved for {owners}, which waits for others to end"
                )
            };
            assert_eq!(report.state, State::Waiting);
            assert_eq!(report.summary, text(named));
            report.hide_other_namespaces();
            assert_eq!(report.summary, text(hidden));
            assert!(!report.text().contains("secret"), "{}", report.text());
        }
    }
}

#[test]
fn reads_what_the_controller_and_the_condition_say() {
    let mut snapshot = snapshot();
    let pod = snapshot
        .pods
        .iter_mut()
        .find(|pod| is(pod, "default", "feasible"));
    let pod = pod.unwrap();
    for (conditions, state, summary) in [
        (
            json!([{"type": names::ALLOCATED_CONDITION, "status": "False", "message": "0/1 nodes:\u{1b} full"}]),
            State::Waiting,
            "0/1 nodes:  full",
        ),
        (
            json!([{"type": names::ALLOCATED_CONDITION, "status": "True", "message": ""}]),
            State::Allocated,
            "allocated; kube-scheduler has not bound the pod, check the pod's events",
        ),
        (
            json!([]),
            State::Unknown,
            "the pod has no condition gpu.drava.dev/Allocated: it requests no devices of gpu.drava.dev, or the controller has \
             not decided",
        ),
    ] {
        pod.status = Some(object(json!({"conditions": conditions})));
        let report = Report::of_condition(pod);
        assert_eq!((report.state, report.summary.as_str()), (state, summary));
    }
    for state in State::ALL {
        let status = PlacementExplanationStatus {
            state: state.as_str().to_owned(),
            summary: "full".to_owned(),
            changes: vec!["request at most 1Mi".to_owned()],
            reserved: vec!["gpu-0 of pool n1/gpus".to_owned()],
            advice: vec!["8 is 8 bytes".to_owned()],
            ..PlacementExplanationStatus::default()
        };
        let report = Report::of_status(pod, status).unwrap();
        assert_eq!(report.state, state);
        assert_eq!(
            report.text(),
            "pod default/feasible: full\n\npod default/feasible fits after one of these changes:\n- request at most 1Mi\n\
             reserved for the pod until others end: gpu-0 of pool n1/gpus\nnote: 8 is 8 bytes\n"
        );
    }
    let missing = object(json!({"state": "PodMissing", "summary": "pod x does not exist"}));
    assert_eq!(Report::of_status(pod, missing), None);
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
fn class_that_does_not_exist_is_a_reason() {
    let mut snapshot = snapshot();
    let claims = &mut snapshot.claims;
    let claim = claims
        .iter_mut()
        .find(|claim| claim.metadata.name.as_deref() == Some("feasible"));
    claim.unwrap().spec = Some(object(json!({"devices": {"requests": [
        {"name": "gpu", "exactly": {"deviceClassName": "lab.example.com"}},
    ]}})));
    let report = super::pod(&mut snapshot, "default", "feasible", &settings()).unwrap();
    assert_eq!(
        (report.state, report.summary.as_str()),
        (
            State::Rejected,
            "UnknownClass: claim default/feasible: request gpu: device class lab.example.com does not exist"
        )
    );
}

#[test]
fn pod_that_has_finished_waits_for_nothing() {
    for phase in ["Succeeded", "Failed"] {
        let mut snapshot = snapshot();
        let pods = &mut snapshot.pods;
        // Its claim is gone.
        let pod = pods.iter_mut().find(|pod| is(pod, "default", "early"));
        pod.unwrap().status = Some(object(json!({"phase": phase})));
        let report = super::pod(&mut snapshot, "default", "early", &settings()).unwrap();
        assert_eq!(report.state, State::Finished);
        assert_eq!(report.reason, None);
        assert_eq!(
            report.summary,
            format!("the pod has finished ({phase}); it keeps no devices")
        );
    }
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

/// The condition has the number of members at the decision, and the text of one that does not fit names changes that cannot help.
#[test]
fn incomplete_gang_waits_for_its_members() {
    let mut snapshot = snapshot();
    let annotations = |min: &str| {
        let gang = [
            (names::GANG_ANNOTATION, "g"),
            (names::GANG_MIN_ANNOTATION, min),
        ];
        Some(
            gang.map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into(),
        )
    };
    let members = ["big", "feasible", "without-claim"];
    let set_min = |snapshot: &mut Snapshot, min: &str| {
        let pods = snapshot.pods.iter_mut();
        let is_member = |pod: &&mut Pod| members.iter().any(|name| is(pod, "default", name));
        pods.filter(is_member)
            .for_each(|pod| pod.metadata.annotations = annotations(min));
    };
    set_min(&mut snapshot, "4");
    for name in members {
        let report = pod_with_changes(&mut snapshot, "default", name, &settings()).unwrap();
        let expected = "WaitingForGang: gang g: 3 of 4 members exist";
        assert_eq!(
            (report.state, report.summary.as_str()),
            (State::Waiting, expected),
            "{name}"
        );
        assert_eq!(report.reason, Some(Reason::WaitingForGang), "{name}");
        assert!(report.changes.is_empty(), "{name}");
    }
    set_min(&mut snapshot, "3");
    let report = pod_with_changes(&mut snapshot, "default", "big", &settings()).unwrap();
    assert_eq!(report.state, State::Infeasible);
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

fn with_companion(memory: &str, change: impl FnOnce(&mut ResourceClaim)) -> Report {
    let mut claims = snapshot().claims;
    let big = claims.iter_mut();
    let mut big = big.filter(|claim| claim.metadata.name.as_deref() == Some("big"));
    let companion = big.next().unwrap();
    crate::fixture::make_companion(companion, "uid-a", "a-pod");
    let mut value = serde_json::to_value(&*companion).unwrap();
    value["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]["memory"] =
        json!(memory);
    *companion = object(value);
    change(companion);
    let mut snapshot = crate::fixture::snapshot_with(claims);
    super::pod(&mut snapshot, "default", "a-pod", &settings()).unwrap()
}

#[test]
fn names_companions_that_add_nothing() {
    let waits = with_companion("60Gi", |_| {}).text();
    let line = "note: claim default/big is to add to the share of the pod, and is not allocated: InsufficientMemory: most free memory \
                56 GiB on n1/gpu-0; only gpu-0-vgpu of pool n1/gpus counts, where claim a has its share\n";
    assert!(waits.ends_with(line), "{waits}");
    let never = with_companion("900Gi", |_| {}).text();
    let line = "InvalidCompanion: claim big can never fit: it adds 900 GiB to the 8 GiB of claim a, and gpu-0-vgpu of pool n1/gpus has \
                80 GiB altogether; delete it, and request less\n";
    assert!(never.ends_with(line), "{never}");
    let fits = with_companion("1Gi", |_| {}).text();
    assert!(fits.contains("and fits: the controller"), "{fits}");
    let refused = with_companion("1Gi", |companion| {
        let mut value = serde_json::to_value(&*companion).unwrap();
        value["status"] = json!({
            "allocation": {"devices": {"results": [{"request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus",
                "device": "gpu-0-vgpu", "shareID": "t", "consumedCapacity": {"memory": "1Gi", "cores": "0", "slots": "1"}}]}},
            "devices": [{"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "t",
                "conditions": [{"type": "Granted", "status": "False", "reason": "Refused", "message": "odd",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}]}],
        });
        *companion = object(value);
    });
    let refused = refused.text();
    assert!(
        refused.ends_with("and the node driver says Refused: odd\n"),
        "{refused}"
    );
    // A tenant can create thousands.
    let mut claims = snapshot().claims;
    let big = claims
        .iter()
        .find(|claim| claim.metadata.name.as_deref() == Some("big"));
    let mut companion = big.unwrap().clone();
    crate::fixture::make_companion(&mut companion, "uid-a", "a-pod");
    claims.extend((0..100).map(|number| {
        let mut one = companion.clone();
        one.metadata.name = Some(format!("more-{number}"));
        one.metadata.uid = Some(format!("more-{number}"));
        one
    }));
    let mut snapshot = crate::fixture::snapshot_with(claims);
    let report = super::pod(&mut snapshot, "default", "a-pod", &settings()).unwrap();
    let lines = report
        .advice
        .iter()
        .filter(|line| line.contains("is to add to the share"));
    assert_eq!(lines.count(), 8);
    assert!(
        report
            .advice
            .last()
            .unwrap()
            .starts_with("92 more claims are to add"),
        "{:?}",
        report.advice
    );
    // A claim of another tenant with the label and the owner.
    let forged = with_companion("60Gi", |companion| {
        companion.metadata.namespace = Some("other".to_owned());
    });
    assert!(!forged.text().contains("note:"), "{}", forged.text());
}
