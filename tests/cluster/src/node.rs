//! Process chain from the host to the init in the node's namespaces.
//!
//! The program `drava-node` replaces itself three times. `launch` takes the node's lock and enters the cluster's
//! cgroup; util-linux's `unshare` creates the namespaces and forks. `enter`, now process 1, moves to the node's cgroup,
//! and `unshare` creates the cgroup namespace there. `init` sets up the node's file system and network and supervises
//! the components. When the init is killed, the kernel kills every process of the node and drops every mount.
//!
//! `unshare(1)` replaces `unshare(2)`, because the system call cannot be made from safe Rust.

mod filesystem;
mod forward;
mod netlink;
mod network;
mod runtime;
mod supervisor;

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::cgroup::{LAUNCH, Layout};
use crate::config::{NodeIndex, STATE_DIR};
use crate::plan::{NodePlan, Plan};
use crate::state::{NodeDir, StateDir};
use supervisor::Supervisor;

/// Entry point of the program `drava-node`.
#[must_use]
pub fn main() -> ExitCode {
    match run(env::args_os().skip(1).collect()) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("drava-node: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Never returned on success: each step replaces the process with the next step.
enum Never {}

fn run(args: Vec<OsString>) -> Result<Never> {
    let mut args = args.into_iter();
    let step = args.next().unwrap_or_default();
    if step == "runc" {
        return runtime::run(&args.collect::<Vec<_>>());
    }
    let node = Node::read(&mut args)?;
    match step.to_str() {
        Some("launch") => launch(&node),
        Some("enter") => enter(&node),
        Some("init") => init(&node),
        _ => bail!(
            "unknown step {}: `cargo xtask cluster up` starts this program",
            step.display()
        ),
    }
}

/// The node that a step starts, and the arguments that name it.
struct Node {
    state: StateDir,
    dir: NodeDir,
    plan: Plan,
    /// [`Plan::api_port`] of the start.
    start: u16,
    node: NodePlan,
}

impl Node {
    fn read(args: &mut impl Iterator<Item = OsString>) -> Result<Self> {
        let mut next = |what: &str| args.next().with_context(|| format!("{what} is missing"));
        let state = StateDir::new(Path::new(&next("the state directory")?))?;
        let name = next("the name of the node")?.display().to_string();
        let start = next("the port of the API server")?.display().to_string();
        let plan = state
            .read_plan()?
            .with_context(|| format!("{} has no plan.json", state.path().display()))?;
        let node = plan
            .node(&name)
            .with_context(|| format!("the plan has no node {name}"))?
            .clone();
        Ok(Self {
            dir: state.node(&name),
            start: start
                .parse()
                .with_context(|| format!("parse the port {start}"))?,
            state,
            plan,
            node,
        })
    }

    /// Returns the command line of another step for the same node.
    fn step(&self, step: &str) -> Result<Command> {
        let program = env::current_exe().context("find this program")?;
        let name = self.node.index.name();
        Ok(step_command(&program, step, &self.state, &name, self.start))
    }
}

fn step_command(program: &Path, step: &str, state: &StateDir, node: &str, start: u16) -> Command {
    let mut command = Command::new(program);
    command
        .arg(step)
        .arg(state.path())
        .args([node, &start.to_string()]);
    command
}

/// Returns the command line of `launch`. Standard input must be the API server's listener on the host for the node with
/// the control plane, and that node's network namespace for every other node.
pub(crate) fn launch_command(
    program: &Path,
    state: &StateDir,
    plan: &Plan,
    node: &NodePlan,
) -> Command {
    let name = node.index.name();
    let mut command = step_command(program, "launch", state, &name, plan.api_port);
    command.current_dir("/").env_clear();
    command.env("PATH", env::var_os("PATH").unwrap_or_default());
    command
}

fn launch(node: &Node) -> Result<Never> {
    let lock = node.dir.lock();
    let held = File::create(&lock).with_context(|| format!("open {}", lock.display()))?;
    flock(&held, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("lock {}: another node runs there", lock.display()))?;
    // The lock must live as long as the node's init, which replaces this process in two steps.
    fcntl_setfd(&held, FdFlags::empty()).context("keep the lock")?;
    if node.start != node.plan.api_port {
        bail!("a later start has replaced this start");
    }
    Layout::detect()?.enter(&node.plan.cgroup, LAUNCH)?;
    // Signals of the terminal concern the command, not the node.
    rustix::process::setsid().context("leave the terminal's session")?;
    let namespaces = [
        "--mount",
        "--pid",
        "--net",
        "--uts",
        "--ipc",
        "--propagation=private",
        "--fork",
        "--kill-child",
    ];
    unshare(&namespaces, &node.step("enter")?)
}

fn enter(node: &Node) -> Result<Never> {
    Layout::detect()?.enter(&node.plan.cgroup, &node.node.index.name())?;
    unshare(&["--cgroup"], &node.step("init")?)
}

/// Replaces this process with `command` in new namespaces.
fn unshare(namespaces: &[&str], command: &Command) -> Result<Never> {
    become_program(
        Command::new("unshare")
            .args(namespaces)
            .arg("--")
            .arg(command.get_program())
            .args(command.get_args()),
    )
}

fn init(node: &Node) -> Result<Never> {
    let index = node.node.index;
    let input = standard_input()?;
    filesystem::assemble(&node.dir, index, &node.plan)?;
    rustix::system::sethostname(index.name().as_bytes()).context("set the node's host name")?;
    let attached = if index == NodeIndex::CONTROL_PLANE {
        network::carry_service(index)
            .and_then(|()| forward::start(input.into()).context("forward the API server's port"))
    } else {
        network::attach(index, NodeIndex::CONTROL_PLANE, &input)
    };
    attached.context("set up the node's network")?;
    let socket = Path::new(STATE_DIR).join("control.sock");
    let _ = fs::remove_file(&socket);
    let control =
        UnixListener::bind(&socket).with_context(|| format!("listen on {}", socket.display()))?;
    let processes = node.node.processes.clone();
    Supervisor::new(processes, PathBuf::from(STATE_DIR).join("logs")).run(&control)
}

/// Returns the file that `up` passed as standard input; see [`launch_command`].
fn standard_input() -> Result<OwnedFd> {
    std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("open standard input")
}

fn become_program(command: &mut Command) -> Result<Never> {
    let error = command.exec();
    Err(error).with_context(|| format!("run {}", command.get_program().display()))
}
