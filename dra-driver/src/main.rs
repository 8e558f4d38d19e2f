//! Entry point of the node driver.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser as _;
use drava_api::error::describe;
use drava_connection::Limits;
use drava_dra_driver::driver::{self, Config, IdleTimes};
use drava_dra_driver::gpu_health::state::Rules;
use drava_dra_driver::gpus::inventory::Source;
use drava_dra_driver::kubelet::claims;
use drava_dra_driver::mps;
use drava_dra_driver::node::options::{Command, Options};
use drava_dra_driver::node::selinux::Labels;
use drava_dra_driver::node::tmpfs::KernelTmpfs;
use drava_dra_driver::operate::log::{self, LogFilter};
use drava_dra_driver::publish::{self, profile};
use drava_dra_driver::repair::{reconcile, removal};
use drava_dra_driver::report::conditions::Conditions;
use drava_dra_driver::suspend::checkpoint;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// Longest wait, after the tasks, for calls that do not return, as of NVML or of a file system that hangs.
const BLOCKED: Duration = Duration::from_secs(2);

fn main() -> ExitCode {
    for process in [checkpoint::run, mps::process::run] {
        if let Some(code) = process(std::env::args_os()) {
            return code;
        }
    }
    let options = Options::parse();
    let filter = log::start(options.log_format);
    if let Some(Command::RemoveFiles) = options.command {
        return remove_files(&options);
    }
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the threads of the node driver");
            return ExitCode::FAILURE;
        }
    };
    let outcome = runtime.block_on(run(options, filter));
    runtime.shutdown_timeout(BLOCKED);
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "cannot run the node driver");
            ExitCode::FAILURE
        }
    }
}

fn remove_files(options: &Options) -> ExitCode {
    match removal::remove(&options.paths) {
        Ok(removed) => {
            tracing::info!(?removed, "removed the files of the driver");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let error = describe(&error);
            tracing::error!(error, "cannot remove the files of the driver");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options, filter: LogFilter) -> anyhow::Result<()> {
    let Options {
        node_name,
        namespace,
        pod_uid,
        scheduling,
        delivery,
        paths,
        listen,
        metric_aliases,
        ignore_other_owners,
        log_filter_listen,
        runtime_classes,
        health,
        log_format: _,
        command: _,
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
    let client = drava_connection::connect(&Limits::LONG_WATCHES)
        .await
        .map_err(anyhow::Error::from_boxed)
        .context(
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
    tokio::spawn(log::serve(filter, log_filter_listen, stop.clone()));
    let source = Source {
        device_root: paths.device_root(),
        device_files: Some(paths.device_files()),
        ..Source::nvml(paths.driver_root.clone(), paths.driver_root_mount.clone())
    };
    let labels = Labels::of_kernel(Path::new("/proc/self/attr/current"));
    let config = Config {
        node: node_name,
        pod_uid: pod_uid.filter(|uid| !uid.is_empty()),
        scheduling,
        delivery,
        paths,
        proc_root: PathBuf::from("/proc"),
        boot_id_file: PathBuf::from(driver::BOOT_ID),
        // The file of this process, also after it was replaced.
        program: PathBuf::from("/proc/self/exe"),
        labels,
        runtime_classes,
        listen: listen.0,
        orphan_grace: reconcile::GRACE,
        release_wait: claims::RELEASE_WAIT,
        retained_grace: publish::retained::GRACE,
        health: Rules::from(&health),
        unhealthy_effect: health.unhealthy_effect,
        metric_aliases,
        guard: if ignore_other_owners {
            profile::Guard::Ignore
        } else {
            profile::Guard::Refuse
        },
        profile_intervals: profile::Intervals::default(),
        idle: IdleTimes::default(),
    };
    driver::run(
        config,
        client,
        source,
        Arc::new(KernelTmpfs { labels }),
        Conditions::default(),
        stop,
    )
    .await?;
    tracing::info!("stopped");
    Ok(())
}
