//! The stages that test drava on a cluster.

use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context, Result};
use drava_cluster::{HostLock, Kubernetes, Machine, Options, workspace_root};

use super::binaries::{self, Binary, Queue, Selection, Suite};
use super::libtest::Outcome;
use super::log::Log;
use super::proof::Proof;
use crate::deploy::{self, Artifacts};

/// What decides whether drava works on another release of Kubernetes.
const INPUTS: [&str; 8] = [
    "Cargo.lock",
    "api",
    "cdi",
    "controller",
    "dra-driver",
    "deploy/helm/drava",
    "tests/cluster",
    "tests/e2e",
];

/// The cluster of one release with drava.
pub(crate) struct Trial<'a> {
    name: &'static str,
    kubernetes: Kubernetes,
    nodes: Vec<Machine>,
    has_pod_groups: bool,
    /// Whether drava is installed before the tests.
    has_drava: bool,
    filter: Option<&'a str>,
    /// Held while the cluster runs.
    lock: Mutex<Option<HostLock>>,
}

impl<'a> Trial<'a> {
    /// The cluster `name` of one node with the default machine.
    pub(crate) fn new(name: &'static str, kubernetes: Kubernetes, filter: Option<&'a str>) -> Self {
        Self {
            name,
            kubernetes,
            nodes: vec![Machine::default()],
            has_pod_groups: false,
            has_drava: true,
            filter,
            lock: Mutex::new(None),
        }
    }

    /// The cluster of two nodes: the default machine, and one T4 with an A100 and an A30 in MIG mode. From 1.37 on it has
    /// the PodGroup API of Kubernetes.
    pub(crate) fn with_two_nodes(kubernetes: Kubernetes, filter: Option<&'a str>) -> Self {
        let second = workspace_root().join("tests/e2e/machines/t4-a100-a30.yaml");
        Self {
            nodes: vec![Machine::default(), Machine::File(second)],
            has_pod_groups: kubernetes != Kubernetes::V1_36,
            ..Self::new("e2e-nodes", kubernetes, filter)
        }
    }

    /// The cluster of two nodes with GPUs that users of other systems have: T4 and A100 in MIG mode, and eight RTX 4090.
    pub(crate) fn with_other_models(kubernetes: Kubernetes, filter: Option<&'a str>) -> Self {
        let machine = |name: &str| {
            Machine::File(workspace_root().join(format!("tests/e2e/machines/{name}.yaml")))
        };
        Self {
            nodes: vec![machine("t4-a100"), machine("rtx-4090x8")],
            ..Self::new("e2e-models", kubernetes, filter)
        }
    }

    /// The cluster of one node without a simulated machine and without drava, which is not ready without GPUs.
    pub(crate) fn without_machine(kubernetes: Kubernetes, filter: Option<&'a str>) -> Self {
        Self {
            nodes: vec![Machine::None],
            has_drava: false,
            ..Self::new("e2e-simulator", kubernetes, filter)
        }
    }

    fn state(&self) -> PathBuf {
        Options::named(self.name).state
    }

    /// Starts the cluster, with drava unless the tests install it.
    pub(crate) fn start(&self, artifacts: &Artifacts) -> Result<()> {
        let lock = drava_cluster::lock_host()?;
        drava_cluster::down(&self.state()).context("end an earlier cluster of these tests")?;
        let options = Options {
            kubernetes: self.kubernetes,
            nodes: self.nodes.clone(),
            pod_groups: self.has_pod_groups,
            ..Options::named(self.name)
        };
        if self.has_drava {
            deploy::start(options, artifacts)?;
        } else {
            deploy::start_cluster(options, artifacts)?;
        }
        *self
            .lock
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = Some(lock);
        Ok(())
    }

    /// Runs the tests of `suite` on the cluster.
    pub(crate) fn run(&self, suite: Suite, binaries: &[Binary]) -> Result<Outcome> {
        self.run_from(&Queue::default(), suite, binaries)
    }

    /// Runs the tests of `suite` that no other cluster with `queue` has begun.
    pub(crate) fn run_from(
        &self,
        queue: &Queue,
        suite: Suite,
        binaries: &[Binary],
    ) -> Result<Outcome> {
        let environment = [("DRAVA_E2E_STATE", self.state())];
        let selection = Selection {
            filter: self.filter,
            environment: &environment,
            logs: self.name,
        };
        binaries::run_from(queue, suite, binaries, selection)
    }

    /// Ends the cluster, or leaves it up and prints how to reach it.
    pub(crate) fn end(&self, keep: bool) -> Result<()> {
        if keep && let Ok(cluster) = drava_cluster::attach(&self.state()) {
            eprintln!(
                "    the cluster is up: export KUBECONFIG={}",
                cluster.kubeconfig().display()
            );
        } else {
            drava_cluster::down(&self.state()).context("end the cluster of the e2e tests")?;
        }
        self.lock
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        Ok(())
    }
}

/// Runs the tests of a suite on its own cluster.
pub(crate) fn on_own_cluster(
    suite: Suite,
    trial: &Trial<'_>,
    artifacts: &Artifacts,
    binaries: &[Binary],
    keep: bool,
) -> Result<Outcome> {
    let outcome = trial
        .start(artifacts)
        .and_then(|()| trial.run(suite, binaries));
    trial.end(keep)?;
    outcome
}

/// Runs tests of [`Suite::E2e`] on a second cluster until `queue` is empty. Starts no cluster if it is.
pub(crate) fn on_second_cluster(
    trial: &Trial<'_>,
    queue: &Queue,
    artifacts: &Artifacts,
    binaries: &[Binary],
) -> Result<Outcome> {
    if queue.is_empty(Suite::E2e, binaries) {
        return Ok(Outcome::default());
    }
    let outcome = trial
        .start(artifacts)
        .and_then(|()| trial.run_from(queue, Suite::E2e, binaries));
    trial.end(false)?;
    outcome
}

/// Whether drava was proved on the oldest release in its present form.
pub(crate) fn proof_on_oldest() -> Result<Proof> {
    let release = Kubernetes::OLDEST.version();
    Proof::of(&format!("e2e-{release}"), workspace_root(), &INPUTS)
}

/// Runs the e2e tests without measured times on the oldest release.
pub(crate) fn on_oldest(
    trial: &Trial<'_>,
    artifacts: &Artifacts,
    binaries: &[Binary],
    log: &mut Log,
) -> Result<Outcome> {
    // Of the sources before the run: they may change meanwhile.
    let proof = proof_on_oldest()?;
    log.note(&format!("Kubernetes {}", trial.kubernetes.version()))?;
    let outcome = trial
        .start(artifacts)
        .and_then(|()| trial.run(Suite::E2e, binaries));
    trial.end(false)?;
    let outcome = outcome?;
    if outcome.count.failed == 0 && outcome.count.passed > 0 && trial.filter.is_none() {
        proof.record()?;
    }
    Ok(outcome)
}
