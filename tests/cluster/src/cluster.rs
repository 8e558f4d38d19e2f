//! Starts, controls and removes a cluster.

mod start;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::Serialize;

use crate::cargo::target_dir;
use crate::cgroup::Layout;
use crate::component::Component;
pub use crate::config::NODE_NAME;
use crate::config::{self, PATH};
use crate::control::{ComponentStatus, Control, Phase, Request};
use crate::plan::Plan;
use crate::process::{self, Limit};
use crate::state::StateDir;
use crate::version::Kubernetes;

pub use start::up;

/// Default name of a cluster.
pub const DEFAULT_NAME: &str = "default";

/// Environment variable with [`Options::programs`]; the tests of the simulated machine read it too.
const PROGRAMS_VARIABLE: &str = "DRAVA_SIMULATOR_BUILT";

/// Options of a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// State directory; [`Options::named`] places it in cargo's output directory.
    pub state: PathBuf,
    /// Kubernetes release.
    pub kubernetes: Kubernetes,
    /// GPUs of the node.
    pub machine: Machine,
    /// Directory with the built `drava-node` and simulated machine. Without it, cargo builds both.
    pub programs: Option<PathBuf>,
}

impl Options {
    /// Returns the options of the cluster `name`: newest Kubernetes, default machine.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self {
            state: target_dir().join("cluster").join(name),
            kubernetes: Kubernetes::default(),
            machine: Machine::default(),
            programs: std::env::var_os(PROGRAMS_VARIABLE).map(PathBuf::from),
        }
    }
}

/// The GPUs of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Machine {
    /// No GPU: the simulated machine is not started.
    None,
    /// The GPUs in the machine file (see `tests/simulator/machine/machines`).
    File(PathBuf),
}

impl Default for Machine {
    /// Returns the default machine: two H100.
    fn default() -> Self {
        Self::File(
            crate::cargo::workspace_root().join("tests/simulator/machine/machines/h100x2.yaml"),
        )
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
    /// Each component.
    pub components: Vec<ComponentStatus>,
}

/// Returns the running cluster in the state directory `state`.
pub fn attach(state: &Path) -> Result<Cluster> {
    let state = StateDir::new(state)?;
    let running = Control::connect(&state.control_socket()).is_some();
    match state.read_plan()? {
        Some(plan) if running => Ok(Cluster { state, plan }),
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
    if let Some(control) = Control::connect(&state.control_socket()) {
        let init = pidfd_open(control.init, PidfdFlags::empty()).context("open the node's init")?;
        pidfd_send_signal(&init, Signal::KILL).context("end the node's init")?;
        state.await_node_lock(Duration::from_secs(10));
    }
    // Also ends processes that had not joined the node yet. The namespaces end with the last process of the cgroup.
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

    /// A program in the node's namespaces: its processes, files, network and host name.
    pub fn command(&self, program: &str) -> Result<Command> {
        let init = self.control()?.init;
        let mut command = Command::new("nsenter");
        command.arg(format!("--target={}", init.as_raw_pid()));
        command
            .args([
                "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--",
            ])
            .arg(program);
        command.env("PATH", PATH);
        Ok(command)
    }

    /// Returns the host's path of the node's absolute path `path`; valid while the node runs.
    pub fn node_path(&self, path: &Path) -> Result<PathBuf> {
        let init = self.control()?.init;
        let root = PathBuf::from(format!("/proc/{}/root", init.as_raw_pid()));
        Ok(root.join(path.strip_prefix("/").unwrap_or(path)))
    }

    /// Imports the images of the OCI archive `archive` into the node.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        let input = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
        let mut command = self.command("ctr")?;
        command.args(["--namespace=k8s.io", "images", "import", "--local", "-"]);
        let output = process::output(command.stdin(input), Limit::REQUEST)?;
        if !output.status.success() {
            bail!(
                "containerd cannot import {}: {}",
                archive.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }

    /// Returns the state of each component.
    pub fn components(&self) -> Result<Vec<ComponentStatus>> {
        self.control()?.send(Request::Status)
    }

    /// Returns the state of the cluster.
    pub fn status(&self) -> Result<Status> {
        let components = self.components()?;
        Ok(Status {
            state: self.state.path().to_owned(),
            kubernetes: self.plan.kubernetes.clone(),
            kubeconfig: self.kubeconfig(),
            ready: components
                .iter()
                .all(|status| matches!(status.phase, Phase::Ready { .. })),
            components,
        })
    }

    /// Kills a component's process with SIGKILL, as a crash does; the node's init restarts the component.
    pub fn kill(&self, component: Component) -> Result<()> {
        self.control()?
            .send(Request::Signal(component, Signal::KILL.as_raw()))
            .map(drop)
    }

    /// Stops a component with SIGTERM and prevents a restart. Returns when the process has ended.
    pub fn stop(&self, component: Component) -> Result<()> {
        self.control()?.send(Request::Stop(component))?;
        self.wait_for(component, "stopped", |phase| {
            matches!(phase, Phase::Stopped)
        })
    }

    /// Starts a stopped component. Returns when the component is ready.
    pub fn start(&self, component: Component) -> Result<()> {
        self.control()?.send(Request::Start(component))?;
        self.wait_ready(component)
    }

    /// Stops a component with SIGTERM and starts it. Returns when the component is ready.
    pub fn restart(&self, component: Component) -> Result<()> {
        self.stop(component)?;
        self.start(component)
    }

    /// Enables or disables CDI in containerd and restarts containerd. CDI is enabled by default since containerd 2.0.
    pub fn set_cdi(&self, enabled: bool) -> Result<()> {
        let file = self.state.config().join("containerd.toml");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        fs::write(&file, config::containerd_with_cdi(&text, enabled))
            .with_context(|| format!("write {}", file.display()))?;
        self.restart(Component::Containerd)
    }

    /// Waits until a component is ready.
    pub fn wait_ready(&self, component: Component) -> Result<()> {
        self.wait_for(component, "become ready", |phase| {
            matches!(phase, Phase::Ready { .. })
        })
    }

    fn wait_for(
        &self,
        component: Component,
        what: &str,
        reached: impl Fn(&Phase) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            let components = self.components()?;
            let status = components
                .iter()
                .find(|status| status.component == component);
            let status =
                status.with_context(|| format!("the cluster has no component {component}"))?;
            if reached(&status.phase) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "{component} has not {what} within 120 s: state {:?}; see {}",
                    status.phase,
                    self.log(component).display()
                );
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// Path of a component's log.
    #[must_use]
    pub fn log(&self, component: Component) -> PathBuf {
        self.state.log(component)
    }

    fn control(&self) -> Result<Control> {
        Control::connect(&self.state.control_socket())
            .with_context(|| format!("the cluster in {} has ended", self.state.path().display()))
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
