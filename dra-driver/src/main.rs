//! Entry point of the node driver.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser as _;
use drava_dra_driver::claims;
use drava_dra_driver::conditions::Conditions;
use drava_dra_driver::driver::{self, Config};
use drava_dra_driver::inventory::Source;
use drava_dra_driver::options::{LogFormat, Options};
use drava_dra_driver::prepare::effects::KernelTmpfs;
use drava_dra_driver::{publish, reconcile};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    start_log(options.log_format);
    match run(options).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "cannot run the node driver");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> anyhow::Result<()> {
    let Options {
        node_name,
        namespace,
        pod_uid,
        scheduling,
        delivery,
        paths,
        listen,
        health,
        log_format: _,
    } = options;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        node = node_name,
        namespace,
        ?scheduling,
        ?delivery,
        driver_root = %paths.driver_root.display(),
        "starting"
    );
    let client = kube::Client::try_default().await.context(
        "cannot find the API server; run in a pod with a service account, or set KUBECONFIG",
    )?;
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot handle SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot handle SIGINT")?;
    let signalled = stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping on a signal");
        signalled.cancel();
    });
    let source = Source::nvml(paths.driver_root.clone(), paths.driver_root_mount.clone());
    let config = Config {
        node: node_name,
        pod_uid: pod_uid.filter(|uid| !uid.is_empty()),
        scheduling,
        delivery,
        paths,
        proc_root: PathBuf::from("/proc"),
        listen: listen.0,
        orphan_grace: reconcile::GRACE,
        release_wait: claims::RELEASE_WAIT,
        retained_grace: publish::retained::GRACE,
        health: health.rules(),
        unhealthy_effect: health.unhealthy_effect,
    };
    driver::run(
        config,
        client,
        source,
        Box::new(KernelTmpfs),
        Conditions::default(),
        stop,
    )
    .await?;
    tracing::info!("stopped");
    Ok(())
}

fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}
