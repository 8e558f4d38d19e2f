//! Two tenants of one card: what they see, what they can take, who has to wait.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_share, pod_without_claim};
use drava_e2e::{World, wait};

const MIB: u64 = 1 << 20;

#[test]
fn the_quickstart_does_what_it_says() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("quickstart")?;
    tenant.example("quickstart")?;
    tenant.running("inference")?;
    tenant.running("training")?;

    // Packed on one card.
    let devices = tenant.devices_of("inference")?;
    ensure!(
        devices == tenant.devices_of("training")?,
        "two shares that fit on one card are on two"
    );
    ensure!(
        devices.len() == 1 && devices[0].ends_with("-vgpu"),
        "{devices:?}"
    );

    // Each sees its share as the card.
    for (pod, mib) in [("inference", 8192), ("training", 20480)] {
        let table = tenant.exec(pod, "app", &["nvidia-smi"])?.success()?;
        ensure!(
            table.contains(&format!(" {mib}MiB |")),
            "{pod} sees\n{table}"
        );
        let total = tenant.total_mib(pod)?;
        ensure!(total == mib.to_string(), "{pod} is told {total:?} MiB");
    }

    // What a user reads about it.
    let claim = tenant.claim_of("inference")?;
    // The driver writes the status after it has prepared the claim.
    let described = wait("the claim's status says that it is enforced", || {
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

    // The third wants two whole cards; one of them is shared.
    let waiting = tenant.event("distributed", "ExclusiveConflict")?;
    ensure!(waiting.contains("0/1 nodes"), "{waiting}");
    ensure!(
        tenant
            .find("pod", "distributed")?
            .context("pod distributed")?["status"]["phase"]
            == "Pending"
    );

    // Leaving frees the card, and the waiting pod gets it.
    tenant.delete_pods(&["inference", "training"])?;
    let left = Instant::now();
    let devices = tenant.devices_of("distributed")?;
    ensure!(
        left.elapsed() < Duration::from_secs(5),
        "the card was free only after {:?}",
        left.elapsed()
    );
    ensure!(devices == ["gpu-0", "gpu-1"], "{devices:?}");
    tenant.running("distributed")
}

#[test]
fn an_allocation_is_refused_exactly_at_the_limit() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("exact")?;
    tenant.apply(&pod_with_share("exact", "vgpu.drava.dev", "{memory: 3Gi}"))?;
    tenant.running("exact")?;
    let info = tenant
        .exec("exact", "app", &["cuda-probe", "info", "-o", "json"])?
        .json()?;
    ensure!(info["devices"][0]["totalBytes"] == 3072 * MIB, "{info}");
    let free_mib = tenant.fill("exact", 0)?;

    // What is free can be had in one piece; one MiB more cannot.
    let free = free_mib.to_string();
    tenant
        .exec("exact", "app", &["cuda-probe", "alloc", "--mib", &free])?
        .success()?;
    let beyond = (free_mib + 1).to_string();
    let refused = tenant.exec("exact", "app", &["cuda-probe", "alloc", "--mib", &beyond])?;
    ensure!(
        refused.code == 2
            && (refused.stdout + &refused.stderr).contains("CUDA_ERROR_OUT_OF_MEMORY")
    );
    Ok(())
}

#[test]
fn tenants_of_one_card_cannot_exceed_it_together() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("together")?;
    tenant.share_one_card(&[("left", "30Gi"), ("right", "40Gi")])?;

    // Both take all they can, at the same time, and hold it.
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
            "most of the share is out of reach: {filled}"
        );
    }

    // A third that does not fit beside them goes to the other card; one that fits on none waits and reads why.
    tenant.apply(&pod_with_share("third", "vgpu.drava.dev", "{memory: 20Gi}"))?;
    tenant.running("third")?;
    ensure!(
        tenant.devices_of("third")? != tenant.devices_of("left")?,
        "the third over-commits the card"
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
fn two_containers_of_one_claim_have_one_budget() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("budget")?;
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
        let second = wait("the first container's memory shows in the second", || {
            let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
            let seen = tenant.exec("team", "second", &probe)?.json()?;
            let free = seen["before"]["freeBytes"].as_u64().context("freeBytes")?;
            Ok((free < 1600 * MIB).then_some(free))
        })
        .and_then(|_| tenant.exec("team", "second", &["cuda-probe", "alloc", "--mib", "2500"]));
        // Ends the holder early: its pod goes with the namespace.
        tenant.kubectl(&["delete", "pod", "team", "--grace-period=0", "--force"])?;
        drop(first.join());
        second
    })?;
    ensure!(
        holder.code == 2,
        "the second container got the first one's memory: {holder:?}"
    );
    Ok(())
}

#[test]
fn no_claim_means_no_gpu() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("outsider")?;
    tenant.apply(&pod_without_claim("outsider"))?;
    tenant.running("outsider")?;
    let devices = tenant.exec("outsider", "app", &["ls", "/dev"])?.success()?;
    ensure!(!devices.contains("nvidia"), "{devices}");
    let smi = tenant.exec("outsider", "app", &["nvidia-smi"])?;
    ensure!(smi.code != 0, "nvidia-smi found something: {}", smi.stdout);

    // A container of a pod with a claim that does not name it sees none either.
    tenant.example("shared-claim")?;
    tenant.running("team")?;
    ensure!(tenant.exec("team", "outsider", &["nvidia-smi"])?.code != 0);
    tenant.exec("team", "first", &["nvidia-smi"])?.success()?;
    Ok(())
}

#[test]
fn a_whole_card_is_the_whole_card() -> Result<()> {
    let world = World::attach()?;
    let tenant = world.namespace("whole")?;
    tenant.example("whole-gpu")?;
    tenant.running("whole")?;
    let total = tenant.total_mib("whole")?;
    ensure!(total == "81559", "{total}");
    let preload = tenant.exec("whole", "app", &["cat", "/etc/ld.so.preload"])?;
    ensure!(
        preload.code != 0,
        "libvgpu is loaded for a whole card: {}",
        preload.stdout
    );

    // Its card is not shared, the other one is.
    tenant.apply(&pod_with_share("share", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.running("share")?;
    let (whole, share) = (tenant.devices_of("whole")?, tenant.devices_of("share")?);
    ensure!(
        share[0] != format!("{}-vgpu", whole[0]),
        "{whole:?} and {share:?}"
    );
    Ok(())
}
