//! Tasks of the active instance: publishing, reconciliation, injection checks, the node agent, sources of metrics,
//! artifact cleanup.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use drava_api::config::Enforcement;
use drava_api::error::describe;
use drava_nvml::GpuUuid;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{cgroup_limits, companions, idle, mps, suspend, until};
use crate::agent::share_metrics::ShareViolation;
use crate::agent::{self, Agent};
use crate::gpu_health::fabric_manager::FabricManager;
use crate::gpu_health::record::RecordFile;
use crate::gpu_health::{self, HealthTable, RecordedFaults};
use crate::gpus::capacity;
use crate::gpus::inventory::State;
use crate::kubelet::claims::{ClaimService, blocking};
use crate::kubelet::plugin::socket::Sockets;
use crate::kubelet::plugin::takeover::{self, InstanceRole};
use crate::metrics::gpu_monitor;
use crate::metrics::{self, Sources};
use crate::mps::Daemons;
use crate::node::artifacts::{self, Installed, Stubs};
use crate::node::layout::Layout;
use crate::node::lock::{Lock, Locks};
use crate::prepare::cgroup_limits::CgroupLimits;
use crate::prepare::effects::NodeEffects;
use crate::prepare::liveness::Inspector;
use crate::prepare::record::{Loaded, RecordError};
use crate::publish::profile::status::StatusWriter;
use crate::publish::writer::Publisher;
use crate::repair::health_report;
use crate::repair::injection;
use crate::repair::reconcile;
use crate::report::conditions::{Condition, Conditions};
use crate::suspend::node::SuspendNode;

/// Length of the queue of the agent's findings.
const FINDINGS: usize = 256;

/// Longest wait for the last writes of the node agent, which takes at most one control period.
const AGENT_STOP: Duration = Duration::from_secs(5);

/// Time between two attempts to become the active instance.
const POLL: Duration = Duration::from_millis(500);

/// State of the active instance.
pub(super) struct Active {
    pub(super) publisher: Publisher,
    pub(super) profile_status: StatusWriter,
    pub(super) claims: Arc<ClaimService<NodeEffects>>,
    pub(super) layout: Layout,
    pub(super) agent: agent::Config,
    pub(super) cgroup_limits: Arc<CgroupLimits>,
    pub(super) mps: Arc<Daemons>,
    pub(super) suspend: SuspendNode,
    pub(super) health: HealthTable,
    pub(super) record: RecordFile,
    pub(super) fabric_manager: Arc<FabricManager>,
    pub(super) metrics: Sources,
    pub(super) sockets: Sockets,
    pub(super) orphan_grace: Duration,
    pub(super) idle_retry: Duration,
    pub(super) reconcile_request: Arc<Notify>,
    pub(super) stop: CancellationToken,
}

impl Active {
    /// Waits until no other instance is active, then runs the tasks until the driver stops.
    pub(super) async fn run_when_active(self, locks: &Locks, role: &watch::Sender<InstanceRole>) {
        let conditions = &self.publisher.conditions;
        let lock = become_active(locks, role, conditions, &self.sockets, &self.stop).await;
        if lock.is_some() {
            Box::pin(self.run()).await;
        }
    }

    async fn run(self) {
        let Self {
            publisher,
            profile_status,
            claims,
            layout,
            agent,
            cgroup_limits,
            mps: daemons,
            suspend,
            health,
            record,
            fabric_manager,
            metrics,
            sockets: _,
            orphan_grace,
            idle_retry,
            reconcile_request,
            stop,
        } = self;
        let state_dir = layout.state_dir().to_owned();
        let inspector = Inspector {
            proc_root: agent.proc_root.clone(),
            claims: layout.claims(),
            open: Arc::clone(&agent.open),
        };
        let recorded = recorded_faults(&record);
        let mut known = recorded.clone();
        // A GPU that went away while no driver ran is lost, not unknown.
        for gpu in claimed_gpus(Arc::clone(&claims)).await {
            known.entry(gpu).or_default();
        }
        health.restore(known, Instant::now());
        let gpu_table = metrics.gpus.clone();
        let tables = gpu_monitor::Tables {
            telemetry: metrics.gpus,
            health: health.clone(),
        };
        let monitor = gpu_monitor::run(
            tables,
            claims.gpus.clone(),
            Arc::clone(&agent.open),
            fabric_manager,
            stop.clone(),
        );
        let health_report = health_report::run(
            Arc::clone(&claims),
            health.subscribe(),
            recorded,
            stop.clone(),
        );
        let gpu_health = gpu_health::run(health, claims.gpus.clone(), record, stop.clone());
        let claim_view =
            metrics::claim_view::run(Arc::clone(&claims), metrics.claims, stop.clone());
        let injection = injection::watch(Arc::clone(&claims), layout.clone(), stop.clone());
        let companions = companions::run(
            Arc::clone(&claims),
            layout.clone(),
            agent.followed.clone(),
            stop.clone(),
        );
        let suspend = suspend::run(Arc::clone(&claims), suspend, stop.clone());
        let socket = layout.cgroup_limits_socket();
        let cgroup_limits = cgroup_limits::run(cgroup_limits, socket, stop.clone());
        let faults = (metrics.operations.mps.clone(), gpu_table);
        let mps = mps::run(Arc::clone(&claims), daemons, faults, stop.clone());
        let reconcile = reconcile::run(
            Arc::clone(&claims),
            layout,
            inspector,
            orphan_grace,
            reconcile_request,
            stop.clone(),
        );
        let metrics_of_shares = agent.metrics.subscribe();
        let idle = idle::run(
            Arc::clone(&claims),
            metrics_of_shares,
            idle_retry,
            stop.clone(),
        );
        let violations = metrics.violations.clone();
        let agent = run_agent(agent, Arc::clone(&claims), violations, stop.clone());
        tokio::join!(
            publisher.run(stop.clone()),
            profile_status.run(stop.clone()),
            agent,
            reconcile,
            injection,
            companions,
            cgroup_limits,
            mps,
            suspend,
            idle,
            monitor,
            gpu_health,
            health_report,
            claim_view,
            remove_unused_artifacts(claims, state_dir, stop)
        );
    }
}

/// Returns the faults that an earlier instance recorded. Without a readable record no fault is known.
fn recorded_faults(record: &RecordFile) -> RecordedFaults {
    record.read().unwrap_or_else(|error| {
        let path = record.path().display();
        tracing::warn!(%path, %error, "cannot read the recorded faults of the GPUs; GPUs count as healthy until the next fault");
        RecordedFaults::new()
    })
}

/// Returns the GPUs of the prepared claims. Damaged records are rebuilt by the reconciliation.
async fn claimed_gpus(claims: Arc<ClaimService<NodeEffects>>) -> BTreeSet<GpuUuid> {
    let read = blocking(move || {
        let store = claims.applier.store();
        let mut gpus = BTreeSet::new();
        for uid in store.list()?.recorded {
            if let Loaded::Present(record) = store.load(&uid)? {
                let devices = record.devices.into_iter();
                gpus.extend(devices.map(|device| GpuUuid::new(device.gpu.uuid)));
            }
        }
        Ok::<_, RecordError>(gpus)
    });
    let read = read.await.map_err(|error| describe(&error));
    let read = read.and_then(|read| read.map_err(|error| describe(&error)));
    read.unwrap_or_else(|error| {
        tracing::warn!(error, "cannot read the GPUs of the claim records");
        BTreeSet::new()
    })
}

/// Acquires the lock of the active instance; `None` when the driver stops first.
async fn become_active(
    locks: &Locks,
    role: &watch::Sender<InstanceRole>,
    conditions: &Conditions,
    sockets: &Sockets,
    stop: &CancellationToken,
) -> Option<Lock> {
    loop {
        let acquired = match takeover::yields(conditions, sockets).await {
            true => Ok(None),
            false => locks.try_active(),
        };
        match acquired {
            Ok(Some(lock)) => {
                role.send_replace(InstanceRole::Active);
                return Some(lock);
            }
            Ok(None) if role.send_replace(InstanceRole::Standby) != InstanceRole::Standby => {
                tracing::info!("standby: another instance publishes the devices of this node");
                // The active instance publishes the same devices, so a rolling update may proceed.
                conditions.set(Condition::Published, Ok(()));
            }
            Ok(None) => {}
            Err(error) => conditions.set(Condition::Published, Err(describe(&error))),
        }
        if !until(stop, tokio::time::sleep(POLL)).await {
            return None;
        }
    }
}

/// Returns the estimate of the driver reserve that claims are prepared with.
pub(super) fn estimate(gpus: watch::Receiver<State>) -> agent::Estimate {
    Arc::new(move |gpu| match &*gpus.borrow() {
        State::Known(node) => {
            let gpu = node.inventory.gpu(gpu.as_str())?;
            Some(capacity::driver_reserve_bytes(gpu))
        }
        State::Pending | State::Unknown(_) => None,
    })
}

/// Returns the memory that the shares of a GPU can get together, without what is oversubscribed; `None` where host memory can
/// become GPU memory that no limit counts.
pub(super) fn allocatable(gpus: watch::Receiver<State>) -> agent::Estimate {
    Arc::new(move |uuid| match &*gpus.borrow() {
        State::Known(node) => {
            let gpu = node.inventory.gpu(uuid.as_str())?;
            let offer = node.inventory.plan(gpu).share_offer()?;
            let is_enforceable = capacity::unenforceable(gpu, Enforcement::Report).is_none();
            let bytes = offer.max_memory_bytes.min(offer.totals.memory_bytes);
            is_enforceable.then_some(bytes)
        }
        State::Pending | State::Unknown(_) => None,
    })
}

/// Runs the node agent until `stop`.
async fn run_agent(
    config: agent::Config,
    claims: Arc<ClaimService<NodeEffects>>,
    violations: watch::Sender<Arc<[ShareViolation]>>,
    stop: CancellationToken,
) {
    let (sender, findings) = mpsc::channel(FINDINGS);
    let (is_running, ended) = oneshot::channel::<()>();
    let stopped = stop.clone();
    let thread = std::thread::Builder::new().name("agent".to_owned());
    let started = thread.spawn(move || {
        let _is_running = is_running;
        Agent::new(config).run(&stopped, |finding| {
            if let Err(error) = sender.try_send(finding) {
                tracing::warn!(%error, "cannot report a finding of the node agent");
            }
        });
    });
    match started {
        Ok(_) => {
            agent::enforcement_events::run(claims, findings, violations, stop).await;
            // The end of the process must not cut off the last writes to the limits pages. The channel closes with the thread.
            if tokio::time::timeout(AGENT_STOP, ended).await.is_err() {
                tracing::warn!(
                    "the node agent does not stop; shares keep the limits that it has set"
                );
            }
        }
        Err(error) => {
            tracing::error!(%error, "cannot start the node agent; shares keep the limits set at prepare");
        }
    }
}

/// Removes versions of libvgpu.so, the CDI hook and stubs that no claim uses, once after installation.
async fn remove_unused_artifacts(
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
        // A damaged record may refer to any version.
        let in_use = claims.applier.artifacts_in_use();
        let Some(mut in_use) = in_use.map_err(|error| describe(&error))? else {
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
    let removed = removed.await.map_err(|error| describe(&error));
    match removed.and_then(|removed| removed) {
        Ok(removed) => removed
            .iter()
            .for_each(|path| tracing::info!(path = %path.display(), "removed an unused artifact")),
        Err(error) => tracing::warn!(error, "cannot remove unused artifacts"),
    }
}
