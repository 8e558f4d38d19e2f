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

/// One way to launch.
struct Variant<'a> {
    name: &'static str,
    share: Option<&'a Share>,
    /// Devices that the process sees.
    devices: &'static str,
}

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
    let variant = |name, share, devices| Variant {
        name,
        share,
        devices,
    };
    // Each is compared with the last one before it that is without libvgpu.
    let variants = [
        variant("without libvgpu", None, "0"),
        variant("not metered", Some(&unmetered), "0"),
        variant("metered, not blocked", Some(&metered), "0"),
        variant("two cards visible, without libvgpu", None, "0,1"),
        variant(
            "two cards visible, metered, not blocked",
            Some(&metered),
            "0,1",
        ),
    ];
    report.part(
        "A launch",
        format!(
            "Nanoseconds of a launch of an empty kernel, {PROCESSES} processes with {LAUNCHES} launches each, {} rounds in turn. \
             Medians over rounds and processes; spread is the middle half. \"more\" is the difference of medians to the launch without \
             libvgpu that sees as many cards.",
            args.rounds
        ),
    );
    let mut figures: [Vec<[f64; 3]>; 5] = Default::default();
    for _ in 0..args.rounds {
        for (variant, figures) in variants.iter().zip(&mut figures) {
            let tenant = || {
                ground.tenant_with(variant.share, "dlsym", |command| {
                    command.env("CUDA_VISIBLE_DEVICES", variant.devices);
                })
            };
            let mut tenants = (0..PROCESSES)
                .map(|_| tenant())
                .collect::<Result<Vec<Tenant>>>()?;
            for tenant in &mut tenants {
                tenant.send(&format!("time {LAUNCHES}"))?;
            }
            for tenant in &mut tenants {
                figures.push(launch_times(tenant)?);
            }
        }
    }
    let mut base = (0.0, 0.0);
    for (variant, figures) in variants.iter().zip(&figures) {
        let of = |index: usize| {
            let figures = figures.iter().filter_map(|row| row.get(index).copied());
            median_and_spread(figures.collect())
        };
        let ((p50, spread), (mean, _), (p999, _)) = (of(0), of(1), of(2));
        if variant.share.is_none() {
            base = (p50, mean);
        }
        report.row(vec![
            ("variant", json!(variant.name)),
            ("p50_ns", json!(p50)),
            ("spread_ns", json!(spread)),
            ("mean_ns", json!(mean)),
            ("p999_ns", json!(p999)),
            ("p50_more_ns", json!(p50 - base.0)),
            ("mean_more_ns", json!(mean - base.1)),
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
