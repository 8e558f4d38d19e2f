//! Values of measurements.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;

/// Prints a measurement.
pub(crate) fn print(row: &Value) -> Result<()> {
    println!("{}", serde_json::to_string(row)?);
    Ok(())
}

/// Returns how many per second, when that many took that time.
#[expect(
    clippy::cast_precision_loss,
    reason = "counts of objects are far below 2^52"
)]
pub(crate) fn rate(count: usize, time: Duration) -> f64 {
    count as f64 / time.as_secs_f64().max(1e-3)
}

/// Returns the time from the first to the last.
pub(crate) fn extent<'a>(times: impl Iterator<Item = &'a Instant> + Clone) -> Duration {
    let first = times.clone().min();
    let last = times.max();
    first
        .zip(last)
        .map_or(Duration::ZERO, |(first, last)| *last - *first)
}

/// Returns that percentile of sorted times, in milliseconds.
pub(crate) fn percentile(sorted: &[Duration], percent: usize) -> f64 {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    let time = sorted.get(index).copied().unwrap_or_default();
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_millis).collect();
        assert!((percentile(&times, 50) - 50.0).abs() < 1e-9);
        assert!((percentile(&times, 99) - 99.0).abs() < 1e-9);
        assert!(percentile(&[], 99).abs() < 1e-9);
    }
}
