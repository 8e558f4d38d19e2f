//! Elections between replicas with a fake API server that stores the Lease and the name of the leader, in virtual time.

use std::sync::{Arc, Mutex};

use axum::http::{Method, Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::*;

/// Fake API server with one Lease and one GpuControllerLeader.
#[derive(Clone, Default)]
struct Server(Arc<Mutex<Stored>>);

#[derive(Default)]
struct Stored {
    lease: Option<Value>,
    leader: Option<Value>,
    /// Whether the custom resource definition is missing.
    lacks_leader: bool,
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
                let (code, response) = server.serve(request).await;
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

    async fn serve(&self, request: Request<Body>) -> (u16, Value) {
        let method = request.method().clone();
        let is_lease = request.uri().path().contains("/leases");
        let body = request.into_body().collect().await.unwrap().to_bytes();
        self.respond(&method, is_lease, serde_json::from_slice(&body).ok())
    }

    fn respond(&self, method: &Method, is_lease: bool, body: Option<Value>) -> (u16, Value) {
        let mut stored = self.0.lock().unwrap();
        let failure = |code: u16, reason: &str| {
            let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                "message": reason, "reason": reason, "code": code});
            (code, status)
        };
        let current = if is_lease {
            stored.lease.clone()
        } else if stored.lacks_leader {
            return failure(404, "NotFound");
        } else {
            stored.leader.clone()
        };
        match (method, body, current) {
            (&Method::GET, _, Some(object)) => (200, object),
            (&Method::GET, _, None) => failure(404, "NotFound"),
            (&Method::POST, Some(_), Some(_)) => failure(409, "AlreadyExists"),
            (&Method::POST, Some(object), None) => (201, stored.write(is_lease, object)),
            (&Method::PUT, Some(object), Some(current)) => {
                if object["metadata"]["resourceVersion"] == current["metadata"]["resourceVersion"] {
                    (200, stored.write(is_lease, object))
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

    /// Returns whom the admission policy takes for the leader.
    fn named(&self) -> Option<String> {
        let stored = self.0.lock().unwrap();
        let leader = stored.leader.as_ref()?;
        Some(leader["spec"]["holder"].as_str().unwrap().to_owned())
    }

    fn transitions(&self) -> u64 {
        let stored = self.0.lock().unwrap();
        let lease = stored.lease.as_ref().expect("the lease exists");
        lease["spec"]["leaseTransitions"].as_u64().unwrap()
    }
}

impl Stored {
    fn write_lease(&mut self, lease: Value) {
        self.write(true, lease);
    }

    fn write(&mut self, is_lease: bool, mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        if is_lease {
            self.writes += 1;
            self.lease = Some(object.clone());
        } else {
            self.leader = Some(object.clone());
        }
        object
    }
}

struct Replica {
    election: LeaseElection,
    terms: watch::Receiver<Option<Arc<Term>>>,
}

/// Clock of tokio's virtual time.
fn virtual_clock() -> Clock {
    let start = Instant::now();
    Clock::new(move || start.elapsed())
}

impl Replica {
    fn start(server: &Server, name: &str) -> Self {
        let clock = virtual_clock();
        let health = Arc::new(Health::new(clock.clone()));
        let election =
            LeaseElection::start(server.client(name), "drava-system", name, clock, health);
        let terms = election.terms();
        Self { election, terms }
    }

    /// Waits for the next term.
    async fn leading(&mut self) {
        let is_valid = |term: &Option<Arc<Term>>| term.as_ref().is_some_and(|term| term.is_valid());
        self.terms.wait_for(is_valid).await.unwrap();
    }

    /// Waits for the end of the term.
    async fn not_leading(&self) {
        let term = self.terms.borrow().clone().unwrap();
        term.ended().await;
    }

    fn leads(&self) -> bool {
        let term = self.terms.borrow();
        term.as_ref().is_some_and(|term| term.is_valid())
    }
}

#[tokio::test(start_paused = true)]
async fn elects_one_that_keeps_renewing() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.leading().await;
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
    first.leading().await;
    let mut second = Replica::start(&server, "second");
    tokio::time::sleep(LEASE_DURATION).await;

    server.block(Some("first"));
    let since = Instant::now();
    first.not_leading().await;
    let stopped = since.elapsed();
    assert!(stopped <= VALIDITY, "leads for {stopped:?} without renewal");
    assert!(!second.leads());
    second.leading().await;
    let started = since.elapsed();
    assert!(
        started >= stopped + WRITE_TIMEOUT,
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
    server.block(Some("second"));
    first.leading().await;
}

#[tokio::test(start_paused = true)]
async fn leads_again_after_each_outage() {
    let server = Server::default();
    let mut replica = Replica::start(&server, "first");
    for _ in 0..3 {
        replica.leading().await;
        server.block(Some("first"));
        tokio::time::sleep(2 * LEASE_DURATION).await;
        assert!(!replica.leads());
        server.block(None);
    }
    replica.leading().await;
}

#[tokio::test(start_paused = true)]
async fn ignores_wall_clock_of_other_holder() {
    let server = Server::default();
    for renewed in ["1970-01-01T00:00:00.000000Z", "2199-01-01T00:00:00.000000Z"] {
        server.0.lock().unwrap().write_lease(json!({
            "metadata": {"name": LEASE_NAME},
            "spec": {"holderIdentity": "another", "renewTime": renewed},
        }));
        let mut replica = Replica::start(&server, "first");
        let since = Instant::now();
        replica.leading().await;
        assert!(since.elapsed() > LEASE_DURATION, "{:?}", since.elapsed());
        assert!(since.elapsed() <= LEASE_DURATION + 2 * RETRY_PERIOD);
    }
}

#[tokio::test(start_paused = true)]
async fn waits_after_another_holders_lease_is_deleted() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.leading().await;
    let mut second = Replica::start(&server, "second");
    tokio::time::sleep(LEASE_DURATION).await;
    server.block(Some("first"));
    server.0.lock().unwrap().lease = None;
    second.leading().await;
    assert!(!first.leads());
}

#[tokio::test(start_paused = true)]
async fn hands_over_on_shutdown() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.leading().await;
    let mut second = Replica::start(&server, "second");
    tokio::time::sleep(RETRY_PERIOD).await;
    let since = Instant::now();
    first.election.release().await;
    assert_eq!(server.holder(), "");
    second.leading().await;
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
    first.leading().await;
    {
        let mut stored = server.0.lock().unwrap();
        let mut lease = stored.lease.clone().unwrap();
        lease["spec"]["holderIdentity"] = json!("another");
        stored.write_lease(lease);
    }
    let since = Instant::now();
    first.not_leading().await;
    assert!(since.elapsed() <= 2 * RETRY_PERIOD, "{:?}", since.elapsed());
}

#[tokio::test(start_paused = true)]
async fn starts_term_after_naming_leader() {
    let server = Server::default();
    let mut first = Replica::start(&server, "first");
    first.leading().await;
    assert_eq!(server.named().as_deref(), Some("first"));
    let mut second = Replica::start(&server, "second");
    first.election.release().await;
    second.leading().await;
    assert_eq!(server.named().as_deref(), Some("second"));
}

#[tokio::test(start_paused = true)]
async fn leads_without_custom_resource_definition() {
    let server = Server::default();
    server.0.lock().unwrap().lacks_leader = true;
    let mut replica = Replica::start(&server, "first");
    replica.leading().await;
    assert_eq!(server.named(), None);
}

#[tokio::test(start_paused = true)]
async fn names_no_leader_after_end_of_term() {
    let server = Server::default();
    let leaders = Api::all(server.client("first"));
    let clock = virtual_clock();
    let term = Term::new(clock, Duration::from_secs(10));
    assert_eq!(
        leader::name(&leaders, "first", &term).await.unwrap(),
        Named::Yes
    );
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(
        leader::name(&leaders, "late", &term).await.unwrap(),
        Named::TermEnded
    );
    assert_eq!(server.named().as_deref(), Some("first"));
}

mod faults;
