//! Memory limits by the NVIDIA driver: the node driver is asked to limit the cgroup of the container.
//!
//! The hook only names the share and the cgroup. The node driver knows the amount, which can have changed since the CDI spec was
//! written, and is the only one that calls NVML. No variable of the image or the pod has a part in it.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::arguments::LimitedShare;
use crate::container::Container;

/// How long the hook waits for a node driver that restarts. The runtime then rejects the container, and kubelet tries again.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(100);
/// Longest wait for the answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Size limit of the answer.
const MAX_ANSWER: u64 = 4096;

/// The memory of the container could not be limited.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LimitError {
    #[error("cannot read the cgroup of process {pid}")]
    Process { pid: u32, source: io::Error },
    #[error("process {pid} has no cgroup of version 2")]
    NoCgroup { pid: u32 },
    #[error(
        "cannot ask the node driver at {socket} to limit GPU memory; the container starts when it runs again"
    )]
    Socket { socket: String, source: io::Error },
    #[error("the node driver cannot limit the GPU memory of the container: {0}")]
    Refused(String),
}

#[derive(Serialize)]
struct Request<'a> {
    claim: &'a str,
    share: &'a str,
    cgroup: &'a str,
}

/// Limits the memory of a container for a share.
pub(crate) fn apply(container: &Container, share: &LimitedShare) -> Result<(), LimitError> {
    let pid = container.pid;
    let cgroups = fs::read_to_string(format!("/proc/{pid}/cgroup"));
    let cgroups = cgroups.map_err(|source| LimitError::Process { pid, source })?;
    let cgroup = unified(&cgroups).ok_or(LimitError::NoCgroup { pid })?;
    let request = Request {
        claim: &share.claim,
        share: &share.share,
        cgroup,
    };
    match ask(&share.socket, &request) {
        Ok(answer) if answer.trim_end() == "ok" => Ok(()),
        Ok(answer) => Err(LimitError::Refused(answer.trim_end().to_owned())),
        Err(source) => Err(LimitError::Socket {
            socket: share.socket.clone(),
            source,
        }),
    }
}

/// Returns the cgroup of version 2 in `/proc/<pid>/cgroup`.
fn unified(cgroups: &str) -> Option<&str> {
    cgroups.lines().find_map(|line| line.strip_prefix("0::"))
}

fn ask(socket: &str, request: &Request<'_>) -> io::Result<String> {
    let mut stream = connect(socket)?;
    stream.set_read_timeout(Some(ANSWER))?;
    stream.set_write_timeout(Some(ANSWER))?;
    let mut line = serde_json::to_vec(request)?;
    line.push(b'\n');
    stream.write_all(&line)?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER).read_to_string(&mut answer)?;
    Ok(answer)
}

fn connect(socket: &str) -> io::Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match UnixStream::connect(socket) {
            Err(error) if is_transient(&error) && Instant::now() < deadline => sleep(RETRY),
            connected => return connected,
        }
    }
}

/// Returns whether a node driver that starts answers later.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_cgroup_of_version_2_only() {
        assert_eq!(unified("1:cpu:/a\n0::/b/c\n"), Some("/b/c"));
        assert_eq!(unified("1:cpu:/a\n"), None);
    }
}
