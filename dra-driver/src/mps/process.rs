//! Processes of the node driver that become programs of MPS.
//!
//! The daemon leaves the pod of the node driver: it has a session, cgroups and a mount namespace of its own, whose root is the
//! driver root. `/tmp` and `/dev` there are its own, since all daemons have the same paths in it. Nothing is written to the driver
//! root.

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
use crate::gpus::mps_programs::{CONTROL, PATH};
use crate::node::process::start_time;

/// First argument of the process that becomes a daemon.
pub(super) const DAEMON: &str = "mps-daemon";

/// First argument of the process that gives a daemon the command on its standard input.
pub(super) const COMMAND: &str = "mps-command";

/// File of the daemon's process.
pub(super) const RECORD: &str = "daemon.json";

/// Mount point of the daemon's root.
const ROOT: &str = "root";

/// Directories of its root that are not those of the driver root.
const OWN: [&str; 4] = ["dev", "proc", "sys", "tmp"];

/// Device files of every program.
const DEVICES: [&str; 5] = ["full", "null", "random", "urandom", "zero"];

/// Log directory of the daemon in its root.
pub(super) const LOG_DIRECTORY: &str = "/tmp/nvidia-log";

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
    let root = dir.join(ROOT);
    lay_out(&root, dir, driver_root, device_root)?;
    std::env::set_current_dir(&root)?;
    let pivoted = rustix::process::pivot_root(".", ".");
    pivoted.map_err(|error| at("make a root of", &root, &error.into()))?;
    // What the pod of the node driver has mounted ends with it.
    rustix::mount::unmount(".", UnmountFlags::DETACH)?;
    // Programs of a namespace have any user: without this option each user would wait for the end of the others.
    let program = Command::new(CONTROL)
        .args(["-f", "-multiuser-server"])
        .current_dir("/")
        .env_clear()
        .env("PATH", PATH)
        .env("CUDA_VISIBLE_DEVICES", gpu)
        .env("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIRECTORY)
        .env("CUDA_MPS_LOG_DIRECTORY", LOG_DIRECTORY)
        .exec();
    Err(at("run", Path::new(CONTROL), &program))
}

/// Mounts the root of the daemon: the driver root, with directories of its own where programs write, and with the device files of
/// the GPUs. It does not depend on what else the driver root has.
fn lay_out(
    root: &Path,
    dir: &Path,
    driver_root: &Path,
    device_root: Option<&Path>,
) -> io::Result<()> {
    let made = fs::create_dir_all(root);
    made.map_err(|error| at("create", root, &error))?;
    let mounted = rustix::mount::mount(
        "tmpfs",
        root,
        "tmpfs",
        MountFlags::NOSUID,
        Some(c"mode=755"),
    );
    mounted.map_err(|error| at("mount a tmpfs on", root, &error.into()))?;
    for entry in read_dir(driver_root)? {
        let name = entry.file_name();
        if !OWN.iter().any(|own| name == *own) {
            bind(&entry.path(), &root.join(name))?;
        }
    }
    for shown in ["proc", "sys"] {
        bind(&Path::new("/").join(shown), &root.join(shown))?;
    }
    for created in ["dev", "tmp"] {
        let created = root.join(created);
        fs::create_dir(&created).map_err(|error| at("create", &created, &error))?;
    }
    let dev = device_root.unwrap_or(driver_root).join("dev");
    for entry in read_dir(&dev)? {
        let name = entry.file_name();
        let text = name.to_string_lossy();
        if text.starts_with("nvidia") || DEVICES.contains(&&*text) {
            bind(&entry.path(), &root.join("dev").join(name))?;
        }
    }
    for (from, inside) in [
        ("shm", "/dev/shm"),
        ("pipe", PIPE_DIRECTORY),
        ("log", LOG_DIRECTORY),
    ] {
        bind(&dir.join(from), &root.join(inside.trim_start_matches('/')))?;
    }
    Ok(())
}

fn read_dir(directory: &Path) -> io::Result<Vec<fs::DirEntry>> {
    let entries = fs::read_dir(directory).and_then(Iterator::collect);
    entries.map_err(|error| at("read", directory, &error))
}

/// Shows a file, a directory or a link elsewhere.
fn bind(from: &Path, to: &Path) -> io::Result<()> {
    let failed = |error| at("show", from, &error);
    let kind = fs::symlink_metadata(from).map_err(failed)?.file_type();
    if kind.is_symlink() {
        let target = fs::read_link(from).map_err(failed)?;
        return std::os::unix::fs::symlink(target, to).map_err(failed);
    }
    let made = match kind.is_dir() {
        true => fs::create_dir(to),
        false => fs::File::create(to).map(drop),
    };
    made.map_err(failed)?;
    rustix::mount::mount_bind_recursive(from, to).map_err(|error| failed(error.into()))
}

fn become_command(root: &Path) -> io::Result<Infallible> {
    rustix::process::chroot(root)?;
    let program = Command::new(CONTROL)
        .current_dir("/")
        .env_clear()
        .env("PATH", PATH)
        .env("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIRECTORY)
        .exec();
    Err(at("run", Path::new(CONTROL), &program))
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
            if let Err(error) = entered {
                // In the log of the daemon.
                let root = root.display();
                eprintln!(
                    "the daemon stays in the cgroup of drava's pod in {root} and ends with it: {error}"
                );
            }
        }
    }
}

fn at(operation: &str, path: &Path, error: &io::Error) -> io::Error {
    let path = path.display();
    io::Error::new(error.kind(), format!("cannot {operation} {path}: {error}"))
}
