//! Evictions by the Eviction API, which respects PodDisruptionBudgets and sets the condition `DisruptionTarget`.
//!
//! All victims are tried by a dry run first, so that none is evicted if one cannot be. A PodDisruptionBudget that covers
//! several victims may still reject one after others were evicted: the rest stays, and the devices are given back. The
//! batches of parallel evictions grow from one pod on, so that a budget stops most of them.

use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use futures::future::join_all;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::api::PostParams;
use kube::core::Request;
use kube::core::response::Status;
use kube::{Client, Resource};
use serde_json::json;

use crate::action::{Eviction, EvictionFailure, EvictionOutcome, Victim};
use crate::write::lease::{Term, WRITE_TIMEOUT};
use crate::write::writes::FIELD_MANAGER;

/// Evictions at the same time.
const MAX_PARALLEL: usize = 16;

/// Why a pod is not evicted.
#[derive(Debug, thiserror::Error)]
enum EvictError {
    /// A PodDisruptionBudget does not allow the eviction now.
    #[error("{0}")]
    Budget(String),
    /// The controller lacks the permission, or an admission webhook rejects the eviction.
    #[error("the API server rejects the eviction: {0}")]
    Rejected(String),
    /// The API server did not respond.
    #[error("no response from the API server: {0}")]
    Unknown(String),
    /// This replica has lost the lease.
    #[error("this replica has lost the lease")]
    NotSent,
}

/// Evicts pods.
#[derive(Clone)]
pub struct Evictor {
    client: Client,
    term: Arc<Term>,
    timeout: Duration,
}

impl Evictor {
    /// Creates an evictor that sends no eviction after `term`.
    #[must_use]
    pub const fn new(client: Client, term: Arc<Term>) -> Self {
        Self {
            client,
            term,
            timeout: WRITE_TIMEOUT,
        }
    }

    /// Evicts the victims: all, or none if the dry run of one fails.
    pub async fn evict(&self, eviction: Eviction) -> EvictionOutcome {
        let mut evicted = Vec::new();
        let mut failure = None;
        for (is_dry_run, first_batch) in [(true, MAX_PARALLEL), (false, 1)] {
            let mut rest = &eviction.victims[..];
            let mut batch = first_batch;
            while !rest.is_empty() && failure.is_none() {
                let (now, later) = rest.split_at(batch.min(rest.len()));
                let requests = now
                    .iter()
                    .map(|victim| self.evict_one(&victim.pod, is_dry_run));
                let results = join_all(requests.collect::<Vec<_>>()).await;
                for (victim, result) in now.iter().zip(results) {
                    match result {
                        Ok(()) if is_dry_run => {}
                        Ok(()) => evicted.push(victim.clone()),
                        Err(error) => {
                            let failed = failed(victim, &error);
                            failure.get_or_insert(failed);
                        }
                    }
                }
                rest = later;
                batch = (batch * 2).min(MAX_PARALLEL);
            }
        }
        EvictionOutcome {
            eviction,
            evicted,
            failure,
        }
    }

    /// Evicts a pod of this UID. A pod that does not exist is evicted.
    async fn evict_one(&self, pod: &ObjectReference, is_dry_run: bool) -> Result<(), EvictError> {
        let namespace = pod.namespace.as_deref().unwrap_or_default();
        let name = pod.name.as_deref().unwrap_or_default();
        let parameters = PostParams {
            dry_run: is_dry_run,
            field_manager: Some(FIELD_MANAGER.to_owned()),
        };
        let body = json!({
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": pod.uid}},
        });
        let request = Request::new(Pod::url_path(&(), Some(namespace)))
            .create_subresource("eviction", name, &parameters, body.to_string().into_bytes())
            .map_err(|error| EvictError::Rejected(error.to_string()))?;
        if !self.term.is_valid() {
            return Err(EvictError::NotSent);
        }
        match tokio::time::timeout(self.timeout, self.client.request::<Status>(request)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(kube::Error::Api(status))) => match status.code {
                // Gone, or replaced by a pod of the same name.
                404 | 409 => Ok(()),
                429 => Err(EvictError::Budget(status.message.clone())),
                400..=499 => Err(EvictError::Rejected(status.message.clone())),
                _ => Err(EvictError::Unknown(status.message.clone())),
            },
            Ok(Err(error)) => Err(EvictError::Unknown(describe(&error))),
            Err(_) => Err(EvictError::Unknown("request timed out".to_owned())),
        }
    }
}

fn failed(victim: &Victim, error: &EvictError) -> EvictionFailure {
    tracing::warn!(
        %error,
        pod = victim.pod.name,
        namespace = victim.pod.namespace,
        "cannot evict a pod"
    );
    EvictionFailure {
        victim: victim.clone(),
        message: error.to_string(),
    }
}

#[cfg(test)]
mod tests;
