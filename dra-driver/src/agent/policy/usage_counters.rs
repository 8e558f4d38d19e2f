//! What the processes of a share have done between two readings, from counters in their slots that only rise. Pure.

use std::collections::BTreeMap;

use drava_vgpu_abi::region::SlotIndex;
use drava_vgpu_abi::snapshot::ProcessUsage;

/// The counters of the last reading.
#[derive(Debug, Default)]
pub struct UsageCounters {
    slots: BTreeMap<SlotIndex, Slot>,
    /// Whether GPU time and launches of a process before its first reading count.
    counts_earlier: bool,
}

/// Difference of two readings.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct UsageDelta {
    /// GPU time charged, µs.
    pub used_us: u64,
    /// Time that launches waited, µs.
    pub throttled_us: u64,
    /// Launches charged.
    pub launches: u64,
    /// The longest kernel of a process that had another long kernel, µs.
    pub long_kernel_us: Option<u64>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Slot {
    generation: u64,
    gpu_time_us: u64,
    throttled_us: u64,
    launches: u64,
    long_kernels: u64,
}

impl UsageCounters {
    /// Returns counters whose differences include what a process did before its first reading.
    #[must_use]
    pub fn counting_earlier() -> Self {
        Self {
            counts_earlier: true,
            ..Self::default()
        }
    }

    /// Returns the difference from the last reading.
    pub fn advance(&mut self, processes: &[ProcessUsage]) -> UsageDelta {
        self.slots
            .retain(|index, _| processes.iter().any(|process| process.slot == *index));
        let mut delta = UsageDelta::default();
        for process in processes {
            let now = Slot {
                generation: process.generation,
                gpu_time_us: process.gpu_time_us,
                throttled_us: process.throttled_us,
                launches: process.launches,
                long_kernels: process.long_kernels,
            };
            let before = match self.slots.insert(process.slot, now) {
                Some(before) if before.generation == now.generation => before,
                // Another process has the slot.
                Some(_) => Slot::default(),
                None if self.counts_earlier => Slot::default(),
                // On the first reading, earlier GPU time is not of this period. An earlier long kernel is reported.
                None => Slot {
                    long_kernels: 0,
                    ..now
                },
            };
            let added = |of: fn(&Slot) -> u64| of(&now).saturating_sub(of(&before));
            let add = |sum: u64, of: fn(&Slot) -> u64| sum.saturating_add(added(of));
            delta.used_us = add(delta.used_us, |slot| slot.gpu_time_us);
            delta.throttled_us = add(delta.throttled_us, |slot| slot.throttled_us);
            delta.launches = add(delta.launches, |slot| slot.launches);
            if added(|slot| slot.long_kernels) > 0 {
                delta.long_kernel_us = delta.long_kernel_us.max(Some(process.longest_kernel_us));
            }
        }
        delta
    }
}
