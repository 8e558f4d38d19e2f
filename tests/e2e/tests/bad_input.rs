//! Requests that cannot be satisfied are explained at the object that the user inspects.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};

/// Checks that the pod stays pending and that its event contains all `words`.
fn is_pending_with(name: &str, manifest: &str, words: &[&str]) -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace(name)?;
    tenant.apply(manifest)?;
    let event = tenant.event(name, words.first().context("no words")?)?;
    for word in words {
        ensure!(event.contains(word), "no {word:?} in {event:?}");
    }
    Ok(())
}

#[test]
fn explains_request_larger_than_any_gpu() -> Result<()> {
    let manifest = pod_with_share("giant", "vgpu.drava.dev", "{memory: 500Gi}");
    is_pending_with("giant", &manifest, &["exceeds the largest GPU", "500 GiB"])
}

#[test]
fn explains_request_of_zero_memory() -> Result<()> {
    is_pending_with(
        "zero",
        &pod_with_share("zero", "vgpu.drava.dev", "{memory: \"0\"}"),
        &["memory", "0 is not an amount"],
    )
}

#[test]
fn explains_request_for_more_than_all_cores() -> Result<()> {
    is_pending_with(
        "cores",
        &pod_with_share("cores", "vgpu.drava.dev", "{memory: 1Gi, cores: \"101\"}"),
        &["cores", "exceeds 100"],
    )
}

#[test]
fn explains_missing_device_class() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("class")?;
    tenant.apply(&pod_with_share("class", "vpgu.drava.dev", "{memory: 1Gi}"))?;
    tenant.event("class", "vpgu.drava.dev")?;
    Ok(())
}

#[test]
fn rejects_or_explains_negative_quantity() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("negative")?;
    // Rejected by the API server, or explained by the controller.
    match tenant.apply(&pod_with_share(
        "negative",
        "vgpu.drava.dev",
        "{memory: \"-1Gi\"}",
    )) {
        Err(rejected) => ensure!(format!("{rejected:#}").contains("memory"), "{rejected:#}"),
        Ok(()) => {
            tenant.event("negative", "memory")?;
        }
    }
    Ok(())
}

/// Tolerates every taint.
const CATCH_ALL: &str = "{operator: Exists}";

/// A claim, or the spec of a template, whose only request has this toleration.
fn tolerating(kind: &str, name: &str, class: &str, toleration: &str) -> String {
    let exactly = format!("exactly: {{deviceClassName: {class}, tolerations: [{toleration}]}}");
    requesting(kind, name, &exactly)
}

fn requesting(kind: &str, name: &str, request: &str) -> String {
    let spec = format!("{{devices: {{requests: [{{name: gpu, {request}}}]}}}}");
    let spec = match kind {
        "ResourceClaim" => spec,
        _ => format!("{{spec: {spec}}}"),
    };
    format!(
        "{{apiVersion: resource.k8s.io/v1, kind: {kind}, metadata: {{name: {name}, finalizers: [example.com/test]}}, spec: {spec}}}"
    )
}

#[test]
fn rejects_toleration_of_managed_taint() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("taint")?;
    let alternatives = format!(
        "firstAvailable: [{{name: a, deviceClassName: any}}, {{name: b, deviceClassName: any, tolerations: [{CATCH_ALL}]}}]"
    );
    for kind in ["ResourceClaim", "ResourceClaimTemplate"] {
        for manifest in [
            tolerating(
                kind,
                "taint",
                "vgpu.drava.dev",
                "{key: gpu.drava.dev/managed, operator: Exists}",
            ),
            tolerating(kind, "taint", "vgpu.drava.dev", CATCH_ALL),
            tolerating(kind, "taint", "class-of-a-tenant", CATCH_ALL),
            requesting(kind, "taint", &alternatives),
        ] {
            let rejection = tenant
                .apply(&manifest)
                .err()
                .with_context(|| format!("{manifest} was accepted"))?;
            let text = format!("{rejection:#}");
            ensure!(text.contains("gpu.drava.dev/managed"), "{text}");
        }
        for (name, class, toleration) in [
            (
                "other-key",
                "vgpu.drava.dev",
                "{key: example.com/other, operator: Exists}",
            ),
            ("other-driver", "gpu.nvidia.com", CATCH_ALL),
        ] {
            tenant.apply(&tolerating(kind, name, class, toleration))?;
            tenant.kubectl(&["patch", kind, name, "--type=merge", "-p", REMOVE_FINALIZERS])?;
        }
    }
    Ok(())
}

const REMOVE_FINALIZERS: &str = r#"{"metadata": {"finalizers": null}}"#;

#[test]
fn removes_finalizer_of_claim_older_than_policy() -> Result<()> {
    const BINDING: [&str; 2] = ["validatingadmissionpolicybinding", "drava-managed-taint"];
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("older")?;
    let claim = tolerating("ResourceClaim", "older", "any", CATCH_ALL);
    let mut binding = cluster.get(&BINDING)?;
    let metadata = binding["metadata"].as_object_mut().context("no metadata")?;
    metadata.retain(|field, _| ["name", "labels", "annotations"].contains(&field.as_str()));
    cluster.kubectl(["delete"].into_iter().chain(BINDING))?;
    // The API server reads policies with a delay.
    let created = wait("the claim is accepted", || Ok(tenant.apply(&claim).ok()));
    tenant.apply(&binding.to_string())?;
    created?;
    let probe = tolerating("ResourceClaim", "probe", "any", CATCH_ALL);
    wait("a new claim is rejected", || {
        Ok(match tenant.apply(&probe) {
            Err(_) => Some(()),
            Ok(()) => {
                tenant.kubectl(&[
                    "patch",
                    "resourceclaim",
                    "probe",
                    "--type=merge",
                    "-p",
                    REMOVE_FINALIZERS,
                ])?;
                tenant.kubectl(&["delete", "resourceclaim", "probe"])?;
                None
            }
        })
    })?;
    tenant.kubectl(&[
        "patch",
        "resourceclaim",
        "older",
        "--type=merge",
        "-p",
        REMOVE_FINALIZERS,
    ])?;
    Ok(())
}

/// Checks that the pod had the event with `text` before a pod ran that was created later, by the times of the API server and
/// the kubelet. So the reason of a pod is as fast as an allocation, however slow the machine is.
fn is_reported_before_later_pod_runs(tenant: &Namespace<'_>, pod: &str, text: &str) -> Result<()> {
    tenant.apply(&pod_with_share("later", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("later")?;
    tenant.event(pod, text)?;
    let later = tenant.find("pod", "later")?.context("no pod")?;
    let running = &later["status"]["containerStatuses"][0]["state"]["running"];
    let started = running["startedAt"].as_str().context("no start")?;
    let events = tenant.list("events")?;
    let mut reported = events.iter().filter_map(|event| {
        let message = event["message"].as_str()?;
        let is_of_pod = event["involvedObject"]["name"] == pod && message.contains(text);
        is_of_pod.then(|| event["metadata"]["creationTimestamp"].as_str())?
    });
    // Both are UTC in whole seconds, so their texts have their order.
    ensure!(
        reported.any(|reported| reported <= started),
        "pod later has run since {started}, before the event of pod {pod}"
    );
    Ok(())
}

#[test]
fn reports_pod_of_another_scheduler() -> Result<()> {
    const FIELD: &str = "terminationGracePeriodSeconds:";
    let manifest = pod_with_share("volcano", "vgpu.drava.dev", "{memory: 1Gi}")
        .replace(FIELD, &format!("schedulerName: volcano\n  {FIELD}"));
    ensure!(manifest.contains("schedulerName"), "{manifest}");
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("volcano")?;
    tenant.apply(&manifest)?;
    is_reported_before_later_pod_runs(&tenant, "volcano", "SchedulerNotServed")?;
    let event = tenant.event("volcano", "SchedulerNotServed")?;
    ensure!(event.contains("schedulerName volcano"), "{event}");
    Ok(())
}

#[test]
fn reports_class_without_driver() -> Result<()> {
    let cluster = TestCluster::attach()?;
    cluster.kubectl(["delete", "deviceclass", "e2e-any", "--ignore-not-found"])?;
    let tenant = cluster.namespace("any-class")?;
    tenant.apply(
        "{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: e2e-any}, spec: {}}",
    )?;
    tenant.apply(&pod_with_request("any", "{deviceClassName: e2e-any}", ""))?;
    let reported = is_reported_before_later_pod_runs(&tenant, "any", "DriverUnspecified");
    let event = tenant.event("any", "DriverUnspecified");
    cluster.kubectl(["delete", "deviceclass", "e2e-any"])?;
    reported?;
    ensure!(event?.contains("e2e-any"));
    Ok(())
}

/// Makes the pod of a manifest a member of the gang `broken`.
fn in_gang(manifest: &str, name: &str, min: &str) -> String {
    let annotations =
        format!("annotations: {{gpu.drava.dev/gang: broken, gpu.drava.dev/gang-min: \"{min}\"}}");
    manifest.replace(
        &format!("kind: Pod\nmetadata: {{name: {name}}}\n"),
        &format!("kind: Pod\nmetadata: {{name: {name}, {annotations}}}\n"),
    )
}

#[test]
fn explains_gang_of_contradictory_or_missing_members() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("broken-gang")?;
    let member = |name: &str, min: &str| {
        let manifest = pod_with_share(name, "vgpu.drava.dev", "{memory: 1Gi}");
        tenant.apply(&in_gang(&manifest, name, min))
    };
    member("invalid", "many")?;
    tenant.event("invalid", "InvalidGang")?;
    tenant.delete_pods(&["invalid"])?;
    member("m-0", "2")?;
    tenant.event("m-0", "WaitingForGang: gang broken: 1 of 2 members exist")?;
    member("m-1", "3")?;
    for name in ["m-0", "m-1"] {
        tenant.event(name, "different minimums, 2 and 3")?;
    }
    // The members that agree start.
    tenant.delete_pods(&["m-1"])?;
    member("m-2", "2")?;
    tenant.running("m-0")?;
    tenant.running("m-2")
}

#[test]
fn serves_pod_whose_priority_class_was_deleted() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("deleted-class")?;
    tenant.apply(
        "{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {name: e2e-deleted}, value: 7, preemptionPolicy: Never}",
    )?;
    tenant.apply(&pod_with_share("blocker", "gpu.drava.dev", ""))?;
    tenant.running("blocker")?;
    let waits = pod_with_request("waits", "{deviceClassName: gpu.drava.dev, count: 2}", "");
    let waits = waits.replace(
        "terminationGracePeriodSeconds: 1\n",
        "terminationGracePeriodSeconds: 1\n  priorityClassName: e2e-deleted\n",
    );
    tenant.apply(&waits)?;
    tenant.event("waits", "ExclusiveConflict")?;
    cluster.kubectl(["delete", "priorityclass", "e2e-deleted"])?;
    tenant.delete_pods(&["blocker"])?;
    // The pod keeps its priority; the API server rejects new pods of the class.
    tenant.running("waits")?;
    let another = waits.replace("waits", "another");
    let rejection = tenant.apply(&another).err().context("accepted")?;
    let text = format!("{rejection:#}");
    ensure!(
        text.contains("no PriorityClass with name e2e-deleted"),
        "{text}"
    );
    Ok(())
}

#[test]
fn explains_claim_that_was_deleted_while_pod_is_gated() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("deleted-claim")?;
    let claim = |memory: &str| {
        format!(
            "{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: own}}, spec: {{devices: {{requests: [{{name: gpu, \
             exactly: {{deviceClassName: vgpu.drava.dev, capacity: {{requests: {{memory: {memory}}}}}}}}}]}}}}}}"
        )
    };
    tenant.apply(&claim("500Gi"))?;
    let pod = drava_e2e::manifest::pod("waits", "resourceClaimName: own");
    let gated = wait("the webhook knows the claim", || {
        let created = tenant.dry_run(&pod)?;
        Ok(created["spec"]["schedulingGates"].is_array().then_some(()))
    });
    gated?;
    tenant.apply(&pod)?;
    tenant.event("waits", "exceeds the largest GPU")?;
    tenant.kubectl(&["delete", "resourceclaim", "own", "--timeout=60s"])?;
    tenant.event("waits", "ClaimMissing: claim own does not exist")?;
    tenant.apply(&claim("1Gi"))?;
    tenant.running("waits")
}

#[test]
fn reports_contradictory_policies() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("policies")?;
    let policy = |name: &str, node: &str| {
        tenant.apply(&format!(
            "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuPolicy, metadata: {{name: {name}}}, spec: {{namespaceSelector: \
             {{matchLabels: {{kubernetes.io/metadata.name: {}}}}}, node: {node}}}}}",
            tenant.name()
        ))
    };
    policy("e2e-a", "binpack")?;
    policy("e2e-b", "spread")?;
    let message = wait("the second policy is reported", || {
        let found = cluster.get(&["gpupolicy", "e2e-b"])?;
        let condition = &found["status"]["conditions"][0];
        let message = condition["message"].as_str().unwrap_or_default().to_owned();
        Ok((condition["status"] == "False").then_some(message))
    });
    cluster.kubectl(["delete", "gpupolicy", "e2e-a", "e2e-b"])?;
    let message = message?;
    ensure!(message.contains("GpuPolicy e2e-a selects"), "{message}");
    Ok(())
}
