//! Estimate of the part of a share's measured time that is its own, and not the time slice of another share. Pure.
//!
//! With time slicing, the contexts with work take turns, and events measure the slices of others within a kernel, too. But a
//! kernel waits for its slice before it starts, so that one that ends within the slice is measured alone. [`own_times`]
//! predicts this from the parts of the active shares and the durations of their launches:
//!
//! - A round lasts from one slice of a share to its next one, while the share has work: each other share takes what it is due
//!   in that time, at most a slice.
//! - A share that is due more per round than fits into a slice has a backlog: it fills its slices, and each is followed by the
//!   rest of a round. Launches of any other share are interrupted only where they are longer than a slice.
//!
//! NVML's utilization of processes does not correct the prediction: on an H200 it attributes each sample of 0.2 s to one
//! process alone, so that the share of 30% has 0% to 50% of the samples of 3 s (`docs/results/gpu-h200.md`).

/// One, in parts per million.
pub const ALL: u64 = 1_000_000;

/// Iterations until the rounds are stable.
const ITERATIONS: usize = 32;

/// Time slice of a context, µs: the default of NVIDIA's driver, as measured on an H200.
const SLICE_US: u64 = 2_000;

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
    /// In token slices, in which no other share with a token runs; launches of about this duration, µs.
    TokenSlices(u64),
}

/// An active share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Active {
    /// Its part of the GPU, parts per million.
    pub part: u64,
    /// How it uses its part.
    pub workload: Workload,
}

impl Active {
    /// Returns the work that it is due in a round, µs: more than a slice makes a backlog.
    fn due_us(&self, round_us: u64) -> u64 {
        match self.workload {
            Workload::Saturating => SLICE_US,
            Workload::Launches(_) | Workload::TokenSlices(_) => (self.part * round_us / ALL).max(1),
        }
    }

    /// Returns what it takes of a round of another share, µs, if its own rounds last `own_round_us`.
    fn takes_us(&self, own_round_us: u64, round_us: u64) -> u64 {
        match self.due_us(own_round_us) {
            SLICE_US.. => SLICE_US,
            _ => self.due_us(round_us).min(SLICE_US),
        }
    }

    /// Whether both can have work on the GPU at the same time.
    fn overlaps(&self, other: &Self) -> bool {
        use Workload::TokenSlices;
        !matches!(
            (self.workload, other.workload),
            (TokenSlices(_), TokenSlices(_))
        )
    }

    /// Returns its own time, parts per million.
    fn own_time(&self, round_us: u64) -> u64 {
        let due_us = self.due_us(round_us);
        let others_us = round_us - SLICE_US;
        // Its work, and how many rests of a round interrupt it, both times the same number.
        let (work, interruptions) = match self.workload {
            Workload::Saturating => (SLICE_US, 1),
            Workload::Launches(us) | Workload::TokenSlices(us) if us > SLICE_US => match due_us {
                SLICE_US.. => (SLICE_US, 1),
                _ => {
                    let us = us.min(LONGEST_US);
                    (us, us.div_ceil(SLICE_US) - 1)
                }
            },
            Workload::Launches(us) | Workload::TokenSlices(us) => {
                // The work varies by a launch, and the last launch of a slice may be interrupted. One launch alone is not.
                let us = us.max(1);
                let beyond_us = (due_us + us / 2).saturating_sub(SLICE_US).min(us);
                let beyond_us = if due_us > us { beyond_us } else { 0 };
                (due_us.min(SLICE_US) * us, beyond_us)
            }
        };
        let own = ALL * work / (work + interruptions * others_us);
        // With less it could not get its part.
        own.clamp(self.part.clamp(LOWEST, ALL), ALL)
    }
}

/// Returns the own times of active shares, parts per million, in their order.
#[must_use]
pub fn own_times(active: &[Active]) -> Vec<u64> {
    let mut rounds_us = vec![SLICE_US; active.len()];
    // Rounds only rise, and at most to a slice of each share.
    for _ in 0..ITERATIONS {
        let round_us = |(index, share): (usize, &Active)| {
            let own_us = rounds_us.get(index).copied().unwrap_or(SLICE_US);
            let others = active.iter().zip(&rounds_us).enumerate();
            let others = others.filter(|(other, (of, _))| *other != index && share.overlaps(of));
            let taken = others.map(|(_, (of, of_us))| of.takes_us(*of_us, own_us));
            SLICE_US + taken.sum::<u64>()
        };
        rounds_us = active.iter().enumerate().map(round_us).collect();
    }
    let rounds = active.iter().zip(rounds_us);
    rounds
        .map(|(share, round_us)| share.own_time(round_us))
        .collect()
}
