//! Builds every test binary of the workspace once, and runs those of one suite.
//!
//! One build for all suites: selecting packages (`cargo test -p …`) would change the features of shared dependencies and
//! compile them again.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::stage::{self, Count, Log};

/// Which test binaries to run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Suite {
    /// All that need no cluster.
    Unit,
    /// The cluster harness against itself.
    Cluster,
    /// drava on the real cluster.
    E2e,
}

struct Binary {
    package: String,
    target: String,
    manifest_dir: PathBuf,
    executable: PathBuf,
}

impl Binary {
    fn suite(&self) -> Suite {
        match (self.package.as_str(), self.target.as_str()) {
            ("drava-e2e", _) => Suite::E2e,
            ("drava-cluster", "real") => Suite::Cluster,
            _ => Suite::Unit,
        }
    }
}

/// Builds the tests, runs those of `suite` whose name contains `filter`, and counts.
pub(crate) fn run(
    suite: Suite,
    filter: Option<&str>,
    environment: &[(String, String)],
    log: &mut Log,
) -> Result<Count> {
    let mut count = Count::default();
    for binary in build()?
        .into_iter()
        .filter(|binary| binary.suite() == suite)
    {
        eprintln!("    {} {}", binary.package, binary.target);
        let mut command = Command::new(&binary.executable);
        command
            .current_dir(&binary.manifest_dir)
            .env("CARGO_MANIFEST_DIR", &binary.manifest_dir);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        command.args(filter);
        if suite != Suite::Unit {
            // These tests share one node, and a watcher wants to see them come and go.
            command.args(["--test-threads=1", "--nocapture"]);
        }
        count += log.tests(command)?;
    }
    Ok(count)
}

fn build() -> Result<Vec<Binary>> {
    let mut cargo = stage::cargo(&[
        "test",
        "--workspace",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    let output = cargo
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("run cargo test --no-run")?;
    if !output.status.success() {
        bail!("the tests do not compile");
    }
    let messages = String::from_utf8(output.stdout).context("read cargo's messages")?;
    messages
        .lines()
        .filter_map(|line| binary(line).transpose())
        .collect()
}

/// The test binary that one of cargo's JSON messages announces, if it announces one.
fn binary(message: &str) -> Result<Option<Binary>> {
    let message: Value = serde_json::from_str(message).context("read cargo's messages")?;
    let Some(executable) = message["executable"].as_str() else {
        return Ok(None);
    };
    if message["profile"]["test"] != true {
        return Ok(None);
    }
    let manifest = PathBuf::from(
        message["manifest_path"]
            .as_str()
            .context("a message without manifest_path")?,
    );
    let manifest_dir = manifest
        .parent()
        .context("a manifest without a directory")?
        .to_owned();
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
        manifest_dir,
        executable: PathBuf::from(executable),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_binary_is_found_in_its_message() {
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
    fn a_package_named_like_its_folder_is_found() {
        let message = r#"{"package_id":"path+file:///w/xtask#0.1.0","manifest_path":"/w/xtask/Cargo.toml",
            "target":{"name":"xtask"},"profile":{"test":true},"executable":"/w/target/debug/deps/xtask-1"}"#;
        let found = binary(message).unwrap().unwrap();
        assert_eq!(
            (found.package.as_str(), found.suite()),
            ("xtask", Suite::Unit)
        );
    }

    #[test]
    fn programs_and_libraries_are_not_tests() {
        assert!(binary(r#"{"executable":null}"#).unwrap().is_none());
        assert!(
            binary(r#"{"executable":"/w/target/debug/xtask","profile":{"test":false}}"#)
                .unwrap()
                .is_none()
        );
    }
}
