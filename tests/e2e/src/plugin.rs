//! `kubectl drava` as a user runs it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use drava_cluster::process::{self, Limit};
use serde_json::Value;

use crate::{ProgramOutput, TestCluster, wait};

/// Returns the path of `kubectl-drava`: cargo places programs next to the directory of the tests.
fn program() -> Result<PathBuf> {
    let test = std::env::current_exe().context("find this test")?;
    let directory = test.parent().and_then(Path::parent);
    let program = directory.context("no directory")?.join("kubectl-drava");
    ensure!(program.exists(), "{} is not built", program.display());
    Ok(program)
}

impl TestCluster {
    /// Returns the path of the kubectl plugin.
    ///
    /// # Errors
    /// When it is not built.
    pub fn plugin(&self) -> Result<PathBuf> {
        program()
    }

    /// Returns whether the API server serves DeviceTaintRules, which `cordon` and `drain` write: since Kubernetes 1.37.
    /// Otherwise reports `what` as skipped.
    ///
    /// # Errors
    /// When kubectl fails.
    pub fn has_taint_rules(&self, what: &str) -> Result<bool> {
        let served = self.kubectl([
            "api-resources",
            "--api-group=resource.k8s.io",
            "--output=name",
        ])?;
        let is_served = served.contains("devicetaintrules");
        if !is_served {
            // `eprintln!` would be hidden for a test that passes.
            let line = format!("skipped: {what}: the API server serves no DeviceTaintRules\n");
            std::io::stderr().write_all(line.as_bytes())?;
        }
        Ok(is_served)
    }

    /// Runs `kubectl drava` with the administrator's credentials.
    ///
    /// # Errors
    /// When the program cannot be run.
    pub fn drava(&self, args: &[&str]) -> Result<ProgramOutput> {
        let mut command = Command::new(program()?);
        command
            .env("KUBECONFIG", self.kubernetes().kubeconfig())
            .args(args)
            .stdin(Stdio::null());
        let output = process::output(&mut command, Limit::REQUEST)?;
        Ok(ProgramOutput {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }

    /// Runs `kubectl drava` until `is_done` accepts its output so far, then ends it. Returns the output.
    ///
    /// # Errors
    /// When the program cannot be run, or ends before.
    pub fn drava_until(
        &self,
        args: &[&str],
        mut is_done: impl FnMut(&str) -> Result<bool>,
    ) -> Result<String> {
        let mut child = Command::new(program()?)
            .env("KUBECONFIG", self.kubernetes().kubeconfig())
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = child.stdout.take().context("a pipe")?;
        let mut output = String::new();
        let read = || {
            for line in BufReader::new(stdout).lines() {
                output.push_str(&line?);
                output.push('\n');
                if is_done(&output)? {
                    return Ok(());
                }
            }
            bail!("kubectl drava {args:?} has ended:\n{output}")
        };
        let outcome = read();
        child.kill()?;
        child.wait()?;
        outcome.map(|()| output)
    }

    /// Waits until the doctor finds exactly these faults, each any number of times, and returns the findings.
    ///
    /// # Errors
    /// When it finds others, with its output, or cannot check something.
    pub fn wait_for_faults(&self, faults: &[&str]) -> Result<Vec<Value>> {
        let mut expected = faults.to_vec();
        expected.sort_unstable();
        let mut last = String::new();
        wait(&format!("doctor finds {faults:?}"), || {
            let output = self.drava(&["doctor", "-o", "json"])?;
            last = format!("{}{}", output.stdout, output.stderr);
            let Ok(diagnosis) = serde_json::from_str::<Value>(&output.stdout) else {
                return Ok(None);
            };
            ensure!(diagnosis["unchecked"] == serde_json::json!([]), "{last}");
            let findings = diagnosis["findings"].as_array().context("findings")?;
            let mut found: Vec<_> = findings
                .iter()
                .filter_map(|one| one["fault"].as_str())
                .collect();
            found.sort_unstable();
            found.dedup();
            ensure!(
                output.code == i32::from(!findings.is_empty()),
                "exit code {} with {last}",
                output.code
            );
            Ok((found == expected).then(|| findings.clone()))
        })
        .with_context(|| last.clone())
    }
}
