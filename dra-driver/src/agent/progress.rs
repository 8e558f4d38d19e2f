//! What the processes of a share have done since the last look, from counters in their slots that only rise. Pure.

use std::collections::BTreeMap;

use drava_vgpu_abi::region::SlotIndex;
use drava_vgpu_abi::snapshot::ProcessUsage;

/// The counters as they were at the last look.
#[derive(Debug, Default)]
pub struct Progress {
    slots: BTreeMap<SlotIndex, Slot>,
}

/// What was done since then.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    /// GPU time that was charged, µs.
    pub used_us: u64,
    /// Time that launches waited, µs.
    pub throttled_us: u64,
    /// Launches that were charged.
    pub launches: u64,
    /// The longest kernel of a process that has had another long one, µs.
    pub long_kernel_us: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    generation: u64,
    gpu_time_us: u64,
    throttled_us: u64,
    launches: u64,
    long_kernels: u64,
}

impl Progress {
    /// Compares with the counters as they are now, and keeps those.
    pub fn since(&mut self, processes: &[ProcessUsage]) -> Done {
        self.slots
            .retain(|index, _| processes.iter().any(|process| process.slot == *index));
        let mut done = Done::default();
        for process in processes {
            let (before, now) = self.meet(process);
            let more = |of: fn(&Slot) -> u64| of(&now).saturating_sub(of(&before));
            done.used_us = done.used_us.saturating_add(more(|slot| slot.gpu_time_us));
            let throttled_us = more(|slot| slot.throttled_us);
            done.throttled_us = done.throttled_us.saturating_add(throttled_us);
            done.launches = done.launches.saturating_add(more(|slot| slot.launches));
            if more(|slot| slot.long_kernels) > 0 {
                done.long_kernel_us = done.long_kernel_us.max(Some(process.longest_kernel_us));
            }
        }
        done
    }

    /// What is to be compared of a process.
    fn meet(&mut self, process: &ProcessUsage) -> (Slot, Slot) {
        let now = Slot {
            generation: process.generation,
            gpu_time_us: process.gpu_time_us,
            throttled_us: process.throttled_us,
            launches: process.launches,
            long_kernels: process.long_kernels,
        };
        let before = match self.slots.insert(process.slot, now) {
            Some(before) if before.generation == now.generation => before,
            Some(_) => Slot {
                gpu_time_us: 0,
                throttled_us: 0,
                launches: 0,
                long_kernels: 0,
                ..now
            },
            // A slot that is new to the agent has a past that is not of this step.
            None => Slot {
                long_kernels: 0,
                ..now
            },
        };
        (before, now)
    }
}
