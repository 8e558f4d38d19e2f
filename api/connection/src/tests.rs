//! Watches and requests over connections that stop to deliver without being closed.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use drava_api::listed::Listed;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, WatchEvent, WatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use kube::{Api, Resource};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch::{Receiver, Sender, channel};

use super::*;

/// Limits of the clients of the tests.
const SHORT: Limits = Limits {
    connect: PATIENCE,
    answer: Duration::from_millis(300),
    silence: Duration::from_millis(300),
    idle: Duration::from_millis(100),
    watch_seconds: 25,
};
/// Time in which a test must end; shorter than the limits of a watch alone.
const PATIENCE: Duration = Duration::from_secs(10);

/// An API server with nodes.
#[derive(Clone)]
struct Nodes {
    names: Arc<Mutex<Vec<String>>>,
    changed: Sender<()>,
}

impl Nodes {
    async fn start() -> (Self, SocketAddr) {
        let nodes = Self {
            names: Arc::default(),
            changed: channel(()).0,
        };
        let router = Router::new()
            .route("/api/v1/nodes", get(serve))
            .with_state(nodes.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, router).into_future());
        (nodes, address)
    }

    fn add(&self, name: &str) {
        self.names.lock().unwrap().push(name.to_owned());
        self.changed.send_replace(());
    }

    /// Returns the nodes after the first `known` ones; the version of a node is its number.
    fn after(&self, known: usize) -> Vec<Value> {
        let names = self.names.lock().unwrap();
        let node = |(index, name): (usize, &String)| json!({"metadata": {"name": name, "resourceVersion": (index + 1).to_string()}});
        names.iter().enumerate().skip(known).map(node).collect()
    }
}

async fn serve(State(nodes): State<Nodes>, RawQuery(query): RawQuery) -> Response {
    let query = query.unwrap_or_default();
    if !query.contains("watch=true") {
        let items = nodes.after(0);
        let version = items.len().to_string();
        let list = json!({"metadata": {"resourceVersion": version}, "items": items});
        return list.to_string().into_response();
    }
    let version = query
        .split('&')
        .find_map(|part| part.strip_prefix("resourceVersion="));
    let known = version.and_then(|version| version.parse().ok());
    let changes = nodes.changed.subscribe();
    let events = futures::stream::unfold(
        (nodes, known.unwrap_or(0), changes),
        |(nodes, known, mut changes)| async move {
            loop {
                changes.borrow_and_update();
                let new = nodes.after(known);
                if !new.is_empty() {
                    // The API server writes the type first.
                    let lines: String = new
                        .iter()
                        .map(|node| format!("{{\"type\":\"ADDED\",\"object\":{node}}}\n"))
                        .collect();
                    let chunk = Ok::<_, Infallible>(Bytes::from(lines));
                    return Some((chunk, (nodes, known + new.len(), changes)));
                }
                changes.changed().await.ok()?;
            }
        },
    );
    Body::from_stream(events).into_response()
}

/// A proxy that forgets established connections: they stay open and deliver nothing.
struct Proxy {
    address: SocketAddr,
    /// Number of connections that are forgotten.
    forgotten: Sender<u32>,
    accepted: Receiver<u32>,
}

impl Proxy {
    async fn start(target: SocketAddr, forgotten: u32) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (forgotten, is_forgotten) = channel(forgotten);
        let (sender, accepted) = channel(0);
        tokio::spawn(async move {
            for number in 1_u32.. {
                let (mut client, _) = listener.accept().await.unwrap();
                sender.send_replace(number);
                let mut forgotten = is_forgotten.clone();
                tokio::spawn(async move {
                    let mut server = TcpStream::connect(target).await.unwrap();
                    let is_forgotten = async {
                        let _ = forgotten.wait_for(|first| number <= *first).await.map(drop);
                    };
                    tokio::select! {
                        biased;
                        () = is_forgotten => std::future::pending().await,
                        _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                    }
                });
            }
        });
        Self {
            address,
            forgotten,
            accepted,
        }
    }

    /// Forgets all connections of this moment.
    fn forget(&self) {
        let accepted = *self.accepted.borrow();
        self.forgotten.send_replace(accepted);
    }

    fn client(&self, limits: &Limits) -> Client {
        let url = format!("http://{}", self.address).parse().unwrap();
        client(Config::new(url), limits).unwrap()
    }
}

#[tokio::test]
async fn watch_goes_on_after_silent_loss_of_connections() {
    let (nodes, address) = Nodes::start().await;
    nodes.add("a");
    let proxy = Proxy::start(address, 0).await;
    let api = Api::<Listed<Node>>::all(proxy.client(&SHORT));
    let mut events = watcher(api, SHORT.watch()).default_backoff().boxed();
    let mut next = async || loop {
        let event = tokio::time::timeout(PATIENCE, events.next()).await;
        let event = event.expect("progress of the watch").unwrap();
        if let Ok(Event::InitApply(node) | Event::Apply(node)) = event {
            return node.meta().name.clone().unwrap();
        }
    };
    assert_eq!(next().await, "a");
    nodes.add("b");
    assert_eq!(next().await, "b", "over the watch");
    proxy.forget();
    nodes.add("c");
    assert_eq!(next().await, "c");
}

#[tokio::test]
async fn first_lost_request_costs_no_second_one() {
    let (_, address) = Nodes::start().await;
    let proxy = Proxy::start(address, 0).await;
    // The time-out of the request below is shorter than both.
    let limits = Limits {
        answer: PATIENCE,
        silence: PATIENCE,
        ..SHORT
    };
    let api = Api::<Node>::all(proxy.client(&limits));
    let params = ListParams::default();
    let parallel = (0..8).map(|_| api.list(&params));
    futures::future::try_join_all(parallel).await.unwrap();
    assert!(*proxy.accepted.borrow() > 2, "a pool of connections");
    proxy.forget();
    let list = async || tokio::time::timeout(PATIENCE / 4, api.list(&params)).await;
    assert!(list().await.is_err(), "on a dead connection");
    assert!(
        list().await.is_ok_and(|answer| answer.is_ok()),
        "another request had a dead connection"
    );
}

/// Limits of short requests beside long watches.
const LONG: Limits = Limits {
    silence: Duration::from_secs(3600),
    ..SHORT
};

#[tokio::test]
async fn request_without_answer_fails() {
    for limits in [SHORT, LONG] {
        let (_, address) = Nodes::start().await;
        let proxy = Proxy::start(address, 1).await;
        let api = Api::<Node>::all(proxy.client(&limits));
        let list = async || {
            let params = ListParams::default();
            let answer = tokio::time::timeout(PATIENCE, api.list(&params)).await;
            answer.expect("an answer or a failure")
        };
        assert!(list().await.is_err());
        assert!(
            list().await.unwrap().items.is_empty(),
            "on a new connection"
        );
    }
}

#[tokio::test]
async fn quiet_watch_outlives_the_limit_of_answers() {
    let (nodes, address) = Nodes::start().await;
    let proxy = Proxy::start(address, 0).await;
    let api = Api::<Node>::all(proxy.client(&LONG));
    let params = WatchParams::default().timeout(290);
    let mut events = api.watch(&params, "0").await.unwrap().boxed();
    let quiet = tokio::time::timeout(2 * LONG.answer, events.next()).await;
    assert!(quiet.is_err(), "the watch has ended: {quiet:?}");
    nodes.add("a");
    let event = tokio::time::timeout(PATIENCE, events.next()).await.unwrap();
    assert!(matches!(event, Some(Ok(WatchEvent::Added(_)))), "{event:?}");
}

#[test]
fn watches_end_before_the_limit_of_silence() {
    for limits in [Limits::SHORT_WATCHES, Limits::LONG_WATCHES] {
        let watch = limits.watch().timeout.unwrap();
        assert!(Duration::from_secs(u64::from(watch)) < limits.silence);
        // kube refuses longer ones.
        assert!(watch < 295, "{watch}");
    }
}

/// One client reads different servers, and a server that does not answer holds it up for a limited time.
#[tokio::test]
async fn reads_servers_without_credentials() {
    let answer = |name: &'static str| {
        let reply = move |headers: axum::http::HeaderMap| async move {
            assert!(!headers.contains_key("authorization"), "{headers:?}");
            name
        };
        Router::new().route("/metrics", get(reply))
    };
    let client = without_credentials(&SHORT);
    let read = async |address: SocketAddr| {
        let uri = format!("http://{address}/metrics");
        let request = axum::http::Request::get(uri).body(Vec::new()).unwrap();
        client.request_text(request).await
    };
    for name in ["one", "other"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(axum::serve(listener, answer(name)).into_future());
        assert_eq!(read(address).await.unwrap(), name);
    }
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = silent.local_addr().unwrap();
    let reading = tokio::time::timeout(PATIENCE, read(address)).await;
    assert!(reading.expect("an end").is_err());
}
