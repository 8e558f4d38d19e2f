//! Builds every test binary of the workspace once, and runs those of one suite.
//!
//! One build for all suites: selected packages (`cargo test -p …`) would have other features of shared dependencies,
//! which cargo would compile again.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use drava_cluster::process::{self, Limit, Stream};
use serde_json::Value;

use super::libtest::Outcome;
use super::log::{self, Log, TESTS};

/// Limit of a test binary on the cluster, where one test may wait for minutes.
const CLUSTER_TESTS: Limit =
    Limit::total(Duration::from_secs(45 * 60)).silence(Duration::from_secs(15 * 60));

/// Test binaries that run together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Suite {
    /// Tests without a cluster and without measured times.
    Unit,
    /// Tests that measure times. Load on the machine would falsify them.
    Timed,
    /// Tests of the cluster harness.
    Cluster,
    /// drava on the cluster.
    E2e,
    /// drava on a cluster of two nodes.
    E2eNodes,
    /// drava on a cluster of two nodes with GPUs of other models.
    E2eModels,
    /// drava on a cluster whose node gets its GPUs from the chart `gpu-simulator`.
    E2eSimulator,
    /// drava on the cluster, with measured times.
    E2eTimed,
    /// The end of drava on the cluster, and its installation from a private registry.
    E2eUninstall,
}

impl Suite {
    /// Binaries that run at the same time.
    fn width(self) -> usize {
        match self {
            Self::Unit => thread::available_parallelism().map_or(1, usize::from),
            Self::Timed
            | Self::Cluster
            | Self::E2e
            | Self::E2eNodes
            | Self::E2eModels
            | Self::E2eSimulator
            | Self::E2eTimed
            | Self::E2eUninstall => 1,
        }
    }

    const fn is_on_cluster(self) -> bool {
        matches!(
            self,
            Self::Cluster
                | Self::E2e
                | Self::E2eNodes
                | Self::E2eModels
                | Self::E2eSimulator
                | Self::E2eTimed
                | Self::E2eUninstall
        )
    }
}

/// A built test program.
#[derive(Debug, Clone)]
pub(crate) struct Binary {
    package: String,
    target: String,
    manifest_dir: PathBuf,
    executable: PathBuf,
}

impl Binary {
    fn suite(&self) -> Suite {
        match (self.package.as_str(), self.target.as_str()) {
            ("drava-e2e", "cores" | "quickstart") => Suite::E2eTimed,
            ("drava-e2e", "uninstall" | "airgap") => Suite::E2eUninstall,
            ("drava-e2e", "nodes" | "partitions") => Suite::E2eNodes,
            ("drava-e2e", "models") => Suite::E2eModels,
            ("drava-e2e", "gpu_simulator") => Suite::E2eSimulator,
            ("drava-e2e", _) => Suite::E2e,
            ("drava-cluster", "real") => Suite::Cluster,
            ("libvgpu", "compute") | ("drava-dra-driver", "agent") | ("xtask", "gpu") => {
                Suite::Timed
            }
            _ => Suite::Unit,
        }
    }

    fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Binaries that take long start first.
    fn rank(&self) -> usize {
        const LONGEST: [(&str, &str); 12] = [
            ("drava-e2e", "chaos"),
            ("drava-e2e", "node_faults"),
            ("drava-e2e", "pods"),
            ("drava-e2e", "leader"),
            ("drava-e2e", "preemption"),
            ("drava-e2e", "prometheus"),
            ("drava-e2e", "examples"),
            ("drava-e2e", "doctor_node"),
            ("libvgpu", "limits"),
            ("simulator-cuda", "driver_api"),
            ("drava-vgpu-abi", "loom"),
            ("drava-dra-driver", "driver"),
        ];
        if self.target == "airgap" {
            // Installs drava after its removal.
            return LONGEST.len() + 1;
        }
        LONGEST
            .iter()
            .position(|long| *long == (self.package.as_str(), self.target.as_str()))
            .unwrap_or(LONGEST.len())
    }
}

/// How to run binaries.
#[derive(Clone, Copy)]
pub(crate) struct Selection<'a> {
    /// Only tests with this text in their names.
    pub(crate) filter: Option<&'a str>,
    /// Variables of the tests.
    pub(crate) environment: &'a [(&'static str, PathBuf)],
    /// Directory of the logs, below that of all logs.
    pub(crate) logs: &'a str,
}

/// Position in the binaries of a suite. Runs with one queue run each binary once.
#[derive(Debug, Default)]
pub(crate) struct Queue(AtomicUsize);

impl Queue {
    /// Whether each of the binaries of `suite` has begun.
    pub(crate) fn is_empty(&self, suite: Suite, binaries: &[Binary]) -> bool {
        self.0.load(Ordering::Relaxed) >= of_suite(suite, binaries).len()
    }
}

fn of_suite(suite: Suite, binaries: &[Binary]) -> Vec<&Binary> {
    let mut chosen: Vec<&Binary> = binaries
        .iter()
        .filter(|binary| binary.suite() == suite)
        .collect();
    chosen.sort_by_key(|binary| binary.rank());
    chosen
}

/// Runs the binaries of `suite`.
pub(crate) fn run(suite: Suite, binaries: &[Binary], selection: Selection<'_>) -> Result<Outcome> {
    run_from(&Queue::default(), suite, binaries, selection)
}

/// Runs the binaries of `suite` that no other run with `queue` has begun.
pub(crate) fn run_from(
    queue: &Queue,
    suite: Suite,
    binaries: &[Binary],
    selection: Selection<'_>,
) -> Result<Outcome> {
    let chosen = of_suite(suite, binaries);
    let total = Mutex::new(Ok(Outcome::default()));
    thread::scope(|scope| {
        for _ in 0..suite.width() {
            scope.spawn(|| {
                while let Some(binary) = chosen.get(queue.0.fetch_add(1, Ordering::Relaxed)) {
                    let result = run_one(suite, binary, selection);
                    let mut total = total
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                    match (&mut *total, result) {
                        (Ok(total), Ok(outcome)) => *total += outcome,
                        (total @ Ok(_), Err(error)) => *total = Err(error),
                        (Err(_), _) => {}
                    }
                }
            });
        }
    });
    total
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Returns whether `filter` selects a test of `suite`.
pub(crate) fn has_tests(suite: Suite, binaries: &[Binary], filter: Option<&str>) -> Result<bool> {
    for binary in binaries.iter().filter(|binary| binary.suite() == suite) {
        let mut list = Command::new(&binary.executable);
        list.arg("--list").args(filter).stdin(Stdio::null());
        let output = process::output(&mut list, Limit::REQUEST)?;
        if String::from_utf8_lossy(&output.stdout).contains(": test") {
            return Ok(true);
        }
    }
    Ok(false)
}

fn run_one(suite: Suite, binary: &Binary, selection: Selection<'_>) -> Result<Outcome> {
    let started = Instant::now();
    let mut log = Log::create(&format!(
        "{}/{}.{}",
        selection.logs, binary.package, binary.target
    ))?;
    let mut command = Command::new(&binary.executable);
    command
        .current_dir(&binary.manifest_dir)
        .env("CARGO_MANIFEST_DIR", &binary.manifest_dir)
        .envs(
            selection
                .environment
                .iter()
                .map(|(name, value)| (name, value)),
        )
        .args(selection.filter);
    if suite.is_on_cluster() {
        // These tests share one cluster. Without capture, the log of a hung test has its output.
        command.args(["--test-threads=1", "--nocapture"]);
    }
    let limit = if suite.is_on_cluster() {
        CLUSTER_TESTS
    } else {
        TESTS
    };
    let mut outcome = log.tests(command, limit)?;
    for failure in &mut outcome.failures {
        failure.test = format!("{}: {}", binary.name(), failure.test);
    }
    eprintln!(
        "    {}: {} in {:.0} s",
        binary.name(),
        outcome.count,
        started.elapsed().as_secs_f32()
    );
    Ok(outcome)
}

/// Builds all test binaries, and the programs that tests start.
pub(crate) fn build(log: &mut Log) -> Result<Vec<Binary>> {
    let mut cargo = log::cargo(&[
        "test",
        "--locked",
        "--workspace",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    cargo.stdin(Stdio::null()).stderr(log.file()?);
    let mut binaries = Vec::new();
    let status = process::lines(&mut cargo, Stream::Stdout, Limit::BUILD, |message| {
        binaries.extend(binary(message)?);
        Ok(())
    })?;
    if !status.success() {
        bail!(
            "cannot compile the tests:\n{}",
            std::fs::read_to_string(log.path())?
        );
    }
    Ok(binaries)
}

/// The test binary that one of cargo's JSON messages announces, if any.
fn binary(message: &str) -> Result<Option<Binary>> {
    let message: Value = serde_json::from_str(message).context("read cargo's messages")?;
    let Some(executable) = message["executable"].as_str() else {
        return Ok(None);
    };
    if message["profile"]["test"] != true {
        return Ok(None);
    }
    let manifest = message["manifest_path"]
        .as_str()
        .context("a message without manifest_path")?;
    let manifest_dir = Path::new(manifest)
        .parent()
        .context("a manifest without a directory")?;
    // `path+file:///…/api#drava-api@0.1.0`, or `…/api#0.1.0` where folder and package have one name.
    let id = message["package_id"]
        .as_str()
        .context("a message without package_id")?;
    let (path, name) = id.split_once('#').context("a package id without '#'")?;
    let package = match name.split_once('@') {
        Some((package, _version)) => package,
        None => path.rsplit('/').next().unwrap_or(path),
    };
    Ok(Some(Binary {
        package: package.to_owned(),
        target: message["target"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
        manifest_dir: manifest_dir.to_owned(),
        executable: PathBuf::from(executable),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_test_binary_in_message() {
        let message = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/tests/cluster#drava-cluster@0.1.0",
            "manifest_path":"/w/tests/cluster/Cargo.toml","target":{"name":"real"},"profile":{"test":true},
            "executable":"/w/target/debug/deps/real-1"}"#;
        let found = binary(message).unwrap().unwrap();
        assert_eq!(
            (found.package.as_str(), found.suite()),
            ("drava-cluster", Suite::Cluster)
        );
        assert_eq!(found.manifest_dir, PathBuf::from("/w/tests/cluster"));
    }

    #[test]
    fn finds_package_named_like_its_folder() {
        let message = r#"{"package_id":"path+file:///w/xtask#0.1.0","manifest_path":"/w/xtask/Cargo.toml",
            "target":{"name":"xtask"},"profile":{"test":true},"executable":"/w/target/debug/deps/xtask-1"}"#;
        let found = binary(message).unwrap().unwrap();
        assert_eq!(
            (found.package.as_str(), found.suite()),
            ("xtask", Suite::Unit)
        );
    }

    #[test]
    fn ignores_programs_and_libraries() {
        assert!(binary(r#"{"executable":null}"#).unwrap().is_none());
        let program = r#"{"executable":"/w/target/debug/xtask","profile":{"test":false}}"#;
        assert!(binary(program).unwrap().is_none());
    }
}
