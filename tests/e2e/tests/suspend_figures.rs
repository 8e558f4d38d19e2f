//! Suspension measured: against eviction, and over rounds in which programs of drava, kubelet and the suspended program are killed.
//!
//! `cargo xtask bench suspend` runs the same tests with more rounds.

use std::io::BufReader;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::Component;
use drava_e2e::measurement::{ApiProxy, Random, is_bench, now_us, option, percentiles, report};
use drava_e2e::training::Training;
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

/// Rounds of each variant in the comparison.
const COMPARED_VARIABLE: &str = "DRAVA_E2E_COMPARED";
/// Rounds with a kill.
const ROUNDS_VARIABLE: &str = "DRAVA_E2E_ROUNDS";
/// Idle periods of a notebook.
const IDLE_VARIABLE: &str = "DRAVA_E2E_IDLE";
/// Seed of the order of victims and times.
const SEED_VARIABLE: &str = "DRAVA_E2E_SEED";

/// Request of all pods here: more than half of GPU 0.
const REQUEST: &str = r#"{deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 50Gi}},
     selectors: [{cel: {expression: "device.attributes['gpu.drava.dev'].index == 0"}}]}"#;

const SUSPENDABLE: &str = "[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, \
     suspend: {allowed: true}}}}]";

/// Memory of both programs: together more than the GPU has. 64 MiB have known bytes.
const ARGS: &str = "--mib 64 --unwritten-mib 48000";

/// Most that a program may be locked after a failure, without being suspended.
const LOCKED_LIMIT_US: u64 = 2_000_000;

/// Latest kill after a step of a round, milliseconds.
const LATEST_KILL_MS: u64 = 2500;

fn priority_class(name: &str) -> String {
    format!(
        "{{apiVersion: scheduling.k8s.io/v1, kind: PriorityClass, metadata: {{name: {name}}}, value: 1000}}"
    )
}

fn pods_path(tenant: &Namespace<'_>) -> String {
    format!("/api/v1/namespaces/{}/pods", tenant.name())
}

/// Returns the object that the API server would create.
fn object(tenant: &Namespace<'_>, training: &Training<'_>) -> Result<Value> {
    let mut object = tenant.dry_run(&training.pod())?;
    object["status"] = Value::Null;
    for field in ["uid", "creationTimestamp", "managedFields"] {
        object["metadata"][field] = Value::Null;
    }
    Ok(object)
}

fn restarts(pod: &Value) -> u64 {
    let count = pod["status"]["containerStatuses"][0]["restartCount"].as_u64();
    count.unwrap_or(0)
}

/// How a pod of high priority gets the memory of another.
#[derive(Clone, Copy)]
enum Way {
    Suspension,
    /// The program ignores SIGTERM, as process 1 of a container does without a handler.
    EvictionOfBusyProgram,
    /// The program ends at SIGTERM.
    EvictionOfReadyProgram,
}

impl Way {
    const ALL: [Self; 3] = [
        Self::Suspension,
        Self::EvictionOfReadyProgram,
        Self::EvictionOfBusyProgram,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Suspension => "suspension",
            Self::EvictionOfBusyProgram => "eviction, program ignores SIGTERM",
            Self::EvictionOfReadyProgram => "eviction, program ends at SIGTERM",
        }
    }
}

/// Starts `low`, then a pod of high priority. Returns the time from the creation of that pod to its first kernel, µs.
fn preempt(tenant: &Namespace<'_>, proxy: &ApiProxy, way: Way, urgent: &Value) -> Result<u64> {
    let low = Training {
        name: "low",
        exactly: REQUEST,
        config: match way {
            Way::Suspension => SUSPENDABLE,
            Way::EvictionOfBusyProgram | Way::EvictionOfReadyProgram => "",
        },
        fields: "",
        args: ARGS,
    };
    let mut pod = low.pod().replace(
        "terminationGracePeriodSeconds: 1\n",
        "terminationGracePeriodSeconds: 30\n",
    );
    if matches!(way, Way::EvictionOfReadyProgram) {
        let program = format!("exec cuda-probe train {ARGS}");
        let ends = format!("trap 'kill $!; exit' TERM; cuda-probe train {ARGS} & wait");
        ensure!(pod.contains(&program), "{pod}");
        pod = pod.replace(&program, &ends);
    }
    tenant.apply(&format!("{}---\n{pod}", low.template()))?;
    tenant.training_started("low", 0)?;
    let created = proxy.create(&pods_path(tenant), urgent)?;
    let started = tenant.training_started("high", created)?;
    let low_now = tenant.find("pod", "low")?;
    let is_evicted = low_now.is_none_or(|pod| !pod["metadata"]["deletionTimestamp"].is_null());
    let is_suspension = matches!(way, Way::Suspension);
    ensure!(
        is_evicted != is_suspension,
        "{}: evicted: {is_evicted}",
        way.name()
    );
    tenant.delete_pods(&["high", "low", "--ignore-not-found"])?;
    tenant.kubectl(&["delete", "resourceclaimtemplate", "low"])?;
    wait("no claim is left", || {
        Ok(tenant.list("resourceclaims")?.is_empty().then_some(()))
    })?;
    Ok(started.saturating_sub(created))
}

#[test]
fn preempting_pod_starts_after_suspension_and_after_eviction() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend-figures")?;
    let proxy = ApiProxy::start(&cluster)?;
    cluster.drava_ready()?;
    let high = Training {
        name: "high",
        exactly: REQUEST,
        config: "",
        fields: "priorityClassName: suspend-figures",
        args: ARGS,
    };
    let _class = cluster.deletes("priorityclass", "suspend-figures");
    let class = priority_class("suspend-figures");
    tenant.apply(&format!("{class}\n---\n{}", high.template()))?;
    let urgent = object(&tenant, &high)?;
    let rounds: usize = option(COMPARED_VARIABLE, 1)?;
    let mut times: [Vec<u64>; 3] = Default::default();
    for _ in 0..rounds {
        for (way, times) in Way::ALL.into_iter().zip(&mut times) {
            times.push(preempt(&tenant, &proxy, way, &urgent)?);
            cluster.check_allocations()?;
        }
    }
    for (way, times) in Way::ALL.into_iter().zip(&times) {
        let mut row = percentiles(times);
        row["way"] = json!(way.name());
        report("preemption", row)?;
    }
    Ok(())
}

/// A change of the condition `Suspended`.
#[derive(Clone, Copy, Debug)]
struct Change {
    at_us: u64,
    is_suspended: bool,
    /// Whether a program has called CUDA since.
    is_demanded: bool,
}

/// Watches a claim's condition `Suspended`. Ends with the value.
struct SuspensionWatch {
    child: Child,
    changes: Arc<Mutex<Vec<Change>>>,
}

impl SuspensionWatch {
    fn start(cluster: &TestCluster, tenant: &Namespace<'_>, claim: &str) -> Result<Self> {
        let mut command = cluster.kubernetes().kubectl();
        command
            .args(["-n", tenant.name(), "get", "resourceclaim", claim])
            .args(["--watch", "-o", "json"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("watch the claim")?;
        let output = child.stdout.take().context("a pipe")?;
        let changes = Arc::<Mutex<Vec<Change>>>::default();
        let shared = Arc::clone(&changes);
        std::thread::spawn(move || {
            let objects = serde_json::Deserializer::from_reader(BufReader::new(output));
            for claim in objects.into_iter::<Value>() {
                let (Ok(claim), Ok(at_us)) = (claim, now_us()) else {
                    return;
                };
                let conditions = claim["status"]["devices"][0]["conditions"].as_array();
                let mut conditions = conditions.into_iter().flatten();
                let answer = conditions.find(|condition| condition["type"] == "Suspended");
                let is_suspended = answer.is_some_and(|answer| answer["status"] == "True");
                let is_demanded = answer.is_some_and(|answer| answer["reason"] == "Demanded");
                let mut changes = shared.lock().unwrap_or_else(PoisonError::into_inner);
                let last = changes.last();
                if last.map(|last| (last.is_suspended, last.is_demanded))
                    != Some((is_suspended, is_demanded))
                {
                    changes.push(Change {
                        at_us,
                        is_suspended,
                        is_demanded,
                    });
                }
            }
        });
        Ok(Self { child, changes })
    }

    fn changes(&self) -> Vec<Change> {
        let changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        changes.clone()
    }
}

impl Drop for SuspensionWatch {
    fn drop(&mut self) {
        // It has no state, and ends with this process at the latest.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the parts of a pause in which the claim was not suspended.
fn locked(pause: (u64, u64), changes: &[Change]) -> Vec<(u64, u64)> {
    let (mut from, until) = pause;
    let mut parts = Vec::new();
    let mut is_suspended = false;
    for change in changes {
        let at_us = change.at_us.clamp(pause.0, until);
        if !is_suspended && change.is_suspended {
            parts.push((from, at_us));
        }
        if is_suspended && !change.is_suspended {
            from = at_us;
        }
        is_suspended = change.is_suspended;
    }
    if !is_suspended {
        parts.push((from, until));
    }
    parts.retain(|(from, until)| from < until);
    parts
}

#[test]
fn names_locked_parts_of_pause() {
    let change = |at_us, is_suspended| Change {
        at_us,
        is_suspended,
        is_demanded: false,
    };
    let changes = [
        change(0, false),
        change(130, true),
        change(170, false),
        change(400, true),
    ];
    assert_eq!(locked((100, 200), &changes[..3]), [(100, 130), (170, 200)]);
    assert_eq!(locked((200, 300), &changes[..3]), [(200, 300)]);
    assert_eq!(locked((140, 160), &changes[..3]), []);
}

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    NodeDriver,
    Controller,
    Kubelet,
    Program,
}

impl Victim {
    const ALL: [Self; 4] = [
        Self::NodeDriver,
        Self::Controller,
        Self::Kubelet,
        Self::Program,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::NodeDriver => "node driver",
            Self::Controller => "controller",
            Self::Kubelet => "kubelet",
            Self::Program => "suspended program",
        }
    }

    /// Kills it. Returns when, and when a process of the node driver runs again, µs since the epoch.
    fn kill(self, cluster: &TestCluster) -> Result<(u64, u64)> {
        let node = cluster.first_node();
        let drivers = node.pids("drava-dra-driver")?;
        let killed = now_us()?;
        match self {
            // The one before may not have been replaced yet.
            Self::NodeDriver => drop(node.signal("drava-dra-driver", "KILL")?),
            Self::Controller => drop(node.signal("drava-controller", "KILL")?),
            Self::Kubelet => cluster
                .kubernetes()
                .control_plane()
                .kill(Component::Kubelet)?,
            Self::Program => drop(node.signal_pod("low", "KILL")?),
        }
        if self != Self::NodeDriver {
            return Ok((killed, killed));
        }
        node.wait_for_successor("drava-dra-driver", &drivers)?;
        Ok((killed, now_us()?))
    }
}

/// Counts over all rounds with one victim.
#[derive(Default)]
struct Outcome {
    rounds: u64,
    other_bytes: u64,
    wrong_restarts: u64,
    evicted: u64,
    /// Rounds in which the kill met a program that stood still.
    amid: u64,
    /// Longest time that the program stood still without being suspended, from the return of the node driver.
    locked_us: Vec<u64>,
    /// The same from the kill.
    unserved_us: Vec<u64>,
    high_us: Vec<u64>,
}

impl Outcome {
    fn row(&self, victim: Victim) -> Value {
        let longest = |us: &[u64]| {
            let longest = us.iter().copied().max().unwrap_or(0);
            Duration::from_micros(longest).as_secs_f64() * 1000.0
        };
        let too_long = self.locked_us.iter().filter(|us| **us > LOCKED_LIMIT_US);
        json!({
            "killed": victim.name(),
            "rounds": self.rounds,
            "amid": self.amid,
            "otherBytes": self.other_bytes,
            "wrongRestarts": self.wrong_restarts,
            "evicted": self.evicted,
            "lockedTooLong": too_long.count(),
            "longestLockedMs": longest(&self.locked_us),
            "longestFromKillMs": longest(&self.unserved_us),
            "highStartsP50Ms": percentiles(&self.high_us)["p50Ms"],
            "highStartsMaxMs": percentiles(&self.high_us)["maxMs"],
        })
    }
}

/// The rounds.
struct Rounds<'c> {
    cluster: &'c TestCluster,
    tenant: &'c Namespace<'c>,
    proxy: &'c ApiProxy,
    low: Training<'c>,
    urgent: Value,
}

impl Rounds<'_> {
    /// Starts `low`, unless it is there, and returns its object.
    fn low(&self) -> Result<Value> {
        if self.tenant.find("pod", "low")?.is_none() {
            self.tenant.apply(&self.low.pod())?;
            self.tenant.training_started("low", 0)?;
        }
        self.tenant.find("pod", "low")?.context("low is gone")
    }

    /// Low runs, high gets its memory, low continues; `victim` is killed at a random step.
    fn round(&self, victim: Victim, random: &mut Random, outcome: &mut Outcome) -> Result<()> {
        let before = self.low()?;
        let claim = self.tenant.claim_of("low")?;
        let watch = SuspensionWatch::start(self.cluster, self.tenant, &claim)?;
        wait("the watch has begun", || {
            Ok((!watch.changes().is_empty()).then_some(()))
        })?;
        let begun = now_us()?;
        let (is_killed_at_resume, delay_ms) = (random.below(2) == 1, random.below(LATEST_KILL_MS));
        let kill = || {
            sleep(Duration::from_millis(delay_ms));
            victim.kill(self.cluster)
        };
        let (created, mut killed) = std::thread::scope(|scope| -> Result<_> {
            let created = self.proxy.create(&pods_path(self.tenant), &self.urgent)?;
            let killed = (!is_killed_at_resume).then(|| scope.spawn(kill));
            let started = self.tenant.training_started("high", created)?;
            outcome.high_us.push(started.saturating_sub(created));
            let killed = killed.map(|thread| {
                let killed = thread.join();
                killed.map_err(|_| anyhow::anyhow!("a thread panicked"))?
            });
            Ok((created, killed.transpose()?))
        })?;
        self.cluster.check_allocations()?;
        self.tenant.has_same_bytes("high", created)?;
        std::thread::scope(|scope| -> Result<()> {
            let thread = is_killed_at_resume.then(|| scope.spawn(kill));
            self.tenant.delete_pods(&["high"])?;
            if let Some(thread) = thread {
                let joined = thread.join();
                killed = Some(joined.map_err(|_| anyhow::anyhow!("a thread panicked"))??);
            }
            Ok(())
        })?;
        let deleted = now_us()?;
        outcome.rounds += 1;
        let after = self.tenant.find("pod", "low")?;
        let is_gone = |pod: &Value| !pod["metadata"]["deletionTimestamp"].is_null();
        if after.is_none_or(|pod| is_gone(&pod)) {
            outcome.evicted += 1;
            self.tenant.delete_pods(&["low", "--ignore-not-found"])?;
            return self.cluster.check_allocations();
        }
        if let Err(error) = self.tenant.has_same_bytes("low", deleted) {
            ensure!(error.to_string().contains("other bytes"), "{error:#}");
            outcome.other_bytes += 1;
            eprintln!("{victim:?}: {error:#}");
        }
        let after = self.tenant.find("pod", "low")?.context("low is gone")?;
        let expected = restarts(&before) + u64::from(victim == Victim::Program);
        if restarts(&after) != expected {
            outcome.wrong_restarts += 1;
            eprintln!(
                "{victim:?}: {} restarts, expected {expected}",
                restarts(&after)
            );
        }
        let log = self.tenant.training_log("low");
        let (from, back) = killed.context("no kill")?;
        let changes = watch.changes();
        let pauses: Vec<(u64, u64)> = log
            .after("pause", begun)
            .filter_map(|pause| Some((pause["fromUs"].as_u64()?, pause["atUs"].as_u64()?)))
            .collect();
        let is_amid = pauses
            .iter()
            .any(|(start, until)| (*start..*until).contains(&from));
        outcome.amid += u64::from(is_amid);
        let parts: Vec<(u64, u64)> = pauses
            .iter()
            .flat_map(|pause| locked(*pause, &changes))
            .filter(|(_, until)| *until > from)
            .collect();
        let longest = |since: u64| {
            let lengths = parts
                .iter()
                .map(|(start, until)| until.saturating_sub(since.max(*start)));
            lengths.max().unwrap_or(0)
        };
        // Without the node driver no component can unlock.
        outcome.locked_us.push(longest(back));
        outcome.unserved_us.push(longest(from));
        if longest(back) > LOCKED_LIMIT_US {
            eprintln!(
                "{victim:?}, at resume: {is_killed_at_resume}, after {delay_ms} ms: killed {from}, back {back}, stood still {parts:?}, {changes:?}"
            );
        }
        self.cluster.check_allocations()
    }
}

#[test]
fn bytes_survive_suspension_while_programs_are_killed() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend-rounds")?;
    let proxy = ApiProxy::start(&cluster)?;
    cluster.drava_ready()?;
    let low = Training {
        name: "low",
        exactly: REQUEST,
        config: SUSPENDABLE,
        fields: "",
        args: ARGS,
    };
    let high = Training {
        name: "high",
        exactly: REQUEST,
        config: "",
        fields: "priorityClassName: suspend-rounds",
        args: ARGS,
    };
    let _class = cluster.deletes("priorityclass", "suspend-rounds");
    let class = priority_class("suspend-rounds");
    let templates = [class, low.template(), high.template()];
    tenant.apply(&templates.join("\n---\n"))?;
    let rounds = Rounds {
        cluster: &cluster,
        tenant: &tenant,
        proxy: &proxy,
        low,
        urgent: object(&tenant, &high)?,
    };
    let mut random = Random::new(option(SEED_VARIABLE, 1)?);
    let mut outcomes: [Outcome; 4] = Default::default();
    for _ in 0..option(ROUNDS_VARIABLE, 1)? {
        for (victim, outcome) in Victim::ALL.into_iter().zip(&mut outcomes) {
            rounds
                .round(victim, &mut random, outcome)
                .with_context(|| format!("{victim:?} was killed"))?;
        }
    }
    for (victim, outcome) in Victim::ALL.into_iter().zip(&outcomes) {
        report("rounds", outcome.row(victim))?;
    }
    tenant.delete_pods(&["low", "--ignore-not-found"])?;
    cluster.drava_ready()?;
    cluster.first_node().wait_until_clean()?;
    let other_bytes: u64 = outcomes.iter().map(|outcome| outcome.other_bytes).sum();
    let wrong_restarts: u64 = outcomes.iter().map(|outcome| outcome.wrong_restarts).sum();
    if is_bench() {
        return Ok(());
    }
    ensure!(other_bytes == 0, "{other_bytes} rounds with other bytes");
    ensure!(
        wrong_restarts == 0,
        "{wrong_restarts} rounds with wrong restarts"
    );
    Ok(())
}

/// A program that takes a step for each line of `/tmp/cells`, as a notebook.
const NOTEBOOK: &str = "--mib 64 --unwritten-mib 48000 --cells /tmp/cells --pause-ms 0";

/// Executes a cell of the notebook. Returns when its first call began, and when its result was there, µs.
fn execute_cell(tenant: &Namespace<'_>, since: u64) -> Result<(u64, u64)> {
    let cell = tenant.exec("notebook", "app", &["sh", "-c", "printf c >> /tmp/cells"])?;
    ensure!(cell.code == 0, "{cell:?}");
    wait("the cell has ended", || {
        let log = tenant.training_log("notebook");
        let pause = log.after("pause", since).next();
        Ok(pause.and_then(|pause| Some((pause["fromUs"].as_u64()?, pause["atUs"].as_u64()?))))
    })
    .with_context(|| tenant.story("notebook"))
}

fn idle_policy(tenant: &Namespace<'_>) -> String {
    format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuPolicy, metadata: {{name: {0}}}, spec: {{namespaceSelector: {{matchLabels: \
         {{kubernetes.io/metadata.name: {0}}}}}, idle: {{after: 1m, action: suspend}}}}}}",
        tenant.name()
    )
}

#[test]
fn idle_notebook_gives_its_gpu_and_gets_it_at_the_next_cell() -> Result<()> {
    let rounds = option(IDLE_VARIABLE, 1)?;
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("suspend-idle")?;
    cluster.drava_ready()?;
    let notebook = Training {
        name: "notebook",
        exactly: REQUEST,
        config: SUSPENDABLE,
        fields: "",
        args: NOTEBOOK,
    };
    let other = Training {
        name: "other",
        exactly: REQUEST,
        config: "",
        fields: "",
        args: ARGS,
    };
    let pod = notebook.pod();
    let _policy = cluster.deletes("gpupolicy", "e2e-suspend-idle");
    tenant.apply(&idle_policy(&tenant))?;
    tenant.apply(&format!(
        "{}---\n{pod}---\n{}",
        notebook.template(),
        other.template()
    ))?;
    tenant.training_started("notebook", 0)?;
    let claim = tenant.claim_of("notebook")?;
    let watch = SuspensionWatch::start(&cluster, &tenant, &claim)?;
    let is_suspended = || watch.changes().last().is_some_and(|last| last.is_suspended);
    let (mut seen_us, mut back_us) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        // It is reported after a minute, and later if it often pauses.
        for _ in 0..3 {
            let waited = wait("the idle share is suspended", || {
                Ok(is_suspended().then_some(()))
            });
            if waited.is_ok() {
                break;
            }
        }
        ensure!(is_suspended(), "{}", tenant.story("notebook"));
        let why = tenant.event("notebook", "ShareIdle")?;
        ensure!(why.contains("until a program calls CUDA"), "{why}");
        // Another pod uses its memory, and ends.
        let before = now_us()?;
        tenant.apply(&other.pod())?;
        tenant.training_started("other", before)?;
        tenant.has_same_bytes("other", before)?;
        cluster.check_allocations()?;
        tenant.delete_pods(&["other"])?;
        let explained = cluster.drava(&["-n", tenant.name(), "explain", "pod", "notebook"])?;
        let explained = explained.success()?;
        ensure!(
            explained.contains("it is resumed when a program calls CUDA"),
            "{explained}"
        );
        ensure!(
            is_suspended(),
            "room alone resumes it: {:?}",
            watch.changes()
        );
        let begun = now_us()?;
        let (called, back) = execute_cell(&tenant, begun)?;
        tenant.has_same_bytes("notebook", begun)?;
        let changes = watch.changes();
        let mut demands = changes.iter().filter(|change| change.at_us >= begun);
        let demand = demands.find(|change| change.is_demanded);
        let demand = demand.with_context(|| format!("no demand: {changes:?}"))?;
        seen_us.push(demand.at_us.saturating_sub(called));
        back_us.push(back.saturating_sub(called));
        cluster.check_allocations()?;
    }
    let notebook = tenant.find("pod", "notebook")?.context("the pod is gone")?;
    ensure!(restarts(&notebook) == 0, "restarted: {notebook}");
    for (what, times) in [("seen", &seen_us), ("back", &back_us)] {
        let mut row = percentiles(times);
        row["what"] = json!(what);
        report("idle", row)?;
    }
    Ok(())
}
