//! Processes of the node driver that become programs of MPS.
//!
//! The daemon leaves the pod of the node driver: it has a session, cgroups and a mount namespace of its own, whose root is the
//! driver root. `/tmp` and `/dev/shm` there are its own, since all daemons have the same paths in it. Nothing is written to the
//! driver root.

use std::convert::Infallible;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

use super::{Daemon, PIPE_DIRECTORY};
use crate::node::process::start_time;

/// First argument of the process that becomes a daemon.
pub(super) const DAEMON: &str = "mps-daemon";

/// First argument of the process that gives a daemon the command on its standard input.
pub(super) const COMMAND: &str = "mps-command";

/// File of the daemon's process.
pub(super) const RECORD: &str = "daemon.json";

const PROGRAM: &str = "nvidia-cuda-mps-control";

const LOG_DIRECTORY: &str = "/tmp/nvidia-log";

/// Where the driver root may have the program.
const PATH: &str = "/usr/bin:/usr/local/bin:/bin:/usr/sbin:/opt/bin:/usr/local/nvidia/bin";

const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Cgroup of the daemons.
const CGROUP: &str = "drava-mps";

/// Runs if the arguments of the process say so; `None` for all other arguments. Returns only on an error.
#[must_use]
pub fn run(arguments: std::env::ArgsOs) -> Option<ExitCode> {
    let arguments: Vec<OsString> = arguments.skip(1).collect();
    let failed = match arguments.as_slice() {
        [kind, dir, driver_root, device_root, gpu] if kind == DAEMON => {
            let device_root = Some(PathBuf::from(device_root));
            let device_root = device_root.filter(|root| !root.as_os_str().is_empty());
            become_daemon(
                Path::new(dir),
                Path::new(driver_root),
                device_root.as_deref(),
                gpu,
            )
        }
        [kind, root] if kind == COMMAND => become_command(Path::new(root)),
        _ => return None,
    };
    let Err(error) = failed;
    eprintln!("{error}");
    Some(ExitCode::FAILURE)
}

fn become_daemon(
    dir: &Path,
    driver_root: &Path,
    device_root: Option<&Path>,
    gpu: &OsString,
) -> io::Result<Infallible> {
    rustix::process::setsid()?;
    leave_cgroups();
    record(dir)?;
    #[expect(
        deprecated,
        reason = "unsafe only for threads that share file descriptors, and this process has one thread"
    )]
    rustix::thread::unshare(UnshareFlags::NEWNS)?;
    rustix::mount::mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )?;
    let bind = |from: &Path, to: &Path| {
        let bound = rustix::mount::mount_bind_recursive(from, to);
        bound.map_err(|error| at("mount on", to, error.into()))
    };
    // A root must be a mount point.
    bind(driver_root, driver_root)?;
    if let Some(devices) = device_root {
        bind(&devices.join("dev"), &driver_root.join("dev"))?;
    }
    if !driver_root.join("proc/self").exists() {
        bind(Path::new("/proc"), &driver_root.join("proc"))?;
    }
    bind(&dir.join("shm"), &driver_root.join("dev/shm"))?;
    let tmp = driver_root.join("tmp");
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let mounted = rustix::mount::mount("tmpfs", &tmp, "tmpfs", flags, Some(c"mode=755"));
    mounted.map_err(|error| at("mount a tmpfs on", &tmp, error.into()))?;
    for (from, inside) in [("pipe", PIPE_DIRECTORY), ("log", LOG_DIRECTORY)] {
        let to = driver_root.join(inside.trim_start_matches('/'));
        fs::create_dir(&to).map_err(|error| at("create", &to, error))?;
        bind(&dir.join(from), &to)?;
    }
    std::env::set_current_dir(driver_root)?;
    let pivoted = rustix::process::pivot_root(".", ".");
    pivoted.map_err(|error| at("make a root of", driver_root, error.into()))?;
    // What the pod of the node driver has mounted ends with it.
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    // Programs of a namespace have any user: without this option each user would wait for the end of the others.
    let program = Command::new(PROGRAM)
        .args(["-f", "-multiuser-server"])
        .current_dir("/")
        .env_clear()
        .env("PATH", PATH)
        .env("CUDA_VISIBLE_DEVICES", gpu)
        .env("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIRECTORY)
        .env("CUDA_MPS_LOG_DIRECTORY", LOG_DIRECTORY)
        .exec();
    Err(at("run", Path::new(PROGRAM), program))
}

fn become_command(root: &Path) -> io::Result<Infallible> {
    rustix::process::chroot(root)?;
    let program = Command::new(PROGRAM)
        .current_dir("/")
        .env_clear()
        .env("PATH", PATH)
        .env("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIRECTORY)
        .exec();
    Err(at("run", Path::new(PROGRAM), program))
}

/// Writes which process becomes the daemon.
fn record(dir: &Path) -> io::Result<()> {
    let pid = std::process::id();
    let start_time = start_time(Path::new("/proc"), pid);
    let start_time = start_time.ok_or(io::ErrorKind::NotFound)?;
    let json = serde_json::to_vec(&Daemon { pid, start_time })?;
    crate::node::files::write_atomically(&dir.join(RECORD), &json, 0o600)
}

/// Leaves the cgroups of the pod, whose end kills what is in them. A hierarchy that refuses is left out: the daemon is started
/// again when it has ended.
fn leave_cgroups() {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let enter = |directory: &Path| fs::write(directory.join("cgroup.procs"), "0");
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let controllers = fields.next().unwrap_or_default();
        let hierarchies = match controllers {
            "" => vec![
                PathBuf::from(CGROUP_ROOT),
                Path::new(CGROUP_ROOT).join("unified"),
            ],
            controllers => {
                let name = controllers.trim_start_matches("name=");
                vec![Path::new(CGROUP_ROOT).join(name)]
            }
        };
        for root in hierarchies {
            if !root.join("cgroup.procs").exists() {
                continue;
            }
            // Only cgroup v2 lets a new cgroup take processes in every case.
            let own = root.join(CGROUP);
            let entered = match controllers {
                "" => fs::create_dir_all(&own).and_then(|()| enter(&own)),
                _ => enter(&root),
            };
            let _ = entered;
        }
    }
}

fn at(operation: &str, path: &Path, error: io::Error) -> io::Error {
    let path = path.display();
    io::Error::new(error.kind(), format!("cannot {operation} {path}: {error}"))
}
