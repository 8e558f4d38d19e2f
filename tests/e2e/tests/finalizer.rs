//! The finalizer of a claim: added at creation by the admission policy, so that the controller allocates by one write.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{claim_template, pod, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

const FINALIZER: &str = "resource.kubernetes.io/delete-protection";
const LABEL: &str = "gpu.drava.dev/claim";
const POLICY: &str = "drava-claims";
const SHARE: &str = "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}";

fn has_finalizer(claim: &Value) -> bool {
    let finalizers = claim["metadata"]["finalizers"].as_array();
    finalizers.is_some_and(|all| all.iter().any(|finalizer| finalizer == FINALIZER))
}

/// Returns the parts of the claim that the controller has written.
fn written_by_controller(claim: &Value) -> Vec<&str> {
    let managers = claim["metadata"]["managedFields"].as_array();
    let own = managers.into_iter().flatten();
    own.filter(|entry| entry["manager"] == "drava-controller")
        .map(|entry| entry["subresource"].as_str().unwrap_or("metadata"))
        .collect()
}

/// Returns the claim from a template of a pod with all metadata.
fn claim_of(tenant: &Namespace<'_>, pod: &str) -> Result<Value> {
    claim(tenant, &tenant.claim_of(pod)?)
}

fn claim(tenant: &Namespace<'_>, name: &str) -> Result<Value> {
    let found = tenant.kubectl(&[
        "get",
        "resourceclaim",
        name,
        "-o",
        "json",
        "--show-managed-fields",
    ])?;
    Ok(serde_json::from_str(&found)?)
}

/// Returns a claim of that class that would be created.
fn dry_run(tenant: &Namespace<'_>, class: &str) -> Result<Value> {
    tenant.dry_run(&named_claim("probe", class))
}

fn named_claim(name: &str, class: &str) -> String {
    let exactly = format!("{{deviceClassName: {class}, capacity: {{requests: {{memory: 1Gi}}}}}}");
    format!(
        "{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: {name}}}, \
         spec: {{devices: {{requests: [{{name: gpu, exactly: {exactly}}}]}}}}}}"
    )
}

fn is_gone(tenant: &Namespace<'_>, claim: &str) -> Result<()> {
    wait("the claim is gone", || {
        Ok(tenant.find("resourceclaim", claim)?.is_none().then_some(()))
    })
}

#[test]
fn unallocated_claim_has_finalizer_and_does_not_leak() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("new-claim")?;
    // No GPU has so much memory.
    tenant.apply(&pod_with_share("a", "vgpu.drava.dev", "{memory: 1000Gi}"))?;
    tenant.event("a", "GpuUnschedulable")?;
    let claim = claim_of(&tenant, "a")?;
    ensure!(has_finalizer(&claim), "{claim}");
    ensure!(claim["metadata"]["labels"][LABEL] == "template", "{claim}");
    ensure!(claim["status"]["allocation"].is_null(), "{claim}");
    ensure!(written_by_controller(&claim).is_empty(), "{claim}");
    let name = claim["metadata"]["name"].as_str().context("no name")?;
    tenant.delete_pods(&["a"])?;
    is_gone(&tenant, name)?;

    tenant.apply(&named_claim("named", "fraction.drava.dev"))?;
    let claim = tenant.find("resourceclaim", "named")?.context("no claim")?;
    ensure!(has_finalizer(&claim), "{claim}");
    ensure!(claim["metadata"]["labels"][LABEL] == "named", "{claim}");
    tenant.kubectl(&["delete", "resourceclaim", "named", "--timeout=60s"])?;
    is_gone(&tenant, "named")
}

#[test]
fn claim_with_finalizer_is_allocated_by_one_write() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("one-write")?;
    tenant.apply(&pod_with_share("a", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("a")?;
    let claim = claim_of(&tenant, "a")?;
    ensure!(written_by_controller(&claim) == ["status"], "{claim}");
    let config = claim["status"]["allocation"]["devices"]["config"].as_array();
    let record = config.and_then(|all| all.last()).context("no record")?;
    ensure!(
        record["opaque"]["driver"] == "controller.gpu.drava.dev",
        "{record}"
    );
    let record = &record["opaque"]["parameters"];
    let found = tenant.find("pod", "a")?.context("no pod")?;
    ensure!(record["podUID"] == found["metadata"]["uid"], "{record}");
    let explained = cluster.drava(&["explain", "pod", "a", "-n", tenant.name()])?;
    let reason = record["reason"].as_str().context("no reason")?;
    ensure!(explained.stdout.contains(reason), "{explained:?}");
    let name = claim["metadata"]["name"].as_str().context("no name")?;
    tenant.delete_pods(&["a"])?;
    is_gone(&tenant, name)
}

#[test]
fn claim_without_finalizer_gets_it_before_allocation() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("no-finalizer")?;
    tenant.apply(&named_claim("lost", "vgpu.drava.dev"))?;
    let remove = r#"{"metadata": {"finalizers": null}}"#;
    let patch = [
        "patch",
        "resourceclaim",
        "lost",
        "--type=merge",
        "-p",
        remove,
    ];
    tenant.kubectl(&patch)?;
    tenant.apply(&pod("a", "resourceClaimName: lost"))?;
    tenant.running("a")?;
    let claim = claim(&tenant, "lost")?;
    ensure!(has_finalizer(&claim), "{claim}");
    let mut written = written_by_controller(&claim);
    written.sort_unstable();
    ensure!(written == ["metadata", "status"], "{claim}");
    tenant.delete_pods(&["a"])
}

#[test]
fn claims_of_other_drivers_get_no_finalizer() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("other-driver")?;
    let claim = dry_run(&tenant, "gpu.example.com")?;
    ensure!(!has_finalizer(&claim), "{claim}");
    ensure!(claim["metadata"]["labels"].is_null(), "{claim}");
    Ok(())
}

/// Returns a claim with metadata of its own that would be created; a request for the class is its second alternative.
fn dry_run_of_alternative(tenant: &Namespace<'_>, class: &str) -> Result<Value> {
    let alternative =
        |name: &str, class: &str| format!("{{name: {name}, deviceClassName: {class}}}");
    let alternatives = [
        alternative("first", "gpu.example.com"),
        alternative("second", class),
    ];
    tenant.dry_run(&format!(
        "{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: probe, labels: {{a: b}}, annotations: {{c: d}}, \
         finalizers: [example.com/own]}}, spec: {{devices: {{requests: [{{name: gpu, firstAvailable: [{}]}}]}}}}}}",
        alternatives.join(", ")
    ))
}

#[test]
fn policy_for_finalizers_changes_nothing_else() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("nothing-else")?;
    let mut own = dry_run_of_alternative(&tenant, "vgpu.drava.dev")?;
    let mut other = dry_run_of_alternative(&tenant, "other.example.com")?;
    ensure!(has_finalizer(&own), "{own}");
    ensure!(own["metadata"]["labels"][LABEL] == "named", "{own}");
    ensure!(!has_finalizer(&other), "{other}");
    // Without what the policy adds, and what differs from request to request, both are equal.
    own["spec"]["devices"]["requests"][0]["firstAvailable"][1]["deviceClassName"] =
        "other.example.com".into();
    for claim in [&mut own, &mut other] {
        let metadata = &mut claim["metadata"];
        if let Some(finalizers) = metadata["finalizers"].as_array_mut() {
            finalizers.retain(|finalizer| finalizer != FINALIZER);
        }
        if let Some(labels) = metadata["labels"].as_object_mut() {
            labels.remove(LABEL);
        }
        if let Some(metadata) = metadata.as_object_mut() {
            metadata.retain(|field, _| {
                !["uid", "creationTimestamp", "managedFields"].contains(&field.as_str())
            });
        }
    }
    ensure!(own == other, "{own} {other}");
    Ok(())
}

#[test]
fn serves_claims_without_the_policy_for_finalizers() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("no-policy")?;
    tenant.apply(&claim_template("a", SHARE, ""))?;
    let binding = ["mutatingadmissionpolicybinding", POLICY];
    let mut object = cluster.get(&binding)?;
    cluster.kubectl(["delete"].iter().chain(&binding))?;
    let served = wait("the policy is out of force", || {
        Ok((!has_finalizer(&dry_run(&tenant, "vgpu.drava.dev")?)).then_some(()))
    })
    .and_then(|()| tenant.apply(&pod("a", "resourceClaimTemplateName: a")))
    .and_then(|()| tenant.running("a"))
    .and_then(|()| claim_of(&tenant, "a"));
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|key, _| ["name", "labels", "annotations"].contains(&key.as_str()));
    }
    tenant.apply(&serde_json::to_string(&object)?)?;
    let claim = served?;
    ensure!(has_finalizer(&claim), "{claim}");
    ensure!(claim["metadata"]["labels"].is_null(), "{claim}");
    wait("the policy is in force", || {
        Ok(has_finalizer(&dry_run(&tenant, "vgpu.drava.dev")?).then_some(()))
    })?;
    tenant.delete_pods(&["a"])
}
