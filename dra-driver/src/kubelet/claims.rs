//! Prepares and unprepares claims for kubelet: reads the claim from the API server, locks it, applies it, reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drava_api::error::describe;
use drava_api::event::EventReason;
use drava_api::listed::Listed;
use drava_api::{names, reason};
use futures::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{ListParams, VersionMatch};
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use crate::gpus::inventory::{Node, State};
use crate::kubelet::plugin::service::Claims;
use crate::kubelet::proto::dra_v1::Device;
use crate::node::artifacts::Installed;
use crate::node::claim::{ClaimRef, ClaimUid};
use crate::node::lock::{Lock, LockError};
use crate::node::options::Delivery;
use crate::prepare::Prepared;
use crate::prepare::apply::{Applier, ApplyError, Environment, Failure, MissedReclaims, Repairs};
use crate::prepare::effects::Effects;
use crate::prepare::record::ClaimRecord;
use crate::prepare::spec;
use crate::report::pods::{PodRef, beside, is_sandbox, reserving_pods};
use crate::report::{Injection, Reporter, Subject};

/// Time limit of reading one claim from the API server, retries of the client included.
pub(crate) const API_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait for GPU discovery, for the node profiles and for the installation of artifacts after the start of the
/// driver.
const STARTUP_WAIT: Duration = Duration::from_secs(5);

/// Longest wait for devices of a claim that is being released. After an error kubelet retries only once a minute, and
/// its calls time out after 45 s.
pub const RELEASE_WAIT: Duration = Duration::from_secs(20);

/// Time between two checks of claims that are being released.
const RELEASE_POLL: Duration = Duration::from_millis(250);

/// The claim could not be read from the API server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The API server returned an error.
    #[error("claim {claim}: cannot get the claim from the API server")]
    Api {
        /// The claim.
        claim: ClaimRef,
        /// Error of the request.
        #[source]
        source: Box<kube::Error>,
    },
    /// The API server did not answer in time.
    #[error(
        "claim {claim}: cannot get the claim from the API server: no answer within {} s",
        API_TIMEOUT.as_secs()
    )]
    Timeout {
        /// The claim.
        claim: ClaimRef,
    },
    /// This build cannot read the claim.
    #[error("claim {claim}: cannot read the claim: {cause}")]
    Unreadable {
        /// The claim.
        claim: ClaimRef,
        /// Field and cause.
        cause: String,
    },
}

/// Parameters of a list of the claims of the whole cluster, of which a node needs a few: the API server answers it from memory,
/// without a read of the database, and may miss the changes of the last seconds.
pub(crate) fn cached_list() -> ListParams {
    ListParams::default()
        .matching(VersionMatch::NotOlderThan)
        .at("0")
}

/// Returns whether a claim, readable or not, has devices of this pool.
pub(crate) fn has_devices_of(pool: &str, claim: &Listed<ResourceClaim>) -> bool {
    let is_own = |driver: &str, of: &str| driver == names::DRIVER && of == pool;
    match claim {
        Listed::Object(claim) => {
            let status = claim.status.as_ref();
            let allocation = status.and_then(|status| status.allocation.as_ref());
            let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
            let mut results = devices
                .iter()
                .flat_map(|devices| devices.results.iter().flatten());
            results.any(|result| is_own(&result.driver, &result.pool))
        }
        Listed::Unreadable(claim) => {
            let mut devices = claim.devices.iter();
            devices.any(|device| is_own(&device.driver, &device.pool))
        }
    }
}

/// The node cannot prepare claims at present.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// GPU discovery failed.
    #[error("claim {claim}: cannot use the GPUs of this node: {reason}")]
    Gpus {
        /// The claim.
        claim: ClaimRef,
        /// Reason of [`State::Unknown`].
        reason: String,
    },
    /// GPU discovery did not finish within [`STARTUP_WAIT`].
    #[error("claim {claim}: GPU discovery is not complete; kubelet retries")]
    GpusPending {
        /// The claim.
        claim: ClaimRef,
    },
    /// The artifacts cannot be installed.
    #[error("claim {claim}: cannot use libvgpu.so: {reason}")]
    Artifacts {
        /// The claim.
        claim: ClaimRef,
        /// Error of the installation.
        reason: String,
    },
    /// The installation of artifacts did not finish within [`STARTUP_WAIT`].
    #[error("claim {claim}: the installation of libvgpu.so is not complete; kubelet retries")]
    ArtifactsPending {
        /// The claim.
        claim: ClaimRef,
    },
}

/// A blocking task ended without a result.
#[derive(Debug, thiserror::Error)]
#[error("a task of the node driver panicked")]
pub struct TaskError(#[from] tokio::task::JoinError);

/// A pod runs in a runtime that does not apply its claim.
#[derive(Debug, thiserror::Error)]
#[error(
    "claim {claim}: pod {pod} has the RuntimeClass {class:?} with the handler {handler:?}: a runtime with its own kernel \
     does not give containers the devices and limits of claims; use another RuntimeClass, or add it to \
     driver.runtimeClasses if its runtime applies CDI as runc does"
)]
pub struct SandboxError {
    /// The claim.
    pub claim: ClaimRef,
    /// The pod.
    pub pod: String,
    /// Name of the RuntimeClass.
    pub class: String,
    /// Name of the runtime on the node.
    pub handler: String,
}

/// A container has a spatial claim and another one.
#[derive(Debug, thiserror::Error)]
#[error(
    "claim {claim}: the container {container:?} of pod {pod} has the claim {other:?} too; {}",
    reason::BESIDE_SPATIAL
)]
pub struct BesideError {
    /// The claim.
    pub claim: ClaimRef,
    /// The pod.
    pub pod: String,
    /// Name of the container.
    pub container: String,
    /// Name of the other claim.
    pub other: String,
}

/// A claim was not prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PrepareError {
    /// The claim could not be read.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// GPUs or artifacts are not available.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The claim's lock was not acquired.
    #[error("claim {claim}")]
    Lock {
        /// The claim.
        claim: ClaimRef,
        /// Error of the lock.
        #[source]
        source: Box<LockError>,
    },
    /// The allocation is invalid, conflicts with a prepared claim, or the node could not be changed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A pod of the claim runs in a runtime that does not apply the claim.
    #[error(transparent)]
    Sandbox(Box<SandboxError>),
    /// A container has a spatial claim and another one.
    #[error(transparent)]
    Beside(Box<BesideError>),
    /// A task panicked.
    #[error(transparent)]
    Task(#[from] TaskError),
}

impl PrepareError {
    /// Claims that hold the devices; empty unless the reason is a conflict.
    #[must_use]
    pub fn holders(&self) -> &[ClaimRef] {
        match self {
            Self::Apply(error) => match error.failure.as_ref() {
                Failure::Conflict(conflict) => conflict.holders(),
                _ => &[],
            },
            Self::Fetch(_)
            | Self::Environment(_)
            | Self::Lock { .. }
            | Self::Sandbox(_)
            | Self::Beside(_)
            | Self::Task(_) => &[],
        }
    }
}

/// A claim was not unprepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UnprepareError {
    /// The claim's lock was not acquired.
    #[error("claim {claim}")]
    Lock {
        /// The claim.
        claim: ClaimRef,
        /// Error of the lock.
        #[source]
        source: Box<LockError>,
    },
    /// The node could not be changed.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// A task panicked.
    #[error(transparent)]
    Task(#[from] TaskError),
}

/// Limit of the pods whose RuntimeClass is checked at one prepare.
const MAX_PODS: usize = 16;

/// Prepares and unprepares the claims of one node.
pub struct ClaimService<E> {
    /// Pool of the node.
    pub pool: String,
    /// Applies claims to the node.
    pub applier: Arc<Applier<E>>,
    /// Client of the API server.
    pub client: Client,
    /// State of the node's GPUs.
    pub gpus: watch::Receiver<State>,
    /// The installed artifacts or the error of the installation; `None` during the first attempt.
    pub installed: watch::Receiver<Option<Result<Installed, String>>>,
    /// Delivery of libvgpu for claims that are prepared from now on.
    pub delivery: Delivery,
    /// RuntimeClasses whose containers get the devices of claims, whatever the name of their handler.
    pub runtime_classes: Vec<String>,
    /// Queue of events and device statuses.
    pub reporter: Reporter,
    /// Requests a reconciliation.
    pub reconcile: Arc<Notify>,
    /// Longest wait for devices of a claim that is being released.
    pub release_wait: Duration,
    /// Claims whose MIG instances programs hold.
    pub held: Arc<HeldInstances>,
    /// Counts claims for which lent memory was not given back in time.
    pub missed_reclaims: MissedReclaims,
}

/// Attempts after which a pod ends although a program holds the MIG instance of its claim. kubelet repeats an unprepare once a
/// minute.
const HELD_ATTEMPTS: u32 = 3;

/// Claims whose MIG instances could not be destroyed because programs hold them, with the number of attempts.
#[derive(Debug, Default)]
pub struct HeldInstances(Mutex<BTreeMap<ClaimUid, u32>>);

impl HeldInstances {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ClaimUid, u32>> {
        // The map is valid after a panic: every change is one operation.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts an attempt. Returns the number of attempts.
    fn count(&self, uid: &ClaimUid) -> u32 {
        let mut held = self.lock();
        let attempts = held.entry(uid.clone()).or_default();
        *attempts = attempts.saturating_add(1);
        *attempts
    }

    /// Returns whether kubelet has tried to unprepare a claim, part of whose state is removed.
    #[must_use]
    pub fn is_ending(&self, uid: &ClaimUid) -> bool {
        self.lock().contains_key(uid)
    }

    /// Returns whether the pod of a claim has ended without the destruction of the instance.
    #[must_use]
    pub fn is_released(&self, uid: &ClaimUid) -> bool {
        self.lock()
            .get(uid)
            .is_some_and(|count| *count >= HELD_ATTEMPTS)
    }

    /// Releases a claim that kubelet does not unprepare again, as after a restart of the driver.
    pub(crate) fn release(&self, uid: &ClaimUid) {
        self.lock().insert(uid.clone(), HELD_ATTEMPTS);
    }

    /// Ends the account of a claim: its instance is destroyed, or it is prepared again.
    pub(crate) fn forget(&self, uid: &ClaimUid) {
        self.lock().remove(uid);
    }
}

impl<E: Effects> ClaimService<E> {
    /// Reads the claim from the API server; `None` when no claim has this name.
    ///
    /// # Errors
    /// When the API server returns an error or does not answer in time, or when this build cannot read the claim.
    pub async fn fetch(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, FetchError> {
        let claims: Api<Listed<ResourceClaim>> =
            Api::namespaced(self.client.clone(), &claim.namespace);
        match tokio::time::timeout(API_TIMEOUT, claims.get_opt(&claim.name)).await {
            Ok(Ok(None)) => Ok(None),
            Ok(Ok(Some(Listed::Object(found)))) => Ok(Some(*found)),
            Ok(Ok(Some(Listed::Unreadable(unreadable)))) => Err(FetchError::Unreadable {
                claim: claim.clone(),
                cause: unreadable.cause,
            }),
            Ok(Err(source)) => Err(FetchError::Api {
                claim: claim.clone(),
                source: Box::new(source),
            }),
            Err(_) => Err(FetchError::Timeout {
                claim: claim.clone(),
            }),
        }
    }

    /// Returns the GPUs and artifacts. Waits up to [`STARTUP_WAIT`] for each while the driver starts.
    ///
    /// # Errors
    /// When GPUs or artifacts are not available.
    pub async fn environment(
        &self,
        claim: &ClaimRef,
    ) -> Result<(Arc<Node>, Installed), EnvironmentError> {
        let claim = claim.clone();
        let is_known = |state: &State| match state {
            State::Known(node) => node.inventory.settings.is_some(),
            State::Unknown(_) => true,
            State::Pending => false,
        };
        let node = match settled(self.gpus.clone(), is_known).await {
            State::Known(node) => node,
            State::Unknown(reason) => return Err(EnvironmentError::Gpus { claim, reason }),
            State::Pending => return Err(EnvironmentError::GpusPending { claim }),
        };
        match settled(self.installed.clone(), Option::is_some).await {
            Some(Ok(installed)) => Ok((node, installed)),
            Some(Err(reason)) => Err(EnvironmentError::Artifacts { claim, reason }),
            None => Err(EnvironmentError::ArtifactsPending { claim }),
        }
    }

    async fn lock(&self, claim: &ClaimRef) -> Result<Result<Lock, LockError>, TaskError> {
        let (applier, uid) = (Arc::clone(&self.applier), claim.uid.clone());
        blocking(move || applier.locks().claim(&uid)).await
    }

    /// Prepares a claim whose lock is held. `found` is the claim as the API server has it.
    ///
    /// # Errors
    /// When the claim was not prepared. [`PrepareError::holders`] lists conflicting claims.
    pub async fn prepare_locked(
        &self,
        claim: &ClaimRef,
        found: Option<ResourceClaim>,
        lock: Lock,
    ) -> Result<ClaimRecord, PrepareError> {
        let (node, installed) = self.environment(claim).await?;
        let (applier, pool, wanted) = (Arc::clone(&self.applier), self.pool.clone(), claim.clone());
        let delivery = self.delivery;
        let outcome = blocking(move || {
            let environment = Environment {
                pool: &pool,
                inventory: &node.inventory,
                driver: &node.driver,
                installed: &installed,
                delivery,
            };
            let outcome = applier.prepare(&wanted, found.as_ref(), &environment);
            // Released only now: the caller may be cancelled while this task runs.
            drop(lock);
            outcome
        })
        .await?;
        let (record, repairs) = outcome.inspect_err(|error| {
            if matches!(*error.failure, Failure::DamagedRecord(_)) {
                self.reconcile.notify_one();
            }
            if let Failure::Unreturned { cause, .. } = *error.failure {
                self.missed_reclaims.of(cause).inc();
            }
            if matches!(*error.failure, Failure::MigMode { .. }) {
                let note = describe(error);
                self.reporter
                    .event(Subject::Node, EventReason::GpuUnavailable, note);
            }
        })?;
        self.held.forget(&claim.uid);
        self.report_repairs(claim, repairs);
        Ok(record)
    }

    /// Writes the conditions of a claim that has its record.
    pub(crate) fn report(
        &self,
        found: Option<&ResourceClaim>,
        record: &ClaimRecord,
        injection: &Injection,
    ) {
        if let (Some(found), State::Known(node)) = (found, self.gpus.borrow().clone()) {
            self.reporter
                .devices(found, record, &node.inventory, injection);
        }
    }

    /// Checks that the runtimes of the claim's pods apply it. What the API server does not answer in time passes: the check for
    /// containers that did not get their devices follows.
    async fn check_runtime_classes(
        &self,
        claim: &ClaimRef,
        found: &ResourceClaim,
    ) -> Result<(), PrepareError> {
        // The last reservations are the newest; kubelet calls for the first pod of a claim on the node.
        let pods = reserving_pods(found).into_iter().rev().take(MAX_PODS);
        let refused = async {
            let classes = join_all(pods.map(|pod| self.runtime_class(claim, pod))).await;
            let mut classes: BTreeMap<String, PodRef> = classes.into_iter().flatten().collect();
            classes.retain(|class, _| !self.runtime_classes.contains(class));
            let api: Api<RuntimeClass> = Api::all(self.client.clone());
            for (class, pod) in classes {
                let found = answered(claim, api.get_opt(&class).await);
                let handler = found.map_or_else(|| class.clone(), |found| found.handler);
                if is_sandbox(&handler) {
                    return Some((class, handler, pod));
                }
            }
            None
        };
        match tokio::time::timeout(API_TIMEOUT, refused).await {
            Ok(Some((class, handler, pod))) => Err(PrepareError::Sandbox(Box::new(SandboxError {
                claim: claim.clone(),
                pod: format!("{}/{}", pod.namespace, pod.name),
                class,
                handler,
            }))),
            Ok(None) => Ok(()),
            Err(timeout) => {
                warn_of_unread_class(claim, &timeout);
                Ok(())
            }
        }
    }

    /// Checks that no container has a spatial claim and another claim for GPUs. The claim has its record, so that one of two claims
    /// that are prepared at once finds the other. What the API server does not answer in time passes.
    async fn check_containers(
        &self,
        claim: &ClaimRef,
        record: &ClaimRecord,
        pods: Vec<PodRef>,
    ) -> Result<(), PrepareError> {
        let (applier, record) = (Arc::clone(&self.applier), record.clone());
        let others = blocking(move || applier.incompatible_beside(&record)).await?;
        let unchecked = |error: &str| {
            tracing::warn!(
                %claim,
                error,
                "cannot check the containers of the pods of a claim; one with a spatial claim and another one may not be refused"
            );
        };
        let others = others.unwrap_or_else(|error| {
            unchecked(&describe(&error));
            BTreeSet::new()
        });
        if others.is_empty() {
            return Ok(());
        }
        let newest = pods.into_iter().rev().take(MAX_PODS);
        let found = join_all(newest.map(|pod| self.pod(claim, pod)));
        let found = tokio::time::timeout(API_TIMEOUT, found).await;
        let found = found.unwrap_or_else(|_| {
            unchecked("the API server does not answer");
            Vec::new()
        });
        for (found, pod) in found.into_iter().flatten() {
            let beside = beside(&found, &claim.name).into_iter();
            let mut beside = beside.filter(|(_, other)| others.contains(other));
            if let Some((container, other)) = beside.next() {
                return Err(PrepareError::Beside(Box::new(BesideError {
                    claim: claim.clone(),
                    pod: format!("{}/{}", pod.namespace, pod.name),
                    container,
                    other,
                })));
            }
        }
        Ok(())
    }

    /// Returns a pod of a claim.
    async fn pod(&self, claim: &ClaimRef, pod: PodRef) -> Option<(Pod, PodRef)> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let found = answered(claim, pods.get_opt(&pod.name).await)?;
        let is_same = found.metadata.uid.as_deref() == Some(pod.uid.as_str());
        is_same.then_some((found, pod))
    }

    /// Returns the RuntimeClass of a pod of a claim.
    async fn runtime_class(&self, claim: &ClaimRef, pod: PodRef) -> Option<(String, PodRef)> {
        let (found, pod) = self.pod(claim, pod).await?;
        let class = found.spec?.runtime_class_name?;
        Some((class, pod))
    }

    /// Returns whether one of the claims is no longer allocated, so that kubelet unprepares it soon: its pod was
    /// force-deleted and the containers are still terminating.
    async fn is_any_released(&self, claims: &[ClaimRef]) -> bool {
        for claim in claims {
            let is_released = match self.fetch(claim).await {
                Ok(Some(found)) => {
                    found.metadata.uid.as_deref() != Some(claim.uid.as_str())
                        || found
                            .status
                            .is_none_or(|status| status.allocation.is_none())
                }
                Ok(None) => true,
                Err(_) => false,
            };
            if is_released {
                return true;
            }
        }
        false
    }

    /// Raises an event on the claim if anything was repaired.
    pub fn report_repairs(&self, claim: &ClaimRef, Repairs(repairs): Repairs) {
        if !repairs.is_empty() {
            self.reporter.event(
                Subject::Claim(claim.clone()),
                EventReason::ClaimStateRepaired,
                repairs.join("; "),
            );
        }
    }
}

impl<E: Effects> Claims for ClaimService<E> {
    type PrepareError = PrepareError;
    type UnprepareError = UnprepareError;

    async fn prepare(&self, claim: &ClaimRef) -> Result<Vec<Device>, PrepareError> {
        let deadline = Instant::now() + self.release_wait;
        loop {
            let lock = self.lock(claim).await?;
            let lock = lock.map_err(|source| PrepareError::Lock {
                claim: claim.clone(),
                source: Box::new(source),
            })?;
            let found = self.fetch(claim).await?;
            if let Some(found) = &found {
                self.check_runtime_classes(claim, found).await?;
            }
            let pods = found.as_ref().map(reserving_pods).unwrap_or_default();
            let object = found.clone();
            let error = match self.prepare_locked(claim, found, lock).await {
                Ok(record) => {
                    let checked = self.check_containers(claim, &record, pods).await;
                    let injection = match &checked {
                        Err(PrepareError::Beside(error)) => {
                            Injection::Incompatible(error.to_string())
                        }
                        // Others say nothing about the claim.
                        Ok(()) | Err(_) => Injection::Expected,
                    };
                    self.report(object.as_ref(), &record, &injection);
                    return checked.map(|()| devices(&record));
                }
                Err(error) => error,
            };
            if Instant::now() >= deadline || !self.is_any_released(error.holders()).await {
                return Err(error);
            }
            tokio::time::sleep(RELEASE_POLL).await;
        }
    }

    async fn unprepare(&self, claim: &ClaimRef) -> Result<(), UnprepareError> {
        let lock = self.lock(claim).await?;
        let lock = lock.map_err(|source| UnprepareError::Lock {
            claim: claim.clone(),
            source: Box::new(source),
        })?;
        let (applier, wanted) = (Arc::clone(&self.applier), claim.clone());
        let outcome = blocking(move || {
            applier.unprepare(&wanted)?;
            lock.remove();
            Ok::<_, ApplyError>(())
        });
        match outcome.await? {
            Ok(()) => self.held.forget(&claim.uid),
            Err(error) if error.is_instance_held() => {
                let note = describe(&error);
                self.reporter.event(
                    Subject::Claim(claim.clone()),
                    EventReason::PartitionInUse,
                    note,
                );
                if self.held.count(&claim.uid) < HELD_ATTEMPTS {
                    return Err(error.into());
                }
                // The record keeps the slices reserved; the reconciliation repeats the destruction.
                self.reconcile.notify_one();
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Returns what the API server has, and nothing after an error, which is logged.
fn answered<K>(claim: &ClaimRef, answer: kube::Result<Option<K>>) -> Option<K> {
    answer.unwrap_or_else(|error| {
        warn_of_unread_class(claim, &error);
        None
    })
}

fn warn_of_unread_class(claim: &ClaimRef, error: &dyn std::error::Error) {
    tracing::warn!(
        %claim,
        error = describe(error),
        "cannot read the RuntimeClass of a pod; a runtime with its own kernel may not be refused"
    );
}

/// Returns the value once `is_settled`, or the current value after [`STARTUP_WAIT`].
async fn settled<T: Clone>(mut value: watch::Receiver<T>, is_settled: impl Fn(&T) -> bool) -> T {
    let waited = tokio::time::timeout(STARTUP_WAIT, value.wait_for(|value| is_settled(value)));
    if let Ok(Ok(value)) = waited.await {
        return value.clone();
    }
    value.borrow().clone()
}

/// Returns kubelet's devices of a record.
fn devices(record: &ClaimRecord) -> Vec<Device> {
    let device = |device: &Prepared| Device {
        request_names: vec![device.request.clone()],
        pool_name: device.pool.clone(),
        device_name: device.device.clone(),
        cdi_device_ids: spec::device_ids(record, device),
        share_id: device.share().map(|share| share.id.to_string()),
    };
    record.devices.iter().map(device).collect()
}

/// Runs `work` on a thread that may block. `work` runs to its end even if the caller is cancelled.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, TaskError> {
    let span = tracing::Span::current();
    Ok(tokio::task::spawn_blocking(move || span.in_scope(work)).await?)
}
