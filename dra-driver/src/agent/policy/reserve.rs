//! Memory that libcuda uses for itself in the processes of a share. Pure.
//!
//! Each context is charged ahead with an estimate for the GPU model. NVML reports the memory of a process; memory that its
//! program did not request belongs to the driver. Three values follow from that, once per second:
//!
//! - the **reserve**, which the next context is charged: the largest driver memory of a context, at least the estimate,
//!   because a context grows (lazily loaded modules, stacks, heaps), and at most [`RESERVE_FACTOR`] times the estimate. It
//!   rises at once and falls after [`FALLS_AFTER`] scans;
//! - the **excess**, driver memory of living processes beyond their charges. It counts as used: a share over its limit is
//!   denied all memory until it has freed the excess. It ends with the process;
//! - the **surplus**, what living processes were charged beyond driver memory that they turned out to need, by [`SCANS`]
//!   scans: an earlier, larger context had raised the reserve. It counts as free. The estimate for each context stays
//!   charged, so nothing in the region lowers a charge further.
//!
//! The requested memory is read in the region **at another time than NVML's value**: a program that frees and allocates all
//! the time would seem to hold what it has just freed. So the driver has what exceeds the *most* that the program ever
//! requested, which is exact for a full share and never too much; and also what all of [`SCANS`] scans agree on.
//!
//! The region belongs to the tenant, which gains nothing here: higher values there are charged to it.

use std::collections::{BTreeMap, VecDeque};

use drava_vgpu_abi::ledger::Owner;
use drava_vgpu_abi::snapshot::ProcessUsage;

use super::detection::{GpuProcess, ShareView, most_excess_bytes};

/// The reserve is at most so many times the estimate; more is not driver memory.
pub const RESERVE_FACTOR: u64 = 2;

/// Successive scans with less driver memory before the reserve falls.
pub const FALLS_AFTER: usize = 5;

/// Scans that must agree on more driver memory, if the program once requested more than now; or on a surplus.
pub const SCANS: usize = 16;

/// Scans that must agree on less driver memory.
const LESS_AFTER: usize = 5;

/// Memory of one process in one scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMemory {
    /// Owner of its slots.
    pub owner: Owner,
    /// Device memory by NVML.
    pub held_bytes: u64,
    /// Memory that its program has requested, by its slots, and that it may have opened of others.
    pub requested_bytes: u64,
    /// Highest value of that.
    pub most_requested_bytes: u64,
    /// Charge of its contexts.
    pub charged_bytes: u64,
}

/// Values for the page of a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Correction {
    /// Charge of the next context.
    pub reserve_bytes: u64,
    /// Driver memory beyond the charges of contexts.
    pub excess_bytes: u64,
    /// Charges of contexts beyond driver memory; 0 unless `excess_bytes` is.
    pub surplus_bytes: u64,
}

/// Driver memory in the processes of one share.
#[derive(Debug, Clone, Default)]
pub struct Reserve {
    processes: BTreeMap<(u32, u64, u64), ProcessHistory>,
    reserve_bytes: u64,
    /// Demands of the latest scans below the reserve.
    less: VecDeque<u64>,
}

#[derive(Debug, Clone, Default)]
struct ProcessHistory {
    /// Estimated driver memory.
    driver_bytes: u64,
    /// Values of the latest scans, each wrong by what was requested or freed during it.
    scans: VecDeque<u64>,
    /// Charge of its contexts, and their number when that charge was first seen.
    charged_bytes: u64,
    contexts: u64,
    /// Scans since then.
    unchanged: usize,
}

impl ProcessHistory {
    fn update(&mut self, process: &ProcessMemory) {
        let beyond = |requested: u64| process.held_bytes.saturating_sub(requested);
        remember(&mut self.scans, beyond(process.requested_bytes), SCANS);
        let agreed = (self.scans.len() == SCANS).then(|| self.scans.iter().min());
        let agreed = agreed.flatten().copied().unwrap_or(0);
        let at_least = beyond(process.most_requested_bytes).max(agreed);
        let lately = self.scans.iter().rev().take(LESS_AFTER);
        let at_most = if self.scans.len() < LESS_AFTER {
            u64::MAX
        } else {
            lately.max().copied().unwrap_or(u64::MAX)
        };
        self.driver_bytes = self.driver_bytes.min(at_most).max(at_least);
    }

    /// Returns what its contexts are charged beyond their memory, which is at least the estimate for each.
    fn surplus_bytes(&self, estimate_bytes: u64) -> u64 {
        if self.unchanged < SCANS {
            return 0;
        }
        let at_most = self.scans.iter().max().copied().unwrap_or(u64::MAX);
        let estimated = estimate_bytes.saturating_mul(self.contexts);
        let needed = at_most.max(self.driver_bytes).max(estimated);
        self.charged_bytes.saturating_sub(needed)
    }
}

impl Reserve {
    /// Applies a scan of all processes of the share that NVML lists. `estimate_bytes` is the driver memory of a context on a
    /// GPU of this model.
    pub fn update(&mut self, estimate_bytes: u64, processes: &[ProcessMemory]) -> Correction {
        let key = |owner: Owner| (owner.pid, owner.start_time, owner.pid_namespace);
        let is_there = |known: &(u32, u64, u64)| processes.iter().any(|p| key(p.owner) == *known);
        self.processes.retain(|known, _| is_there(known));
        let (mut wanted, mut excess_bytes, mut surplus_bytes) = (estimate_bytes, 0u64, 0u64);
        for process in processes {
            let contexts = self.contexts(estimate_bytes, process);
            let known = self.processes.entry(key(process.owner)).or_default();
            if known.charged_bytes != process.charged_bytes || known.contexts == 0 {
                (known.charged_bytes, known.contexts) = (process.charged_bytes, contexts);
                known.unchanged = 0;
            }
            known.unchanged = known.unchanged.saturating_add(1);
            known.update(process);
            wanted = wanted.max(known.driver_bytes / known.contexts);
            surplus_bytes = surplus_bytes.saturating_add(known.surplus_bytes(estimate_bytes));
            let beyond = known.driver_bytes.saturating_sub(process.charged_bytes);
            let most = most_excess_bytes(estimate_bytes);
            excess_bytes = excess_bytes.saturating_add(beyond.min(most));
        }
        self.move_to(wanted.min(estimate_bytes.saturating_mul(RESERVE_FACTOR)));
        Correction {
            reserve_bytes: self.reserve_bytes,
            excess_bytes: excess_bytes.saturating_sub(surplus_bytes),
            surplus_bytes: surplus_bytes.saturating_sub(excess_bytes),
        }
    }

    /// Returns the number of contexts that the process was charged for, as far as its charge says.
    fn contexts(&self, estimate_bytes: u64, process: &ProcessMemory) -> u64 {
        let each = self.reserve_bytes.max(estimate_bytes).max(1);
        (process.charged_bytes.saturating_add(each / 2) / each).max(1)
    }

    fn move_to(&mut self, wanted: u64) {
        if wanted >= self.reserve_bytes {
            self.reserve_bytes = wanted;
            self.less.clear();
            return;
        }
        remember(&mut self.less, wanted, FALLS_AFTER);
        if self.less.len() == FALLS_AFTER {
            self.reserve_bytes = self.less.iter().max().copied().unwrap_or(wanted);
            self.less.clear();
        }
    }
}

fn remember(scans: &mut VecDeque<u64>, value: u64, count: usize) {
    scans.push_back(value);
    while scans.len() > count {
        scans.pop_front();
    }
}

/// Returns the memory of the processes of the share `id`. A process with several shares of the GPU belongs to the one that
/// was charged for its contexts.
#[must_use]
pub fn process_memory<Id: Ord + Copy>(
    id: Id,
    shares: &[ShareView<Id>],
    processes: &[GpuProcess<Id>],
) -> Vec<ProcessMemory> {
    let of = |process: &GpuProcess<Id>| {
        let slots = slots(shares, process);
        let own = |(_, slot): &&(Id, &ProcessUsage)| slot.owner == process.owner;
        let charged = slots
            .iter()
            .filter(own)
            .find(|(_, slot)| slot.driver_bytes > 0);
        let (home, _) = charged.or_else(|| slots.iter().find(own))?;
        if *home != id {
            return None;
        }
        let sum = |figure: fn(&ProcessUsage) -> u64| {
            let own = slots.iter().filter(own).map(|(_, slot)| figure(slot));
            own.fold(0, u64::saturating_add)
        };
        let opened = slots
            .iter()
            .filter(|(_, slot)| slot.owner != process.owner)
            .map(|(_, slot)| slot.exported_bytes)
            .fold(0, u64::saturating_add);
        let charged_bytes = sum(|slot| slot.driver_bytes);
        let requested = |bytes: u64| bytes.saturating_sub(charged_bytes).saturating_add(opened);
        Some(ProcessMemory {
            owner: process.owner,
            held_bytes: process.used_bytes?,
            requested_bytes: requested(sum(|slot| slot.used_bytes)),
            most_requested_bytes: requested(sum(|slot| slot.peak_bytes.max(slot.used_bytes))),
            charged_bytes,
        })
    };
    processes.iter().filter_map(of).collect()
}

/// Returns the slots of the shares that the process has on the GPU.
fn slots<'a, Id: Ord + Copy>(
    shares: &'a [ShareView<Id>],
    process: &GpuProcess<Id>,
) -> Vec<(Id, &'a ProcessUsage)> {
    shares
        .iter()
        .filter(|share| process.shares.contains(&share.id))
        .filter_map(|share| Some((share.id, share.region.as_ref().ok()?)))
        .flat_map(|(id, region)| region.processes.iter().map(move |slot| (id, slot)))
        .collect()
}
