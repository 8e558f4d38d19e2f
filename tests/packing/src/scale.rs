//! Cost of a decision in large clusters: pods arrive and end in a half full cluster of equal nodes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use drava_allocator::cluster::Cluster;
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::turn::Turn;
use serde::Serialize;

use crate::objects;
use crate::trace::{TraceNode, TracePod};

/// GPUs of a node; each is published as two devices.
const GPUS_PER_NODE: u64 = 8;
/// Parts of GPUs that pods request, thousandths, with the number of GPUs.
const REQUESTS: [(u64, u64); 6] = [
    (1, 100),
    (1, 250),
    (1, 500),
    (1, 1_000),
    (2, 1_000),
    (4, 1_000),
];

/// Measured decisions.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct Cost {
    /// Nodes of the cluster.
    pub nodes: u64,
    /// Measured decisions.
    pub decisions: usize,
    /// Median of their durations, µs.
    pub p50_us: f64,
    /// Duration that 99% do not exceed, µs.
    pub p99_us: f64,
    /// Longest duration, µs.
    pub max_us: f64,
    /// Checks of nodes per decision.
    pub checks: f64,
    /// Resident memory of the process, MiB.
    pub resident_mib: f64,
}

/// A cluster of that many nodes, and the pods in it.
struct Scale {
    cluster: Cluster,
    policies: Policies,
    random: fastrand::Rng,
    /// Number of the next pod.
    next: usize,
    running: Vec<String>,
    /// Work of all decisions.
    turn: Turn,
}

impl Scale {
    fn new(nodes: u64, policies: Policies, seed: u64) -> Result<Self> {
        let mut cluster = Cluster::default();
        for class in objects::classes()? {
            cluster.upsert_class(class);
        }
        for index in 0..nodes {
            let node = TraceNode {
                name: format!("node-{index:05}"),
                cpu_milli: 128_000,
                memory_mib: 1 << 20,
                gpus: GPUS_PER_NODE,
                model: "H100".to_owned(),
            };
            cluster.upsert_node(&objects::node(&node)?);
            for slice in objects::slices(&node)? {
                cluster.upsert_slice(&slice);
            }
        }
        Ok(Self {
            cluster,
            policies,
            random: fastrand::Rng::with_seed(seed),
            next: 0,
            running: Vec::new(),
            turn: Turn::endless(),
        })
    }

    /// A pod arrives. Returns how long the decision took, and the number of requested thousandths of GPUs.
    fn arrive(&mut self) -> Result<(Duration, u64)> {
        let (gpus, gpu_milli) = self.random.choice(REQUESTS).unwrap_or((1, 1_000));
        let pod = TracePod {
            name: String::new(),
            cpu_milli: 4_000 * gpus,
            memory_mib: 8_192,
            gpus,
            gpu_milli,
            gpu_spec: String::new(),
        };
        let (object, claim) = objects::pod(&pod, self.next)?;
        let name = format!("pod-{}", self.next);
        self.next += 1;
        let claims: Vec<_> = claim.iter().map(|claim| (name.as_str(), claim)).collect();
        let (classes, selectors) = (&self.cluster.classes, &self.cluster.selectors);
        let request = PodRequest::new(&object, &claims, classes, selectors)?;
        self.cluster.observe_request(&request);
        let before = Instant::now();
        let decision = self
            .cluster
            .decide_in(&request, self.policies, &mut self.turn);
        let duration = before.elapsed();
        if let Ok(placement) = decision {
            self.cluster.assume(&placement);
            let demand = &request.demand;
            self.cluster.assume_pod(&name, &placement.node, demand);
            self.running.push(name);
        }
        Ok((duration, pod.requested_milli()))
    }

    /// A random pod ends.
    fn end(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let index = self.random.usize(..self.running.len());
        let name = self.running.swap_remove(index);
        self.cluster.forget(&("openb".to_owned(), name.clone()));
        self.cluster.forget_pod(&name);
    }
}

/// Measures decisions in a cluster of that many nodes of which half of the GPUs are allocated.
///
/// # Errors
/// When an object is invalid.
pub fn run(nodes: u64, decisions: usize, policies: Policies, seed: u64) -> Result<Cost> {
    let mut scale = Scale::new(nodes, policies, seed)?;
    let half = nodes * GPUS_PER_NODE * 1_000 / 2;
    let mut requested = 0;
    while requested < half {
        requested += scale.arrive()?.1;
    }
    let checks_before = scale.turn.node_checks();
    let mut durations = Vec::new();
    for _ in 0..decisions {
        durations.push(scale.arrive()?.0);
        scale.end();
    }
    let checks = scale.turn.node_checks() - checks_before;
    durations.sort_unstable();
    let at = |percent: usize| {
        let last = durations.len().saturating_sub(1);
        let duration = durations.get(last * percent / 100);
        duration.copied().unwrap_or_default().as_secs_f64() * 1e6
    };
    Ok(Cost {
        nodes,
        decisions,
        p50_us: at(50),
        p99_us: at(99),
        max_us: at(100),
        checks: per_decision(checks, decisions),
        resident_mib: resident_mib()?,
    })
}

#[allow(clippy::cast_precision_loss, reason = "both are far below 2^52")]
fn per_decision(checks: u64, decisions: usize) -> f64 {
    checks as f64 / decisions as f64
}

fn resident_mib() -> Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    let kib: f64 = kib.context("no VmRSS")?.parse()?;
    Ok(kib / 1024.0)
}
