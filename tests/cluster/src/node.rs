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
mod network;
mod runtime;
mod supervisor;

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::net::TcpListener;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::cgroup::Layout;
use crate::config::{NODE_NAME, STATE_DIR};
use crate::plan::Plan;
use crate::state::StateDir;
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
    let state = StateDir::new(Path::new(
        &args.next().context("the state directory is missing")?,
    ))?;
    match step.to_str() {
        Some("launch") => launch(&state),
        Some("enter") => enter(&state),
        Some("init") => init(&state),
        _ => bail!(
            "unknown step {}: `cargo xtask cluster up` starts this program",
            step.display()
        ),
    }
}

/// Returns the command line of `launch`; standard input must be the API server's listener on the host.
pub(crate) fn launch_command(program: &Path, state: &StateDir) -> Command {
    let mut command = Command::new(program);
    command
        .arg("launch")
        .arg(state.path())
        .current_dir("/")
        .env_clear();
    command.env("PATH", env::var_os("PATH").unwrap_or_default());
    command
}

fn launch(state: &StateDir) -> Result<Never> {
    let lock = state.node_lock();
    let held = File::create(&lock).with_context(|| format!("open {}", lock.display()))?;
    flock(&held, FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("lock {}: another node runs there", lock.display()))?;
    // The lock must live as long as the node's init, which replaces this process in two steps.
    fcntl_setfd(&held, FdFlags::empty()).context("keep the lock")?;
    let plan = read_plan(state)?;
    let port = host_listener()?
        .local_addr()
        .context("identify the API server's listener")?
        .port();
    if port != plan.api_port {
        bail!("a later start has replaced this start");
    }
    Layout::detect()?.enter(&plan.cgroup, "launch")?;
    // Signals of the terminal concern the command, not the node.
    rustix::process::setsid().context("leave the terminal's session")?;
    become_program(
        Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--net",
                "--uts",
                "--ipc",
                "--propagation=private",
                "--fork",
                "--kill-child",
                "--",
            ])
            .arg(this_program()?)
            .arg("enter")
            .arg(state.path()),
    )
}

fn enter(state: &StateDir) -> Result<Never> {
    Layout::detect()?.enter(&read_plan(state)?.cgroup, "node")?;
    become_program(
        Command::new("unshare")
            .args(["--cgroup", "--"])
            .arg(this_program()?)
            .arg("init")
            .arg(state.path()),
    )
}

fn init(state: &StateDir) -> Result<Never> {
    let plan = read_plan(state)?;
    let listener = host_listener()?;
    filesystem::assemble(state, &plan)?;
    rustix::system::sethostname(NODE_NAME.as_bytes()).context("set the node's host name")?;
    network::configure().context("set up the node's network")?;
    forward::start(listener).context("forward the API server's port")?;
    let socket = Path::new(STATE_DIR).join("control.sock");
    let _ = fs::remove_file(&socket);
    let control =
        UnixListener::bind(&socket).with_context(|| format!("listen on {}", socket.display()))?;
    Supervisor::new(plan.processes, PathBuf::from(STATE_DIR).join("logs")).run(&control)
}

fn read_plan(state: &StateDir) -> Result<Plan> {
    state
        .read_plan()?
        .with_context(|| format!("{} has no plan.json", state.path().display()))
}

/// Returns the listening socket of the host's network namespace, passed by `up` as standard input.
fn host_listener() -> Result<TcpListener> {
    let fd: OwnedFd = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .context("open the API server's listener")?;
    Ok(TcpListener::from(fd))
}

fn this_program() -> Result<PathBuf> {
    env::current_exe().context("find this program")
}

fn become_program(command: &mut Command) -> Result<Never> {
    let error = command.exec();
    Err(error).with_context(|| format!("run {}", command.get_program().display()))
}
