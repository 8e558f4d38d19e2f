//! `cargo xtask bench NAME`: measurements on simulated GPUs, in `docs/results/raw/NAME.json` and on the page `NAME.md` beside it.
//!
//! Each bench is a module that returns rows; this module reads the command line and writes the rows. Variants that are
//! compared are measured in turn in one run.

mod agent;
mod decision;
mod elastic;
mod goals;
mod hami_baseline;
mod hook;
mod measurements;
mod memory;
mod on_cluster;
mod packing;
mod planning;
mod prepare;
mod report;
mod scale;
mod share;
mod share_agent;
mod startup;
mod suspend;
mod throughput;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum as _;
use simulator_machine::testing::BUILT_VARIABLE;

use report::Report;

/// Command line of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which bench.
    #[arg(value_enum)]
    name: Name,
    /// Write the measurements to this file, one JSON object [default: beside the Markdown file].
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the measurements to this Markdown file [default: docs/results/raw/NAME.md].
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Seconds of each long measurement [default: 10; agent: 30].
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Rounds of each comparison.
    #[arg(long, default_value_t = 10, value_name = "COUNT")]
    rounds: usize,
    /// Measure only rows with this text in their part or first column; share-agent: two, copies, bursts, reclaim or latency.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Skip the measurements of HAMi-core's algorithm.
    #[arg(long)]
    without_baseline: bool,
    #[command(flatten)]
    on_cluster: on_cluster::Options,
    #[command(flatten)]
    packing: packing::Options,
    #[command(flatten)]
    planning: planning::Options,
    #[command(flatten)]
    scale: scale::Options,
    #[command(flatten)]
    throughput: throughput::Options,
}

impl Args {
    /// The Markdown page and its measurements in JSON.
    fn files(&self) -> (PathBuf, PathBuf) {
        let markdown = self.markdown.clone().unwrap_or_else(|| {
            drava_cluster::workspace_root()
                .join("docs/results/raw")
                .join(self.name.text())
                .with_extension("md")
        });
        let json = self.json.clone();
        let json = json.unwrap_or_else(|| markdown.with_extension("json"));
        (markdown, json)
    }

    /// Length of a long measurement.
    fn seconds(&self, default: f64) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(default))
    }

    /// Whether `--only` selects that row.
    fn includes(&self, row: &str) -> bool {
        self.only
            .as_ref()
            .is_none_or(|only| row.contains(only.as_str()))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    /// Every bench, in this order.
    All,
    /// Cost of the node agent.
    Agent,
    /// Cost of a decision of the controller in large clusters.
    Decision,
    /// Shares that grow, shrink and lend on a real cluster, and recommended amounts.
    Elastic,
    /// Time of decisions about gangs.
    Gang,
    /// Cost of a hooked launch.
    Hook,
    /// Exactness of memory limits, and their cost.
    Memory,
    /// Packing quality and speed of the placement policies.
    Packing,
    /// Latency of prepare, and footprint of the node driver.
    Prepare,
    /// Time of decisions about evictions for pods of higher priority.
    Preemption,
    /// Time of decisions about quotas.
    Quota,
    /// The controller in clusters of growing size.
    Scale,
    /// Exactness of shares of GPU time with libvgpu alone.
    Share,
    /// Exactness of shares of GPU time, reclaim and priority with the node agent.
    ShareAgent,
    /// Cost of the start of a process.
    Startup,
    /// Suspension against eviction, and kills during suspensions, on a real cluster.
    Suspend,
    /// Allocations of a real control plane, with the controller and by kube-scheduler alone.
    Throughput,
}

impl Name {
    /// Every bench, in order.
    fn benches() -> impl Iterator<Item = Self> {
        let names = Self::value_variants().iter().copied();
        names.filter(|name| *name != Self::All)
    }

    const fn text(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Agent => "agent",
            Self::Decision => "decision",
            Self::Elastic => "elastic",
            Self::Gang => "gang",
            Self::Hook => "hook",
            Self::Memory => "memory",
            Self::Packing => "packing",
            Self::Prepare => "prepare",
            Self::Preemption => "preemption",
            Self::Quota => "quota",
            Self::Scale => "scale",
            Self::Share => "share",
            Self::ShareAgent => "share-agent",
            Self::Startup => "startup",
            Self::Suspend => "suspend",
            Self::Throughput => "throughput",
        }
    }
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    if matches!(args.name, Name::Hook | Name::Share) && std::env::var_os(BUILT_VARIABLE).is_none() {
        return run_on_fast_machine();
    }
    let name = args.name.text();
    let mut report = Report::new(name)?;
    match args.name {
        Name::All => return run_all(args),
        Name::Agent => agent::run(args, &mut report)?,
        Name::Decision => decision::run(&mut report)?,
        Name::Elastic => elastic::run(args, &mut report)?,
        Name::Hook => hook::run(args, &mut report)?,
        Name::Memory => memory::run(args, &mut report)?,
        Name::Packing => packing::run(&args.packing, &mut report)?,
        Name::Prepare => prepare::run(&mut report)?,
        Name::Gang | Name::Preemption | Name::Quota => {
            planning::run(name, &args.planning, &mut report)?;
        }
        Name::Scale => scale::run(&args.scale, &mut report)?,
        Name::Share => share::run(args, &mut report)?,
        Name::ShareAgent => share_agent::run(args, &mut report)?,
        Name::Startup => startup::run(args, &mut report)?,
        Name::Suspend => suspend::run(args, &mut report)?,
        Name::Throughput => throughput::run(args.seconds(10.0), &args.throughput, &mut report)?,
    }
    let (markdown, json) = args.files();
    println!("{}", report.write(&markdown, &json)?);
    Ok(())
}

/// Runs every bench with the same options, each by a command of its own. A failure does not stop the other benches.
fn run_all(args: &Args) -> Result<()> {
    ensure!(
        args.json.is_none() && args.markdown.is_none(),
        "each bench has files of its own: --json and --markdown need one bench"
    );
    let mut failed = Vec::new();
    for name in Name::benches() {
        let mut words: Vec<_> = std::env::args_os().skip(1).collect();
        let all = words.iter_mut().find(|word| **word == Name::All.text());
        *all.context("no bench on the command line")? = name.text().into();
        let mut bench = Command::new(std::env::current_exe()?);
        let status = bench.args(words).status().context("cannot run the bench")?;
        if !status.success() {
            failed.push(name.text());
        }
    }
    ensure!(failed.is_empty(), "benches failed: {}", failed.join(", "));
    Ok(())
}

/// Runs the same command on a simulated machine that is built for speed.
fn run_on_fast_machine() -> Result<()> {
    let mut bench = Command::new(std::env::current_exe()?);
    bench
        .args(std::env::args_os().skip(1))
        .env(BUILT_VARIABLE, measurements::build_machine()?);
    let status = bench.status().context("cannot run the bench")?;
    ensure!(status.success(), "the bench failed: {status}");
    Ok(())
}

#[cfg(test)]
mod tests;
