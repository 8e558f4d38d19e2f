//! Requests that cannot be satisfied are explained at the object that the user inspects.

use anyhow::{Context, Result, ensure};
use drava_e2e::TestCluster;
use drava_e2e::manifest::{pod_with_request, pod_with_share};

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

#[test]
fn names_unknown_config_field() -> Result<()> {
    let config = r#"[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, computPolicy: fixed}}}]"#;
    let manifest = pod_with_request(
        "config",
        "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}",
        config,
    );
    is_pending_with("config", &manifest, &["computPolicy"])
}

#[test]
fn tenant_cannot_raise_its_limits() -> Result<()> {
    let config = r#"[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, computePolicy: none}}}]"#;
    let manifest = pod_with_request(
        "loosen",
        "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}",
        config,
    );
    is_pending_with("loosen", &manifest, &["computePolicy"])
}

#[test]
fn rejects_toleration_of_managed_taint() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("taint")?;
    for toleration in [
        "{key: gpu.drava.dev/managed, operator: Exists}",
        "{operator: Exists}",
    ] {
        let exactly = format!("{{deviceClassName: vgpu.drava.dev, tolerations: [{toleration}]}}");
        let rejected = tenant.apply(&pod_with_request("taint", &exactly, ""));
        let words = format!(
            "{:#}",
            rejected
                .err()
                .with_context(|| format!("{toleration} was accepted"))?
        );
        ensure!(words.contains("gpu.drava.dev/managed"), "{words}");
    }
    // A toleration of another taint is accepted.
    let exactly = "{deviceClassName: vgpu.drava.dev, tolerations: [{key: example.com/other, operator: Exists}]}";
    tenant.apply(&pod_with_request("fine", exactly, ""))
}
