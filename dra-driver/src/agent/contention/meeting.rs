//! What is known of shares that meet for the first time, before NVML says anything of that. Pure.
//!
//! Whether events measure the wait for a time slice, too, and how long slices are, differs from card to card. But **what a
//! launch costs does not change when company comes**: who was there before has had what so many launches cost then. On a
//! card that somebody keeps busy all the time, the only one of whom nothing is known has had the rest.
//!
//! A program may launch something longer from then on by the same count, and seem to have had less than it had. So this is
//! believed until NVML is heard and no longer, in the first meetings of a share only, and never takes more than half off
//! what was predicted: a share that lies has twice its part for about half a second.

use super::ALL;

/// What may become of a prediction, parts per million of it. Not more than it was: what is too much leaves the card idle.
const FACTOR: std::ops::RangeInclusive<u64> = ALL / 2..=ALL;

/// The prediction counts as much as so many launches: some that were counted ran before that or will later.
const IN_FLIGHT: u64 = 4;

/// A count of launches is kept in so many parts, so that a few of them fade evenly.
const PARTS: u64 = 1_000;

/// What launches of a share are charged on average, by sums over the last steps, which fade.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Launches {
    /// Nanoseconds.
    charged: u64,
    /// Launches, in [`PARTS`].
    count: u64,
}

impl Launches {
    /// With one more step.
    pub(super) fn learn(&mut self, charged_us: u64, launches: u64) {
        let fade = |sum: u64, more: u64| {
            let more = more.saturating_mul(PARTS);
            (sum - sum / 4).saturating_add(more)
        };
        self.charged = fade(self.charged, charged_us);
        self.count = fade(self.count, launches);
    }

    /// What so many launches cost, µs; `None` if there were none to know it from.
    fn cost_us(self, launches: u64) -> Option<u64> {
        let cost = u128::from(launches) * u128::from(self.charged);
        let cost_us = cost.checked_div(u128::from(self.count))?;
        Some(u64::try_from(cost_us).unwrap_or(u64::MAX))
    }
}

/// What each share has had of a step, µs, as far as that is known from its launches before and the number of those that it
/// has made. `is_full`: somebody kept the card busy all the time.
pub(super) fn had(elapsed_us: u64, is_full: bool, shares: &[(Launches, u64)]) -> Vec<Option<u64>> {
    let known = shares.iter();
    let mut had: Vec<Option<u64>> = known.map(|(before, made)| before.cost_us(*made)).collect();
    let others_us = had
        .iter()
        .flatten()
        .fold(0, |sum: u64, us| sum.saturating_add(*us));
    let mut unknown = had.iter_mut().filter(|had| had.is_none());
    if let (true, Some(newcomer), None) = (is_full, unknown.next(), unknown.next()) {
        *newcomer = Some(elapsed_us.saturating_sub(others_us));
    }
    had
}

/// What is wrong with the prediction of a share that had `had_us` where it was `predicted_us`, µs; launches take up to
/// `launch_us`.
pub(super) fn factor(predicted_us: u64, had_us: u64, launch_us: u64) -> u64 {
    let known_us = launch_us.saturating_mul(IN_FLIGHT).max(1);
    let found =
        had_us.saturating_add(known_us).saturating_mul(ALL) / predicted_us.saturating_add(known_us);
    found.clamp(*FACTOR.start(), *FACTOR.end())
}
