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
