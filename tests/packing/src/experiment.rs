//! The experiment, see the [crate].

use std::time::Instant;

use anyhow::{Context, Result};
use drava_allocator::cluster::Cluster;
use drava_allocator::placement::Policies;
use drava_allocator::pod_request::PodRequest;
use serde::Serialize;

use crate::objects;
use crate::trace::{TraceNode, TracePod};

/// Arrived requests at which the allocation is read, percent of all GPUs.
const READ_AT: [u64; 2] = [100, 130];

/// Thousandths of a GPU.
const GPU: u64 = 1_000;

/// The allocation when that many GPUs were requested.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct Reading {
    /// Requested by the pods that have arrived, percent of all GPUs.
    pub arrived_percent: u64,
    /// Allocated part of all GPUs, percent.
    pub allocated_percent: f64,
    /// Pods that were dropped.
    pub dropped: usize,
    /// Decisions.
    pub decisions: usize,
    /// Time since the first decision.
    pub seconds: f64,
    /// Duration of a decision that 99% do not exceed, µs.
    pub p99_us: u128,
}

/// Runs the experiment with that order of arrivals.
///
/// # Errors
/// When an object is invalid.
pub fn run(
    nodes: &[TraceNode],
    pods: &[TracePod],
    policies: Policies,
    seed: u64,
) -> Result<Vec<Reading>> {
    let total: u64 = nodes.iter().map(|node| node.gpus * GPU).sum();
    let mut cluster = cluster(nodes)?;
    let mut durations = Vec::new();
    let (mut arrived, mut allocated, mut dropped, mut decisions) = (0, 0, 0, 0);
    let mut readings = Vec::new();
    let start = Instant::now();
    for (id, trace_pod) in arrivals(pods, total, seed).into_iter().enumerate() {
        let (pod, claim) = objects::pod(trace_pod, id)?;
        let name = format!("pod-{id}");
        let claims: Vec<_> = claim.iter().map(|claim| (name.as_str(), claim)).collect();
        let request = PodRequest::new(&pod, &claims, &cluster.classes, &cluster.selectors)
            .with_context(|| format!("read {}", trace_pod.name))?;
        let before = Instant::now();
        cluster.observe_request(&request);
        let decision = cluster.decide(&request, policies);
        durations.push(before.elapsed());
        decisions += 1;
        arrived += trace_pod.requested_milli();
        match decision {
            Ok(placement) => {
                cluster.assume(&placement);
                cluster.assume_pod(&name, &placement.node, &request.demand);
                allocated += trace_pod.requested_milli();
            }
            Err(_) => dropped += 1,
        }
        for percent in READ_AT {
            let is_read = readings
                .iter()
                .any(|reading: &Reading| reading.arrived_percent == percent);
            if !is_read && arrived * 100 >= percent * total {
                readings.push(Reading {
                    arrived_percent: percent,
                    allocated_percent: percentage(allocated, total),
                    dropped,
                    decisions,
                    seconds: start.elapsed().as_secs_f64(),
                    p99_us: {
                        durations.sort_unstable();
                        let at = durations.len() * 99 / 100;
                        durations.get(at).copied().unwrap_or_default().as_micros()
                    },
                });
            }
        }
        if readings.len() == READ_AT.len() {
            break;
        }
    }
    Ok(readings)
}

/// Returns the pods in the order of their arrival: each once in random order, then random ones until the last reading.
fn arrivals(pods: &[TracePod], total: u64, seed: u64) -> Vec<&TracePod> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut order: Vec<_> = pods.iter().collect();
    random.shuffle(&mut order);
    let mut arrived: u64 = order.iter().map(|pod| pod.requested_milli()).sum();
    let end = READ_AT.into_iter().max().unwrap_or_default() * total;
    while arrived * 100 < end {
        let Some(pod) = random.choice(pods) else {
            break;
        };
        arrived += pod.requested_milli();
        order.push(pod);
    }
    order
}

fn cluster(nodes: &[TraceNode]) -> Result<Cluster> {
    let mut cluster = Cluster::default();
    for class in objects::classes()? {
        cluster.upsert_class(class);
    }
    for node in nodes {
        cluster.upsert_node(&objects::node(node)?);
        for slice in objects::slices(node)? {
            cluster.upsert_slice(&slice);
        }
    }
    Ok(cluster)
}

#[allow(clippy::cast_precision_loss, reason = "both are far below 2^52")]
fn percentage(part: u64, whole: u64) -> f64 {
    part as f64 * 100.0 / whole as f64
}
