//! `NodePrepareResources` and `NodeUnprepareResources`.
//!
//! Claims of one call are handled concurrently and fail separately; the reply has an entry for every claim. Typed
//! errors become text here and nowhere before.

use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use futures::future::join_all;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::kubelet::proto::dra_v1::dra_plugin_server::DraPlugin;
use crate::kubelet::proto::dra_v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use crate::node::claim::{ClaimRef, ClaimUid, InvalidClaimUid};

/// Time limit of one claim. Kubelet's is 45 s for the whole call and does not name the slow claim.
const DEADLINE: Duration = Duration::from_secs(40);

/// Prepares and unprepares claims.
pub trait Claims: Send + Sync + 'static {
    /// Reason for which a claim was not prepared. Its text, with the causes, becomes an event of the pod.
    type PrepareError: Error;

    /// Reason for which a claim was not unprepared. Its text, with the causes, becomes an event of the pod.
    type UnprepareError: Error;

    /// Makes the claim's devices usable for containers. Idempotent: a repeated call returns the same devices.
    fn prepare(
        &self,
        claim: &ClaimRef,
    ) -> impl Future<Output = Result<Vec<Device>, Self::PrepareError>> + Send;

    /// Removes everything that [`prepare`](Self::prepare) created. Succeeds for a claim that is not prepared.
    fn unprepare(
        &self,
        claim: &ClaimRef,
    ) -> impl Future<Output = Result<(), Self::UnprepareError>> + Send;
}

/// The service `v1.DRAPlugin`.
#[derive(Debug)]
pub struct DraService<C> {
    claims: Arc<C>,
}

impl<C> Clone for DraService<C> {
    fn clone(&self) -> Self {
        Self {
            claims: Arc::clone(&self.claims),
        }
    }
}

impl<C: Claims> DraService<C> {
    /// Returns a service that calls `claims`.
    #[must_use]
    pub fn new(claims: Arc<C>) -> Self {
        Self { claims }
    }
}

/// Failure of one claim in a call of kubelet.
#[derive(Debug, thiserror::Error)]
enum CallError<E: Error> {
    #[error(transparent)]
    Uid(#[from] InvalidClaimUid),
    #[error("claim {claim}: {operation} did not finish within {} s; kubelet retries", DEADLINE.as_secs())]
    Timeout {
        operation: &'static str,
        claim: ClaimRef,
    },
    #[error(transparent)]
    Operation(E),
}

/// Runs `operation` on every claim concurrently. Returns the outcomes by the UIDs that kubelet sent; errors are text.
async fn for_each_claim<T, E: Error, F: Future<Output = Result<T, E>>>(
    claims: Vec<Claim>,
    operation: &'static str,
    call: impl Fn(ClaimRef) -> F,
) -> HashMap<String, Result<T, String>> {
    let outcomes = claims.into_iter().map(|claim| {
        let span = tracing::info_span!(
            "claim",
            operation,
            claim.namespace = claim.namespace,
            claim.name = claim.name,
            claim.uid = claim.uid
        );
        let uid = claim.uid.clone();
        let outcome = for_claim(claim, operation, &call);
        async move {
            let outcome = outcome.await.map_err(|error| describe(&error));
            match &outcome {
                Ok(_) => tracing::info!("claim handled"),
                Err(error) => tracing::error!(error, "cannot handle the claim"),
            }
            (uid, outcome)
        }
        .instrument(span)
    });
    join_all(outcomes).await.into_iter().collect()
}

async fn for_claim<T, E: Error, F: Future<Output = Result<T, E>>>(
    claim: Claim,
    operation: &'static str,
    call: impl Fn(ClaimRef) -> F,
) -> Result<T, CallError<E>> {
    let claim = ClaimRef {
        uid: ClaimUid::parse(&claim.uid)?,
        namespace: claim.namespace,
        name: claim.name,
    };
    match tokio::time::timeout(DEADLINE, call(claim.clone())).await {
        Ok(outcome) => outcome.map_err(CallError::Operation),
        Err(_) => Err(CallError::Timeout { operation, claim }),
    }
}

#[tonic::async_trait]
impl<C: Claims> DraPlugin for DraService<C> {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let outcomes = for_each_claim(request.into_inner().claims, "prepare", |claim| {
            let claims = Arc::clone(&self.claims);
            async move { claims.prepare(&claim).await }
        });
        let response = |outcome| match outcome {
            Ok(devices) => NodePrepareResourceResponse {
                devices,
                error: String::new(),
            },
            Err(error) => NodePrepareResourceResponse {
                devices: Vec::new(),
                error,
            },
        };
        let responses = outcomes.await.into_iter();
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: responses
                .map(|(uid, outcome)| (uid, response(outcome)))
                .collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let outcomes = for_each_claim(request.into_inner().claims, "unprepare", |claim| {
            let claims = Arc::clone(&self.claims);
            async move { claims.unprepare(&claim).await }
        });
        let response = |outcome: Result<(), String>| NodeUnprepareResourceResponse {
            error: outcome.err().unwrap_or_default(),
        };
        let responses = outcomes.await.into_iter();
        Ok(Response::new(NodeUnprepareResourcesResponse {
            claims: responses
                .map(|(uid, outcome)| (uid, response(outcome)))
                .collect(),
        }))
    }
}
