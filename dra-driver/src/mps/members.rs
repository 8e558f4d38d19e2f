//! Processes that live in the root of a daemon: the daemon and its servers, whoever their parent is.
//!
//! The log directory of a GPU is mounted in that root, see [`super::process`], and in no container.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::POLL;
use super::process::LOG_DIRECTORY;
use crate::node::process::{runs, start_time};

/// Kills all processes with a log directory in their root. Returns whether they ended in time.
pub(super) fn kill(proc_root: &Path, log: &Path, time: Duration) -> bool {
    let Some(log) = identity(log) else {
        return true;
    };
    let end = Instant::now() + time;
    loop {
        let members = members(proc_root, log);
        if members.is_empty() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        for pid in members {
            let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let process = raw.and_then(|raw| pidfd_open(raw, PidfdFlags::empty()).ok());
            // Looked at again: another process may have the PID by now.
            if let Some(process) = process
                && has_root(proc_root, pid, log)
            {
                // Fails only for one that has ended.
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        }
        std::thread::sleep(POLL);
    }
}

fn members(proc_root: &Path, log: (u64, u64)) -> Vec<u32> {
    let entries = fs::read_dir(proc_root).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let found = pids.filter(|pid| has_root(proc_root, *pid, log));
    // One that has ended and is not waited for has no root.
    let found = found.filter(|pid| {
        start_time(proc_root, *pid).is_some_and(|started| runs(proc_root, *pid, started))
    });
    found.collect()
}

fn has_root(proc_root: &Path, pid: u32, log: (u64, u64)) -> bool {
    let root = proc_root.join(pid.to_string()).join("root");
    identity(&root.join(LOG_DIRECTORY.trim_start_matches('/'))) == Some(log)
}

fn identity(directory: &Path) -> Option<(u64, u64)> {
    let found = fs::metadata(directory).ok()?;
    Some((found.dev(), found.ino()))
}
