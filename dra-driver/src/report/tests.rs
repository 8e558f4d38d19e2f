use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use http::{Request, Response};
use kube::client::Body;

use super::*;
use crate::gpus::capacity::ShareTotals;
use crate::node::claim::ShareId;
use crate::prepare::companion::Addition;
use crate::prepare::record::fixture;

#[tokio::test]
async fn sends_no_status_that_is_in_the_queue() {
    let requests = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&requests);
    let service = tower::service_fn(move |_: Request<Body>| {
        counted.fetch_add(1, Ordering::Relaxed);
        let response = Response::builder().status(404).body(Body::empty()).unwrap();
        async move { Ok::<_, tower::BoxError>(response) }
    });
    let health = watch::Sender::new(Arc::default());
    let client = Client::new(service, "default");
    let (reporter, task) = Reporter::start(client, "node-1".to_owned(), health.subscribe());
    let amounts = ShareTotals::default();
    let claim = fixture::record(2, "node-1/gpus", amounts).claim;
    let companion = Companion {
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
    };
    let send = |status: &GrantStatus| {
        let found = ResourceClaim::default();
        assert!(!reporter.grant(&found, &companion, "node-1/gpus", status));
    };
    send(&GrantStatus::Granted);
    send(&GrantStatus::Granted);
    send(&GrantStatus::Released);
    send(&GrantStatus::Granted);
    assert_eq!(reporter.queued.lock().len(), 1);
    let queued = Arc::clone(&reporter.queued);
    drop(reporter);
    task.await;
    assert_eq!(requests.load(Ordering::Relaxed), 3);
    assert!(
        queued.lock().is_empty(),
        "a status that failed may be sent again"
    );
}
