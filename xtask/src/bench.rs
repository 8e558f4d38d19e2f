//! `cargo xtask bench`: figures, as JSON and as Markdown.
//!
//! Each bench is a module that returns rows; this one reads the command line and writes them down. What is compared
//! is measured in turn in one run. Everything here runs on the simulated card, and the figures say so.

mod agent;
mod figures;
mod hami_baseline;
mod hook;
mod memory;
mod report;
mod share;
mod startup;

use std::path::PathBuf;

use anyhow::Result;

use report::Report;

/// Command line of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which bench.
    #[arg(value_enum)]
    name: Name,
    /// Write the figures to this file, one JSON object.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the figures to this file as Markdown, instead of to `docs/results/NAME.md`.
    #[arg(long, value_name = "FILE")]
    markdown: Option<PathBuf>,
    /// Seconds of each measurement that takes a while.
    #[arg(long, default_value_t = 10.0, value_name = "SECONDS")]
    seconds: f64,
    /// Rounds of each comparison.
    #[arg(long, default_value_t = 10, value_name = "COUNT")]
    rounds: usize,
    /// Measure only what has this in its name, which is that of its part and what its first column says.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Leave out what is measured only for comparison.
    #[arg(long)]
    without_yardstick: bool,
}

impl Args {
    /// Whether that is to be measured.
    fn includes(&self, what: &str) -> bool {
        self.only
            .as_ref()
            .is_none_or(|only| what.contains(only.as_str()))
    }
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Name {
    /// What the node agent costs.
    Agent,
    /// What a hooked launch costs.
    Hook,
    /// Whether memory limits hold, and what that costs.
    Memory,
    /// How exactly shares of GPU time are kept.
    Share,
    /// What the start of a process costs.
    Startup,
}

impl Name {
    const fn text(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Hook => "hook",
            Self::Memory => "memory",
            Self::Share => "share",
            Self::Startup => "startup",
        }
    }
}

/// Runs the chore.
pub(crate) fn run(args: &Args) -> Result<()> {
    let name = args.name.text();
    let mut report = Report::new(name)?;
    match args.name {
        Name::Agent => agent::run(args, &mut report)?,
        Name::Hook => hook::run(args, &mut report)?,
        Name::Memory => memory::run(args, &mut report)?,
        Name::Share => share::run(args, &mut report)?,
        Name::Startup => startup::run(args, &mut report)?,
    }
    if let Some(path) = &args.json {
        report.write_json(path)?;
    }
    let markdown = args.markdown.clone().unwrap_or_else(|| {
        drava_cluster::workspace_root()
            .join("docs/results")
            .join(format!("{name}.md"))
    });
    report.write_markdown(&markdown)?;
    println!("{}", report.markdown());
    Ok(())
}
