//! `cargo xtask test`: everything that can be proved without a GPU.
//!
//! The stages are split into tasks, which run alongside each other: the cluster waits most of the time while the unit
//! tests compute. Tests that measure times run last and alone. Every task runs even if another fails, so one run
//! reports all failures. The output of a task goes to a log; the output of failing tests is repeated at the end.

mod aarch64;
mod alerts;
mod binaries;
mod chart;
mod dashboards;
mod deny;
mod e2e;
pub(crate) mod libtest;
pub(crate) mod log;
mod miri;
mod plan;
mod proof;
mod schedule;
mod state_metrics;
mod summary;
mod times;

use std::path::PathBuf;
use std::sync::OnceLock;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use drava_cluster::Kubernetes;
use drava_cluster::prerequisite::{self, Prerequisite};

use crate::deploy::Artifacts;
use binaries::{Binary, Queue, Selection, Suite};
use libtest::Outcome;

/// Command line of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these stages.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Stage>,
    /// Skip these stages.
    #[arg(long, value_enum, value_delimiter = ',')]
    skip: Vec<Stage>,
    /// Kubernetes minor version of the clusters of stages e2e and e2e-nodes.
    #[arg(long, default_value_t)]
    kubernetes: Kubernetes,
    /// Leave the cluster of stage e2e up; without it, that of stage e2e-nodes.
    #[arg(long)]
    keep: bool,
    /// Write the time of each task to this file as JSON.
    #[arg(long, value_name = "FILE")]
    times: Option<PathBuf>,
    /// Run only the tests with this text in their names (stages unit, cluster, e2e, e2e-nodes and oldest).
    filter: Option<String>,
}

impl Args {
    fn stages(&self) -> Result<Vec<Stage>> {
        let mut stages: Vec<Stage> = Stage::ALL
            .into_iter()
            .filter(|stage| match self.only[..] {
                [] => *stage != Stage::Miri,
                _ => self.only.contains(stage),
            })
            .filter(|stage| !self.skip.contains(stage))
            .collect();
        // Runs once per change of its sources, and whenever it is named.
        if !self.only.contains(&Stage::Oldest)
            && stages.contains(&Stage::Oldest)
            && (self.filter.is_some() || e2e::proof_on_oldest()?.exists())
        {
            eprintln!(
                "==> oldest: drava in this form has passed on Kubernetes {}; `--only oldest` repeats it",
                Kubernetes::OLDEST
            );
            stages.retain(|stage| *stage != Stage::Oldest);
        }
        Ok(stages)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// rustfmt changes nothing.
    Format,
    /// clippy and rustdoc report nothing; programs of containers compile for aarch64.
    Lint,
    /// Checked-in generated sources are fresh.
    Generated,
    /// Dependencies: licenses, sources, banned crates.
    Deny,
    /// Unit, golden, property, protocol and subprocess tests of every crate, and documentation examples.
    Unit,
    /// The chart: lint, and rendering with each set of values.
    Chart,
    /// The cluster harness: start, stop, killed start.
    Cluster,
    /// drava on the cluster.
    E2e,
    /// drava on clusters of two nodes with different GPUs, and with the GPUs of the chart `gpu-simulator`.
    E2eNodes,
    /// drava on the oldest supported Kubernetes; runs when its sources have changed since it passed.
    Oldest,
    /// The pure parts of libvgpu under Miri; runs only when named.
    Miri,
}

impl Stage {
    const ALL: [Self; 11] = [
        Self::Format,
        Self::Lint,
        Self::Generated,
        Self::Deny,
        Self::Unit,
        Self::Chart,
        Self::Cluster,
        Self::E2e,
        Self::E2eNodes,
        Self::Oldest,
        Self::Miri,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Format => "format",
            Self::Lint => "lint",
            Self::Generated => "generated",
            Self::Deny => "deny",
            Self::Unit => "unit",
            Self::Chart => "chart",
            Self::Cluster => "cluster",
            Self::E2e => "e2e",
            Self::E2eNodes => "e2e-nodes",
            Self::Oldest => "oldest",
            Self::Miri => "miri",
        }
    }

    const fn prerequisites(self) -> &'static [Prerequisite] {
        use Prerequisite::{CCompiler, Chromium, Go, Python, Rust};
        match self {
            Self::Format | Self::Lint | Self::Generated | Self::Deny | Self::Miri => {
                &[Rust, CCompiler]
            }
            Self::Unit => &[Rust, CCompiler, Python, Chromium],
            Self::Chart => &[Rust, CCompiler, Go],
            Self::Cluster | Self::E2e | Self::E2eNodes | Self::Oldest => &Prerequisite::ALL,
        }
    }
}

/// What a task did.
struct Report {
    stage: Stage,
    name: &'static str,
    log: String,
    started_s: f64,
    seconds: f64,
    outcome: Outcome,
}

/// Runs the task.
pub(crate) fn run(args: &Args) -> Result<()> {
    let stages = args.stages()?;
    check_prerequisites(&stages)?;
    let started = Instant::now();
    let context = Shared::new(args);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let reports = schedule::run(plan::plan(&stages, args, &context, started), cores.min(4));
    let outcome = summary::print(&reports);
    let seconds = started.elapsed().as_secs_f64();
    eprintln!("all stages took {seconds:.0} s");
    if let Some(path) = &args.times {
        times::write(path, &reports, seconds)?;
    }
    println!("{}", outcome.count);
    let mut failed: Vec<&str> = reports
        .iter()
        .filter(|report| report.outcome.count.failed > 0)
        .map(|report| report.stage.name())
        .collect();
    failed.dedup();
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("failed stages: {}", failed.join(", "))
    }
}

fn check_prerequisites(stages: &[Stage]) -> Result<()> {
    let needed: Vec<Prerequisite> = Prerequisite::ALL
        .into_iter()
        .filter(|one| {
            stages
                .iter()
                .any(|stage| stage.prerequisites().contains(one))
        })
        .collect();
    prerequisite::check(&needed)
        .context("cannot run these stages; `--only` and `--skip` choose others")?;
    for missing in needed
        .iter()
        .filter(|one| one.is_optional() && !one.is_met())
    {
        eprintln!("missing: {missing}");
    }
    Ok(())
}

/// What tasks leave for each other.
struct Shared<'a> {
    args: &'a Args,
    binaries: OnceLock<Vec<Binary>>,
    artifacts: OnceLock<Artifacts>,
    trial: e2e::Trial<'a>,
    /// Runs a part of the tests of `trial`.
    second_trial: e2e::Trial<'a>,
    /// The tests of `trial` and `second_trial`.
    queue: Queue,
    trial_on_two_nodes: e2e::Trial<'a>,
    trial_on_models: e2e::Trial<'a>,
    trial_without_machine: e2e::Trial<'a>,
    trial_on_oldest: e2e::Trial<'a>,
}

impl<'a> Shared<'a> {
    fn new(args: &'a Args) -> Self {
        let filter = args.filter.as_deref();
        Self {
            args,
            binaries: OnceLock::new(),
            artifacts: OnceLock::new(),
            trial: e2e::Trial::new("e2e", args.kubernetes, filter),
            second_trial: e2e::Trial::new("e2e-2", args.kubernetes, filter),
            queue: Queue::default(),
            trial_on_two_nodes: e2e::Trial::with_two_nodes(args.kubernetes, filter),
            trial_on_models: e2e::Trial::with_other_models(args.kubernetes, filter),
            trial_without_machine: e2e::Trial::without_machine(args.kubernetes, filter),
            trial_on_oldest: e2e::Trial::new("oldest", Kubernetes::OLDEST, filter),
        }
    }

    fn binaries(&self) -> Result<&[Binary]> {
        let built = self.binaries.get().context("the tests were not built")?;
        Ok(built)
    }

    fn artifacts(&self) -> Result<&Artifacts> {
        self.artifacts.get().context("the images were not built")
    }

    /// Runs tests without a cluster, or those of the harness.
    fn tests(&self, suite: Suite, logs: &str) -> Result<Outcome> {
        // The programs are built: tests that start them need no cargo.
        let programs = self.artifacts()?.programs.clone();
        let selection = Selection {
            filter: self.args.filter.as_deref(),
            environment: &[("DRAVA_SIMULATOR_BUILT", programs)],
            logs,
        };
        binaries::run(suite, self.binaries()?, selection)
    }
}
