//! The control socket: what tests and `simulator-machine ctl` can see and do from outside.

use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use crate::client::{ClientError, connected};
use crate::kernel::{Faults, MachineStatus};
use crate::protocol::{CardEvent, CardIndex, Refusal};
use crate::root::DriverRoot;
use crate::wire;

/// From a controller to the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Report the machine's state.
    Status,
    /// Let something happen to a card.
    Raise(CardEvent),
    /// Reset a card: instances are gone and a pending MIG mode takes effect.
    Reset {
        /// Which card.
        card: CardIndex,
    },
    /// Break a card, or heal it.
    Break {
        /// Which card.
        card: CardIndex,
        /// How it fails from now on; the default is not at all.
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
    /// The command was refused.
    Refused(Refusal),
}

/// Sends one command to the daemon of a driver root.
///
/// # Errors
/// When no daemon answers.
pub fn send(root: &DriverRoot, command: &Command) -> Result<Answer, ClientError> {
    let socket = connected(&root.control_socket())?;
    wire::send(socket.as_fd(), command, &[])?;
    match wire::receive(socket.as_fd(), &mut Vec::new())? {
        (Answer::Refused(refusal), _) => Err(refusal.into()),
        (answer, _) => Ok(answer),
    }
}
