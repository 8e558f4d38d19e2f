//! Starts the tasks of the driver and supervises them until the driver stops.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use drava_api::names;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::agent;
use crate::gpu_health::HealthTable;
use crate::gpu_health::fabric_manager::FabricManager;
use crate::gpu_health::record::RecordFile;
use crate::gpu_health::state::Rules;
use crate::gpus::inventory::{InventoryThread, OpenLibrary, ReadRecords, Recorded, Source, State};
use crate::gpus::nvml_gate::Gate;
use crate::kubelet::claims::{ClaimService, HeldInstances, blocking};
use crate::kubelet::plugin::health::Devices;
use crate::kubelet::plugin::socket::Sockets;
use crate::kubelet::plugin::takeover::InstanceRole;
use crate::kubelet::plugin::{self, Plugin};
use crate::metrics::operations::Measured;
use crate::metrics::{self, Sources};
use crate::mps::{Daemons, Roots};
use crate::node::artifacts::{self, Artifact, Installed};
use crate::node::claim::ClaimUid;
use crate::node::layout::Layout;
use crate::node::lock::Locks;
use crate::node::options::{Delivery, Paths, Scheduling, UnhealthyEffect};
use crate::node::selinux::Labels;
use crate::node::tmpfs::Tmpfs;
use crate::operate::health;
use crate::prepare::apply::Applier;
use crate::prepare::apply::partitions::recorded;
use crate::prepare::cgroup_limits::CgroupLimits;
use crate::prepare::effects::{NodeAccess, NodeEffects};
use crate::prepare::record::RecordStore;
use crate::publish::profile;
use crate::publish::profile::status::StatusWriter;
use crate::publish::writer::{Published, Publisher};
use crate::repair::directories;
use crate::repair::runtime_config;
use crate::report::Reporter;
use crate::report::conditions::{Condition, Conditions};
use crate::suspend::checkpoint::Checkpointer;
use crate::suspend::node::SuspendNode;
use drava_api::error::describe;

mod active;
mod cgroup_limits;
mod companions;
mod follow;
mod idle;
mod labelled;
mod mps;
mod profiles;
mod records;
mod suspend;

use active::Active;
pub use idle::IdleTimes;

/// Time between two attempts to install the artifacts.
const RETRY: Duration = Duration::from_secs(5);

/// Time limit of the shutdown. Kubernetes kills a pod 30 s after SIGTERM by default.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// Longest wait for a lock. Kubelet's calls time out after 45 s.
const LOCK_WAIT: Duration = Duration::from_secs(20);

/// File with the boot of the node.
pub const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Configuration of the driver.
#[derive(Debug, Clone)]
pub struct Config {
    /// Name of the node.
    pub node: String,
    /// UID of this pod; `None` when only one instance runs on the node.
    pub pod_uid: Option<String>,
    /// Allocator of the devices.
    pub scheduling: Scheduling,
    /// Delivery of libvgpu for claims that are prepared from now on.
    pub delivery: Delivery,
    /// Directories.
    pub paths: Paths,
    /// `/proc` of the node: the driver runs with the PID namespace of the node.
    pub proc_root: PathBuf,
    /// File with the boot of the node, see [`BOOT_ID`].
    pub boot_id_file: PathBuf,
    /// Program whose processes call libcuda, which is the node driver itself.
    pub program: PathBuf,
    /// SELinux labels of the files that containers use.
    pub labels: Labels,
    /// RuntimeClasses whose containers get the devices of claims, whatever the name of their handler.
    pub runtime_classes: Vec<String>,
    /// Address of the health endpoints.
    pub listen: SocketAddr,
    /// How long a prepared claim is missing before it is undone without kubelet, see [`crate::repair::reconcile::GRACE`].
    pub orphan_grace: Duration,
    /// Longest wait for devices of a claim that is being released, see [`crate::kubelet::claims::RELEASE_WAIT`].
    pub release_wait: Duration,
    /// How long a retained device is tainted before it is withdrawn, see [`crate::publish::retained::GRACE`].
    pub retained_grace: Duration,
    /// Rules of the health of GPUs.
    pub health: Rules,
    /// Effect of the taint of unhealthy GPUs.
    pub unhealthy_effect: UnhealthyEffect,
    /// Whether metrics are shown under the names of HAMi and Volcano too.
    pub metric_aliases: bool,
    /// What happens while a GPU has another owner.
    pub guard: profile::Guard,
    /// Times between periodic checks of node profiles.
    pub profile_intervals: profile::Intervals,
    /// When idle shares are reported.
    pub idle: IdleTimes,
}

/// Fatal error of the driver.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// The address of the health endpoints cannot be bound.
    #[error("cannot listen on {address}; choose another address with --listen")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The NVML thread could not be started.
    #[error("cannot start the NVML thread")]
    Thread(#[source] io::Error),
    /// The boot of the node is unknown.
    #[error("cannot read the boot of the node ({BOOT_ID})")]
    BootId(#[source] io::Error),
    /// The path of a socket is too long.
    #[error(transparent)]
    Sockets(#[from] plugin::socket::PathTooLong),
    /// A task ended before the driver stopped.
    #[error("{0} ended unexpectedly")]
    Ended(&'static str),
}

/// Running tasks; each returns its name.
type Tasks = JoinSet<Result<&'static str, RunError>>;

/// Runs the driver until `stop`.
///
/// # Errors
/// When a retry cannot help. Everything else is retried and shown as a condition.
pub async fn run(
    config: Config,
    client: Client,
    source: Source,
    tmpfs: Arc<dyn Tmpfs>,
    conditions: Conditions,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let sockets = Sockets::new(&config.paths.kubelet_dir, config.pod_uid.as_deref())?;
    let mut tasks = Tasks::new();
    let health = HealthTable::new(config.health.clone());
    let metrics = Sources {
        aliases_of_node: config.metric_aliases.then(|| config.node.clone()),
        ..Sources::new(conditions.clone(), health.subscribe())
    };
    serve_endpoints(&mut tasks, config.listen, &metrics, &stop).await?;
    let layout = Layout::new(&config.paths);
    if !until(&stop, directories::create(&layout, &conditions)).await {
        return Ok(());
    }
    let fabric_manager = FabricManager::new(source.sysfs.clone(), config.proc_root.clone());
    let (gate, cgroups) = (Gate::default(), source.cgroups.clone());
    let source = gate.gated(source);
    let observe = Arc::clone(&source.observe);
    let cgroup_limits = CgroupLimits::new(layout.clone(), cgroups, Arc::clone(&observe));
    let cgroup_limits = Arc::new(cgroup_limits);
    let roots = Roots {
        driver: config.paths.driver_root_mount.clone(),
        device: config.paths.device_root().map(|(mount, _)| mount),
        proc: config.proc_root.clone(),
    };
    let mps = Arc::new(Daemons::new(
        layout.clone(),
        config.program.clone(),
        roots,
        config.labels,
        Arc::clone(&tmpfs),
    ));
    let access = NodeAccess {
        mps: Arc::clone(&mps),
        open: Arc::clone(&observe),
        cgroup_limits: Arc::clone(&cgroup_limits),
        proc_root: config.proc_root.clone(),
        boot_id: boot_id(&config.boot_id_file).map_err(RunError::BootId)?,
        labels: config.labels,
        device_files: source.device_files.clone(),
    };
    let held = Arc::new(HeldInstances::default());
    let records = read_records(
        RecordStore::new(layout.claims()),
        access.boot_id.clone(),
        Arc::clone(&held),
    );
    let source = Source {
        mps: layout.mps(),
        ..source
    };
    let thread = InventoryThread::start(source, records).map_err(RunError::Thread)?;
    let record = RecordFile::new(layout.gpu_health(), access.boot_id.clone());
    let (reporter, reports) =
        Reporter::start(client.clone(), config.node.clone(), health.subscribe());
    tasks.spawn(async move {
        reports.await;
        Ok("event reporter")
    });
    let (state_sender, state) = watch::channel(State::Pending);
    let published = watch::Sender::new(Published::default());
    let shared = Shared {
        locks: Locks::new(layout.locks(), LOCK_WAIT),
        layout,
        sockets,
        client,
        gpus: state,
        conditions,
        metrics,
        reporter,
        reconcile: Arc::new(Notify::new()),
        held,
        boot_id: access.boot_id.clone(),
        stop: stop.clone(),
        config,
    };
    shared.follow(&mut tasks);
    let profiles = shared.follow_profiles(&mut tasks, thread.state(), &published, state_sender);
    let (requests, node) = (thread.requests(), profiles.node.clone());
    shared.follow_release(&mut tasks, gate, requests, node);
    let installed = shared.install(&mut tasks);
    let claims = shared.claims(tmpfs, access, installed);
    let (kubelet_devices, devices) = watch::channel(Vec::new());
    let (role_sender, role) = watch::channel(InstanceRole::Unknown);
    shared.serve_kubelet(&mut tasks, Arc::clone(&claims), devices, role);
    let publishing = shared.publishing(&health, kubelet_devices, published, profiles);
    let health = GpuHealth {
        table: health,
        record,
        fabric_manager: Arc::new(fabric_manager),
    };
    let agent = (observe, cgroup_limits, mps);
    shared.publish(&mut tasks, publishing, claims, agent, health, role_sender);
    drop(shared);

    let ended = supervise(&mut tasks, &stop).await;
    // Dropping the handle ends the thread; the reporter ends with its last clone.
    drop(thread);
    ended
}

fn boot_id(file: &Path) -> io::Result<String> {
    Ok(std::fs::read_to_string(file)?.trim().to_owned())
}

/// Returns the reader of the claim records for discovery.
fn read_records(store: RecordStore, boot_id: String, held: Arc<HeldInstances>) -> ReadRecords {
    Box::new(move || {
        let is_released = |uid: &ClaimUid| held.is_released(uid);
        recorded(&store, &boot_id, is_released).unwrap_or_else(|error| {
            tracing::warn!(
                error = describe(&error),
                "cannot read the GPUs of the claim records"
            );
            Recorded::default()
        })
    })
}

async fn serve_endpoints(
    tasks: &mut Tasks,
    listen: SocketAddr,
    metrics: &Sources,
    stop: &CancellationToken,
) -> Result<(), RunError> {
    let listener = listen_on(listen).await?;
    let router = health::router(metrics.conditions.clone());
    let endpoints = axum::serve(listener, router.merge(metrics::router(metrics.clone())))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    tasks.spawn(async move {
        let _ = endpoints.await;
        Ok("health endpoint")
    });
    Ok(())
}

/// Health of the GPUs: the table, its record, and the channel to kubelet.
struct GpuHealth {
    table: HealthTable,
    record: RecordFile,
    fabric_manager: Arc<FabricManager>,
}

/// State that the tasks share.
struct Shared {
    config: Config,
    client: Client,
    layout: Layout,
    sockets: Sockets,
    locks: Locks,
    gpus: watch::Receiver<State>,
    conditions: Conditions,
    metrics: Sources,
    reporter: Reporter,
    reconcile: Arc<Notify>,
    /// Claims whose MIG instances programs hold.
    held: Arc<HeldInstances>,
    /// Boot of the node.
    boot_id: String,
    stop: CancellationToken,
}

impl Shared {
    /// Reports unmet conditions, changes of the GPUs and records of other builds.
    fn follow(&self, tasks: &mut Tasks) {
        let (conditions, stop) = (&self.conditions, &self.stop);
        tasks.spawn(follow::report_conditions(
            conditions.clone(),
            self.reporter.clone(),
            stop.clone(),
        ));
        tasks.spawn(follow::follow_gpus(
            self.gpus.clone(),
            conditions.clone(),
            self.reporter.clone(),
            Arc::clone(&self.reconcile),
            stop.clone(),
        ));
        let (root, reporter, stopped) = (
            self.config.proc_root.join("1/root"),
            self.reporter.clone(),
            stop.clone(),
        );
        tasks.spawn(async move {
            runtime_config::report(root, reporter, stopped).await;
            Ok("check of the container runtime")
        });
        tasks.spawn(follow::report_other_owners(
            self.gpus.clone(),
            conditions.clone(),
            stop.clone(),
        ));
        tasks.spawn(records::check(
            RecordStore::new(self.layout.claims()),
            conditions.clone(),
            stop.clone(),
        ));
    }

    /// Installs the artifacts.
    fn install(&self, tasks: &mut Tasks) -> watch::Receiver<Option<Result<Installed, String>>> {
        let (install, installed) = watch::channel(None);
        tasks.spawn(install_artifacts(
            (self.config.paths.clone(), self.config.labels),
            self.config.proc_root.join("1/root"),
            install,
            self.conditions.clone(),
            self.stop.clone(),
        ));
        installed
    }

    fn claims(
        &self,
        tmpfs: Arc<dyn Tmpfs>,
        access: NodeAccess,
        installed: watch::Receiver<Option<Result<Installed, String>>>,
    ) -> Arc<ClaimService<NodeEffects>> {
        let effects = NodeEffects::new(self.layout.clone(), tmpfs, access);
        let applier = Applier::new(self.layout.clone(), self.locks.clone(), effects);
        Arc::new(ClaimService {
            pool: names::pool(&self.config.node),
            applier: Arc::new(applier),
            client: self.client.clone(),
            gpus: self.gpus.clone(),
            installed,
            delivery: self.config.delivery,
            runtime_classes: self.config.runtime_classes.clone(),
            reporter: self.reporter.clone(),
            reconcile: Arc::clone(&self.reconcile),
            release_wait: self.config.release_wait,
            held: Arc::clone(&self.held),
            missed_reclaims: self.metrics.operations.missed_reclaims.clone(),
        })
    }

    fn serve_kubelet(
        &self,
        tasks: &mut Tasks,
        claims: Arc<ClaimService<NodeEffects>>,
        devices: watch::Receiver<Devices>,
        role: watch::Receiver<InstanceRole>,
    ) {
        let plugin = Plugin {
            sockets: self.sockets.clone(),
            claims: Arc::new(Measured {
                claims,
                operations: self.metrics.operations.clone(),
            }),
            health: devices,
            conditions: self.conditions.clone(),
            role,
        };
        let stop = self.stop.clone();
        tasks.spawn(async move {
            Box::pin(plugin::serve(plugin, stop)).await;
            Ok("kubelet plugin")
        });
    }

    /// Runs the tasks of the active instance once this instance is active.
    fn publish(
        &self,
        tasks: &mut Tasks,
        (publisher, profile_status): (Publisher, StatusWriter),
        claims: Arc<ClaimService<NodeEffects>>,
        (observe, cgroup_limits, mps): (OpenLibrary, Arc<CgroupLimits>, Arc<Daemons>),
        health: GpuHealth,
        role: watch::Sender<InstanceRole>,
    ) {
        let GpuHealth {
            table,
            record,
            fabric_manager,
        } = health;
        let agent = agent::Config {
            layout: self.layout.clone(),
            proc_root: self.config.proc_root.clone(),
            open: observe,
            estimate: active::estimate(self.gpus.clone()),
            allocatable: active::allocatable(self.gpus.clone()),
            missed_reclaims: self.metrics.operations.missed_reclaims.clone(),
            metrics: self.metrics.shares.clone(),
            idle_after_us: self.config.idle.after_us,
            followed: agent::FollowedRecords::default(),
            terminate: mps::terminate(Arc::clone(&mps)),
        };
        let suspend = SuspendNode {
            layout: self.layout.clone(),
            proc_root: self.config.proc_root.clone(),
            open: Arc::clone(&agent.open),
            checkpointer: Checkpointer::new(
                self.config.program.clone(),
                self.config.proc_root.clone(),
            ),
            boot_id: self.boot_id.clone(),
        };
        let active = Active {
            suspend,
            publisher,
            profile_status,
            claims,
            layout: self.layout.clone(),
            agent,
            cgroup_limits,
            mps,
            health: table,
            record,
            fabric_manager,
            metrics: self.metrics.clone(),
            sockets: self.sockets.clone(),
            orphan_grace: self.config.orphan_grace,
            idle_retry: self.config.idle.retry,
            reconcile_request: Arc::clone(&self.reconcile),
            stop: self.stop.clone(),
        };
        let locks = self.locks.clone();
        tasks.spawn(async move {
            active.run_when_active(&locks, &role).await;
            Ok("publisher")
        });
    }
}

/// Waits until `stop` or the end of a task, then stops all tasks and waits for them up to [`SHUTDOWN`].
async fn supervise(tasks: &mut Tasks, stop: &CancellationToken) -> Result<(), RunError> {
    let outcome = tokio::select! {
        // In this order: a task that ends because of `stop` did not end unexpectedly.
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
        tracing::warn!("tasks did not finish before the shutdown limit");
    }
    outcome
}

/// Installs the artifacts; retries until the installation succeeds.
async fn install_artifacts(
    (paths, labels): (Paths, Labels),
    host_root: PathBuf,
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
        let host_root = host_root.clone();
        let install_all = move || {
            let installed = artifacts::install(&artifacts_dir, &state_dir);
            let installed = installed.map_err(|error| describe(&error))?;
            artifacts::check_executable(&state_dir, &host_root)
                .map_err(|error| describe(&error))?;
            let libraries = Artifact::Library.all(&state_dir);
            let labelled = labels.ensure_all(&libraries);
            labelled.map_err(|error| describe(&error))?;
            Ok(installed)
        };
        let outcome = blocking(install_all).await;
        let outcome = outcome.unwrap_or_else(|error| Err(describe(&error)));
        let done = outcome.is_ok();
        conditions.set(Condition::Artifacts, outcome.clone().map(drop));
        install.send_replace(Some(outcome));
        if done {
            stop.cancelled().await;
        }
        if !until(&stop, tokio::time::sleep(RETRY)).await {
            return Ok("artifact installer");
        }
    }
}

async fn listen_on(address: SocketAddr) -> Result<TcpListener, RunError> {
    match TcpListener::bind(address).await {
        // A node without IPv6 has no [::].
        Err(_) if address.is_ipv6() && address.ip().is_unspecified() => {
            TcpListener::bind((std::net::Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        outcome => outcome,
    }
    .map_err(|source| RunError::Listen { address, source })
}

/// Waits for `work` or `stop`. Returns whether `work` completed.
async fn until<T>(stop: &CancellationToken, work: impl Future<Output = T>) -> bool {
    tokio::select! {
        () = stop.cancelled() => false,
        _ = work => true,
    }
}
