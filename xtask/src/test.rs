//! `cargo xtask test`: everything that can be proved without a GPU, in stages from cheap to dear.
//!
//! Every stage runs even if an earlier one failed, so that one run tells all there is to mend. The output of a stage goes to a
//! log file and is printed when the stage fails.

mod binaries;
mod chart;
mod miri;
pub(crate) mod stage;

use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use drava_cluster::{Kubernetes, Machine, Options};

use crate::deploy;
use binaries::Suite;
use stage::{Count, Log};

/// Command line of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run only these stages.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Stage>,
    /// Leave these stages out.
    #[arg(long, value_enum, value_delimiter = ',')]
    skip: Vec<Stage>,
    /// Kubernetes minor version of the real cluster.
    #[arg(long, default_value_t)]
    kubernetes: Kubernetes,
    /// Leave the cluster of the e2e stage up, to look into it.
    #[arg(long)]
    keep: bool,
    /// Run only the tests whose name contains this (stages unit, cluster and e2e).
    filter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Stage {
    /// rustfmt finds nothing to change.
    Format,
    /// clippy and rustdoc have nothing to say.
    Lint,
    /// Checked-in generated sources are fresh.
    Generated,
    /// Dependencies: licences, sources, banned crates.
    Deny,
    /// Unit, golden, property, protocol and subprocess tests of every crate, and documentation examples.
    Unit,
    /// The chart: lint, and rendering with each set of values.
    Chart,
    /// The cluster harness: start, stop, killed start.
    Cluster,
    /// drava on the real cluster.
    E2e,
    /// The pure parts of libvgpu under Miri; only where it is asked for by name.
    Miri,
}

impl Stage {
    const ALL: [Self; 9] = [
        Self::Format,
        Self::Lint,
        Self::Generated,
        Self::Deny,
        Self::Unit,
        Self::Chart,
        Self::Cluster,
        Self::E2e,
        Self::Miri,
    ];

    /// Whether it is run where no stage is named.
    const fn is_usual(self) -> bool {
        !matches!(self, Self::Miri)
    }

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
            Self::Miri => "miri",
        }
    }

    fn run(self, args: &Args, log: &mut Log) -> Result<Count> {
        let filter = args.filter.as_deref();
        match self {
            Self::Format => log.check(stage::cargo(&["fmt", "--all", "--check"])),
            Self::Lint => lint(log),
            Self::Generated => {
                let mut codegen = Command::new(std::env::current_exe()?);
                codegen.args(["codegen", "--check"]);
                log.check(codegen)
            }
            Self::Deny => deny(log),
            Self::Unit => {
                let mut count = binaries::run(Suite::Unit, filter, &[], log)?;
                if filter.is_none() {
                    count += log.tests(stage::cargo(&["test", "--workspace", "--doc"]))?;
                }
                Ok(count)
            }
            Self::Chart => chart::check(log),
            Self::Cluster => binaries::run(Suite::Cluster, filter, &[], log),
            Self::E2e => e2e(args, log),
            Self::Miri => miri::run(filter, log),
        }
    }
}

/// Runs the chore.
pub(crate) fn run(args: &Args) -> Result<()> {
    let chosen: Vec<Stage> = Stage::ALL
        .into_iter()
        .filter(|stage| match args.only[..] {
            [] => stage.is_usual(),
            _ => args.only.contains(stage),
        })
        .filter(|stage| !args.skip.contains(stage))
        .collect();
    let started = Instant::now();
    let mut total = Count::default();
    let mut failed = Vec::new();
    let mut skips = Vec::new();
    for stage in chosen {
        let stage_started = Instant::now();
        let mut log = Log::create(stage.name())?;
        eprintln!("==> {} (log: {})", stage.name(), log.path().display());
        let outcome = stage.run(args, &mut log);
        let seconds = stage_started.elapsed().as_secs();
        skips.extend_from_slice(log.skips());
        match outcome {
            Ok(count) if count.failed == 0 => {
                eprintln!(
                    "    {} passed in {seconds} s{}",
                    stage.name(),
                    count.describe()
                );
                total += count;
            }
            Ok(count) => {
                eprintln!(
                    "    {} FAILED after {seconds} s{}",
                    stage.name(),
                    count.describe()
                );
                total += count;
                failed.push(stage.name());
                log.print()?;
            }
            Err(error) => {
                eprintln!("    {} FAILED after {seconds} s: {error:#}", stage.name());
                total.failed += 1;
                failed.push(stage.name());
                log.print()?;
            }
        }
    }
    if !skips.is_empty() {
        eprintln!("skipped:");
    }
    for skip in skips {
        eprintln!("    {skip}");
    }
    eprintln!("all stages took {} s", started.elapsed().as_secs());
    println!(
        "{} passed, {} failed, {} skipped",
        total.passed, total.failed, total.skipped
    );
    if failed.is_empty() {
        Ok(())
    } else {
        bail!("failed stages: {}", failed.join(", "))
    }
}

fn lint(log: &mut Log) -> Result<Count> {
    let mut count = log.check(stage::cargo(&[
        "clippy",
        "--workspace",
        "--all-targets",
        "--",
        "-D",
        "warnings",
    ]))?;
    let mut doc = stage::cargo(&["doc", "--workspace", "--no-deps"]);
    // Who reads these pages reads the sources too: a link from a module's page to what is private in it is a help.
    doc.env(
        "RUSTDOCFLAGS",
        "-D warnings -A rustdoc::private_intra_doc_links",
    );
    count += log.check(doc)?;
    Ok(count)
}

/// Version of cargo-deny, installed into the cache when it is not there.
const CARGO_DENY: &str = "0.20.2";

fn deny(log: &mut Log) -> Result<Count> {
    let root = drava_cluster::cache_dir()?.join(format!("cargo-deny-{CARGO_DENY}"));
    let program = root.join("bin/cargo-deny");
    if !program.exists() {
        let mut install = stage::cargo(&[
            "install",
            "--quiet",
            "--locked",
            "cargo-deny",
            "--version",
            CARGO_DENY,
            "--root",
        ]);
        install.arg(&root);
        if log.check(install)?.failed > 0 {
            bail!("cannot install cargo-deny {CARGO_DENY}; `--skip deny` leaves this stage out");
        }
    }
    let mut check = Command::new(program);
    check.args(["--offline", "check", "bans", "licenses", "sources"]);
    log.check(check)
}

fn e2e(args: &Args, log: &mut Log) -> Result<Count> {
    const CLUSTER: &str = "e2e";
    let state = Options::named(CLUSTER).state;
    drava_cluster::down(&state).context("take an earlier cluster of the e2e tests down")?;
    let cluster = deploy::installed(CLUSTER, args.kubernetes, Machine::default())?;
    let environment = [("DRAVA_E2E_STATE".to_owned(), state.display().to_string())];
    let outcome = binaries::run(Suite::E2e, args.filter.as_deref(), &environment, log);
    if args.keep {
        eprintln!(
            "    the cluster is up: export KUBECONFIG={}",
            cluster.kubeconfig().display()
        );
    } else {
        drava_cluster::down(&state).context("take the cluster of the e2e tests down")?;
    }
    outcome
}
