//! Evictions with a fake API server.

use std::sync::Mutex;

use http::{Request as HttpRequest, Response, StatusCode};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::Value;

use super::*;
use crate::action::{EvictionCause, OwnCause};
use crate::operate::clock::Clock;

/// Time until the response to a request.
const LATENCY: Duration = Duration::from_millis(1);

/// Requests in order: name of the pod, and whether it was a dry run.
type Log = Arc<Mutex<Vec<(String, bool)>>>;

/// Returns an evictor; `status_of` returns the status of the response to a request of the log.
fn evictor(
    status_of: impl Fn(&str, bool) -> u16 + Clone + Send + 'static,
    term: Duration,
) -> (Evictor, Log) {
    let log = Log::default();
    let requests = Arc::clone(&log);
    let service = tower::service_fn(move |request: HttpRequest<Body>| {
        let (requests, status_of) = (Arc::clone(&requests), status_of.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body: Value =
                serde_json::from_slice(&body.collect().await.unwrap().to_bytes()).unwrap();
            let name = body["metadata"]["name"].as_str().unwrap().to_owned();
            assert_eq!(
                parts.uri.path(),
                format!("/api/v1/namespaces/default/pods/{name}/eviction")
            );
            assert_eq!(
                body["deleteOptions"]["preconditions"]["uid"],
                format!("pod-{name}")
            );
            let query = parts.uri.query().unwrap_or_default();
            let is_dry_run = query.contains("dryRun=All");
            let status = StatusCode::from_u16(status_of(&name, is_dry_run)).unwrap();
            requests.lock().unwrap().push((name, is_dry_run));
            tokio::time::sleep(LATENCY).await;
            let kind = if status.is_success() {
                "Success"
            } else {
                "Failure"
            };
            let body = json!({
                "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": kind,
                "code": status.as_u16(), "message": "budget a allows no disruption", "reason": "",
            });
            let response = Response::builder().status(status);
            response.body(Body::from(body.to_string().into_bytes()))
        }
    });
    let client = Client::new(service, "default");
    let clock = Clock::new(|| Duration::from_secs(100));
    let term = Term::new(clock, Duration::from_secs(100) + term);
    (Evictor::new(client, Arc::new(term)), log)
}

fn eviction(victims: &[&str]) -> Eviction {
    let reference = |name: &str| ObjectReference {
        namespace: Some("default".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(format!("pod-{name}")),
        ..ObjectReference::default()
    };
    Eviction {
        cause: EvictionCause::Own(
            OwnCause::IncompleteGang,
            "1 of 2 members are bound".to_owned(),
        ),
        victims: victims
            .iter()
            .map(|name| Victim {
                pod: reference(name),
                priority: 1,
            })
            .collect(),
    }
}

fn names(victims: &[Victim]) -> Vec<&str> {
    let names = victims.iter().map(|victim| victim.pod.name.as_deref());
    names.map(Option::unwrap).collect()
}

fn requests(log: &Log) -> Vec<(String, bool)> {
    log.lock().unwrap().clone()
}

const TERM: Duration = Duration::from_secs(10);

#[tokio::test]
async fn evicts_after_dry_runs_of_all_victims() {
    let (evictor, log) = evictor(|_, _| 201, TERM);
    let outcome = evictor.evict(eviction(&["a", "b"])).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(names(&outcome.evicted), ["a", "b"]);
    let expected = [("a", true), ("b", true), ("a", false), ("b", false)];
    assert_eq!(
        requests(&log),
        expected.map(|(name, dry)| (name.to_owned(), dry))
    );
}

#[tokio::test]
async fn evicts_no_pod_if_one_victim_is_protected() {
    let (evictor, log) = evictor(|name, _| if name == "c" { 429 } else { 201 }, TERM);
    let outcome = evictor.evict(eviction(&["a", "b", "c"])).await;
    assert!(outcome.evicted.is_empty());
    let failure = outcome.failure.unwrap();
    assert_eq!(failure.victim.pod.name.as_deref(), Some("c"));
    assert_eq!(failure.message, "budget a allows no disruption");
    assert!(requests(&log).iter().all(|(_, is_dry_run)| *is_dry_run));
}

#[tokio::test]
async fn stops_at_first_rejected_eviction() {
    // One budget covers all and allows one disruption: each dry run succeeds.
    let (evictor, _) = evictor(
        |name, dry| if name == "b" && !dry { 429 } else { 201 },
        TERM,
    );
    let victims = ["a", "b", "c", "d", "e"];
    let outcome = evictor.evict(eviction(&victims)).await;
    assert_eq!(
        names(&outcome.evicted),
        ["a", "c"],
        "no batch after that of b"
    );
    assert_eq!(
        outcome.failure.unwrap().victim.pod.name.as_deref(),
        Some("b")
    );
}

#[tokio::test(start_paused = true)]
async fn evicts_many_pods_in_a_tenth_of_the_time() {
    let (evictor, log) = evictor(|_, _| 201, TERM);
    let names: Vec<String> = (0..250).map(|index| format!("p{index}")).collect();
    let victims: Vec<&str> = names.iter().map(String::as_str).collect();
    let start = tokio::time::Instant::now();
    let outcome = evictor.evict(eviction(&victims)).await;
    assert!(
        start.elapsed() < LATENCY * 500 / 10,
        "{:?}",
        start.elapsed()
    );
    assert_eq!(outcome.evicted.len(), 250);
    let log = requests(&log);
    assert!(log[..250].iter().all(|(_, is_dry_run)| *is_dry_run));
    assert_eq!(log.len(), 500);
}

#[tokio::test]
async fn counts_deleted_and_replaced_pods_as_evicted() {
    let (evictor, _) = evictor(|name, _| if name == "a" { 404 } else { 409 }, TERM);
    let outcome = evictor.evict(eviction(&["a", "b"])).await;
    assert_eq!(names(&outcome.evicted), ["a", "b"]);
}

#[tokio::test]
async fn names_missing_permission() {
    let (evictor, _) = evictor(|_, _| 403, TERM);
    let failure = evictor.evict(eviction(&["a"])).await.failure.unwrap();
    assert!(
        failure.message.contains("rejects the eviction"),
        "{failure:?}"
    );
}

#[tokio::test]
async fn sends_nothing_after_the_term() {
    let (evictor, log) = evictor(|_, _| 201, Duration::ZERO);
    let failure = evictor.evict(eviction(&["a"])).await.failure.unwrap();
    assert!(failure.message.contains("lost the lease"), "{failure:?}");
    assert!(requests(&log).is_empty());
}
