//! Two tenants share a GPU: how much they can allocate, and what other pods see.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_share, pod_without_claim};
use drava_e2e::{TestCluster, wait};

const MIB: u64 = 1 << 20;

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
