//! `NodePrepareResources` and `NodeUnprepareResources`: each claim on its own, every claim in the reply.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tonic::{Request, Response, Status};
use tracing::Instrument as _;

use crate::claim::{ClaimRef, ClaimUid};
use crate::proto::dra_v1::dra_plugin_server::DraPlugin;
use crate::proto::dra_v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use crate::proto::dra_v1beta1::dra_plugin_server::DraPlugin as DraPluginV1beta1;

/// Kubelet gives a call 45 s. Answering before that tells it which claim is slow.
const DEADLINE: Duration = Duration::from_secs(40);

/// Who prepares and unprepares. An error is the text that becomes the pod's event.
pub trait Claims: Send + Sync + 'static {
    /// Makes the claim's devices usable; the same answer when repeated.
    fn prepare(&self, claim: &ClaimRef)
    -> impl Future<Output = Result<Vec<Device>, String>> + Send;

    /// Undoes it; succeeds when there is nothing to undo.
    fn unprepare(&self, claim: &ClaimRef) -> impl Future<Output = Result<(), String>> + Send;
}

/// The DRA service, in both versions.
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
    /// Serves `claims`.
    #[must_use]
    pub fn new(claims: Arc<C>) -> Self {
        Self { claims }
    }

    async fn prepare(&self, request: NodePrepareResourcesRequest) -> NodePrepareResourcesResponse {
        let answers = each(request.claims, "prepare", |claim| {
            let claims = Arc::clone(&self.claims);
            async move { claims.prepare(&claim).await }
        });
        let claims = answers.await.map(|(uid, outcome)| {
            let answer = match outcome {
                Ok(devices) => NodePrepareResourceResponse {
                    devices,
                    error: String::new(),
                },
                Err(error) => NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error,
                },
            };
            (uid, answer)
        });
        NodePrepareResourcesResponse {
            claims: claims.collect(),
        }
    }

    async fn unprepare(
        &self,
        request: NodeUnprepareResourcesRequest,
    ) -> NodeUnprepareResourcesResponse {
        let answers = each(request.claims, "unprepare", |claim| {
            let claims = Arc::clone(&self.claims);
            async move { claims.unprepare(&claim).await }
        });
        let claims = answers.await.map(|(uid, outcome)| {
            (
                uid,
                NodeUnprepareResourceResponse {
                    error: outcome.err().unwrap_or_default(),
                },
            )
        });
        NodeUnprepareResourcesResponse {
            claims: claims.collect(),
        }
    }
}

/// Does `work` for each claim at the same time and pairs the outcomes with the UIDs that kubelet used.
async fn each<T, F: Future<Output = Result<T, String>>>(
    claims: Vec<Claim>,
    operation: &'static str,
    work: impl Fn(ClaimRef) -> F,
) -> impl Iterator<Item = (String, Result<T, String>)> {
    let outcomes = join_all(claims.into_iter().map(
        |Claim {
             namespace,
             uid,
             name,
         }| {
            let span = tracing::info_span!(
                "claim",
                operation,
                claim.namespace = namespace,
                claim.name = name,
                claim.uid = uid
            );
            let done = ClaimUid::parse(&uid).map(|uid| {
                work(ClaimRef {
                    namespace,
                    name,
                    uid,
                })
            });
            async move {
                let outcome = match done {
                    Ok(work) => within_deadline(operation, work).await,
                    Err(invalid) => Err(invalid.to_string()),
                };
                match &outcome {
                    Ok(_) => tracing::info!("done"),
                    Err(error) => tracing::error!(%error, "failed"),
                }
                (uid, outcome)
            }
            .instrument(span)
        },
    ));
    outcomes
        .await
        .into_iter()
        .collect::<HashMap<_, _>>()
        .into_iter()
}

async fn within_deadline<T>(
    operation: &str,
    work: impl Future<Output = Result<T, String>>,
) -> Result<T, String> {
    tokio::time::timeout(DEADLINE, work)
        .await
        .unwrap_or_else(|_| {
            Err(format!(
                "{operation} did not finish within {} s; kubelet will try again",
                DEADLINE.as_secs()
            ))
        })
}

#[tonic::async_trait]
impl<C: Claims> DraPlugin for DraService<C> {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare(request.into_inner()).await))
    }
}

#[tonic::async_trait]
impl<C: Claims> DraPluginV1beta1 for DraService<C> {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare(request.into_inner()).await))
    }
}
