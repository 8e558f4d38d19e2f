//! Requests that write claims: guarded by UID, resource version, term and admission policy.

use std::sync::Arc;

use drava_api::error::describe;
use drava_api::leader::LEADER_NAME;
use drava_api::listed::Listed;
use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{ListParams, PartialObjectMeta, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use super::{FIELD_MANAGER, Timing};
use crate::action::ClaimWrite;
use crate::write::lease::Term;
use crate::write::metadata_answer;

/// Name of the admission policy that admits only the holder of the lease.
const LEASE_POLICY: &str = "drava-controller-lease";

/// Number of rejections by [`LEASE_POLICY`] between two warnings.
const WARN_AFTER: u32 = 20;
/// Maximum number of claims with which a replica tries whether its writes are admitted.
const MAX_TRIED: u32 = 20;
/// Number of attempts after which a replica leads although every tried claim is rejected for another reason than the lease.
/// With the pause between them they last longer than a request of an earlier holder.
const MAX_REJECTED: u32 = 100;

/// Response to one request.
pub(super) enum Response {
    Success(Box<ResourceClaim>),
    Conflict,
    /// The request may have been executed, or may be executed later.
    Unknown(String),
    Failed(Failure),
}

/// A write of the status of a claim.
#[derive(Clone, Copy)]
pub(super) enum StatusChange<'a> {
    /// The claim gets this allocation, and a companion its reservation.
    Allocated(&'a ClaimWrite),
    /// The claim loses its allocation and what drivers have reported.
    Released,
    /// The companion also loses its reservation.
    GivenBack,
}

/// What dry runs tell about the writes of this replica.
enum Admission {
    /// They are admitted, or never will be.
    Known,
    /// They are not admitted so far, or it is unknown.
    Unknown,
    /// Each tried claim is rejected for another reason.
    Rejected,
}

/// Why a request was not executed.
pub(super) enum Failure {
    NotFound,
    Forbidden(String),
    Rejected(String),
    /// Another replica holds the lease.
    NotHolder,
    /// The request was not sent, because the term has ended.
    NotSent,
}

/// Sends requests that write claims.
#[derive(Clone)]
pub(super) struct ClaimRequests {
    client: Client,
    term: Arc<Term>,
    stop: CancellationToken,
    timing: Timing,
    /// Set when the API server accepts the writes of this replica.
    admitted: Arc<OnceCell<()>>,
}

impl ClaimRequests {
    pub(super) fn new(
        client: Client,
        term: Arc<Term>,
        stop: CancellationToken,
        timing: Timing,
    ) -> Self {
        Self {
            client,
            term,
            stop,
            timing,
            admitted: Arc::default(),
        }
    }

    pub(super) async fn patch_metadata(&self, claim: &ResourceClaim, metadata: &Value) -> Response {
        if let Err(response) = self.wait_until_admitted(claim).await {
            return response;
        }
        self.send_metadata(claim, metadata, &parameters()).await
    }

    async fn send_metadata(
        &self,
        claim: &ResourceClaim,
        metadata: &Value,
        parameters: &PatchParams,
    ) -> Response {
        let patch = json!({"metadata": guarded(claim, metadata.clone())});
        let (api, patch) = (self.api(claim), Patch::Merge(&patch));
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let request = api.patch_metadata(name, parameters, &patch);
        self.response(request, || claim.clone()).await
    }

    /// Waits until the API server admits writes of this replica, and so none of an earlier holder any more. A list that is
    /// read afterwards has all writes of earlier holders. Reports to `attempted` before each attempt.
    ///
    /// Without claims there is nothing to wait for: an earlier holder can write only claims that it has observed. A missing
    /// permission is reported at the claim whose write fails.
    pub(super) async fn wait_until_holder(&self, attempted: impl Fn()) {
        let claims: Api<Listed<ResourceClaim>> = Api::all(self.client.clone());
        // Without a resource version, the list is consistent.
        let some = ListParams::default().limit(MAX_TRIED);
        let (mut rejections, mut rejected) = (0, 0);
        while !self.stop.is_cancelled() {
            attempted();
            match tokio::time::timeout(self.timing.request_timeout, claims.list(&some)).await {
                Ok(Ok(list)) => {
                    let (claims, unreadable) = Listed::split(list.items);
                    if claims.is_empty() && unreadable.is_empty() {
                        return;
                    }
                    match self.try_any(&claims, &mut rejections).await {
                        Admission::Known => return,
                        Admission::Unknown => {}
                        Admission::Rejected => rejected += 1,
                    }
                    if rejected >= MAX_REJECTED {
                        tracing::warn!("admission rejects a dry run of each tried claim; leading");
                        return;
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(error = describe(&error), "cannot list claims; retrying");
                }
                Err(_) => tracing::warn!("cannot list claims: request timed out; retrying"),
            }
            tokio::select! {
                () = tokio::time::sleep(self.timing.first_retry) => {}
                () = self.stop.cancelled() => {}
            }
        }
    }

    /// Tries the claims until a response tells whether writes of this replica are admitted.
    async fn try_any(&self, claims: &[ResourceClaim], rejections: &mut u32) -> Admission {
        for claim in claims {
            match self.try_write(claim, rejections).await {
                Response::Success(_) => {
                    // Another writer may have set it.
                    let _ = self.admitted.set(());
                    return Admission::Known;
                }
                Response::Failed(Failure::Forbidden(_) | Failure::NotSent) => {
                    return Admission::Known;
                }
                Response::Failed(Failure::NotHolder) | Response::Unknown(_) => {
                    return Admission::Unknown;
                }
                // Rejected for what the claim is, deleted or changed meanwhile: no proof.
                Response::Failed(Failure::Rejected(_) | Failure::NotFound) | Response::Conflict => {
                }
            }
        }
        Admission::Rejected
    }

    /// Waits until the API server accepts a dry-run write of this replica. Returns the response if it is another one; a
    /// rejection of this claim for another reason than the lease is left to the write itself.
    async fn wait_until_admitted(&self, claim: &ResourceClaim) -> Result<(), Response> {
        let admission = || async {
            let mut rejections = 0;
            loop {
                match self.try_write(claim, &mut rejections).await {
                    Response::Success(_) => return Ok(()),
                    Response::Failed(Failure::NotHolder) | Response::Unknown(_) => {}
                    Response::Failed(Failure::Rejected(_)) => return Err(None),
                    other => return Err(Some(other)),
                }
                tokio::select! {
                    () = tokio::time::sleep(self.timing.first_retry) => {}
                    () = self.stop.cancelled() => {
                        return Err(Some(Response::Failed(Failure::NotSent)));
                    }
                }
            }
        };
        match self.admitted.get_or_try_init(admission).await {
            Ok(()) | Err(None) => Ok(()),
            Err(Some(response)) => Err(response),
        }
    }

    /// Sends a dry-run write. Counts the rejections by the admission policy and warns of many.
    async fn try_write(&self, claim: &ResourceClaim, rejections: &mut u32) -> Response {
        let dry_run = PatchParams {
            dry_run: true,
            ..parameters()
        };
        let response = self.send_metadata(claim, &fence(claim), &dry_run).await;
        if matches!(response, Response::Failed(Failure::NotHolder)) {
            *rejections += 1;
            if rejections.is_multiple_of(WARN_AFTER) {
                tracing::warn!(
                    policy = LEASE_POLICY,
                    "admission rejects writes of this replica, although it holds the Lease: compare the holder of \
                     GpuControllerLeader {LEADER_NAME} with the Lease"
                );
            }
        }
        response
    }

    pub(super) async fn patch_status(
        &self,
        claim: &ResourceClaim,
        change: StatusChange<'_>,
    ) -> Response {
        if let Err(response) = self.wait_until_admitted(claim).await {
            return response;
        }
        let status = match change {
            StatusChange::Allocated(write) => match &write.consumer {
                None => json!({"allocation": write.allocation}),
                Some(consumer) => {
                    json!({"allocation": write.allocation, "reservedFor": [consumer]})
                }
            },
            StatusChange::Released => json!({"allocation": null, "devices": null}),
            StatusChange::GivenBack => {
                json!({"allocation": null, "devices": null, "reservedFor": null})
            }
        };
        let patch = json!({"metadata": guarded(claim, json!({})), "status": status});
        let (api, parameters, patch) = (self.api(claim), parameters(), Patch::Merge(&patch));
        let name = claim.metadata.name.as_deref().unwrap_or_default();
        let request = metadata_answer::patch_status(&api, name, &parameters, &patch);
        self.response(request, || change.applied(claim)).await
    }

    /// Sends a request. After its success the claim is what `written` returns, with the metadata of the answer. An API
    /// server can drop fields that it has disabled; the watch delivers what it has stored.
    async fn response(
        &self,
        request: impl Future<Output = kube::Result<PartialObjectMeta<Listed<ResourceClaim>>>>,
        written: impl FnOnce() -> ResourceClaim,
    ) -> Response {
        if !self.may_send() {
            return Response::Failed(Failure::NotSent);
        }
        match tokio::time::timeout(self.timing.request_timeout, request).await {
            Ok(Ok(answer)) => {
                let mut claim = written();
                claim.metadata = answer.metadata;
                claim.metadata.managed_fields = None;
                Response::Success(Box::new(claim))
            }
            Ok(Err(kube::Error::Api(status))) => Response::of_error(status.code, &status.message),
            Ok(Err(error)) => Response::Unknown(describe(&error)),
            Err(_) => Response::Unknown("request timed out".to_owned()),
        }
    }

    /// Returns whether a request may be sent in this term.
    pub(super) fn may_send(&self) -> bool {
        self.term.is_valid()
    }

    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    pub(super) fn api(&self, claim: &ResourceClaim) -> Api<Listed<ResourceClaim>> {
        let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
        Api::namespaced(self.client.clone(), namespace)
    }
}

impl StatusChange<'_> {
    /// Returns the claim after this write.
    fn applied(self, claim: &ResourceClaim) -> ResourceClaim {
        let mut claim = claim.clone();
        let status = claim.status.get_or_insert_default();
        match self {
            Self::Allocated(write) => {
                status.allocation = Some(write.allocation.clone());
                if let Some(consumer) = &write.consumer {
                    status.reserved_for = Some(vec![consumer.clone()]);
                }
            }
            Self::Released => (status.allocation, status.devices) = (None, None),
            Self::GivenBack => {
                (status.allocation, status.devices) = (None, None);
                status.reserved_for = None;
            }
        }
        claim
    }
}

impl Response {
    fn of_error(code: u16, message: &str) -> Self {
        Self::Failed(match code {
            404 => Failure::NotFound,
            409 => return Self::Conflict,
            403 | 422 if message.contains(LEASE_POLICY) => Failure::NotHolder,
            403 => Failure::Forbidden(message.to_owned()),
            // A missing permission for the synthetic subresource is reported as invalid content.
            422 if message.contains("resourceclaims/binding") => Failure::Forbidden(format!(
                "update and patch on resourceclaims/binding of resource.k8s.io, cluster-wide ({message})"
            )),
            400..=428 | 430..=499 => Failure::Rejected(message.to_owned()),
            _ => return Self::Unknown(message.to_owned()),
        })
    }
}

/// Adds the guard of every write: UID and resource version.
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

pub(super) fn parameters() -> PatchParams {
    PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    }
}

/// Returns a change of metadata that differs for each resource version.
pub(super) fn fence(claim: &ResourceClaim) -> Value {
    json!({"annotations": {names::WRITE_FENCE_ANNOTATION: claim.metadata.resource_version}})
}
