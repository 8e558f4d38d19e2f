//! The fabric manager: the program `nv-fabricmanager` of a driver root with NVSwitches is this program under that name.
//!
//! It connects to the machine and runs until it is killed or the machine ends. Without it, CUDA fails with error 802 on GPUs
//! before Hopper; registrations of later GPUs are faults of [`crate::kernel::Faults`].

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::client::Connection;
use crate::protocol::ClientKind;
use crate::root::{DriverRoot, FABRIC_MANAGER};

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
            // Nobody may read it.
            let _ = writeln!(io::stdout(), "ready");
            while connection.next_event(Duration::from_secs(60)).is_ok() {}
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "cannot start the fabric manager: {error}");
            ExitCode::FAILURE
        }
    })
}
