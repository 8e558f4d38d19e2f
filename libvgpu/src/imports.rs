//! Memory of other processes that this one has opened.
//!
//! Nothing says whose it is: a descriptor or an IPC handle names memory, not a process. So a process pays for what it
//! has opened beyond what the processes of its own share have made available to others: memory of the own share is
//! not paid for twice, memory of another share is paid for by both.
//!
//! When whoever exported it dies, the memory lives on here. It stays charged to the dead one's slot for as long
//! (`Region::reclaim_slot`), for which each process says in its own slot what it has open and does not pay for. When whoever
//! exported it frees it, which CUDA does not define before all others have closed it, it is charged to this process
//! when it next looks for what dead processes left: before anything is refused, and whenever it asks how much there is.
//!
//! Invariant: what is charged never falls behind `opened − available`, as of the last look.

use core::sync::atomic::{AtomicU64, Ordering};

/// What was opened of one card. All zeroes is nothing.
pub(crate) struct Imports {
    opened_bytes: AtomicU64,
    charged_bytes: AtomicU64,
}

impl Imports {
    /// Notes that `bytes` more are open. The caller holds the process's guard.
    pub(crate) fn open(&self, bytes: u64) {
        self.opened_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// What is open and not charged. The caller holds the process's guard.
    pub(crate) fn uncharged_bytes(&self) -> u64 {
        self.missing_bytes(0)
    }

    /// What is to be charged because less is available than was. The caller holds the process's guard.
    pub(crate) fn missing_bytes(&self, available_bytes: u64) -> u64 {
        self.opened_bytes
            .load(Ordering::Relaxed)
            .saturating_sub(available_bytes)
            .saturating_sub(self.charged_bytes.load(Ordering::Relaxed))
    }

    /// Notes that so much was charged, or is about to be.
    pub(crate) fn add_charged(&self, bytes: u64) {
        self.charged_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes that `bytes` are not open after all, and `charged_bytes` of them could not be charged. The caller holds
    /// the process's guard.
    pub(crate) fn undo_open(&self, bytes: u64, charged_bytes: u64) {
        self.opened_bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.charged_bytes
            .fetch_sub(charged_bytes, Ordering::Relaxed);
    }

    /// Notes that `bytes` are closed, and returns how much of the charge is to be returned. The caller holds the
    /// process's guard.
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
