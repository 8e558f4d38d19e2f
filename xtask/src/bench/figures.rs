//! Figures that the tests of libvgpu and of the node agent measure: the tests promise the same on any machine, the benches run them longer,
//! on a simulated driver that is built for speed, and write down what they found.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// What the simulated machine consists of.
const MACHINE: [&str; 5] = [
    "simulator-machine",
    "simulator-cuda",
    "simulator-nvml",
    "cuda-probe",
    "gpu-view",
];

/// Tests that measure.
#[derive(Clone, Copy)]
pub(crate) enum Suite {
    /// libvgpu's tests of memory. The library itself is built as it is shipped.
    Limits,
    /// The node agent's, built as it is shipped.
    Agent,
}

impl Suite {
    const fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Limits => &["-p", "libvgpu", "--test", "limits"],
            Self::Agent => &["--release", "-p", "drava-dra-driver", "--test", "agent"],
        }
    }
}

/// Runs those of the tests whose names contain `filter`, one at a time, and returns their figures.
pub(crate) fn measure(
    suite: Suite,
    filter: &str,
    variables: &[(&str, String)],
) -> Result<Vec<Value>> {
    let workspace = drava_cluster::workspace_root();
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(&cargo)
        .current_dir(workspace)
        .args(["build", "--quiet", "--release"])
        .args(MACHINE.iter().flat_map(|package| ["-p", package]))
        .status()
        .context("cannot run cargo to build the simulated machine")?;
    ensure!(
        built.success(),
        "cargo could not build the simulated machine"
    );
    let directory = workspace.join("target/release");
    let file = workspace.join("target/figures.jsonl");
    if file.exists() {
        fs::remove_file(&file)?;
    }
    let output = Command::new(&cargo)
        .current_dir(workspace)
        .args(["test", "--quiet"])
        .args(suite.arguments())
        .args([filter, "--", "--test-threads=1", "--nocapture"])
        .arg("--include-ignored")
        .env("DRAVA_SIMULATOR_BUILT", directory)
        .env("DRAVA_FIGURES", &file)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .output()
        .context("cannot run the tests")?;
    ensure!(
        output.status.success(),
        "a test failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let text = fs::read_to_string(&file)
        .with_context(|| format!("no test with {filter} in its name measured anything"))?;
    text.lines()
        .map(|line| serde_json::from_str(line).with_context(|| format!("figure {line}")))
        .collect()
}

/// Those figures that have that name.
pub(crate) fn named<'a>(figures: &'a [Value], name: &'a str) -> impl Iterator<Item = &'a Value> {
    figures
        .iter()
        .filter(move |figure| figure.get("figure").and_then(Value::as_str) == Some(name))
}

/// One value of a figure.
pub(crate) fn value(figure: &Value, name: &str) -> Value {
    figure.get(name).cloned().unwrap_or_default()
}
