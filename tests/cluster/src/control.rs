//! How commands on the host talk to the node's init: one JSON line each way over a Unix socket in the state directory.

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

/// What the init is asked to do. Every answer tells how the components are doing afterwards.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Request {
    /// Nothing.
    Status,
    /// Start a stopped component, or one that waits to be restarted, now.
    Start(Component),
    /// End a component, first politely, and leave it stopped.
    Stop(Component),
    /// Send a signal (by its number) to a component's process.
    Signal(Component, i32),
}

/// The init's answer.
pub(crate) type Response = std::result::Result<Vec<ComponentStatus>, String>;

/// How a component is doing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComponentStatus {
    /// Which one.
    pub component: Component,
    /// What it is doing.
    #[serde(flatten)]
    pub phase: Phase,
    /// How often it was started again after it had ended by itself.
    pub restarts: u32,
}

/// Where a component is in its life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "phase")]
pub enum Phase {
    /// Not started yet, for want of another.
    Waiting {
        /// The component that has to answer first.
        needs: Component,
    },
    /// Its process runs, but does not answer yet.
    Starting {
        /// Process id inside the node.
        pid: i32,
    },
    /// It answers.
    Ready {
        /// Process id inside the node.
        pid: i32,
    },
    /// It ended by itself and will be started again.
    Failed {
        /// How it ended.
        reason: String,
    },
    /// It was told to end and has not yet.
    Stopping {
        /// Process id inside the node.
        pid: i32,
    },
    /// It was told to end, and did.
    Stopped,
}

/// A connection to the init of a running node.
pub(crate) struct Control {
    stream: UnixStream,
    /// The init's process id on the host.
    pub(crate) init: Pid,
}

impl Control {
    /// Connects to the init behind `socket`; none if no node runs there.
    pub(crate) fn connect(socket: &Path) -> Option<Self> {
        // By way of the directory, for a state directory's path may be longer than a socket address.
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
    pub(crate) fn ask(mut self, request: Request) -> Result<Vec<ComponentStatus>> {
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        self.stream
            .write_all(&line)
            .context("ask the node's init")?;
        let mut answer = String::new();
        BufReader::new(self.stream)
            .read_line(&mut answer)
            .context("read the answer of the node's init")?;
        match serde_json::from_str::<Response>(&answer)
            .context("the node's init ended before it answered")?
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
    fn status_is_plain_to_read_for_scripts() {
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
