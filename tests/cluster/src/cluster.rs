//! Starts, controls and removes a cluster.

mod node;
mod start;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;

use crate::cargo::target_dir;
use crate::cgroup::Layout;
use crate::config::NodeIndex;
use crate::control::{ComponentStatus, Control};
use crate::plan::Plan;
use crate::process::{self, Limit};
use crate::state::StateDir;
use crate::version::Kubernetes;

pub use node::Node;
pub use start::up;

/// Default name of a cluster.
pub const DEFAULT_NAME: &str = "default";

/// Default of [`Options::scheduler_qps`], that of Kubernetes.
const DEFAULT_SCHEDULER_QPS: u32 = 50;

/// Environment variable with [`Options::programs`]; the tests of the simulated machine read it too.
const PROGRAMS_VARIABLE: &str = "DRAVA_SIMULATOR_BUILT";

/// Options of a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// State directory; [`Options::named`] places it in cargo's output directory.
    pub state: PathBuf,
    /// Kubernetes release.
    pub kubernetes: Kubernetes,
    /// The GPUs of each node. The first node also runs the control plane.
    pub nodes: Vec<Machine>,
    /// Whether the PodGroup API of Kubernetes is on (feature gate GenericWorkload, 1.37).
    pub pod_groups: bool,
    /// Requests per second of kube-scheduler's client.
    pub scheduler_qps: u32,
    /// Directory with the built `drava-node` and simulated machine. Without it, cargo builds both.
    pub programs: Option<PathBuf>,
}

impl Options {
    /// Returns the options of the cluster `name`: newest Kubernetes, one node with the default machine.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            state: target_dir().join("cluster").join(name),
            kubernetes: Kubernetes::default(),
            nodes: vec![Machine::default()],
            pod_groups: false,
            scheduler_qps: DEFAULT_SCHEDULER_QPS,
            programs: std::env::var_os(PROGRAMS_VARIABLE).map(PathBuf::from),
        }
    }
}

/// The GPUs of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Machine {
    /// No GPU: the simulated machine is not started.
    None,
    /// The GPUs in the machine file (see `simulator/machine/machines`).
    File(PathBuf),
}

impl Default for Machine {
    /// Returns the default machine: two H100.
    fn default() -> Self {
        Self::File(crate::cargo::workspace_root().join("simulator/machine/machines/h100x2.yaml"))
    }
}

/// A running cluster. Dropping the value leaves the cluster running; [`down`] ends it.
#[derive(Clone, Debug)]
pub struct Cluster {
    state: StateDir,
    plan: Plan,
}

/// State of a cluster.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// State directory.
    pub state: PathBuf,
    /// Exact release of Kubernetes.
    pub kubernetes: String,
    /// Path of the kubeconfig.
    pub kubeconfig: PathBuf,
    /// Whether every component is ready.
    pub ready: bool,
    /// Each node.
    pub nodes: Vec<NodeStatus>,
}

/// State of a node.
#[derive(Clone, Debug, Serialize)]
pub struct NodeStatus {
    /// Name of the node.
    pub name: String,
    /// Each component.
    pub components: Vec<ComponentStatus>,
}

/// Returns the running cluster in the state directory `state`.
pub fn attach(state: &Path) -> Result<Cluster> {
    let state = StateDir::new(state)?;
    match state.read_plan()? {
        Some(plan) if is_running(&state, &plan) => Ok(Cluster { state, plan }),
        _ => bail!(
            "no cluster runs in {}; `cargo xtask cluster up` starts one",
            state.path().display()
        ),
    }
}

/// Ends the cluster in the state directory `state` and removes all its traces. Returns whether a cluster existed.
pub fn down(state: &Path) -> Result<bool> {
    let state = StateDir::new(state)?;
    let has_cgroup = Layout::detect()?.exists(&state.cgroup());
    if !state.path().exists() && !has_cgroup {
        return Ok(false);
    }
    let _lock = lock(&state)?;
    let known = has_cgroup || state.read_plan().ok().flatten().is_some();
    end(&state)?;
    state.remove()?;
    Ok(known)
}

/// Returns whether the inits of all nodes run. A cluster with an ended node does not count: `up` starts it again from an
/// empty directory.
fn is_running(state: &StateDir, plan: &Plan) -> bool {
    let mut nodes = plan.nodes.iter();
    nodes.all(|node| Node::new(state, node).is_running())
}

/// Locks the state directory against other commands.
fn lock(state: &StateDir) -> Result<File> {
    // A directory removed by hand, as by `cargo clean`, can leave a running node and some files. An existing cgroup
    // shows that they belong to the cluster.
    if Layout::detect()?.exists(&state.cgroup()) {
        state.mark()?;
    }
    state.lock()
}

/// Ends all processes of the state directory, including those that a killed command left.
fn end(state: &StateDir) -> Result<()> {
    let nodes = state.nodes();
    let running: Vec<_> = nodes
        .iter()
        .filter_map(|node| Control::connect(&node.control_socket()))
        .collect();
    for control in &running {
        let init = pidfd_open(control.init, PidfdFlags::empty()).context("open a node's init")?;
        pidfd_send_signal(&init, Signal::KILL).context("end a node's init")?;
    }
    if !running.is_empty() {
        for node in &nodes {
            node.await_lock(Duration::from_secs(10));
        }
    }
    // Also ends processes that had not joined a node yet. The namespaces end with the last process of the cgroup.
    Layout::detect()?.remove(&state.cgroup())
}

impl Cluster {
    /// Path of the administrator's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.state.kubeconfig()
    }

    /// State directory.
    #[must_use]
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Exact release of Kubernetes, such as `v1.37.1`.
    #[must_use]
    pub fn kubernetes(&self) -> &str {
        &self.plan.kubernetes
    }

    /// kubectl with the administrator's credentials.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        self.administrator(&self.plan.kubernetes_dir.join("kubectl"))
    }

    /// Helm with the administrator's credentials.
    #[must_use]
    pub fn helm(&self) -> Command {
        self.administrator(&self.plan.helm_dir.join("helm"))
    }

    fn administrator(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("KUBECONFIG", self.kubeconfig());
        command
    }

    /// The nodes; the first has the control plane.
    #[must_use]
    pub fn nodes(&self) -> Vec<Node> {
        let nodes = self.plan.nodes.iter();
        nodes.map(|node| Node::new(&self.state, node)).collect()
    }

    /// Returns the node `name`, such as `node-0`.
    pub fn node(&self, name: &str) -> Result<Node> {
        let known = self.plan.node(name).with_context(|| {
            let names: Vec<_> = self.nodes().iter().map(Node::name).collect();
            format!("no node {name}; the cluster has {}", names.join(", "))
        })?;
        Ok(Node::new(&self.state, known))
    }

    /// The node with the control plane; in a cluster of one node, its only node.
    #[must_use]
    pub fn control_plane(&self) -> Node {
        Node::of(&self.state, NodeIndex::CONTROL_PLANE)
    }

    /// Imports the images of the OCI archive `archive` into every node.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        let nodes = self.nodes();
        nodes.iter().try_for_each(|node| node.load_image(archive))
    }

    /// Returns the state of the cluster.
    pub fn status(&self) -> Result<Status> {
        let mut nodes = vec![];
        for node in self.nodes() {
            nodes.push(NodeStatus {
                name: node.name(),
                components: node.components()?,
            });
        }
        let mut components = nodes.iter().flat_map(|node| &node.components);
        Ok(Status {
            state: self.state.path().to_owned(),
            kubernetes: self.plan.kubernetes.clone(),
            kubeconfig: self.kubeconfig(),
            ready: components.all(ComponentStatus::is_ready),
            nodes,
        })
    }

    /// Runs kubectl and returns its standard output.
    pub fn kubectl_output<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
        let mut command = self.kubectl();
        let output = process::output(command.args(args).stdin(Stdio::null()), Limit::REQUEST)?;
        if !output.status.success() {
            bail!(
                "kubectl failed: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        String::from_utf8(output.stdout).context("read the output of kubectl")
    }
}

/// Returns the last lines of a log, for an error message.
fn tail(log: &Path) -> String {
    let text = fs::read(log)
        .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
        .unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines
        .iter()
        .skip(lines.len().saturating_sub(15))
        .map(|line| format!("    {line}\n"))
        .collect()
}
