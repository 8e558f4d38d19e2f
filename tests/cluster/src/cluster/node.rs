//! Controls a node of a running cluster.

use std::fs::{self, File};
use std::net::Ipv4Addr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::component::Component;
use crate::config::{self, BUILD_DIR, NodeIndex, PATH, SIMULATED_ROOT};
use crate::control::{ComponentStatus, Control, Phase, Request};
use crate::plan::NodePlan;
use crate::process::{self, Limit};
use crate::state::{NodeDir, StateDir};

/// A node of a running cluster.
#[derive(Clone, Debug)]
pub struct Node {
    index: NodeIndex,
    dir: NodeDir,
}

impl Node {
    pub(super) fn new(state: &StateDir, node: &NodePlan) -> Self {
        Self::of(state, node.index)
    }

    pub(super) fn of(state: &StateDir, index: NodeIndex) -> Self {
        Self {
            index,
            dir: state.node(&index.name()),
        }
    }

    /// Name of the node in Kubernetes.
    #[must_use]
    pub fn name(&self) -> String {
        self.index.name()
    }

    /// Address of the node in the cluster's network.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.index.address()
    }

    /// Moves this thread to the node's network, where the threads that it starts afterwards are, too.
    pub fn enter_network(&self) -> Result<()> {
        let init = self.control()?.init;
        let namespace = format!("/proc/{}/ns/net", init.as_raw_pid());
        let namespace = File::open(&namespace).with_context(|| format!("open {namespace}"))?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .context("enter the node's network")
    }

    /// The node's state directory.
    pub(super) fn dir(&self) -> &NodeDir {
        &self.dir
    }

    pub(super) fn is_running(&self) -> bool {
        self.control().is_ok()
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
        // A directory of the host.
        command.env_remove("TMPDIR");
        Ok(command)
    }

    /// `simulator-machine ctl` for the node's GPUs.
    pub fn simulator(&self) -> Result<Command> {
        let mut command = self.command(&format!("{BUILD_DIR}/simulator-machine"))?;
        command.args(["ctl", "--root", SIMULATED_ROOT]);
        Ok(command)
    }

    /// Returns the host's path of the node's absolute path `path`; valid while the node runs.
    pub fn path(&self, path: &Path) -> Result<PathBuf> {
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

    /// Kills a component's process with SIGKILL, as a crash does; the node's init restarts the component.
    pub fn kill(&self, component: Component) -> Result<()> {
        self.control()?
            .send(Request::Signal(component, Signal::KILL.as_raw()))
            .map(drop)
    }

    /// Stops the execution of a component's process with SIGSTOP: its connections stay open without a response.
    pub fn pause(&self, component: Component) -> Result<()> {
        self.control()?
            .send(Request::Signal(component, Signal::STOP.as_raw()))
            .map(drop)
    }

    /// Continues a paused component.
    pub fn resume(&self, component: Component) -> Result<()> {
        self.control()?
            .send(Request::Signal(component, Signal::CONT.as_raw()))
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
        let file = self.dir.config().join("containerd.toml");
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
                status.with_context(|| format!("{} has no component {component}", self.name()))?;
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
        self.dir.log(component)
    }

    pub(super) fn control(&self) -> Result<Control> {
        Control::connect(&self.dir.control_socket()).with_context(|| {
            format!(
                "{} has ended; its log is {}",
                self.name(),
                self.dir.init_log().display()
            )
        })
    }
}
