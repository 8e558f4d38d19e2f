//! Priority, preemption and gangs.

use anyhow::{Context, Result, ensure};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

/// Returns the pods with this label that run and are not being deleted.
fn running(tenant: &Namespace<'_>, label: (&str, &str)) -> Result<Vec<String>> {
    let is_running = |pod: &&Value| {
        pod["metadata"]["labels"][label.0] == label.1
            && pod["metadata"]["deletionTimestamp"].is_null()
            && pod["status"]["phase"] == "Running"
    };
    let pods = tenant.list("pods")?;
    let names = pods.iter().filter(is_running);
    Ok(names
        .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
        .collect())
}

/// Waits until all three pods of the job run, and returns their names.
fn wait_for_job(tenant: &Namespace<'_>, job: &str) -> Result<Vec<String>> {
    wait(&format!("three pods of job {job} run"), || {
        let pods = running(tenant, ("job", job))?;
        Ok((pods.len() == 3).then_some(pods))
    })
}

/// Waits for an event on a pod of the job.
fn wait_for_reason(tenant: &Namespace<'_>, job: &str, text: &str) -> Result<()> {
    wait(&format!("event {text:?} on a pod of job {job}"), || {
        let events = tenant.list("events")?;
        let found = events.iter().any(|event| {
            let object = event["involvedObject"]["name"].as_str().unwrap_or_default();
            let message = event["message"].as_str().unwrap_or_default();
            object.starts_with(&format!("{job}-")) && message.contains(text)
        });
        Ok(found.then_some(()))
    })
}

fn has_no_running_pods(tenant: &Namespace<'_>, jobs: &[&str]) -> Result<()> {
    for job in jobs {
        let pods = running(tenant, ("job", job))?;
        ensure!(pods.is_empty(), "pods of job {job} run: {pods:?}");
    }
    Ok(())
}

/// Checks that the Jobs `high`, `medium` and `low`, with room for one of them, run in the order of their priority.
fn check_order_of_jobs(tenant: &Namespace<'_>) -> Result<()> {
    // Whichever Job's pods come first: the gangs of the others do not fit beside it.
    let first = wait("one job runs", || {
        for job in ["high", "medium", "low"] {
            if running(tenant, ("job", job))?.len() == 3 {
                return Ok(Some(job));
            }
        }
        Ok(None)
    })?;
    // The API server gets the pods of the first Job before those of the others.
    for job in ["high", "medium", "low"] {
        if job != first {
            wait_for_reason(tenant, job, "WaitingForGang")?;
        }
    }
    if first != "high" {
        tenant.kubectl(&["delete", "job", first])?;
        wait_for_job(tenant, "high")?;
        return Ok(());
    }
    has_no_running_pods(tenant, &["medium", "low"])?;
    tenant.kubectl(&["delete", "job", "high"])?;
    wait_for_job(tenant, "medium")?;
    has_no_running_pods(tenant, &["low"])?;
    tenant.kubectl(&["delete", "job", "medium"])?;
    wait_for_job(tenant, "low")?;
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
fn schedules_urgent_pod_by_eviction() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("preemption")?;
    tenant.example("preemption")?;
    let before = wait("both pods of the Deployment run", || {
        let pods = running(&tenant, ("app", "batch"))?;
        Ok((pods.len() == 2).then_some(pods))
    })?;
    let urgent = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/examples/preemption/urgent.yaml"
    ))
    .context("read the urgent pod")?;
    tenant.apply(&urgent)?;
    tenant.running("urgent")?;
    let after = running(&tenant, ("app", "batch"))?;
    let kept: Vec<_> = before.iter().filter(|pod| after.contains(pod)).collect();
    ensure!(kept.len() == 1, "of {before:?} run {after:?}");
    let victim = before.iter().find(|pod| !after.contains(pod));
    let victim = victim.context("no pod was evicted")?;
    let preempting = tenant.event("urgent", "Preempting: evicted")?;
    ensure!(preempting.contains(victim), "{preempting}");
    let preempted = tenant.event(victim, "Preempted: evicted for pod")?;
    ensure!(preempted.contains("urgent (priority 1000)"), "{preempted}");
    // The Deployment creates another pod, which stays pending: no pod has a lower priority.
    let waiting = wait("the replacement waits", || {
        let pods = tenant.list("pods")?;
        let pending = pods.iter().find(|pod| {
            pod["metadata"]["labels"]["app"] == "batch" && pod["status"]["phase"] == "Pending"
        });
        Ok(pending.and_then(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)))
    })?;
    tenant.event(&waiting, "ExclusiveConflict")?;
    Ok(())
}

#[test]
fn schedules_no_eviction_against_budget() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("budget")?;
    tenant.example("preemption")?;
    tenant.apply(
        "
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: batch}
spec: {minAvailable: 2, selector: {matchLabels: {app: batch}}}
",
    )?;
    let before = wait("both pods of the Deployment run", || {
        let pods = running(&tenant, ("app", "batch"))?;
        Ok((pods.len() == 2).then_some(pods))
    })?;
    wait("the budget allows no disruption", || {
        let budget = tenant.find("pdb", "batch")?.context("no budget")?;
        let status = &budget["status"];
        Ok((status["currentHealthy"] == 2 && status["disruptionsAllowed"] == 0).then_some(()))
    })?;
    let urgent = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../deploy/examples/preemption/urgent.yaml"
    ))?;
    tenant.apply(&urgent)?;
    tenant.event("urgent", "PreemptionBlocked: cannot evict pod")?;
    tenant.event("urgent", "GpuUnschedulable: 0/1 nodes")?;
    ensure!(
        running(&tenant, ("app", "batch"))? == before,
        "a protected pod was evicted"
    );
    tenant.kubectl(&["delete", "pdb", "batch"])?;
    // The pods count as protected for a minute.
    tenant.running("urgent")
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
