//! The fabric manager: the program `nv-fabricmanager` of a driver root with NVSwitches is this program under that name.
//!
//! It connects to the machine and runs until it is killed or the machine ends. Without it, CUDA fails with error 802 on GPUs
//! before Hopper; registrations of later GPUs are faults of [`crate::kernel::Faults`].

use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use crate::client::Connection;
use crate::protocol::ClientKind;
use crate::root::{DriverRoot, FABRIC_MANAGER};

/// What it writes once the GPUs can be used.
const READY: &str = "ready\n";

/// Starts the fabric manager of a driver root. Returns once the GPUs can be used.
///
/// # Errors
/// If the program cannot be started, or ends at once.
pub fn start(root: &Path) -> io::Result<Child> {
    let mut process = Command::new(root.join("usr/bin").join(FABRIC_MANAGER))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    if let Some(output) = process.stdout.take() {
        BufReader::new(output).read_line(&mut line)?;
    }
    if line == READY {
        return Ok(process);
    }
    let status = process.wait()?;
    Err(io::Error::other(format!("{FABRIC_MANAGER}: {status}")))
}

/// Runs the fabric manager if this process was started as it; `None` if it is another program. It writes "ready" once the GPUs
/// can be used.
pub fn run_program() -> Option<ExitCode> {
    let program = PathBuf::from(std::env::args_os().next()?);
    if program.file_name()? != FABRIC_MANAGER {
        return None;
    }
    let root = DriverRoot::of_library(Some(&program));
    Some(match Connection::open(&root, ClientKind::FabricManager) {
        Ok((mut connection, _)) => {
            // The parent may have closed the pipe.
            let _ = io::stdout().write_all(READY.as_bytes());
            while connection.next_event(Duration::from_secs(60)).is_ok() {}
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "cannot start the fabric manager: {error}");
            ExitCode::FAILURE
        }
    })
}
