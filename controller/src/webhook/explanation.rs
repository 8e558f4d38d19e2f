//! `GET /explain/namespaces/NAMESPACE/pods/NAME` and `POST /simulate`, beside the admission webhook.
//!
//! A caller sends a bearer token of the cluster. The API server decides who the caller is (TokenReview) and what it may see
//! (SubjectAccessReview): `get` of the pod for an explanation, `create` of pods in the namespace for a simulation. Pods of
//! other namespaces are named only to callers that may list all pods.

use std::collections::BTreeSet;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use drava_api::error::describe;
use drava_explanation::explain::ExplainError;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use serde_json::Value;
use tokio::sync::Semaphore;

use super::access::{Access, AccessError, Caller};
use crate::explainer::{Explainer, ExplainerError};

/// Maximum size of the manifests of a simulation.
const MAX_BODY_BYTES: usize = 1 << 20;
/// Maximum number of requests in progress; they wait for each other.
const MAX_REQUESTS: usize = 8;

/// What the handlers need.
#[derive(Clone)]
struct Service {
    explainer: Arc<Explainer>,
    access: Access,
    requests: Arc<Semaphore>,
}

/// Why a request is not answered.
enum Refusal {
    Access(AccessError),
    Busy,
    /// The caller lacks this permission.
    Forbidden(String),
    Explainer(ExplainerError),
    Invalid(String),
}

impl IntoResponse for Refusal {
    /// The body is a `Status` object of Kubernetes, of which kubectl shows the message.
    fn into_response(self) -> Response {
        let (status, message) = match self {
            Self::Access(AccessError::Unauthenticated) => (
                StatusCode::UNAUTHORIZED,
                "send a valid token: Authorization: Bearer TOKEN".to_owned(),
            ),
            Self::Access(AccessError::Unavailable(error)) => {
                (StatusCode::SERVICE_UNAVAILABLE, error)
            }
            Self::Busy => (
                StatusCode::SERVICE_UNAVAILABLE,
                "too many requests are in progress; try again".to_owned(),
            ),
            Self::Forbidden(text) => (StatusCode::FORBIDDEN, text),
            Self::Explainer(ExplainerError::Explain(
                error @ (ExplainError::PodMissing { .. } | ExplainError::ClaimMissing { .. }),
            )) => (StatusCode::NOT_FOUND, error.to_string()),
            Self::Explainer(ExplainerError::Simulate(error)) => {
                (StatusCode::UNPROCESSABLE_ENTITY, describe(&error))
            }
            Self::Explainer(error @ (ExplainerError::List(_) | ExplainerError::Aborted(_))) => {
                tracing::warn!(error = describe(&error), "cannot explain or simulate");
                (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
            Self::Invalid(text) => (StatusCode::BAD_REQUEST, text),
        };
        let body = Status {
            status: Some("Failure".to_owned()),
            code: Some(i32::from(status.as_u16())),
            message: Some(message),
            ..Status::default()
        };
        (status, Json(body)).into_response()
    }
}

impl From<AccessError> for Refusal {
    fn from(error: AccessError) -> Self {
        Self::Access(error)
    }
}

impl From<ExplainerError> for Refusal {
    fn from(error: ExplainerError) -> Self {
        Self::Explainer(error)
    }
}

/// Returns the routes.
pub(super) fn router(explainer: Arc<Explainer>, access: Access) -> Router {
    let service = Service {
        explainer,
        access,
        requests: Arc::new(Semaphore::new(MAX_REQUESTS)),
    };
    Router::new()
        .route(
            "/explain/namespaces/{namespace}/pods/{name}",
            get(explain_pod),
        )
        .route("/simulate", post(simulate))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(service)
}

impl Service {
    /// Returns the caller, if it has the permission.
    async fn authorized(
        &self,
        headers: &HeaderMap,
        verb: &str,
        namespace: &str,
        name: &str,
    ) -> Result<Caller, Refusal> {
        let caller = self.access.authenticate(headers).await?;
        if self.access.may(&caller, verb, namespace, name).await? {
            return Ok(caller);
        }
        Err(Refusal::Forbidden(format!(
            "{} may not {verb} pods in namespace {namespace}",
            caller.name()
        )))
    }

    /// Returns whether the caller may see all pods.
    async fn sees_all(&self, caller: &Caller) -> Result<bool, Refusal> {
        Ok(self.access.may(caller, "list", "", "").await?)
    }
}

async fn explain_pod(
    State(service): State<Service>,
    Path((namespace, name)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let _permit = service.requests.try_acquire().map_err(|_| Refusal::Busy)?;
    let caller = service
        .authorized(&headers, "get", &namespace, &name)
        .await?;
    let mut report = service.explainer.explain(&namespace, &name).await?;
    if !service.sees_all(&caller).await? {
        report.hide_other_namespaces();
    }
    Ok(Json(report).into_response())
}

async fn simulate(
    State(service): State<Service>,
    headers: HeaderMap,
    // `kubectl create --raw` sends no content type.
    body: Bytes,
) -> Result<Response, Refusal> {
    let _permit = service.requests.try_acquire().map_err(|_| Refusal::Busy)?;
    let body = serde_json::from_slice(&body)
        .map_err(|error| Refusal::Invalid(format!("the body is not JSON: {error}")))?;
    let documents = match body {
        Value::Array(documents) => documents,
        document => vec![document],
    };
    let mut named = BTreeSet::new();
    for document in &documents {
        namespaces(document, &mut named);
    }
    let namespace = match named.into_iter().collect::<Vec<_>>().as_slice() {
        [] => "default".to_owned(),
        [namespace] => (*namespace).to_owned(),
        several => {
            return Err(Refusal::Invalid(format!(
                "the objects are of namespaces {}; send those of one namespace",
                several.join(", ")
            )));
        }
    };
    let caller = service
        .authorized(&headers, "create", &namespace, "")
        .await?;
    let mut report = service.explainer.simulate(&namespace, documents).await?;
    if !service.sees_all(&caller).await? {
        report.hide_other_namespaces(&namespace);
    }
    Ok(Json(report).into_response())
}

/// Adds the namespaces that the object and its items name.
fn namespaces<'a>(document: &'a Value, named: &mut BTreeSet<&'a str>) {
    named.extend(document["metadata"]["namespace"].as_str());
    for item in document["items"].as_array().into_iter().flatten() {
        namespaces(item, named);
    }
}

#[cfg(test)]
mod tests;
