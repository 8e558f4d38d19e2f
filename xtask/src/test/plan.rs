//! The tasks of a run and their order.

use std::process::Command;
use std::time::Instant;

use anyhow::Result;
use drava_cluster::Kubernetes;
use drava_cluster::prerequisite::Prerequisite;

use super::binaries::{self, Suite};
use super::libtest::Outcome;
use super::log::{self, Log};
use super::schedule::{Load, Task};
use super::{
    Args, Report, Shared, Stage, aarch64, alerts, chart, dashboards, deny, e2e, miri, state_metrics,
};
use crate::deploy;

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

/// Returns the tasks of the stages.
pub(super) fn plan<'a>(
    stages: &[Stage],
    args: &'a Args,
    shared: &'a Shared<'a>,
    started: Instant,
) -> Vec<Task<'a, Report>> {
    let has = |stage| stages.contains(&stage);
    let has_cluster = [Stage::Cluster, Stage::E2e, Stage::E2eNodes, Stage::Oldest]
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
            let directory = drava_cluster::workspace_root().join("tests/oracle/scheduler");
            drava_cluster::build_program(&directory, "scheduler", Kubernetes::V1_37)?;
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
    let mut promtool = None;
    if has(Stage::Chart) || has(Stage::E2e) {
        promtool = plan.add(Stage::Chart, "build-promtool", Load::Heavy, &[], |_| {
            drava_cluster::promtool()?;
            Ok(Outcome::default())
        });
    }
    // Shares most packages with promtool.
    let mut prometheus = None;
    if has(Stage::E2e) {
        prometheus = plan.add(
            Stage::E2e,
            "build-prometheus",
            Load::Heavy,
            &[promtool],
            |_| {
                drava_cluster::prometheus()?;
                Ok(Outcome::default())
            },
        );
    }
    let mut kueue = None;
    if has(Stage::E2e) {
        kueue = plan.add(Stage::E2e, "build-kueue", Load::Heavy, &[tools], |_| {
            drava_cluster::kueue()?;
            Ok(Outcome::default())
        });
    }
    if has(Stage::Deny) {
        plan.add(Stage::Deny, "deny", Load::Heavy, &[], deny::run);
    }
    if has(Stage::Chart) {
        plan.add(Stage::Chart, "chart", Load::Light, &[tools], chart::check);
        plan.add(Stage::Chart, "state-metrics", Load::Light, &[], |_| {
            Ok(state_metrics::check())
        });
        plan.add(
            Stage::Chart,
            "alerts",
            Load::Light,
            &[promtool],
            alerts::check,
        );
        plan.add(
            Stage::Chart,
            "dashboards",
            Load::Light,
            &[promtool],
            dashboards::check,
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
    // After the tests of the cluster, which observe the host, the machine has two clusters at a time: that of e2e, until the
    // tests with measured times, and the others in turn, the last of which takes a part of the tests of e2e.
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
    let mut nodes = None;
    if has(Stage::E2eNodes) {
        let keep = args.keep && !has(Stage::E2e);
        nodes = plan.add(
            Stage::E2eNodes,
            "e2e-nodes",
            Load::Light,
            &[built, tools, cluster, oldest],
            move |_| {
                let (artifacts, binaries) = (shared.artifacts()?, shared.binaries()?);
                let run = |suite, trial, keep| {
                    e2e::on_own_cluster(suite, trial, artifacts, binaries, keep)
                };
                let trials = [
                    (Suite::E2eSimulator, &shared.trial_without_machine),
                    (Suite::E2eModels, &shared.trial_on_models),
                    (Suite::E2eNodes, &shared.trial_on_two_nodes),
                ];
                let filter = args.filter.as_deref();
                let mut selected = Vec::new();
                for (suite, trial) in trials {
                    if binaries::has_tests(suite, binaries, filter)? {
                        selected.push((suite, trial));
                    }
                }
                let mut outcome = Outcome::default();
                let last = selected.len().saturating_sub(1);
                for (index, (suite, trial)) in selected.into_iter().enumerate() {
                    // A cluster that is kept would take the place of the next.
                    outcome += run(suite, trial, keep && index == last)?;
                }
                Ok(outcome)
            },
        );
    }
    let mut e2e = None;
    if has(Stage::E2e) {
        let after = [built, tools, cluster, prometheus, kueue];
        e2e = plan.add(Stage::E2e, "e2e", Load::Light, &after, |_| {
            shared.trial.start(shared.artifacts()?)?;
            let binaries = shared.binaries()?;
            shared.trial.run_from(&shared.queue, Suite::E2e, binaries)
        });
        // A selection of tests is not worth the minute that a cluster takes to start.
        if filter.is_none() {
            let after = [built, tools, cluster, prometheus, kueue, oldest, nodes];
            plan.add(Stage::E2e, "e2e-2", Load::Light, &after, |_| {
                let (artifacts, binaries) = (shared.artifacts()?, shared.binaries()?);
                e2e::on_second_cluster(&shared.second_trial, &shared.queue, artifacts, binaries)
            });
        }
    }
    // Cargo runs one command at a time in its target directory.
    if has(Stage::Lint) {
        let clippy = plan.add(Stage::Lint, "clippy", Load::Heavy, &[built], |log| {
            let clippy = ["clippy", "--locked", "--workspace", "--all-targets"];
            log.check(log::cargo(
                &[&clippy[..], &["--", "-D", "warnings"]].concat(),
            ))
        });
        plan.add(Stage::Lint, "aarch64", Load::Heavy, &[clippy], aarch64::run);
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
            let outcome = shared.binaries().and_then(|binaries| {
                let mut outcome = shared.trial.run(Suite::E2eTimed, binaries)?;
                // A cluster that is kept keeps drava.
                if !args.keep {
                    outcome += shared.trial.run(Suite::E2eUninstall, binaries)?;
                }
                Ok(outcome)
            });
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
