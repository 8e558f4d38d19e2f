//! The control socket of tests and `simulator-machine ctl`.

use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use crate::client::{ClientError, connected};
use crate::kernel::{Faults, MachineStatus};
use crate::protocol::{GpuEvent, GpuIndex, MigRequest, Refusal};
use crate::root::DriverRoot;
use crate::wire;

/// From a controller to the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Report the machine's state.
    Status,
    /// Raise an event on a GPU.
    Raise(GpuEvent),
    /// Reset a GPU: instances are destroyed and a pending MIG mode takes effect.
    Reset {
        /// GPU index.
        gpu: GpuIndex,
    },
    /// Restart the high-water mark of a GPU's memory.
    ResetPeak {
        /// GPU index.
        gpu: GpuIndex,
    },
    /// Change the MIG mode or the instances of a GPU as an administrator.
    Mig {
        /// GPU index.
        gpu: GpuIndex,
        /// The change.
        request: MigRequest,
    },
    /// Set the faults of a GPU.
    Break {
        /// GPU index.
        gpu: GpuIndex,
        /// Faults; the default is none.
        faults: Faults,
    },
}

/// From the daemon to a controller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// To [`Command::Status`].
    Status(MachineStatus),
    /// The command was carried out.
    Done,
    /// The command was rejected.
    Refused(Refusal),
}

/// Sends one command to the daemon of a driver root.
///
/// # Errors
/// If no daemon answers.
pub fn send(root: &DriverRoot, command: &Command) -> Result<Answer, ClientError> {
    let socket = connected(&root.control_socket())?;
    wire::send(socket.as_fd(), command, &[])?;
    match wire::receive(socket.as_fd(), &mut Vec::new())? {
        (Answer::Refused(refusal), _) => Err(refusal.into()),
        (answer, _) => Ok(answer),
    }
}
