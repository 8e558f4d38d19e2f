//! Writes allocations and takes them back: the finalizer first, then the status, each guarded by UID and resource
//! version, so that no write ever overtakes somebody else's.
//!
//! A request without a clear answer may have been carried out: the claim is then read until it says so itself.

use std::time::Duration;

use drava_allocator::cluster::object_key;
use drava_api::error::describe;
use drava_api::names;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::action::{ClaimWrite, Job, JobFailure, JobOutcome, Release};
use crate::claim::{allocated_for, is_allocated, is_reserved};

/// Name under which fields are owned.
pub const FIELD_MANAGER: &str = "drava-controller";
/// How long to wait for what.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Longest wait for one answer.
    pub request_timeout: Duration,
    /// First pause between attempts to read a claim back.
    pub first_pause: Duration,
    /// Longest such pause; they double.
    pub longest_pause: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(10),
            first_pause: Duration::from_millis(100),
            longest_pause: Duration::from_secs(5),
        }
    }
}

/// Times that a write is tried again after somebody else changed the claim in between.
const CONFLICT_LIMIT: u32 = 5;

/// Why a claim was not written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    /// Deleted, or replaced by another of the same name.
    #[error("claim {0} is gone")]
    Gone(String),
    /// Somebody else has allocated it.
    #[error("claim {0} was allocated by somebody else")]
    Taken(String, Box<ResourceClaim>),
    /// Somebody reserved it while it was to be released.
    #[error("claim {0} is reserved")]
    Reserved(String, Box<ResourceClaim>),
    /// This controller lacks a permission.
    #[error("claim {claim}: the ClusterRole of drava-controller lacks a permission: {message}")]
    Forbidden { claim: String, message: String },
    /// The API server refuses the content.
    #[error("claim {claim}: the API server refuses the allocation: {message}")]
    Refused { claim: String, message: String },
    /// Others keep changing it.
    #[error("claim {0} keeps being changed by others")]
    Conflicts(String),
    /// This replica stops, or no longer leads.
    #[error("claim {0} was not written: this replica stops")]
    Stopped(String),
}

impl WriteError {
    /// Whether the user must hear of it.
    const fn concerns_user(&self) -> bool {
        matches!(self, Self::Forbidden { .. } | Self::Refused { .. })
    }

    /// The claim's newest version, where it was learnt.
    fn into_claim(self) -> Option<ResourceClaim> {
        match self {
            Self::Taken(_, claim) | Self::Reserved(_, claim) => Some(*claim),
            _ => None,
        }
    }
}

/// What the API server made of one request.
enum Answer {
    Done(Box<ResourceClaim>),
    Conflict,
    Gone,
    Forbidden(String),
    Refused(String),
    /// It may have been carried out.
    Unknown(String),
}

/// Writes to claims until it is told to stop.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    stop: CancellationToken,
    timing: Timing,
}

impl Writer {
    /// A writer whose unanswered questions end with `stop`.
    #[must_use]
    pub fn new(client: Client, stop: CancellationToken, timing: Timing) -> Self {
        Self {
            client,
            stop,
            timing,
        }
    }

    /// Writes the allocations of a pod's claims, all or none.
    pub async fn allocate(&self, job: Job) -> JobOutcome {
        let keys = job
            .writes
            .iter()
            .map(|write| object_key(&write.claim.metadata))
            .collect();
        let mut claims: Vec<ResourceClaim> = Vec::new();
        let mut failure = None;
        for write in &job.writes {
            match self.write_one(write, &job.pod_uid).await {
                Ok(claim) => claims.push(claim),
                Err(error) => {
                    tracing::warn!(%error, pod = job.pod.name, namespace = job.pod.namespace, node = job.node, "allocation failed");
                    failure = Some(JobFailure {
                        message: error.to_string(),
                        tell: error.concerns_user(),
                    });
                    claims = self.roll_back(claims).await;
                    claims.extend(error.into_claim());
                    break;
                }
            }
        }
        JobOutcome {
            pod_uid: job.pod_uid,
            keys,
            claims,
            failure,
        }
    }

    /// Releases what a failed job had written before.
    async fn roll_back(&self, written: Vec<ResourceClaim>) -> Vec<ResourceClaim> {
        let mut newest = Vec::new();
        for claim in written {
            match self.release_claim(claim.clone()).await {
                Ok(released) => newest.push(released),
                Err(error) => {
                    tracing::warn!(%error, "roll-back failed; the allocation is released when it stays unreserved");
                    newest.push(error.into_claim().unwrap_or(claim));
                }
            }
        }
        newest
    }

    /// Takes an allocation back; the claim in its newest version, if it still exists.
    pub async fn release(&self, release: &Release) -> Option<ResourceClaim> {
        let claim = release.claim.as_ref().clone();
        let name = name_of(&claim);
        match self.release_claim(claim).await {
            Ok(released) => {
                tracing::info!(claim = name, why = release.why, "released an allocation");
                Some(released)
            }
            Err(error) => {
                if !matches!(error, WriteError::Reserved(..) | WriteError::Gone(_)) {
                    tracing::warn!(%error, "cannot release an allocation");
                }
                error.into_claim()
            }
        }
    }

    async fn write_one(
        &self,
        write: &ClaimWrite,
        pod_uid: &str,
    ) -> Result<ResourceClaim, WriteError> {
        let mut claim = write.claim.as_ref().clone();
        for _ in 0..CONFLICT_LIMIT {
            let answer = if is_prepared(&claim, pod_uid) {
                self.patch_status(&claim, json!({"allocation": write.allocation}))
                    .await
            } else {
                self.patch_metadata(&claim, &preparation(&claim, pod_uid))
                    .await
            };
            claim = self.newest(claim, answer).await?;
            if is_ours(&claim, &write.allocation) {
                return Ok(claim);
            }
            if is_allocated(&claim) {
                return Err(WriteError::Taken(name_of(&claim), Box::new(claim)));
            }
        }
        Err(WriteError::Conflicts(name_of(&claim)))
    }

    async fn release_claim(&self, mut claim: ResourceClaim) -> Result<ResourceClaim, WriteError> {
        for _ in 0..CONFLICT_LIMIT {
            let answer = if is_allocated(&claim) {
                self.patch_status(&claim, json!({"allocation": null, "devices": null}))
                    .await
            } else if allocated_for(&claim).is_some() {
                self.patch_metadata(&claim, &restoration(&claim)).await
            } else {
                return Ok(claim);
            };
            claim = self.newest(claim, answer).await?;
            if is_reserved(&claim) {
                return Err(WriteError::Reserved(name_of(&claim), Box::new(claim)));
            }
        }
        Err(WriteError::Conflicts(name_of(&claim)))
    }

    /// The claim as it is after a request.
    async fn newest(
        &self,
        claim: ResourceClaim,
        answer: Answer,
    ) -> Result<ResourceClaim, WriteError> {
        let claim_name = name_of(&claim);
        match answer {
            Answer::Done(done) => Ok(*done),
            Answer::Gone => Err(WriteError::Gone(claim_name)),
            Answer::Forbidden(message) => Err(WriteError::Forbidden {
                claim: claim_name,
                message,
            }),
            Answer::Refused(message) => Err(WriteError::Refused {
                claim: claim_name,
                message,
            }),
            Answer::Conflict => self.read_back(&claim).await,
            Answer::Unknown(error) => {
                tracing::warn!(
                    claim = claim_name,
                    error,
                    "a write may have been carried out; reading the claim"
                );
                self.read_back(&claim).await
            }
        }
    }

    /// Reads the claim until there is an answer.
    async fn read_back(&self, claim: &ResourceClaim) -> Result<ResourceClaim, WriteError> {
        let api = self.api(claim);
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let mut pause = self.timing.first_pause;
        loop {
            match tokio::time::timeout(self.timing.request_timeout, api.get_opt(name)).await {
                Ok(Ok(Some(found))) if found.metadata.uid == claim.metadata.uid => {
                    return Ok(found);
                }
                Ok(Ok(_)) => return Err(WriteError::Gone(name_of(claim))),
                Ok(Err(error)) => {
                    tracing::warn!(
                        claim = name_of(claim),
                        error = describe(&error),
                        "cannot read a claim back"
                    )
                }
                Err(_) => tracing::warn!(
                    claim = name_of(claim),
                    "no answer when reading a claim back"
                ),
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(self.timing.longest_pause),
                () = self.stop.cancelled() => return Err(WriteError::Stopped(name_of(claim))),
            }
        }
    }

    async fn patch_metadata(&self, claim: &ResourceClaim, metadata: &Value) -> Answer {
        let patch = json!({"metadata": guarded(claim, metadata.clone())});
        let (api, parameters, patch) = (self.api(claim), parameters(), Patch::Merge(&patch));
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        self.answer(api.patch(name, &parameters, &patch)).await
    }

    async fn patch_status(&self, claim: &ResourceClaim, status: Value) -> Answer {
        let patch = json!({"metadata": guarded(claim, json!({})), "status": status});
        let (api, parameters, patch) = (self.api(claim), parameters(), Patch::Merge(&patch));
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        self.answer(api.patch_status(name, &parameters, &patch))
            .await
    }

    async fn answer(
        &self,
        request: impl Future<Output = Result<ResourceClaim, kube::Error>>,
    ) -> Answer {
        match tokio::time::timeout(self.timing.request_timeout, request).await {
            Ok(Ok(claim)) => Answer::Done(Box::new(claim)),
            Ok(Err(kube::Error::Api(status))) => Answer::of_refusal(status.code, &status.message),
            Ok(Err(error)) => Answer::Unknown(describe(&error)),
            Err(_) => Answer::Unknown("no answer in time".to_owned()),
        }
    }

    fn api(&self, claim: &ResourceClaim) -> Api<ResourceClaim> {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.client.clone(), namespace)
    }
}

impl Answer {
    fn of_refusal(code: u16, message: &str) -> Self {
        match code {
            404 => Self::Gone,
            409 => Self::Conflict,
            403 => Self::Forbidden(message.to_owned()),
            // The missing permission for the synthetic subresource is reported as invalid content.
            422 if message.contains("resourceclaims/binding") => Self::Forbidden(format!(
                "update and patch on resourceclaims/binding of resource.k8s.io, cluster-wide ({message})"
            )),
            400..=428 | 430..=499 => Self::Refused(message.to_owned()),
            _ => Self::Unknown(message.to_owned()),
        }
    }
}

fn name_of(claim: &ResourceClaim) -> String {
    let (namespace, name) = object_key(&claim.metadata);
    format!("{namespace}/{name}")
}

/// The guard of every write: this object in this version.
fn guarded(claim: &ResourceClaim, mut metadata: Value) -> Value {
    if let Some(fields) = metadata.as_object_mut() {
        fields.insert("uid".to_owned(), json!(claim.metadata.uid));
        fields.insert(
            "resourceVersion".to_owned(),
            json!(claim.metadata.resource_version),
        );
    }
    metadata
}

fn parameters() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

fn finalizers(claim: &ResourceClaim) -> &[String] {
    claim.metadata.finalizers.as_deref().unwrap_or_default()
}

/// Whether the claim has what must be there before its allocation is written.
fn is_prepared(claim: &ResourceClaim, pod_uid: &str) -> bool {
    finalizers(claim)
        .iter()
        .any(|finalizer| finalizer == names::CLAIM_FINALIZER)
        && allocated_for(claim) == Some(pod_uid)
}

fn preparation(claim: &ResourceClaim, pod_uid: &str) -> Value {
    let mut finalizers = finalizers(claim).to_vec();
    if !finalizers
        .iter()
        .any(|finalizer| finalizer == names::CLAIM_FINALIZER)
    {
        finalizers.push(names::CLAIM_FINALIZER.to_owned());
    }
    json!({"finalizers": finalizers, "annotations": {names::ALLOCATED_FOR_ANNOTATION: pod_uid}})
}

fn restoration(claim: &ResourceClaim) -> Value {
    let finalizers: Vec<_> = finalizers(claim)
        .iter()
        .filter(|finalizer| *finalizer != names::CLAIM_FINALIZER)
        .collect();
    json!({"finalizers": finalizers, "annotations": {names::ALLOCATED_FOR_ANNOTATION: null}})
}

/// Whether the claim carries this very allocation: same devices for the same requests, same shares.
fn is_ours(claim: &ResourceClaim, allocation: &AllocationResult) -> bool {
    let results = |allocation: &AllocationResult| -> Vec<_> {
        allocation
            .devices
            .iter()
            .flat_map(|devices| devices.results.iter().flatten())
            .map(|result| {
                let place = (result.pool.clone(), result.device.clone());
                (result.request.clone(), place, result.share_id.clone())
            })
            .collect()
    };
    claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref())
        .is_some_and(|found| results(found) == results(allocation))
}

#[cfg(test)]
mod tests;
