//! Runs one test cluster at a time: clusters share processors, memory and the host state that the tests observe.

use std::fs::{self, File};
use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};

use crate::golang::cache_dir;

/// Excludes the clusters of other tests until dropped.
#[derive(Debug)]
pub struct HostLock {
    _file: File,
}

/// Waits until no other test has a cluster on this machine.
///
/// # Errors
/// When the lock file in the cache cannot be used.
pub fn lock_host() -> Result<HostLock> {
    lock_in(&cache_dir()?, || {
        eprintln!("waiting for the cluster of another test on this machine");
    })
}

fn lock_in(directory: &Path, on_wait: impl FnOnce()) -> Result<HostLock> {
    let path = directory.join("host.lock");
    fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
    let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        on_wait();
        flock(&file, FlockOperation::LockExclusive)
            .with_context(|| format!("lock {}", path.display()))?;
    }
    Ok(HostLock { _file: file })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn waits_with_message_for_other_lock() {
        let directory = tempfile::tempdir().unwrap();
        let held = lock_in(directory.path(), || panic!("nothing holds the lock")).unwrap();
        let (sender, receiver) = mpsc::channel();
        thread::scope(|scope| {
            let second = scope.spawn(|| {
                lock_in(directory.path(), || sender.send(()).unwrap()).unwrap();
            });
            receiver.recv_timeout(Duration::from_secs(60)).unwrap();
            assert!(!second.is_finished());
            drop(held);
        });
    }
}
