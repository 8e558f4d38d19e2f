use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::client::Body;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::fixture::response;
use crate::pod_condition::{PodConditionUpdate, allocated};

#[test]
fn truncates_at_character_boundary() {
    assert_eq!(truncate("abc", 2), "ab");
    assert_eq!(truncate("aé", 2), "a");
    assert_eq!(truncate("a", 2), "a");
}

/// Starts a publisher whose API server responds with these status codes, then with 200. Returns it with the pod and message of
/// each written condition, and the time since the start.
fn publisher(
    codes: &[u16],
) -> (
    EventPublisher,
    UnboundedReceiver<(String, String, Duration)>,
) {
    publisher_with(codes, Arc::default())
}

fn publisher_with(
    codes: &[u16],
    metrics: Arc<Metrics>,
) -> (
    EventPublisher,
    UnboundedReceiver<(String, String, Duration)>,
) {
    let codes = Arc::new(Mutex::new(VecDeque::from(codes.to_vec())));
    let (log, written) = unbounded_channel();
    let start = Instant::now();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (log, codes) = (log.clone(), Arc::clone(&codes));
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let body: Value = serde_json::from_slice(&body).unwrap();
            let pod = head.uri.path().split('/').rev().nth(1).unwrap().to_owned();
            let message = &body["status"]["conditions"][0]["message"];
            let message = message.as_str().unwrap().to_owned();
            log.send((pod.clone(), message, start.elapsed())).unwrap();
            let code = codes.lock().unwrap().pop_front().unwrap_or(200);
            let found = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod}});
            Ok::<_, tower::BoxError>(response(code, &found))
        }
    });
    let publisher = EventPublisher::start(Client::new(service, "default"), metrics);
    (publisher, written)
}

fn update(pod: &str, message: &str) -> PodConditionUpdate {
    let reference = ObjectReference {
        name: Some(pod.to_owned()),
        namespace: Some("default".to_owned()),
        uid: Some(format!("uid-{pod}")),
        ..ObjectReference::default()
    };
    let mut update = allocated(reference, Timestamp::UNIX_EPOCH);
    update.condition.message = Some(message.to_owned());
    update
}

/// Returns the conditions that are written within ten minutes.
async fn all(
    written: &mut UnboundedReceiver<(String, String, Duration)>,
) -> Vec<(String, String, u64)> {
    let mut conditions = Vec::new();
    let limit = Duration::from_secs(600);
    while let Ok(Some((pod, message, at))) = tokio::time::timeout(limit, written.recv()).await {
        conditions.push((pod, message, at.as_secs()));
    }
    conditions
}

fn each(conditions: &[(&str, &str, u64)]) -> Vec<(String, String, u64)> {
    let own = |(pod, message, at): &(&str, &str, u64)| ((*pod).into(), (*message).into(), *at);
    conditions.iter().map(own).collect()
}

#[tokio::test(start_paused = true)]
async fn repeats_failed_conditions_for_a_while() {
    let (publisher, mut written) = publisher(&[500; 20]);
    publisher.write_condition(update("a", "full"));
    let times = [0, 1, 3, 7, 15, 31, 63];
    assert_eq!(
        all(&mut written).await,
        each(&times.map(|at| ("a", "full", at)))
    );
}

#[tokio::test(start_paused = true)]
async fn repeats_only_newest_condition_of_each_pod() {
    let (publisher, mut written) = publisher(&[503, 503, 429, 500]);
    publisher.write_condition(update("a", "full"));
    publisher.write_condition(update("b", "full"));
    publisher.write_condition(update("a", "newer"));
    let expected = [
        ("a", "full", 0),
        ("b", "full", 0),
        ("a", "newer", 0),
        ("a", "newer", 1),
        ("b", "full", 1),
        ("a", "newer", 3),
    ];
    assert_eq!(all(&mut written).await, each(&expected));
}

#[tokio::test(start_paused = true)]
async fn repeats_no_rejected_condition() {
    let (publisher, mut written) = publisher(&[403, 404]);
    publisher.write_condition(update("a", "denied"));
    publisher.write_condition(update("b", "deleted"));
    let expected = [("a", "denied", 0), ("b", "deleted", 0)];
    assert_eq!(all(&mut written).await, each(&expected));
}

#[tokio::test(start_paused = true)]
async fn records_time_until_first_condition_is_written() {
    let metrics = Arc::new(Metrics::default());
    let (publisher, mut written) = publisher_with(&[503], Arc::clone(&metrics));
    let first = PodConditionUpdate {
        waits_since: Some(Timestamp::now()),
        ..update("a", "full")
    };
    publisher.write_condition(first);
    publisher.write_condition(update("b", "a later condition"));
    let expected = [
        ("a", "full", 0),
        ("b", "a later condition", 0),
        ("a", "full", 1),
    ];
    assert_eq!(all(&mut written).await, each(&expected));
    let text = metrics.text().unwrap();
    let count = "drava_controller_pod_explanation_seconds_count";
    let count = text.lines().find(|line| line.starts_with(count)).unwrap();
    assert!(count.ends_with(" 1"), "{count}");
}
