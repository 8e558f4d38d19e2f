//! What a hooked launch costs: kernels that take no time, launched one by one by four processes at once.
//!
//! Three variants in turn: without libvgpu; with it, where GPU time is not metered; with it, metered and never
//! blocked. Sampling is a part of it, and shows in the mean and in the slowest launches.

use anyhow::{Context, Result};
use drava_vgpu_abi::{ComputePolicy, Limits};
use serde_json::json;

use super::Args;
use super::report::{Report, median_and_spread};
use gpu_tenants::{Ground, Share, Tenant, share};

const PROCESSES: usize = 4;
const LAUNCHES: usize = 25_000;

/// Runs the bench.
pub(crate) fn run(args: &Args, report: &mut Report) -> Result<()> {
    let ground = Ground::new(&drava_cluster::build_preload()?)?;
    let unmetered = ground.share("unmetered", &share(ComputePolicy::None, 50)?)?;
    // The whole card for now: empty kernels cost what events cannot tell from nothing, so at any lower rate some of
    // these launches would wait.
    let all = Limits {
        rate_us_per_s: Some(1_000_000),
        ..share(ComputePolicy::Balance, 50)?
    };
    let metered = ground.share("metered", &all)?;
    let variants: [(&str, Option<&Share>); 3] = [
        ("without libvgpu", None),
        ("not metered", Some(&unmetered)),
        ("metered, not blocked", Some(&metered)),
    ];
    report.part(
        "A launch",
        format!(
            "Nanoseconds of a launch of an empty kernel, {PROCESSES} processes with {LAUNCHES} launches each, {} rounds in turn. \
             Medians over rounds and processes; spread is the middle half. \"more\" is the difference of medians to the launch without libvgpu.",
            args.rounds
        ),
    );
    let mut figures: [Vec<[f64; 3]>; 3] = Default::default();
    for _ in 0..args.rounds {
        for ((_, share), figures) in variants.iter().zip(&mut figures) {
            let mut tenants = (0..PROCESSES)
                .map(|_| ground.tenant(*share, "dlsym"))
                .collect::<Result<Vec<Tenant>>>()?;
            for tenant in &mut tenants {
                tenant.send(&format!("time {LAUNCHES}"))?;
            }
            for tenant in &mut tenants {
                figures.push(launch_times(tenant)?);
            }
        }
    }
    let mut base = None;
    for ((name, _), figures) in variants.iter().zip(&figures) {
        let of = |index: usize| {
            let figures = figures.iter().filter_map(|row| row.get(index).copied());
            median_and_spread(figures.collect())
        };
        let ((p50, spread), (mean, _), (p999, _)) = (of(0), of(1), of(2));
        let (base_p50, base_mean) = *base.get_or_insert((p50, mean));
        report.row(vec![
            ("variant", json!(name)),
            ("p50_ns", json!(p50)),
            ("spread_ns", json!(spread)),
            ("mean_ns", json!(mean)),
            ("p999_ns", json!(p999)),
            ("p50_more_ns", json!(p50 - base_p50)),
            ("mean_more_ns", json!(mean - base_mean)),
        ]);
    }
    Ok(())
}

/// Median, mean and 99.9th percentile in nanoseconds, without the time of the clock.
fn launch_times(tenant: &mut Tenant) -> Result<[f64; 3]> {
    let line = tenant.hear()?;
    let numbers: Vec<f64> = line
        .split_ascii_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let [result, p50, mean, p999, clock] = numbers
        .try_into()
        .ok()
        .with_context(|| format!("launch times: {line}"))?;
    anyhow::ensure!(result == 0.0, "a launch failed: {line}");
    Ok([p50 - clock, mean - clock, p999 - clock])
}
