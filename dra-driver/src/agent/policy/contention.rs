//! Estimate of the part of a share's measured time that is its own, and not the time slice of another share. Pure.
//!
//! With time slicing, the contexts with work take turns, and events measure the slices of others within a kernel, too. But a
//! kernel waits for its slice before it starts, so that one that ends within the slice is measured alone. [`estimate`]
//! predicts this from the parts of the active shares and the durations of their launches:
//!
//! - A round lasts from one slice of a share to its next one, while the share has work: each other share takes what it is due
//!   in that time, at most a slice, and nothing runs during a switch between two contexts.
//! - Beside a share that always has work, an interruption lasts one round minus the share's own slice, and libvgpu recognizes
//!   each one ([`OwnTime::Interrupted`]).
//! - Co-located shares limit the share that always has work; its rate has little effect ([`OwnTime::Saturating`]).
//! - Otherwise a mean part of the measured time is corrected ([`OwnTime::Part`]). A share that is due more per round than fits
//!   into a slice has a backlog: it fills its slices, and the slices of others follow each one. Launches of any other share
//!   are interrupted only where they are longer than a slice.
//!
//! NVML's utilization of processes does not correct the prediction: on an H200 it attributes each sample of 0.2 s to one
//! process alone, so that the share of 30% has 0% to 50% of the samples of 3 s (`docs/results/raw/gpu-h200.md`).

use drava_vgpu_abi::bucket::LEASE_US;
use drava_vgpu_abi::contention::{ALL_PPM, OwnTime, SLICE_US as SLICE};

/// One, in parts per million.
pub const ALL: u64 = ALL_PPM as u64;

/// Iterations until the rounds are stable.
const ITERATIONS: usize = 32;

/// Time slice of a context, µs.
const SLICE_US: u64 = SLICE as u64;

/// Time of a switch between two contexts, µs, as measured on an H200.
const SWITCH_US: u64 = 200;

/// Longest launch that counts, µs. Tenants report their launches.
const LONGEST_US: u64 = 60_000_000;

/// Lowest own time, parts per million.
const LOWEST: u64 = ALL / 50;

/// How the work of a share reaches the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Workload {
    /// The GPU always has work of the share.
    Saturating,
    /// In launches of about this duration, µs, with gaps.
    Launches(u64),
}

/// An active share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Active {
    /// Its part of the GPU, parts per million.
    pub part: u64,
    /// How it uses its part.
    pub workload: Workload,
}

/// The effect of other shares on one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contention {
    /// Which part of the time measured by its events is its own.
    pub own_time: OwnTime,
    /// Mean of that part over all its launches, parts per million.
    pub mean_own_ppm: u64,
    /// Part of the GPU that it gets if it always has work, parts per million.
    pub saturated_ppm: u64,
    /// Part of the time in which the GPU switches between contexts, parts per million.
    pub switching_ppm: u64,
}

/// What happens between two slices of a share.
#[derive(Debug, Clone, Copy, Default)]
struct Interruption {
    /// Slices of others and switches, µs.
    us: u64,
    /// Switches, µs.
    switching_us: u64,
}

impl Active {
    /// Returns the work that it is due in a round, µs: more than a slice makes a backlog.
    fn due_us(&self, round_us: u64) -> u64 {
        match self.workload {
            Workload::Saturating => SLICE_US,
            Workload::Launches(_) => (self.part * round_us / ALL).max(1),
        }
    }

    /// Returns the duration of its launches, µs, or of all in a slice.
    fn launch_us(&self) -> u64 {
        match self.workload {
            Workload::Saturating => SLICE_US,
            Workload::Launches(us) => us.clamp(1, LONGEST_US),
        }
    }

    /// Returns the least work that it has when it gets its slice, µs: a lease, or a launch.
    fn min_burst_us(&self) -> u64 {
        self.launch_us().clamp(LEASE_US, SLICE_US)
    }

    /// Whether its launches fit into a slice, so that any longer one was interrupted.
    fn is_short(&self) -> bool {
        self.workload != Workload::Saturating && self.launch_us() <= SLICE_US
    }

    /// Returns the mean own part of the measured time, parts per million.
    fn mean_own_time(&self, others_us: u64) -> u64 {
        // Its work, and how many times others interrupt it.
        let (work, interruptions) = match self.due_us(SLICE_US + others_us) {
            SLICE_US.. => (SLICE_US, 1),
            _ => (self.launch_us(), self.launch_us().div_ceil(SLICE_US) - 1),
        };
        let own = ALL * work / (work + interruptions * others_us);
        // A lower value would make the measured use look like missing demand.
        own.clamp((self.part - self.part / 16).clamp(LOWEST, ALL), ALL)
    }
}

/// Returns the effect of all others on each share.
#[must_use]
pub fn estimate(active: &[Active]) -> Vec<Contention> {
    let is_beside_saturating = |index: usize| {
        let mut others = active.iter().enumerate();
        others.any(|(other, of)| other != index && of.workload == Workload::Saturating)
    };
    let shares = active.iter().enumerate();
    let contention = shares.map(|(index, share)| {
        let others = interruption(active, index);
        let mean_own_ppm = share.mean_own_time(others.us);
        let is_recognizable = share.is_short() && is_beside_saturating(index);
        Contention {
            own_time: match share.workload {
                _ if is_recognizable => OwnTime::Interrupted(to_u32(others.us)),
                Workload::Saturating if others.us != 0 => OwnTime::Saturating(to_u32(mean_own_ppm)),
                _ => OwnTime::Part(to_u32(mean_own_ppm)),
            },
            mean_own_ppm,
            saturated_ppm: ALL * SLICE_US / (SLICE_US + others.us),
            switching_ppm: ALL * others.switching_us / (SLICE_US + others.us),
        }
    });
    contention.collect()
}

/// Returns what happens between two slices of the share of this index.
fn interruption(active: &[Active], index: usize) -> Interruption {
    let others = active.iter().enumerate();
    let others: Vec<_> = others
        .filter(|(other, _)| *other != index)
        .map(|(_, of)| of)
        .collect();
    let mut found = Interruption::default();
    // Rounds only rise, and at most to a slice of each share.
    for _ in 0..ITERATIONS {
        let round_us = SLICE_US + found.us;
        let (mut used_us, mut contexts_ppm) = (0, 0);
        for of in &others {
            let used_per_round_us = of.due_us(round_us).min(SLICE_US);
            used_us += used_per_round_us;
            contexts_ppm += (ALL * used_per_round_us / of.min_burst_us()).min(ALL);
        }
        // One switch to each context that has work, and one back.
        let switching_us = SWITCH_US * (contexts_ppm + contexts_ppm.min(ALL)) / ALL;
        found = Interruption {
            us: used_us + switching_us,
            switching_us,
        };
    }
    found
}

fn to_u32(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
