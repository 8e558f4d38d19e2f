//! Two tenants share a GPU: what they see, how much they can allocate, which pod stays pending.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_share, pod_without_claim};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

const MIB: u64 = 1 << 20;

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
        "gpu.drava.dev/placement-reason",
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

#[test]
fn denies_allocation_beyond_limit() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("exact")?;
    tenant.apply(&pod_with_share("exact", "vgpu.drava.dev", "{memory: 3Gi}"))?;
    tenant.running("exact")?;
    let info = tenant
        .exec("exact", "app", &["cuda-probe", "info", "-o", "json"])?
        .json()?;
    ensure!(info["devices"][0]["totalBytes"] == 3072 * MIB, "{info}");
    let free_mib = tenant.fill("exact", 0)?;

    // All free memory can be allocated at once; one MiB more is denied.
    let free = free_mib.to_string();
    tenant
        .exec("exact", "app", &["cuda-probe", "alloc", "--mib", &free])?
        .success()?;
    let beyond = (free_mib + 1).to_string();
    let denied = tenant.exec("exact", "app", &["cuda-probe", "alloc", "--mib", &beyond])?;
    ensure!(
        denied.code == 2 && (denied.stdout + &denied.stderr).contains("CUDA_ERROR_OUT_OF_MEMORY")
    );
    Ok(())
}

#[test]
fn tenants_cannot_exceed_gpu_memory_together() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("together")?;
    tenant.share_one_gpu(&[("left", "30Gi"), ("right", "40Gi")])?;

    // Both allocate all they can at the same time, and hold it.
    let (left, right) = std::thread::scope(|scope| {
        let fill = |pod| {
            tenant
                .exec(
                    pod,
                    "app",
                    &["cuda-probe", "fill", "--hold", "3", "-o", "json"],
                )?
                .json()
        };
        let left = scope.spawn(move || fill("left"));
        let right = scope.spawn(move || fill("right"));
        (left.join(), right.join())
    });
    for (filled, limit_mib) in [(left, 30 << 10), (right, 40 << 10)] {
        let filled = filled.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
        let taken = filled["allocatedBytes"]
            .as_u64()
            .context("allocatedBytes")?;
        ensure!(taken <= limit_mib * MIB, "{filled}");
        ensure!(
            taken * 100 >= limit_mib * MIB * 97,
            "most of the share cannot be allocated: {filled}"
        );
    }

    // A third share that does not fit goes to the other GPU; one that fits on no GPU stays pending with the reason.
    tenant.apply(&pod_with_share("third", "vgpu.drava.dev", "{memory: 20Gi}"))?;
    tenant.running("third")?;
    ensure!(
        tenant.devices_of("third")? != tenant.devices_of("left")?,
        "the third share over-commits the GPU"
    );
    tenant.apply(&pod_with_share(
        "fourth",
        "vgpu.drava.dev",
        "{memory: 70Gi}",
    ))?;
    let why = tenant.event("fourth", "InsufficientMemory")?;
    ensure!(why.contains("most free memory"), "{why}");
    Ok(())
}

#[test]
fn containers_of_one_claim_share_its_limit() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("budget")?;
    tenant.example("shared-claim")?;
    tenant.running("team")?;
    let holder = std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            tenant.exec(
                "team",
                "first",
                &["cuda-probe", "alloc", "--mib", "2500", "--hold", "20"],
            )
        });
        let second = wait("the second container sees the first one's memory", || {
            let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
            let seen = tenant.exec("team", "second", &probe)?.json()?;
            let free = seen["before"]["freeBytes"].as_u64().context("freeBytes")?;
            Ok((free < 1600 * MIB).then_some(free))
        })
        .and_then(|_| tenant.exec("team", "second", &["cuda-probe", "alloc", "--mib", "2500"]));
        // Ends the holder early: its pod is deleted with the namespace.
        tenant.kubectl(&["delete", "pod", "team", "--grace-period=0", "--force"])?;
        drop(first.join());
        second
    })?;
    ensure!(
        holder.code == 2,
        "the second container received the first one's memory: {holder:?}"
    );
    Ok(())
}

#[test]
fn pod_without_claim_sees_no_gpu() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("outsider")?;
    tenant.apply(&pod_without_claim("outsider"))?;
    tenant.running("outsider")?;
    let devices = tenant.exec("outsider", "app", &["ls", "/dev"])?.success()?;
    ensure!(!devices.contains("nvidia"), "{devices}");
    let smi = tenant.exec("outsider", "app", &["nvidia-smi"])?;
    ensure!(smi.code != 0, "nvidia-smi found a GPU: {}", smi.stdout);

    // A container that does not reference the pod's claim sees no GPU either.
    tenant.example("shared-claim")?;
    tenant.running("team")?;
    ensure!(tenant.exec("team", "outsider", &["nvidia-smi"])?.code != 0);
    tenant.exec("team", "first", &["nvidia-smi"])?.success()?;
    Ok(())
}

#[test]
fn whole_gpu_is_not_limited() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("whole")?;
    tenant.example("whole-gpu")?;
    tenant.running("whole")?;
    let total = tenant.total_mib("whole")?;
    ensure!(total == "81559", "{total}");
    let preload = tenant.exec("whole", "app", &["cat", "/etc/ld.so.preload"])?;
    ensure!(
        preload.code != 0,
        "libvgpu is loaded for a whole GPU: {}",
        preload.stdout
    );

    // The allocated GPU is exclusive, the other one is not allocated.
    tenant.apply(&pod_with_share("share", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("share")?;
    let (whole, share) = (tenant.devices_of("whole")?, tenant.devices_of("share")?);
    ensure!(
        share[0] != format!("{}-vgpu", whole[0]),
        "{whole:?} and {share:?}"
    );
    Ok(())
}
