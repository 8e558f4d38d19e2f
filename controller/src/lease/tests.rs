//! Elections between replicas with a fake API server that stores one Lease, in virtual time.

use std::sync::{Arc, Mutex};

use axum::http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};

use super::*;

/// Fake API server with one Lease.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Stored>>);

#[derive(Default)]
struct Stored {
    lease: Option<Value>,
    version: u64,
    writes: usize,
    /// Client whose requests get no response.
    blocked_client: Option<String>,
}

impl Server {
    /// Creates a client that the server can block by name.
    fn client(&self, name: &str) -> Client {
        let server = self.clone();
        let name = name.to_owned();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            let name = name.clone();
            async move {
                if server.0.lock().unwrap().blocked_client.as_ref() == Some(&name) {
                    std::future::pending::<()>().await;
                }
                let method = request.method().clone();
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let (code, response) = server.respond(&method, serde_json::from_slice(&body).ok());
                Ok::<_, tower::BoxError>(
                    Response::builder()
                        .status(code)
                        .body(Body::from(serde_json::to_vec(&response).unwrap()))
                        .unwrap(),
                )
            }
        });
        Client::new(service, "drava-system")
    }

    fn respond(&self, method: &Method, body: Option<Value>) -> (u16, Value) {
        let mut stored = self.0.lock().unwrap();
        let failure = |code: u16, reason: &str| {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": reason, "reason": reason, "code": code});
            (code, status)
        };
        match (method, body, stored.lease.clone()) {
            (&Method::GET, _, Some(lease)) => (200, lease),
            (&Method::GET, _, None) => failure(404, "NotFound"),
            (&Method::POST, Some(_), Some(_)) => failure(409, "AlreadyExists"),
            (&Method::POST, Some(lease), None) => (201, stored.write(lease)),
            (&Method::PUT, Some(lease), Some(current)) => {
                if lease["metadata"]["resourceVersion"] == current["metadata"]["resourceVersion"] {
                    (200, stored.write(lease))
                } else {
                    failure(409, "Conflict")
                }
            }
            _ => failure(405, "MethodNotAllowed"),
        }
    }

    fn block(&self, name: Option<&str>) {
        self.0.lock().unwrap().blocked_client = name.map(str::to_owned);
    }

    fn holder(&self) -> String {
        let stored = self.0.lock().unwrap();
        let lease = stored.lease.as_ref().expect("the lease exists");
        lease["spec"]["holderIdentity"].as_str().unwrap().to_owned()
    }

    fn transitions(&self) -> u64 {
        let stored = self.0.lock().unwrap();
        let lease = stored.lease.as_ref().expect("the lease exists");
        lease["spec"]["leaseTransitions"].as_u64().unwrap()
    }
}

impl Stored {
    fn write(&mut self, mut lease: Value) -> Value {
        self.version += 1;
        self.writes += 1;
        lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.lease = Some(lease.clone());
        lease
    }
}

struct Replica {
    election: LeaseElection,
    leading: watch::Receiver<bool>,
    stop: CancellationToken,
}

impl Replica {
    fn start(server: &Server, name: &str) -> Self {
        let stop = CancellationToken::new();
        let election =
            LeaseElection::start(server.client(name), "drava-system", name, stop.clone());
        let leading = election.leading();
        Self {
            election,
            leading,
            stop,
        }
    }

    async fn wait_until_leading(&mut self, leading: bool) {
        self.leading.wait_for(|now| *now == leading).await.unwrap();
    }

    fn leads(&self) -> bool {
        *self.leading.borrow()
    }
}

#[tokio::test(start_paused = true)]
async fn elects_one_that_keeps_renewing() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.wait_until_leading(true).await;
    let second = Replica::start(&server, "second");
    tokio::time::sleep(10 * LEASE_DURATION).await;
    assert!(first.leads() && !second.leads());
    assert_eq!(
        (server.holder(), server.transitions()),
        ("first".to_owned(), 0)
    );
    let renewals = server.0.lock().unwrap().writes;
    assert!(renewals > 70, "{renewals} renewals in 150 s");
}

#[tokio::test(start_paused = true)]
async fn stops_leading_before_successor_starts() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.wait_until_leading(true).await;
    let mut second = Replica::start(&server, "second");
    tokio::time::sleep(LEASE_DURATION).await;

    server.block(Some("first"));
    let since = Instant::now();
    first.wait_until_leading(false).await;
    let stopped = since.elapsed();
    assert!(
        stopped <= RENEW_DEADLINE,
        "leads for {stopped:?} without renewal"
    );
    assert!(!second.leads());
    second.wait_until_leading(true).await;
    let started = since.elapsed();
    assert!(
        started >= stopped + Duration::from_secs(2),
        "{stopped:?}, then {started:?}"
    );
    assert!(started <= LEASE_DURATION + 2 * RETRY_PERIOD, "{started:?}");
    assert_eq!(
        (server.holder(), server.transitions()),
        ("second".to_owned(), 1)
    );

    // The first replica is a candidate again.
    server.block(None);
    tokio::time::sleep(4 * LEASE_DURATION).await;
    assert!(second.leads() && !first.leads());
}

#[tokio::test(start_paused = true)]
async fn hands_over_on_shutdown() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.wait_until_leading(true).await;
    let mut second = Replica::start(&server, "second");
    tokio::time::sleep(RETRY_PERIOD).await;
    let since = Instant::now();
    first.stop.cancel();
    first.election.finished().await;
    assert_eq!(server.holder(), "");
    second.wait_until_leading(true).await;
    assert!(since.elapsed() <= RETRY_PERIOD, "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn elects_one_of_simultaneous_candidates() {
    let server = Server::default();
    let replicas: Vec<Replica> = ["a", "b", "c", "d"]
        .iter()
        .map(|name| Replica::start(&server, name))
        .collect();
    for _ in 0..100 {
        tokio::time::sleep(RETRY_PERIOD / 4).await;
        let leaders = replicas.iter().filter(|replica| replica.leads()).count();
        assert!(leaders <= 1, "{leaders} leaders");
    }
    assert_eq!(replicas.iter().filter(|replica| replica.leads()).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn stops_leading_when_lease_is_overwritten() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.wait_until_leading(true).await;
    {
        let mut stored = server.0.lock().unwrap();
        let mut lease = stored.lease.clone().unwrap();
        lease["spec"]["holderIdentity"] = json!("another");
        stored.write(lease);
    }
    let since = Instant::now();
    first.wait_until_leading(false).await;
    assert!(since.elapsed() <= 2 * RETRY_PERIOD, "{:?}", since.elapsed());
}
