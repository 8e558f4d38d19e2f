//! Puts the parts of the driver together and runs them until it is told to stop.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drava_api::names;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::agent::{self, Agent};
use crate::args::{Delivery, Paths, Scheduling};
use crate::artifacts::{self, Installed, Stubs};
use crate::claims::{ClaimService, blocking};
use crate::conditions::{Condition, Conditions};
use crate::directories;
use crate::error::describe;
use crate::health;
use crate::injection;
use crate::inventory::{InventoryThread, Source, State};
use crate::layout::Layout;
use crate::lock::{Lock, Locks};
use crate::plugin::takeover::Standing;
use crate::plugin::{self, Plugin};
use crate::prepare::apply::Applier;
use crate::prepare::effects::{NodeEffects, Tmpfs};
use crate::publish::amounts;
use crate::publish::writer::Publisher;
use crate::reconcile;
use crate::report::{Reason, Reporter, Subject};

/// Time between two attempts at something that a person has to put right.
const RETRY: Duration = Duration::from_secs(5);

/// How long the parts of the driver get to finish; below the 30 s that Kubernetes gives a pod.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// How long something must keep the driver from being ready before people are told.
const LASTING: Duration = Duration::from_secs(5);

/// How long a call waits for a lock that another call or instance holds; below kubelet's time-out of 45 s.
const LOCK_PATIENCE: Duration = Duration::from_secs(20);

/// Findings of the agent that wait to be told.
const FINDINGS: usize = 256;

/// What the driver needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of the node.
    pub node: String,
    /// UID of this pod.
    pub pod_uid: Option<String>,
    /// Who allocates.
    pub scheduling: Scheduling,
    /// How containers of claims to come get libvgpu.
    pub delivery: Delivery,
    /// Directories.
    pub paths: Paths,
    /// Address of the health endpoints.
    pub listen: SocketAddr,
    /// How long a prepared claim must be gone before it is undone without kubelet.
    pub orphan_grace: Duration,
    /// How long a claim waits for the devices of a claim that is leaving.
    pub leaving_patience: Duration,
    /// How long the taint of what is not offered any more stands before that is withdrawn.
    pub retained_grace: Duration,
}

/// The driver cannot run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The health endpoints have no place.
    #[error("listen on {address}; another address can be chosen with --listen")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The thread for NVML could not be started.
    #[error("start the thread that talks to NVML")]
    Thread(#[source] io::Error),
    /// kubelet's directory leaves no room for sockets.
    #[error(transparent)]
    Sockets(#[from] plugin::socket::PathTooLong),
    /// A part ended that must not.
    #[error("{0} has ended unexpectedly")]
    Ended(&'static str),
}

/// Runs the driver until `stop`.
///
/// # Errors
/// What cannot be helped by trying again.
pub async fn run(
    config: Config,
    client: Client,
    source: Source,
    tmpfs: Box<dyn Tmpfs>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let Config {
        node,
        pod_uid,
        scheduling,
        delivery,
        paths,
        listen,
        orphan_grace,
        leaving_patience,
        retained_grace,
    } = config;
    let mut tasks = JoinSet::new();
    let listener = listen_on(listen).await?;
    let endpoints = axum::serve(listener, health::router(conditions.clone()))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move {
        let _ = endpoints.await;
        Ok("the health endpoint")
    });

    let layout = Layout::new(&paths);
    if !until(&stop, directories::make(&layout, &conditions)).await {
        return Ok(());
    }
    let observe = Arc::clone(&source.observe);
    let thread = InventoryThread::start(source).map_err(RunError::Thread)?;
    let agent = agent::Config {
        layout: layout.clone(),
        proc_root: PathBuf::from("/proc"),
        open: observe,
        estimate: estimate(thread.state()),
    };
    let (reporter, reports) = Reporter::start(client.clone(), node.clone());
    tasks.spawn(async move {
        reports.await;
        Ok("the reporter")
    });
    let untidy = Arc::new(Notify::new());
    tasks.spawn(report_conditions(
        conditions.clone(),
        reporter.clone(),
        stop.clone(),
    ));
    tasks.spawn(follow_gpus(
        thread.state(),
        conditions.clone(),
        Arc::clone(&untidy),
        stop.clone(),
    ));
    let (install, installed) = watch::channel(None);
    tasks.spawn(install_artifacts(
        paths.clone(),
        install,
        conditions.clone(),
        stop.clone(),
    ));

    let locks = Locks::new(layout.locks(), LOCK_PATIENCE);
    let claims = Arc::new(ClaimService {
        pool: names::pool(&node),
        applier: Arc::new(Applier::new(
            layout.clone(),
            locks.clone(),
            NodeEffects::new(layout.clone(), tmpfs),
        )),
        client: client.clone(),
        gpus: thread.state(),
        installed,
        delivery,
        reporter: reporter.clone(),
        untidy: Arc::clone(&untidy),
        leaving_patience,
    });
    let (health, devices) = watch::channel(Vec::new());
    let (stand, standing) = watch::channel(Standing::Unknown);
    let plugin = Plugin {
        kubelet_dir: paths.kubelet_dir.clone(),
        pod_uid,
        claims: Arc::clone(&claims),
        health: devices,
        conditions: conditions.clone(),
        standing,
    };
    tasks.spawn({
        let stop = stop.clone();
        async move {
            Box::pin(plugin::serve(plugin, stop))
                .await
                .map(|()| "the kubelet plugin")
                .map_err(RunError::from)
        }
    });
    let publisher = Publisher {
        client,
        node,
        scheduling,
        gpus: thread.state(),
        health,
        conditions,
        reporter,
        retained_grace,
    };
    let stopped = stop.clone();
    tasks.spawn(async move {
        let lock = become_active(&locks, &stand, &publisher.conditions, &stopped).await;
        if lock.is_some() {
            Box::pin(active(
                publisher,
                claims,
                layout,
                agent,
                orphan_grace,
                untidy,
                stopped,
            ))
            .await;
        }
        Ok("the publisher")
    });

    let ended = supervise(&mut tasks, &stop).await;
    // The thread ends with its handle; the reporter with its last clone.
    drop(thread);
    ended
}

/// Waits until the driver is told to stop, or a part of it ends; then gives the parts a while to finish.
async fn supervise(
    tasks: &mut JoinSet<Result<&'static str, RunError>>,
    stop: &CancellationToken,
) -> Result<(), RunError> {
    let outcome = tokio::select! {
        // First: parts that end because they were told to have not ended unexpectedly.
        biased;
        () = stop.cancelled() => Ok(()),
        Some(ended) = tasks.join_next() => {
            let ended = ended.unwrap_or(Err(RunError::Ended("a task that panicked")));
            ended.and_then(|part| Err(RunError::Ended(part)))
        }
    };
    stop.cancel();
    let finished = async { while tasks.join_next().await.is_some() {} };
    if tokio::time::timeout(SHUTDOWN, finished).await.is_err() {
        tracing::warn!("parts of the driver did not finish in time");
    }
    outcome
}

/// Waits until no other instance on the node is active; nothing when the driver is told to stop first.
async fn become_active(
    locks: &Locks,
    stand: &watch::Sender<Standing>,
    conditions: &Conditions,
    stop: &CancellationToken,
) -> Option<Lock> {
    loop {
        match locks.try_active() {
            Ok(Some(lock)) => {
                stand.send_replace(Standing::Active);
                return Some(lock);
            }
            Ok(None) if stand.send_replace(Standing::Beside) != Standing::Beside => {
                tracing::info!(
                    "another instance publishes this node's devices; taking over when it stops"
                );
                // What it publishes is what this one would: a rolling update goes on.
                conditions.set(Condition::Published, Ok(()));
            }
            Ok(None) => {}
            Err(error) => conditions.set(Condition::Published, Err(describe(&error))),
        }
        if !until(stop, tokio::time::sleep(Duration::from_millis(500))).await {
            return None;
        }
    }
}

/// Does what only one instance on the node may do.
async fn active(
    publisher: Publisher,
    claims: Arc<ClaimService<NodeEffects>>,
    layout: Layout,
    agent: agent::Config,
    grace: Duration,
    untidy: Arc<Notify>,
    stop: CancellationToken,
) {
    let state_dir = layout.state_dir().to_owned();
    let injected = injection::watch(Arc::clone(&claims), layout.clone(), stop.clone());
    let tidy = reconcile::run(Arc::clone(&claims), layout, grace, untidy, stop.clone());
    let agent = run_agent(agent, Arc::clone(&claims), stop.clone());
    tokio::join!(
        publisher.run(stop.clone()),
        agent,
        tidy,
        injected,
        remove_old_artifacts(claims, state_dir, stop)
    );
}

/// What the driver takes in a context of the node's cards, as claims are prepared with.
fn estimate(gpus: watch::Receiver<State>) -> agent::Estimate {
    Arc::new(move |card| match &*gpus.borrow() {
        State::Known(node) => {
            let card = node.inventory.card(card.as_str())?;
            Some(amounts::driver_reserve_bytes(card))
        }
        State::Pending | State::Unknown(_) => None,
    })
}

/// Runs the node agent until `stop`.
async fn run_agent(
    config: agent::Config,
    claims: Arc<ClaimService<NodeEffects>>,
    stop: CancellationToken,
) {
    let (findings, told) = mpsc::channel(FINDINGS);
    let stopped = stop.clone();
    let thread = std::thread::Builder::new().name("agent".to_owned());
    let started = thread.spawn(move || {
        Agent::new(config).run(&stopped, |finding| {
            if let Err(error) = findings.try_send(finding) {
                tracing::warn!(%error, "nobody tells what the agent found");
            }
        });
    });
    match started {
        Ok(_) => agent::tell::run(claims, told, stop).await,
        Err(error) => {
            tracing::error!(%error, "no thread for the node agent: shares keep what they were prepared with");
        }
    }
}

/// Removes libraries and hooks that no claim uses any more, once.
async fn remove_old_artifacts(
    claims: Arc<ClaimService<NodeEffects>>,
    state_dir: PathBuf,
    stop: CancellationToken,
) {
    let mut installed = claims.installed.clone();
    let current = tokio::select! {
        () = stop.cancelled() => return,
        installed = installed.wait_for(|outcome| matches!(outcome, Some(Ok(_)))) => match installed.as_deref() {
            Ok(Some(Ok(installed))) => installed.clone(),
            Ok(Some(Err(_)) | None) | Err(_) => return,
        },
    };
    let removed = blocking(move || {
        // A damaged record may refer to any of them.
        let Some(mut in_use) = claims
            .applier
            .artifacts_in_use()
            .map_err(|error| describe(&error))?
        else {
            return Ok(Vec::new());
        };
        let Installed {
            library,
            hook,
            stubs: Stubs { cuda, nvml },
        } = current;
        in_use.extend([library, hook, cuda, nvml]);
        artifacts::remove_unused(&state_dir, &in_use).map_err(|error| error.to_string())
    });
    match removed.await.and_then(|removed| removed) {
        Ok(removed) => removed
            .iter()
            .for_each(|path| tracing::info!(path = %path.display(), "removed an unused version")),
        Err(error) => tracing::warn!(
            error,
            "cannot remove unused versions of libvgpu and the CDI hook"
        ),
    }
}

/// Raises an event on the node for whatever keeps the driver from being ready for longer than starting takes.
async fn report_conditions(
    conditions: Conditions,
    reporter: Reporter,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    let told = conditions.each_lasting(LASTING, |unmet| {
        for (condition, reason) in unmet {
            reporter.event(
                Subject::Node,
                Reason::NotReady,
                format!("{condition}: {reason}"),
            );
        }
    });
    until(&stop, told).await;
    Ok("the condition report")
}

/// Says whether the GPUs are known.
async fn follow_gpus(
    mut gpus: watch::Receiver<State>,
    conditions: Conditions,
    untidy: Arc<Notify>,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    while until(&stop, gpus.changed()).await {
        let state = gpus.borrow_and_update().clone();
        match state {
            State::Known(node) => {
                let inventory = &node.inventory;
                tracing::info!(
                    cards = inventory.gpus.cards.len(),
                    driver.version = inventory.gpus.driver_version,
                    faults = ?inventory.gpus.faults,
                    "the GPUs are known"
                );
                conditions.set(Condition::Gpus, Ok(()));
                // What claims get may have changed, or could not be restored before.
                untidy.notify_one();
            }
            State::Pending => {}
            State::Unknown(reason) => {
                conditions.set(Condition::Gpus, Err(reason));
            }
        }
    }
    Ok("the inventory")
}

/// Installs the artifacts, trying again until it works.
async fn install_artifacts(
    paths: Paths,
    install: watch::Sender<Option<Result<Installed, String>>>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Result<&'static str, RunError> {
    loop {
        let Paths {
            artifacts_dir,
            state_dir,
            ..
        } = paths.clone();
        let outcome = blocking(move || artifacts::install(&artifacts_dir, &state_dir)).await;
        let outcome = outcome.and_then(|installed| installed.map_err(|error| describe(&error)));
        let done = outcome.is_ok();
        conditions.set(Condition::Artifacts, outcome.clone().map(drop));
        install.send_replace(Some(outcome));
        if done {
            stop.cancelled().await;
        }
        if !until(&stop, tokio::time::sleep(RETRY)).await {
            return Ok("the installer");
        }
    }
}

async fn listen_on(address: SocketAddr) -> Result<TcpListener, RunError> {
    match TcpListener::bind(address).await {
        // A node without IPv6 has only the other half of "all interfaces".
        Err(_) if address.is_ipv6() && address.ip().is_unspecified() => {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        outcome => outcome,
    }
    .map_err(|source| RunError::Listen { address, source })
}

/// Waits for `work` unless the driver is told to stop first; says whether it was done.
async fn until<T>(stop: &CancellationToken, work: impl Future<Output = T>) -> bool {
    tokio::select! {
        () = stop.cancelled() => false,
        _ = work => true,
    }
}
