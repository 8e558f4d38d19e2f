//! Processes that a client sees, and their PIDs.
//!
//! Depends on the driver version. Since the 515 branch the kernel module translates PIDs to the
//! caller's PID namespace and omits processes outside of it (`os_find_ns_pid`,
//! `gpuGetProcWithObject` in open-gpu-kernel-modules): a container sees its own processes, the host
//! sees all. Older drivers show all processes by host PID. Some virtual machines and sandboxes show
//! a container nothing.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::description::ProcessIds;
use crate::protocol::{AccountingReply, AccountingRequest, MpsReply, MpsRequest, Reply, Request};

/// The PID namespace of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Namespace {
    /// The daemon's namespace.
    Own,
    /// A namespace below the daemon's.
    Inner {
        /// Inode of the namespace.
        inode: u64,
        /// Depth below the namespace of `/proc`.
        depth: usize,
    },
    /// The process ended before it could be checked.
    Unknown,
}

impl Namespace {
    /// The namespace of a process.
    pub(super) fn of(pid: u32) -> Self {
        let (Some(own), Some(inode), Some(pids)) = (
            inode_of("self"),
            inode_of(&pid.to_string()),
            namespace_pids(pid),
        ) else {
            return Self::Unknown;
        };
        if own == inode {
            return Self::Own;
        }
        let depth = pids.len();
        Self::Inner { inode, depth }
    }
}

fn inode_of(process: &str) -> Option<u64> {
    let link = format!("/proc/{process}/ns/pid");
    Some(fs::metadata(link).ok()?.ino())
}

/// PIDs of a process, from the namespace of the mounted `/proc` down to its own.
fn namespace_pids(pid: u32) -> Option<Vec<u32>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace()
        .map(|pid| pid.parse().ok())
        .collect()
}

/// Returns the PID of a process in a client's namespace if it contains the process.
///
/// Processes in nested namespaces of the client's are not found: `/proc` does not show them, and no
/// container runtime nests this way by default.
fn translate(pid: u32, namespace: Namespace) -> Option<u32> {
    match namespace {
        Namespace::Own => Some(pid),
        Namespace::Unknown => None,
        Namespace::Inner { inode, depth } => {
            if inode_of(&pid.to_string())? != inode {
                return None;
            }
            namespace_pids(pid)?.get(depth.checked_sub(1)?).copied()
        }
    }
}

/// Restricts the processes in a reply to those that the client sees.
pub(super) fn restrict(reply: &mut Reply, policy: ProcessIds, namespace: Namespace) {
    let seen = |pid| match policy {
        ProcessIds::Host => Some(pid),
        ProcessIds::Translated => translate(pid, namespace),
        ProcessIds::HiddenInContainers => (namespace == Namespace::Own).then_some(pid),
    };
    // The most frequent case.
    if namespace == Namespace::Own {
        return;
    }
    match reply {
        Reply::GpuState(state) => state.processes.retain_mut(|process| {
            let pid = seen(process.pid);
            process.pid = pid.unwrap_or(0);
            pid.is_some()
        }),
        // Processes of other namespaces are clients too.
        Reply::Mps(MpsReply::State(state)) => {
            for client in &mut state.clients {
                client.pid = seen(client.pid).unwrap_or(0);
            }
        }
        // Ended processes are in no namespace.
        Reply::Accounting(AccountingReply::State { pids, .. }) => {
            *pids = pids.iter().filter_map(|pid| seen(*pid)).collect();
        }
        Reply::Samples(samples) => {
            for sample in samples {
                sample.processes.retain_mut(|process| {
                    let pid = seen(process.pid);
                    process.pid = pid.unwrap_or(0);
                    pid.is_some()
                });
            }
        }
        _ => {}
    }
}

/// Translates the PID in a request to the daemon's; `pids` are the candidates.
pub(super) fn widen(
    request: &mut Request,
    policy: ProcessIds,
    namespace: Namespace,
    pids: impl IntoIterator<Item = u32>,
) {
    if namespace == Namespace::Own || policy != ProcessIds::Translated {
        return;
    }
    if let Request::Checkpoint { pid, .. }
    | Request::Mps(MpsRequest::Terminate { pid, .. })
    | Request::Accounting {
        request: AccountingRequest::Stats { pid },
        ..
    } = request
    {
        let meant = |candidate: &u32| translate(*candidate, namespace) == Some(*pid);
        // A PID without a process.
        *pid = pids.into_iter().find(meant).unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::{MpsClientState, MpsServerState, MpsStatus, ThreadPercentage};

    #[test]
    fn shows_clients_of_other_namespaces_without_pid() {
        let state = |pid| {
            Reply::Mps(MpsReply::State(MpsServerState {
                status: MpsStatus::Active,
                percentage: ThreadPercentage::ALL,
                clients: vec![MpsClientState {
                    pid,
                    gpus: Vec::new(),
                }],
            }))
        };
        let pid = std::process::id();
        for (namespace, shown) in [(Namespace::Own, pid), (Namespace::Unknown, 0)] {
            let mut reply = state(pid);
            restrict(&mut reply, ProcessIds::Translated, namespace);
            assert_eq!(reply, state(shown));
        }
    }

    #[test]
    fn resolves_namespaces_of_live_and_dead_processes() {
        assert_eq!(Namespace::of(std::process::id()), Namespace::Own);
        assert_eq!(Namespace::of(u32::MAX), Namespace::Unknown);
        assert_eq!(translate(std::process::id(), Namespace::Unknown), None);
    }
}
