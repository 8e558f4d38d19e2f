//! Random histories of a small cluster: tenants with priorities, gangs and quotas, kube-scheduler, evictions and failed writes.
//!
//! Everything follows from the seed. With `DRAVA_HISTORIES`, all actions are written to that file, so that two builds can be
//! compared action by action: `DRAVA_HISTORIES=/tmp/one DRAVA_HISTORY_SEEDS=300 cargo test histories`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use drava_api::names::ALLOCATION_GATE;
use drava_api::suspension as api_suspension;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use super::cluster::{TestCluster, applied, member};
use crate::action::{AllocationFailure, AllocationJob, EvictionOutcome, Release};
use crate::fixture::random::Random;
use crate::fixture::{claim, gated_pod, node, object};
use crate::pods::claim::is_allocated;

const NODES: [&str; 4] = ["n1", "n2", "n3", "n4"];
const STEPS: usize = 250;
const GPU_GIB: u64 = 80;

struct History {
    random: Random,
    cluster: TestCluster,
    jobs: Vec<AllocationJob>,
    releases: Vec<Release>,
    created: usize,
    /// Memory of each claim, GiB.
    memory: BTreeMap<String, u64>,
    /// Claims whose processes are in host memory.
    suspended: BTreeSet<String>,
    log: String,
    decided: Decided,
}

/// Numbers of actions, so that no planner passes that does nothing.
#[derive(Debug, Default)]
struct Decided {
    allocations: usize,
    releases: usize,
    evictions: usize,
    gate_removals: usize,
    suspensions: usize,
    resumptions: usize,
}

impl History {
    fn new(seed: u64) -> Self {
        Self {
            random: Random::new(seed),
            cluster: TestCluster::new(&NODES),
            jobs: Vec::new(),
            releases: Vec::new(),
            created: 0,
            memory: BTreeMap::new(),
            suspended: BTreeSet::new(),
            log: String::new(),
            decided: Decided::default(),
        }
    }

    fn create(&mut self, in_gang: bool) {
        let memory = self.random.choose(&[10, 20, 40, 70]).unwrap();
        let name = format!("p{:03}", self.created);
        self.created += 1;
        self.memory.insert(name.clone(), memory);
        let mut claim = claim(&name, &format!("{memory}Gi"));
        let is_gated = in_gang || self.random.below(3) == 0;
        let gates = [ALLOCATION_GATE];
        let gates: &[&str] = if is_gated { &gates } else { &[] };
        let mut pod = gated_pod(&name, &[&name], gates);
        let namespace = self.random.choose(&["default", "team"]).unwrap();
        if in_gang {
            pod = member(pod, "2");
        } else {
            if self.random.below(3) > 0 {
                super::suspension::allow(&mut claim);
            }
            claim.metadata.namespace = Some(namespace.to_owned());
            pod.metadata.namespace = Some(namespace.to_owned());
        }
        pod.spec.as_mut().unwrap().priority = self
            .random
            .choose(&[Some(0), Some(0), Some(5), Some(10)])
            .unwrap();
        let created = format!(
            "2025-12-31T{:02}:{:02}:00Z",
            self.created / 60 % 24,
            self.created % 60
        );
        pod.metadata.creation_timestamp = Some(object(json!(created)));
        self.cluster.add_claim(claim);
        self.cluster.add_pod(pod);
    }

    /// Returns the names of the pods that are bound, or are not.
    fn pods(&self, is_bound: bool) -> Vec<String> {
        let pods = self.cluster.pods.iter();
        let pods = pods.filter(|(_, pod)| {
            let spec = pod.spec.as_ref().unwrap();
            spec.node_name.is_some() == is_bound
        });
        pods.map(|(name, _)| name.clone()).collect()
    }

    fn node_of(&self, claim: &str) -> Option<String> {
        let status = self.cluster.claims.get(claim)?.status.as_ref()?;
        let devices = status.allocation.as_ref()?.devices.as_ref()?;
        let pool = &devices.results.as_ref()?.first()?.pool;
        Some(pool.split_once('/')?.0.to_owned())
    }

    fn is_gated(&self, pod: &str) -> bool {
        let spec = self.cluster.pods[pod].spec.as_ref().unwrap();
        spec.scheduling_gates.is_some()
    }

    fn end(&mut self, name: &str) {
        // A job or a release in flight ends first.
        for job in std::mem::take(&mut self.jobs) {
            self.cluster.write(job);
        }
        for release in std::mem::take(&mut self.releases) {
            self.release(&release);
        }
        self.suspended.remove(name);
        self.cluster.end(name);
    }

    /// The node driver acts on the intents, or a user wishes something else.
    fn suspend(&mut self) {
        let claims = self.cluster.claims.values();
        let allocated = claims.filter(|claim| is_allocated(claim));
        let allocated: Vec<ResourceClaim> = allocated.cloned().collect();
        let moving: Vec<ResourceClaim> = allocated
            .iter()
            .filter(|claim| {
                let is_suspended = claim
                    .metadata
                    .name
                    .as_ref()
                    .map(|name| self.suspended.contains(name));
                is_suspended != Some(api_suspension::is_intended(&claim.metadata))
            })
            .cloned()
            .collect();
        let claims = match moving.is_empty() || self.random.below(3) == 0 {
            true => &allocated,
            false => &moving,
        };
        let Some(claim) = self.random.choose(claims) else {
            return;
        };
        let name = claim.metadata.name.clone().unwrap();
        let is_intended = api_suspension::is_intended(&claim.metadata);
        match (is_intended, self.suspended.contains(&name)) {
            (true, false) if self.random.below(4) == 0 => {
                super::suspension::answer(&mut self.cluster, &name, "False", "SuspendRefused");
            }
            (true, false) => {
                self.decided.suspensions += 1;
                self.suspended.insert(name.clone());
                super::suspension::answer(&mut self.cluster, &name, "True", "Suspended");
            }
            (false, true) => {
                self.decided.resumptions += 1;
                super::suspension::answer(&mut self.cluster, &name, "False", "Resuming");
                self.suspended.remove(&name);
                super::suspension::answer(&mut self.cluster, &name, "False", "Resumed");
            }
            (true, true) => super::suspension::wish(&mut self.cluster, &name, false),
            (false, false) => {
                let is_wished = self.random.below(2) == 0;
                super::suspension::wish(&mut self.cluster, &name, is_wished);
            }
        }
    }

    fn release(&mut self, release: &Release) {
        let name = release.claim.metadata.name.as_deref().unwrap();
        let claim = &self.cluster.claims[name];
        let is_reserved = claim
            .status
            .as_ref()
            .is_some_and(|status| status.reserved_for.is_some());
        if is_reserved {
            self.cluster.release_finished(release, None);
        } else {
            self.cluster.release(release);
        }
    }

    /// One event in the cluster.
    fn step(&mut self) {
        match self.random.below(36) {
            0..=3 if self.cluster.pods.len() < 16 => self.create(false),
            4 if self.cluster.pods.len() < 14 => {
                self.create(true);
                self.create(true);
            }
            5..=8 => {
                let pending = self.pods(false);
                let ready = pending
                    .into_iter()
                    .filter(|name| !self.is_gated(name) && self.node_of(name).is_some());
                let ready: Vec<String> = ready.collect();
                if let Some(name) = self.random.choose(&ready) {
                    let node = self.node_of(&name).unwrap();
                    self.cluster.bind((&name, &node));
                }
            }
            9 => {
                if let Some(name) = self.random.choose(&self.pods(false)) {
                    self.end(&name);
                }
            }
            10..=11 => {
                if let Some(name) = self.random.choose(&self.pods(true)) {
                    self.end(&name);
                }
            }
            12 => {
                if let Some(name) = self.random.choose(&self.pods(false)) {
                    self.cluster.reject(&name);
                }
            }
            13 => {
                let name = self.random.choose(&NODES).unwrap();
                let mut node = node(name);
                let cpus = self.random.choose(&["2", "8"]).unwrap();
                let allocatable = json!({"cpu": cpus, "pods": "110"});
                node.status.as_mut().unwrap().allocatable = Some(object(allocatable));
                self.cluster.planner.node(applied(node));
            }
            14 => {
                let gib = self.random.choose(&["40Gi", "100Gi", "400Gi"]).unwrap();
                let quota = json!({
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
                    "metadata": {"name": "team", "uid": "uid-team", "generation": 1},
                    "spec": {"namespaces": ["team"], "limit": {"memory": gib}, "guarantee": {"memory": "40Gi"}},
                });
                self.cluster.observe_quota(object(quota));
            }
            15 => {
                let names = self.pods(true);
                if let Some(name) = self.random.choose(&names) {
                    self.cluster.start_deletion(&name);
                }
            }
            16..=17 => {
                let seconds = self.random.choose(&[1, 5, 31, 61]).unwrap();
                self.cluster.advance(Duration::from_secs(seconds));
            }
            18 => {
                if let Some(deadline) = self.cluster.planner.next_deadline() {
                    self.cluster.now = self.cluster.now.max(deadline);
                }
            }
            19 => self.evict(),
            20 => self.cluster.deliver_claims(),
            21 => {
                for name in self.cluster.finish_gate_removals(None) {
                    if let Some(mut pod) = self.cluster.pods.get(&name).cloned() {
                        pod.spec.as_mut().unwrap().scheduling_gates = None;
                        self.cluster.add_pod(pod);
                    }
                }
            }
            22 => {
                if let Some(release) = self.releases.pop() {
                    self.release(&release);
                }
            }
            23..=29 => self.suspend(),
            30..=33 => {
                let is_written = self.random.below(6) > 0;
                self.cluster.end_intents(is_written);
            }
            _ => {
                if let Some(job) = self.jobs.pop() {
                    if self.random.below(8) == 0 {
                        let failure = AllocationFailure {
                            message: "rejected".to_owned(),
                            is_reportable: true,
                        };
                        self.cluster.finish(job, Vec::new(), Some(failure));
                    } else {
                        self.cluster.write(job);
                    }
                }
            }
        }
    }

    /// Executes the first eviction, of which the last victim may fail.
    fn evict(&mut self) {
        if self.cluster.evictions.is_empty() {
            return;
        }
        let eviction = self.cluster.evictions.remove(0);
        let mut evicted = eviction.victims.clone();
        let mut failure = None;
        if self.random.below(4) == 0 {
            failure = evicted.pop().map(|victim| crate::action::EvictionFailure {
                victim,
                message: "budget".to_owned(),
            });
        }
        for victim in &evicted {
            let name = victim.pod.name.clone().unwrap();
            if self.cluster.pods.contains_key(&name) {
                self.cluster.start_deletion(&name);
            }
        }
        let now = self.cluster.now;
        let outcome = EvictionOutcome {
            eviction,
            evicted,
            failure,
        };
        self.cluster.planner.eviction_finished(outcome, now);
    }

    fn decide(&mut self) {
        let (evictions, gate_removals) = (
            self.cluster.evictions.len(),
            self.cluster.gate_removals.len(),
        );
        let (jobs, releases) = self.cluster.actions();
        let cluster = &mut self.cluster;
        self.decided.allocations += jobs.len();
        self.decided.releases += releases.len();
        self.decided.evictions += cluster.evictions.len() - evictions;
        self.decided.gate_removals += cluster.gate_removals.len() - gate_removals;
        let due = cluster
            .planner
            .next_deadline()
            .map(|due| due - cluster.start);
        let log = &mut self.log;
        writeln!(log, "jobs {jobs:?}").unwrap();
        writeln!(
            log,
            "releases {releases:?} evictions {:?}",
            cluster.evictions
        )
        .unwrap();
        writeln!(log, "gates {:?} due {due:?}", cluster.gate_removals).unwrap();
        for event in std::mem::take(&mut cluster.events) {
            writeln!(log, "event {event:?}").unwrap();
        }
        for condition in std::mem::take(&mut cluster.pod_conditions) {
            writeln!(log, "condition {condition:?}").unwrap();
        }
        self.jobs.extend(jobs);
        self.releases.extend(releases);
        let mut used: BTreeMap<String, u64> = BTreeMap::new();
        for name in self.cluster.claims.keys() {
            let is_intended = api_suspension::is_intended(&self.cluster.claims[name].metadata);
            if let Some(node) = self.node_of(name)
                && !(is_intended && self.suspended.contains(name))
            {
                *used.entry(node).or_default() += self.memory[name];
            }
        }
        assert!(used.values().all(|used| *used <= GPU_GIB), "{used:?}");
    }
}

#[test]
fn histories_allocate_no_gpu_twice() {
    let number = |name: &str, default: u64| {
        let set = std::env::var(name).ok();
        set.and_then(|set| set.parse().ok()).unwrap_or(default)
    };
    let mut file = std::env::var("DRAVA_HISTORIES")
        .ok()
        .map(|path| std::fs::File::create(path).unwrap());
    let (mut rare, mut suspended) = ((0, 0), (0, 0));
    for seed in 0..number("DRAVA_HISTORY_SEEDS", 20) {
        let mut history = History::new(seed);
        for _ in 0..STEPS {
            history.step();
            history.decide();
        }
        assert!(history.created > 10, "seed {seed}");
        let decided = &history.decided;
        // A third of the pods fits at once.
        assert!(
            decided.allocations > history.created / 3,
            "seed {seed}: {decided:?}"
        );
        assert!(decided.gate_removals > 0, "seed {seed}: {decided:?}");
        rare = (rare.0 + decided.releases, rare.1 + decided.evictions);
        suspended = (
            suspended.0 + decided.suspensions,
            suspended.1 + decided.resumptions,
        );
        if let Some(file) = &mut file {
            use std::io::Write as _;
            writeln!(file, "seed {seed}\n{}", history.log).unwrap();
        }
    }
    assert!(rare.0.min(rare.1) > 0, "releases and evictions: {rare:?}");
    assert!(
        suspended.0.min(suspended.1) > 0,
        "suspensions and resumptions: {suspended:?}"
    );
}
