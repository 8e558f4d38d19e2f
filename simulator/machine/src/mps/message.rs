//! Messages between the control daemon, clients and the shell.

use serde::{Deserialize, Serialize};

use crate::protocol::Refusal;

/// To the control daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum ToDaemon {
    /// A client asks for a server.
    Connect,
    /// A line of the shell.
    Command(String),
}

/// From the control daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum FromDaemon {
    /// The client may join the server with this file in shared memory.
    Server {
        /// File name.
        shared: String,
    },
    /// No server takes the client.
    Refused(Refusal),
    /// Answer to a command.
    Text(String),
}
