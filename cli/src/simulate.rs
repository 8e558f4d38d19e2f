//! `kubectl drava simulate`: where pods of a manifest would run, without creating them.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;

use drava_explanation::{simulate, snapshot};

use crate::connection::{Connection, connect};
use crate::output::{self, Output};
use crate::{decision, dump, migrate, tenant};

/// Command line of `simulate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Manifests in YAML or JSON, or directories of them: pods or workloads, and their claims and claim templates; - is standard
    /// input. Repeatable.
    #[arg(short, long, required = true, value_name = "FILE")]
    filename: Vec<PathBuf>,

    /// Number of pods of each pod template and pod; default: the replicas of a workload, otherwise 1.
    #[arg(long, value_name = "N")]
    replicas: Option<NonZeroUsize>,

    /// Cluster from `kubectl drava dump`, instead of the current cluster.
    #[arg(long, value_name = "FILE")]
    dump: Option<PathBuf>,

    #[command(flatten)]
    decision: decision::DecisionOptions,
}

/// Simulates manifests; the exit code is 1 if a pod does not fit.
pub(crate) async fn run(
    connection: &Connection,
    options: &Options,
    output: Output,
) -> anyhow::Result<ExitCode> {
    let mut documents = Vec::new();
    for file in &options.filename {
        documents.extend(migrate::manifest::read(file)?);
    }
    let (objects, namespace) = match &options.dump {
        Some(file) => {
            let namespace = connection.namespace.clone();
            let namespace = namespace.unwrap_or_else(|| "default".to_owned());
            (dump::read(file)?, namespace)
        }
        None => {
            let (client, namespace) = connect(connection).await?;
            (snapshot::fetch_for_new_pods(&client).await?, namespace)
        }
    };
    let (mut snapshot, templates) = objects.into_snapshot();
    tenant::note_left_out(&snapshot.left_out);
    let settings = options.decision.settings(snapshot.settings.as_ref());
    let report = simulate::run(
        &mut snapshot,
        templates,
        documents,
        &namespace,
        options.replicas.map(NonZeroUsize::get),
        &settings,
    )?;
    output::print(&output.format(&report, || report.text())?)?;
    Ok(if report.all_fit() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
