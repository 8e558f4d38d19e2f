//! The Secret with the certificate of the webhook: each replica serves it, and the leader rotates a self-managed one.
//!
//! A rotation has two writes. The first adds the new authority to the webhook configurations, so the API server trusts both
//! certificates. The second replaces the certificate in the Secret, after the API servers had time to read the first. A crash
//! in between leaves a trusted authority without a certificate; the next leader starts again.

use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_connection::Limits;
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingWebhookConfiguration,
};
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client};
use rustls::ServerConfig;
use serde_json::json;
use tokio::sync::watch;

use super::certificate::{self, Certificate, CertificateError};
use crate::operate::metrics::{CertificateValidity, Metrics};
use crate::write::lease::Term;

/// Name of the Secret, of the Service and of both webhook configurations.
pub(super) const WEBHOOK_NAME: &str = "drava-webhook";
/// Field manager of the writes.
const FIELD_MANAGER: &str = "drava-webhook-certificates";
/// Time between two checks of the leader.
const CHECK_PERIOD: Duration = Duration::from_secs(10);
/// Time after which API servers have read a changed webhook configuration.
const PROPAGATION: Duration = Duration::from_secs(5);
/// Time-out of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(4);

/// Why the certificate could not be checked or rotated.
#[derive(Debug, thiserror::Error)]
enum RotationError {
    #[error("cannot {verb} {kind} {WEBHOOK_NAME}")]
    Request {
        verb: &'static str,
        kind: &'static str,
        #[source]
        source: Box<kube::Error>,
    },
    #[error("cannot {0} {1} {WEBHOOK_NAME}: request timed out")]
    TimedOut(&'static str, &'static str),
    #[error("cannot issue a certificate for the webhook")]
    Certificate(#[from] CertificateError),
    #[error("this replica has lost the lease")]
    NotLeader,
}

/// See the [module](self).
#[derive(Clone)]
pub(super) struct CertificateStore {
    client: Client,
    namespace: String,
}

impl CertificateStore {
    pub(super) fn new(client: Client, namespace: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
        }
    }

    /// Returns the DNS name by which the API server calls the webhook.
    fn dns_name(&self) -> String {
        format!("{WEBHOOK_NAME}.{}.svc", self.namespace)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Sends each usable version of the certificate, until the future is dropped.
    pub(super) async fn follow(
        &self,
        certificates: &watch::Sender<Option<Arc<ServerConfig>>>,
        metrics: &Metrics,
    ) {
        let config = Limits::SHORT_WATCHES
            .watch()
            .fields(&format!("metadata.name={WEBHOOK_NAME}"));
        let secrets = watcher::watcher(self.secrets(), config).default_backoff();
        let mut secrets = std::pin::pin!(secrets);
        while let Some(secret) = secrets.next().await {
            // Without a usable certificate in the Secret, the last one is served.
            match secret {
                Ok(Event::InitApply(secret) | Event::Apply(secret)) => match usable(&secret) {
                    Ok((config, validity)) => {
                        tracing::info!("serving the webhook certificate of the Secret");
                        metrics.set_certificate(validity);
                        certificates.send_replace(Some(config));
                    }
                    Err(error) => tracing::warn!(
                        error = describe(&error),
                        secret = WEBHOOK_NAME,
                        "no usable webhook certificate"
                    ),
                },
                Ok(Event::Init) => {}
                Ok(Event::InitDone) if certificates.borrow().is_some() => {}
                Ok(Event::InitDone | Event::Delete(_)) => tracing::warn!(
                    secret = WEBHOOK_NAME,
                    "the Secret of the webhook does not exist; run helm upgrade to create it"
                ),
                Err(error) => tracing::warn!(
                    error = describe(&error),
                    secret = WEBHOOK_NAME,
                    "watch of the webhook certificate failed; restarting it"
                ),
            }
        }
    }

    /// Rotates the certificate during the term: after two thirds of its lifetime, or if it is unusable.
    pub(super) async fn rotate(&self, lifetime: Duration, term: &Term) {
        let mut last_error = String::new();
        while term.is_valid() {
            match self.check(lifetime, term).await {
                Ok(()) => last_error.clear(),
                Err(error) => {
                    let error = describe(&error);
                    if error != last_error {
                        tracing::warn!(error, "the webhook certificate is not up to date");
                        last_error = error;
                    }
                }
            }
            tokio::select! {
                () = tokio::time::sleep(CHECK_PERIOD) => {}
                () = term.ended() => {}
            }
        }
    }

    async fn check(&self, lifetime: Duration, term: &Term) -> Result<(), RotationError> {
        let mut secret = request("read", "Secret", self.secrets().get(WEBHOOK_NAME)).await?;
        let name = self.dns_name();
        let now = Timestamp::now();
        let renewal_margin = lifetime / 3;
        let current = Certificate::of_secret(&secret).and_then(|certificate| {
            let at = now
                .checked_add(renewal_margin)
                .map_err(|_| CertificateError::Validity)?;
            certificate.verify(&name, at).map(|()| certificate)
        });
        let error = match current {
            Ok(certificate) => return self.trust(certificate.bundle(), term).await.map(|_| ()),
            Err(error) => error,
        };
        tracing::info!(
            reason = describe(&error),
            "rotating the webhook certificate"
        );
        let previous = certificate::bundle_of(&secret);
        let next = Certificate::issue(&name, now, lifetime, previous.as_deref())?;
        self.trust(next.bundle(), term).await?;
        if previous.is_some() {
            tokio::time::sleep(PROPAGATION).await;
        }
        if !term.is_valid() {
            return Err(RotationError::NotLeader);
        }
        next.write_to(&mut secret);
        // Guarded by the resource version of the Secret.
        let parameters = PostParams {
            field_manager: Some(FIELD_MANAGER.to_owned()),
            ..PostParams::default()
        };
        let secrets = self.secrets();
        request(
            "update",
            "Secret",
            secrets.replace(WEBHOOK_NAME, &parameters, &secret),
        )
        .await
        .map(|_| ())
    }

    /// Makes the API server trust these certificates.
    async fn trust(&self, bundle: &str, term: &Term) -> Result<(), RotationError> {
        let mutating = ApiResource::erase::<MutatingWebhookConfiguration>(&());
        let validating = ApiResource::erase::<ValidatingWebhookConfiguration>(&());
        for (kind, resource) in [
            ("MutatingWebhookConfiguration", mutating),
            ("ValidatingWebhookConfiguration", validating),
        ] {
            let api: Api<DynamicObject> = Api::all_with(self.client.clone(), &resource);
            let found = request("read", kind, api.get(WEBHOOK_NAME)).await?;
            let Some(patch) = trust_patch(&found, bundle) else {
                continue;
            };
            if !term.is_valid() {
                return Err(RotationError::NotLeader);
            }
            let parameters = PatchParams {
                field_manager: Some(FIELD_MANAGER.to_owned()),
                ..PatchParams::default()
            };
            let patch = Patch::Strategic(&patch);
            request("patch", kind, api.patch(WEBHOOK_NAME, &parameters, &patch)).await?;
        }
        Ok(())
    }
}

/// Returns the certificate of a Secret as the server uses it, and its validity.
fn usable(secret: &Secret) -> Result<(Arc<ServerConfig>, CertificateValidity), CertificateError> {
    let certificate = Certificate::of_secret(secret)?;
    Ok((certificate.server_config()?, certificate.validity()?))
}

/// Returns the patch by which all webhooks of a configuration trust the certificates; `None` if they do already.
fn trust_patch(configuration: &DynamicObject, bundle: &str) -> Option<serde_json::Value> {
    let encoded = json!(ByteString(bundle.as_bytes().to_vec()));
    let webhooks: Vec<_> = configuration
        .data
        .get("webhooks")?
        .as_array()?
        .iter()
        .filter(|webhook| webhook.pointer("/clientConfig/caBundle") != Some(&encoded))
        .filter_map(|webhook| webhook.get("name"))
        .map(|name| json!({"name": name, "clientConfig": {"caBundle": encoded}}))
        .collect();
    (!webhooks.is_empty()).then(|| {
        json!({
            "metadata": {"resourceVersion": configuration.metadata.resource_version},
            "webhooks": webhooks,
        })
    })
}

async fn request<T>(
    verb: &'static str,
    kind: &'static str,
    response: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, RotationError> {
    match tokio::time::timeout(REQUEST_TIMEOUT, response).await {
        Ok(response) => response.map_err(|source| RotationError::Request {
            verb,
            kind,
            source: Box::new(source),
        }),
        Err(_) => Err(RotationError::TimedOut(verb, kind)),
    }
}

#[cfg(test)]
mod tests;
