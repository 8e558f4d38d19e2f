//! Measurements by the bench of the node agent, and by tests of libvgpu, of the node agent and of the node driver.
//!
//! The tests check bounds on any machine. Benches run the same tests longer, on a simulated driver that is built for
//! speed, and report the values.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::Value;
use simulator_machine::testing::BUILT_VARIABLE;

/// Packages of the simulated machine.
const MACHINE: [&str; 5] = [
    "simulator-machine",
    "simulator-cuda",
    "simulator-nvml",
    "cuda-probe",
    "gpu-view",
];

/// Limit of a run of measurements.
const LIMIT: Limit = Limit::total(Duration::from_secs(6 * 60 * 60));

/// Tests that measure.
#[derive(Clone, Copy)]
pub(crate) enum Suite {
    /// Memory tests of libvgpu, with the library built as shipped.
    Limits,
    /// Tests of the node agent, built as shipped.
    Agent,
    /// Tests of the node driver, built as shipped.
    Driver,
}

impl Suite {
    const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Limits => &["-p", "libvgpu", "--test", "limits"],
            Self::Agent => &["--release", "-p", "drava-dra-driver", "--test", "agent"],
            Self::Driver => &["--release", "-p", "drava-dra-driver", "--test", "driver"],
        }
    }
}

fn cargo() -> Command {
    let mut cargo = drava_cluster::cargo_command();
    cargo.stdin(Stdio::null());
    cargo
}

/// Builds the simulated machine for speed, and returns the directory of its programs.
pub(crate) fn build_machine() -> Result<PathBuf> {
    let mut build = cargo();
    build
        .args(["build", "--locked", "--quiet", "--release"])
        .args(MACHINE.iter().flat_map(|package| ["-p", package]));
    ensure!(
        process::status(&mut build, Limit::BUILD)?.success(),
        "cannot build the simulated machine"
    );
    Ok(drava_cluster::target_dir().join("release"))
}

/// Runs the tests with `filter` in their names, one at a time, and returns their measurements.
pub(crate) fn measure(
    suite: Suite,
    filter: &str,
    variables: &[(&str, String)],
) -> Result<Vec<Value>> {
    let target = drava_cluster::target_dir();
    let built = build_machine()?;
    let file = target.join("measurements.jsonl");
    if file.exists() {
        fs::remove_file(&file)?;
    }
    let mut test = cargo();
    test.args(["test", "--locked", "--quiet"])
        .args(suite.arguments())
        .args([filter, "--", "--test-threads=1", "--nocapture"])
        .env(BUILT_VARIABLE, built)
        .env("DRAVA_FIGURES", &file)
        .envs(variables.iter().map(|(name, value)| (name, value)));
    let output = process::output(&mut test, LIMIT)?;
    ensure!(
        output.status.success(),
        "a test failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = fs::read_to_string(&file)
        .with_context(|| format!("no test with {filter} in its name reports a measurement"))?;
    rows(&text)
}

/// Runs measurements of `dra-driver/benches/agent` for that long each, and returns their rows.
pub(crate) fn measure_agent(
    measurements: &[&str],
    length: Duration,
    has_baseline: bool,
) -> Result<Vec<Value>> {
    let built = build_machine()?;
    let mut bench = cargo();
    bench
        .args(["bench", "--locked", "--quiet", "-p", "drava-dra-driver"])
        .args(["--bench", "agent", "--"])
        .args(measurements)
        .args(["--seconds", &length.as_secs_f64().to_string()])
        .args(has_baseline.then_some("--baseline"))
        .env(BUILT_VARIABLE, built);
    // Messages of cargo go to the terminal.
    let file = drava_cluster::target_dir().join("measurements.jsonl");
    bench.stdout(fs::File::create(&file)?);
    ensure!(
        process::status(&mut bench, LIMIT)?.success(),
        "the bench of the agent failed"
    );
    rows(&fs::read_to_string(&file)?)
}

/// Reads measurements, one JSON object on each line.
pub(crate) fn rows(text: &str) -> Result<Vec<Value>> {
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("read measurement {line}")))
        .collect()
}

/// The measurements with that name.
pub(crate) fn named<'a>(
    measurements: &'a [Value],
    name: &'a str,
) -> impl Iterator<Item = &'a Value> {
    measurements
        .iter()
        .filter(move |measurement| measurement.get("figure").and_then(Value::as_str) == Some(name))
}

/// One value of a measurement.
pub(crate) fn value(measurement: &Value, name: &str) -> Value {
    measurement.get(name).cloned().unwrap_or_default()
}
