//! `cargo xtask bench`: measurements on simulated GPUs, as JSON and as Markdown.
//!
//! Each bench is a module that returns rows; this module reads the command line and writes the rows. Variants that are
//! compared are measured in turn in one run.

mod agent;
mod decision;
mod hami_baseline;
mod hook;
mod measurements;
mod memory;
mod packing;
mod planning;
mod prepare;
mod report;
mod share;
mod startup;
mod throughput;

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
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
    /// Write the measurements to this Markdown file [default: docs/results/NAME.md].
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Seconds of each long measurement.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// Rounds of each comparison.
    #[arg(long, default_value_t = 10, value_name = "COUNT")]
    rounds: usize,
    /// Measure only rows with this text in their part or first column.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Skip the measurements of HAMi-core's algorithm.
    #[arg(long)]
    without_baseline: bool,
    #[command(flatten)]
    packing: packing::Options,
    #[command(flatten)]
    planning: planning::Options,
    #[command(flatten)]
    throughput: throughput::Options,
}

impl Args {
    /// The Markdown page and its measurements in JSON.
    fn files(&self) -> (PathBuf, PathBuf) {
        let markdown = self.markdown.clone().unwrap_or_else(|| {
            drava_cluster::workspace_root()
                .join("docs/results")
                .join(self.name.text())
                .with_extension("md")
        });
        let json = self.json.clone();
        let json = json.unwrap_or_else(|| markdown.with_extension("json"));
        (markdown, json)
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
    /// Cost of the node agent.
    Agent,
    /// Cost of a decision of the controller in large clusters.
    Decision,
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
    /// Exactness of shares of GPU time.
    Share,
    /// Cost of the start of a process.
    Startup,
    /// Allocations of a real control plane, with the controller and by kube-scheduler alone.
    Throughput,
}

impl Name {
    const fn text(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Decision => "decision",
            Self::Gang => "gang",
            Self::Hook => "hook",
            Self::Memory => "memory",
            Self::Packing => "packing",
            Self::Prepare => "prepare",
            Self::Preemption => "preemption",
            Self::Quota => "quota",
            Self::Share => "share",
            Self::Startup => "startup",
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
        Name::Agent => agent::run(args, &mut report)?,
        Name::Decision => decision::run(&mut report)?,
        Name::Hook => hook::run(args, &mut report)?,
        Name::Memory => memory::run(args, &mut report)?,
        Name::Packing => packing::run(&args.packing, &mut report)?,
        Name::Prepare => prepare::run(&mut report)?,
        Name::Gang | Name::Preemption | Name::Quota => {
            planning::run(name, &args.planning, &mut report)?;
        }
        Name::Share => share::run(args, &mut report)?,
        Name::Startup => startup::run(args, &mut report)?,
        Name::Throughput => throughput::run(args.seconds, &args.throughput, &mut report)?,
    }
    let (markdown, json) = args.files();
    report.write_markdown(&markdown)?;
    report.write_json(&json)?;
    println!("{}", report.markdown());
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
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn writes_measurements_beside_page() {
        let files = |line: &str| CommandLine::parse_from(line.split(' ')).args.files();
        let (page, measurements) = files("bench hook");
        assert!(page.ends_with("docs/results/hook.md"), "{page:?}");
        assert_eq!(measurements, page.with_extension("json"));
        let (page, measurements) = files("bench share --only agent --markdown a/share-agent.md");
        assert_eq!(page, PathBuf::from("a/share-agent.md"));
        assert_eq!(measurements, PathBuf::from("a/share-agent.json"));
    }
}
