//! Limits the number of test clusters on a machine: they share its processors and memory.

use std::fs::{self, File};
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};

use crate::golang::cache_dir;

/// Maximum number of clusters at a time. Nothing else is shared: mounts, networks, processes and files of a cluster are
/// named by its state directory.
const MAX_CLUSTERS: usize = 2;

/// Pause between two attempts to get a place.
const RETRY: Duration = Duration::from_millis(500);

/// Holds one of the places for test clusters until dropped.
#[derive(Debug)]
pub struct HostLock {
    _file: File,
}

/// Waits until the machine has a place for another test cluster.
///
/// # Errors
/// When a lock file in the cache cannot be used.
pub fn lock_host() -> Result<HostLock> {
    lock_in(&cache_dir()?, || {
        eprintln!("waiting for the clusters of other tests on this machine");
    })
}

fn lock_in(directory: &Path, on_wait: impl FnOnce()) -> Result<HostLock> {
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let mut on_wait = Some(on_wait);
    loop {
        for place in 0..MAX_CLUSTERS {
            let path = directory.join(format!("host-{place}.lock"));
            let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(HostLock { _file: file }),
                Err(rustix::io::Errno::WOULDBLOCK) => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("lock {}", path.display()));
                }
            }
        }
        if let Some(on_wait) = on_wait.take() {
            on_wait();
        }
        thread::sleep(RETRY);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn waits_with_message_when_all_places_are_taken() {
        let directory = tempfile::tempdir().unwrap();
        let mut held: Vec<HostLock> = (0..MAX_CLUSTERS)
            .map(|_| lock_in(directory.path(), || panic!("a place is free")).unwrap())
            .collect();
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let another = scope.spawn(|| {
                lock_in(directory.path(), || sender.send(()).unwrap()).unwrap();
            });
            receiver.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(!another.is_finished());
            // Any place is enough.
            held.remove(0);
        });
    }
}
