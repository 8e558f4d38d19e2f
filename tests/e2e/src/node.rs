//! One node of the cluster: its programs, its simulated GPUs, and the state of claims on it.

use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use drava_cluster::Node;
use serde_json::Value;

use crate::{TestCluster, stdout, wait};

/// State of claims on a node: CDI specs, records, limits pages and mounts.
const CLAIM_STATE: &str = "find /var/run/cdi -name 'gpu.drava.dev-claim-*'; find /var/lib/drava/claims -mindepth 1; \
                           grep /run/drava/usage/ /proc/mounts; true";

/// A node.
pub struct TestNode {
    node: Node,
}

impl TestCluster {
    /// Returns the node `name`, such as `node-0`.
    ///
    /// # Errors
    /// When the cluster has no such node.
    pub fn node(&self, name: &str) -> Result<TestNode> {
        let node = self.kubernetes().node(name)?;
        Ok(TestNode { node })
    }

    /// Returns the first node.
    #[must_use]
    pub fn first_node(&self) -> TestNode {
        let node = self.kubernetes().control_plane();
        TestNode { node }
    }
}

impl TestNode {
    /// Runs a program in the node's namespaces and returns its standard output.
    ///
    /// # Errors
    /// When the program cannot be run or fails.
    pub fn run(&self, program: &str, args: &[&str]) -> Result<String> {
        let mut command = self.node.command(program)?;
        command.args(args).stdin(Stdio::null());
        stdout(command)
    }

    /// Returns a program that runs in the node's namespaces.
    ///
    /// # Errors
    /// When the node does not run.
    pub(crate) fn command(&self, program: &str) -> Result<Command> {
        self.node.command(program)
    }

    /// Runs `simulator-machine ctl` for the node's GPUs and returns its standard output.
    ///
    /// # Errors
    /// When the command fails.
    pub fn simulator(&self, args: &[&str]) -> Result<String> {
        let mut command = self.node.simulator()?;
        command.args(args).stdin(Stdio::null());
        stdout(command)
    }

    /// Returns the MIG instances of a GPU as the simulator lists them.
    ///
    /// # Errors
    /// When the simulator does not answer or has no such GPU.
    pub fn mig_instances(&self, gpu: usize) -> Result<Vec<Value>> {
        let status: Value = serde_json::from_str(&self.simulator(&["status"])?)?;
        let instances = status["gpus"][gpu]["mig"]["gpuInstances"].as_array();
        instances.cloned().context("no GPU with MIG")
    }

    /// Returns the PIDs of a program, in the namespaces of the node.
    ///
    /// # Errors
    /// When the node's processes cannot be read.
    pub fn pids(&self, program: &str) -> Result<Vec<String>> {
        // The kernel truncates a process's name to 15 bytes.
        let name = program.get(..15).unwrap_or(program);
        let script = format!(
            "for d in /proc/[0-9]*; do read -r c < $d/comm && [ \"$c\" = '{name}' ] && echo ${{d#/proc/}}; done 2>/dev/null; true"
        );
        let pids = self.run("sh", &["-c", &script])?;
        Ok(pids.lines().map(str::to_owned).collect())
    }

    /// Waits until a process of a program runs that is none of these.
    ///
    /// # Errors
    /// When there is none in time.
    pub fn wait_for_successor(&self, program: &str, before: &[String]) -> Result<()> {
        wait(&format!("another process of {program}"), || {
            let mut pids = self.pids(program)?.into_iter();
            Ok(pids.any(|pid| !before.contains(&pid)).then_some(()))
        })
    }

    /// Sends a signal, such as `KILL`, to every process of a program, and returns their number.
    ///
    /// # Errors
    /// When the node's processes cannot be read.
    pub fn signal(&self, program: &str, signal: &str) -> Result<usize> {
        // The kernel truncates a process's name to 15 bytes.
        let name = program.get(..15).unwrap_or(program);
        self.signal_if(
            &format!("read -r c < $d/comm && [ \"$c\" = '{name}' ]"),
            signal,
        )
    }

    /// Sends a signal, such as `STOP`, to every process of a pod's containers, and returns their number.
    ///
    /// # Errors
    /// When the node's processes cannot be read.
    pub fn signal_pod(&self, pod: &str, signal: &str) -> Result<usize> {
        self.signal_if(&format!("grep -qzxF 'HOSTNAME={pod}' $d/environ"), signal)
    }

    /// Lets the stopped processes of a pod's containers run for that time, and stops them again.
    ///
    /// # Errors
    /// When the node's processes cannot be read or the pod has none.
    pub fn resume_pod_for(&self, pod: &str, time: Duration) -> Result<()> {
        let script = format!(
            "p=$(for d in /proc/[0-9]*; do grep -qzxF 'HOSTNAME={pod}' $d/environ && echo ${{d#/proc/}}; done 2>/dev/null); \
             kill -CONT $p && sleep {} && kill -STOP $p",
            time.as_secs_f64()
        );
        self.run("sh", &["-c", &script]).map(drop)
    }

    /// Sends a signal to the processes with the directories `$d` in `/proc` for which `condition` succeeds.
    fn signal_if(&self, condition: &str, signal: &str) -> Result<usize> {
        let script = format!(
            "n=0; for d in /proc/[0-9]*; do {condition} && kill -{signal} ${{d#/proc/}} && n=$((n+1)); done 2>/dev/null; echo $n"
        );
        Ok(self.run("sh", &["-c", &script])?.trim().parse()?)
    }

    /// Waits until no CDI spec, record, limits page or mount of a claim is on the node.
    ///
    /// # Errors
    /// When state remains.
    pub fn wait_until_clean(&self) -> Result<()> {
        wait("the node holds no state of a claim", || {
            let found = self.run("sh", &["-c", CLAIM_STATE])?;
            Ok(found.trim().is_empty().then_some(()))
        })
    }

    /// Waits until no program has memory of a GPU.
    ///
    /// # Errors
    /// When one has, with the processes that the simulated machine names.
    pub fn wait_until_unused(&self) -> Result<()> {
        let mut last = Value::Null;
        let waited = wait("the GPUs have no memory of programs", || {
            let mut status: Value = serde_json::from_str(&self.simulator(&["status"])?)?;
            let gpus = status["gpus"].as_array_mut().context("gpus")?;
            gpus.retain(|gpu| gpu["usedBytes"] != 0);
            let is_unused = gpus.is_empty();
            last = status;
            Ok(is_unused.then_some(()))
        });
        waited.with_context(|| format!("GPUs in use: {}", last["gpus"]))
    }
}
