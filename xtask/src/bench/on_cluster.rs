//! Measurements by tests of `tests/e2e` on a cluster of their own: a real Kubernetes with one node and two simulated GPUs.

use std::fs;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::process::{self, Limit};
use drava_cluster::{Kubernetes, Options as ClusterOptions};
use serde_json::Value;

use super::measurements;
use crate::deploy;

/// Name of the cluster.
const CLUSTER: &str = "bench";

/// Limit of all measurements.
const LIMIT: Limit = Limit::total(Duration::from_secs(24 * 60 * 60));

/// Options of the benches on a cluster.
#[derive(clap::Args)]
#[group(skip)]
pub(super) struct Options {
    /// suspend: comparisons of suspension and eviction. One takes about a minute.
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    pub(super) comparisons: u64,
    /// suspend: rounds with a kill of each program. Four kills take about a minute.
    #[arg(long, default_value_t = 2, value_name = "COUNT")]
    pub(super) kill_rounds: u64,
    /// suspend: idle periods of a notebook. The first takes about two minutes, and each further one up to twice as long.
    #[arg(long, default_value_t = 1, value_name = "COUNT")]
    pub(super) idle_rounds: u64,
    /// elastic: measured growths, and resizes by the command.
    #[arg(long, default_value_t = 10, value_name = "COUNT")]
    pub(super) growths: u64,
    /// elastic: resizes while programs allocate and are killed.
    #[arg(long, default_value_t = 20, value_name = "COUNT")]
    pub(super) resizes: u64,
    /// elastic: claims that take lent memory back.
    #[arg(long, default_value_t = 3, value_name = "COUNT")]
    pub(super) guarantees: u64,
    /// suspend, elastic: seed of victims, amounts and times.
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub(super) seed: u64,
}

/// Returns how the cluster differs from others, for the notes of tables.
pub(super) fn described() -> String {
    format!(
        "Kubernetes {}, one node with two simulated H100; kubelet restarts containers at least every second (default: 5 minutes) and \
         repeats failed preparations every 10 s (default: a minute). All programs of drava are builds without optimization, and share \
         two processors and 24 GiB with the control plane; other programs used the machine at the same time.",
        Kubernetes::default().version()
    )
}

/// Runs the tests of that file with these variables on a cluster with drava, and returns their measurements.
pub(super) fn measure(test: &str, variables: &[(&str, u64)]) -> Result<Vec<Value>> {
    let artifacts = deploy::build()?;
    let _lock = drava_cluster::lock_host()?;
    let options = ClusterOptions::named(CLUSTER);
    let state = options.state.clone();
    drava_cluster::down(&state)?;
    let started = deploy::start(options, &artifacts);
    let rows = started.and_then(|_| run(test, &state, variables));
    drava_cluster::down(&state)?;
    rows
}

fn run(test: &str, state: &std::path::Path, variables: &[(&str, u64)]) -> Result<Vec<Value>> {
    let file = drava_cluster::target_dir().join("measurements.jsonl");
    if file.exists() {
        fs::remove_file(&file)?;
    }
    let mut command = drava_cluster::cargo_command();
    command
        .stdin(Stdio::null())
        .args(["test", "--locked", "--quiet", "-p", "drava-e2e"])
        .args(["--test", test, "--", "--test-threads=1", "--nocapture"])
        .env("DRAVA_E2E_STATE", state)
        .env("DRAVA_FIGURES", &file)
        .envs(
            variables
                .iter()
                .map(|(name, value)| (name, value.to_string())),
        );
    let status = process::status(&mut command, LIMIT)?;
    ensure!(status.success(), "a test of {test} failed: {status}");
    let text = fs::read_to_string(&file).with_context(|| format!("{test} measured nothing"))?;
    measurements::rows(&text)
}
