//! Cost of a hooked launch: empty kernels, launched one by one by four processes concurrently.
//!
//! Variants in turn: without libvgpu; with libvgpu and unmetered GPU time; with libvgpu, metered and never blocked.
//! Sampling is included, and shows in the mean and in the slowest launches. In one variant without libvgpu, the program
//! itself records as many events, which shows their cost in the driver.
//!
//! The hook adds a hundredth of a launch, and processors change their speed by more than that within a second. Every
//! second launch of each process therefore bypasses libvgpu and is the reference of the other launches.

use anyhow::{Context, Result};
use drava_vgpu_abi::cost::SAMPLING_INTERVAL;
use drava_vgpu_abi::{ComputePolicy, Limits};
use serde_json::json;

use super::Args;
use super::report::{Report, median_and_spread};
use gpu_tenants::{Share, Tenant, TestBed, share};

const PROCESSES: usize = 4;
const LAUNCHES: usize = 12_500;

/// One variant of a launch.
struct Variant<'a> {
    name: &'static str,
    share: Option<&'a Share>,
    /// Devices that the process sees.
    devices: &'static str,
    /// Interval of launches around which the program records events; 0 records none.
    events_interval: u32,
}

/// Durations of launches, ns.
#[derive(Clone, Copy)]
struct Times {
    p50: f64,
    mean: f64,
    p999: f64,
}

/// Durations of the hooked launches of a process, and of the launches between them that bypass libvgpu.
struct Pair {
    hooked: Times,
    driver: Times,
}

/// Runs the bench.
pub(crate) fn run(args: &Args, report: &mut Report) -> Result<()> {
    let test_bed = TestBed::new(&drava_cluster::build_preload()?)?;
    let unmetered = test_bed.share("unmetered", &share(ComputePolicy::None, 50)?)?;
    // The whole GPU: events measure an empty kernel as zero or one microsecond, so at a lower rate some launches
    // would wait.
    let whole = Limits {
        rate_us_per_s: Some(1_000_000),
        ..share(ComputePolicy::Balance, 50)?
    };
    let metered = test_bed.share("metered", &whole)?;
    let variant = |name, share, devices| Variant {
        name,
        share,
        devices,
        events_interval: 0,
    };
    let variants = [
        variant("without libvgpu", None, "0"),
        Variant {
            events_interval: SAMPLING_INTERVAL,
            ..variant("without libvgpu, as many events", None, "0")
        },
        variant("not metered", Some(&unmetered), "0"),
        variant("metered, not blocked", Some(&metered), "0"),
        variant(
            "two GPUs visible, metered, not blocked",
            Some(&metered),
            "0,1",
        ),
    ];
    report.part(
        "A launch",
        format!(
            "Nanoseconds of a launch of an empty kernel, {PROCESSES} processes with {LAUNCHES} launches each, {} rounds in turn. As \
             many launches, in turn with these, bypass libvgpu; \"more\" is the difference to them. Medians over rounds and \
             processes; spread is the distance between the quartiles.",
            args.rounds
        ),
    );
    let mut pairs: [Vec<Pair>; 5] = Default::default();
    for _ in 0..args.rounds {
        for (variant, pairs) in variants.iter().zip(&mut pairs) {
            pairs.extend(measure(&test_bed, variant)?);
        }
    }
    for (variant, pairs) in variants.iter().zip(&pairs) {
        let of = |value: fn(&Pair) -> f64| median_and_spread(pairs.iter().map(value).collect());
        let (p50_more, spread) = of(|pair| pair.hooked.p50 - pair.driver.p50);
        let (mean_more, mean_spread) = of(|pair| pair.hooked.mean - pair.driver.mean);
        report.row(vec![
            ("variant", json!(variant.name)),
            ("driver_p50_ns", json!(of(|pair| pair.driver.p50).0)),
            ("p50_more_ns", json!(p50_more)),
            ("p50_more_spread_ns", json!(spread)),
            ("driver_mean_ns", json!(of(|pair| pair.driver.mean).0)),
            ("mean_more_ns", json!(mean_more)),
            ("mean_more_spread_ns", json!(mean_spread)),
            ("driver_p999_ns", json!(of(|pair| pair.driver.p999).0)),
            ("p999_ns", json!(of(|pair| pair.hooked.p999).0)),
        ]);
    }
    Ok(())
}

/// Launches with all processes concurrently.
fn measure(test_bed: &TestBed, variant: &Variant<'_>) -> Result<Vec<Pair>> {
    let tenant = || {
        test_bed.tenant_with(variant.share, "dlsym", |command| {
            command.env("CUDA_VISIBLE_DEVICES", variant.devices);
        })
    };
    let mut tenants = (0..PROCESSES)
        .map(|_| tenant())
        .collect::<Result<Vec<Tenant>>>()?;
    for tenant in &mut tenants {
        tenant.send(&format!("time {LAUNCHES} {}", variant.events_interval))?;
    }
    tenants.iter_mut().map(launch_times).collect()
}

fn launch_times(tenant: &mut Tenant) -> Result<Pair> {
    let line = tenant.receive()?;
    let numbers: Vec<f64> = line
        .split_ascii_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect();
    let numbers: [f64; 7] = numbers
        .try_into()
        .ok()
        .with_context(|| format!("launch times: {line}"))?;
    let [
        result,
        p50,
        mean,
        p999,
        driver_p50,
        driver_mean,
        driver_p999,
    ] = numbers;
    anyhow::ensure!(result == 0.0, "a launch failed: {line}");
    let times = |p50, mean, p999| Times { p50, mean, p999 };
    Ok(Pair {
        hooked: times(p50, mean, p999),
        driver: times(driver_p50, driver_mean, driver_p999),
    })
}
