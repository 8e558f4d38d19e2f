//! The Go program: built through the cache of `drava-cluster`, one process per comparison.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use drava_cluster::Kubernetes;
use drava_cluster::prerequisite::Prerequisite;
use k8s_openapi::api::resource::v1::{AllocationResult, Device};
use serde::Deserialize;
use serde_json::{Value, json};

/// Returns why the program cannot be built here, `None` if it can.
#[must_use]
pub fn missing_prerequisite() -> Option<String> {
    (!Prerequisite::Go.is_met()).then(|| Prerequisite::Go.to_string())
}

/// The running program of one release.
#[derive(Debug)]
pub struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// Answer to a case.
#[derive(Debug, Clone, Deserialize)]
pub struct Answer {
    /// By name of the node.
    #[serde(default)]
    pub nodes: BTreeMap<String, NodeAnswer>,
    /// By CEL expression: the devices that it selects, as `slice/device`.
    #[serde(default)]
    pub selected: BTreeMap<String, BTreeSet<String>>,
    /// By position of the expression.
    #[serde(default)]
    evaluations: Vec<Evaluation>,
    #[serde(default)]
    error: String,
}

/// Answer for one node: allocations if the claims fit.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct NodeAnswer {
    /// One per claim; empty if the claims do not fit.
    #[serde(default)]
    pub allocations: Vec<AllocationResult>,
    /// Error of the allocator.
    #[serde(default)]
    pub error: String,
}

/// Result of one expression on one device.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evaluation {
    /// The value.
    #[serde(default)]
    pub selected: bool,
    /// Why the expression does not compile.
    #[serde(default)]
    pub compile_error: String,
    /// Why the evaluation failed.
    #[serde(default)]
    pub runtime_error: String,
}

impl Program {
    /// Builds the program of a release where the cache lacks it, and starts it.
    ///
    /// # Errors
    /// When it cannot be built or started.
    pub fn start(release: Kubernetes) -> Result<Self> {
        Self::start_of("go", "oracle", release)
    }

    /// Builds the program of this package's folder where the cache lacks it, and starts it.
    ///
    /// # Errors
    /// When it cannot be built or started.
    pub fn start_of(folder: &str, name: &'static str, release: Kubernetes) -> Result<Self> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let executable = drava_cluster::build_program(&directory, name, release)?;
        let mut child = Command::new(&executable)
            // A quarter of the collections of the default: cases are garbage soon after they are answered.
            .env("GOGC", "400")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start {}", executable.display()))?;
        let input = child.stdin.take().context("take the program's input")?;
        let output = child.stdout.take().context("take the program's output")?;
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
        })
    }

    /// Sends a case; [`Self::receive`] returns the answer.
    ///
    /// # Errors
    /// When the program has ended.
    pub fn send(&mut self, question: &Value) -> Result<()> {
        let mut line = question.to_string();
        line.push('\n');
        self.input
            .write_all(line.as_bytes())
            .context("send a case to the program")
    }

    /// Returns the answer to the oldest unanswered case.
    ///
    /// # Errors
    /// When the program has ended or cannot answer.
    pub fn receive(&mut self) -> Result<Answer> {
        let answer: Answer = self.receive_as()?;
        if !answer.error.is_empty() {
            bail!("the program cannot answer: {}", answer.error);
        }
        Ok(answer)
    }

    /// Returns an answer in the form of the program.
    ///
    /// # Errors
    /// When the program has ended or answers in another form.
    pub fn receive_as<T: serde::de::DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        let length = self
            .output
            .read_line(&mut line)
            .context("read an answer of the program")?;
        if length == 0 {
            bail!("the program ended: {:?}", self.child.wait());
        }
        serde_json::from_str(&line).with_context(|| format!("parse answer {line}"))
    }

    /// Sends a case and returns the answer.
    ///
    /// # Errors
    /// As [`Self::send`] and [`Self::receive`].
    pub fn ask(&mut self, question: &Value) -> Result<Answer> {
        self.send(question)?;
        self.receive()
    }

    /// Evaluates expressions on a device.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub fn evaluate(
        &mut self,
        expressions: &[String],
        driver: &str,
        device: &Device,
    ) -> Result<Vec<Evaluation>> {
        let answer = self.ask(&json!({
            "expressions": expressions,
            "driver": driver,
            "device": device,
        }))?;
        Ok(answer.evaluations)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
