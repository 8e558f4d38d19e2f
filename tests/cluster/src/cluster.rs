//! Starting, using and ending a cluster.

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

/// Name of the cluster when none is given.
pub const DEFAULT_NAME: &str = "default";

/// Variable with [`Options::programs`], which the tests of the simulated machine read too.
const PROGRAMS_VARIABLE: &str = "DRAVA_SIMULATOR_BUILT";

/// What to start.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cluster's state directory; [`Options::named`] places it in cargo's output directory.
    pub state: PathBuf,
    /// Release.
    pub kubernetes: Kubernetes,
    /// Whether the node has GPUs.
    pub machine: Machine,
    /// Directory with built `drava-node` and simulated machine; cargo builds them where there is none.
    pub programs: Option<PathBuf>,
}

impl Options {
    /// The cluster called `name`: newest Kubernetes, default machine.
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
    /// None: the simulated machine is not started.
    None,
    /// Those that the file describes (see `tests/simulator/machine/machines`).
    File(PathBuf),
}

impl Default for Machine {
    /// Two H100.
    fn default() -> Self {
        Self::File(
            crate::cargo::workspace_root().join("tests/simulator/machine/machines/h100x2.yaml"),
        )
    }
}

/// A running cluster. Dropping it leaves the cluster running; [`down`] ends it.
#[derive(Clone, Debug)]
pub struct Cluster {
    state: StateDir,
    plan: Plan,
}

/// How a cluster is doing.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Directory of everything that the cluster keeps.
    pub state: PathBuf,
    /// Exact release of Kubernetes.
    pub kubernetes: String,
    /// File for kubectl.
    pub kubeconfig: PathBuf,
    /// Whether every component answers.
    pub ready: bool,
    /// Each component.
    pub components: Vec<ComponentStatus>,
}

/// The running cluster in the state directory `state`.
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

/// Ends the cluster in the state directory `state` and removes every trace of it. True if there was one.
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

/// Keeps other commands out of the state directory.
fn lock(state: &StateDir) -> Result<File> {
    // A directory that was removed by hand, as by `cargo clean`, may leave a node running and some files behind. The
    // cgroup tells that they are ours.
    if Layout::detect()?.exists(&state.cgroup()) {
        state.mark()?;
    }
    state.lock()
}

/// Ends what runs in the state directory, whatever a killed command left of it.
fn end(state: &StateDir) -> Result<()> {
    if let Some(control) = Control::connect(&state.control_socket()) {
        let init = pidfd_open(control.init, PidfdFlags::empty()).context("find the node's init")?;
        pidfd_send_signal(&init, Signal::KILL).context("end the node's init")?;
        state.await_node_lock(Duration::from_secs(10));
    }
    // Also what had not become a node yet. When nobody is left in the cgroup, the namespaces are gone too.
    Layout::detect()?.remove(&state.cgroup())
}

impl Cluster {
    /// The kubeconfig of the cluster's administrator.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.state.kubeconfig()
    }

    /// The directory of everything that the cluster keeps.
    #[must_use]
    pub fn state(&self) -> &Path {
        self.state.path()
    }

    /// Exact release of Kubernetes, such as `v1.37.1`.
    #[must_use]
    pub fn kubernetes(&self) -> &str {
        &self.plan.kubernetes
    }

    /// kubectl as the cluster's administrator.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        self.administrator(&self.plan.kubernetes_dir.join("kubectl"))
    }

    /// Helm as the cluster's administrator.
    #[must_use]
    pub fn helm(&self) -> Command {
        self.administrator(&self.plan.helm_dir.join("helm"))
    }

    fn administrator(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env("KUBECONFIG", self.kubeconfig());
        command
    }

    /// A program run inside the node: its processes, files, network and host name.
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

    /// Where the host finds the node's absolute path `path`, as long as the node runs.
    pub fn node_path(&self, path: &Path) -> Result<PathBuf> {
        let init = self.control()?.init;
        let root = PathBuf::from(format!("/proc/{}/root", init.as_raw_pid()));
        Ok(root.join(path.strip_prefix("/").unwrap_or(path)))
    }

    /// Brings the image in the OCI archive `archive` onto the node.
    pub fn load_image(&self, archive: &Path) -> Result<()> {
        let input = File::open(archive).with_context(|| format!("open {}", archive.display()))?;
        let mut command = self.command("ctr")?;
        command.args(["--namespace=k8s.io", "images", "import", "--local", "-"]);
        let output = process::output(command.stdin(input), Limit::REQUEST)?;
        if !output.status.success() {
            bail!(
                "containerd refused {}: {}",
                archive.display(),
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        Ok(())
    }

    /// How the components are doing.
    pub fn components(&self) -> Result<Vec<ComponentStatus>> {
        self.control()?.ask(Request::Status)
    }

    /// How the cluster is doing.
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

    /// Kills a component's process with SIGKILL, as a crash would; the node's init starts it again.
    pub fn kill(&self, component: Component) -> Result<()> {
        self.control()?
            .ask(Request::Signal(component, Signal::KILL.as_raw()))
            .map(drop)
    }

    /// Ends a component politely and keeps it from being started again. Returns when it has ended.
    pub fn stop(&self, component: Component) -> Result<()> {
        self.control()?.ask(Request::Stop(component))?;
        self.wait_for(component, "to end", |phase| matches!(phase, Phase::Stopped))
    }

    /// Starts a stopped component. Returns when it answers.
    pub fn start(&self, component: Component) -> Result<()> {
        self.control()?.ask(Request::Start(component))?;
        self.wait_ready(component)
    }

    /// Ends a component politely and starts it again. Returns when it answers.
    pub fn restart(&self, component: Component) -> Result<()> {
        self.stop(component)?;
        self.start(component)
    }

    /// Lets containerd inject devices by CDI, as every release since 2.0 does by default, or not. Restarts it.
    pub fn set_cdi(&self, enabled: bool) -> Result<()> {
        let file = self.state.config().join("containerd.toml");
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        fs::write(&file, config::containerd_with_cdi(&text, enabled))
            .with_context(|| format!("write {}", file.display()))?;
        self.restart(Component::Containerd)
    }

    /// Returns when a component answers.
    pub fn wait_ready(&self, component: Component) -> Result<()> {
        self.wait_for(component, "to answer", |phase| {
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
            let status = status.with_context(|| format!("this cluster runs no {component}"))?;
            if reached(&status.phase) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "waited two minutes for {component} {what}; it is {:?}; its log is {}",
                    status.phase,
                    self.log(component).display()
                );
            }
            sleep(Duration::from_millis(50));
        }
    }

    /// File to which a component writes.
    #[must_use]
    pub fn log(&self, component: Component) -> PathBuf {
        self.state.log(component)
    }

    fn control(&self) -> Result<Control> {
        Control::connect(&self.state.control_socket()).with_context(|| {
            format!(
                "the cluster in {} no longer runs",
                self.state.path().display()
            )
        })
    }

    /// Runs kubectl and returns what it prints.
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

/// The last lines of a log, for an error message.
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
