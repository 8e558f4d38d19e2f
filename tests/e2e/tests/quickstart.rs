//! The quickstart of the README: two pods share a GPU, and a third one waits for it. No other cluster runs beside this test,
//! because the start of the third pod is timed.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// Promised time from the deletion of the pods on a GPU to the start of the pod that waits for it. It includes the second of
/// their grace.
const START_WAIT: Duration = Duration::from_secs(5);

#[test]
fn quickstart_shares_a_gpu_and_queues_the_third_pod() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quickstart")?;
    tenant.example("quickstart")?;
    tenant.running("inference")?;
    tenant.running("training")?;

    // Packed onto one GPU.
    let devices = tenant.devices_of("inference")?;
    ensure!(
        devices == tenant.devices_of("training")?,
        "two shares that fit on one GPU are on two"
    );
    ensure!(
        devices.len() == 1 && devices[0].ends_with("-vgpu"),
        "{devices:?}"
    );

    // Each container sees its share as the GPU.
    for (pod, mib) in [("inference", 8192), ("training", 20480)] {
        let table = tenant.exec(pod, "app", &["nvidia-smi"])?.success()?;
        ensure!(
            table.contains(&format!(" {mib}MiB |")),
            "{pod} sees\n{table}"
        );
        let total = tenant.total_mib(pod)?;
        ensure!(total == mib.to_string(), "{pod} sees {total:?} MiB");
    }

    // The claim's description for users.
    let claim = tenant.claim_of("inference")?;
    // The driver writes the status after it has prepared the claim.
    let described = wait("the claim's status reports its limits", || {
        let described = tenant.kubectl(&["describe", "resourceclaim", &claim])?;
        Ok(described.contains("Interposed").then_some(described))
    })?;
    for word in [
        "Allocation",
        "gpu.drava.dev",
        &devices[0],
        "8Gi",
        "libvgpu limits memory to 8192 MiB; 30% of GPU time guaranteed",
        "Reserved For",
        "PlacementRecord",
    ] {
        ensure!(described.contains(word), "no {word:?} in\n{described}");
    }

    // The third pod requests two whole GPUs; one of them is shared.
    let event = tenant.event("distributed", "ExclusiveConflict")?;
    ensure!(event.contains("0/1 nodes"), "{event}");
    wait("the condition tells why the pod waits", || {
        let condition = allocated_condition(&tenant, "distributed")?;
        let message = condition["message"].as_str().unwrap_or_default();
        let is_told = condition["status"] == "False" && message.contains("ExclusiveConflict");
        Ok(is_told.then_some(()))
    })?;
    ensure!(
        tenant
            .find("pod", "distributed")?
            .context("pod distributed")?["status"]["phase"]
            == "Pending"
    );

    // The pending pod gets the GPU once both shares are released.
    let deleted = Instant::now();
    tenant.kubectl(&[
        "delete",
        "pod",
        "inference",
        "training",
        "--grace-period=1",
        "--wait=false",
    ])?;
    tenant.running("distributed")?;
    let waited = deleted.elapsed();
    ensure!(
        waited < START_WAIT,
        "the pending pod ran {waited:?} after the deletion"
    );
    let devices = tenant.devices_of("distributed")?;
    ensure!(devices == ["gpu-0", "gpu-1"], "{devices:?}");
    wait("the condition says that the pod has its GPUs", || {
        let condition = allocated_condition(&tenant, "distributed")?;
        Ok((condition["status"] == "True").then_some(()))
    })
}

/// Returns the condition `gpu.drava.dev/Allocated` of a pod.
fn allocated_condition(tenant: &Namespace<'_>, pod: &str) -> Result<Value> {
    let pod = tenant.find("pod", pod)?.context("the pod is gone")?;
    let conditions = pod["status"]["conditions"].as_array();
    let mut own = conditions
        .into_iter()
        .flatten()
        .filter(|condition| condition["type"] == "gpu.drava.dev/Allocated");
    Ok(own.next().cloned().unwrap_or_default())
}
