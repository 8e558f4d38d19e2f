//! Locks of claims and cards, across the threads of this process and across two instances of the driver.
//!
//! A lock is an exclusive `flock` on a file, so the kernel releases it when its holder dies. There is one per claim and
//! one per card; nothing locks the node. A claim's lock file is removed when the claim is unprepared; whoever was
//! waiting for it notices that the file is no longer the one at the path, and begins again with the new one.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::claim::ClaimUid;

/// Time between two looks at a lock that another holds. Locks are held for milliseconds.
const POLL: Duration = Duration::from_millis(5);

/// A lock could not be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockError {
    /// Another thread or instance holds it.
    #[error("{what} is still being worked on after {} s (lock {})", waited.as_secs(), path.display())]
    Busy {
        /// What the lock protects.
        what: String,
        /// How long this one waited.
        waited: Duration,
        /// The lock file.
        path: PathBuf,
    },
    /// The file cannot be opened or locked.
    #[error("lock {}", path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// The lock files of this node.
#[derive(Debug, Clone)]
pub struct Locks {
    dir: PathBuf,
    patience: Duration,
}

/// A held lock; released when dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Releases the lock and removes its file.
    pub fn remove(self) {
        // Removed while held, so that a waiter sees that its file has gone. One that stays is used again.
        let _ = fs::remove_file(&self.path);
        drop(self.file);
    }
}

impl Locks {
    /// Lock files in `dir`, which exists. A lock is waited for at most `patience`.
    #[must_use]
    pub fn new(dir: PathBuf, patience: Duration) -> Self {
        Self { dir, patience }
    }

    /// Locks a claim. Blocks.
    ///
    /// # Errors
    /// When it is held for too long or its file cannot be used.
    pub fn claim(&self, uid: &ClaimUid) -> Result<Lock, LockError> {
        self.acquire(&format!("claim-{uid}"), || format!("claim {uid}"))
    }

    /// Locks a claim if nobody holds it.
    ///
    /// # Errors
    /// When its file cannot be used.
    pub fn try_claim(&self, uid: &ClaimUid) -> Result<Option<Lock>, LockError> {
        try_acquire(&self.dir.join(format!("claim-{uid}")))
    }

    /// Locks cards, given by UUID. Blocks. The order of taking is the same for all, so that nobody waits in a circle.
    ///
    /// # Errors
    /// When one is held for too long or its file cannot be used.
    pub fn cards<'a>(
        &self,
        uuids: impl IntoIterator<Item = &'a str>,
    ) -> Result<Vec<Lock>, LockError> {
        let mut uuids: Vec<&str> = uuids.into_iter().collect();
        uuids.sort_unstable();
        uuids.dedup();
        uuids
            .into_iter()
            .map(|uuid| self.acquire(&format!("card-{uuid}"), || format!("card {uuid}")))
            .collect()
    }

    /// The lock of the one instance that publishes and tidies up, if nobody holds it.
    ///
    /// # Errors
    /// When its file cannot be used.
    pub fn try_active(&self) -> Result<Option<Lock>, LockError> {
        try_acquire(&self.dir.join("active"))
    }

    fn acquire(&self, name: &str, what: impl FnOnce() -> String) -> Result<Lock, LockError> {
        let path = self.dir.join(name);
        let start = Instant::now();
        loop {
            if let Some(lock) = try_acquire(&path)? {
                return Ok(lock);
            }
            let waited = start.elapsed();
            if waited >= self.patience {
                return Err(LockError::Busy {
                    what: what(),
                    waited,
                    path,
                });
            }
            std::thread::sleep(POLL);
        }
    }
}

/// Takes the lock at `path` unless it is held; also `None` where its file was just removed by its last holder.
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
    fn a_held_claim_is_busy_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (ClaimUid::parse("a").unwrap(), ClaimUid::parse("b").unwrap());
        let held = locks(&dir).claim(&a).unwrap();
        assert!(matches!(locks(&dir).claim(&a), Err(LockError::Busy { .. })));
        assert!(locks(&dir).try_claim(&b).unwrap().is_some());
        drop(held);
        assert!(locks(&dir).claim(&a).is_ok());
    }

    #[test]
    fn a_removed_lock_file_excludes_as_before() {
        let dir = tempfile::tempdir().unwrap();
        let uid = ClaimUid::parse("a").unwrap();
        locks(&dir).claim(&uid).unwrap().remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let held = locks(&dir).claim(&uid).unwrap();
        assert!(locks(&dir).try_claim(&uid).unwrap().is_none());
        drop(held);
    }

    #[test]
    fn only_one_thread_at_a_time_holds_a_lock_that_is_removed_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let uid = ClaimUid::parse("a").unwrap();
        let patient = Locks::new(dir.path().to_owned(), Duration::from_secs(30));
        let inside = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let lock = patient.claim(&uid).unwrap();
                        assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                        inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                        lock.remove();
                    }
                });
            }
        });
    }
}
