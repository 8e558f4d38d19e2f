//! Writes of the status of a quota.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::quota::{GpuQuota, GpuQuotaStatus, QuotaAmounts};
use http::Request;
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::server::term_until;
use crate::action::status::{StatusOutcome, StatusUpdate};
use crate::fixture::response;
use crate::write::writes::{Timing, Writer};

/// Writes a status; the API server responds with this status code. Returns the outcome and the requests.
async fn write(
    code: u16,
    valid_until: Duration,
) -> (StatusOutcome<GpuQuota>, Vec<(String, Value)>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&requests);
    let service = tower::service_fn(move |request: Request<Body>| {
        let log = Arc::clone(&log);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let kind = head.headers["content-type"].to_str().unwrap();
            let line = format!("{} {} {kind}", head.method, head.uri.path());
            let body: Value = serde_json::from_slice(&body).unwrap();
            log.lock().unwrap().push((line, body));
            let found = json!({
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuQuota",
                "metadata": {"name": "q", "uid": "u", "resourceVersion": "8"}, "spec": {"namespaces": ["a"]},
            });
            Ok::<_, tower::BoxError>(response(code, &found))
        }
    });
    let writer = Writer::new(
        Client::new(service, "default"),
        term_until(valid_until),
        CancellationToken::new(),
        Timing::default(),
    );
    let used = QuotaAmounts {
        devices: Some(1),
        ..QuotaAmounts::default()
    };
    let update = StatusUpdate {
        name: "q".to_owned(),
        uid: "u".to_owned(),
        resource_version: "7".to_owned(),
        status: GpuQuotaStatus {
            observed_generation: Some(3),
            used,
            ..GpuQuotaStatus::default()
        },
    };
    let outcome = writer.write_status(update).await;
    let requests = requests.lock().unwrap().clone();
    (outcome, requests)
}

#[tokio::test]
async fn replaces_all_amounts_of_same_version() {
    let (outcome, requests) = write(200, Duration::MAX).await;
    let quota = outcome.written.unwrap();
    assert_eq!(quota.metadata.resource_version.as_deref(), Some("8"));
    let none = json!({"memory": null, "cores": null, "devices": null});
    assert_eq!(
        requests,
        [(
            "PATCH /apis/gpu.drava.dev/v1alpha1/gpuquotas/q/status application/merge-patch+json"
                .to_owned(),
            json!({
                "metadata": {"uid": "u", "resourceVersion": "7"},
                "status": {
                    "observedGeneration": 3, "namespaces": 0, "conditions": [],
                    "used": {"memory": null, "cores": null, "devices": 1},
                    "borrowed": none, "free": none,
                },
            })
        )]
    );
}

#[tokio::test]
async fn returns_no_quota_after_rejected_write() {
    for code in [403, 404, 409, 500] {
        let (outcome, _) = write(code, Duration::MAX).await;
        assert_eq!(outcome.name, "q");
        assert!(outcome.written.is_none(), "{code}");
    }
}

#[tokio::test]
async fn writes_no_status_after_end_of_term() {
    let (outcome, requests) = write(200, Duration::ZERO).await;
    assert!(outcome.written.is_none());
    assert!(requests.is_empty());
}
