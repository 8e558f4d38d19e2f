//! The start and the end of a term.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::leader::LEADER_NAME;
use http::{Method, Request};
use kube::Client;
use kube::client::Body;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::decide::fixture::settings;
use crate::fixture::{claim, response};
use crate::leader::lead;
use crate::operate::clock::Clock;
use crate::operate::health::Health;
use crate::write::lease::Term;

async fn lead_with(client: Client, stop: CancellationToken) {
    let clock = Clock::new(|| Duration::ZERO);
    lead(
        client.clone(),
        &client,
        settings(),
        Arc::new(Health::new(clock.clone())),
        &Arc::default(),
        Arc::new(Term::new(clock, Duration::MAX)),
        stop,
    )
    .await;
}

/// An API server that admits writes of this replica from its third dry run on.
#[derive(Default)]
struct Server {
    dry_runs: usize,
    /// Number of dry runs before the list of each watch.
    listed_after: Vec<usize>,
}

/// Leads until every watch has listed. Returns the number of dry runs before each list.
async fn dry_runs_before_lists() -> Vec<usize> {
    let server = Arc::new(Mutex::new(Server::default()));
    let stop = CancellationToken::new();
    let (shared, end) = (Arc::clone(&server), stop.clone());
    let service = tower::service_fn(move |request: Request<Body>| {
        let (server, end) = (Arc::clone(&shared), end.clone());
        async move {
            let query = request.uri().query().unwrap_or_default();
            let mut server = server.lock().unwrap();
            let any = claim("a", "1Gi");
            let (code, found) = if *request.method() == Method::PATCH {
                assert!(query.contains("dryRun=All"), "nothing is written: {query}");
                server.dry_runs += 1;
                let code = if server.dry_runs < 3 { 409 } else { 200 };
                (code, json!(any))
            } else if query.split('&').any(|part| part == "limit=20") {
                (200, json!({"metadata": {}, "items": [any]}))
            } else {
                let dry_runs = server.dry_runs;
                server.listed_after.push(dry_runs);
                if server.listed_after.len() == crate::watch::Kind::ALL.len() {
                    end.cancel();
                }
                (503, json!({}))
            };
            Ok::<_, tower::BoxError>(response(code, &found))
        }
    });
    lead_with(Client::new(service, "default"), stop).await;
    server.lock().unwrap().listed_after.clone()
}

/// Until then the API server executes late writes of the previous leader, which the lists would miss.
#[tokio::test(start_paused = true)]
async fn lists_after_accepted_dry_run() {
    let before = dry_runs_before_lists().await;
    assert!(!before.is_empty());
    assert!(before.iter().all(|dry_runs| *dry_runs == 3), "{before:?}");
}

/// Responds like an API server that has only the object that names the leader. A write of its status aborts the task.
async fn respond(request: Request<Body>) -> Result<http::Response<Body>, tower::BoxError> {
    let (uri, method) = (request.uri().clone(), request.method().clone());
    let query = uri.query().unwrap_or_default();
    let is_of_leader = uri.path().contains("gpucontrollerleaders");
    if method == Method::PATCH && query.contains("dryRun=All") {
        return Ok(response(200, &json!(claim("a", "1Gi"))));
    }
    assert_eq!(method, Method::GET, "write of {uri}");
    if query.contains("watch=") || query.contains("watch&") {
        return futures::future::pending().await;
    }
    let is_group = uri.path().starts_with("/apis/") && uri.path().matches('/').count() == 3;
    let found = if is_group {
        let resources = ["gpuquotas", "gpupolicies", "gpucontrollerleaders"];
        let resources = resources.map(|name| {
            json!({"name": name, "singularName": "", "namespaced": false, "kind": "", "verbs": []})
        });
        json!({"kind": "APIResourceList", "groupVersion": "", "resources": resources})
    } else {
        let leader = json!({
            "metadata": {"name": LEADER_NAME, "uid": "u", "resourceVersion": "1"}, "spec": {"holder": "a"},
        });
        let items = if is_of_leader {
            vec![leader]
        } else {
            Vec::new()
        };
        json!({"metadata": {"resourceVersion": "1"}, "items": items})
    };
    Ok(response(200, &found))
}

/// The outcome of the write is unknown, so the next term starts from complete lists.
#[tokio::test(start_paused = true)]
async fn term_ends_after_aborted_write() {
    let stop = CancellationToken::new();
    let client = Client::new(tower::service_fn(respond), "default");
    let term = lead_with(client, stop.clone());
    tokio::time::timeout(Duration::from_secs(60), term)
        .await
        .expect("the term ends");
    assert!(stop.is_cancelled());
}
