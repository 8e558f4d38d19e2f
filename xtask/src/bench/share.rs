//! How exactly shares of GPU time are kept: what the card says that each tenant got, against what it was given.
//!
//! Tenants keep their queues filled. What each gets is counted by the card in its own time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use drava_vgpu_abi::{ComputePolicy, Limits};
use serde_json::json;

use super::figures::{Suite, measure, named, value};
use super::report::{Report, Row};
use super::{Args, hami_baseline};
use gpu_tenants::{Share, Tenant, TestBed, share};

const SETTLE: Duration = Duration::from_secs(1);

/// Kernel lengths in nanoseconds, each a mix of its own, in turn unless it says `random`.
const MIXES: [&str; 20] = [
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
        measure: Duration::from_secs_f64(args.seconds),
    };
    bench.alone(report)?;
    bench.mixes(report)?;
    bench.two(report)?;
    bench.many(report)?;
    if args.includes("settle") {
        bench.settle(report)?;
    }
    if args.includes("agent") {
        with_agent(args, report)?;
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

    /// Tenants with these shares and loads, by libvgpu, and their shares.
    fn tenants(test_bed: &TestBed, tenants: &[(u32, &str)]) -> Result<(Vec<Tenant>, Vec<Share>)> {
        let mut shares = Vec::new();
        let mut started = Vec::new();
        for (index, (percent, _)) in tenants.iter().enumerate() {
            let share = test_bed.share(&format!("share-{index}"), &fixed(*percent)?)?;
            started.push(test_bed.tenant(Some(&share), "dlsym")?);
            shares.push(share);
        }
        for (tenant, (_, load)) in started.iter_mut().zip(tenants) {
            tenant.ok(&format!("start kernel {load}"))?;
        }
        Ok((started, shares))
    }

    /// What such tenants get, in percent of the card, with no more than libvgpu.
    fn ours(&self, tenants: &[(u32, &str)]) -> Result<Vec<f64>> {
        let test_bed = self.test_bed()?;
        let (started, _shares) = Self::tenants(&test_bed, tenants)?;
        // So long that what was launched before anything was known is repaid.
        test_bed.percents(
            &started.iter().collect::<Vec<_>>(),
            3 * SETTLE,
            self.measure,
        )
    }

    /// The same while each share is told every 100 ms how much of what it measures is its own.
    fn corrected(&self, tenants: &[(u32, &str)]) -> Result<Vec<f64>> {
        let test_bed = self.test_bed()?;
        let (started, shares) = Self::tenants(&test_bed, tenants)?;
        let started: Vec<&Tenant> = started.iter().collect();
        let shares: Vec<&Share> = shares.iter().collect();
        test_bed.percents_corrected(&started, &shares, 3 * SETTLE, self.measure)
    }

    /// The same by HAMi-core's algorithm.
    fn theirs(&self, tenants: &[(u32, &str)]) -> Result<Vec<f64>> {
        let test_bed = self.test_bed()?;
        let mut started = Vec::new();
        for (percent, load) in tenants {
            let mut tenant = hami_baseline::tenant(&test_bed, *percent)?;
            tenant.ok(&format!("start kernel {load}"))?;
            started.push(tenant);
        }
        test_bed.percents(&started.iter().collect::<Vec<_>>(), SETTLE, self.measure)
    }

    /// What they get together if nobody limits them.
    fn uncapped(&self, tenants: &[(u32, &str)]) -> Result<f64> {
        let test_bed = self.test_bed()?;
        let mut started = Vec::new();
        for (_, load) in tenants {
            let mut tenant = test_bed.tenant(None, "dlsym")?;
            tenant.ok(&format!("start kernel {load}"))?;
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
                "One tenant with kernels of 2 ms, for {} s. Percent of the card.",
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
            "One tenant with 30 % and kernels of one length or of several, in nanoseconds.",
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
            "Both want all of the card. \"got\": while each share is told every 100 ms how much of what its events measure is its own, from what the \
             card says of each process, which is the node agent's work. \"unaided\": without that. The last column is the sum of both, in percent of \
             what they get together without limits.",
        );
        for (first, second) in [(30, 70), (10, 90), (50, 50)] {
            for (one, other) in &pairs {
                let tenants = [(first, *one), (second, *other)];
                let ours = self.corrected(&tenants)?;
                let (unaided, uncapped) = (self.ours(&tenants)?, self.uncapped(&tenants)?);
                let mut row = self.compared(&tenants, &format!("{one} / {other}"), &ours)?;
                row.push(("unaided", json!(unaided)));
                row.push(("sum", json!(100.0 * ours.iter().sum::<f64>() / uncapped)));
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
            "Equal shares of 96 % together, kernels of 1 ms, told what is their own as above.",
        );
        for count in counts {
            let tenants = vec![(96 / count, "ns=1000000 depth=8"); *count as usize];
            let ours = self.corrected(&tenants)?;
            report.row(self.compared(&tenants, "1 ms", &ours)?);
        }
        Ok(())
    }

    /// Those that are to be measured.
    fn included<'b, T>(&self, part: &str, all: &'b [T], name: impl Fn(&T) -> String) -> Vec<&'b T> {
        let is_included = |what: &&T| self.args.includes(&format!("{part} {}", name(what)));
        all.iter().filter(is_included).collect()
    }

    /// What tenants got, beside what they get by HAMi-core's algorithm.
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
        if !self.args.without_yardstick {
            let theirs = self.theirs(tenants)?;
            row.push(("hami_got", json!(theirs)));
            row.push(("hami_error_points", json!(error(&theirs))));
        }
        Ok(row)
    }

    /// A share that is changed, and an idle one that wakes.
    fn settle(&self, report: &mut Report) -> Result<()> {
        report.part(
            "Settling",
            "Milliseconds until the first 100 ms are over whose mean is within 3 points of the new share, if four fifths of those in the half second \
             after it are, too.",
        );
        let test_bed = self.test_bed()?;
        let (tenants, shares) = Self::tenants(&test_bed, &[(20, "ns=1000000 depth=8")])?;
        let (tenant, share) = (
            tenants.first().context("a tenant")?,
            shares.first().context("a share")?,
        );
        let _ = test_bed.percents(&[tenant], SETTLE, SETTLE)?;
        for percent in [70, 20, 90, 10] {
            share.change(&fixed(percent)?)?;
            let settled = settled_after(&test_bed, tenant, f64::from(percent))?;
            report.row(vec![
                ("what", json!(format!("share changed to {percent} %"))),
                ("settled_ms", json!(settled)),
            ]);
        }
        Ok(())
    }
}

/// What the node agent itself makes of it: measured by its tests, with the agent in a process of its own.
fn with_agent(args: &Args, report: &mut Report) -> Result<()> {
    let seconds = [("DRAVA_SECONDS", args.seconds.to_string())];
    let figures = measure(Suite::Agent, "shares::", &seconds)?;
    let parts: [(&str, &str, &str, &[&'static str]); 4] = [
        (
            "two",
            "With the node agent",
            "Both want all of the card, and the agent itself tells them what they may have. The error is that of the one that is farther from its share.",
            &["policy", "load", "share", "got", "error_points", "sum"],
        ),
        (
            "bursts",
            "Bursts with the node agent",
            "One works for 50 ms of the card's time, with kernels of 1 ms, and pauses for 200 ms, beside one that always wants all of the card. Due to it is \
             what it would have if its part were a card of its own; the error is what it lacks of that.",
            &["policy", "share", "due", "got", "error_points", "sum"],
        ),
        (
            "giving back",
            "Giving back",
            "A share of 70 % is idle and its time lent to another one; it wakes. Milliseconds until the other one is told to use less, and for how long \
             it had nothing of its share in the first half second, altogether: because the other one had more than its own part (\"lent\"), and because \
             the card had nothing to do (\"idle\"). \"waited\" is for how long its launches waited because of what it owed; a card that is idle for \
             longer waits for a host that does not let its tenants go on.",
            &["told_ms", "lacks_ms", "lent_ms", "idle_ms", "waited_ms"],
        ),
        (
            "latency",
            "Priority",
            "A tenant with 50 % and priority 100 makes requests, one kernel each or several that it waits for one by one, with four times as long a pause after \
             each; 50 alone, 50 while a tenant without a guarantee keeps another card busy with short kernels (\"elsewhere\": what such a tenant takes of \
             the host is in that, and nothing else), 50 beside one that does so with the same card, and so on. Milliseconds of a request, \
             and percent of the card that the other one got, and of what it gets while nobody else has a process there. \"Behind one kernel\": what the \
             requests that were alone would take if each came at a random moment and waited for the kernel that runs then, as busy as the other one keeps \
             the card: nothing that cannot interrupt kernels does better.",
            &[
                "policy",
                "kernels",
                "kernel_ms",
                "best_effort_kernel_ms",
                "requests",
                "p50_ms",
                "p50_elsewhere_ms",
                "p50_beside_ms",
                "p90_ms",
                "p90_elsewhere_ms",
                "p90_beside_ms",
                "p99_ms",
                "p99_elsewhere_ms",
                "p99_beside_ms",
                "p99_more_percent",
                "p99_more_than_elsewhere_percent",
                "p99_behind_one_kernel_ms",
                "p99_behind_one_kernel_percent",
                "best_effort_got",
                "best_effort_solo",
            ],
        ),
    ];
    for (figure, title, note, columns) in parts {
        report.part(title, note);
        for row in named(&figures, figure) {
            report.row(
                columns
                    .iter()
                    .map(|name| (*name, value(row, name)))
                    .collect(),
            );
        }
    }
    Ok(())
}

fn fixed(percent: u32) -> Result<Limits> {
    share(ComputePolicy::Fixed, percent)
}

/// After how many milliseconds the tenant gets that percentage.
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
