//! Factors of a new active set before NVML's first samples. Pure.
//!
//! Whether events include the wait for a time slice, and how long slices are, differs between GPUs. But the cost of a launch
//! does not change when another share starts: a resident share gets what its launches cost before. On a GPU that one share
//! keeps busy, the only new share gets the rest.
//!
//! A program may launch longer kernels from then on by the same count, and seem to get less than it gets. So this counts only
//! until NVML's first samples, only in the first active sets of a share, and reduces the prediction by half at most: a share
//! that deceives gets twice its part for about half a second.

use super::ALL;

/// Bounds of the factor, parts per million. Not above one: too much throttling leaves the GPU idle.
const FACTOR: std::ops::RangeInclusive<u64> = ALL / 2..=ALL;

/// Weight of the prediction in launches: some charged launches ran before or will run later.
const IN_FLIGHT: u64 = 4;

/// Launches are counted in so many parts, so that small counts fade evenly.
const PARTS: u64 = 1_000;

/// Mean cost of the launches of a share, by fading sums.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Launches {
    /// Nanoseconds.
    charged: u64,
    /// Launches, in [`PARTS`].
    count: u64,
}

impl Launches {
    /// Adds a tick.
    pub(super) fn learn(&mut self, charged_us: u64, launches: u64) {
        let fade = |sum: u64, more: u64| {
            let more = more.saturating_mul(PARTS);
            (sum - sum / 4).saturating_add(more)
        };
        self.charged = fade(self.charged, charged_us);
        self.count = fade(self.count, launches);
    }

    /// Returns the cost of launches, µs; `None` without any launch before.
    fn cost_us(self, launches: u64) -> Option<u64> {
        let cost = u128::from(launches) * u128::from(self.charged);
        let cost_us = cost.checked_div(u128::from(self.count))?;
        Some(u64::try_from(cost_us).unwrap_or(u64::MAX))
    }
}

/// Returns the use of each share in a tick, µs, by the cost and number of its launches, as far as known. `is_full`: one share
/// keeps the GPU busy all the time.
pub(super) fn used(elapsed_us: u64, is_full: bool, shares: &[(Launches, u64)]) -> Vec<Option<u64>> {
    let known = shares.iter();
    let mut used: Vec<Option<u64>> = known.map(|(before, made)| before.cost_us(*made)).collect();
    let others_us = used
        .iter()
        .flatten()
        .fold(0, |sum: u64, us| sum.saturating_add(*us));
    let mut unknown = used.iter_mut().filter(|used| used.is_none());
    if let (true, Some(newcomer), None) = (is_full, unknown.next(), unknown.next()) {
        *newcomer = Some(elapsed_us.saturating_sub(others_us));
    }
    used
}

/// Returns the factor of the prediction for a share that used `used_us` of `predicted_us`, µs, with launches up to
/// `launch_us`.
pub(super) fn factor(predicted_us: u64, used_us: u64, launch_us: u64) -> u64 {
    let known_us = launch_us.saturating_mul(IN_FLIGHT).max(1);
    let found = used_us.saturating_add(known_us).saturating_mul(ALL)
        / predicted_us.saturating_add(known_us);
    found.clamp(*FACTOR.start(), *FACTOR.end())
}
