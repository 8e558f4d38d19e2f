use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use http::{Request, Response};
use kube::client::Body;

use super::*;
use crate::gpus::capacity::ShareTotals;
use crate::node::claim::ShareId;
use crate::prepare::companion::Addition;
use crate::prepare::record::fixture;

fn companion(number: u32) -> Companion {
    let amounts = ShareTotals::default();
    let claim = fixture::record(number, "node-1/gpus", amounts).claim;
    Companion {
        base: claim.uid.clone(),
        is_ending: false,
        pods: BTreeSet::new(),
        additions: vec![Addition {
            request: "gpu".to_owned(),
            device: "gpu-0-vgpu".to_owned(),
            share: ShareId::parse(claim.uid.as_str()).unwrap(),
            amounts,
        }],
        claim,
    }
}

/// An API server that answers with what `answer` returns for a path: a status code, or nothing at all.
fn start(
    answer: impl Fn(&str) -> Option<u16> + Clone + Send + 'static,
) -> (Reporter, impl Future<Output = ()> + Send + 'static) {
    let service = tower::service_fn(move |request: Request<Body>| {
        let code = answer(request.uri().path());
        async move {
            let Some(code) = code else {
                return std::future::pending().await;
            };
            let body = match code {
                200 => {
                    r#"{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {}, "spec": {}}"#
                }
                _ => "",
            };
            let response = Response::builder().status(code);
            let response = response.body(Body::from(body.as_bytes().to_vec()));
            Ok::<_, tower::BoxError>(response.unwrap())
        }
    });
    let health = watch::Sender::new(Arc::default());
    let client = Client::new(service, "default");
    Reporter::start(client, "node-1".to_owned(), health.subscribe())
}

fn grant(reporter: &Reporter, companion: &Companion, status: &GrantStatus) {
    let found = ResourceClaim::default();
    assert!(!reporter.grant(&found, companion, "node-1/gpus", status));
}

#[tokio::test]
async fn sends_last_status_that_is_in_the_queue() {
    let requests = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&requests);
    let (reporter, task) = start(move |_| {
        counted.fetch_add(1, Ordering::Relaxed);
        Some(404)
    });
    let companion = companion(2);
    for status in [
        GrantStatus::Granted,
        GrantStatus::Granted,
        GrantStatus::Released,
        GrantStatus::Granted,
    ] {
        grant(&reporter, &companion, &status);
    }
    let queue = Arc::clone(&reporter.queue);
    drop(reporter);
    task.await;
    assert_eq!(requests.load(Ordering::Relaxed), 1);
    let is_empty = lock(&queue).is_empty();
    assert!(is_empty, "a status that failed may be sent again");
}

/// The clock moves only while nothing can run.
#[tokio::test(start_paused = true)]
async fn failing_status_holds_up_no_other_claim() {
    for failure in [Some(500), None] {
        let (written, mut is_written) = mpsc::unbounded_channel();
        let failing = companion(1);
        let name = failing.claim.name.clone();
        let (reporter, task) = start(move |path| {
            if path.ends_with(&format!("/{name}/status")) {
                return failure;
            }
            written.send(Instant::now()).unwrap();
            Some(200)
        });
        let writing = tokio::spawn(task);
        let begin = Instant::now();
        grant(&reporter, &failing, &GrantStatus::Granted);
        tokio::task::yield_now().await;
        grant(&reporter, &companion(2), &GrantStatus::Granted);
        let at = is_written.recv().await.unwrap();
        assert_eq!(at.duration_since(begin), Duration::ZERO, "{failure:?}");
        writing.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn status_that_was_denied_is_written_later() {
    for code in [401, 403, 409, 429, 500, 503] {
        let (written, mut is_written) = mpsc::unbounded_channel();
        let denials = Arc::new(AtomicU32::new(100));
        let (reporter, task) = start(move |_| {
            let left = denials.load(Ordering::Relaxed);
            denials.store(left.saturating_sub(1), Ordering::Relaxed);
            if left > 0 {
                return Some(code);
            }
            written.send(()).unwrap();
            Some(200)
        });
        tokio::spawn(task);
        grant(&reporter, &companion(1), &GrantStatus::Granted);
        is_written.recv().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn reporter_ends_although_writes_fail() {
    for answer in [Some(503), None] {
        let (reporter, task) = start(move |_| answer);
        for number in 1..20 {
            grant(&reporter, &companion(number), &GrantStatus::Granted);
        }
        let writing = tokio::spawn(task);
        tokio::time::sleep(Duration::from_secs(300)).await;
        drop(reporter);
        writing.await.unwrap();
    }
}
