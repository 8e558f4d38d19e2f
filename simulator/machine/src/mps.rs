//! Multi-process service (MPS): the control daemon, its servers, and what a client does at `cuInit`.
//!
//! The programs `nvidia-cuda-mps-control` and `nvidia-cuda-mps-server` of a driver root are this program under their names. The
//! control daemon has a socket in the pipe directory and starts servers; a server is a client of the machine that owns the
//! contexts whose time slices its clients share, and has a file in `/dev/shm` with the secret that a client needs.
//!
//! Decisions about clients and faults are in [`crate::kernel`].

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::root::{DriverRoot, MPS_CONTROL, MPS_SERVER};

mod background;
pub mod client;
mod command;
mod control;
mod credentials;
mod log;
mod message;
mod report;
mod server;
mod shell;

/// Names the directory of the control daemon's socket.
pub const PIPE_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// Names the directory of the log files.
pub const LOG_VARIABLE: &str = "CUDA_MPS_LOG_DIRECTORY";
/// Limit of the threads of a client, and of all clients of a daemon's servers.
pub const PERCENTAGE_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// Shared memory of servers and clients.
const SHARED_MEMORY: &str = "/dev/shm";

/// Runs the program of the service that this process was started as; `None` if it is another program.
pub fn run_program() -> Option<ExitCode> {
    let mut arguments = env::args_os();
    let name = PathBuf::from(arguments.next()?);
    let arguments: Vec<String> = arguments
        .map(|argument| argument.to_string_lossy().into_owned())
        .collect();
    match name.file_name()?.to_str()? {
        MPS_CONTROL => Some(shell::run(&name, &arguments)),
        MPS_SERVER => Some(server::run(&name, &arguments)),
        _ => None,
    }
}

fn pipe_directory() -> PathBuf {
    directory(PIPE_VARIABLE, "/tmp/nvidia-mps")
}

fn log_directory() -> PathBuf {
    directory(LOG_VARIABLE, "/var/log/nvidia-mps")
}

fn directory(variable: &str, default: &str) -> PathBuf {
    env::var_os(variable)
        .filter(|path| !path.is_empty())
        .map_or_else(|| default.into(), PathBuf::from)
}

/// The control daemon's socket.
fn control_socket() -> PathBuf {
    pipe_directory().join("control")
}

/// Returns the driver root of a program. In a `chroot` without `/proc` the program is found by name, and its root is `/`.
fn root_of(program: &Path) -> DriverRoot {
    let path = match is_bare(program) {
        true => env::current_exe().ok(),
        false => Some(program.to_owned()),
    };
    DriverRoot::of_library(path.as_deref())
}

/// Returns how to start another program of the service: next to this one, or from `PATH` if this one was found there.
fn sibling(program: &Path, name: &str) -> PathBuf {
    match is_bare(program) {
        true => name.into(),
        false => program.with_file_name(name),
    }
}

fn is_bare(program: &Path) -> bool {
    program
        .parent()
        .is_none_or(|parent| parent == OsStr::new(""))
}
