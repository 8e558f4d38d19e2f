//! Which processes a client is shown, and by which PIDs.
//!
//! What the driver does depends on its age. Since the 515 branch the kernel module looks every
//! process up in the PID namespace of whoever asks, and leaves out those that it does not contain
//! (`os_find_ns_pid`, `gpuGetProcWithObject` in open-gpu-kernel-modules): a container sees its own
//! processes, a host sees all. Before, everyone saw all processes by their PIDs on the host. Some
//! virtual machines and sandboxes show a container nothing.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::description::ProcessIds;
use crate::protocol::{AccountingReply, AccountingRequest, Reply, Request};

/// The PID namespace of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Namespace {
    /// The daemon's.
    Own,
    /// One below the daemon's.
    Inner {
        /// Inode of the namespace.
        inode: u64,
        /// How many namespaces it is below the root of what `/proc` shows.
        depth: usize,
    },
    /// The process was gone before it could be looked at.
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

/// A process's PIDs, from the namespace of the mounted `/proc` down to its own.
fn namespace_pids(pid: u32) -> Option<Vec<u32>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace()
        .map(|pid| pid.parse().ok())
        .collect()
}

/// The PID of a process in a client's namespace, where that contains it.
///
/// A process further down, in a namespace that the client's contains, is not found: this takes
/// more than `/proc` tells, and no container runtime nests that way by default.
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

/// Changes the processes in a reply to those that the client is shown.
pub(super) fn restrict(reply: &mut Reply, policy: ProcessIds, namespace: Namespace) {
    let seen = |pid| match policy {
        ProcessIds::Host => Some(pid),
        ProcessIds::Translated => translate(pid, namespace),
        ProcessIds::HiddenInContainers => (namespace == Namespace::Own).then_some(pid),
    };
    // Nothing to look up, which is by far the most frequent case.
    if namespace == Namespace::Own {
        return;
    }
    match reply {
        Reply::CardState(state) => state.processes.retain_mut(|process| {
            let pid = seen(process.pid);
            process.pid = pid.unwrap_or(0);
            pid.is_some()
        }),
        // Who is gone is in no namespace any more.
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

/// Changes the PID that a client asks about to the daemon's; `pids` are those that it could mean.
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
    | Request::Accounting {
        request: AccountingRequest::Stats { pid },
        ..
    } = request
    {
        let meant = |candidate: &u32| translate(*candidate, namespace) == Some(*pid);
        // No process has this one.
        *pid = pids.into_iter().find(meant).unwrap_or(u32::MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_in_its_own_namespace_and_a_gone_one_in_none() {
        assert_eq!(Namespace::of(std::process::id()), Namespace::Own);
        assert_eq!(Namespace::of(u32::MAX), Namespace::Unknown);
        assert_eq!(translate(std::process::id(), Namespace::Unknown), None);
    }
}
