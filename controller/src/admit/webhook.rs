//! Admission webhook, served by every replica: the allocation gate of new pods, the check of opaque config, warnings about
//! likely mistakes, and the translation of extended resources.
//!
//! The webhook has no side effects but the claim templates of translated pods. The API server ignores its failures, except
//! those of the translation: then pods wait in kube-scheduler for their allocation, and the controller reports invalid config
//! at the pod.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, State};
use axum::routing::post;
use axum::{Json, Router};
use drava_compatibility::Settings;
use drava_explanation::advice;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimSpec;
use kube::Client;
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::admit::compatibility;
use crate::operate::health::Health;
use crate::operate::metrics::Metrics;
use crate::write::lease::Term;

mod admission_review;
mod catalog;
mod certificate;
mod certificate_store;
mod config;
mod gate;
mod tls;

use admission_review::{AdmissionResponse, AdmissionReview};
use catalog::SharedCatalog;
use certificate_store::CertificateStore;
use tls::TlsListener;

/// Maximum size of a request: an update carries two objects, each at most 1.5 MiB in etcd.
const MAX_BODY_BYTES: usize = 8 << 20;
/// Time for which requests in progress are answered after the stop.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Settings of the webhook.
#[derive(Debug, Clone)]
pub struct WebhookSettings {
    /// Listen address.
    pub listen: SocketAddr,
    /// Namespace of the Secret and of the Service.
    pub namespace: String,
    /// Names of the schedulers whose pods are gated.
    pub schedulers: Vec<String>,
    /// Settings of the translation of extended resources; `None` without translation.
    pub compatibility: Option<Settings>,
}

/// What the handlers need.
#[derive(Clone)]
struct Webhook {
    catalog: SharedCatalog,
    schedulers: Arc<[String]>,
    compatibility: Option<Arc<Settings>>,
    /// Creates the claim templates of translated pods.
    client: Option<Client>,
}

/// Serves the webhook until `stop`, with the client of the watches. The replica is ready when the certificate is loaded and all lists are complete.
///
/// # Errors
/// When the address cannot be bound.
pub async fn serve(
    client: Client,
    watching: Client,
    settings: WebhookSettings,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = tokio::net::TcpListener::bind(settings.listen).await?;
    let (certificates, mut certificate) = watch::channel(None);
    let (complete, mut is_complete) = watch::channel(false);
    let catalog = SharedCatalog::new(settings.compatibility.is_some());
    let webhook = Webhook {
        catalog: catalog.clone(),
        schedulers: settings.schedulers.into(),
        compatibility: settings.compatibility.map(Arc::new),
        client: Some(client.clone()),
    };
    let store = CertificateStore::new(client.clone(), &settings.namespace);
    let listener = TlsListener::start(listener, certificate.clone())?;
    let served = axum::serve(listener, router(webhook))
        .with_graceful_shutdown(stop.clone().cancelled_owned());
    let ready = async {
        let loaded = certificate.wait_for(Option::is_some).await.is_ok();
        if loaded && is_complete.wait_for(|complete| *complete).await.is_ok() {
            tracing::info!("webhook is ready");
            health.set_webhook_ready(true);
        }
        std::future::pending::<()>().await;
    };
    let stopped = async {
        stop.cancelled().await;
        tokio::time::sleep(SHUTDOWN_TIMEOUT).await;
    };
    tokio::select! {
        served = served => served,
        () = store.follow(&certificates, &metrics) => Ok(()),
        () = catalog.follow(&watching, &complete) => Ok(()),
        () = ready => Ok(()),
        () = stopped => Ok(()),
    }
}

fn router(webhook: Webhook) -> Router {
    Router::new()
        .route("/gate", post(gate_pod))
        .route("/config", post(check_config))
        .route("/compatibility", post(translate_pod))
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(webhook)
}

/// Rotates the self-managed certificate during the term of this replica.
pub async fn rotate_certificate(client: Client, namespace: &str, lifetime: Duration, term: &Term) {
    CertificateStore::new(client, namespace)
        .rotate(lifetime, term)
        .await;
}

async fn gate_pod(
    State(webhook): State<Webhook>,
    Json(review): Json<AdmissionReview<Pod>>,
) -> Json<AdmissionResponse> {
    let request = review.request;
    let catalog = webhook.catalog.read();
    let operations = gate::operations(
        &request.object,
        &request.namespace,
        &catalog,
        &webhook.schedulers,
    );
    let own = catalog.own_claims(&request.object, &request.namespace);
    Json(request.allow(&operations, advice::of_pod(&request.object, &own)))
}

async fn translate_pod(
    State(webhook): State<Webhook>,
    Json(review): Json<AdmissionReview<Value>>,
) -> Json<AdmissionResponse> {
    let request = review.request;
    let Some(settings) = &webhook.compatibility else {
        return Json(request.allow(&[], Vec::new()));
    };
    let translated = {
        let catalog = webhook.catalog.read();
        let settings = Settings {
            largest_share_bytes: catalog.shares().largest_bytes,
            largest_partition_bytes: catalog.largest_partition_bytes(),
            ..settings.as_ref().clone()
        };
        let limits = catalog.resource_limits(&request.namespace);
        compatibility::translate(&request.object, &settings, limits)
    };
    let translation = match translated {
        Ok(None) => return Json(request.allow(&[], Vec::new())),
        Ok(Some(translation)) => translation,
        Err(message) => return Json(request.reject(message)),
    };
    let key = (request.namespace.clone(), translation.template);
    let exists = webhook.catalog.read().has_template(&key.0, &key.1);
    if let Some(client) = webhook
        .client
        .as_ref()
        .filter(|_| !request.is_dry_run && !exists)
    {
        compatibility::templates::create(client, &key, &translation.claim).await;
    }
    Json(request.allow(&translation.operations, translation.warnings))
}

async fn check_config(
    State(webhook): State<Webhook>,
    Json(review): Json<AdmissionReview<Value>>,
) -> Json<AdmissionResponse> {
    let request = review.request;
    // The spec of a template has the claim's spec in its field `spec`.
    let (root, path) = match request.object.pointer("/spec/spec") {
        Some(_) => ("spec.spec", "/spec/spec"),
        None => ("spec", "/spec"),
    };
    let spec = request
        .object
        .pointer(path)
        .and_then(|spec| ResourceClaimSpec::deserialize(spec).ok());
    let Some(spec) = spec else {
        return Json(request.allow(&[], Vec::new()));
    };
    let catalog = webhook.catalog.read();
    let errors = config::errors(&spec, root, catalog.classes());
    if errors.is_empty() {
        let warnings = advice::of_claim(&request.namespace, &spec, root, catalog.known());
        return Json(request.allow(&[], warnings));
    }
    Json(request.reject(errors.join("; ")))
}

#[cfg(test)]
mod tests;
