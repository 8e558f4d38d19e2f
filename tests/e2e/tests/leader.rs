//! The controller's leader is stopped, replaced and cut off: pods are allocated afterwards without any restart, no GPU is
//! over-committed, no claim leaks.

use std::collections::BTreeMap;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::{claim_template, pod, pod_with_share};
use drava_e2e::{Namespace, TestCluster, TestNode, wait};

const SYSTEM: &str = "drava-system";
/// Length of an outage: longer than the term of a leader (10 s) and its lease (15 s), shorter than a failure of the
/// liveness probe (60 s).
const OUTAGE: Duration = Duration::from_secs(30);
/// Time in which a leader sends a few writes.
const INTERVAL: Duration = Duration::from_millis(10);
/// Scheduling gate of pods that are not to be allocated for yet.
const HOLD: &str = "test.drava.dev/hold";
/// Variable with the number of times that a leader is stopped, at least; [`MIN_ROUNDS`] without it.
const ROUNDS_VARIABLE: &str = "DRAVA_E2E_LEADER_ROUNDS";
const MIN_ROUNDS: usize = 3;
/// Further times until it was stopped between two writes once.
const MAX_ROUNDS: usize = 10;
/// Pods that wait while the leader is replaced.
const WAITING: usize = 200;

/// Returns the pod that holds the lease.
fn leader(cluster: &TestCluster) -> Result<String> {
    let lease = cluster.get(&["lease", "drava-controller", "-n", SYSTEM])?;
    let holder = lease["spec"]["holderIdentity"].as_str();
    Ok(holder.unwrap_or_default().to_owned())
}

/// Returns the restarts of each replica of the controller.
fn restarts(cluster: &TestCluster) -> Result<BTreeMap<String, u64>> {
    let select = "app.kubernetes.io/component=controller";
    let pods = cluster.get(&["pods", "-n", SYSTEM, "-l", select])?;
    let pods = pods["items"].as_array().context("no list of pods")?;
    let restarts = |pod: &serde_json::Value| {
        let name = pod["metadata"]["name"].as_str()?.to_owned();
        let status = &pod["status"]["containerStatuses"][0];
        Some((name, status["restartCount"].as_u64()?))
    };
    Ok(pods.iter().filter_map(restarts).collect())
}

fn apply_shares(tenant: &Namespace<'_>, names: &[String]) -> Result<()> {
    let share = |name: &String| pod_with_share(name, "vgpu.drava.dev", "{memory: 15Gi}");
    let manifests: Vec<String> = names.iter().map(share).collect();
    tenant.apply(&manifests.join("\n---\n"))
}

fn all_run(tenant: &Namespace<'_>, names: &[String]) -> Result<()> {
    names.iter().try_for_each(|name| tenant.running(name))
}

/// Deletes all pods and waits until their claims are gone.
fn delete_all(tenant: &Namespace<'_>) -> Result<()> {
    let delete = [
        "delete",
        "pods",
        "--all",
        "--grace-period=1",
        "--timeout=90s",
    ];
    tenant.kubectl(&delete)?;
    wait("no claim is left", || {
        Ok(tenant.list("resourceclaims")?.is_empty().then_some(()))
    })
}

fn names(prefix: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|index| format!("{prefix}-{index}"))
        .collect()
}

/// Creates pods with shares that the leader sees while it is stopped, and lets the leader run in short intervals until it has
/// sent a write.
fn stop_while_it_writes(
    node: &TestNode,
    tenant: &Namespace<'_>,
    leader: &str,
    names: &[String],
) -> Result<()> {
    let gate = format!("  schedulingGates: [{{name: {HOLD}}}]\n  containers:");
    let held = |name: &String| {
        pod_with_share(name, "vgpu.drava.dev", "{memory: 15Gi}").replace("  containers:", &gate)
    };
    let manifests: Vec<String> = names.iter().map(held).collect();
    tenant.apply(&manifests.join("\n---\n"))?;
    wait("every pod has a claim", || {
        let claims = tenant.list("resourceclaims")?.len();
        Ok((claims == names.len()).then_some(()))
    })?;
    ensure!(
        node.signal_pod(leader, "STOP")? > 0,
        "no process of {leader}"
    );
    let gates =
        serde_json::json!({"spec": {"schedulingGates": [{"name": HOLD, "$patch": "delete"}]}});
    let patch = ["patch", "pods", "--patch", &gates.to_string()];
    let pods: Vec<&str> = names.iter().map(String::as_str).collect();
    tenant.kubectl(&[&patch[..], &pods].concat())?;
    wait("the leader writes a claim", || {
        node.resume_pod_for(leader, INTERVAL)?;
        let written = written_claims(tenant)?;
        Ok(written.iter().any(|written| *written > 0).then_some(()))
    })
}

/// Returns for each claim how many of its writes were executed: the finalizer, then the status.
fn written_claims(tenant: &Namespace<'_>) -> Result<Vec<usize>> {
    let claims = tenant.list("resourceclaims")?;
    let written = |claim: &serde_json::Value| {
        let has_finalizer = !claim["metadata"]["finalizers"].is_null();
        usize::from(has_finalizer) + usize::from(!claim["status"]["allocation"].is_null())
    };
    Ok(claims.iter().map(written).collect())
}

/// Returns whether the leader has sent some of the writes for these pods, and not all.
fn is_partly_written(tenant: &Namespace<'_>, pods: &[String]) -> Result<bool> {
    let written: usize = written_claims(tenant)?.iter().sum();
    Ok(written > 0 && written < 2 * pods.len())
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
    let before = restarts(&cluster)?;
    ensure!(before.len() == 2, "{before:?}");
    let mut between_writes = 0;
    let mut rounds = 0..MAX_ROUNDS.max(min_rounds);
    while let Some(round) = rounds.next()
        && (round < min_rounds || between_writes == 0)
    {
        let stopped = wait("a replica leads", || {
            let leader = leader(&cluster)?;
            Ok(before.contains_key(&leader).then_some(leader))
        })?;
        let early = names(&format!("early-{round}"), 6);
        let late = names(&format!("late-{round}"), 4);
        stop_while_it_writes(&node, &tenant, &stopped, &early)?;
        between_writes += usize::from(is_partly_written(&tenant, &early)?);
        let led = wait("the other replica leads", || {
            Ok((leader(&cluster)? != stopped).then_some(()))
        })
        .and_then(|()| apply_shares(&tenant, &late));
        // It continues with the writes that it was about to send, while the other replica writes.
        node.signal_pod(&stopped, "CONT")?;
        led?;
        all_run(&tenant, &early)?;
        all_run(&tenant, &late)?;
        cluster.check_allocations()?;
        delete_all(&tenant)?;
        let round = round + 1;
        eprintln!("{round} rounds, {between_writes} of them stopped between two writes");
    }
    ensure!(
        between_writes > 0,
        "in no round was the leader stopped between two writes"
    );
    ensure!(restarts(&cluster)? == before, "a replica was restarted");
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
    let old = leader(&cluster)?;
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
        let leader = leader(&cluster)?;
        Ok((!leader.is_empty() && leader != old).then_some(()))
    })?;
    apply_shares(&tenant, &names("after", 2))?;
    all_run(&tenant, &names("after", 2))?;
    ensure!(
        !admits(&tenant, &claim, &old)?,
        "the old leader may not write claims"
    );
    delete_all(&tenant)
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
    let old = leader(&cluster)?;
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
        let leader = leader(&cluster)?;
        let is_new = leader != old && restarts(&cluster)?.contains_key(&leader);
        Ok(is_new.then_some(()))
    })?;
    tenant.delete_pods(&["blocker-1"])?;
    wait("ten shares run on two GPUs", || {
        cluster.check_allocations()?;
        Ok((served()? == 10).then_some(()))
    })?;
    delete_all(&tenant)
}

#[test]
fn allocates_after_outages_of_api_server() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("outages")?;
    let node = cluster.kubernetes().control_plane();
    cluster.drava_ready()?;
    let before = restarts(&cluster)?;
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
        delete_all(&tenant)?;
    }
    ensure!(restarts(&cluster)? == before, "a replica was restarted");
    Ok(())
}
