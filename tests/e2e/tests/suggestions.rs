//! What `kubectl drava explain` says would have to change: each suggestion is applied, and the pod runs.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

/// Returns the changes of this kind that the command suggests for the pod.
fn suggestions(
    cluster: &TestCluster,
    tenant: &Namespace<'_>,
    pod: &str,
    kind: &str,
) -> Result<Vec<Value>> {
    wait(&format!("{kind} is suggested for pod {pod}"), || {
        let explain = ["explain", "pod", pod, "-n", tenant.name(), "-o", "json"];
        let report = cluster.drava(&explain)?.json()?;
        let changes = report["changes"].as_array().into_iter().flatten();
        let of_kind: Vec<Value> = changes
            .filter(|change| change["kind"] == kind)
            .cloned()
            .collect();
        Ok((!of_kind.is_empty()).then_some(of_kind))
    })
}

fn share(name: &str, memory: &str) -> String {
    pod_with_share(name, "vgpu.drava.dev", &format!("{{memory: {memory}}}"))
}

/// Fills both GPUs of 80 GiB with a pod of 60 GiB and one of 70 GiB.
fn fill(tenant: &Namespace<'_>) -> Result<()> {
    for (name, memory) in [("first", "60Gi"), ("second", "70Gi")] {
        tenant.apply(&share(name, memory))?;
        tenant.running(name)?;
    }
    Ok(())
}

#[test]
fn suggested_amount_fits_and_more_does_not() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suggest-amount")?;
    fill(&tenant)?;
    tenant.apply(&share("large", "40Gi"))?;
    let changes = suggestions(&cluster, &tenant, "large", "reduceMemory")?;
    let mib = changes[0]["mib"].as_u64().context("mib")?;
    ensure!((1024..40 * 1024).contains(&mib), "{changes:?}");
    tenant.delete_pods(&["large"])?;
    tenant.apply(&share("more", &format!("{}Mi", mib + 1)))?;
    tenant.event("more", "InsufficientMemory")?;
    tenant.delete_pods(&["more"])?;
    tenant.apply(&share("fits", &format!("{mib}Mi")))?;
    tenant.running("fits")
}

#[test]
fn pod_runs_after_the_end_of_suggested_pods() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suggest-end")?;
    fill(&tenant)?;
    tenant.apply(&share("large", "40Gi"))?;
    let changes = suggestions(&cluster, &tenant, "large", "endPods")?;
    for change in &changes {
        let pods = change["pods"].as_array().context("pods")?;
        let names = pods.iter().filter_map(|pod| pod["pod"].as_str());
        let prefix = format!("{}/", tenant.name());
        let names: Vec<&str> = names.filter_map(|pod| pod.strip_prefix(&prefix)).collect();
        ensure!(names.len() == 1 && pods.len() == 1, "{change}");
        tenant.delete_pods(&names)?;
        tenant.running("large")?;
        // The next suggestion is for the same state.
        tenant.delete_pods(&["large"])?;
        for name in &names {
            let memory = if *name == "first" { "60Gi" } else { "70Gi" };
            tenant.apply(&share(name, memory))?;
            tenant.running(name)?;
        }
        tenant.apply(&share("large", "40Gi"))?;
        tenant.event("large", "InsufficientMemory")?;
    }
    Ok(())
}

#[test]
fn pod_runs_after_suggested_limit_is_raised() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suggest-limit")?;
    let quota = tenant.name().to_owned();
    tenant.apply(&format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuQuota, metadata: {{name: {quota}}}, spec: {{namespaces: [{quota}], limit: \
         {{memory: 4Gi, devices: 8}}}}}}"
    ))?;
    let outcome = (|| {
        tenant.apply(&share("small", "3Gi"))?;
        tenant.running("small")?;
        tenant.apply(&share("over", "6Gi"))?;
        tenant.event("over", "QuotaExceeded")?;
        let changes = suggestions(&cluster, &tenant, "over", "raiseLimits")?;
        let limits = changes[0]["limits"].as_array().context("limits")?;
        for limit in limits {
            ensure!(limit["quota"] == quota.as_str(), "{limit}");
            let (resource, amount) = (limit["resource"].as_str(), &limit["amount"]);
            let patch = json!({"spec": {"limit": {resource.context("resource")?: amount}}});
            let patch = patch.to_string();
            cluster.kubectl(["patch", "gpuquota", &quota, "--type=merge", "-p", &patch])?;
        }
        tenant.running("over")
    })();
    cluster.kubectl(["delete", "gpuquota", &quota])?;
    outcome
}

#[test]
fn explains_claims_and_shows_a_live_view() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("explain-claim")?;
    tenant.apply(&share("small", "3Gi"))?;
    tenant.running("small")?;
    let claim = tenant.claim_of("small")?;
    let explain = ["explain", "claim", &claim, "-n", tenant.name()];
    let text = cluster.drava(&explain)?.success()?;
    ensure!(
        text.contains("-vgpu of pool") && text.contains("reserved for small"),
        "{text}"
    );
    tenant.apply(&share("giant", "500Gi"))?;
    let claim = tenant.claim_of("giant")?;
    let explain = [
        "explain",
        "claim",
        &claim,
        "-n",
        tenant.name(),
        "-o",
        "yaml",
    ];
    let text = cluster.drava(&explain)?.success()?;
    ensure!(
        text.contains("state: Pending") && text.contains("giant"),
        "{text}"
    );
    // The view follows the cluster: a pod that starts after the first update appears in a later one.
    let updates = cluster.drava_until(
        &["top", "-o", "wide", "--watch", "--interval", "1"],
        |text| {
            if !text.contains("UUID") {
                return Ok(false);
            }
            if tenant.find("pod", "later")?.is_none() {
                tenant.apply(&share("later", "2Gi"))?;
            }
            Ok(text.contains("(later)"))
        },
    )?;
    ensure!(updates.matches("UUID").count() > 1, "{updates}");
    Ok(())
}
