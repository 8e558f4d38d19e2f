//! The measured decisions.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;

use crate::cluster::{BenchCluster, Decided, GPUS_PER_NODE, NewPod, Took};

/// A measured point.
#[derive(Debug, Clone, Serialize)]
pub struct Point {
    /// What is decided.
    pub decision: &'static str,
    /// Number of nodes, with eight GPUs each.
    pub nodes: usize,
    /// Number of running claims.
    pub claims: usize,
    /// Number of pods that are evicted.
    pub victims: usize,
    /// Time of each decision in milliseconds.
    pub ms: Vec<f64>,
    /// Time of the processor of each decision in milliseconds.
    pub processor_ms: Vec<f64>,
}

/// Namespace of the running pods, which borrow where there are quotas.
const RUNNING: &str = "running";
/// Namespace of the pods that are decided.
const DECIDED: &str = "decided";

/// Runs the scenarios of a bench and passes each point to `report` when it is measured; `rounds` is the number of decisions
/// of those that are repeated.
///
/// # Errors
/// When the planner does not decide as expected.
pub fn run(
    bench: Bench,
    rounds: usize,
    mut report: impl FnMut(&Point) -> Result<()>,
) -> Result<()> {
    match bench {
        Bench::Preemption => {
            report(&preempt("one GPU, 4,000 running", 500, 4_000, 1, rounds)?)?;
            for (decision, gpus) in [
                ("one GPU, 1,000 full nodes", 1),
                ("eight GPUs, 1,000 full nodes", GPUS_PER_NODE),
            ] {
                report(&preempt(decision, 1_000, 8_000, gpus, rounds)?)?;
            }
        }
        Bench::Gang => {
            for (decision, nodes, claims, gpus) in [
                ("250 pods, free nodes", 1_000, 0, 1),
                ("250 pods with 8 GPUs, free nodes", 1_000, 0, GPUS_PER_NODE),
                ("250 pods evict 250 of 4,000", 500, 4_000, 1),
                (
                    "250 pods with 8 GPUs evict 2,000 of 4,000",
                    500,
                    4_000,
                    GPUS_PER_NODE,
                ),
            ] {
                report(&gang(decision, nodes, claims, 250, gpus)?)?;
            }
        }
        Bench::Quota => {
            for (decision, nodes, claims) in [
                ("reclaim of one GPU, 4,000 running", 500, 4_000),
                ("reclaim of one GPU, 1,000 full nodes", 1_000, 8_000),
            ] {
                report(&reclaim(decision, nodes, claims, rounds)?)?;
            }
            let decision = "rejection beyond the limit, 4,000 running";
            report(&beyond(decision, 500, 4_000, rounds)?)?;
        }
    }
    Ok(())
}

/// A bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Bench {
    /// Evictions for a pod of higher priority.
    Preemption,
    /// Gangs.
    Gang,
    /// Guarantees and limits.
    Quota,
}

/// Returns a cluster with this number of running pods of one GPU each.
fn with_running(nodes: usize, claims: usize) -> Result<BenchCluster> {
    let mut cluster = BenchCluster::new(nodes)?;
    for index in 0..claims {
        cluster.add(&NewPod {
            name: format!("running-{index:05}"),
            namespace: RUNNING,
            priority: 0,
            gpus: 1,
            gang: None,
        })?;
    }
    cluster.settle()?;
    Ok(cluster)
}

/// Returns elapsed times and times of the processor in milliseconds.
fn millis(times: &[Took]) -> (Vec<f64>, Vec<f64>) {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let both = times
        .iter()
        .map(|took| (millis(took.elapsed), millis(took.processor)));
    both.unzip()
}

fn victims(decided: &Decided) -> usize {
    let evictions = decided.evictions.iter();
    evictions.map(|eviction| eviction.victims.len()).sum()
}

/// Measures evictions for one pod after the other; each is gone before the next one.
fn repeat(
    cluster: &mut BenchCluster,
    new: impl Fn(usize) -> NewPod<'static>,
    expected: usize,
    rounds: usize,
) -> Result<Vec<Took>> {
    let mut times = Vec::new();
    for round in 0..rounds {
        cluster.next_round();
        // What is due because of the time.
        cluster.decide()?;
        let pod = new(round);
        cluster.add(&pod)?;
        let (decided, took) = cluster.decide()?;
        ensure!(
            victims(&decided) == expected && decided.jobs.is_empty(),
            "{} pods are evicted",
            victims(&decided)
        );
        times.push(took);
        cluster.delete(&pod.name);
    }
    Ok(times)
}

fn preempt(
    decision: &'static str,
    nodes: usize,
    claims: usize,
    gpus: u64,
    rounds: usize,
) -> Result<Point> {
    let mut cluster = with_running(nodes, claims)?;
    let victims = usize::try_from(gpus)?;
    let new = |round| NewPod {
        name: format!("urgent-{round}"),
        namespace: DECIDED,
        priority: 100,
        gpus,
        gang: None,
    };
    let times = repeat(&mut cluster, new, victims, rounds)?;
    let (ms, processor_ms) = millis(&times);
    Ok(Point {
        decision,
        nodes,
        claims,
        victims,
        ms,
        processor_ms,
    })
}

fn gang(
    decision: &'static str,
    nodes: usize,
    claims: usize,
    pods: usize,
    gpus: u64,
) -> Result<Point> {
    let mut cluster = with_running(nodes, claims)?;
    for index in 0..pods {
        cluster.add(&NewPod {
            name: format!("member-{index:04}"),
            namespace: DECIDED,
            priority: 100,
            gpus,
            gang: Some(("training", pods)),
        })?;
    }
    let (decided, took) = cluster.decide()?;
    let placed: usize = decided.jobs.iter().map(|job| job.pods.len()).sum();
    let victims = victims(&decided);
    match claims {
        0 => ensure!(placed == pods, "{placed} of {pods} members are placed"),
        _ => ensure!(
            victims == pods * usize::try_from(gpus)?,
            "{victims} pods are evicted"
        ),
    }
    let (ms, processor_ms) = millis(&[took]);
    Ok(Point {
        decision,
        nodes,
        claims,
        victims,
        ms,
        processor_ms,
    })
}

/// A tenant takes its guarantee back from one that borrows, at equal priority.
fn reclaim(decision: &'static str, nodes: usize, claims: usize, rounds: usize) -> Result<Point> {
    let mut cluster = with_running(nodes, claims)?;
    cluster.add_quota(RUNNING, 100_000, 1_000)?;
    cluster.add_quota(DECIDED, 100_000, 1_000)?;
    let new = |round| NewPod {
        name: format!("owner-{round}"),
        namespace: DECIDED,
        priority: 0,
        gpus: 1,
        gang: None,
    };
    let times = repeat(&mut cluster, new, 1, rounds)?;
    let (ms, processor_ms) = millis(&times);
    Ok(Point {
        decision,
        nodes,
        claims,
        victims: 1,
        ms,
        processor_ms,
    })
}

/// A pod beyond the limit of its tenant.
fn beyond(decision: &'static str, nodes: usize, claims: usize, rounds: usize) -> Result<Point> {
    let mut cluster = with_running(nodes, claims)?;
    cluster.add_quota(RUNNING, u64::try_from(claims)?, 0)?;
    let new = |round| NewPod {
        name: format!("beyond-{round}"),
        namespace: RUNNING,
        priority: 0,
        gpus: 1,
        gang: None,
    };
    let times = repeat(&mut cluster, new, 0, rounds)?;
    let (ms, processor_ms) = millis(&times);
    Ok(Point {
        decision,
        nodes,
        claims,
        victims: 0,
        ms,
        processor_ms,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measures_the_decisions_of_each_scenario() -> Result<()> {
        let points = [
            preempt("one", 3, 24, 1, 2)?,
            preempt("node", 3, 24, GPUS_PER_NODE, 2)?,
            reclaim("reclaim", 130, 1_040, 2)?,
            beyond("beyond", 3, 24, 2)?,
        ];
        let victims = points.each_ref().map(|point| point.victims);
        assert_eq!(victims, [1, 8, 1, 0]);
        assert!(points.iter().all(|point| point.ms.len() == 2));
        assert_eq!(gang("free", 3, 0, 20, 1)?.victims, 0);
        assert_eq!(gang("evicting", 3, 24, 10, 2)?.victims, 20);
        Ok(())
    }
}
