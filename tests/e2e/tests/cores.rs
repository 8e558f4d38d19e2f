//! `cores` is a guaranteed percentage of GPU time.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{Namespace, TestCluster};

/// Runs kernels of 5 ms back to back and returns the fraction of GPU time that they received.
fn gpu_time_fraction(tenant: &Namespace<'_>, pod: &str) -> Result<f64> {
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
fn divides_gpu_time_in_proportion_to_cores() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("cores")?;
    for (pod, cores) in [("small", "25"), ("large", "75")] {
        let capacity = format!("{{memory: 4Gi, cores: \"{cores}\"}}");
        tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", &capacity))?;
        tenant.running(pod)?;
    }
    ensure!(
        tenant.devices_of("small")? == tenant.devices_of("large")?,
        "the shares are on two GPUs"
    );
    let (small, large) = std::thread::scope(|scope| {
        let small = scope.spawn(|| gpu_time_fraction(&tenant, "small"));
        let large = scope.spawn(|| gpu_time_fraction(&tenant, "large"));
        (small.join(), large.join())
    });
    let joined = |_| anyhow::anyhow!("a thread panicked");
    let (small, large) = (small.map_err(joined)??, large.map_err(joined)??);
    // Without metering the fractions would be equal. On a loaded host neither share reaches its full fraction.
    ensure!(
        large > 1.7 * small && small > 0.08,
        "the share with 25% of GPU time had {small:.3} of the time, the share with 75% had {large:.3}"
    );
    Ok(())
}

#[test]
fn lends_idle_time_except_to_fixed_shares() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("idle")?;
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
    // One after the other, so that each share has the GPU for itself.
    let lent = gpu_time_fraction(&tenant, "lent")?;
    let fixed = gpu_time_fraction(&tenant, "fixed")?;
    ensure!(
        fixed < 0.3 && lent > 2.0 * fixed,
        "on an idle GPU, the balanced share of 20% had {lent:.3} of the time, the fixed share {fixed:.3}"
    );
    Ok(())
}
