//! Shares that use memory which no claim holds, and give it back.

use anyhow::{Context as _, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{TestCluster, wait};

/// Request and limit of the example, MiB.
const REQUEST_MIB: u64 = 4 << 10;
const LIMIT_MIB: u64 = 40 << 10;

/// Request of the pods that need the lent memory, MiB: one fits on each GPU beside the request of the example.
const OTHER_MIB: u64 = 60 << 10;

#[test]
fn lent_memory_is_taken_back_for_new_claim() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("burst")?;
    let _class = cluster.deletes("deviceclass", "burst.drava-example.com");
    tenant.example("burst")?;
    tenant.running("batch")?;
    let total_mib = || -> Result<u64> { Ok(tenant.total_mib("batch")?.parse()?) };
    wait("the share has its limit", || {
        Ok((total_mib()? == LIMIT_MIB).then_some(()))
    })?;
    let mib = (LIMIT_MIB - 2048).to_string();
    let hold = ["cuda-probe", "alloc", "--mib", &mib, "--hold", "50"];
    let ended = std::thread::scope(|scope| {
        let holder = scope.spawn(|| tenant.exec("batch", "app", &hold));
        wait("the program uses lent memory", || {
            let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
            let seen = tenant.exec("batch", "app", &probe)?.json()?;
            let free = seen["before"]["freeBytes"].as_u64();
            Ok((free.context("freeBytes")? < 4 << 30).then_some(()))
        })?;
        // One of them is on the GPU of the example.
        for pod in ["first", "second"] {
            let memory = format!("{{memory: {OTHER_MIB}Mi}}");
            tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", &memory))?;
        }
        for pod in ["first", "second"] {
            tenant.running(pod)?;
            ensure!(
                tenant.total_mib(pod)? == OTHER_MIB.to_string(),
                "{pod} has less than it is guaranteed"
            );
            let free_mib = tenant.fill(pod, 0)?;
            ensure!(free_mib > OTHER_MIB - 2048, "{pod} gets {free_mib} MiB");
        }
        let ended = holder.join();
        ended.map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })?;
    ensure!(ended.code != 0, "the program kept lent memory: {ended:?}");
    let why = tenant.event("batch", "BurstReclaimed")?;
    ensure!(
        why.contains("did not give back memory beyond its request")
            && ["of pod first", "of pod second"]
                .iter()
                .any(|pod| why.contains(pod)),
        "{why}"
    );
    let left_mib = total_mib()?;
    ensure!(
        (REQUEST_MIB..LIMIT_MIB - 2048).contains(&left_mib),
        "{left_mib} MiB"
    );
    cluster.check_allocations()
}

/// Limit of the guest of the example, and the guarantee of the owner, MiB.
const GUEST_MIB: u64 = 40 << 10;
const OWNER_MIB: u64 = 60 << 10;

/// The GPU has 16 GiB that no claim holds: most of what the guest uses is the owner's.
#[test]
fn owner_of_unused_guarantee_gets_it_back() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("idle-burst")?;
    let _lends = cluster.deletes("deviceclass", "lends-idle.drava-example.com");
    let _bursts = cluster.deletes("deviceclass", "bursts-idle.drava-example.com");
    tenant.example_file("burst", "idle")?;
    for pod in ["owner", "guest"] {
        tenant.running(pod)?;
    }
    let (owner, guest) = (tenant.devices_of("owner")?, tenant.devices_of("guest")?);
    ensure!(owner == guest, "on {owner:?} and {guest:?}");
    wait("the guest has its limit", || {
        let total = tenant.total_mib("guest")?;
        Ok((total == GUEST_MIB.to_string()).then_some(()))
    })?;
    ensure!(
        tenant.total_mib("owner")? == OWNER_MIB.to_string(),
        "the owner does not see all of its guarantee"
    );
    // The node driver ends at any time, and the loan goes on.
    ensure!(cluster.kill_processes("drava-dra-driver")? > 0, "no driver");
    cluster.drava_ready()?;
    let mib = (GUEST_MIB - 2048).to_string();
    let hold = ["cuda-probe", "alloc", "--mib", &mib, "--hold", "60"];
    let ended = std::thread::scope(|scope| {
        let holder = scope.spawn(|| tenant.exec("guest", "app", &hold));
        wait("the guest uses memory of the owner", || {
            let probe = ["cuda-probe", "alloc", "--mib", "1", "-o", "json"];
            let seen = tenant.exec("guest", "app", &probe)?.json()?;
            let free = seen["before"]["freeBytes"].as_u64();
            Ok((free.context("freeBytes")? < 4 << 30).then_some(()))
        })?;
        // What is free to the owner is what the GPU has at the moment; the rest comes while it allocates.
        let fill = ["cuda-probe", "fill", "-o", "json"];
        let filled = tenant.exec("owner", "app", &fill)?.json()?;
        let filled_mib = filled["allocatedBytes"].as_u64().context("allocated")? >> 20;
        ensure!(
            filled_mib > OWNER_MIB - 2048,
            "the owner gets {filled_mib} MiB of {OWNER_MIB}"
        );
        let ended = holder.join();
        ended.map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })?;
    ensure!(ended.code != 0, "the guest kept lent memory: {ended:?}");
    let why = tenant.event("guest", "BurstReclaimed")?;
    ensure!(why.contains("of pod owner"), "{why}");
    cluster.check_allocations()
}
