//! Memory of a share that other shares use: its processes wait until it is back.

use core::sync::atomic::Ordering;

use drava_vgpu_abi::atomic::Word;

use super::Share;

impl Share {
    /// Returns what other shares use of the limit.
    pub(crate) fn lent_bytes(&self) -> u64 {
        self.refresh();
        self.lent_bytes.load(Ordering::Relaxed)
    }

    /// Records that a process waits for what other shares use of the limit.
    pub(crate) fn record_memory_demand(&self, now_us: u64) {
        if let Some((region, _)) = self.own() {
            Word::store(&region.header().memory_demand_us, now_us);
        }
    }
}
