//! Puts the parts of the driver together and runs them until it is told to stop.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use drava_api::event::EventReason;
use drava_api::names;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::agent;
use crate::agent::observe::Open;
use crate::args::{Delivery, Paths, Scheduling};
use crate::artifacts::{self, Installed};
use crate::claims::{ClaimService, blocking};
use crate::conditions::{Condition, Conditions};
use crate::directories;
use crate::error::describe;
use crate::health;
use crate::inventory::{InventoryThread, Source, State};
use crate::layout::Layout;
use crate::lock::Locks;
use crate::plugin::health::Devices;
use crate::plugin::takeover::Standing;
use crate::plugin::{self, Plugin};
use crate::prepare::apply::Applier;
use crate::prepare::effects::{NodeEffects, Tmpfs};
use crate::publish::writer::Publisher;
use crate::report::{Reporter, Subject};

mod active;

use active::Active;

/// Time between two attempts at something that a person has to put right.
const RETRY: Duration = Duration::from_secs(5);

/// How long the parts of the driver get to finish; below the 30 s that Kubernetes gives a pod.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// How long something must keep the driver from being ready before people are told.
const LASTING: Duration = Duration::from_secs(5);

/// How long a call waits for a lock that another call or instance holds; below kubelet's time-out of 45 s.
const LOCK_PATIENCE: Duration = Duration::from_secs(20);

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

/// Parts of the driver that run; each says which it was when it ends.
type Tasks = JoinSet<Result<&'static str, RunError>>;

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
    let mut tasks = Tasks::new();
    serve_endpoints(&mut tasks, config.listen, &conditions, &stop).await?;
    let layout = Layout::new(&config.paths);
    if !until(&stop, directories::make(&layout, &conditions)).await {
        return Ok(());
    }
    let observe = Arc::clone(&source.observe);
    let thread = InventoryThread::start(source).map_err(RunError::Thread)?;
    let (reporter, reports) = Reporter::start(client.clone(), config.node.clone());
    tasks.spawn(async move {
        reports.await;
        Ok("the reporter")
    });
    let shared = Shared {
        locks: Locks::new(layout.locks(), LOCK_PATIENCE),
        layout,
        client,
        gpus: thread.state(),
        conditions,
        reporter,
        untidy: Arc::new(Notify::new()),
        stop: stop.clone(),
        config,
    };
    shared.follow(&mut tasks);
    let installed = shared.install(&mut tasks);
    let claims = shared.claims(tmpfs, installed);
    let (health, devices) = watch::channel(Vec::new());
    let (stand, standing) = watch::channel(Standing::Unknown);
    shared.serve_kubelet(&mut tasks, Arc::clone(&claims), devices, standing);
    shared.publish(&mut tasks, claims, observe, health, stand);
    drop(shared);

    let ended = supervise(&mut tasks, &stop).await;
    // The thread ends with its handle; the reporter with its last clone.
    drop(thread);
    ended
}

async fn serve_endpoints(
    tasks: &mut Tasks,
    listen: SocketAddr,
    conditions: &Conditions,
    stop: &CancellationToken,
) -> Result<(), RunError> {
    let listener = listen_on(listen).await?;
    let endpoints = axum::serve(listener, health::router(conditions.clone()))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move {
        let _ = endpoints.await;
        Ok("the health endpoint")
    });
    Ok(())
}

/// What the parts of the driver have in common.
struct Shared {
    config: Config,
    client: Client,
    layout: Layout,
    locks: Locks,
    gpus: watch::Receiver<State>,
    conditions: Conditions,
    reporter: Reporter,
    untidy: Arc<Notify>,
    stop: CancellationToken,
}

impl Shared {
    /// Tells how the driver and the GPUs are.
    fn follow(&self, tasks: &mut Tasks) {
        let (conditions, stop) = (&self.conditions, &self.stop);
        tasks.spawn(report_conditions(
            conditions.clone(),
            self.reporter.clone(),
            stop.clone(),
        ));
        tasks.spawn(follow_gpus(
            self.gpus.clone(),
            conditions.clone(),
            Arc::clone(&self.untidy),
            stop.clone(),
        ));
    }

    /// Installs what containers use.
    fn install(&self, tasks: &mut Tasks) -> watch::Receiver<Option<Result<Installed, String>>> {
        let (install, installed) = watch::channel(None);
        tasks.spawn(install_artifacts(
            self.config.paths.clone(),
            install,
            self.conditions.clone(),
            self.stop.clone(),
        ));
        installed
    }

    fn claims(
        &self,
        tmpfs: Box<dyn Tmpfs>,
        installed: watch::Receiver<Option<Result<Installed, String>>>,
    ) -> Arc<ClaimService<NodeEffects>> {
        let effects = NodeEffects::new(self.layout.clone(), tmpfs);
        let applier = Applier::new(self.layout.clone(), self.locks.clone(), effects);
        Arc::new(ClaimService {
            pool: names::pool(&self.config.node),
            applier: Arc::new(applier),
            client: self.client.clone(),
            gpus: self.gpus.clone(),
            installed,
            delivery: self.config.delivery,
            reporter: self.reporter.clone(),
            untidy: Arc::clone(&self.untidy),
            leaving_patience: self.config.leaving_patience,
        })
    }

    fn serve_kubelet(
        &self,
        tasks: &mut Tasks,
        claims: Arc<ClaimService<NodeEffects>>,
        devices: watch::Receiver<Devices>,
        standing: watch::Receiver<Standing>,
    ) {
        let plugin = Plugin {
            kubelet_dir: self.config.paths.kubelet_dir.clone(),
            pod_uid: self.config.pod_uid.clone(),
            claims,
            health: devices,
            conditions: self.conditions.clone(),
            standing,
        };
        let stop = self.stop.clone();
        tasks.spawn(async move {
            let served = Box::pin(plugin::serve(plugin, stop)).await;
            served
                .map(|()| "the kubelet plugin")
                .map_err(RunError::from)
        });
    }

    /// Publishes the cards, and does what else only one instance on the node may do, as soon as this is that one.
    fn publish(
        &self,
        tasks: &mut Tasks,
        claims: Arc<ClaimService<NodeEffects>>,
        observe: Open,
        health: watch::Sender<Devices>,
        stand: watch::Sender<Standing>,
    ) {
        let publisher = Publisher {
            client: self.client.clone(),
            node: self.config.node.clone(),
            scheduling: self.config.scheduling,
            gpus: self.gpus.clone(),
            health,
            conditions: self.conditions.clone(),
            reporter: self.reporter.clone(),
            retained_grace: self.config.retained_grace,
        };
        let agent = agent::Config {
            layout: self.layout.clone(),
            proc_root: PathBuf::from("/proc"),
            open: observe,
            estimate: active::estimate(self.gpus.clone()),
        };
        let active = Active {
            publisher,
            claims,
            layout: self.layout.clone(),
            agent,
            orphan_grace: self.config.orphan_grace,
            untidy: Arc::clone(&self.untidy),
            stop: self.stop.clone(),
        };
        let locks = self.locks.clone();
        tasks.spawn(async move {
            active.run_when_alone(&locks, &stand).await;
            Ok("the publisher")
        });
    }
}

/// Waits until the driver is told to stop, or a part of it ends; then gives the parts a while to finish.
async fn supervise(tasks: &mut Tasks, stop: &CancellationToken) -> Result<(), RunError> {
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
                EventReason::NotReady,
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
