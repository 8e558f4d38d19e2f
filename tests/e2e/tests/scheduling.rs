//! Priority and gangs; a namespace that is deleted during allocation.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::pod_with_share;
use drava_e2e::{Namespace, TestCluster, wait};

/// Checks that the Jobs `high`, `medium` and `low`, with room for one of them, run in the order of their priority.
fn check_order_of_jobs(tenant: &Namespace<'_>) -> Result<()> {
    // Whichever Job's pods come first: the gangs of the others do not fit beside it.
    let first = wait("one job runs", || {
        for job in ["high", "medium", "low"] {
            if tenant.running_pods(("job", job))?.len() == 3 {
                return Ok(Some(job));
            }
        }
        Ok(None)
    })?;
    // The API server gets the pods of the first Job before those of the others.
    for job in ["high", "medium", "low"] {
        if job != first {
            tenant.wait_for_reason(job, "WaitingForGang")?;
        }
    }
    if first != "high" {
        tenant.kubectl(&["delete", "job", first])?;
        tenant.wait_for_pods(("job", "high"), 3)?;
        return Ok(());
    }
    for job in ["medium", "low"] {
        tenant.has_no_running_pods(("job", job))?;
    }
    tenant.kubectl(&["delete", "job", "high"])?;
    tenant.wait_for_pods(("job", "medium"), 3)?;
    tenant.has_no_running_pods(("job", "low"))?;
    tenant.kubectl(&["delete", "job", "medium"])?;
    tenant.wait_for_pods(("job", "low"), 3)?;
    Ok(())
}

#[test]
fn schedules_jobs_by_priority() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("priority")?;
    tenant.example("priority")?;
    check_order_of_jobs(&tenant)
}

#[test]
fn schedules_jobs_without_gpus_by_priority() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("priority-cpu")?;
    let example = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/examples/priority-cpu/priority-cpu.yaml"
    ))
    .context("read the example")?;
    // The example is for a node with 8 CPUs, of which each pod requests a quarter.
    let nodes = cluster.get(&["nodes"])?;
    let cpus = nodes["items"][0]["status"]["allocatable"]["cpu"].as_str();
    let cpus: u32 = cpus.context("CPUs of the node")?.parse()?;
    let request = format!("{}m", cpus * 1000 / 4);
    let sized = example.replace("cpu: \"2\"", &format!("cpu: {request}"));
    ensure!(sized != example, "the example has no request of two CPUs");
    tenant.apply(&sized)?;
    check_order_of_jobs(&tenant)
}

#[test]
fn schedules_gang_whole_or_not_at_all() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("gang")?;
    // Two of three workers fit beside it.
    tenant.apply(&drava_e2e::manifest::pod_with_share(
        "blocker",
        "vgpu.drava.dev",
        "{memory: 70Gi}",
    ))?;
    tenant.running("blocker")?;
    tenant.example("gang")?;
    for worker in ["worker-0", "worker-1", "worker-2"] {
        tenant.event(worker, "WaitingForGang: gang training: 3 of 4 members fit")?;
        let claim = tenant.claim_of(worker)?;
        let found = tenant.find("resourceclaim", &claim)?.context("no claim")?;
        ensure!(
            found["status"]["allocation"].is_null(),
            "a partial gang holds a GPU: {found}"
        );
    }
    tenant.delete_pods(&["blocker"])?;
    for worker in ["worker-0", "worker-1", "worker-2"] {
        tenant.running(worker)?;
    }
    Ok(())
}

#[test]
fn frees_gpus_of_namespace_deleted_during_allocation() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let deleted = cluster.namespace("deleted-meanwhile")?;
    let shares = (0..10).map(|index| {
        pod_with_share(
            &format!("share-{index}"),
            "vgpu.drava.dev",
            "{memory: 15Gi}",
        )
    });
    let shares: Vec<String> = shares.collect();
    deleted.create(&shares.join("\n---\n"))?;
    cluster.kubectl(["delete", "namespace", deleted.name(), "--timeout=90s"])?;
    cluster.check_allocations()?;
    // Both GPUs are free again.
    let tenant = cluster.namespace("after-deleted")?;
    for name in ["first", "second"] {
        tenant.apply(&pod_with_share(name, "vgpu.drava.dev", "{memory: 75Gi}"))?;
    }
    tenant.running("first")?;
    tenant.running("second")
}
