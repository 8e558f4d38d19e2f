//! Removal of gates.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::names::ALLOCATION_GATE;
use http::Request;
use http_body_util::BodyExt;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::server::term_until;
use crate::action::GateRemovalOutcome;
use crate::fixture::{gated_pod, response};
use crate::pods::pod;
use crate::write::writes::{Timing, Writer};

/// Removes a gate; the API server responds with this status. Returns the outcome and the requests.
async fn remove(code: u16, valid_until: Duration) -> (GateRemovalOutcome, Vec<(String, Value)>) {
    let requests = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&requests);
    let service = tower::service_fn(move |request: Request<Body>| {
        let log = Arc::clone(&log);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let kind = head.headers["content-type"].to_str().unwrap();
            let line = format!("{} {} {kind}", head.method, head.uri.path());
            log.lock()
                .unwrap()
                .push((line, serde_json::from_slice(&body).unwrap()));
            let found = json!(gated_pod("p", &["a"], &[]));
            Ok::<_, tower::BoxError>(response(code, &found))
        }
    });
    let writer = Writer::new(
        Client::new(service, "default"),
        term_until(valid_until),
        CancellationToken::new(),
        Timing::default(),
    );
    let pod = pod::reference(&gated_pod("p", &["a"], &[ALLOCATION_GATE]));
    let outcome = writer.remove_gate(pod).await;
    let requests = requests.lock().unwrap().clone();
    (outcome, requests)
}

#[tokio::test]
async fn removes_only_own_gate_of_same_pod() {
    let (outcome, requests) = remove(200, Duration::MAX).await;
    assert_eq!(outcome.pod_uid, "pod-p");
    assert_eq!(outcome.failure, None);
    assert_eq!(
        requests,
        [(
            "PATCH /api/v1/namespaces/default/pods/p application/strategic-merge-patch+json"
                .to_owned(),
            json!({
                "metadata": {"uid": "pod-p"},
                "spec": {"schedulingGates": [{"$patch": "delete", "name": ALLOCATION_GATE}]},
            })
        )]
    );
}

#[tokio::test]
async fn ignores_gate_of_deleted_pod() {
    for code in [404, 409] {
        assert_eq!(remove(code, Duration::MAX).await.0.failure, None, "{code}");
    }
}

#[tokio::test]
async fn reports_rejected_gate_removal() {
    for (code, is_reportable) in [(403, true), (422, true), (500, false)] {
        let failure = remove(code, Duration::MAX).await.0.failure.unwrap();
        assert_eq!(failure.is_reportable, is_reportable, "{code}");
        assert!(failure.message.contains("denied"), "{failure:?}");
    }
}

#[tokio::test]
async fn removes_no_gate_after_end_of_term() {
    let (outcome, requests) = remove(200, Duration::ZERO).await;
    assert!(!outcome.failure.unwrap().is_reportable);
    assert!(requests.is_empty());
}
