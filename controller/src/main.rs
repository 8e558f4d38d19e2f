//! `drava-controller`: allocates the ResourceClaims of pods that are pending for GPUs of the drava driver.

use std::sync::Arc;

use anyhow::Context;
use clap::Parser;
use drava_connection::Limits;
use drava_controller::admit::compatibility::templates;
use drava_controller::admit::webhook::{self, WebhookSettings};
use drava_controller::command::options::{Command, LogFormat, Options, UninstallTask};
use drava_controller::command::uninstall;
use drava_controller::decide::planner::Settings;
use drava_controller::explanations;
use drava_controller::leader;
use drava_controller::operate::clock::Clock;
use drava_controller::operate::health::{self, Health};
use drava_controller::operate::metrics::Metrics;
use drava_controller::recommendations;
use drava_controller::write::lease::{LeaseElection, Term};
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    start_log(options.log_format);
    let client = connect().await?;
    if let Some(Command::Uninstall(task)) = options.command {
        return uninstall(&client, &options, task).await;
    }
    // Watches have connections of their own: none of them waits for a connection that only seems to be open.
    let watching = connect().await?;
    let stop = CancellationToken::new();
    stop_on_signal(stop.clone()).context("cannot install signal handlers")?;

    let clock = Clock::boot();
    let health = Arc::new(Health::new(clock.clone()));
    let metrics = Arc::new(Metrics::default());
    let serving = tokio::spawn(health::serve(
        options.listen,
        Arc::clone(&health),
        Arc::clone(&metrics),
        stop.clone(),
    ));
    let admitting = tokio::spawn(serve_webhook(
        client.clone(),
        watching.clone(),
        options.clone(),
        Arc::clone(&health),
        Arc::clone(&metrics),
        stop.clone(),
    ));
    let election = LeaseElection::start(
        client.clone(),
        &options.namespace,
        &options.identity,
        clock,
        Arc::clone(&health),
    );
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        namespace = options.namespace,
        "started"
    );

    let serving = async {
        let served = serving.await;
        stop.cancel();
        served
    };
    let admitting = async {
        let admitted = admitting.await;
        stop.cancel();
        admitted
    };
    // Planning runs on the main thread: it delays neither the lease nor the endpoints, whose tasks have other threads.
    let leading = async {
        lead_when_elected(
            (&client, &watching),
            &options,
            &election,
            &health,
            &metrics,
            &stop,
        )
        .await;
        stop.cancel();
    };
    let (served, admitted, ()) = tokio::join!(serving, admitting, leading);
    // No write is in flight, so another replica may lead.
    election.release().await;
    served
        .context("health endpoint task aborted")?
        .with_context(|| format!("cannot serve the health endpoints on {}", options.listen))?;
    admitted
        .context("webhook task aborted")?
        .context("cannot serve the webhook")
}

async fn connect() -> anyhow::Result<Client> {
    drava_connection::connect(&Limits::SHORT_WATCHES)
        .await
        .map_err(anyhow::Error::from_boxed)
        .context("cannot connect to the API server: no usable service account or kubeconfig")
}

/// Runs a hook of `helm uninstall`. Helm prints the output of a failed one.
async fn uninstall(client: &Client, options: &Options, task: UninstallTask) -> anyhow::Result<()> {
    match task {
        UninstallTask::Check => uninstall::check(client).await?,
        UninstallTask::Clean => {
            let pod = match options.node_cleanup_pod.as_str() {
                "" => None,
                json => {
                    Some(serde_json::from_str(json).context("cannot read DRAVA_NODE_CLEANUP_POD")?)
                }
            };
            uninstall::clean(client, &options.namespace, pod.as_ref()).await?;
        }
    }
    Ok(())
}

/// Serves the webhook, if it has an address, until `stop`.
async fn serve_webhook(
    client: Client,
    watching: Client,
    options: Options,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let Some(listen) = options.webhook_listen else {
        stop.cancelled().await;
        return Ok(());
    };
    health.set_webhook_ready(false);
    let settings = WebhookSettings {
        listen,
        namespace: options.namespace,
        schedulers: options.scheduler_name,
        compatibility: options.compatibility,
    };
    Box::pin(webhook::serve(
        client, watching, settings, health, metrics, stop,
    ))
    .await
}

/// Leads while this replica holds the lease, until `stop`. Returns when no write is in flight.
async fn lead_when_elected(
    (client, watching): (&Client, &Client),
    options: &Options,
    election: &LeaseElection,
    health: &Arc<Health>,
    metrics: &Arc<Metrics>,
    stop: &CancellationToken,
) {
    let mut terms = election.terms();
    while !stop.is_cancelled() {
        // A standby replica is ready.
        health.set_ready(true);
        let is_valid = |term: &Option<Arc<Term>>| term.as_ref().is_some_and(|term| term.is_valid());
        let elected = tokio::select! {
            () = stop.cancelled() => return,
            elected = terms.wait_for(is_valid) => elected.ok().and_then(|term| term.clone()),
        };
        let Some(term) = elected else { return };
        let end = stop.child_token();
        let led = async {
            tokio::join!(
                leader::lead(
                    client.clone(),
                    watching,
                    settings(options),
                    Arc::clone(health),
                    metrics,
                    Arc::clone(&term),
                    end.clone(),
                ),
                rotate_certificate(client, options, &term, &end),
                maintain_templates((client, watching), options, &term, &end),
                Box::pin(maintain_explanations(client, options, &term, &end)),
                Box::pin(maintain_recommendations(client, options, &term, &end)),
            );
        };
        tokio::pin!(led);
        tokio::select! {
            () = &mut led => continue,
            () = term.ended() => {
                tracing::warn!("stopped leading: the lease is lost");
                end.cancel();
            }
        }
        led.await;
    }
}

/// Rotates a self-managed certificate of the webhook until `end`.
async fn rotate_certificate(
    client: &Client,
    options: &Options,
    term: &Term,
    end: &CancellationToken,
) {
    let Some(lifetime) = options
        .webhook_certificate_lifetime
        .filter(|_| options.webhook_listen.is_some())
    else {
        return;
    };
    tokio::select! {
        () = webhook::rotate_certificate(client.clone(), &options.namespace, lifetime, term) => {}
        () = end.cancelled() => {}
    }
}

/// Maintains the claim templates of translated pods until `end`.
async fn maintain_templates(
    (client, watching): (&Client, &Client),
    options: &Options,
    term: &Term,
    end: &CancellationToken,
) {
    if options.compatibility.is_none() {
        return;
    }
    tokio::select! {
        () = templates::maintain(client.clone(), watching.clone(), term) => {}
        () = end.cancelled() => {}
    }
}

/// Maintains the PlacementExplanations until `end`.
async fn maintain_explanations(
    client: &Client,
    options: &Options,
    term: &Term,
    end: &CancellationToken,
) {
    let settings = drava_explanation::explain::Settings {
        policies: options.policies(),
        schedulers: options.scheduler_name.clone(),
    };
    tokio::select! {
        () = explanations::maintain(client.clone(), &settings, term) => {}
        () = end.cancelled() => {}
    }
}

/// Maintains the GpuShareRecommendations until `end`.
async fn maintain_recommendations(
    client: &Client,
    options: &Options,
    term: &Term,
    end: &CancellationToken,
) {
    if !options.recommendations {
        return;
    }
    let metrics = drava_connection::without_credentials(&Limits::SHORT_WATCHES);
    tokio::select! {
        () = recommendations::maintain(client.clone(), metrics, &options.namespace, term) => {}
        () = end.cancelled() => {}
    }
}

fn settings(options: &Options) -> Settings {
    Settings {
        policies: options.policies(),
        schedulers: options.scheduler_name.clone(),
        release_after: options.release_unreserved_after,
        preemption: options.preemption,
    }
}

fn start_log(format: LogFormat) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}

fn stop_on_signal(stop: CancellationToken) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        stop.cancel();
    });
    Ok(())
}
