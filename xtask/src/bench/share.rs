//! Exactness of shares of GPU time: the time that each tenant received, by the GPU's own count, against its share.
//!
//! Tenants keep their queues filled.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use drava_vgpu_abi::{ComputePolicy, Limits};
use serde_json::json;

use super::report::{Report, Row};
use super::{Args, hami_baseline};
use gpu_tenants::{Share, Tenant, TestBed, share};

/// Time before a measurement, the same for each variant: launches before the first measured kernel are repaid in it, and
/// controllers reach their steady state.
const SETTLE: Duration = Duration::from_secs(3);

/// Time until a share has its part before it is changed.
const STEADY: Duration = Duration::from_secs(1);

/// Kernels run in waves of blocks of this length, µs, so grids grow with the length of their kernels.
const BLOCK_US: u32 = 100;

/// Mixes of kernel lengths in nanoseconds, in turn or, with `random`, in random order. With `blocks`, kernels of all
/// lengths have the same grid.
const MIXES: [&str; 22] = [
    "ns=20000 depth=256",
    "ns=50000 depth=128",
    "ns=100000 depth=64",
    "ns=200000 depth=64",
    "ns=500000 depth=32",
    "ns=1000000 depth=16",
    "ns=2000000 depth=16",
    "ns=5000000 depth=8",
    "ns=10000000 depth=8",
    "ns=20000000 depth=4",
    "ns=50000000 depth=4",
    "ns=100000000 depth=2",
    "ns=300000000 depth=2",
    "ns=100000,1000000 depth=32",
    "ns=100000,10000000 depth=16",
    "ns=50000,500000,5000000 depth=16",
    "ns=100000,1000000,10000000 depth=16 random=1",
    "ns=20000,20000,20000,20000,20000,20000,20000,2000000 depth=64",
    "ns=1000000,3000000,9000000,27000000 depth=8 random=1",
    "ns=200000,40000000 depth=8 random=1",
    "ns=100000,10000000 depth=16 blocks=4096",
    "ns=200000,40000000 depth=8 random=1 blocks=4096",
];

/// Two tenants with kernels of these lengths.
const PAIRS: [(&str, &str); 4] = [
    ("ns=1000000 depth=16", "ns=1000000 depth=16"),
    ("ns=5000000 depth=8", "ns=5000000 depth=8"),
    ("ns=300000 depth=32", "ns=10000000 depth=8"),
    ("ns=20000000 depth=4", "ns=1000000 depth=16"),
];

/// Runs the bench.
pub(crate) fn run(args: &Args, report: &mut Report) -> Result<()> {
    let bench = Bench {
        args,
        library: drava_cluster::build_preload()?,
        measure: args.seconds(10.0),
    };
    bench.alone(report)?;
    bench.mixes(report)?;
    bench.two(report)?;
    bench.many(report)?;
    if args.includes("settle") {
        bench.settle(report)?;
    }
    Ok(())
}

struct Bench<'a> {
    args: &'a Args,
    library: std::path::PathBuf,
    measure: Duration,
}

impl Bench<'_> {
    fn test_bed(&self) -> Result<TestBed> {
        TestBed::new(&self.library)
    }

    /// Starts tenants with these percentages and loads under libvgpu, and returns them with their shares.
    fn tenants(test_bed: &TestBed, tenants: &[(u32, &str)]) -> Result<(Vec<Tenant>, Vec<Share>)> {
        let mut shares = Vec::new();
        let mut started = Vec::new();
        for (index, (percent, _)) in tenants.iter().enumerate() {
            let share = test_bed.share(&format!("share-{index}"), &fixed(*percent)?)?;
            started.push(test_bed.tenant(Some(&share), "dlsym")?);
            shares.push(share);
        }
        for (tenant, (_, load)) in started.iter_mut().zip(tenants) {
            tenant.ok(&start(load))?;
        }
        Ok((started, shares))
    }

    /// Percent of the GPU that tenants receive with libvgpu alone.
    fn ours(&self, tenants: &[(u32, &str)]) -> Result<Vec<f64>> {
        let test_bed = self.test_bed()?;
        let (started, _shares) = Self::tenants(&test_bed, tenants)?;
        test_bed.percents(&started.iter().collect::<Vec<_>>(), SETTLE, self.measure)
    }

    /// The same with a correction of each share every 100 ms: which part of the measured time is its own.
    fn corrected(&self, tenants: &[(u32, &str)]) -> Result<Vec<f64>> {
        let test_bed = self.test_bed()?;
        let (started, shares) = Self::tenants(&test_bed, tenants)?;
        let started: Vec<&Tenant> = started.iter().collect();
        let shares: Vec<&Share> = shares.iter().collect();
        test_bed.percents_corrected(&started, &shares, SETTLE, self.measure)
    }

    /// The same with HAMi-core's algorithm.
    fn hami(&self, tenants: &[(u32, &str)]) -> Result<Vec<f64>> {
        let test_bed = self.test_bed()?;
        let mut started = Vec::new();
        for (percent, load) in tenants {
            let mut tenant = hami_baseline::tenant(&test_bed, *percent)?;
            tenant.ok(&start(load))?;
            started.push(tenant);
        }
        test_bed.percents(&started.iter().collect::<Vec<_>>(), SETTLE, self.measure)
    }

    /// Percent of the GPU that tenants receive together without limits.
    fn uncapped(&self, tenants: &[(u32, &str)]) -> Result<f64> {
        let test_bed = self.test_bed()?;
        let mut started = Vec::new();
        for (_, load) in tenants {
            let mut tenant = test_bed.tenant(None, "dlsym")?;
            tenant.ok(&start(load))?;
            started.push(tenant);
        }
        let got = test_bed.percents(&started.iter().collect::<Vec<_>>(), SETTLE, self.measure)?;
        Ok(got.iter().sum())
    }

    fn alone(&self, report: &mut Report) -> Result<()> {
        let shares: Vec<u32> = (10..=90).step_by(10).collect();
        let shares = self.included("alone", &shares, u32::to_string);
        if shares.is_empty() {
            return Ok(());
        }
        report.part(
            "Alone",
            format!(
                "One tenant with kernels of 2 ms, for {} s. Percent of GPU time.",
                self.measure.as_secs_f64()
            ),
        );
        for percent in shares {
            let tenants = [(*percent, "ns=2000000 depth=16")];
            let ours = self.ours(&tenants)?;
            report.row(self.compared(&tenants, "2 ms", &ours)?);
        }
        Ok(())
    }

    fn mixes(&self, report: &mut Report) -> Result<()> {
        let mixes = self.included("mixes", &MIXES, |mix| (*mix).to_owned());
        if mixes.is_empty() {
            return Ok(());
        }
        report.part(
            "Kernel lengths",
            format!(
                "One tenant with 30% and kernels of one length or of several lengths, in nanoseconds. Kernels run in waves of 1,056 \
                 blocks of {BLOCK_US} µs each, so a longer kernel has a larger grid; with \"blocks\", kernels of all lengths have that grid."
            ),
        );
        for mix in mixes {
            let tenants = [(30, *mix)];
            let ours = self.ours(&tenants)?;
            report.row(self.compared(&tenants, mix, &ours)?);
        }
        Ok(())
    }

    fn two(&self, report: &mut Report) -> Result<()> {
        let pairs = self.included("two", &PAIRS, |(one, other)| format!("{one} / {other}"));
        if pairs.is_empty() {
            return Ok(());
        }
        report.part(
            "Two tenants",
            "Both tenants demand the whole GPU, with libvgpu alone. Sums are in percent of what both receive without limits. \"corrected\": \
             every 100 ms each share is corrected by the GPU's own count of the time of its processes, the best that a node agent could \
             know; with the real node agent: share-agent.md.",
        );
        for (first, second) in [(30, 70), (10, 90), (50, 50)] {
            for (one, other) in &pairs {
                let tenants = [(first, *one), (second, *other)];
                let (ours, corrected) = (self.ours(&tenants)?, self.corrected(&tenants)?);
                let uncapped = self.uncapped(&tenants)?;
                let sum = |got: &[f64]| json!(100.0 * got.iter().sum::<f64>() / uncapped);
                let mut row = self.compared(&tenants, &format!("{one} / {other}"), &ours)?;
                row.push(("sum", sum(&ours)));
                row.push(("corrected", json!(corrected)));
                row.push(("corrected_sum", sum(&corrected)));
                report.row(row);
            }
        }
        Ok(())
    }

    fn many(&self, report: &mut Report) -> Result<()> {
        let counts: Vec<u32> = (1..=8).collect();
        let counts = self.included("many", &counts, u32::to_string);
        if counts.is_empty() {
            return Ok(());
        }
        report.part(
            "One to eight tenants",
            "Equal shares, 96% in total, kernels of 1 ms. Columns as above.",
        );
        for count in counts {
            let tenants = vec![(96 / count, "ns=1000000 depth=8"); *count as usize];
            let ours = self.ours(&tenants)?;
            let mut row = self.compared(&tenants, "1 ms", &ours)?;
            row.push(("corrected", json!(self.corrected(&tenants)?)));
            report.row(row);
        }
        Ok(())
    }

    /// The selected items.
    fn included<'b, T>(&self, part: &str, all: &'b [T], name: impl Fn(&T) -> String) -> Vec<&'b T> {
        let is_included = |item: &&T| self.args.includes(&format!("{part} {}", name(item)));
        all.iter().filter(is_included).collect()
    }

    /// What tenants received, with and without HAMi-core's algorithm.
    fn compared(&self, tenants: &[(u32, &str)], load: &str, ours: &[f64]) -> Result<Row> {
        let given: Vec<f64> = tenants
            .iter()
            .map(|(percent, _)| f64::from(*percent))
            .collect();
        let error = |got: &[f64]| {
            got.iter()
                .zip(&given)
                .map(|(got, given)| (got - given).abs())
                .fold(0.0, f64::max)
        };
        let mut row = vec![
            ("load", json!(load)),
            ("share", json!(given)),
            ("got", json!(ours)),
            ("error_points", json!(error(ours))),
        ];
        if !self.args.without_baseline {
            let hami = self.hami(tenants)?;
            row.push(("hami_got", json!(hami)));
            row.push(("hami_error_points", json!(error(&hami))));
        }
        Ok(row)
    }

    /// Changes of a share.
    fn settle(&self, report: &mut Report) -> Result<()> {
        report.part(
            "Settling",
            "Milliseconds until the end of the first 100 ms whose mean is within 3 points of the new share, provided that four fifths of the windows \
             in the next 500 ms are, too.",
        );
        let test_bed = self.test_bed()?;
        let (tenants, shares) = Self::tenants(&test_bed, &[(20, "ns=1000000 depth=8")])?;
        let (tenant, share) = (
            tenants.first().context("a tenant")?,
            shares.first().context("a share")?,
        );
        let _ = test_bed.percents(&[tenant], STEADY, STEADY)?;
        for percent in [70, 20, 90, 10] {
            share.change(&fixed(percent)?)?;
            let settled = settled_after(&test_bed, tenant, f64::from(percent))?;
            report.row(vec![
                ("what", json!(format!("share changed to {percent}%"))),
                ("settled_ms", json!(settled)),
            ]);
        }
        Ok(())
    }
}

/// The tenant's command for a load of kernels, whose grids grow with their lengths unless the load says otherwise.
fn start(load: &str) -> String {
    if load.contains("blocks=") {
        format!("start kernel {load}")
    } else {
        format!("start kernel {load} block_us={BLOCK_US}")
    }
}

fn fixed(percent: u32) -> Result<Limits> {
    share(ComputePolicy::Fixed, percent)
}

/// Milliseconds until the tenant receives that percentage.
fn settled_after(test_bed: &TestBed, tenant: &Tenant, percent: f64) -> Result<Option<f64>> {
    const STEP: Duration = Duration::from_millis(20);
    const WINDOW: usize = 5;
    const STAYS: usize = 25;
    let begun = Instant::now();
    let mut points = Vec::new();
    while begun.elapsed() < Duration::from_secs(3) {
        let (used, at) = test_bed.used(&[tenant.pid()])?;
        points.push((at - begun, used.first().copied().unwrap_or_default()));
        std::thread::sleep(STEP);
    }
    let is_right = |window: &[(Duration, Duration)]| match window {
        [(begun, before), .., (ended, after)] => {
            let got = 100.0 * after.saturating_sub(*before).as_secs_f64()
                / (*ended - *begun).as_secs_f64();
            (got - percent).abs() <= 3.0
        }
        _ => false,
    };
    let right: Vec<bool> = points.windows(WINDOW + 1).map(is_right).collect();
    let settled = right
        .windows(STAYS)
        .position(|stay| stay.iter().filter(|right| **right).count() * 10 >= STAYS * 8);
    Ok(settled
        .and_then(|index| points.get(index + WINDOW))
        .map(|(at, _)| at.as_secs_f64() * 1e3))
}
