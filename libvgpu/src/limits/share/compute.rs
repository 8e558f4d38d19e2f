//! GPU time of a share: its grant, and its counters.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::bucket::{self, Bucket, Grant};
use drava_vgpu_abi::contention::OwnTime;
use drava_vgpu_abi::page::{
    LENT_OFFSET, NOTIFY_OFFSET, OWN_TIME_OFFSET, SUSPENDED_OFFSET, WINDOW_OFFSET,
    YIELD_UNTIL_OFFSET,
};
use drava_vgpu_abi::region::Slot;
use drava_vgpu_abi::{ComputePolicy, Cores, Limits};

use super::{RegionWord, Share, page_words};
use crate::system::sys;

const NO_RATE: u64 = (1 << 40) - 1;

impl Share {
    pub(crate) fn is_metered(&self) -> bool {
        self.refresh();
        unpack(self.compute.load(Ordering::Relaxed)).compute_policy != ComputePolicy::None
    }

    /// Returns the current grant.
    pub(crate) fn grant(&self) -> Grant {
        self.refresh();
        Grant::of(&unpack(self.compute.load(Ordering::Relaxed)))
    }

    /// Returns which part of the time that events measure is the share's own.
    pub(crate) fn own_time(&self) -> OwnTime {
        OwnTime::from_word(self.page_word(OWN_TIME_OFFSET))
    }

    /// Returns how long the share yields to a share of higher priority.
    pub(crate) fn yields_for_us(&self, now_us: u64) -> Option<u64> {
        bucket::yields_for_us(self.page_word(YIELD_UNTIL_OFFSET), now_us)
    }

    /// Returns the GPU time that may be in flight, microseconds; `None` if unbounded.
    pub(crate) fn window_us(&self) -> Option<u64> {
        Some(self.page_word(WINDOW_OFFSET)).filter(|us| *us != 0)
    }

    /// Returns whether the share may be suspended at all.
    pub(crate) fn can_be_suspended(&self) -> bool {
        self.refresh();
        self.can_suspend.load(Ordering::Relaxed) != 0
    }

    /// Returns whether processes that are not yet on the GPU wait.
    pub(crate) fn is_suspended(&self) -> bool {
        self.page_word(SUSPENDED_OFFSET) != 0
    }

    /// Returns the word of the page that says so; `None` without a page.
    pub(crate) fn suspended_word(&self) -> Option<&'static AtomicU64> {
        let page = NonNull::new(self.page.load(Ordering::Acquire))?;
        page_words(page).get(SUSPENDED_OFFSET / 8)
    }

    /// Shows the node driver that a process wants the suspended share to be resumed.
    pub(crate) fn demand_resume(&self) {
        let suspension = self.page_word(SUSPENDED_OFFSET);
        if suspension != 0
            && let Some((region, _)) = self.own()
            && Word::load(&region.header().demanded) != suspension
        {
            Word::store(&region.header().demanded, suspension);
        }
    }

    /// Returns whether the share notifies the node agent of its launches.
    pub(crate) fn notifies_agent(&self) -> bool {
        self.page_word(NOTIFY_OFFSET) != 0
    }

    /// Records demand for GPU time. The first demand after a pause notifies the agent if the share's time is lent.
    pub(crate) fn record_demand(&self, bucket: Bucket<'_, RegionWord>, now_us: u64) {
        let before_us = bucket.record_demand(now_us);
        if self.page_word(LENT_OFFSET) != 0 && bucket::resumes_demand(before_us, now_us) {
            self.notify_agent();
        }
    }

    /// Notifies the node agent.
    pub(crate) fn notify_agent(&self) {
        // SAFETY: never written after the share is published.
        let path = unsafe { &*self.region_path.get() };
        sys::touch(path.as_c_str());
    }

    fn page_word(&self, offset: usize) -> u64 {
        NonNull::new(self.page.load(Ordering::Acquire))
            .and_then(|page| page_words(page).get(offset / 8))
            .map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Returns the share's bucket; `None` if GPU time cannot be counted.
    pub(crate) fn bucket(&self) -> Option<Bucket<'static, RegionWord>> {
        self.own().map(|(region, _)| Bucket::new(region.header()))
    }

    pub(crate) fn count_gpu_time(&self, us: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_add(&slot.gpu_time_us, us);
        }
    }

    pub(crate) fn count_throttled(&self, us: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_add(&slot.throttled_us, us);
        }
    }

    pub(crate) fn count_launches(&self, launches: u64) {
        if let Some(slot) = self.own_slot() {
            Word::fetch_add(&slot.launches, launches);
        }
    }

    /// Records the duration of a launch.
    pub(crate) fn record_kernel(&self, us: u64, is_long: bool) {
        let Some(slot) = self.own_slot() else { return };
        if is_long {
            Word::fetch_add(&slot.long_kernels, 1);
        }
        if Word::load(&slot.longest_kernel_us) < us {
            Word::store(&slot.longest_kernel_us, us);
        }
    }

    pub(super) fn own_slot(&self) -> Option<&'static Slot<RegionWord>> {
        let (region, slot) = self.own()?;
        region.slot(slot)
    }
}

/// Packs the compute limits into one word, so that readers see a consistent set: rate or all ones (bits 0–39),
/// guarantee (40–47), policy (48–55).
pub(super) fn pack(limits: &Limits) -> u64 {
    let rate = limits.rate_us_per_s.map_or(NO_RATE, u64::from);
    let policy: u64 = match limits.compute_policy {
        ComputePolicy::None => 0,
        ComputePolicy::Balance => 1,
        ComputePolicy::Fixed => 2,
    };
    rate | u64::from(limits.cores.percent()) << 40 | policy << 48
}

pub(super) fn unpack(word: u64) -> Limits {
    let [_, _, _, _, _, cores, policy, _] = word.to_le_bytes();
    Limits {
        cores: Cores::new(u32::from(cores)).unwrap_or(Cores::BEST_EFFORT),
        compute_policy: match policy {
            1 => ComputePolicy::Balance,
            2 => ComputePolicy::Fixed,
            _ => ComputePolicy::None,
        },
        rate_us_per_s: u32::try_from(word & NO_RATE).ok(),
        ..Limits::memory(0)
    }
}
