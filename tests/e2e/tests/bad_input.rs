//! Requests that cannot be satisfied are explained at the object that the user inspects.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{TestCluster, wait};

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

#[test]
fn reports_pod_of_another_scheduler() -> Result<()> {
    const FIELD: &str = "terminationGracePeriodSeconds:";
    let manifest = pod_with_share("volcano", "vgpu.drava.dev", "{memory: 1Gi}")
        .replace(FIELD, &format!("schedulerName: volcano\n  {FIELD}"));
    ensure!(manifest.contains("schedulerName"), "{manifest}");
    is_pending_with("volcano", &manifest, &["SchedulerNotServed", "volcano"])
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
    let event = tenant.event("any", "DriverUnspecified");
    cluster.kubectl(["delete", "deviceclass", "e2e-any"])?;
    ensure!(event?.contains("e2e-any"));
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
    tenant.event("waits", "ClaimMissing: claim own was deleted")?;
    tenant.apply(&claim("1Gi"))?;
    tenant.running("waits")
}
