//! Shares that grow, shrink and lend, measured: times, and limits while programs of drava and tenants are killed.
//!
//! `cargo xtask bench elastic` runs the same tests with more rounds.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use drava_e2e::exporter::DRIVER_PORT;
use drava_e2e::manifest::pod_with_request;
use drava_e2e::measurement::{ApiProxy, Random, is_bench, now_us, option, percentiles, report};
use drava_e2e::training::Training;
use drava_e2e::{Namespace, TestCluster, TestNode, wait};
use drava_vgpu_abi::page;
use serde_json::{Value, json};

mod sums;

use sums::Sums;

/// Changes whose time is measured.
const GROWTHS_VARIABLE: &str = "DRAVA_E2E_GROWTHS";
/// Resizes while programs allocate and are killed.
const RESIZES_VARIABLE: &str = "DRAVA_E2E_RESIZES";
/// Claims that take lent memory back.
const GUARANTEES_VARIABLE: &str = "DRAVA_E2E_GUARANTEES";
/// Seed of amounts, victims and times.
const SEED_VARIABLE: &str = "DRAVA_E2E_SEED";

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Returns a request for this memory of GPU 0.
fn on_first_gpu(class: &str, memory: &str) -> String {
    format!(
        r#"{{deviceClassName: {class}, capacity: {{requests: {{memory: {memory}}}}},
     selectors: [{{cel: {{expression: "device.attributes['gpu.drava.dev'].index == 0"}}}}]}}"#
    )
}

/// Waits until the program of the pod sees this total after that time, and returns when, µs since the epoch.
fn total_is(tenant: &Namespace<'_>, pod: &str, bytes: u64, since_us: u64) -> Result<u64> {
    wait(&format!("the program of {pod} sees {bytes} bytes"), || {
        let log = tenant.training_log(pod);
        let mut totals = log.after("total", since_us);
        let found = totals.find(|event| event["bytes"] == bytes);
        Ok(found.and_then(|event| event["atUs"].as_u64()))
    })
}

/// Returns the companion that adds this memory to the claim of a pod.
fn companion(tenant: &Namespace<'_>, pod: &str, memory: &str) -> Result<Value> {
    let claim = tenant.claim_of(pod)?;
    let uid = |kind: &str, name: &str| -> Result<Value> {
        let object = tenant.find(kind, name)?.context("an object is gone")?;
        Ok(object["metadata"]["uid"].clone())
    };
    Ok(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": format!("{pod}-more"),
            "labels": {"gpu.drava.dev/companion-of": uid("resourceclaim", &claim)?},
            "ownerReferences": [{
                "apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid("pod", pod)?, "controller": true,
            }],
        },
        "spec": {"devices": {"requests": [{
            "name": "gpu",
            "exactly": {
                "deviceClassName": "vgpu.drava.dev",
                "capacity": {"requests": {"memory": memory, "cores": "0"}},
            },
        }]}},
    }))
}

#[test]
fn program_sees_growth_soon() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("growth-figures")?;
    let proxy = ApiProxy::start(&cluster)?;
    cluster.drava_ready()?;
    let training = Training {
        name: "grow",
        exactly: &on_first_gpu("vgpu.drava.dev", "3Gi"),
        config: "",
        fields: "",
        args: "--step-ms 2",
    };
    tenant.apply(&format!("{}---\n{}", training.template(), training.pod()))?;
    tenant.training_started("grow", 0)?;
    let companion = companion(&tenant, "grow", "1Gi")?;
    let path = format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims",
        tenant.name()
    );
    let count: usize = option(GROWTHS_VARIABLE, 3)?;
    let mut grown = Vec::new();
    for _ in 0..count {
        let created = proxy.create(&path, &companion)?;
        let seen = total_is(&tenant, "grow", 4 * GIB, created)?;
        grown.push(seen.saturating_sub(created));
        let before = now_us()?;
        tenant.kubectl(&["delete", "resourceclaim", "grow-more", "--timeout=60s"])?;
        total_is(&tenant, "grow", 3 * GIB, before)?;
    }
    let mut row = percentiles(&grown);
    row["what"] = json!("companion written until the program sees it");
    report("growth", row)?;
    let mut commands: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for (what, memory) in [
        ("resize that adds", "4Gi"),
        ("resize that gives back", "3Gi"),
    ]
    .repeat(count)
    {
        let begun = Instant::now();
        let done = cluster.drava(&["-n", tenant.name(), "resize", "grow", "--memory", memory])?;
        let time = u64::try_from(begun.elapsed().as_micros())?;
        ensure!(done.code == 0, "{done:?}");
        commands.entry(what).or_default().push(time);
    }
    for (what, times) in commands {
        let mut row = percentiles(&times);
        row["what"] = json!(what);
        report("growth", row)?;
    }
    cluster.check_allocations()
}

/// Prints the records and limits pages of all claims, the ledger of the simulated machine, the pods of its processes, and the records
/// and pages again.
const SAMPLE: &str = r#"
files() {
    cd /var/lib/drava/claims
    for p in */*/limits/page; do echo "$1 page ${p%%/*} $(base64 -w0 $p)"; done
    for r in *.json; do echo "$1 record ${r%.json} $(sed -n 2p $r)"; done
}
files before
echo "status - - $(/opt/drava-build/simulator-machine ctl --root /opt/drava-sim status | tr -d '\n')"
files after
for d in /proc/[0-9]*; do
    read -r c < $d/comm && [ "$c" = cuda-probe ] && echo "process ${d#/proc/} $(tr '\0' '\n' < $d/environ | sed -n 's/^HOSTNAME=//p') -"
done 2>/dev/null
true
"#;

/// An amount before and after the ledger was read.
#[derive(Clone, Copy, Default)]
struct Amount {
    before: u64,
    after: u64,
}

impl Amount {
    fn most(self) -> u64 {
        self.before.max(self.after)
    }

    /// Returns what the share has for sure at one moment between both.
    fn least(self) -> u64 {
        self.before.min(self.after)
    }
}

/// The state of the node at one moment, bytes.
#[derive(Default)]
struct Sample {
    /// Limits in force by claim.
    limits: BTreeMap<String, Amount>,
    /// Recorded amounts by claim.
    records: BTreeMap<String, Amount>,
    /// Memory that the processes of each pod have on GPU 0.
    used: BTreeMap<String, u64>,
    /// Memory of GPU 0.
    total: u64,
}

fn limit_of(page: &str) -> Result<u64> {
    let decoded = page::decode(&STANDARD.decode(page)?);
    let page = decoded.map_err(|error| anyhow::anyhow!("limits page: {error}"))?;
    page.spec
        .limits
        .memory_limit_bytes
        .context("no memory limit")
}

fn recorded(record: &str) -> Result<u64> {
    let record: Value = serde_json::from_str(record)?;
    let share = &record["devices"][0]["access"];
    let grants = share["grants"].as_array().into_iter().flatten();
    let grants: u64 = grants
        .filter_map(|grant| grant["memoryBytes"].as_u64())
        .sum();
    Ok(share["memoryBytes"].as_u64().context("memoryBytes")? + grants)
}

impl Sample {
    fn take(node: &TestNode) -> Result<Self> {
        Self::read(&node.run("sh", &["-euc", SAMPLE])?)
    }

    fn read(text: &str) -> Result<Self> {
        let mut sample = Self::default();
        let mut pods = BTreeMap::new();
        let mut status = Value::Null;
        for line in text.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            let [when, kind, name, text] = words[..] else {
                anyhow::bail!("line {line:?}");
            };
            // A file that was replaced while it was read is read with the next sample.
            let amount = match kind {
                "page" => limit_of(text).ok(),
                "record" => recorded(text).ok(),
                _ => None,
            };
            let of_kind = match kind {
                "page" => &mut sample.limits,
                _ => &mut sample.records,
            };
            match (when, amount) {
                ("before", Some(before)) => drop(of_kind.insert(
                    name.to_owned(),
                    Amount {
                        before,
                        after: before,
                    },
                )),
                ("after", Some(after)) => {
                    of_kind
                        .entry(name.to_owned())
                        .or_insert(Amount {
                            before: after,
                            after,
                        })
                        .after = after
                }
                ("status", _) => status = serde_json::from_str(text)?,
                ("process", _) => drop(pods.insert(kind.parse::<u64>()?, name.to_owned())),
                _ => {}
            }
        }
        let gpu = &status["gpus"][0];
        sample.total = gpu["totalBytes"].as_u64().context("totalBytes")?;
        for process in gpu["processes"].as_array().context("processes")? {
            let pid = process["pid"].as_u64().context("pid")?;
            if let Some(pod) = pods.get(&pid) {
                let used = process["usedBytes"].as_u64().context("usedBytes")?;
                *sample.used.entry(pod.clone()).or_default() += used;
            }
        }
        Ok(sample)
    }
}

#[test]
fn reads_sample() -> Result<()> {
    let record = r#"{"devices":[{"access":{"memoryBytes":5,"grants":[{"memoryBytes":2},{"memoryBytes":1}]}}]}"#;
    let status = r#"{"gpus":[{"totalBytes":90,"processes":[{"pid":7,"usedBytes":3},{"pid":8,"usedBytes":4},{"pid":9,"usedBytes":50}]}]}"#;
    let text = format!(
        "before record a {record}\nstatus - - {status}\nafter record a {}\nafter page a torn\nprocess 7 pod -\nprocess 8 pod -\n",
        record.replace('5', "4")
    );
    let sample = Sample::read(&text)?;
    let amount = sample.records["a"];
    ensure!((amount.most(), amount.least()) == (8, 7), "of a");
    ensure!(
        sample.used == BTreeMap::from([("pod".to_owned(), 7)]),
        "{:?}",
        sample.used
    );
    ensure!(
        sample.limits.is_empty() && sample.total == 90,
        "page or total"
    );
    Ok(())
}

/// What was found wrong, and how often it was checked.
#[derive(Default)]
struct Findings {
    samples: u64,
    /// Largest use beyond the limit in force.
    most_excess: u64,
    excesses: u64,
    /// Limits beyond what is recorded.
    unrecorded: u64,
    /// GPUs whose recorded shares together exceed them.
    promised_twice: u64,
}

impl Findings {
    /// Checks a sample; `claims` are the UIDs of the claims of the pods.
    fn check(&mut self, sample: &Sample, claims: &BTreeMap<&str, String>) {
        self.samples += 1;
        for (pod, uid) in claims {
            let used = sample.used.get(*pod).copied().unwrap_or(0);
            let (Some(limit), Some(record)) = (sample.limits.get(uid), sample.records.get(uid))
            else {
                continue;
            };
            let excess = used.saturating_sub(limit.most());
            self.most_excess = self.most_excess.max(excess);
            self.excesses += u64::from(excess > 0);
            self.unrecorded += u64::from(limit.least() > record.most());
        }
        let recorded: u64 = sample.records.values().map(|amount| amount.least()).sum();
        self.promised_twice += u64::from(recorded > sample.total);
    }
}

const PODS: [&str; 2] = ["one", "two"];
/// Memory of the claims of both pods, and of a pod that does not change. 9 GiB of the GPU are free at first.
const BASE_GIB: u64 = 20;
const FILLER: &str = "30Gi";
/// Most that a share grows to: the free memory suffices for one of them.
const MOST_GIB: u64 = 28;
/// Returns a pod with four processes that allocate, free and are started again when they are killed.
fn churning(name: &str, index: u64) -> String {
    let program = format!(
        "for p in 1 2 3 4; do (while :; do cuda-probe churn --largest-mib 512 --held 40 --pause-us 10000 --seed $(({index} * 100 + $p)); sleep 0.1; done) & done; wait"
    );
    let request = on_first_gpu("vgpu.drava.dev", &format!("{BASE_GIB}Gi"));
    let pod = pod_with_request(name, &request, "");
    pod.replace(
        "command: [sleep, infinity]",
        &format!("command: [sh, -c, {}]", json!(program)),
    )
}

/// Sums the counts of all processes that a pod has had.
fn counts(tenant: &Namespace<'_>, pod: &str) -> Result<(u64, u64)> {
    let text = tenant.kubectl(&["logs", pod])?;
    let mut last: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for line in text.lines() {
        let Ok(counts) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let number = |name: &str| counts[name].as_u64().unwrap_or(0);
        last.insert(number("pid"), (number("allocated"), number("denied")));
    }
    let sum = |one: (u64, u64), other: &(u64, u64)| (one.0 + other.0, one.1 + other.1);
    Ok(last.values().fold((0, 0), sum))
}

/// Deletes companions that were not granted, and waits until all others are.
fn settle(tenant: &Namespace<'_>) -> Result<()> {
    wait("no companion waits or ends", || {
        let mut is_settled = true;
        for claim in tenant.list("resourceclaims")? {
            if claim["metadata"]["labels"]["gpu.drava.dev/companion-of"].is_null() {
                continue;
            }
            let conditions = claim["status"]["devices"][0]["conditions"].as_array();
            let is_granted = conditions
                .into_iter()
                .flatten()
                .any(|condition| condition["type"] == "Granted" && condition["status"] == "True");
            let is_ending = !claim["metadata"]["deletionTimestamp"].is_null();
            is_settled &= is_granted && !is_ending;
            if !is_granted && !is_ending {
                let name = claim["metadata"]["name"].as_str().context("name")?;
                tenant.kubectl(&[
                    "delete",
                    "resourceclaim",
                    name,
                    "--wait=false",
                    "--ignore-not-found",
                ])?;
            }
        }
        Ok(is_settled.then_some(()))
    })
}

/// Returns the memory of GPU 0 that `kubectl drava top` shows as allocated: what the planner counts.
fn planned(cluster: &TestCluster) -> Result<u64> {
    let top = cluster.drava(&["top", "-o", "json"])?.json()?;
    let gpus = top["gpus"].as_array().context("gpus")?;
    let first = gpus.iter().find(|gpu| gpu["gpu"] == "gpu-0");
    let allocated = first.and_then(|gpu| gpu["memory"]["allocated"].as_u64());
    allocated.context("memory.allocated")
}

/// Kills one of the programs that can end at any time.
fn kill(node: &TestNode, victim: &str) -> Result<()> {
    match victim {
        "program" => {
            if let Some(pid) = node.pids("cuda-probe")?.first() {
                // It may have ended by another kill.
                let _ = node.run("kill", &["-KILL", pid]);
            }
        }
        program => drop(node.signal(program, "KILL")?),
    }
    Ok(())
}

const VICTIMS: [&str; 3] = ["program", "drava-dra-driver", "drava-controller"];

/// Latest kill after the start of a resize, milliseconds.
const LATEST_KILL_MS: u64 = 800;

/// Time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// Resizes of the pods, and what they have led to.
struct Resizes<'c> {
    cluster: &'c TestCluster,
    tenant: &'c Namespace<'c>,
    claims: &'c BTreeMap<&'static str, String>,
    granted: u64,
    refused: u64,
    /// Resizes that were reported as done while the limit was another.
    below: u64,
    /// Settled states in which records, limits and the planner had different sums.
    different: u64,
    kills: BTreeMap<&'static str, u64>,
    sums: Sums<'c>,
}

impl Resizes<'_> {
    /// Resizes a pod, during which a program is killed if `kills`.
    fn resize(&mut self, random: &mut Random, kills: bool) -> Result<()> {
        let pod = PODS[usize::try_from(random.below(2))?];
        let memory = BASE_GIB + random.below(MOST_GIB - BASE_GIB + 1);
        let victim = VICTIMS[usize::try_from(random.below(3))?];
        let delay = Duration::from_millis(random.below(LATEST_KILL_MS));
        let cluster = self.cluster;
        let done = std::thread::scope(|scope| {
            let killer = kills.then(|| {
                scope.spawn(move || {
                    sleep(delay);
                    kill(&cluster.first_node(), victim)
                })
            });
            let amount = format!("{memory}Gi");
            let name = self.tenant.name();
            let resize = [
                "-n",
                name,
                "resize",
                pod,
                "--memory",
                &amount,
                "--timeout",
                "20",
            ];
            let done = cluster.drava(&resize);
            if let Some(killer) = killer {
                let joined = killer.join();
                joined.map_err(|_| anyhow::anyhow!("a thread panicked"))??;
            }
            done
        })?;
        if kills {
            *self.kills.entry(victim).or_default() += 1;
        }
        let sample = Sample::take(&cluster.first_node())?;
        let limit = sample.limits.get(&self.claims[pod]);
        let limit = limit.map(|limit| limit.least());
        if done.code != 0 {
            self.refused += 1;
        } else {
            self.granted += 1;
            if limit != Some(memory * GIB) {
                self.below += 1;
                eprintln!("{pod} has {limit:?} instead of {memory} GiB: {done:?}");
            }
        }
        // While the companion may be in any state.
        self.sums.compare_allocator()?;
        settle(self.tenant)?;
        self.compare()?;
        self.sums.compare().map(drop)
    }

    /// Compares what is recorded, in force and planned.
    fn compare(&mut self) -> Result<()> {
        let sample = Sample::take(&self.cluster.first_node())?;
        let sum = |amounts: &BTreeMap<String, Amount>| -> u64 {
            amounts.values().map(|amount| amount.least()).sum()
        };
        let (recorded, limits) = (sum(&sample.records), sum(&sample.limits));
        let planned = planned(self.cluster)?;
        if recorded != planned || limits != planned {
            self.different += 1;
            eprintln!("recorded {recorded}, limits {limits}, planned {planned} bytes");
        }
        Ok(())
    }
}

/// Checks samples until `has_ended`.
fn observe(
    cluster: &TestCluster,
    claims: &BTreeMap<&str, String>,
    has_ended: &AtomicBool,
) -> Result<Findings> {
    let (node, mut findings) = (cluster.first_node(), Findings::default());
    while !has_ended.load(Ordering::Relaxed) {
        findings.check(&Sample::take(&node)?, claims);
        cluster.check_allocations()?;
        sleep(SAMPLE_INTERVAL);
    }
    Ok(findings)
}

#[test]
fn limits_hold_while_shares_are_resized_and_programs_are_killed() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("resizes")?;
    cluster.drava_ready()?;
    let filler = pod_with_request("filler", &on_first_gpu("vgpu.drava.dev", FILLER), "");
    let pods: Vec<String> = (0..)
        .zip(PODS)
        .map(|(index, pod)| churning(pod, index))
        .collect();
    tenant.apply(&format!("{filler}\n---\n{}", pods.join("\n---\n")))?;
    let mut claims = BTreeMap::new();
    for pod in PODS.into_iter().chain(["filler"]) {
        tenant.running(pod)?;
        claims.insert(pod, tenant.allocated_claim_of(pod)?.uid);
    }
    let count: u64 = option(RESIZES_VARIABLE, 6)?;
    let mut random = Random::new(option(SEED_VARIABLE, 1)?);
    let mut resizes = Resizes {
        cluster: &cluster,
        tenant: &tenant,
        claims: &claims,
        granted: 0,
        refused: 0,
        below: 0,
        different: 0,
        kills: BTreeMap::new(),
        sums: Sums::new(&cluster, &tenant)?,
    };
    let has_ended = AtomicBool::new(false);
    let findings = std::thread::scope(|scope| {
        let observer = scope.spawn(|| observe(&cluster, &claims, &has_ended));
        let resized = (0..count).try_for_each(|index| resizes.resize(&mut random, index % 2 == 1));
        has_ended.store(true, Ordering::Relaxed);
        let findings = observer.join();
        resized?;
        findings.map_err(|_| anyhow::anyhow!("a thread panicked"))?
    })?;
    let mut allocations = (0, 0);
    for pod in PODS {
        let (allocated, denied) = counts(&tenant, pod)?;
        allocations = (allocations.0 + allocated, allocations.1 + denied);
        let found = tenant.find("pod", pod)?.context("a pod is gone")?;
        let restarts = &found["status"]["containerStatuses"][0]["restartCount"];
        ensure!(*restarts == 0, "{found}");
    }
    let row = json!({
        "resizes": count,
        "granted": resizes.granted,
        "refused": resizes.refused,
        "kills": resizes.kills.values().sum::<u64>(),
        "killed": resizes.kills,
        "allocations": allocations.0,
        "denied": allocations.1,
        "samples": findings.samples,
        "excesses": findings.excesses,
        "mostExcessMiB": findings.most_excess / MIB,
        "unrecorded": findings.unrecorded,
        "promisedTwice": findings.promised_twice,
        "belowGranted": resizes.below,
        "differentSums": resizes.different,
    });
    report("resizes", row)?;
    let different = resizes.sums.different();
    resizes.sums.report()?;
    cluster.drava_ready()?;
    let findings = findings.excesses + findings.unrecorded + findings.promised_twice;
    let wrong = findings + resizes.below + resizes.different + different;
    ensure!(allocations.0 > 0, "nothing was allocated");
    ensure!(is_bench() || wrong == 0, "{wrong} findings, listed above");
    Ok(())
}

/// Sum and count of the durations of successful and failed preparations, s, and preparations that missed a guarantee by cause.
fn preparations(cluster: &TestCluster) -> Result<(f64, f64, BTreeMap<String, f64>)> {
    let text = cluster.metrics("driver", DRIVER_PORT)?;
    let value = |line: &str| line.rsplit(' ').next()?.parse::<f64>().ok();
    let of = |name: &str| {
        let series = format!("drava_claim_operation_seconds_{name}{{operation=\"prepare\"}}");
        text.lines()
            .find(|line| line.starts_with(&series))
            .and_then(value)
            .unwrap_or(0.0)
    };
    let missed = text
        .lines()
        .filter_map(|line| {
            let labels = line.strip_prefix("drava_burst_reclaim_missed_total{cause=\"")?;
            Some((labels.split('"').next()?.to_owned(), value(line)?))
        })
        .collect();
    Ok((of("sum"), of("count"), missed))
}

/// Pods that use lent memory at the same time.
const BURSTING: [&str; 3] = ["burst-0", "burst-1", "burst-2"];
const BURST_CLASS: &str = "burst-figures.drava-example.com";
const BURST_CONFIG: &str = "[{opaque: {driver: gpu.drava.dev, parameters: {apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, \
     memory: {limit: 20Gi, reclaim: kill}}}}]";

fn burst_class() -> String {
    format!(
        r#"
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {{name: {BURST_CLASS}}}
spec:
  selectors:
  - cel: {{expression: 'device.driver == "gpu.drava.dev" && device.attributes["gpu.drava.dev"].type == "vgpu"'}}
  config:
  - opaque:
      driver: gpu.drava.dev
      parameters: {{apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, memory: {{maxLimit: 20Gi}}}}
"#
    )
}

/// Measured preparations of claims that are guaranteed most of the GPU.
#[derive(Default)]
struct Guaranteed {
    /// From the creation of the pod to its first kernel.
    started_us: Vec<u64>,
    /// Calls of kubelet for the claim, all together.
    prepared_us: Vec<u64>,
    calls: u64,
    missed: BTreeMap<String, u64>,
}

impl Guaranteed {
    /// Creates the pod, waits until it runs and deletes it.
    fn measure(
        &mut self,
        cluster: &TestCluster,
        tenant: &Namespace<'_>,
        pod: &Training<'_>,
    ) -> Result<()> {
        let before = preparations(cluster)?;
        let created = now_us()?;
        tenant.apply(&pod.pod())?;
        let started = tenant.training_started(pod.name, created)?;
        let after = preparations(cluster)?;
        cluster.check_allocations()?;
        self.started_us.push(started.saturating_sub(created));
        let seconds = Duration::from_secs_f64((after.0 - before.0).max(0.0));
        self.prepared_us.push(u64::try_from(seconds.as_micros())?);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small count"
        )]
        let whole = |count: f64| count as u64;
        self.calls += whole(after.1 - before.1);
        for (cause, count) in after.2 {
            let earlier = before.2.get(&cause).copied().unwrap_or(0.0);
            *self.missed.entry(cause).or_default() += whole(count - earlier);
        }
        tenant.delete_pods(&[pod.name])
    }

    fn row(&self, beside: &str) -> Value {
        let (started, prepared) = (
            percentiles(&self.started_us),
            percentiles(&self.prepared_us),
        );
        json!({
            "beside": beside,
            "claims": self.started_us.len(),
            "calls": self.calls,
            "missed": self.missed.values().sum::<u64>(),
            "missedByCause": self.missed,
            "prepareP50Ms": prepared["p50Ms"],
            "prepareMaxMs": prepared["maxMs"],
            "startP50Ms": started["p50Ms"],
            "startMaxMs": started["maxMs"],
        })
    }
}

#[test]
fn guarantee_is_met_while_others_burst() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("burst-figures")?;
    let _class = cluster.deletes("deviceclass", BURST_CLASS);
    cluster.drava_ready()?;
    let exactly = on_first_gpu("vgpu.drava.dev", "60Gi");
    let needs = Training {
        name: "needs",
        exactly: &exactly,
        config: "",
        fields: "",
        // All of it but for the context.
        args: "--unwritten-mib 60000",
    };
    tenant.apply(&format!("{}---\n{}", burst_class(), needs.template()))?;
    let count: usize = option(GUARANTEES_VARIABLE, 1)?;
    let mut alone = Guaranteed::default();
    for _ in 0..count {
        alone.measure(&cluster, &tenant, &needs)?;
    }
    let mut since = now_us()?;
    let exactly = on_first_gpu(BURST_CLASS, "4Gi");
    for name in BURSTING {
        let bursting = Training {
            name,
            exactly: &exactly,
            config: BURST_CONFIG,
            fields: "",
            // Denied, and started again, until so much is lent.
            args: "--unwritten-mib 14000",
        };
        tenant.apply(&format!("{}---\n{}", bursting.template(), bursting.pod()))?;
    }
    let mut beside = Guaranteed::default();
    for _ in 0..count {
        for pod in BURSTING {
            tenant.training_started(pod, since)?;
        }
        since = now_us()?;
        beside.measure(&cluster, &tenant, &needs)?;
    }
    report("guarantees", alone.row("no other share"))?;
    report(
        "guarantees",
        beside.row("three shares that use lent memory"),
    )?;
    tenant.delete_pods(&BURSTING)?;
    cluster.first_node().wait_until_clean()
}
