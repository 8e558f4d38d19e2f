//! How recommended memory fits later use: workloads request the amounts of a trace and use them along synthetic curves.
//!
//! The recommendation follows from the first half of the days, and is compared with the second half, which it has not seen.

use std::f64::consts::TAU;
use std::ops::AddAssign;

use anyhow::{Context, Result};
use drava_api::Quantity;
use drava_api::quota::ShareAmounts;
use drava_api::recommendation::{Reading, UsageHistory, status};
use fastrand::Rng;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use crate::trace::TracePod;

/// Memory of a GPU of the trace, bytes. The trace has parts of GPUs only.
const GPU_BYTES: u64 = 80 << 30;

/// Days of use; the second half is held back.
const DAYS: u32 = 14;

/// Time between two readings, as of the controller, seconds.
const READING_SECONDS: u64 = 300;

const READINGS_PER_HOUR: usize = 12;
const HOURS_PER_DAY: usize = 24;

/// How the use of a workload changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Curve {
    /// Most by day, 30% of that by night.
    Daily,
    /// Daily, with 40% of it at weekends.
    Weekly,
    /// Daily, with 2% more each day.
    Growing,
    /// A fifth; on a third of the days, all for an hour.
    Bursts,
    /// All that is requested, as programs use that take what they find.
    Constant,
}

impl Curve {
    /// All curves.
    pub const ALL: [Self; 5] = [
        Self::Daily,
        Self::Weekly,
        Self::Growing,
        Self::Bursts,
        Self::Constant,
    ];
}

/// What the recommendations for workloads with one curve are worth.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Fit {
    /// Workloads.
    pub workloads: u64,
    /// Memory that they request, bytes.
    pub requested_bytes: u64,
    /// Memory that is recommended as their request, bytes.
    pub recommended_bytes: u64,
    /// Highest memory that they use in the held back days, bytes.
    pub peak_bytes: u64,
    /// Hours of the held back days.
    pub hours: u64,
    /// Hours in which a workload uses more than its recommended request.
    pub hours_above_request: u64,
    /// Hours in which a workload uses more than its recommended limit.
    pub hours_above_limit: u64,
    /// Held back days.
    pub days: u64,
    /// Days on which a workload uses more than its recommended request.
    pub days_above_request: u64,
}

impl AddAssign for Fit {
    fn add_assign(&mut self, other: Self) {
        self.workloads += other.workloads;
        self.requested_bytes += other.requested_bytes;
        self.recommended_bytes += other.recommended_bytes;
        self.peak_bytes += other.peak_bytes;
        self.hours += other.hours;
        self.hours_above_request += other.hours_above_request;
        self.hours_above_limit += other.hours_above_limit;
        self.days += other.days;
        self.days_above_request += other.days_above_request;
    }
}

/// Returns the fit for a workload with this curve for each pod of the trace that requests a part of one GPU.
///
/// # Errors
/// When the trace has no such pod, or an amount is out of range.
pub fn fit(pods: &[TracePod], curve: Curve, seed: u64) -> Result<Fit> {
    let mut random = Rng::with_seed(seed);
    let mut sum = Fit::default();
    for pod in pods {
        if pod.gpus == 1 && (1..1000).contains(&pod.gpu_milli) {
            let requested = GPU_BYTES * pod.gpu_milli / 1000;
            sum += of_workload(requested, &used(requested, curve, &mut random))?;
        }
    }
    anyhow::ensure!(
        sum.workloads > 0,
        "the trace has no pod with a part of a GPU"
    );
    Ok(sum)
}

/// Returns the readings of memory over all days, bytes.
fn used(requested: u64, curve: Curve, random: &mut Rng) -> Vec<u64> {
    // Users request too much: between a tenth and four times more than the peak.
    let peak = requested as f64 * (0.2 + 0.7 * random.f64());
    let per_day = HOURS_PER_DAY * READINGS_PER_HOUR;
    let mut readings = Vec::new();
    for day in 0..DAYS {
        let varied = 0.9 + 0.2 * random.f64();
        let burst = (random.u32(..3) == 0).then(|| random.usize(..HOURS_PER_DAY));
        for reading in 0..per_day {
            let by_day = 0.65 - 0.35 * (TAU * reading as f64 / per_day as f64).cos();
            let part = match curve {
                Curve::Daily => by_day,
                Curve::Weekly if day % 7 >= 5 => 0.4 * by_day,
                Curve::Weekly => by_day,
                Curve::Growing => by_day * (1.0 + 0.02 * f64::from(day)),
                Curve::Bursts if burst == Some(reading / READINGS_PER_HOUR) => 1.0,
                Curve::Bursts => 0.2,
                Curve::Constant => {
                    readings.push(requested);
                    continue;
                }
            };
            let bytes = peak * part * varied * (0.97 + 0.06 * random.f64());
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "positive, and the fraction is meant to go"
            )]
            // A limit denies more than was requested.
            readings.push((bytes as u64).min(requested));
        }
    }
    readings
}

/// Compares the recommendation after the first half of the readings with the second half.
fn of_workload(requested: u64, readings: &[u64]) -> Result<Fit> {
    let (seen, later) = readings.split_at(readings.len() / 2);
    let start: Timestamp = "2026-01-05T00:00:00Z".parse()?;
    let mut history = UsageHistory::default();
    for (index, bytes) in (0_i64..).zip(seen) {
        let now = start + SignedDuration::from_secs(index * READING_SECONDS.cast_signed());
        let reading = Reading {
            memory_bytes: *bytes,
            denied_at_bytes: None,
            gpu_time: Vec::new(),
            elapsed_seconds: READING_SECONDS,
        };
        history.add(&Time(now), &reading);
    }
    let current = ShareAmounts {
        memory: Some(Quantity::bytes(requested)),
        cores: None,
    };
    let found = status(1, current, history);
    let bytes = |amounts: ShareAmounts| {
        let bytes = amounts.memory.and_then(Quantity::to_u64_rounded_up);
        bytes.context("no recommendation")
    };
    let (request, limit) = (bytes(found.request)?, bytes(found.limit)?);
    let peaks = |readings: usize| -> Vec<u64> {
        let windows = later.chunks(readings);
        windows
            .filter_map(|window| window.iter().copied().max())
            .collect()
    };
    let hours = peaks(READINGS_PER_HOUR);
    let days = peaks(READINGS_PER_HOUR * HOURS_PER_DAY);
    let above =
        |peaks: &[u64], amount: u64| peaks.iter().filter(|peak| **peak > amount).count() as u64;
    Ok(Fit {
        workloads: 1,
        requested_bytes: requested,
        recommended_bytes: request,
        peak_bytes: days.iter().copied().max().unwrap_or(0),
        hours: hours.len() as u64,
        hours_above_request: above(&hours, request),
        hours_above_limit: above(&hours, limit),
        days: days.len() as u64,
        days_above_request: above(&days, request),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(gpu_milli: u64) -> TracePod {
        TracePod {
            name: "pod".to_owned(),
            cpu_milli: 1000,
            memory_mib: 1024,
            gpus: 1,
            gpu_milli,
            gpu_spec: String::new(),
        }
    }

    #[test]
    fn counts_hours_and_days_above_recommendation() {
        let half = DAYS as usize / 2 * HOURS_PER_DAY * READINGS_PER_HOUR;
        let mut readings = vec![4 << 30; 2 * half];
        readings[half + 1] = 5 << 30;
        readings[half + 2] = 5 << 30;
        readings[2 * half - 1] = 9 << 30;
        let fit = of_workload(10 << 30, &readings).unwrap();
        // 4 GiB and 15%, in steps of 128 MiB; the limit is a seventh more.
        assert_eq!(fit.recommended_bytes, 4736 << 20);
        assert_eq!((fit.hours, fit.days, fit.peak_bytes), (168, 7, 9 << 30));
        assert_eq!((fit.hours_above_request, fit.hours_above_limit), (2, 1));
        assert_eq!(fit.days_above_request, 2);
    }

    #[test]
    fn uses_no_more_than_requested() {
        for curve in Curve::ALL {
            let readings = used(GPU_BYTES, curve, &mut Rng::with_seed(1));
            let most = readings.iter().max().copied();
            assert!(most.is_some_and(|most| most <= GPU_BYTES), "{curve:?}");
        }
    }

    #[test]
    fn ignores_pods_without_part_of_gpu() {
        let whole = fit(&[pod(1000), pod(0)], Curve::Daily, 1);
        assert!(whole.is_err(), "{whole:?}");
        let pods = [pod(1000), pod(250)];
        let constant = fit(&pods, Curve::Constant, 1).unwrap();
        assert_eq!(constant.workloads, 1);
        assert_eq!(constant.requested_bytes, GPU_BYTES / 4);
        assert_eq!(constant.recommended_bytes, constant.requested_bytes);
        assert_eq!(constant.hours_above_request, 0);
    }
}
