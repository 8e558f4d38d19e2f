//! Processes with the root of a daemon: the daemon and its servers, also servers whose daemon has ended or whose files were removed.
//!
//! The log directory of a GPU is mounted in that root, see [`super::process`], and in no container. Only the kernel's list of mounts is
//! read, because a read from the file system of a container can block.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use super::POLL;
use super::process::LOG_DIRECTORY;
use crate::node::mounts::ClaimsMount;

/// Kills all processes with a log directory in their root. Returns whether they ended in time.
///
/// # Errors
/// When the mount of the log directory, or the processes of the node, cannot be read.
pub(super) fn kill(proc_root: &Path, log: &Path, time: Duration) -> io::Result<bool> {
    // Servers whose directory was removed, before this daemon had it or after, have memory of the GPU too.
    let log = ClaimsMount::locate_removed(log)?;
    let end = Instant::now() + time;
    loop {
        let members = members(proc_root, &log)?;
        if members.is_empty() {
            return Ok(true);
        }
        if Instant::now() >= end {
            return Ok(false);
        }
        for pid in members {
            super::kill_if(pid, || has_log(proc_root, pid, &log));
        }
        std::thread::sleep(POLL);
    }
}

fn members(proc_root: &Path, log: &ClaimsMount) -> io::Result<Vec<u32>> {
    let entries = fs::read_dir(proc_root)?.flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    Ok(pids.filter(|pid| has_log(proc_root, *pid, log)).collect())
}

/// One that has ended has no mounts, waited for or not.
fn has_log(proc_root: &Path, pid: u32, log: &ClaimsMount) -> bool {
    let mounts = fs::read_to_string(proc_root.join(pid.to_string()).join("mountinfo"));
    mounts.is_ok_and(|mounts| log.is_at(&mounts, LOG_DIRECTORY))
}
