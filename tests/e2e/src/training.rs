//! Pods that run `cuda-probe train`: it holds memory with known bytes, launches kernels, and prints what it notices.

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::manifest::{claim_template, pod};
use crate::{Namespace, wait};

/// A pod with one claim whose program is `cuda-probe train`.
pub struct Training<'a> {
    /// Its name and that of the claim template.
    pub name: &'a str,
    /// The request (YAML flow style), such as `{deviceClassName: vgpu.drava.dev}`.
    pub exactly: &'a str,
    /// `spec.devices.config` of the claim (YAML flow style), or nothing.
    pub config: &'a str,
    /// More fields of the pod's spec (YAML block style without indentation), such as `priorityClassName: a`, or nothing.
    pub fields: &'a str,
    /// Arguments of the program.
    pub args: &'a str,
}

impl Training<'_> {
    /// Returns the manifest of the claim template.
    #[must_use]
    pub fn template(&self) -> String {
        claim_template(self.name, self.exactly, self.config)
    }

    /// Returns the manifest of the pod.
    #[must_use]
    pub fn pod(&self) -> String {
        let sleep = "command: [sleep, infinity]";
        let train = format!("command: [sh, -c, \"exec cuda-probe train {}\"]", self.args);
        let manifest = pod(
            self.name,
            &format!("resourceClaimTemplateName: {}", self.name),
        );
        let manifest = manifest.replace(sleep, &train);
        manifest.replace(
            "  containers:",
            &format!("  {}\n  containers:", self.fields),
        )
    }
}

/// What a program has printed since its container has started.
#[derive(Debug)]
pub struct Log(Vec<Value>);

impl Log {
    /// Returns the events of this kind that were printed after that time, µs since the epoch.
    pub fn after(&self, kind: &str, since_us: u64) -> impl Iterator<Item = &Value> {
        self.0.iter().filter(move |event| {
            event["event"] == kind && event["atUs"].as_u64().is_some_and(|at| at > since_us)
        })
    }
}

impl Namespace<'_> {
    /// Returns what the program of the pod has printed; nothing while its container does not run.
    #[must_use]
    pub fn training_log(&self, pod: &str) -> Log {
        let text = self.kubectl(&["logs", pod]).unwrap_or_default();
        // The last line can be written at the moment.
        let lines = text.lines().map(serde_json::from_str);
        Log(lines.filter_map(std::result::Result::ok).collect())
    }

    /// Waits until the program of the pod has its memory and a kernel has ended, after that time. Returns when, µs.
    ///
    /// # Errors
    /// When it does not start in time.
    pub fn training_started(&self, pod: &str, since_us: u64) -> Result<u64> {
        wait(
            &format!("the program of {pod} has launched a kernel"),
            || {
                let log = self.training_log(pod);
                let started = log.after("started", since_us).next();
                Ok(started.and_then(|event| event["atUs"].as_u64()))
            },
        )
        .with_context(|| self.story(pod))
    }

    /// Waits until the program of the pod has compared its bytes after that time, and checks that they are the same.
    ///
    /// # Errors
    /// When bytes differ, or are not compared in time.
    pub fn has_same_bytes(&self, pod: &str, since_us: u64) -> Result<()> {
        let checked = wait(&format!("the program of {pod} compares its bytes"), || {
            let log = self.training_log(pod);
            Ok(log.after("checked", since_us).next().cloned())
        })
        .with_context(|| self.story(pod))?;
        let bytes = checked["bytes"].as_u64();
        ensure!(
            bytes.is_some_and(|bytes| bytes > 0) && checked["wrongBlocks"] == 0,
            "{pod}: other bytes in GPU memory: {checked}"
        );
        Ok(())
    }
}
