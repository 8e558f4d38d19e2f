//! Writes of the status of a quota and of the leader.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::leader::{GpuControllerLeader, GpuControllerLeaderStatus};
use drava_api::quota::{GpuQuota, GpuQuotaStatus, QuotaAmounts};
use http::Request;
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::server::term_until;
use crate::action::status::{Reported, StatusOutcome, StatusUpdate};
use crate::fixture::response;
use crate::write::writes::{Timing, Writer};

/// Writes a status; the API server responds with this status code, and with version 8 of this object. Returns the outcome and
/// the requests.
async fn write_to<K>(
    mut found: Value,
    status: K::Status,
    code: u16,
    valid_until: Duration,
) -> (StatusOutcome<K>, Vec<(String, Value)>)
where
    K: Reported + Clone + Debug + DeserializeOwned,
{
    found["apiVersion"] = "gpu.drava.dev/v1alpha1".into();
    found["kind"] = K::kind(&()).into();
    found["metadata"] = json!({"name": "q", "uid": "u", "resourceVersion": "8"});
    let requests = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&requests);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (log, found) = (Arc::clone(&log), found.clone());
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let kind = head.headers["content-type"].to_str().unwrap();
            let line = format!("{} {} {kind}", head.method, head.uri.path());
            let body: Value = serde_json::from_slice(&body).unwrap();
            log.lock().unwrap().push((line, body));
            Ok::<_, tower::BoxError>(response(code, &found))
        }
    });
    let writer = Writer::new(
        Client::new(service, "default"),
        term_until(valid_until),
        CancellationToken::new(),
        Timing::default(),
    );
    let update = StatusUpdate {
        name: "q".to_owned(),
        uid: "u".to_owned(),
        resource_version: "7".to_owned(),
        status,
    };
    let outcome = writer.write_status(update).await;
    let requests = requests.lock().unwrap().clone();
    (outcome, requests)
}

/// Writes the status of a quota.
async fn write(
    code: u16,
    valid_until: Duration,
) -> (StatusOutcome<GpuQuota>, Vec<(String, Value)>) {
    let used = QuotaAmounts {
        devices: Some(1),
        ..QuotaAmounts::default()
    };
    let status = GpuQuotaStatus {
        observed_generation: Some(3),
        used,
        ..GpuQuotaStatus::default()
    };
    let quota = json!({"spec": {"namespaces": ["a"]}});
    write_to(quota, status, code, valid_until).await
}

/// Writes the status of the leader, which reserves nothing any longer.
async fn write_leader(
    code: u16,
    valid_until: Duration,
) -> (StatusOutcome<GpuControllerLeader>, Vec<(String, Value)>) {
    let leader = json!({"spec": {"holder": "a"}});
    let status = GpuControllerLeaderStatus::default();
    write_to(leader, status, code, valid_until).await
}

#[tokio::test]
async fn replaces_reservations_of_same_version() {
    let (outcome, requests) = write_leader(200, Duration::MAX).await;
    let leader = outcome.written.unwrap();
    assert_eq!(leader.metadata.resource_version.as_deref(), Some("8"));
    assert_eq!(
        requests,
        [(
            "PATCH /apis/gpu.drava.dev/v1alpha1/gpucontrollerleaders/q/status application/merge-patch+json"
                .to_owned(),
            json!({
                "metadata": {"uid": "u", "resourceVersion": "7"},
                "status": {"reservations": [], "omittedReservations": 0},
            })
        )]
    );
    assert!(write_leader(409, Duration::MAX).await.0.written.is_none());
}

#[tokio::test]
async fn writes_no_reservations_after_end_of_term() {
    let (outcome, requests) = write_leader(200, Duration::ZERO).await;
    assert!(outcome.written.is_none());
    assert!(requests.is_empty());
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
                    "suspended": none, "borrowed": none, "free": none,
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
