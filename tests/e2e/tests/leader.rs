//! The controller's leader is stopped, replaced and cut off: pods are allocated afterwards without any restart, no GPU is
//! over-committed, no claim leaks.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::{claim_template, pod, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};

const SYSTEM: &str = "drava-system";
/// Length of an outage: longer than the term of a leader (10 s) and its lease (15 s), shorter than a failure of the
/// liveness probe (60 s).
const OUTAGE: Duration = Duration::from_secs(30);
/// Variable with the number of times that a leader is stopped, at least; [`MIN_ROUNDS`] without it.
const ROUNDS_VARIABLE: &str = "DRAVA_E2E_LEADER_ROUNDS";
const MIN_ROUNDS: usize = 3;
/// Further times until it was stopped between two writes once.
const MAX_ROUNDS: usize = 10;
/// Pods that wait while the leader is replaced.
const WAITING: usize = 200;

/// Returns names and manifests of pods with shares.
fn shares(names: &[String]) -> Vec<(String, String)> {
    let share = |name: &String| {
        let manifest = pod_with_share(name, "vgpu.drava.dev", "{memory: 15Gi}");
        (name.clone(), manifest)
    };
    names.iter().map(share).collect()
}

fn apply_shares(tenant: &Namespace<'_>, names: &[String]) -> Result<()> {
    let manifests = shares(names).into_iter().map(|(_, manifest)| manifest);
    tenant.apply(&manifests.collect::<Vec<_>>().join("\n---\n"))
}

fn all_run(tenant: &Namespace<'_>, names: &[String]) -> Result<()> {
    names.iter().try_for_each(|name| tenant.running(name))
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|index| format!("{prefix}-{index}"))
        .collect()
}

fn min_rounds() -> Result<usize> {
    match std::env::var(ROUNDS_VARIABLE) {
        Ok(rounds) => rounds.parse().context(ROUNDS_VARIABLE),
        Err(_) => Ok(MIN_ROUNDS),
    }
}

#[test]
fn another_replica_leads_while_leader_is_stopped() -> Result<()> {
    let min_rounds = min_rounds()?;
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("stopped-leader")?;
    let node = cluster.first_node();
    cluster.drava_ready()?;
    let before = cluster.controller_restarts()?;
    ensure!(before.len() == 2, "{before:?}");
    let mut between_writes = 0;
    let mut rounds = 0..MAX_ROUNDS.max(min_rounds);
    while let Some(round) = rounds.next()
        && (round < min_rounds || between_writes == 0)
    {
        let stopped = wait("a replica leads", || {
            let leader = cluster.leader()?;
            Ok(before.contains_key(&leader).then_some(leader))
        })?;
        let early = names(&format!("early-{round}"), 6);
        let late = names(&format!("late-{round}"), 4);
        tenant.stop_while_it_writes(&node, &stopped, &shares(&early))?;
        between_writes += usize::from(tenant.is_partly_written()?);
        let led = wait("the other replica leads", || {
            Ok((cluster.leader()? != stopped).then_some(()))
        })
        .and_then(|()| apply_shares(&tenant, &late));
        // It continues with the writes that it was about to send, while the other replica writes.
        node.signal_pod(&stopped, "CONT")?;
        led?;
        all_run(&tenant, &early)?;
        all_run(&tenant, &late)?;
        cluster.check_allocations()?;
        tenant.delete_all_pods()?;
        let round = round + 1;
        eprintln!("{round} rounds, {between_writes} of them stopped between two writes");
    }
    ensure!(
        between_writes > 0,
        "in no round was the leader stopped between two writes"
    );
    ensure!(
        cluster.controller_restarts()? == before,
        "a replica was restarted"
    );
    cluster.drava_ready()
}

/// Returns whether admission accepts a write of a claim by a replica of the controller.
fn admits(tenant: &Namespace<'_>, claim: &str, replica: &str) -> Result<bool> {
    let user = format!("--as=system:serviceaccount:{SYSTEM}:drava-controller");
    let pod = format!("--as-user-extra=authentication.kubernetes.io/pod-name={replica}");
    let annotate = ["annotate", "resourceclaim", claim, "by=test"];
    let dry_run = ["--overwrite", "--dry-run=server", &user, &pod];
    match tenant.kubectl(&[annotate.as_slice(), dry_run.as_slice()].concat()) {
        Ok(_) => Ok(true),
        Err(error) if format!("{error:#}").contains("drava-controller-lease") => Ok(false),
        Err(error) => Err(error),
    }
}

#[test]
fn admits_new_leader_after_binding_is_recreated() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("recreated-binding")?;
    cluster.drava_ready()?;
    let old = cluster.leader()?;
    apply_shares(&tenant, &names("before", 1))?;
    tenant.running("before-0")?;
    let claim = tenant.claim_of("before-0")?;
    ensure!(
        admits(&tenant, &claim, &old)?,
        "the leader may write claims"
    );
    ensure!(
        !admits(&tenant, &claim, "another")?,
        "only the leader may write claims"
    );

    let binding = ["validatingadmissionpolicybinding", "drava-controller-lease"];
    let mut object = cluster.get(&binding)?;
    cluster.kubectl(["delete"].iter().chain(&binding))?;
    let released = wait("the policy is out of force", || {
        Ok(admits(&tenant, &claim, "another")?.then_some(()))
    });
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|key, _| ["name", "labels", "annotations"].contains(&key.as_str()));
    }
    tenant.apply(&serde_json::to_string(&object)?)?;
    released?;
    wait("the policy is in force", || {
        Ok((!admits(&tenant, &claim, "another")?).then_some(()))
    })?;

    cluster.kubectl(["-n", SYSTEM, "delete", "pod", &old])?;
    wait("another replica leads", || {
        let leader = cluster.leader()?;
        Ok((!leader.is_empty() && leader != old).then_some(()))
    })?;
    apply_shares(&tenant, &names("after", 2))?;
    all_run(&tenant, &names("after", 2))?;
    ensure!(
        !admits(&tenant, &claim, &old)?,
        "the old leader may not write claims"
    );
    tenant.delete_all_pods()
}

#[test]
fn serves_waiting_pods_after_rolling_update() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("rolling-update")?;
    let blockers = names("blocker", 2);
    for name in &blockers {
        tenant.apply(&pod_with_share(name, "vgpu.drava.dev", "{memory: 75Gi}"))?;
    }
    all_run(&tenant, &blockers)?;
    let waiting = names("waiting", WAITING);
    let template = claim_template(
        "waiting",
        "{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 15Gi}}}",
        "",
    );
    let pods = waiting
        .iter()
        .map(|name| pod(name, "resourceClaimTemplateName: waiting"));
    let manifests: Vec<String> = std::iter::once(template).chain(pods).collect();
    tenant.create(&manifests.join("\n---\n"))?;
    wait("every pod has a claim", || {
        let claims = tenant.list("resourceclaims")?.len();
        Ok((claims == WAITING + blockers.len()).then_some(()))
    })?;
    tenant.event(&waiting[WAITING - 1], "GpuUnschedulable")?;
    let old = cluster.leader()?;
    let restart = ["rollout", "restart", "deployment/drava-controller"];
    cluster.kubectl(["-n", SYSTEM].iter().chain(&restart))?;
    // GPUs become free while replicas are replaced.
    tenant.delete_pods(&["blocker-0"])?;
    let served = || -> Result<usize> {
        let pods = tenant.list("pods")?;
        let running = pods.iter().filter(|pod| {
            let name = pod["metadata"]["name"].as_str().unwrap_or_default();
            name.starts_with("waiting") && pod["status"]["phase"] == "Running"
        });
        Ok(running.count())
    };
    wait("five shares of 15 GiB run on one GPU", || {
        cluster.check_allocations()?;
        Ok((served()? == 5).then_some(()))
    })?;
    cluster.drava_ready()?;
    // A replica that ends leads until its last write has ended.
    wait("a new replica leads", || {
        let leader = cluster.leader()?;
        let is_new = leader != old && cluster.controller_restarts()?.contains_key(&leader);
        Ok(is_new.then_some(()))
    })?;
    tenant.delete_pods(&["blocker-1"])?;
    wait("ten shares run on two GPUs", || {
        cluster.check_allocations()?;
        Ok((served()? == 10).then_some(()))
    })?;
    tenant.delete_all_pods()
}

#[test]
fn allocates_after_outages_of_api_server() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("outages")?;
    let node = cluster.kubernetes().control_plane();
    cluster.drava_ready()?;
    let before = cluster.controller_restarts()?;
    for outage in 0..2 {
        let pods = names(&format!("pod-{outage}"), 4);
        apply_shares(&tenant, &pods)?;
        // Connections stay open, and requests get no response.
        node.pause(Component::KubeApiserver)?;
        sleep(OUTAGE);
        node.resume(Component::KubeApiserver)?;
        wait("the API server responds", || {
            Ok(tenant.list("pods").ok().map(drop))
        })?;
        all_run(&tenant, &pods)?;
        let after = names(&format!("after-{outage}"), 2);
        apply_shares(&tenant, &after)?;
        all_run(&tenant, &after)?;
        cluster.check_allocations()?;
        tenant.delete_all_pods()?;
    }
    ensure!(
        cluster.controller_restarts()? == before,
        "a replica was restarted"
    );
    Ok(())
}
