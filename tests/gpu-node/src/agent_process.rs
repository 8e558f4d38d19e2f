//! The agent in a process of its own.
//!
//! [`AgentProcess::start`] starts the program of the caller again, which calls [`run_agent`]: agent and caller are built
//! together.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use drava_dra_driver::agent::Agent;
use tokio_util::sync::CancellationToken;

use crate::Node;

const NODE_VARIABLE: &str = "DRAVA_TEST_NODE";
const DRIVER_VARIABLE: &str = "DRAVA_TEST_DRIVER";

/// An agent process, killed on drop. Its findings are discarded.
pub struct AgentProcess(Child);

impl AgentProcess {
    /// Starts the agent of a node with NVML from a driver root. `arguments` let this program call [`run_agent`].
    ///
    /// # Errors
    /// If the process cannot be started.
    pub fn start(node: &Node, driver_root: &Path, arguments: &[&str]) -> Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .args(arguments)
            .env(NODE_VARIABLE, &node.root)
            .env(DRIVER_VARIABLE, driver_root)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start the agent")?;
        Ok(Self(child))
    }

    /// Returns the resources that the agent has used so far.
    ///
    /// # Errors
    /// If the process does not exist.
    pub fn used(&self) -> Result<UsedResources> {
        let proc = PathBuf::from(format!("/proc/{}", self.0.id()));
        let mut cpu = Duration::ZERO;
        for thread in fs::read_dir(proc.join("task"))? {
            let statistics = fs::read_to_string(thread?.path().join("schedstat"))?;
            let ran = statistics.split(' ').next().context("no time")?;
            cpu += Duration::from_nanos(ran.parse()?);
        }
        let io = fs::read_to_string(proc.join("io"))?;
        let reads = io.lines().find_map(|line| line.strip_prefix("syscr: "));
        Ok(UsedResources {
            at: Instant::now(),
            cpu,
            reads: reads.context("no count of reads")?.parse()?,
        })
    }
}

impl Drop for AgentProcess {
    fn drop(&mut self) {
        // The process may have exited.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Resources that an agent process has used until a time.
#[derive(Clone, Copy)]
pub struct UsedResources {
    at: Instant,
    cpu: Duration,
    /// System calls that read.
    reads: u64,
}

impl UsedResources {
    /// Returns the percentage of a core and the reads per second since `earlier`.
    #[must_use]
    pub fn since(self, earlier: Self) -> (f64, f64) {
        let wall = (self.at - earlier.at).as_secs_f64();
        let cpu = self.cpu.saturating_sub(earlier.cpu).as_secs_f64();
        let reads = self.reads.saturating_sub(earlier.reads);
        #[expect(clippy::cast_precision_loss, reason = "counts are below 2^52")]
        let reads = reads as f64;
        (100.0 * cpu / wall, reads / wall)
    }
}

/// Runs the agent until stdin closes, if [`AgentProcess::start`] started this process. Returns whether it did.
///
/// # Errors
/// If the agent panics.
pub fn run_agent() -> Result<bool> {
    let path = |name| std::env::var_os(name).map(PathBuf::from);
    let (Some(node), Some(driver)) = (path(NODE_VARIABLE), path(DRIVER_VARIABLE)) else {
        return Ok(false);
    };
    let config = Node::new(&node).config(&driver);
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let agent = std::thread::spawn(move || Agent::new(config).run(&stopped, |_| {}));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    stop.cancel();
    agent.join().map_err(|_| anyhow!("the agent panicked"))?;
    Ok(true)
}
