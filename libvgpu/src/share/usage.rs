//! What the processes of a share use, as monitoring programs want to know it.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::region::SlotIndex;

use super::Share;
use super::compute::unpack;
use crate::sys;

/// For how long a figure from two readings holds, and so the shortest time between them.
const READING_US: u64 = 100_000;

/// All zeroes is nothing read yet.
pub(super) struct UsageReading {
    /// The last reading of the share's GPU time, when, and what it gave.
    gpu_time_us: AtomicU64,
    at_us: AtomicU64,
    percent: AtomicU32,
    /// 1 while a thread reads.
    is_busy: AtomicU32,
}

/// A process of this share and this PID namespace.
#[derive(Clone, Copy)]
pub(crate) struct LiveProcess {
    pub(crate) pid: u32,
    pub(crate) used_bytes: u64,
}

impl Share {
    /// Percent of the card's GPU time that the share has; 0 if it has no guarantee.
    pub(crate) fn cores_percent(&self) -> u32 {
        self.refresh();
        unpack(self.compute.load(Ordering::Relaxed)).cores.percent()
    }

    /// Whether its processes can be counted at all.
    pub(crate) fn is_countable(&self) -> bool {
        self.own().is_some()
    }

    /// The processes that use the card. Those of other PID namespaces have no PID here and are left out, as NVML
    /// itself does. [`Share::reclaim`] takes the dead ones away before.
    pub(crate) fn live_processes(&self) -> impl Iterator<Item = LiveProcess> {
        let own = self.own();
        let namespace = own
            .and_then(|(region, slot)| region.slot(slot))
            .map(|slot| Word::load(&slot.pid_namespace));
        let region = own.map(|(region, _)| region);
        let slots = region.map_or(0, |region| region.slots().len());
        (0..slots).filter_map(move |index| {
            let region = region?;
            let index = SlotIndex::new(index)?;
            let slot = region.slot(index).filter(|_| region.is_in_use(index))?;
            // Who has neither memory nor launches only looks.
            let idle = [&slot.used_bytes, &slot.driver_bytes, &slot.launches]
                .into_iter()
                .all(|word| Word::load(word) == 0);
            if idle || namespace != Some(Word::load(&slot.pid_namespace)) {
                return None;
            }
            Some(LiveProcess {
                pid: u32::try_from(Word::load(&slot.pid)).ok()?,
                used_bytes: Word::load(&slot.used_bytes),
            })
        })
    }

    /// Percent of the card's time that the share's processes used, as its meter counts; `None` where it does not.
    ///
    /// That takes two readings. The first call of a process waits for the second one; every further call covers
    /// the time since the last, or repeats it if that was just now or another thread is at it.
    pub(crate) fn metered_percent(&self) -> Option<u32> {
        if !self.is_metered() {
            return None;
        }
        let reading = &self.usage_reading;
        if reading.is_busy.swap(1, Ordering::Acquire) == 0 {
            let read = self.read_metered(reading);
            reading.is_busy.store(0, Ordering::Release);
            read?;
        }
        Some(reading.percent.load(Ordering::Relaxed))
    }

    fn read_metered(&self, reading: &UsageReading) -> Option<()> {
        if reading.at_us.load(Ordering::Relaxed) == 0 {
            reading
                .gpu_time_us
                .store(self.gpu_time_us()?, Ordering::Relaxed);
            reading.at_us.store(sys::now_ns() / 1000, Ordering::Relaxed);
            sys::sleep_us(READING_US);
        }
        let now_us = sys::now_ns() / 1000;
        let elapsed_us = now_us.saturating_sub(reading.at_us.load(Ordering::Relaxed));
        if elapsed_us < READING_US {
            return Some(());
        }
        let gpu_time_us = self.gpu_time_us()?;
        let used_us = gpu_time_us.saturating_sub(reading.gpu_time_us.load(Ordering::Relaxed));
        let percent = used_us.saturating_mul(100).checked_div(elapsed_us)?;
        let percent = u32::try_from(percent.min(100)).unwrap_or(100);
        reading.gpu_time_us.store(gpu_time_us, Ordering::Relaxed);
        reading.at_us.store(now_us, Ordering::Relaxed);
        reading.percent.store(percent, Ordering::Relaxed);
        Some(())
    }

    /// GPU time of all processes of the share, those of other PID namespaces included.
    fn gpu_time_us(&self) -> Option<u64> {
        let (region, _) = self.own()?;
        let sum = (0..region.slots().len())
            .filter_map(SlotIndex::new)
            .filter(|index| !region.is_free(*index))
            .filter_map(|index| region.slot(index))
            .fold(0u64, |sum, slot| {
                sum.saturating_add(Word::load(&slot.gpu_time_us))
            });
        Some(sum)
    }
}
