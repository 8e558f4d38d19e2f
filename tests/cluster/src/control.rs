//! Protocol between commands on the host and the node's init: one JSON line each way over a Unix socket in the state
//! directory.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::component::Component;

/// A request to the init. Every response reports the state of the components after the request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// Report only.
    Status,
    /// Start a stopped component, or one in back-off, at once.
    Start(Component),
    /// End a component with SIGTERM, later SIGKILL, and leave it stopped.
    Stop(Component),
    /// Send the signal with this number to a component's process.
    Signal(Component, i32),
}

/// Response of the init.
pub(crate) type Response = std::result::Result<Vec<ComponentStatus>, String>;

/// State of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentStatus {
    /// Component.
    pub component: Component,
    /// Phase.
    #[serde(flatten)]
    pub phase: Phase,
    /// Number of restarts after the process had ended by itself.
    pub restarts: u32,
}

impl ComponentStatus {
    /// Whether the component answers.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self.phase, Phase::Ready { .. })
    }
}

/// Phase of a component.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Phase {
    /// Not started: a dependency is not ready.
    Waiting {
        /// Dependency that is not ready.
        needs: Component,
    },
    /// The process runs, but is not ready.
    Starting {
        /// Process id inside the node.
        pid: i32,
    },
    /// The process runs and is ready.
    Ready {
        /// Process id inside the node.
        pid: i32,
    },
    /// The process ended by itself and will be restarted.
    Failed {
        /// How the process ended.
        reason: String,
    },
    /// The process received SIGTERM and has not ended.
    Stopping {
        /// Process id inside the node.
        pid: i32,
    },
    /// The process was stopped on request.
    Stopped,
}

/// A connection to the init of a running node.
pub(crate) struct Control {
    stream: UnixStream,
    /// The init's process id on the host.
    pub(crate) init: Pid,
}

impl Control {
    /// Connects to the init behind `socket`; returns `None` if no node runs there.
    pub(crate) fn connect(socket: &Path) -> Option<Self> {
        // Connects through the directory, because a state directory's path may exceed the length of a socket address.
        let dir = File::open(socket.parent()?).ok()?;
        let address = format!(
            "/proc/self/fd/{}/{}",
            dir.as_raw_fd(),
            socket.file_name()?.to_str()?
        );
        let stream = UnixStream::connect(address).ok()?;
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .ok()?;
        let init = rustix::net::sockopt::socket_peercred(&stream).ok()?.pid;
        Some(Self { stream, init })
    }

    /// Sends one request.
    pub(crate) fn send(mut self, request: Request) -> Result<Vec<ComponentStatus>> {
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        self.stream
            .write_all(&line)
            .context("send a request to the node's init")?;
        let mut answer = String::new();
        BufReader::new(self.stream)
            .read_line(&mut answer)
            .context("read the response of the node's init")?;
        match serde_json::from_str::<Response>(&answer)
            .context("the node's init ended without a response")?
        {
            Ok(components) => Ok(components),
            Err(message) => bail!(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_json_is_stable() {
        let status = ComponentStatus {
            component: Component::Kubelet,
            phase: Phase::Ready { pid: 41 },
            restarts: 1,
        };
        let text = serde_json::to_string(&status).unwrap();
        assert_eq!(
            text,
            r#"{"component":"kubelet","phase":"ready","pid":41,"restarts":1}"#
        );
        assert_eq!(
            serde_json::from_str::<ComponentStatus>(&text).unwrap(),
            status
        );
    }
}
