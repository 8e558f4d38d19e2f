//! `cargo xtask test`: everything that can be proved without a GPU.
//!
//! The stages are split into tasks, which run alongside each other: the cluster waits most of the time while the unit
//! tests compute. Tests that measure times run last and alone. Every task runs even if another fails, so one run
//! reports all failures. The output of a task goes to a log; the output of failing tests is repeated at the end.

mod alerts;
mod binaries;
mod chart;
mod deny;
mod e2e;
pub(crate) mod libtest;
pub(crate) mod log;
mod miri;
mod proof;
mod schedule;
mod summary;
mod times;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use drava_cluster::Kubernetes;
use drava_cluster::prerequisite::{self, Prerequisite};

use crate::deploy::{self, Artifacts};
use binaries::{Binary, Selection, Suite};
use libtest::Outcome;
use log::Log;
use schedule::{Load, Task};

/// Command line of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these stages.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Stage>,
    /// Skip these stages.
    #[arg(long, value_enum, value_delimiter = ',')]
    skip: Vec<Stage>,
    /// Kubernetes minor version of the cluster of stage e2e.
    #[arg(long, default_value_t)]
    kubernetes: Kubernetes,
    /// Leave the cluster of stage e2e up.
    #[arg(long)]
    keep: bool,
    /// Write the time of each task to this file as JSON.
    #[arg(long, value_name = "FILE")]
    times: Option<PathBuf>,
    /// Run only the tests with this text in their names (stages unit, cluster, e2e and oldest).
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
    /// clippy and rustdoc report nothing.
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
    /// drava on the oldest supported Kubernetes; runs when its sources have changed since it passed.
    Oldest,
    /// The pure parts of libvgpu under Miri; runs only when named.
    Miri,
}

impl Stage {
    const ALL: [Self; 10] = [
        Self::Format,
        Self::Lint,
        Self::Generated,
        Self::Deny,
        Self::Unit,
        Self::Chart,
        Self::Cluster,
        Self::E2e,
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
            Self::Oldest => "oldest",
            Self::Miri => "miri",
        }
    }

    const fn prerequisites(self) -> &'static [Prerequisite] {
        use Prerequisite::{CCompiler, Go, Python, Rust};
        match self {
            Self::Format | Self::Lint | Self::Generated | Self::Deny | Self::Miri => {
                &[Rust, CCompiler]
            }
            Self::Unit => &[Rust, CCompiler, Python],
            Self::Chart => &[Rust, CCompiler, Go],
            Self::Cluster | Self::E2e | Self::Oldest => &Prerequisite::ALL,
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
    let reports = schedule::run(plan(&stages, args, &context, started), cores.min(4));
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
    trial_on_two_nodes: e2e::Trial<'a>,
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
            trial_on_two_nodes: e2e::Trial::with_two_nodes(args.kubernetes, filter),
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

/// The tasks of a run, by the order in which they start where several can.
struct Plan<'a> {
    tasks: Vec<Task<'a, Report>>,
    started: Instant,
}

impl<'a> Plan<'a> {
    /// Adds a task and returns its place, by which other tasks name it.
    fn add(
        &mut self,
        stage: Stage,
        name: &'static str,
        load: Load,
        after: &[Option<usize>],
        work: impl FnOnce(&mut Log) -> Result<Outcome> + Send + 'a,
    ) -> Option<usize> {
        let started = self.started;
        self.tasks.push(Task {
            load,
            after: after.iter().copied().flatten().collect(),
            work: Box::new(move || run_task(stage, name, started, work)),
        });
        Some(self.tasks.len() - 1)
    }

    fn all(&self) -> Vec<Option<usize>> {
        (0..self.tasks.len()).map(Some).collect()
    }
}

fn run_task(
    stage: Stage,
    name: &'static str,
    started: Instant,
    work: impl FnOnce(&mut Log) -> Result<Outcome>,
) -> Report {
    let begun = Instant::now();
    let (log, outcome) = match Log::create(name) {
        Ok(mut log) => {
            eprintln!("==> {name} (log: {})", log.path().display());
            let outcome = work(&mut log);
            (log.path().display().to_string(), outcome)
        }
        Err(error) => (String::new(), Err(error)),
    };
    let outcome = outcome.unwrap_or_else(|error| Outcome::of_check(name, Err(error)));
    let seconds = begun.elapsed().as_secs_f64();
    let verdict = if outcome.count.failed > 0 {
        "FAILED"
    } else {
        "passed"
    };
    eprintln!("    {name} {verdict} in {seconds:.0} s ({})", outcome.count);
    Report {
        stage,
        name,
        log,
        started_s: (begun - started).as_secs_f64(),
        seconds,
        outcome,
    }
}

fn plan<'a>(
    stages: &[Stage],
    args: &'a Args,
    shared: &'a Shared<'a>,
    started: Instant,
) -> Vec<Task<'a, Report>> {
    let has = |stage| stages.contains(&stage);
    let has_cluster = [Stage::Cluster, Stage::E2e, Stage::Oldest]
        .map(has)
        .contains(&true);
    let filter = args.filter.as_deref();
    let mut plan = Plan {
        tasks: Vec::new(),
        started,
    };
    if has(Stage::Format) {
        plan.add(Stage::Format, "format", Load::Light, &[], |log| {
            log.check(log::cargo(&["fmt", "--all", "--check"]))
        });
    }
    if has(Stage::Generated) {
        plan.add(Stage::Generated, "generated", Load::Light, &[], |log| {
            let mut codegen = Command::new(std::env::current_exe()?);
            codegen.args(["codegen", "--check"]);
            log.check(codegen)
        });
    }
    let mut built = None;
    if has(Stage::Unit) || has_cluster {
        let stage = if has(Stage::Unit) {
            Stage::Unit
        } else {
            Stage::E2e
        };
        let tests = plan.add(stage, "build-tests", Load::Heavy, &[], |log| {
            let binaries = binaries::build(log)?;
            let _ = shared.binaries.set(binaries);
            Ok(Outcome::default())
        });
        built = plan.add(stage, "build-images", Load::Heavy, &[tests], |_| {
            let artifacts = deploy::build()?;
            let _ = shared.artifacts.set(artifacts);
            Ok(Outcome::default())
        });
    }
    let mut oracle = None;
    if has(Stage::Unit) && Prerequisite::Go.is_met() {
        oracle = plan.add(Stage::Unit, "build-oracle", Load::Heavy, &[], |_| {
            let directory = drava_cluster::workspace_root().join("tests/oracle/go");
            for release in Kubernetes::ALL {
                drava_cluster::build_program(&directory, "oracle", release)?;
            }
            Ok(Outcome::default())
        });
    }
    let mut tools = None;
    if has_cluster || has(Stage::Chart) {
        tools = plan.add(Stage::Chart, "build-tools", Load::Heavy, &[], move |_| {
            if has_cluster {
                drava_cluster::build_tools(args.kubernetes)?;
            } else {
                drava_cluster::helm()?;
            }
            Ok(Outcome::default())
        });
    }
    if has(Stage::Deny) {
        plan.add(Stage::Deny, "deny", Load::Heavy, &[], deny::run);
    }
    if has(Stage::Chart) {
        plan.add(Stage::Chart, "chart", Load::Light, &[tools], chart::check);
        let promtool = plan.add(Stage::Chart, "build-promtool", Load::Heavy, &[], |_| {
            drava_cluster::promtool()?;
            Ok(Outcome::default())
        });
        plan.add(
            Stage::Chart,
            "alerts",
            Load::Light,
            &[promtool],
            alerts::check,
        );
    }
    let mut cluster = None;
    if has(Stage::Cluster) {
        cluster = plan.add(
            Stage::Cluster,
            "cluster",
            Load::Light,
            &[built, tools],
            |_| shared.tests(Suite::Cluster, "cluster"),
        );
    }
    // Before e2e, whose cluster runs until the tests with measured times: the machine has one cluster at a time.
    let mut oldest = None;
    if has(Stage::Oldest) {
        let tools = plan.add(Stage::Oldest, "build-oldest", Load::Heavy, &[tools], |_| {
            drava_cluster::build_tools(Kubernetes::OLDEST)?;
            Ok(Outcome::default())
        });
        oldest = plan.add(
            Stage::Oldest,
            "oldest",
            Load::Light,
            &[built, tools, cluster],
            |log| {
                let (artifacts, binaries) = (shared.artifacts()?, shared.binaries()?);
                e2e::on_oldest(&shared.trial_on_oldest, artifacts, binaries, log)
            },
        );
    }
    let mut e2e = None;
    if has(Stage::E2e) {
        let nodes = plan.add(
            Stage::E2e,
            "e2e-nodes",
            Load::Light,
            &[built, tools, cluster, oldest],
            |_| {
                let (artifacts, binaries) = (shared.artifacts()?, shared.binaries()?);
                e2e::on_two_nodes(&shared.trial_on_two_nodes, artifacts, binaries)
            },
        );
        e2e = plan.add(
            Stage::E2e,
            "e2e",
            Load::Light,
            &[built, tools, nodes],
            |_| {
                shared.trial.start(shared.artifacts()?)?;
                shared.trial.run(Suite::E2e, shared.binaries()?)
            },
        );
    }
    // Cargo runs one command at a time in its target directory.
    if has(Stage::Lint) {
        let clippy = plan.add(Stage::Lint, "clippy", Load::Heavy, &[built], |log| {
            let clippy = ["clippy", "--locked", "--workspace", "--all-targets"];
            log.check(log::cargo(
                &[&clippy[..], &["--", "-D", "warnings"]].concat(),
            ))
        });
        plan.add(Stage::Lint, "rustdoc", Load::Heavy, &[clippy], |log| {
            // `--examples` counts the features of dev-dependencies, as clippy does; otherwise cargo would check shared
            // dependencies again. The workspace has no examples.
            let mut doc = log::cargo(&[
                "doc",
                "--locked",
                "--workspace",
                "--no-deps",
                "--lib",
                "--bins",
                "--examples",
            ]);
            // Readers of these pages have the sources: links to private items help them.
            doc.env(
                "RUSTDOCFLAGS",
                "-D warnings -A rustdoc::private_intra_doc_links",
            );
            log.check(doc)
        });
    }
    if has(Stage::Unit) {
        plan.add(Stage::Unit, "unit", Load::Heavy, &[built, oracle], |_| {
            shared.tests(Suite::Unit, "unit")
        });
    }
    if has(Stage::E2e) {
        let mut after = plan.all();
        after.push(e2e);
        plan.add(Stage::E2e, "e2e-timed", Load::Alone, &after, |_| {
            let outcome = shared
                .binaries()
                .and_then(|binaries| shared.trial.run(Suite::E2eTimed, binaries));
            shared.trial.end(args.keep)?;
            outcome
        });
    }
    if has(Stage::Unit) {
        let after = plan.all();
        plan.add(Stage::Unit, "unit-timed", Load::Alone, &after, |_| {
            shared.tests(Suite::Timed, "unit")
        });
    }
    if has(Stage::Miri) {
        let after = plan.all();
        plan.add(Stage::Miri, "miri", Load::Alone, &after, move |log| {
            miri::run(filter, log)
        });
    }
    plan.tasks
}
