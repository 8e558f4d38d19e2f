//! Memory ledger of one GPU: allocated bytes. The oracle of every memory test.

use crate::protocol::Refusal;

/// Granularity of physical memory.
pub const PAGE_BYTES: u64 = 2 << 20;

/// Rounds up to whole pages; an overflowing size stays too large to fit.
pub(super) fn round_up(bytes: u64) -> u64 {
    bytes
        .checked_next_multiple_of(PAGE_BYTES)
        .unwrap_or(u64::MAX)
}

/// Counts pages in bytes. Invariant: `taken <= usable`.
#[derive(Debug)]
pub(super) struct Ledger {
    usable_bytes: u64,
    taken_bytes: u64,
    /// Highest `taken_bytes` since the last reset.
    peak_bytes: u64,
    /// See [`Self::freed_at_exit_bytes`].
    freed_at_exit_bytes: u64,
}

impl Ledger {
    /// Only whole pages can be allocated.
    pub(super) fn new(usable_bytes: u64) -> Self {
        Self {
            usable_bytes,
            taken_bytes: 0,
            peak_bytes: 0,
            freed_at_exit_bytes: 0,
        }
    }

    /// Allocates memory and returns the rounded size.
    pub(super) fn take(&mut self, bytes: u64) -> Result<u64, Refusal> {
        let rounded = round_up(bytes);
        if rounded > self.free_bytes() {
            return Err(Refusal::OutOfMemory);
        }
        self.taken_bytes += rounded;
        self.peak_bytes = self.peak_bytes.max(self.taken_bytes);
        Ok(rounded)
    }

    /// Frees what [`Self::take`] of the same size allocated.
    pub(super) fn free(&mut self, bytes: u64) {
        let rounded = round_up(bytes);
        debug_assert!(rounded <= self.taken_bytes, "freed more than allocated");
        self.taken_bytes = self.taken_bytes.saturating_sub(rounded);
    }

    pub(super) fn usable_bytes(&self) -> u64 {
        self.usable_bytes
    }

    pub(super) fn taken_bytes(&self) -> u64 {
        self.taken_bytes
    }

    /// High-water mark: every allocation counts, however short it lives.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.peak_bytes
    }

    /// Memory that processes held when they ended, since the last reset. The high-water mark can include each of them
    /// after its end: until then the driver had not detected it.
    pub(super) fn freed_at_exit_bytes(&self) -> u64 {
        self.freed_at_exit_bytes
    }

    /// Counts what was freed at the end of a process: the difference to `earlier_bytes`.
    pub(super) fn note_exit(&mut self, earlier_bytes: u64) {
        self.freed_at_exit_bytes += earlier_bytes.saturating_sub(self.taken_bytes);
    }

    /// Restarts the high-water mark at the present value.
    pub(super) fn reset_peak(&mut self) {
        self.peak_bytes = self.taken_bytes;
        self.freed_at_exit_bytes = 0;
    }

    pub(super) fn free_bytes(&self) -> u64 {
        self.usable_bytes - self.taken_bytes
    }
}
