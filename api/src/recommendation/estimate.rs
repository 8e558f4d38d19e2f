//! The estimator: what to remember of readings, and which amounts follow from that. Pure.
//!
//! The rules are those of the vertical pod autoscaler (kubernetes/autoscaler, `vertical-pod-autoscaler/pkg/recommender`): the highest
//! memory of a day is one sample, samples lose half of their weight in a day, memory that was denied counts as a fifth more than the
//! limit, the request is the 90th percentile with a margin of 15%, and the limit the 95th percentile with the same margin, more as long
//! as little is known. A day is one sample of all shares of the workload, because one request holds for all of them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{
    Confidence, DailyPeak, GpuShareRecommendationStatus, GpuTimeBucket, Note, UsageHistory,
};
use crate::Quantity;
use crate::quota::ShareAmounts;

/// What a recommendation adds to the use.
pub const MARGIN: f64 = 1.15;

/// Factor of a limit at which allocations were denied.
pub const MARGIN_AFTER_DENIAL: f64 = 1.2;

/// Recommended memory is a multiple of this.
pub const MEMORY_STEP_BYTES: u64 = 128 << 20;

/// Recommended cores are a multiple of this.
pub const CORES_STEP: u8 = 5;

/// Observed time below which a recommendation says little, seconds.
pub const LONG_SECONDS: u64 = 86_400;

const DAY_SECONDS: f64 = 86_400.0;

/// Days that are remembered: what is older has less than a hundredth of the weight.
const DAYS: usize = 8;

/// Least that memory which was denied exceeds the limit.
const LEAST_DENIED_BYTES: u64 = 100 << 20;

const REQUEST_PERCENTILE: f64 = 0.9;

const LIMIT_PERCENTILE: f64 = 0.95;

/// Part of the guaranteed GPU time from which on all of it counts as used.
const ALL: f64 = 0.95;

/// Part of all weights below which a bucket is forgotten.
const LEAST_WEIGHT: f64 = 1e-4;

/// What the shares of a workload have used since the reading before.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reading {
    /// Highest memory of a share, bytes.
    pub memory_bytes: u64,
    /// Highest limit at which an allocation was denied, bytes.
    pub denied_at_bytes: Option<u64>,
    /// GPU time of each share whose time is known, as part of that of a GPU.
    pub gpu_time: Vec<f64>,
    /// Time since the reading before, seconds.
    pub elapsed_seconds: u64,
}

impl UsageHistory {
    /// Adds a reading.
    pub fn add(&mut self, now: &Time, reading: &Reading) {
        let denied = reading.denied_at_bytes.map(|limit| {
            let more = whole(limit as f64 * MARGIN_AFTER_DENIAL);
            more.max(limit.saturating_add(LEAST_DENIED_BYTES))
        });
        let bytes = reading.memory_bytes.max(denied.unwrap_or(0));
        match self.memory_peaks.last_mut() {
            Some(today) if age_seconds(&today.start, now) < DAY_SECONDS => {
                today.bytes = today.bytes.max(bytes);
                today.is_denied |= denied.is_some();
            }
            _ => self.memory_peaks.push(DailyPeak {
                start: now.clone(),
                bytes,
                is_denied: denied.is_some(),
            }),
        }
        let surplus = self.memory_peaks.len().saturating_sub(DAYS);
        self.memory_peaks.drain(..surplus);
        let age = self.read_at.as_ref().map_or(0.0, |at| age_seconds(at, now));
        for bucket in &mut self.gpu_time {
            bucket.weight_seconds *= weight(age);
        }
        for ratio in &reading.gpu_time {
            self.add_time(percent(*ratio), reading.elapsed_seconds as f64);
        }
        let sum: f64 = self
            .gpu_time
            .iter()
            .map(|bucket| bucket.weight_seconds)
            .sum();
        let is_kept = |bucket: &GpuTimeBucket| bucket.weight_seconds > sum * LEAST_WEIGHT;
        self.gpu_time.retain(is_kept);
        self.observed_seconds = self
            .observed_seconds
            .saturating_add(reading.elapsed_seconds);
        self.read_at = Some(now.clone());
    }

    fn add_time(&mut self, percent: u8, seconds: f64) {
        let found = self
            .gpu_time
            .binary_search_by_key(&percent, |bucket| bucket.percent);
        match found {
            Ok(index) => {
                if let Some(bucket) = self.gpu_time.get_mut(index) {
                    bucket.weight_seconds += seconds;
                }
            }
            Err(index) => self.gpu_time.insert(
                index,
                GpuTimeBucket {
                    percent,
                    weight_seconds: seconds,
                },
            ),
        }
    }

    /// Returns the highest memory of the remembered days, bytes; 0 without one.
    #[must_use]
    pub fn highest_bytes(&self) -> u64 {
        let days = self.memory_peaks.iter().map(|day| day.bytes);
        days.max().unwrap_or(0)
    }

    /// Returns the memory that no more than the rest of the days by weight exceeds, bytes; `None` without a day.
    fn memory_percentile(&self, part: f64) -> Option<f64> {
        let newest = &self.memory_peaks.last()?.start;
        let days = self.memory_peaks.iter();
        let days = days.map(|day| (day.bytes as f64, weight(age_seconds(&day.start, newest))));
        percentile(days.collect(), part)
    }

    /// Returns the GPU time that no more than the rest of the time by weight exceeds, percent; `None` without a bucket.
    fn time_percentile(&self, part: f64) -> Option<f64> {
        let buckets = self.gpu_time.iter();
        let buckets = buckets.map(|bucket| (f64::from(bucket.percent), bucket.weight_seconds));
        percentile(buckets.collect(), part)
    }

    fn confidence(&self) -> Confidence {
        match self.observed_seconds {
            seconds if seconds < LONG_SECONDS => Confidence::Low,
            seconds if seconds < 7 * LONG_SECONDS => Confidence::Medium,
            _ => Confidence::High,
        }
    }
}

/// Returns the recommendation for a workload with this many shares, of which the largest is guaranteed `current`.
#[must_use]
pub fn status(
    shares: u32,
    current: ShareAmounts,
    history: UsageHistory,
) -> GpuShareRecommendationStatus {
    let mut notes = Vec::new();
    let highest = history.highest_bytes();
    let memory = current.memory.and_then(Quantity::to_u64_rounded_up);
    let memory = memory.filter(|memory| *memory > 0 && highest > 0);
    let (request, limit) = match memory {
        Some(memory) => memory_amounts(memory, &history, &mut notes),
        None => (None, None),
    };
    let used_percent = history.time_percentile(REQUEST_PERCENTILE);
    let cores = current.cores.filter(|cores| *cores > 0);
    let cores = cores.zip(used_percent).map(|(cores, used)| {
        if used >= ALL * f64::from(cores) {
            notes.push(Note::AllTimeWasUsed);
        }
        let steps = (used * MARGIN / f64::from(CORES_STEP)).ceil().max(1.0);
        small(steps * f64::from(CORES_STEP))
    });
    if history.observed_seconds < LONG_SECONDS {
        notes.push(Note::ShortTime);
    }
    GpuShareRecommendationStatus {
        shares,
        current,
        used: ShareAmounts {
            memory: Some(Quantity::bytes(highest)),
            cores: used_percent.map(small),
        },
        request: ShareAmounts {
            memory: request.map(Quantity::bytes),
            cores,
        },
        limit: ShareAmounts {
            memory: limit.map(Quantity::bytes),
            cores: None,
        },
        confidence: history.confidence(),
        notes,
        history,
    }
}

/// Returns request and limit for a share that is guaranteed `current_bytes`.
fn memory_amounts(
    current_bytes: u64,
    history: &UsageHistory,
    notes: &mut Vec<Note>,
) -> (Option<u64>, Option<u64>) {
    let with_margin = |part| Some(history.memory_percentile(part)? * MARGIN);
    let request = with_margin(REQUEST_PERCENTILE).map(stepped);
    // As long as less than a day was observed, the limit is twice the use.
    let days = (history.observed_seconds as f64 / DAY_SECONDS).max(1.0);
    let limit = with_margin(LIMIT_PERCENTILE).map(|bytes| stepped(bytes * (1.0 + 1.0 / days)));
    if history.memory_peaks.iter().any(|day| day.is_denied) {
        notes.push(Note::MemoryWasDenied);
        return (request, limit);
    }
    // More was never asked for, by programs that would have got it.
    let is_all = request.is_some_and(|request| request >= current_bytes);
    if is_all && history.highest_bytes() <= current_bytes {
        notes.push(Note::AllMemoryWasUsed);
        return (Some(current_bytes), Some(current_bytes));
    }
    (request, limit)
}

/// Returns the least value that has this part of all weights at or below it; `None` without weights.
fn percentile(mut samples: Vec<(f64, f64)>, part: f64) -> Option<f64> {
    samples.sort_by(|one, other| one.0.total_cmp(&other.0));
    let sum: f64 = samples.iter().map(|(_, weight)| weight).sum();
    let mut below = 0.0;
    let mut found = samples.iter().filter(|(_, weight)| {
        below += weight;
        below >= part * sum
    });
    let found = found.next().map(|(value, _)| *value);
    // The sums differ by their rounding.
    found.or_else(|| samples.last().map(|(value, _)| *value))
}

/// Returns the weight of a sample of this age: half of it after a day.
fn weight(age_seconds: f64) -> f64 {
    (-age_seconds / DAY_SECONDS).exp2()
}

/// Returns the time from one moment to another, seconds; 0 if a clock went back.
fn age_seconds(from: &Time, to: &Time) -> f64 {
    to.0.duration_since(from.0).as_secs_f64().max(0.0)
}

fn stepped(bytes: f64) -> u64 {
    whole((bytes / MEMORY_STEP_BYTES as f64).ceil()).saturating_mul(MEMORY_STEP_BYTES)
}

/// Returns a part of the GPU time in percent, rounded up.
fn percent(ratio: f64) -> u8 {
    small((ratio * 100.0).ceil())
}

/// Returns a number of percent.
fn small(number: f64) -> u8 {
    u8::try_from(whole(number)).unwrap_or(100).min(100)
}

/// Returns a whole number, not below zero.
fn whole(number: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "saturates, and the fraction is meant to go"
    )]
    let whole = number as u64;
    whole
}

#[cfg(test)]
mod tests;
