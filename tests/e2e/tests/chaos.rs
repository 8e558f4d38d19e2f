//! The API server is frozen and everything is killed in turn, while two replicas of the controller serve a backlog of pods,
//! gangs and evictions: no GPU is over-committed, no gang runs in part, no pod waits without a true reason, and all end.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::Component;
use drava_e2e::manifest::{claim_template, pod_with_share};
use drava_e2e::{MAX_WAIT, Namespace, TestCluster, wait};
use serde_json::Value;

/// Variable with the number of pods that belong to no gang, [`PODS`] without it. There is a gang of three for ten of them and a
/// pod that evicts others for 25.
const PODS_VARIABLE: &str = "DRAVA_E2E_CHAOS_PODS";
const PODS: usize = 36;
/// Length of an outage of the API server: longer than the lease (15 s), shorter than a failure of the liveness probe (60 s).
const OUTAGE: Duration = Duration::from_secs(30);
/// Time within which a waiting pod has its reason, while the API server responds.
const REASON_LIMIT: Duration = Duration::from_secs(120);
/// GPUs of the node.
const GPUS: usize = 2;
/// Pods of a gang.
const MEMBERS: usize = 3;
/// Times in which a leader is stopped while it writes a gang, until it was stopped between two writes.
const ROUNDS: usize = 6;
const GATE: &str = "gpu.drava.dev/allocation";
const GANG: &str = "gpu.drava.dev/gang";
const CONDITION: &str = "gpu.drava.dev/Allocated";
const URGENT: &str = "e2e-chaos-urgent";
const PATIENT: &str = "e2e-chaos-patient";
/// Codes of the reasons for which pods of this load can wait.
const REASONS: [&str; 13] = [
    "InsufficientMemory",
    "InsufficientDevices",
    "SlotsExhausted",
    "ExclusiveConflict",
    "WaitingForGang",
    "WaitingForDeletion",
    "Reserved",
    "NotBound",
    // After kubelet was killed: it deletes the slices of its node at its start.
    "NoDevices",
    "NodeUnfit",
    "PoolIncomplete",
    "TypeMismatch",
    // kube-controller-manager creates claims when the API server responds to it.
    "ClaimMissing",
];

/// What is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Controllers,
    NodeDriver,
    Kubelet,
}

impl Victim {
    const ALL: [Self; 3] = [Self::Controllers, Self::NodeDriver, Self::Kubelet];

    fn kill(self, cluster: &TestCluster) -> Result<()> {
        match self {
            // The second time it may not have been restarted yet.
            Self::Controllers => cluster.kill_processes("drava-controller").map(drop),
            Self::NodeDriver => cluster.kill_processes("drava-dra-driver").map(drop),
            Self::Kubelet => cluster
                .kubernetes()
                .control_plane()
                .kill(Component::Kubelet),
        }
    }
}

/// Returns a Job whose pods have shares with this memory for a few seconds.
fn job(name: &str, pods: usize, template: &str, pod: &str, spec: &str) -> String {
    format!(
        "
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completions: {pods}
  parallelism: {pods}
  backoffLimit: 1000
  template:
    metadata: {{labels: {{load: {name}}}, {pod}}}
    spec:
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: 1
      {spec}
      resourceClaims: [{{name: gpu, resourceClaimTemplateName: {template}}}]
      containers:
      - name: app
        image: localhost/drava-demo:dev
        imagePullPolicy: IfNotPresent
        command: [sleep, \"3\"]
        resources: {{claims: [{{name: gpu}}]}}
"
    )
}

fn class(name: &str, policy: &str) -> String {
    format!(
        "{{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {{name: {name}}}, value: 1000, preemptionPolicy: {policy}}}"
    )
}

/// The load.
struct Load<'c> {
    cluster: &'c TestCluster,
    tenant: &'c Namespace<'c>,
    pods: usize,
    /// Pods that the Jobs so far must complete.
    expected: u64,
    /// When a waiting pod was seen without a reason first.
    unexplained: BTreeMap<String, Instant>,
    /// Codes of the reasons that were seen.
    reasons: BTreeSet<String>,
}

impl Load<'_> {
    /// Creates the part of a round: pods and gangs.
    fn create(&mut self, round: usize) -> Result<()> {
        let pods = self.pods / Victim::ALL.len();
        let mut jobs = vec![job(&format!("share-{round}"), pods, "share", "", "")];
        for index in 0..pods.div_ceil(10) {
            let name = format!("gang-{round}-{index}");
            let of_pod =
                format!("annotations: {{{GANG}: {name}, gpu.drava.dev/gang-min: \"{MEMBERS}\"}}");
            let of_spec = format!("priorityClassName: {PATIENT}");
            jobs.push(job(&name, MEMBERS, "member", &of_pod, &of_spec));
        }
        self.expected += u64::try_from(pods + MEMBERS * pods.div_ceil(10))?;
        self.tenant.apply(&jobs.join("---\n"))
    }

    /// Takes most of each GPU with pods that do not end by themselves, so that urgent ones have to evict. Returns their names.
    fn hold_gpus(&self, round: usize) -> Result<Vec<String>> {
        let names: Vec<String> = (0..GPUS)
            .map(|gpu| format!("holder-{round}-{gpu}"))
            .collect();
        for name in &names {
            let pod = pod_with_share(name, "vgpu.drava.dev", "{memory: 68Gi}");
            self.tenant.apply(&pod)?;
        }
        for name in &names {
            self.tenant.running(name)?;
        }
        Ok(names)
    }

    /// Creates pods that evict others.
    fn create_urgent(&mut self, round: usize) -> Result<()> {
        let pods = (self.pods / Victim::ALL.len()).div_ceil(25);
        let of_spec = format!("priorityClassName: {URGENT}");
        self.expected += u64::try_from(pods)?;
        self.tenant.apply(&job(
            &format!("urgent-{round}"),
            pods,
            "large",
            "",
            &of_spec,
        ))
    }

    /// Returns how many pods have succeeded.
    fn succeeded(&self) -> Result<u64> {
        let jobs = self.tenant.list("jobs")?;
        let succeeded = jobs.iter().map(|job| job["status"]["succeeded"].as_u64());
        Ok(succeeded.map(Option::unwrap_or_default).sum())
    }

    /// Checks what must hold at any time.
    fn check(&mut self) -> Result<()> {
        self.cluster.check_allocations()?;
        let pods = self.tenant.list("pods")?;
        let claims = self.tenant.list("resourceclaims")?;
        let is_allocated = |claim: &&Value| !claim["status"]["allocation"].is_null();
        let allocated: BTreeSet<&str> = claims
            .iter()
            .filter(is_allocated)
            .filter_map(|claim| claim["metadata"]["name"].as_str())
            .collect();
        let has_allocation = |pod: &Value| {
            let claim = &pod["status"]["resourceClaimStatuses"][0]["resourceClaimName"];
            claim
                .as_str()
                .is_some_and(|claim| allocated.contains(claim))
        };
        check_gangs(self.tenant, &pods, has_allocation)?;
        self.check_reasons(&pods, has_allocation)
    }

    fn check_reasons(
        &mut self,
        pods: &[Value],
        has_allocation: impl Fn(&Value) -> bool,
    ) -> Result<()> {
        let waiting = pods
            .iter()
            .filter(|pod| pod["status"]["phase"] == "Pending" && pod["spec"]["nodeName"].is_null())
            .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null() && !has_allocation(pod));
        let mut unexplained = BTreeMap::new();
        for pod in waiting {
            let name = name_of(pod);
            let conditions = pod["status"]["conditions"].as_array();
            let mut conditions = conditions.into_iter().flatten();
            let condition = conditions.find(|condition| condition["type"] == CONDITION);
            let reason = condition.filter(|condition| condition["status"] == "False");
            let Some(reason) = reason.and_then(|condition| condition["message"].as_str()) else {
                let now = Instant::now();
                let since = self.unexplained.get(name).copied().unwrap_or(now);
                ensure!(
                    since.elapsed() < REASON_LIMIT,
                    "{name} waits without a reason: {pod}"
                );
                unexplained.insert(name.to_owned(), since);
                continue;
            };
            let mut words = reason.split(|c: char| !c.is_ascii_alphanumeric());
            let code = words.find(|word| REASONS.contains(word));
            let code = code.with_context(|| format!("{name} waits for {reason}"))?;
            self.reasons.insert(code.to_owned());
        }
        self.unexplained = unexplained;
        Ok(())
    }

    /// Checks what must hold, until that many pods have succeeded. Only the lack of any progress has a limit.
    fn wait_for(&mut self, wanted: u64) -> Result<()> {
        let (mut progress, mut known) = (Instant::now(), 0);
        loop {
            let succeeded = self.succeeded()?;
            if succeeded >= wanted {
                return Ok(());
            }
            if succeeded > known {
                (progress, known) = (Instant::now(), succeeded);
            }
            self.check()?;
            if progress.elapsed() > MAX_WAIT {
                let pods = self.tenant.kubectl(&["get", "pods", "-o", "wide"])?;
                bail!("{succeeded} of {wanted} pods have succeeded, and no further one:\n{pods}");
            }
            sleep(Duration::from_secs(1));
        }
    }
}

fn name_of(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// Checks that each gang with a bound member is allocated as a whole. The claims were listed after the pods.
fn check_gangs(
    tenant: &Namespace<'_>,
    pods: &[Value],
    has_allocation: impl Fn(&Value) -> bool,
) -> Result<()> {
    let gang_of = |pod: &Value| {
        let gang = &pod["metadata"]["annotations"][GANG];
        gang.as_str().map(str::to_owned)
    };
    let started: BTreeSet<String> = pods
        .iter()
        .filter(|pod| pod["status"]["phase"] == "Running" || !pod["spec"]["nodeName"].is_null())
        .filter_map(gang_of)
        .collect();
    let lacking = pods
        .iter()
        .filter(|pod| gang_of(pod).is_some_and(|gang| started.contains(&gang)))
        .filter(|pod| pod["metadata"]["deletionTimestamp"].is_null() && !has_allocation(pod));
    for pod in lacking {
        // The claim of a pod that has ended is deleted.
        let now = tenant.find("pod", name_of(pod))?;
        let has_ended = now.as_ref().is_none_or(|pod| {
            pod["status"]["phase"] == "Succeeded"
                || pod["metadata"]["deletionTimestamp"].is_string()
        });
        ensure!(has_ended, "{} has no GPU, and its gang runs", name_of(pod));
    }
    Ok(())
}

fn pods() -> Result<usize> {
    match std::env::var(PODS_VARIABLE) {
        Ok(pods) => pods.parse().context(PODS_VARIABLE),
        Err(_) => Ok(PODS),
    }
}

#[test]
fn serves_all_while_everything_fails_in_turn() -> Result<()> {
    let begun = Instant::now();
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("chaos")?;
    let node = cluster.kubernetes().control_plane();
    cluster.drava_ready()?;
    let share = |memory: &str| {
        format!("{{deviceClassName: vgpu.drava.dev, capacity: {{requests: {{memory: {memory}}}}}}}")
    };
    let objects = [
        class(URGENT, "PreemptLowerPriority"),
        class(PATIENT, "Never"),
        claim_template("share", &share("10Gi"), ""),
        claim_template("member", &share("20Gi"), ""),
        claim_template("large", &share("60Gi"), ""),
    ];
    tenant.apply(&objects.join("\n---\n"))?;
    let mut load = Load {
        cluster: &cluster,
        tenant: &tenant,
        pods: pods()?,
        expected: 0,
        unexplained: BTreeMap::new(),
        reasons: BTreeSet::new(),
    };
    for (round, victim) in Victim::ALL.into_iter().enumerate() {
        let before = load.succeeded()?;
        let holders = load.hold_gpus(round)?;
        load.create(round)?;
        // The rest of the GPUs is in use.
        load.wait_for(before + 2)?;
        load.create_urgent(round)?;
        // Connections stay open, and requests get no response.
        node.pause(Component::KubeApiserver)?;
        sleep(OUTAGE / 2);
        let killed = victim.kill(&cluster);
        sleep(OUTAGE / 2);
        node.resume(Component::KubeApiserver)?;
        killed?;
        wait("the API server responds", || {
            Ok(tenant.list("jobs").ok().map(drop))
        })?;
        victim.kill(&cluster)?;
        load.unexplained.clear();
        load.check()?;
        let urgent = format!("urgent-{round}");
        wait("the urgent pods have evicted others", || {
            let job = tenant.find("job", &urgent)?.context("no urgent pods")?;
            Ok((job["status"]["succeeded"] == job["spec"]["completions"]).then_some(()))
        })?;
        let mut delete = vec!["delete", "pods", "--ignore-not-found", "--grace-period=1"];
        delete.extend(holders.iter().map(String::as_str));
        tenant.kubectl(&delete)?;
        let succeeded = load.succeeded()?;
        eprintln!(
            "{victim:?} killed; {succeeded} of {} pods have succeeded",
            load.expected
        );
    }
    load.wait_for(load.expected)?;
    wait("no claim is left", || {
        Ok(tenant.list("resourceclaims")?.is_empty().then_some(()))
    })?;
    cluster.check_allocations()?;
    cluster.first_node().wait_until_clean()?;
    cluster.drava_ready()?;
    let events = tenant.list("events")?;
    let evicted = events.iter().filter(|event| event["reason"] == "Preempted");
    let evicted = evicted.count();
    eprintln!(
        "{} pods ended, {evicted} were evicted before, reasons {:?}, in {} s",
        load.expected,
        load.reasons,
        begun.elapsed().as_secs()
    );
    ensure!(evicted > 0, "no pod was evicted");
    for name in [URGENT, PATIENT] {
        cluster.kubectl(["delete", "priorityclass", name])?;
    }
    Ok(())
}

/// Members of a gang: more than the leader writes at the same time, so that some writes wait for the answers to others.
const LARGE_GANG: usize = 18;

/// Returns names and manifests of the members of a gang.
fn members(gang: &str) -> Vec<(String, String)> {
    let member = |index: usize| {
        let name = format!("{gang}-{index}");
        let manifest = pod_with_share(&name, "vgpu.drava.dev", "{memory: 7Gi}");
        let plain = format!("kind: Pod\nmetadata: {{name: {name}}}");
        let annotations =
            format!("annotations: {{{GANG}: {gang}, gpu.drava.dev/gang-min: \"{LARGE_GANG}\"}}");
        let annotated = format!("kind: Pod\nmetadata: {{name: {name}, {annotations}}}");
        (name, manifest.replace(&plain, &annotated))
    };
    (0..LARGE_GANG).map(member).collect()
}

#[test]
fn starts_no_part_of_gang_whose_leader_stops_amid_it() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("half-gang")?;
    let node = cluster.first_node();
    cluster.drava_ready()?;
    for round in 0..ROUNDS {
        let stopped = wait("a replica leads", || {
            let leader = cluster.leader()?;
            let replicas = cluster.controller_restarts()?;
            Ok(replicas.contains_key(&leader).then_some(leader))
        })?;
        let gang = members(&format!("gang-{round}"));
        tenant.stop_while_it_writes(&node, &stopped, &gang)?;
        let is_partly_written = tenant.is_partly_written()?;
        let pods = tenant.list("pods")?;
        let led = wait("the other replica leads", || {
            Ok((cluster.leader()? != stopped).then_some(()))
        });
        node.signal_pod(&stopped, "CONT")?;
        led?;
        for (member, _) in &gang {
            tenant.running(member)?;
        }
        cluster.check_allocations()?;
        tenant.delete_all_pods()?;
        if is_partly_written {
            let is_gated = |pod: &Value| {
                let gates = pod["spec"]["schedulingGates"].as_array();
                gates.is_some_and(|gates| gates.iter().any(|gate| gate["name"] == GATE))
            };
            ensure!(
                pods.iter().all(is_gated),
                "a member was released before the gang was written: {pods:?}"
            );
            return Ok(());
        }
    }
    bail!("in no round was the leader stopped between two writes of the gang")
}
