//! Charges of memory that libcuda is about to free.

use crate::limits::shares::MAX_SHARES;
use crate::process::Process;

/// Bytes to release after a call, by the GPU's index.
///
/// The records of an object are removed before the call that frees it: afterwards another thread may have got the
/// same handles and pointers. The charge is released after the call: before it, the memory is still in use.
pub(crate) struct FreedBytes([u64; MAX_SHARES]);

impl FreedBytes {
    pub(crate) const NONE: Self = Self([0; MAX_SHARES]);

    /// Adds `bytes` of the GPU with that index.
    pub(crate) fn add(&mut self, gpu: u8, bytes: u64) {
        if let Some(sum) = self.0.get_mut(usize::from(gpu)) {
            *sum = sum.saturating_add(bytes);
        }
    }

    /// Removes the bytes of the GPU with that index and returns them.
    pub(crate) fn take(&mut self, gpu: u8) -> u64 {
        self.0.get_mut(usize::from(gpu)).map_or(0, core::mem::take)
    }

    /// Releases all bytes.
    pub(crate) fn release(self, process: &'static Process) {
        for (index, bytes) in (0..).zip(self.0) {
            if bytes != 0
                && let Some(gpu) = process.gpu(index)
            {
                gpu.release(bytes);
            }
        }
    }
}
