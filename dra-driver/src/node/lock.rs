//! Locks of claims and GPUs, between threads of this process and between instances of the driver.
//!
//! A lock is an exclusive `flock` on a file: the kernel releases the lock when its holder dies. Each claim and each GPU
//! has a lock; no lock covers the node. Unprepare removes the lock file of the claim; a waiter detects that its file was
//! replaced and retries with the new file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::node::claim::ClaimUid;

/// Time between two attempts to acquire a lock. Locks are held for milliseconds.
const POLL: Duration = Duration::from_millis(5);

/// A lock was not acquired.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another thread or instance holds the lock.
    #[error(
        "cannot lock {object} within {} s: another call or instance holds {}",
        waited.as_secs(),
        path.display()
    )]
    Busy {
        /// The claim or GPU.
        object: String,
        /// Time waited.
        waited: Duration,
        /// The lock file.
        path: PathBuf,
    },
    /// The lock file cannot be opened or locked.
    #[error("cannot lock {}", path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
}

/// Lock files of this node.
#[derive(Debug, Clone)]
pub struct Locks {
    dir: PathBuf,
    max_wait: Duration,
}

/// An acquired lock; released when dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Releases the lock and removes its file.
    pub fn remove(self) {
        // Removed while locked, so that waiters detect the removal. If the removal fails, the file is reused.
        let _ = fs::remove_file(&self.path);
        drop(self.file);
    }
}

impl Locks {
    /// Returns the locks in `dir`, which must exist. `max_wait` limits the wait for one lock.
    #[must_use]
    pub fn new(dir: PathBuf, max_wait: Duration) -> Self {
        Self { dir, max_wait }
    }

    /// Locks a claim. Blocks.
    ///
    /// # Errors
    /// When the lock is not released in time or its file cannot be used.
    pub fn claim(&self, uid: &ClaimUid) -> Result<Lock, LockError> {
        self.acquire(&format!("claim-{uid}"), || format!("claim {uid}"))
    }

    /// Locks a claim; `None` when the lock is held.
    ///
    /// # Errors
    /// When the lock file cannot be used.
    pub fn try_claim(&self, uid: &ClaimUid) -> Result<Option<Lock>, LockError> {
        try_acquire(&self.dir.join(format!("claim-{uid}")))
    }

    /// Locks GPUs by UUID. Blocks. Sorted order prevents deadlocks.
    ///
    /// # Errors
    /// When a lock is not released in time or its file cannot be used.
    pub fn gpus<'a>(
        &self,
        uuids: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Lock>, LockError> {
        let mut uuids: Vec<&str> = uuids.into_iter().collect();
        uuids.sort_unstable();
        uuids.dedup();
        uuids
            .into_iter()
            .map(|uuid| self.acquire(&format!("gpu-{uuid}"), || format!("GPU {uuid}")))
            .collect()
    }

    /// Acquires the lock of the active instance; `None` when the lock is held.
    ///
    /// # Errors
    /// When the lock file cannot be used.
    pub fn try_active(&self) -> Result<Option<Lock>, LockError> {
        try_acquire(&self.dir.join("active"))
    }

    fn acquire(&self, name: &str, object: impl FnOnce() -> String) -> Result<Lock, LockError> {
        let path = self.dir.join(name);
        let start = Instant::now();
        loop {
            if let Some(lock) = try_acquire(&path)? {
                return Ok(lock);
            }
            let waited = start.elapsed();
            if waited >= self.max_wait {
                return Err(LockError::Busy {
                    object: object(),
                    waited,
                    path,
                });
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Acquires the lock at `path`; `None` when the lock is held or its file was removed by the last holder.
fn try_acquire(path: &Path) -> Result<Option<Lock>, LockError> {
    let error = |source: io::Error| LockError::Io {
        path: path.to_owned(),
        source,
    };
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(error)?;
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(errno) => return Err(error(errno.into())),
    }
    let held = file.metadata().map_err(error)?;
    let at_path = match fs::metadata(path) {
        Ok(at_path) => at_path,
        Err(gone) if gone.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(other) => return Err(error(other)),
    };
    let current = (held.dev(), held.ino()) == (at_path.dev(), at_path.ino());
    Ok(current.then(|| Lock {
        file,
        path: path.to_owned(),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locks(dir: &tempfile::TempDir) -> Locks {
        Locks::new(dir.path().to_owned(), Duration::from_millis(20))
    }

    #[test]
    fn reports_busy_lock_of_one_claim_only() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (ClaimUid::parse("a").unwrap(), ClaimUid::parse("b").unwrap());
        let held = locks(&dir).claim(&a).unwrap();
        assert!(matches!(locks(&dir).claim(&a), Err(LockError::Busy { .. })));
        assert!(locks(&dir).try_claim(&b).unwrap().is_some());
        drop(held);
        assert!(locks(&dir).claim(&a).is_ok());
    }

    #[test]
    fn excludes_after_removal_of_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        let uid = ClaimUid::parse("a").unwrap();
        locks(&dir).claim(&uid).unwrap().remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let held = locks(&dir).claim(&uid).unwrap();
        assert!(locks(&dir).try_claim(&uid).unwrap().is_none());
        drop(held);
    }

    #[test]
    fn excludes_threads_that_remove_the_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        let uid = ClaimUid::parse("a").unwrap();
        let locks = Locks::new(dir.path().to_owned(), Duration::from_secs(30));
        let inside = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let lock = locks.claim(&uid).unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        lock.remove();
                    }
                });
            }
        });
    }
}
