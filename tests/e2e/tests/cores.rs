//! `cores` is a guaranteed share of the card's time.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{Namespace, World};

/// Keeps the card busy with kernels of 5 ms and returns the part of the time that they had it.
fn share_of_time(tenant: &Namespace<'_>, pod: &str) -> Result<f64> {
    let launch = [
        "cuda-probe",
        "launch",
        "--ms",
        "5",
        "--seconds",
        "8",
        "-o",
        "json",
    ];
    let done = tenant.exec(pod, "app", &launch)?.json()?;
    done["share"].as_f64().context("share")
}

#[test]
fn two_tenants_get_the_card_in_proportion() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("cores")?;
    for (pod, cores) in [("small", "25"), ("large", "75")] {
        let capacity = format!("{{memory: 4Gi, cores: \"{cores}\"}}");
        tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", &capacity))?;
        tenant.running(pod)?;
    }
    ensure!(
        tenant.devices_of("small")? == tenant.devices_of("large")?,
        "on two cards"
    );
    let (small, large) = std::thread::scope(|scope| {
        let small = scope.spawn(|| share_of_time(&tenant, "small"));
        let large = scope.spawn(|| share_of_time(&tenant, "large"));
        (small.join(), large.join())
    });
    let joined = |_| anyhow::anyhow!("a thread panicked");
    let (small, large) = (small.map_err(joined)??, large.map_err(joined)??);
    // Without metering they would have equal parts. A loaded host keeps both from their full share.
    ensure!(
        large > 1.7 * small && small > 0.08,
        "the tenant with 25 % had the card for {small:.3} of the time, the one with 75 % for {large:.3}"
    );
    Ok(())
}

#[test]
fn idle_time_is_lent_but_not_to_a_fixed_share() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("idle")?;
    tenant.apply(&pod_with_share(
        "lent",
        "vgpu.drava.dev",
        "{memory: 4Gi, cores: \"20\"}",
    ))?;
    let config = "[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, computePolicy: fixed}}}]";
    let exactly =
        "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 4Gi, cores: \"20\"}}}";
    tenant.apply(&pod_with_request("fixed", exactly, config))?;
    tenant.running("lent")?;
    tenant.running("fixed")?;
    // One after the other, so that each has the card for itself.
    let lent = share_of_time(&tenant, "lent")?;
    let fixed = share_of_time(&tenant, "fixed")?;
    ensure!(
        fixed < 0.3 && lent > 2.0 * fixed,
        "of an idle card, the balanced share of 20 % had {lent:.3} and the fixed one {fixed:.3}"
    );
    Ok(())
}
