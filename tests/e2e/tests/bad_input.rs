//! What cannot be granted ends in words at the place where the user looks.

use anyhow::{Context, Result, ensure};
use drava_e2e::World;
use drava_e2e::manifest::{pod_with_request, pod_with_share};

/// The pod waits, and its event has all the words.
fn waits_with(name: &str, manifest: &str, words: &[&str]) -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace(name)?;
    tenant.apply(manifest)?;
    let event = tenant.event(name, words.first().context("no words")?)?;
    for word in words {
        ensure!(event.contains(word), "no {word:?} in {event:?}");
    }
    Ok(())
}

#[test]
fn larger_than_any_card() -> Result<()> {
    let manifest = pod_with_share("giant", "vgpu.drava.dev", "{memory: 500Gi}");
    waits_with("giant", &manifest, &["more than any card has", "500 GiB"])
}

#[test]
fn zero_memory_is_not_everything() -> Result<()> {
    waits_with(
        "zero",
        &pod_with_share("zero", "vgpu.drava.dev", "{memory: \"0\"}"),
        &["memory", "0 is not an amount"],
    )
}

#[test]
fn more_cores_than_a_card_has() -> Result<()> {
    waits_with(
        "cores",
        &pod_with_share("cores", "vgpu.drava.dev", "{memory: 1Gi, cores: \"101\"}"),
        &["cores", "exceeds 100"],
    )
}

#[test]
fn a_class_that_does_not_exist() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("class")?;
    tenant.apply(&pod_with_share("class", "vpgu.drava.dev", "{memory: 1Gi}"))?;
    tenant.event("class", "vpgu.drava.dev")?;
    Ok(())
}

#[test]
fn a_negative_quantity() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("negative")?;
    // Refused by the API server, or explained by the controller.
    match tenant.apply(&pod_with_share(
        "negative",
        "vgpu.drava.dev",
        "{memory: \"-1Gi\"}",
    )) {
        Err(refused) => ensure!(format!("{refused:#}").contains("memory"), "{refused:#}"),
        Ok(()) => {
            tenant.event("negative", "memory")?;
        }
    }
    Ok(())
}

#[test]
fn an_unknown_config_field_is_named() -> Result<()> {
    let config = r#"[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, computPolicy: fixed}}}]"#;
    let manifest = pod_with_request(
        "config",
        "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}",
        config,
    );
    waits_with("config", &manifest, &["computPolicy"])
}

#[test]
fn a_tenant_cannot_loosen_its_limits() -> Result<()> {
    let config = r#"[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, computePolicy: none}}}]"#;
    let manifest = pod_with_request(
        "loosen",
        "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 1Gi}}}",
        config,
    );
    waits_with("loosen", &manifest, &["computePolicy"])
}

#[test]
fn the_managed_taint_may_not_be_tolerated() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("taint")?;
    for toleration in [
        "{key: gpu.drava.dev/managed, operator: Exists}",
        "{operator: Exists}",
    ] {
        let exactly = format!("{{deviceClassName: vgpu.drava.dev, tolerations: [{toleration}]}}");
        let refused = tenant.apply(&pod_with_request("taint", &exactly, ""));
        let words = format!(
            "{:#}",
            refused
                .err()
                .with_context(|| format!("{toleration} was accepted"))?
        );
        ensure!(words.contains("gpu.drava.dev/managed"), "{words}");
    }
    // A toleration of something else is nobody's business.
    let exactly = "{deviceClassName: vgpu.drava.dev, tolerations: [{key: example.com/other, operator: Exists}]}";
    tenant.apply(&pod_with_request("fine", exactly, ""))
}
