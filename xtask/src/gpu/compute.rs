//! Shares of GPU time, of one process and of two.

use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Args;
use super::report::Row;
use super::rows::{Needed, Rows};
use super::setup::{Preload, Setup, Share, json, limits, together};
use super::waits;

/// Tolerated error of a share, in percentage points.
const GOAL_POINTS: f64 = 2.0;

/// Fraction of the unlimited GPU time that two tenants with the whole GPU between them must use.
pub(super) const GOAL_SUM: f64 = 0.97;

/// Output of `gpu-suite work`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Done {
    pub(super) share: f64,
    rounds_per_us: f64,
    overhead_us: f64,
}

pub(super) fn rows(setup: &Setup, args: &Args, rows: &mut Rows<'_>) -> Result<()> {
    let tenants = Needed::new(|| Tenants::new(setup, args.seconds));
    let mut cases: Vec<_> = (1..=9).map(|tenth| (tenth * 10, 1000, "queue")).collect();
    cases.extend([
        (50, 1, "queue"),
        (50, 5, "queue"),
        (50, 20, "queue"),
        (50, 30_000, "queue"),
        (50, 30_000, "sync"),
        (50, 100, "graph"),
        (50, 1000, "graph"),
    ]);
    for (cores, kernel_us, way) in cases {
        alone(rows, &tenants, cores, kernel_us, way)?;
    }
    for [left, right] in [[30, 70], [10, 90], [50, 50]] {
        rows.compare(&format!("{left}:{right}, "), |preload| {
            tenants.get()?.pair(preload, left, right)
        })?;
    }
    waits::rows(setup, args.stop_seconds, rows)
}

/// One tenant, with a limit of GPU time.
pub(super) fn alone<'a>(
    rows: &mut Rows<'_>,
    tenants: &Needed<Tenants<'a>, impl Fn() -> Result<Tenants<'a>>>,
    cores: u32,
    kernel_us: u64,
    way: &str,
) -> Result<()> {
    let title = format!("{cores}% alone, kernels of {kernel_us} µs, {way}");
    rows.compare(&title, |preload| {
        let row = tenants
            .get()?
            .alone(preload, &title, (cores, kernel_us, way))?;
        Ok(vec![row])
    })
}

pub(super) fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

/// The kernel that keeps a GPU busy.
pub(super) fn kernel(setup: &Setup) -> &'static str {
    if setup.is_simulated() { "spin" } else { "work" }
}

pub(super) struct Tenants<'a> {
    setup: &'a Setup,
    seconds: f64,
    /// Memory of a share.
    pub(super) memory_bytes: u64,
    rounds_per_us: f64,
    overhead_us: f64,
}

impl<'a> Tenants<'a> {
    pub(super) fn new(setup: &'a Setup, seconds: f64) -> Result<Self> {
        let mut tenants = Self {
            setup,
            seconds,
            memory_bytes: setup.gpu()?.total_bytes / 4,
            rounds_per_us: 0.0,
            overhead_us: 0.0,
        };
        let done: Done = json(tenants.work(None, &[1000], "queue", false))
            .context("cannot keep the GPU busy without limits")?;
        tenants.rounds_per_us = done.rounds_per_us;
        tenants.overhead_us = done.overhead_us;
        Ok(tenants)
    }

    /// The command of a tenant; with `wait` it starts together with others.
    pub(super) fn work(
        &self,
        share: Option<&Share>,
        kernels_us: &[u64],
        way: &str,
        wait: bool,
    ) -> Command {
        let kernel = kernel(self.setup);
        let mut command = self.setup.suite(share, &["work", "--kernel", kernel]);
        let kernels_us: Vec<String> = kernels_us.iter().map(u64::to_string).collect();
        command
            .args(["--kernel-us", &kernels_us.join(",")])
            .args(["--seconds", &self.seconds.to_string()])
            .args(["--way", way]);
        if self.rounds_per_us > 0.0 {
            command
                .args(["--rounds-per-us", &self.rounds_per_us.to_string()])
                .args(["--overhead-us", &self.overhead_us.to_string()]);
        }
        if wait {
            command.arg("--wait");
        }
        command
    }

    /// One tenant. A program whose launches cannot fill its share must not be slower under the limit.
    fn alone(
        &self,
        preload: Preload,
        title: &str,
        (cores, kernel_us, way): (u32, u64, &str),
    ) -> Result<Row> {
        let share = self
            .setup
            .preloaded(preload, &limits(self.memory_bytes, cores)?)?;
        let free: Done = json(self.work(None, &[kernel_us], way, false))?;
        let capped: Done = json(self.work(Some(&share), &[kernel_us], way, false))?;
        let due = (free.share * 100.0).min(f64::from(cores));
        let off = capped.share.mul_add(100.0, -due);
        Ok(Row::checked(
            title,
            off.abs() <= GOAL_POINTS,
            format!(
                "{} ({off:+.1} points; {} without a limit)",
                percent(capped.share),
                percent(free.share)
            ),
        ))
    }

    /// Two tenants: how they divide the GPU time, and how much of it they use together.
    fn pair(&self, preload: Preload, left: u32, right: u32) -> Result<Vec<Row>> {
        let both = |shares: [Option<&Share>; 2]| -> Result<[f64; 2]> {
            let commands = shares.map(|share| self.work(share, &[1000], "queue", true));
            let done: Vec<Done> = together(commands.into())?;
            match done.as_slice() {
                [left, right] => Ok([left.share, right.share]),
                _ => anyhow::bail!("two processes printed {} results", done.len()),
            }
        };
        let free: f64 = both([None, None])?.iter().sum();
        let shares = [
            self.setup
                .preloaded(preload, &limits(self.memory_bytes, left)?)?,
            self.setup
                .preloaded(preload, &limits(self.memory_bytes, right)?)?,
        ];
        let [first, second] = both([Some(&shares[0]), Some(&shares[1])])?;
        let sum = first + second;
        let off = (first / sum).mul_add(100.0, -f64::from(left));
        Ok(vec![
            Row::checked(
                format!("{left}:{right}, division"),
                off.abs() <= GOAL_POINTS,
                format!(
                    "{} : {} ({off:+.1} points)",
                    percent(first),
                    percent(second)
                ),
            ),
            Row::checked(
                format!("{left}:{right}, sum"),
                sum >= GOAL_SUM * free,
                format!("{} of the {} without limits", percent(sum), percent(free)),
            ),
        ])
    }
}
