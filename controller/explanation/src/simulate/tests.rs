//! Manifests in the small cluster of the tests of `explain`: 56 GiB are free on one GPU, the other one is in use.

use drava_api::names;
use drava_api::quota::GpuQuota;
use serde_json::json;

use super::*;
use crate::fixture::{settings, snapshot, snapshot_with};

fn simulated(documents: &[Value]) -> Result<Report, SimulateError> {
    simulated_in(&mut snapshot(), documents, None)
}

fn simulated_in(
    snapshot: &mut Snapshot,
    documents: &[Value],
    replicas: Option<usize>,
) -> Result<Report, SimulateError> {
    let documents = documents.to_vec();
    run(
        snapshot,
        Vec::new(),
        documents,
        "default",
        replicas,
        &settings(),
    )
}

fn template(memory: &str) -> Value {
    json!({
        "kind": "ResourceClaimTemplate", "metadata": {"name": "share"},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": memory}},
        }}]}}},
    })
}

fn pod_spec(claim: &Value) -> Value {
    let mut entry = claim.clone();
    entry["name"] = json!("gpu");
    let container = json!({"name": "c", "image": "x", "resources": {"claims": [{"name": "gpu"}]}});
    json!({"containers": [container], "resourceClaims": [entry]})
}

fn deployment(replicas: u32) -> Value {
    json!({
        "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"replicas": replicas, "template": {"spec": pod_spec(&json!({"resourceClaimTemplateName": "share"}))}},
    })
}

#[test]
fn decides_each_pod_beside_those_before() {
    let report = simulated(&[deployment(3), template("20Gi")]).unwrap();
    assert!(!report.all_fit());
    let text = report.text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[1].starts_with("default/web-0   n1     gpu: n1/gpus/gpu-0-vgpu ("),
        "{text}"
    );
    assert!(lines[2].starts_with("default/web-1   n1 "), "{text}");
    assert!(
        lines[3].starts_with("default/web-2   –      0/1 nodes: 1 InsufficientMemory"),
        "{text}"
    );
    assert!(
        text.contains("pod default/web-2 fits after one of these changes:\n- request at most 16384Mi of memory"),
        "{text}"
    );
}

#[test]
fn simulated_pods_count_towards_quota() {
    let mut snapshot = snapshot();
    // 104 GiB are in use, so that one of two pods is within the limit; the GPU has memory for both.
    let spec = json!({"namespaces": ["default"], "limit": {"memory": "126Gi"}});
    let quota = GpuQuota::new("team-a", serde_json::from_value(spec).unwrap());
    snapshot.cluster.upsert_quota(&quota);
    let report = simulated_in(&mut snapshot, &[deployment(2), template("20Gi")], None).unwrap();
    let text = report.text();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("default/web-0   n1 "), "{text}");
    assert!(
        lines[2].starts_with("default/web-1   –      0/1 nodes: 1 QuotaExceeded (quota team-a: memory 124 GiB of 126 GiB used, 20 GiB requested)"),
        "{text}"
    );
}

#[test]
fn replicas_option_replaces_that_of_the_workload() {
    let documents = [template("20Gi"), deployment(3)];
    let report = simulated_in(&mut snapshot(), &documents, Some(2)).unwrap();
    assert!(report.all_fit());
    assert_eq!(report.pods.len(), 2);
}

#[test]
fn rejects_more_pods_than_allowed() {
    let refused = |documents: &[Value], replicas| {
        let error = simulated_in(&mut snapshot(), documents, replicas).unwrap_err();
        assert!(matches!(error, SimulateError::TooMany(150_000)), "{error}");
    };
    refused(&[deployment(150_001)], None);
    refused(&[deployment(1)], Some(1_000_000_000_000));
    refused(&[deployment(1)], Some(usize::MAX));
    // All of them together.
    refused(&[deployment(10), deployment(149_991)], None);
}

#[test]
fn manifests_without_pods_are_an_error() {
    for documents in [
        vec![],
        vec![json!({"kind": "List", "items": []}), Value::Null],
        vec![template("1Gi"), json!({"kind": "Service"})],
        vec![deployment(0)],
    ] {
        let error = simulated(&documents).unwrap_err();
        assert!(matches!(error, SimulateError::NoPods), "{error}");
    }
    assert!(simulated_in(&mut snapshot(), &[template("1Gi"), deployment(0)], Some(1)).is_ok());
}

#[test]
fn pods_without_gpu_and_other_kinds_are_no_obstacle() {
    let service = json!({"kind": "Service", "metadata": {"name": "web"}});
    let pod = json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": []}});
    let report = simulated(&[service, pod]).unwrap();
    assert_eq!(report.pods[0].outcome, Outcome::NoGpuRequest);
}

#[test]
fn names_missing_and_shared_objects() {
    let error = |documents: &[Value]| {
        let error = simulated(documents).unwrap_err();
        error.to_string()
    };
    assert_eq!(
        error(&[deployment(1)]),
        "cannot simulate pod default/web: ResourceClaimTemplate default/share is neither in the manifests nor in the cluster"
    );
    let pod = |name: &str| {
        json!({
            "kind": "Pod", "metadata": {"name": name},
            "spec": pod_spec(&json!({"resourceClaimName": "feasible"})),
        })
    };
    assert_eq!(
        error(&[pod("a"), pod("b")]),
        "cannot simulate pod default/b: ResourceClaim default/feasible is used by another pod of the manifests; simulate one of them"
    );
}

#[test]
fn daemon_set_has_a_pod_on_each_node_that_admits_it() {
    let mut set = deployment(1);
    set["kind"] = json!("DaemonSet");
    let report = simulated(&[set.clone(), template("1Gi")]).unwrap();
    let text = report.text();
    assert!(text.contains("default/web-n1   n1 "), "{text}");
    assert_eq!(report.pods.len(), 1);
    // More than the node has: the controller creates the pod nevertheless.
    set["spec"]["template"]["spec"]["containers"][0]["resources"] =
        json!({"requests": {"cpu": "100"}});
    let text = simulated(&[set.clone(), template("1Gi")]).unwrap().text();
    assert!(text.contains("insufficient cpu"), "{text}");
    set["spec"]["template"]["spec"]["nodeSelector"] = json!({"no": "node"});
    let report = simulated(&[set, template("1Gi")]).unwrap();
    assert_eq!(report.pods, []);
    let text = report.text();
    assert!(
        text.ends_with("DaemonSet web has no pods: no node admits them\n"),
        "{text}"
    );
}

#[test]
fn cron_job_hides_no_other_workload() {
    let job = json!({"kind": "CronJob", "metadata": {"name": "c"}});
    let report = simulated(&[job, deployment(1), template("1Gi")]).unwrap();
    assert!(report.all_fit());
    let text = report.text();
    assert!(
        text.contains("CronJob c is not simulated, because its number of pods depends on the time"),
        "{text}"
    );
}

/// A deployment whose pods are a gang.
fn gang(replicas: u32, min: &str) -> Value {
    let mut gang = deployment(replicas);
    gang["spec"]["template"]["metadata"] = json!({"annotations": {
        "gpu.drava.dev/gang": "g", "gpu.drava.dev/gang-min": min,
    }});
    gang
}

#[test]
fn gang_starts_as_a_whole_or_not_at_all() {
    // 56 GiB are free: two of three fit.
    let pod = json!({
        "kind": "Pod", "metadata": {"name": "after"}, "spec": pod_spec(&json!({"resourceClaimTemplateName": "share"})),
    });
    let report = simulated(&[gang(3, "3"), pod.clone(), template("20Gi")]).unwrap();
    let reason = "WaitingForGang: gang g: 2 of 3 members fit; pod default/web-2: 0/1 nodes: 1 InsufficientMemory";
    for member in &report.pods[..3] {
        assert!(
            matches!(&member.outcome, Outcome::Pending { reason: found, .. } if found.starts_with(reason)),
            "{member:?}"
        );
    }
    // What the gang does not take is free for others.
    assert!(matches!(report.pods[3].outcome, Outcome::Placed { .. }));
    let text = report.text();
    assert!(text.contains("1 of 4 pods fit\n"), "{text}");
    let enough = simulated(&[gang(3, "2"), template("20Gi")]).unwrap();
    assert_eq!(enough.fitting, 2);
    let missing = simulated(&[gang(2, "3"), template("1Gi")]).unwrap();
    assert!(
        missing
            .text()
            .contains("WaitingForGang: gang g: 2 of 3 members exist"),
        "{}",
        missing.text()
    );
}

/// The controller refuses these gangs, and their pods wait.
#[test]
fn gang_without_valid_minimum_does_not_start() {
    let annotations = |min: Option<&str>| match min {
        Some(min) => json!({names::GANG_ANNOTATION: "g", names::GANG_MIN_ANNOTATION: min}),
        None => json!({names::GANG_ANNOTATION: "g"}),
    };
    let with_minimums = |minimums: &[Option<&str>]| {
        let pods = minimums.iter().enumerate().map(|(number, min)| {
            json!({
                "kind": "Pod",
                "metadata": {"name": format!("m-{number}"), "annotations": annotations(*min)},
                "spec": pod_spec(&json!({"resourceClaimTemplateName": "share"})),
            })
        });
        let mut documents: Vec<_> = pods.collect();
        documents.push(template("1Gi"));
        simulated(&documents).unwrap()
    };
    for (minimums, problem) in [
        (&[None][..], "InvalidGang: gang g has no minimum"),
        (
            &[Some("0")],
            "InvalidGang: annotation gpu.drava.dev/gang-min of gang g is \"0\"",
        ),
        (
            &[Some("two")],
            "InvalidGang: annotation gpu.drava.dev/gang-min of gang g is \"two\"",
        ),
        (
            &[Some("2"), Some("1")],
            "InvalidGang: members of gang g have different minimums, 1 and 2",
        ),
    ] {
        let report = with_minimums(minimums);
        assert_eq!(report.fitting, 0, "{minimums:?}");
        assert!(report.text().contains(problem), "{}", report.text());
    }
    assert_eq!(with_minimums(&[Some(" 2 "), Some("2")]).fitting, 2);
}

#[test]
fn counts_pods_that_fit_instead_of_listing_each() {
    let report = simulated(&[deployment(1_000), template("20Gi")]).unwrap();
    let text = report.text();
    assert_eq!(text.lines().count(), 5 + 5, "{text}");
    assert!(text.contains("default/web-2 to default/web-999"), "{text}");
    assert!(text.contains("\n2 of 1000 pods fit\n"), "{text}");
}

#[test]
fn misspelled_class_does_not_fit() {
    let mut template = template("1Gi");
    template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] =
        json!("vgpu.drava.io");
    let report = simulated(&[deployment(1), template]).unwrap();
    assert!(!report.all_fit());
    let text = report.text();
    assert!(
        text.contains("device class vgpu.drava.io does not exist; did you mean vgpu.drava.dev?"),
        "{text}"
    );
}

#[test]
fn names_container_with_spatial_and_other_claim() {
    let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "spatial"}, "spec": {
        "selectors": [{"cel": {"expression":
            "device.driver == \"gpu.drava.dev\" && device.attributes[\"gpu.drava.dev\"].type == \"vgpu\""}}],
        "config": [{"opaque": {"driver": "gpu.drava.dev", "parameters": {
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": "spatial"}}}],
    }});
    let mut spatial = template("1Gi");
    spatial["metadata"]["name"] = json!("spatial");
    spatial["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] =
        json!("spatial");
    let mut deployment = deployment(1);
    let spec = &mut deployment["spec"]["template"]["spec"];
    let entries = spec["resourceClaims"].as_array_mut().unwrap();
    entries.push(json!({"name": "second", "resourceClaimTemplateName": "spatial"}));
    let apart = [deployment.clone(), template("1Gi"), spatial, class];
    let report = simulated_in(&mut snapshot_with(Vec::new()), &apart, None).unwrap();
    assert!(
        report.all_fit(),
        "no container uses the second claim: {}",
        report.text()
    );
    let spec = &mut deployment["spec"]["template"]["spec"];
    let used = spec["containers"][0]["resources"]["claims"]
        .as_array_mut()
        .unwrap();
    used.push(json!({"name": "second"}));
    let [_, template, spatial, class] = apart;
    let report = simulated_in(
        &mut snapshot_with(Vec::new()),
        &[deployment, template, spatial, class],
        None,
    )
    .unwrap();
    assert!(!report.all_fit());
    let text = report.text();
    assert!(
        text.contains("IncompatibleClaims: claim default/")
            && text.contains("the container \"c\" has the claim default/"),
        "{text}"
    );
}

#[test]
fn uses_device_classes_of_the_manifest() {
    let mut template = template("1Gi");
    template["spec"]["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] =
        json!("notebooks");
    let class = json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": "notebooks"}, "spec": {
        "selectors": [{"cel": {"expression":
            "device.driver == \"gpu.drava.dev\" && device.attributes[\"gpu.drava.dev\"].type == \"vgpu\""}}],
    }});
    let report = simulated(&[deployment(1), template.clone(), class]).unwrap();
    assert!(report.all_fit());
    assert_eq!((report.requesting, report.fitting), (1, 1));
    // A class that exists nowhere is no pod without a request.
    let report = simulated(&[deployment(1), template]).unwrap();
    assert!(!report.all_fit());
    let text = report.text();
    assert!(
        text.contains("device class notebooks does not exist"),
        "{text}"
    );
}

#[test]
fn simulates_tasks_of_volcano() {
    let task = |name: &str, replicas: u32| {
        json!({
            "name": name, "replicas": replicas,
            "template": {"spec": pod_spec(&json!({"resourceClaimTemplateName": "share"}))},
        })
    };
    let job = json!({
        "apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": "training"},
        "spec": {"schedulerName": "default-scheduler", "tasks": [task("worker", 2), task("chief", 1)]},
    });
    let text = simulated(&[job.clone(), template("10Gi")]).unwrap().text();
    let rows: Vec<&str> = text.lines().skip(1).take(3).collect();
    let names = ["training-worker-0", "training-worker-1", "training-chief"];
    for (row, name) in rows.iter().zip(names) {
        assert!(row.starts_with(&format!("default/{name} ")), "{text}");
        assert!(row.contains(" n1 "), "{text}");
    }
    // Three of 20 GiB do not fit, and two are enough if the job says so.
    let starts = |min: Option<u32>| {
        let mut job = job.clone();
        job["spec"]["minAvailable"] = json!(min);
        simulated(&[job, template("20Gi")]).unwrap()
    };
    for min in [None, Some(0), Some(3)] {
        let text = starts(min).text();
        let reason = "WaitingForGang: gang training: 2 of 3 members fit";
        assert!(text.contains(reason), "{min:?}: {text}");
        assert!(text.contains("0 of 3 pods fit\n"), "{min:?}: {text}");
    }
    assert_eq!(starts(Some(2)).fitting, 2);
    let mut of_volcano = job;
    of_volcano["spec"]["schedulerName"] = json!("volcano");
    let text = simulated(&[of_volcano, template("10Gi")]).unwrap().text();
    assert!(text.contains("SchedulerNotServed"), "{text}");
}

#[test]
fn notes_likely_mistakes() {
    let text = simulated(&[deployment(1), template("8000")])
        .unwrap()
        .text();
    assert!(
        text.ends_with(
            "note: claim template default/share: spec.spec.devices.requests[0].exactly.capacity.requests.memory: 8000 is 8000 \
             bytes; did you mean 8000Mi?\n"
        ),
        "{text}"
    );
    let mut unused = deployment(3);
    unused["spec"]["template"]["spec"]["containers"][0]["resources"] = json!({});
    let text = simulated(&[unused, template("8Gi")]).unwrap().text();
    let notes: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("note:"))
        .collect();
    assert_eq!(
        notes,
        [
            "note: pod default/web-0: spec.resourceClaims[0]: no container names claim gpu, so none gets its GPUs; add resources: \
             {claims: [{name: gpu}]} to a container"
        ],
        "once for the pods of a workload"
    );
}

#[test]
fn names_claims_by_template_and_pod() {
    let mut unreadable = template("20Gi");
    let spec = &mut unreadable["spec"]["spec"]["devices"];
    spec["requests"][0]["exactly"]["selectors"] =
        json!([{"cel": {"expression": "device.attributes['x'].y > 1"}}]);
    let text = simulated(&[deployment(1), unreadable]).unwrap().text();
    let name = "claim default/gpu of template share of pod web";
    assert!(text.contains(name), "{text}");
    // Two workloads with one name have claims of their own.
    let mut job = deployment(1);
    job["kind"] = json!("StatefulSet");
    let report = simulated(&[deployment(1), job, template("40Gi")]).unwrap();
    assert_eq!(report.fitting, 1, "{}", report.text());
}

#[test]
fn names_resources_of_other_systems() {
    let with = |limits: &Value| {
        let container = json!({"name": "c", "image": "x", "resources": {"limits": limits}});
        let pod =
            json!({"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}});
        simulated(&[pod]).unwrap()
    };
    let report = with(&json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 8000}));
    let text = report.text();
    let expected = "requests volcano.sh/vgpu-memory, volcano.sh/vgpu-number, which drava does not serve; translate the manifest \
                    with `kubectl drava migrate -f FILE`";
    assert!(text.contains(expected), "{text}");
    assert!(!report.all_fit(), "{text}");
    for name in [
        "nvidia.com/gpu-a100",
        "nvidia.com/gpumem",
        "nvidia.com/gpucores",
        "nvidia.com/mig-1g.10gb",
    ] {
        assert!(!with(&json!({name: 1})).all_fit(), "{name}");
    }
    assert!(with(&json!({"example.com/fpga": 1, "cpu": 1})).all_fit());
    for zero in [json!(0), json!("0")] {
        assert!(with(&json!({"nvidia.com/gpu": zero})).all_fit(), "{zero}");
    }
}

/// Simulates a job with this pod spec, merged into that of a pod with a share.
fn job(spec: &Value, pod: &Value) -> Report {
    let mut template_spec = pod_spec(&json!({"resourceClaimTemplateName": "share"}));
    for (field, value) in pod.as_object().unwrap() {
        template_spec[field] = value.clone();
    }
    let mut job = json!({"kind": "Job", "metadata": {"name": "j"}, "spec": spec});
    job["spec"]["template"] = json!({"spec": template_spec});
    let class = json!({
        "kind": "RuntimeClass", "metadata": {"name": "kata"}, "handler": "kata",
        "overhead": {"podFixed": {"cpu": "100"}},
    });
    simulated(&[job, template("1Gi"), class]).unwrap()
}

#[test]
fn reads_pods_as_the_api_server_stores_them() {
    let one = json!({});
    let reason = |pod: Value| {
        let report = job(&one, &pod);
        assert!(!report.all_fit());
        report.text()
    };
    let container = |fields: Value| {
        let mut container = json!({"name": "c", "image": "x"});
        for (field, value) in fields.as_object().unwrap() {
            container[field] = value.clone();
        }
        json!([container])
    };
    let limited = container(json!({"resources": {"limits": {"cpu": "100"}}}));
    for pod in [
        json!({"containers": limited}),
        json!({"resources": {"limits": {"cpu": "100"}}}),
        json!({"runtimeClassName": "kata"}),
    ] {
        let text = reason(pod);
        assert!(text.contains("insufficient cpu"), "{text}");
    }
    let ports = container(json!({"ports": [{"containerPort": 8080}]}));
    let report = job(
        &json!({"parallelism": 2}),
        &json!({"hostNetwork": true, "containers": ports}),
    );
    assert!(
        report.text().contains("host port 8080 is in use"),
        "{}",
        report.text()
    );
}

#[test]
fn job_has_no_more_pods_than_completions() {
    for (spec, pods) in [
        (json!({"parallelism": 8, "completions": 2}), 2),
        (json!({"parallelism": 2, "completions": 8}), 2),
        (json!({"parallelism": 2}), 2),
        (json!({"completions": 3}), 1),
    ] {
        assert_eq!(job(&spec, &json!({})).pods.len(), pods, "{spec}");
    }
}

#[test]
fn dump_round_trips_without_secrets() {
    let objects: crate::snapshot::Objects = serde_json::from_value(json!({
        "nodes": [{"metadata": {"name": "n1"}, "status": {"allocatable": {"cpu": "8"}, "images": [{"names": ["x"]}]}}],
        "resourceSlices": [], "deviceTaintRules": [], "deviceClasses": [], "resourceClaims": [],
        "pods": [{"metadata": {"name": "p", "annotations": {"a": "secret", "gpu.drava.dev/gang": "g"}}, "spec": {"containers": [
            {"name": "c", "image": "secret", "env": [{"name": "TOKEN", "value": "secret"}], "resources": {"requests": {"cpu": "2"}}},
        ]}}],
        "resourceClaimTemplates": [],
    }))
    .unwrap();
    let text = serde_json::to_string(&objects.trimmed()).unwrap();
    assert!(
        !text.contains("secret") && !text.contains("images"),
        "{text}"
    );
    let again: crate::snapshot::Objects = serde_json::from_str(&text).unwrap();
    let (snapshot, _) = again.into_snapshot();
    let pod = serde_json::to_value(&snapshot.pods[0]).unwrap();
    assert_eq!(
        pod["spec"]["containers"][0]["resources"]["requests"]["cpu"],
        "2"
    );
    assert_eq!(pod["metadata"]["annotations"]["gpu.drava.dev/gang"], "g");
}

/// 56 GiB are free on one GPU, which are reserved for pod `big`.
fn reserving() -> Snapshot {
    let mut snapshot = snapshot();
    snapshot.reservations = serde_json::from_value(json!([{
        "namespace": "default", "pod": "big", "claim": "big", "purpose": "HeadOfQueue",
        "devices": [{"request": "gpu", "pool": "n1/gpus", "device": "gpu-0-vgpu",
            "capacity": {"memory": "50Gi", "cores": "0", "slots": "1"}}],
    }]))
    .unwrap();
    snapshot
}

#[test]
fn names_for_whom_devices_are_reserved() {
    let mut snapshot = reserving();
    let report = simulated_in(&mut snapshot, &[deployment(2), template("6Gi")], None).unwrap();
    let text = report.text();
    assert!(text.contains("1 of 2 pods fit"), "{text}");
    assert!(
        text.contains(
            "Reserved: the pod fits on n1, but its devices are reserved for pod default/big"
        ),
        "{text}"
    );
    let explained = crate::explain::pod(&mut reserving(), "default", "big", &settings()).unwrap();
    let text = explained.text();
    assert!(
        text.ends_with("reserved for the pod until others end: gpu-0-vgpu of pool n1/gpus\n"),
        "{text}"
    );
}

#[test]
fn mentions_reservations_that_are_not_listed() {
    const NOTE: &str = "note: the controller reserves devices for 7 more claims than it lists, so devices that seem to be free may \
                        be reserved\n";
    let mut snapshot = snapshot();
    let simulated = |snapshot: &mut Snapshot| {
        simulated_in(snapshot, &[deployment(1), template("6Gi")], None)
            .unwrap()
            .text()
    };
    assert!(!simulated(&mut snapshot).contains("than it lists"));
    snapshot.omitted_reservations = 7;
    let text = simulated(&mut snapshot);
    assert!(text.contains(NOTE), "{text}");
    let mut snapshot = reserving();
    snapshot.omitted_reservations = 7;
    let explained = crate::explain::pod(&mut snapshot, "default", "feasible", &settings()).unwrap();
    assert!(explained.text().contains(NOTE), "{}", explained.text());
}

#[test]
fn notes_that_others_may_be_suspended_or_evicted() {
    let text = |fields: Value| {
        let mut pod = json!({
            "kind": "Pod", "metadata": {"name": "urgent"}, "spec": pod_spec(&json!({"resourceClaimTemplateName": "share"})),
        });
        if let (Some(spec), Value::Object(fields)) = (pod["spec"].as_object_mut(), fields) {
            spec.extend(fields);
        }
        simulated(&[pod, template("70Gi")]).unwrap().text()
    };
    let note = |of: &str| {
        format!(
            "note: for a pod of {of}, pods of lower priority are suspended or evicted if it fits then; the simulation leaves that \
             out\n"
        )
    };
    let class = text(json!({"priorityClassName": "high"}));
    assert!(class.contains(&note("priority class high")), "{class}");
    let number = text(json!({"priority": 10}));
    assert!(number.contains(&note("priority 10")), "{number}");
    for fields in [
        json!({}),
        json!({"priority": 0}),
        json!({"priority": 10, "preemptionPolicy": "Never"}),
    ] {
        let text = text(fields);
        assert!(text.contains("end default/"), "{text}");
        assert!(!text.contains("suspended"), "{text}");
    }
}

#[test]
fn companions_fit_beside_pods_or_add_to_no_share() {
    let companion_with = |requests: &Value| {
        let mut claim = crate::fixture::object(json!({
            "kind": "ResourceClaim", "apiVersion": "resource.k8s.io/v1", "metadata": {"name": "more"},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
                "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": requests},
            }}]}},
        }));
        crate::fixture::make_companion(&mut claim, "uid-a", "a-pod");
        let mut document = serde_json::to_value(claim).unwrap();
        document["kind"] = json!("ResourceClaim");
        document
    };
    let companion = |memory: &str| companion_with(&json!({"memory": memory, "cores": "0"}));
    let fits = simulated(&[companion("50Gi")]).unwrap();
    assert_eq!(
        fits.text(),
        "claim default/more would add to the share on n1/gpu-0\n"
    );
    assert!(fits.all_fit());
    // 56 GiB are free, of which pods of the manifest take 20.
    let beside = simulated(&[companion("50Gi"), deployment(1), template("20Gi")]).unwrap();
    let text = beside.text();
    assert!(
        text.contains("claim default/more would add to no share: InsufficientMemory: "),
        "{text}"
    );
    assert!(!beside.all_fit());
    let never = simulated(&[companion("900Gi")]).unwrap().text();
    assert!(never.contains("can never fit"), "{never}");
    // Without an amount, it asks for all memory; so does a percentage of all of it.
    let all = simulated(&[companion_with(&json!({}))]).unwrap().text();
    assert!(all.contains("can never fit: it adds"), "{all}");
    // A quota for one claim counts the companions before.
    let mut limited = snapshot();
    let spec = json!({"namespaces": ["default"], "claim": {"max": {"memory": "20Gi"}}});
    let quota = GpuQuota::new("team-a", serde_json::from_value(spec).unwrap());
    limited.cluster.upsert_quota(&quota);
    let mut second = companion("8Gi");
    second["metadata"]["name"] = json!("second");
    let grown = simulated_in(&mut limited, &[companion("8Gi"), second], None).unwrap();
    let text = grown.text();
    assert!(
        text.contains("claim default/more would add to the share on")
            && text.contains("claim default/second would add to no share: QuotaExceeded"),
        "{text}"
    );
}
