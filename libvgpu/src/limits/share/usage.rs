//! Usage of a share's processes, for monitoring programs.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use drava_vgpu_abi::atomic::Word;
use drava_vgpu_abi::region::SlotIndex;

use super::Share;
use super::compute::unpack;
use crate::system::sys;

/// Validity of a percentage, and the shortest time between two readings.
const READING_US: u64 = 100_000;

/// Last reading. All zeroes is none.
pub(super) struct UsageReading {
    /// The share's GPU time at the last reading, its time, and the resulting percentage.
    gpu_time_us: AtomicU64,
    at_us: AtomicU64,
    percent: AtomicU32,
    /// 1 while a thread reads.
    is_busy: AtomicU32,
}

/// A live process of this share in this PID namespace.
#[derive(Clone, Copy)]
pub(crate) struct LiveProcess {
    pub(crate) pid: u32,
    pub(crate) used_bytes: u64,
}

impl Share {
    /// Returns the guaranteed percent of GPU time; 0 without a guarantee.
    pub(crate) fn cores_percent(&self) -> u32 {
        self.refresh();
        unpack(self.compute.load(Ordering::Relaxed)).cores.percent()
    }

    /// Returns whether usage is counted.
    pub(crate) fn is_countable(&self) -> bool {
        self.own().is_some()
    }

    /// Returns the processes that use the GPU. Processes of other PID namespaces have no PID here and are excluded,
    /// as in NVML itself. Call [`Share::reclaim`] first to remove dead ones.
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
            // A process without memory and launches only queries.
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

    /// Returns the percent of GPU time that the share's processes used, according to the meter; `None` if not
    /// metered.
    ///
    /// Needs two readings. The first call of a process sleeps between them; each further call covers the time since
    /// the last reading, or repeats its result if that is recent or another thread reads.
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

    /// Returns the GPU time of all processes of the share, in all PID namespaces.
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
