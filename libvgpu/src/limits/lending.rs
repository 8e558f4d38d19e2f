//! The wait for guaranteed memory that other shares use: the node agent takes it back from them.

use crate::limits::gpu::Gpu;
use crate::limits::share::Share;
use crate::system::sys::{self, SavedErrno};

/// Longest wait, microseconds.
const MAX_WAIT_US: u64 = 2_000_000;

/// Time between two attempts, microseconds.
const POLL_US: u64 = 5_000;

impl Gpu {
    /// Returns whether `bytes` fit the limit, and exceed it only because other shares use a part of it.
    fn lacks_lent(self, bytes: u64) -> bool {
        let lent = self.shares().map(Share::lent_bytes);
        let lent = lent.fold(0, u64::saturating_add);
        lent != 0 && bytes <= self.headroom().bytes.saturating_add(lent)
    }

    /// Attempts a reservation of `bytes` again and again while it fails because other shares use memory of this one. Returns `None`
    /// if they do not, or have not given it back after [`MAX_WAIT_US`].
    ///
    /// The caller holds no lock that another thread could wait for.
    #[cold]
    pub(crate) fn await_lent<T>(self, bytes: u64, attempt: impl Fn() -> Option<T>) -> Option<T> {
        if !self.lacks_lent(bytes) {
            return None;
        }
        let _errno = SavedErrno::new();
        let begun_us = sys::now_us();
        let mut now_us = begun_us;
        while now_us.saturating_sub(begun_us) < MAX_WAIT_US {
            // Before the page is read: what the agent has given back since is seen.
            for share in self.shares() {
                share.record_memory_demand(now_us);
            }
            sys::sleep_us(POLL_US);
            if let Some(reserved) = attempt() {
                return Some(reserved);
            }
            if !self.lacks_lent(bytes) {
                return None;
            }
            now_us = sys::now_us();
        }
        None
    }
}
