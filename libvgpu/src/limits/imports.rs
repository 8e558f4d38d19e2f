//! Memory of other processes that this process has opened.
//!
//! A descriptor or an IPC handle identifies memory, not its process. So a process is charged for the opened bytes
//! beyond what the processes of its own share have exported: memory of its own share is not charged twice, memory
//! of another share is charged to both.
//!
//! If the exporting process releases its handles, its memory lives on here and stays charged to that process, until
//! it finds at one of its own denials or queries that the memory was closed.
//!
//! If the exporting process dies, its memory lives on here. It stays charged to the dead process's slot
//! (`Region::reclaim_slot`); for that, each process publishes in its own slot what it has open without a charge. If
//! the exporting process frees the memory first, which CUDA leaves undefined, this process is charged at its next
//! reclaim: before a denial, and when it queries its usage.
//!
//! Invariant: after each reclaim, the charge is at least `opened − exported`.

use core::sync::atomic::{AtomicU64, Ordering};

/// Opened memory of one GPU. All zeroes is none.
pub(crate) struct Imports {
    opened_bytes: AtomicU64,
    charged_bytes: AtomicU64,
    /// Memory of this process without local references that other processes of the share have open.
    left_open_bytes: AtomicU64,
}

impl Imports {
    /// Adds `bytes` of opened memory. The caller holds the process's guard.
    pub(crate) fn open(&self, bytes: u64) {
        self.opened_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the opened bytes without a charge. The caller holds the process's guard.
    pub(crate) fn uncharged_bytes(&self) -> u64 {
        self.missing_bytes(0)
    }

    /// Returns the bytes to charge because fewer bytes are exported than before. The caller holds the process's
    /// guard.
    pub(crate) fn missing_bytes(&self, available_bytes: u64) -> u64 {
        self.opened_bytes
            .load(Ordering::Relaxed)
            .saturating_sub(available_bytes)
            .saturating_sub(self.charged_bytes.load(Ordering::Relaxed))
    }

    /// Adds bytes that are charged, or about to be.
    pub(crate) fn add_charged(&self, bytes: u64) {
        self.charged_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds memory that other processes have open and that stays charged to this one.
    pub(crate) fn leave_open(&self, bytes: u64) {
        self.left_open_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Returns the bytes of [`Imports::leave_open`] and resets them.
    pub(crate) fn take_left_open(&self) -> u64 {
        self.left_open_bytes.swap(0, Ordering::Relaxed)
    }

    /// Reverts [`Imports::open`] of `bytes`, of which `charged_bytes` could not be charged. The caller holds the
    /// process's guard.
    pub(crate) fn undo_open(&self, bytes: u64, charged_bytes: u64) {
        self.opened_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.charged_bytes
            .fetch_sub(charged_bytes, Ordering::Relaxed);
    }

    /// Removes `bytes` of opened memory and returns the charge to release. The caller holds the process's guard.
    pub(crate) fn close(&self, bytes: u64) -> u64 {
        let opened = self
            .opened_bytes
            .load(Ordering::Relaxed)
            .saturating_sub(bytes);
        self.opened_bytes.store(opened, Ordering::Relaxed);
        let charged = self.charged_bytes.load(Ordering::Relaxed);
        let surplus = charged.saturating_sub(opened);
        self.charged_bytes
            .store(charged.saturating_sub(surplus), Ordering::Relaxed);
        surplus
    }
}
