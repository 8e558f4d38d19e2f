//! `cores` is a guaranteed percentage of GPU time.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_request, pod_with_share};
use drava_e2e::{Namespace, TestCluster};

/// Deviation below a guarantee. The guarantee is 2 points over 10 s on an idle host. The rest is for a shorter time, of which
/// a kernel and a control period are a point, and for a host that delays launches.
const BELOW: f64 = 0.05;

/// Duration of a kernel, launches in flight, and measured time.
const KERNEL_MS: u32 = 5;
const IN_FLIGHT: u32 = 4;
const SECONDS: u32 = 6;

/// Time in which an idle share saves credit, milliseconds.
const CREDIT_MS: f64 = 50.0;

/// Returns the largest fraction of the measured time for a share that gets only its guarantee: with the saved credit, a
/// kernel that overdraws it, and the kernels in flight at the start. No host adds to this: it can only delay launches.
fn upper_bound(guarantee: f64) -> f64 {
    let kernels_ms = f64::from((IN_FLIGHT + 1) * KERNEL_MS);
    guarantee + (guarantee * CREDIT_MS + kernels_ms) / (f64::from(SECONDS) * 1000.0)
}

/// Keeps kernels in flight and returns the fraction of GPU time that they received. The margin covers the different
/// starts of commands that run concurrently.
fn gpu_time_fraction(tenant: &Namespace<'_>, pod: &str) -> Result<f64> {
    let launch = format!(
        "cuda-probe launch --ms {KERNEL_MS} --in-flight {IN_FLIGHT} --seconds {SECONDS} --margin 2 -o json"
    );
    let launch: Vec<&str> = launch.split(' ').collect();
    let done = tenant.exec(pod, "app", &launch)?.json()?;
    done["share"].as_f64().context("share")
}

fn ensure_within(what: &str, fraction: f64, due: f64, most: f64) -> Result<()> {
    ensure!(
        (due - BELOW..=most).contains(&fraction),
        "{what} had {fraction:.3} of the GPU time instead of {due}, at most {most:.3}"
    );
    Ok(())
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
    // Each also gets what the other leaves, which is as much as that one may miss.
    ensure_within("the share of 25%", small, 0.25, 0.25 + BELOW)?;
    ensure_within("the share of 75%", large, 0.75, 0.75 + BELOW)?;
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
    let most = upper_bound(0.2);
    ensure_within("the fixed share of 20% on an idle GPU", fixed, 0.2, most)?;
    let most = upper_bound(1.0);
    ensure_within("the balanced share of 20% on an idle GPU", lent, 1.0, most)?;
    Ok(())
}
