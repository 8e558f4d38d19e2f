//! Request and response of an admission webhook, `admission.k8s.io/v1`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The request of the API server.
#[derive(Debug, Deserialize)]
pub(super) struct AdmissionReview<K> {
    pub(super) request: AdmissionRequest<K>,
}

/// One object to admit.
#[derive(Debug, Deserialize)]
pub(super) struct AdmissionRequest<K> {
    uid: String,
    /// Namespace of the object; the object of a creation may lack it.
    #[serde(default)]
    pub(super) namespace: String,
    /// Whether nothing is written in the end.
    #[serde(default, rename = "dryRun")]
    pub(super) is_dry_run: bool,
    pub(super) object: K,
}

/// The response to the API server.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct AdmissionResponse {
    api_version: &'static str,
    kind: &'static str,
    response: Verdict,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Verdict {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Status {
    code: u16,
    message: String,
}

impl<K> AdmissionRequest<K> {
    /// Admits the object with these JSON Patch operations (RFC 6902) and warnings.
    pub(super) fn allow(&self, operations: &[Value], warnings: Vec<String>) -> AdmissionResponse {
        let patch = (!operations.is_empty())
            .then(|| BASE64.encode(Value::from(operations.to_vec()).to_string()));
        self.respond(Verdict {
            uid: self.uid.clone(),
            allowed: true,
            patch_type: patch.is_some().then_some("JSONPatch"),
            patch,
            status: None,
            warnings,
        })
    }

    /// Rejects the object. The API server prefixes the message with the name of the webhook.
    pub(super) fn reject(&self, message: String) -> AdmissionResponse {
        self.respond(Verdict {
            uid: self.uid.clone(),
            allowed: false,
            patch_type: None,
            patch: None,
            status: Some(Status { code: 422, message }),
            warnings: Vec::new(),
        })
    }

    fn respond(&self, response: Verdict) -> AdmissionResponse {
        AdmissionResponse {
            api_version: "admission.k8s.io/v1",
            kind: "AdmissionReview",
            response,
        }
    }
}
