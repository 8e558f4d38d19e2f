//! Faults of a GPU: taint, condition and events, a new pod on the other GPU, and recovery.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// Controls the simulated GPUs of the node.
fn control(cluster: &TestCluster, arguments: &[&str]) -> Result<()> {
    let ctl = ["ctl", "--root", "/opt/drava-sim"];
    cluster.on_node(
        "/opt/drava-build/simulator-machine",
        &[&ctl, arguments].concat(),
    )?;
    Ok(())
}

/// Returns the devices with a health taint, as `name=value`.
fn tainted(cluster: &TestCluster) -> Result<Vec<String>> {
    let slices = cluster.get(&["resourceslices"])?;
    let slices = slices["items"].as_array().into_iter().flatten();
    let devices =
        slices.flat_map(|slice| slice["spec"]["devices"].as_array().into_iter().flatten());
    let taint = |device: &Value| {
        let mut taints = device["taints"].as_array()?.iter();
        let taint = taints.find(|taint| taint["key"] == "gpu.drava.dev/unhealthy")?;
        let (name, value) = (device["name"].as_str()?, taint["value"].as_str()?);
        Some(format!("{name}={value}"))
    };
    Ok(devices.filter_map(taint).collect())
}

/// Waits until the devices of `gpu`, and no others, have a taint with this value.
fn wait_for_taint(cluster: &TestCluster, gpu: &str, value: &str) -> Result<()> {
    wait(&format!("taint {value} on {gpu} only"), || {
        let expected = [format!("{gpu}={value}"), format!("{gpu}-vgpu={value}")];
        Ok((tainted(cluster)? == expected).then_some(()))
    })
}

/// Waits until the condition `Healthy` of the claim of a pod has this status, and returns its message.
fn wait_for_condition(tenant: &Namespace<'_>, pod: &str, status: &str) -> Result<String> {
    let claim = tenant.claim_of(pod)?;
    wait(&format!("condition Healthy={status} of {claim}"), || {
        let found = tenant.find("resourceclaim", &claim)?;
        let found = found.context("the claim is gone")?;
        let conditions = found["status"]["devices"][0]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let healthy = conditions
            .find(|condition| condition["type"] == "Healthy" && condition["status"] == status);
        Ok(healthy.and_then(|condition| condition["message"].as_str().map(str::to_owned)))
    })
}

/// Runs a pod with a share and returns its GPU (`gpu-<minor>`).
fn gpu_of_new_pod(tenant: &Namespace<'_>, pod: &str) -> Result<String> {
    tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running(pod)?;
    let devices = tenant.devices_of(pod)?;
    let device = devices.first().context("the claim has no device")?;
    Ok(device.trim_end_matches("-vgpu").to_owned())
}

#[test]
fn fatal_xid_keeps_new_pods_off_the_gpu_until_it_recovers() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("xid")?;
    let gpu = gpu_of_new_pod(&tenant, "before")?;
    let index = gpu.trim_start_matches("gpu-").to_owned();
    wait_for_condition(&tenant, "before", "True")?;
    cluster.gpus_are_watched()?;

    let test = || -> Result<()> {
        control(&cluster, &["xid", "--gpu", &index, "--code", "31"])?;
        control(&cluster, &["xid", "--gpu", &index, "--code", "79"])?;
        wait_for_taint(&cluster, &gpu, "xid-79")?;
        let message = wait_for_condition(&tenant, "before", "False")?;
        ensure!(message.contains("XID 79"), "{message}");
        let event = tenant.event("before", "XID 79")?;
        ensure!(event.starts_with("GpuUnhealthy"), "{event}");
        // Binpack would select the GPU of the first pod.
        let other = gpu_of_new_pod(&tenant, "during")?;
        ensure!(other != gpu, "a new pod uses the unhealthy {gpu}");
        control(&cluster, &["break", "--gpu", &index, "--lost"])?;
        wait_for_taint(&cluster, &gpu, "lost")
    };
    let outcome = test();
    // As after a reset: the GPU was gone and answers again.
    control(&cluster, &["break", "--gpu", &index])?;
    outcome?;
    wait("no health taint", || {
        Ok(tainted(&cluster)?.is_empty().then_some(()))
    })?;
    wait_for_condition(&tenant, "before", "True")?;
    tenant.delete_pods(&["during"])?;
    let again = gpu_of_new_pod(&tenant, "after")?;
    ensure!(again == gpu, "a new pod uses {again}, not {gpu}");
    Ok(())
}
