//! Shared 64-bit word with atomic operations: the only kind of memory that processes share.
//!
//! The protocols are written against this trait. The same code runs on mapped memory, under loom, and in a build
//! that kills the process after a chosen step.

use core::sync::atomic::{AtomicU64, Ordering};

/// A shared 64-bit word. Every operation is sequentially consistent: the protocols in [`crate::ledger`] order steps
/// on different words, and allocations are too rare for weaker orderings to matter.
pub trait Word {
    /// Returns the value.
    fn load(&self) -> u64;
    /// Sets the value.
    fn store(&self, value: u64);
    /// Replaces `current` by `new` and returns `current`.
    ///
    /// # Errors
    /// The value found, if it is not `current`.
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64>;
    /// Adds `value`, wrapping, and returns the previous value.
    fn fetch_add(&self, value: u64) -> u64;
    /// Subtracts `value`, wrapping, and returns the previous value.
    fn fetch_sub(&self, value: u64) -> u64;
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self) -> u64 {
        self.load(Ordering::SeqCst)
    }

    #[inline]
    fn store(&self, value: u64) {
        self.store(value, Ordering::SeqCst);
    }

    #[inline]
    fn compare_exchange(&self, current: u64, new: u64) -> Result<u64, u64> {
        self.compare_exchange(current, new, Ordering::SeqCst, Ordering::SeqCst)
    }

    #[inline]
    fn fetch_add(&self, value: u64) -> u64 {
        self.fetch_add(value, Ordering::SeqCst)
    }

    #[inline]
    fn fetch_sub(&self, value: u64) -> u64 {
        self.fetch_sub(value, Ordering::SeqCst)
    }
}
