//! The lock of the samples: a thread that does not get it at once goes on without.

use core::sync::atomic::{AtomicU32, Ordering};

/// Releases the lock when dropped.
pub(super) struct Lock<'a>(&'a AtomicU32);

impl<'a> Lock<'a> {
    /// Acquires the lock unless another thread has it.
    pub(super) fn try_acquire(lock: &'a AtomicU32) -> Option<Self> {
        lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .ok()
            .map(|_| Self(lock))
    }
}

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}
