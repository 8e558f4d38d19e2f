//! Writes and releases allocations, by one write of the status; a claim that lacks its finalizer gets it before. Every write is
//! guarded by UID and resource version, so it cannot overwrite the change of another writer. The removal of a gate needs no such
//! guard.
//!
//! A request without a definite response may have been executed, or may be executed later. The claim is read back before
//! the next step, and a metadata write changes the resource version, so that the request cannot be executed any more.
//!
//! The admission policy of the chart rejects writes of a replica that does not hold the lease. The API server learns a new
//! holder with a delay, and until then executes late writes of the previous one. So a term starts with a dry run, which is
//! repeated until it is accepted, and only then lists the claims.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use drava_allocator::object::object_key;
use drava_api::error::describe;
use drava_api::listed::Listed;
use drava_api::{names, suspension};
use futures::stream::{self, StreamExt};
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use kube::{Client, Resource};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::action::{
    AllocationFailure, AllocationJob, AllocationOutcome, ClaimWrite, PodAllocation, Release,
    ReleaseOutcome, SuspensionOutcome, SuspensionWrite,
};
use crate::pods::claim::{annotation, is_allocated, is_given_back, is_reserved};
use crate::write::lease::{Term, WRITE_TIMEOUT};

mod gate;
mod request;
mod status;

use request::{ClaimRequests, Failure, Response, StatusChange, fence};

/// Field manager of the writes.
pub const FIELD_MANAGER: &str = "drava-controller";

/// Returns success for an object that is gone, or was changed since it was read: what it is by now comes from its watch.
pub(crate) fn ignore_outdated(result: kube::Result<()>) -> kube::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        result => result,
    }
}

/// Time-outs and retry intervals.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Time-out of one request.
    pub request_timeout: Duration,
    /// First interval between attempts to read a claim back; doubles with each attempt.
    pub first_retry: Duration,
    /// Maximum interval between attempts.
    pub max_retry: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            request_timeout: WRITE_TIMEOUT,
            first_retry: Duration::from_millis(100),
            max_retry: Duration::from_secs(5),
        }
    }
}

/// Pods of a gang whose allocations are written at the same time.
const MAX_PARALLEL: usize = 16;
/// Maximum attempts of a write after update conflicts.
const CONFLICT_LIMIT: u32 = 5;

/// Why a claim was not written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    /// Deleted, or replaced by another claim of the same name.
    #[error("claim {0}: the claim was deleted")]
    Deleted(String),
    /// The admission policy rejects writes of this replica.
    #[error("claim {0}: cannot write the allocation: another replica holds the lease")]
    NotHolder(String),
    /// Allocated by another controller.
    #[error("claim {0}: another controller has allocated the claim")]
    AllocatedElsewhere(String, Box<ResourceClaim>),
    /// The claim has changed after a write without a response: it may have been allocated and released since.
    #[error(
        "claim {0}: the claim has changed since its allocation was written without a response; allocating it again"
    )]
    PossiblyReleased(String, Box<ResourceClaim>),
    /// Reserved while it was being released.
    #[error("claim {0}: cannot release the allocation: the claim is reserved")]
    Reserved(String, Box<ResourceClaim>),
    /// The controller lacks a permission.
    #[error("claim {claim}: the ClusterRole of drava-controller lacks a permission: {message}")]
    Forbidden { claim: String, message: String },
    /// The API server rejects the content.
    #[error("claim {claim}: the API server rejects the allocation: {message}")]
    Rejected { claim: String, message: String },
    /// This build cannot read the claim.
    #[error("claim {claim}: cannot read the claim: {cause}")]
    Unreadable { claim: String, cause: String },
    /// Repeated update conflicts.
    #[error("claim {0}: giving up after repeated update conflicts")]
    Conflicts(String),
    /// This replica stops or has lost the lease.
    #[error("claim {0}: cannot write the allocation: this replica stops or has lost the lease")]
    Stopped(String),
}

impl WriteError {
    /// Returns whether an event is published.
    const fn is_reportable(&self) -> bool {
        matches!(self, Self::Forbidden { .. } | Self::Rejected { .. })
    }

    fn new(claim: String, failure: Failure) -> Self {
        match failure {
            Failure::NotFound => Self::Deleted(claim),
            Failure::Forbidden(message) => Self::Forbidden { claim, message },
            Failure::Rejected(message) => Self::Rejected { claim, message },
            Failure::NotHolder => Self::NotHolder(claim),
            Failure::NotSent => Self::Stopped(claim),
        }
    }

    /// Returns the newest version of the claim if it is known.
    fn into_claim(self) -> Option<ResourceClaim> {
        match self {
            Self::AllocatedElsewhere(_, claim)
            | Self::PossiblyReleased(_, claim)
            | Self::Reserved(_, claim) => Some(*claim),
            _ => None,
        }
    }
}

/// Writes to claims.
#[derive(Clone)]
pub struct Writer {
    requests: ClaimRequests,
    stop: CancellationToken,
    timing: Timing,
}

impl Writer {
    /// Creates a writer that sends no write after `term`; `stop` ends its attempts to read claims back.
    #[must_use]
    pub fn new(client: Client, term: Arc<Term>, stop: CancellationToken, timing: Timing) -> Self {
        Self {
            requests: ClaimRequests::new(client, term, stop.clone(), timing),
            stop,
            timing,
        }
    }

    /// Waits until the API server admits writes of this replica, and so none of an earlier holder any more. What is listed
    /// afterwards has all writes of earlier holders. Reports to `attempted` before each attempt.
    pub async fn wait_until_holder(&self, attempted: impl Fn()) {
        self.requests.wait_until_holder(attempted).await;
    }

    /// Writes the allocations of a job, all or none. After a failure no further write starts; those in flight end first.
    pub async fn allocate(&self, job: AllocationJob) -> AllocationOutcome {
        let writes = job.pods.iter().flat_map(|pod| &pod.writes);
        let keys = writes
            .map(|write| object_key(&write.claim.metadata))
            .collect();
        let has_failed = AtomicBool::new(false);
        let pods = job.pods.iter();
        let pods: Vec<_> = pods
            .map(|pod| self.allocate_pod(pod, &has_failed))
            .collect();
        let outcomes: Vec<_> = stream::iter(pods).buffered(MAX_PARALLEL).collect().await;
        let (written, errors): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
        let mut claims: Vec<ResourceClaim> = written.into_iter().flatten().collect();
        let errors: Vec<WriteError> = errors.into_iter().flatten().collect();
        let failure = errors.first().map(|error| AllocationFailure {
            message: error.to_string(),
            is_reportable: error.is_reportable(),
        });
        if failure.is_some() {
            claims = self.roll_back(claims).await;
            claims.extend(errors.into_iter().filter_map(WriteError::into_claim));
        }
        AllocationOutcome {
            pods: job.pods.iter().map(|pod| pod.uid.clone()).collect(),
            keys,
            claims,
            failure,
        }
    }

    /// Writes the allocations of one pod of a job, one after the other, until a write of the job fails. Returns the written
    /// claims and the failure of this pod.
    async fn allocate_pod(
        &self,
        allocation: &PodAllocation,
        has_failed: &AtomicBool,
    ) -> (Vec<ResourceClaim>, Option<WriteError>) {
        let mut written = Vec::new();
        for write in &allocation.writes {
            if has_failed.load(Ordering::Relaxed) {
                break;
            }
            match self.write_one(write).await {
                Ok(claim) => written.push(claim),
                Err(error) => {
                    has_failed.store(true, Ordering::Relaxed);
                    let PodAllocation { pod, node, .. } = allocation;
                    tracing::warn!(%error, pod = pod.name, namespace = pod.namespace, node, "allocation failed");
                    return (written, Some(error));
                }
            }
        }
        (written, None)
    }

    /// Releases the allocations that a failed job has written. Returns the claims in their newest versions.
    async fn roll_back(&self, written: Vec<ResourceClaim>) -> Vec<ResourceClaim> {
        let releases: Vec<_> = written
            .into_iter()
            .map(|claim| self.take_back(claim))
            .collect();
        let newest = stream::iter(releases).buffered(MAX_PARALLEL);
        newest.filter_map(std::future::ready).collect().await
    }

    async fn take_back(&self, claim: ResourceClaim) -> Option<ResourceClaim> {
        match self.release_claim(claim.clone()).await {
            Ok(released) => Some(released),
            Err(WriteError::Deleted(_)) => None,
            Err(error) => {
                tracing::warn!(%error, "roll-back failed; the allocation is released after the unreserved time-out");
                Some(error.into_claim().unwrap_or(claim))
            }
        }
    }

    /// Releases an allocation.
    pub async fn release(&self, release: Release) -> ReleaseOutcome {
        let claim = match self.release_claim(release.claim.as_ref().clone()).await {
            Ok(released) => Some(released),
            Err(error) => {
                if !matches!(error, WriteError::Reserved(..) | WriteError::Deleted(_)) {
                    tracing::warn!(%error, "cannot release an allocation");
                }
                error.into_claim()
            }
        };
        ReleaseOutcome {
            release,
            claim: claim.map(Box::new),
        }
    }

    /// Writes the intent, or withdraws it, in the version of the claim for which it was decided. When it returns, the write is
    /// not executed any more.
    pub async fn write_suspension(&self, write: SuspensionWrite) -> SuspensionOutcome {
        let SuspensionWrite {
            claim,
            is_intended,
            suspended_for,
        } = write;
        let value = is_intended.then_some(names::SUSPEND);
        let intent = json!({
            "labels": {names::SUSPEND_LABEL: value},
            "annotations": {names::SUSPENDED_FOR_ANNOTATION: suspended_for},
        });
        let response = self.requests.patch_metadata(&claim, &intent).await;
        let newest = match self.newest(claim.as_ref().clone(), response).await {
            Ok(newest) => Some(newest),
            Err(error) => {
                if !matches!(error, WriteError::Deleted(_)) {
                    tracing::warn!(%error, is_intended, "cannot write whether a claim is to be suspended");
                }
                error.into_claim()
            }
        };
        let is_written = newest
            .as_ref()
            .is_some_and(|newest| suspension::is_intended(&newest.metadata) == is_intended);
        SuspensionOutcome {
            key: object_key(&claim.metadata),
            claim: newest.map(Box::new),
            is_written,
        }
    }

    async fn write_one(&self, write: &ClaimWrite) -> Result<ResourceClaim, WriteError> {
        let mut claim = write.claim.as_ref().clone();
        for _ in 0..CONFLICT_LIMIT {
            // The finalizer keeps the claim until kube-controller-manager has seen that nothing uses it.
            if claim.metadata.deletion_timestamp.is_some() && !is_allocated(&claim) {
                return Err(WriteError::Deleted(name_of(&claim)));
            }
            let is_status = is_protected(&claim);
            let response = if is_status {
                let allocation = StatusChange::Allocated(write);
                self.requests.patch_status(&claim, allocation).await
            } else {
                let protection = protection(&claim);
                self.requests.patch_metadata(&claim, &protection).await
            };
            let is_unknown = is_status && matches!(response, Response::Unknown(_));
            let written = claim.metadata.resource_version.clone();
            claim = self.newest(claim, response).await?;
            if has_allocation(&claim, &write.allocation) {
                return Ok(claim);
            }
            if is_allocated(&claim) {
                return Err(WriteError::AllocatedElsewhere(
                    name_of(&claim),
                    Box::new(claim),
                ));
            }
            // Its devices are no longer reserved for this job once an allocation was observed.
            if is_unknown && annotation(&claim, names::WRITE_FENCE_ANNOTATION) != written.as_deref()
            {
                return Err(WriteError::PossiblyReleased(
                    name_of(&claim),
                    Box::new(claim),
                ));
            }
        }
        Err(WriteError::Conflicts(name_of(&claim)))
    }

    /// Releases the allocation that the claim has in this version; never a newer one.
    async fn release_claim(&self, mut claim: ResourceClaim) -> Result<ResourceClaim, WriteError> {
        let released = allocation_of(&claim).cloned();
        for _ in 0..CONFLICT_LIMIT {
            if !is_allocated(&claim) {
                return Ok(claim);
            }
            let change = match is_given_back(&claim) {
                // The pod that has reserved it runs on, with less.
                true => StatusChange::GivenBack,
                false => StatusChange::Released,
            };
            let response = self.requests.patch_status(&claim, change).await;
            claim = self.newest(claim, response).await?;
            if is_reserved(&claim) && !is_given_back(&claim) {
                return Err(WriteError::Reserved(name_of(&claim), Box::new(claim)));
            }
            if is_allocated(&claim)
                && !released
                    .as_ref()
                    .is_some_and(|released| has_allocation(&claim, released))
            {
                return Err(WriteError::AllocatedElsewhere(
                    name_of(&claim),
                    Box::new(claim),
                ));
            }
        }
        Err(WriteError::Conflicts(name_of(&claim)))
    }

    /// Returns the claim after a request.
    async fn newest(
        &self,
        claim: ResourceClaim,
        response: Response,
    ) -> Result<ResourceClaim, WriteError> {
        let claim_name = name_of(&claim);
        match response {
            Response::Success(claim) => Ok(*claim),
            Response::Failed(failure) => Err(WriteError::new(claim_name, failure)),
            Response::Conflict => self.read_back(&claim).await,
            Response::Unknown(error) => {
                tracing::warn!(
                    claim = claim_name,
                    error,
                    "write may have been executed; reading the claim back"
                );
                self.resolve(&claim).await
            }
        }
    }

    /// Returns the claim after a write of this version without a definite response. The write is not executed later.
    async fn resolve(&self, claim: &ResourceClaim) -> Result<ResourceClaim, WriteError> {
        loop {
            let found = self.read_back(claim).await?;
            if found.metadata.resource_version != claim.metadata.resource_version {
                return Ok(found);
            }
            match self.requests.patch_metadata(&found, &fence(&found)).await {
                Response::Success(fenced) => return Ok(*fenced),
                Response::Conflict => {}
                Response::Failed(failure) => return Err(WriteError::new(name_of(claim), failure)),
                Response::Unknown(error) => {
                    tracing::warn!(claim = name_of(claim), error, "cannot fence a write");
                    tokio::select! {
                        () = tokio::time::sleep(self.timing.max_retry) => {}
                        () = self.stop.cancelled() => return Err(WriteError::Stopped(name_of(claim))),
                    }
                }
            }
        }
    }

    /// Reads the claim, with retries until the API server responds.
    async fn read_back(&self, claim: &ResourceClaim) -> Result<ResourceClaim, WriteError> {
        let api = self.requests.api(claim);
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let mut retry = self.timing.first_retry;
        loop {
            match tokio::time::timeout(self.timing.request_timeout, api.get_opt(name)).await {
                Ok(Ok(Some(found))) if found.meta().uid == claim.metadata.uid => {
                    return match found {
                        Listed::Object(found) => Ok(*found),
                        Listed::Unreadable(found) => Err(WriteError::Unreadable {
                            claim: name_of(claim),
                            cause: found.cause,
                        }),
                    };
                }
                Ok(Ok(_)) => return Err(WriteError::Deleted(name_of(claim))),
                Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                    return Err(WriteError::Forbidden {
                        claim: name_of(claim),
                        message: status.message.clone(),
                    });
                }
                Ok(Err(error)) => {
                    tracing::warn!(
                        claim = name_of(claim),
                        error = describe(&error),
                        "cannot read the claim back"
                    )
                }
                Err(_) => tracing::warn!(
                    claim = name_of(claim),
                    "cannot read the claim back: request timed out"
                ),
            }
            tokio::select! {
                () = tokio::time::sleep(retry) => retry = (retry * 2).min(self.timing.max_retry),
                () = self.stop.cancelled() => return Err(WriteError::Stopped(name_of(claim))),
            }
        }
    }
}

fn name_of(claim: &ResourceClaim) -> String {
    let (namespace, name) = object_key(&claim.metadata);
    format!("{namespace}/{name}")
}

fn finalizers(claim: &ResourceClaim) -> &[String] {
    claim.metadata.finalizers.as_deref().unwrap_or_default()
}

/// Returns whether the claim has the finalizer that must precede its allocation. The chart's admission policy adds it to new
/// claims.
fn is_protected(claim: &ResourceClaim) -> bool {
    finalizers(claim)
        .iter()
        .any(|finalizer| finalizer == names::CLAIM_FINALIZER)
}

/// Returns the change of metadata that adds the finalizer. It stays after a release: kube-controller-manager removes it from a
/// claim that is deleted.
fn protection(claim: &ResourceClaim) -> Value {
    let own = names::CLAIM_FINALIZER.to_owned();
    let finalizers: Vec<_> = finalizers(claim).iter().chain([&own]).collect();
    json!({"finalizers": finalizers})
}

fn allocation_of(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

/// Returns whether the claim has this allocation: same devices for the same requests, same shares.
fn has_allocation(claim: &ResourceClaim, allocation: &AllocationResult) -> bool {
    let results = |allocation: &AllocationResult| -> Vec<_> {
        allocation
            .devices
            .iter()
            .flat_map(|devices| devices.results.iter().flatten())
            .map(|result| {
                let device = (result.pool.clone(), result.device.clone());
                (result.request.clone(), device, result.share_id.clone())
            })
            .collect()
    };
    allocation_of(claim).is_some_and(|found| results(found) == results(allocation))
}

#[cfg(test)]
mod tests;
