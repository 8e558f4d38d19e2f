//! What a client does at `cuInit`: it asks the control daemon for a server.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use crate::client::connected;
use crate::protocol::{MpsServerKey, Refusal, ThreadPercentage};
use crate::wire;

use super::message::{FromDaemon, ToDaemon};
use super::{PERCENTAGE_VARIABLE, SHARED_MEMORY, control_socket};

/// A server that the control daemon keeps until this is dropped, so that the process can join it.
#[derive(Debug)]
pub struct Offer {
    /// Names the server.
    pub key: MpsServerKey,
    _connection: OwnedFd,
}

/// Why a process that found a control daemon is no client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The daemon starts no server, has ended, or the server's shared memory is not accessible.
    #[error("no connection to the MPS control daemon or its server")]
    Failed,
    /// The daemon takes no client.
    #[error("the MPS server takes no client")]
    NotReady,
}

/// Asks the control daemon of the pipe directory for a server. Waits while clients of another user have the only server. Without
/// a daemon there is none: the process runs without MPS.
///
/// # Errors
/// If there is a daemon, and no server.
pub fn connect() -> Result<Option<Offer>, ConnectError> {
    let Ok(connection) = connected(&control_socket()) else {
        return Ok(None);
    };
    let failed = |_| ConnectError::Failed;
    wire::send(connection.as_fd(), &ToDaemon::Connect, &[]).map_err(failed)?;
    let (answer, _) = wire::receive(connection.as_fd(), &mut Vec::new()).map_err(failed)?;
    let shared = match answer {
        FromDaemon::Server { shared } => shared,
        FromDaemon::Refused(Refusal::MpsNotReady) => return Err(ConnectError::NotReady),
        FromDaemon::Refused(_) | FromDaemon::Text(_) => return Err(ConnectError::Failed),
    };
    let text = fs::read_to_string(Path::new(SHARED_MEMORY).join(shared));
    let key = text.ok().and_then(|text| parse_key(&text));
    Ok(Some(Offer {
        key: key.ok_or(ConnectError::Failed)?,
        _connection: connection,
    }))
}

/// The limit that this process sets itself; a value that is no percentage is none.
#[must_use]
pub fn own_percentage() -> Option<ThreadPercentage> {
    std::env::var(PERCENTAGE_VARIABLE).ok()?.parse().ok()
}

/// Text of a server's file in shared memory.
pub(super) fn format_key(key: MpsServerKey) -> String {
    format!("{} {}\n", key.server, key.secret)
}

pub(super) fn parse_key(text: &str) -> Option<MpsServerKey> {
    let (server, secret) = text.trim().split_once(' ')?;
    Some(MpsServerKey {
        server: server.parse().ok()?,
        secret: secret.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_key_that_a_server_wrote() {
        let key = MpsServerKey {
            server: 7,
            secret: u64::MAX,
        };
        assert_eq!(parse_key(&format_key(key)), Some(key));
        assert_eq!(parse_key("7"), None);
        assert_eq!(parse_key(""), None);
    }
}
