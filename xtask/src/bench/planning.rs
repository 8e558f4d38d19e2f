//! Speed of the planner: preemption, gangs and quotas in large clusters.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::{Value, json};

use super::measurements::{self, value};
use super::report::Report;

/// Limit of all runs.
const LIMIT: Limit = Limit::total(Duration::from_secs(60 * 60));

/// Options of the benches.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// preemption, quota: number of decisions of each row.
    #[arg(long, default_value_t = 200, value_name = "COUNT")]
    decisions: usize,
}

/// Published times of KAI-Scheduler (v0.17, its scale suite, with a scheduler of its own on a cluster of simulated nodes), by
/// the decision of which they are the nearest.
const PEER: [(&str, &str); 4] = [
    (
        "one GPU, 4,000 running",
        "13.9 s (KAI, reclaim of one GPU, 4,000 jobs)",
    ),
    (
        "250 pods with 8 GPUs evict 2,000 of 4,000",
        "102 s (KAI, reclaim for a job of 250 pods and 2,000 GPUs)",
    ),
    (
        "one GPU, 1,000 full nodes",
        "76 s (KAI, reclaim with 1,000 nodes)",
    ),
    (
        "reclaim of one GPU, 4,000 running",
        "13.9 s (KAI, reclaim of one GPU, 4,000 jobs)",
    ),
];

/// Runs the bench `name`.
pub(super) fn run(name: &str, options: &Options, report: &mut Report) -> Result<()> {
    let points = measure(name, options)?;
    report.part(
        "Decisions",
        "Time of one decision of the controller's planner on one thread, from the observation of the pod (of a gang: of all \
         members) to the evictions or allocations to write; the simulation that proves the fit is included, the writes are \
         not. `processor` is the time of the processor, without that of other programs. Each node has eight GPUs, and each \
         running pod has one claim for a GPU. `peer` is a published time of the \
         nearest scenario of another scheduler, which includes more than the decision and was not measured here.",
    );
    for point in &points {
        let elapsed = sorted(point, "ms");
        let processor = sorted(point, "processor_ms");
        let decision = value(point, "decision");
        let peer = PEER.iter().find(|(of, _)| decision == *of);
        report.row(vec![
            ("decision", decision.clone()),
            ("nodes", value(point, "nodes")),
            ("runningClaims", value(point, "claims")),
            ("evicted", value(point, "victims")),
            ("decisions", json!(elapsed.len())),
            ("p50Ms", json!(percentile(&elapsed, 50))),
            ("p99Ms", json!(percentile(&elapsed, 99))),
            ("processorP50Ms", json!(percentile(&processor, 50))),
            ("processorP99Ms", json!(percentile(&processor, 99))),
            ("peer", json!(peer.map_or("–", |(_, time)| time))),
        ]);
    }
    Ok(())
}

/// Returns the times of a point, the shortest first.
fn sorted(point: &Value, name: &str) -> Vec<f64> {
    let times = value(point, name);
    let times = times.as_array().into_iter().flatten();
    let mut times: Vec<f64> = times.filter_map(Value::as_f64).collect();
    times.sort_by(f64::total_cmp);
    times
}

fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied().unwrap_or_default()
}

fn measure(name: &str, options: &Options) -> Result<Vec<Value>> {
    let mut cargo = drava_cluster::cargo_command();
    cargo
        .stdin(Stdio::null())
        .args([
            "run",
            "--locked",
            "--quiet",
            "--release",
            "-p",
            "drava-planning",
            "--",
            "decisions",
            name,
        ])
        .args(["--rounds", &options.decisions.to_string()]);
    // Progress goes to the terminal.
    let file = drava_cluster::target_dir().join(format!("{name}.jsonl"));
    cargo.stdout(fs::File::create(&file)?);
    ensure!(
        process::status(&mut cargo, LIMIT)?.success(),
        "the runs failed"
    );
    let text = fs::read_to_string(&file)?;
    measurements::rows(&text)
}
