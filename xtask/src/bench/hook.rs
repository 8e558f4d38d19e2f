//! What a hooked launch costs: kernels that take no time, launched one by one by four processes at once.
//!
//! Variants in turn: without libvgpu; with it, where GPU time is not metered; with it, metered and never blocked.
//! Sampling is a part of it, and shows in the mean and in the slowest launches.
//!
//! What the hook adds is a hundredth of a launch, and processors change their speed by more than that from one second to
//! the next. So rounds are short, each is compared with itself only, and every second one goes backwards.

use anyhow::{Context, Result};
use drava_vgpu_abi::{ComputePolicy, Limits};
use serde_json::json;

use super::Args;
use super::report::{Report, median_and_spread};
use gpu_tenants::{Ground, Share, Tenant, share};

const PROCESSES: usize = 4;
const LAUNCHES: usize = 5_000;
/// Rounds of the variants for each one that was asked for.
const TURNS: usize = 5;

/// Where [`launch_times`] has what.
const P50: usize = 0;
const MEAN: usize = 1;
const P999: usize = 2;

/// One way to launch.
struct Variant<'a> {
    name: &'static str,
    share: Option<&'a Share>,
    /// Devices that the process sees.
    devices: &'static str,
    /// The variant it is compared with: the one without libvgpu that sees as many cards.
    base: usize,
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
    let variant = |name, share, devices, base| Variant {
        name,
        share,
        devices,
        base,
    };
    let variants = [
        variant("without libvgpu", None, "0", 0),
        variant("not metered", Some(&unmetered), "0", 0),
        variant("metered, not blocked", Some(&metered), "0", 0),
        variant("two cards visible, without libvgpu", None, "0,1", 3),
        variant(
            "two cards visible, metered, not blocked",
            Some(&metered),
            "0,1",
            3,
        ),
    ];
    let rounds = args.rounds.saturating_mul(TURNS);
    report.part(
        "A launch",
        format!(
            "Nanoseconds of a launch of an empty kernel, {PROCESSES} processes with {LAUNCHES} launches each, {rounds} rounds, every \
             second one backwards. Medians over rounds of the medians of their processes; spread is the middle half. \"more\" is the \
             median of the differences within a round to the launch without libvgpu that sees as many cards."
        ),
    );
    let mut figures: [Vec<[f64; 3]>; 5] = Default::default();
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..variants.len()).collect();
        if round % 2 != 0 {
            order.reverse();
        }
        for index in order {
            let (Some(variant), Some(figures)) = (variants.get(index), figures.get_mut(index))
            else {
                continue;
            };
            figures.push(measure(&ground, variant)?);
        }
    }
    for (variant, rows) in variants.iter().zip(&figures) {
        let Some(base) = figures.get(variant.base) else {
            continue;
        };
        let of = |what: usize| median_and_spread(rows.iter().map(|row| row[what]).collect());
        let more = |what: usize| {
            let differences = rows
                .iter()
                .zip(base)
                .map(|(row, base)| row[what] - base[what]);
            median_and_spread(differences.collect())
        };
        let ((p50, spread), (mean, _), (p999, _)) = (of(P50), of(MEAN), of(P999));
        let ((p50_more, more_spread), (mean_more, _)) = (more(P50), more(MEAN));
        report.row(vec![
            ("variant", json!(variant.name)),
            ("p50_ns", json!(p50)),
            ("spread_ns", json!(spread)),
            ("mean_ns", json!(mean)),
            ("p999_ns", json!(p999)),
            ("p50_more_ns", json!(p50_more)),
            ("p50_more_spread_ns", json!(more_spread)),
            ("mean_more_ns", json!(mean_more)),
        ]);
    }
    Ok(())
}

/// Launches with all processes at once; medians over them.
fn measure(ground: &Ground, variant: &Variant<'_>) -> Result<[f64; 3]> {
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
    let times = tenants
        .iter_mut()
        .map(launch_times)
        .collect::<Result<Vec<_>>>()?;
    Ok([P50, MEAN, P999].map(|what| {
        let (median, _) = median_and_spread(times.iter().map(|times| times[what]).collect());
        median
    }))
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
