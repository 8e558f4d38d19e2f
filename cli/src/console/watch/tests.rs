//! Watches against a server that answers by path.

use std::convert::Infallible;
use std::sync::Mutex;

use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};

use super::*;
use crate::decision::DecisionOptions;

/// Permissions of a user, and what the server has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum User {
    Administrator,
    /// Reads namespace team-a only.
    Tenant,
}

fn answer(user: User, path: &str) -> (StatusCode, Value) {
    let list = |items: Value| {
        let items = json!({"metadata": {"resourceVersion": "1"}, "items": items});
        (StatusCode::OK, items)
    };
    let status = |code: StatusCode| {
        let text = json!({"kind": "Status", "status": "Failure", "code": code.as_u16(), "message": "", "reason": ""});
        (code, text)
    };
    let pods = json!([{"metadata": {"name": "p", "namespace": "team-a", "uid": "u"}, "spec": {"containers": []}}]);
    if path.contains("gpuquotas") || path.contains("v1beta2") {
        return status(StatusCode::NOT_FOUND);
    }
    match (user, path) {
        (_, "/api/v1/namespaces/team-a/pods") => list(pods),
        (User::Administrator, "/api/v1/pods") => list(pods),
        (_, path) if path.contains("/namespaces/team-a/") => list(json!([])),
        (User::Administrator, _) => list(json!([])),
        (User::Tenant, _) => status(StatusCode::FORBIDDEN),
    }
}

/// Returns the state after the first lists of all kinds.
async fn follow(user: User) -> Arc<Live> {
    let live = Arc::new(Live::new("test".to_owned(), DecisionOptions::default()));
    let service = tower::service_fn(move |request: Request<Body>| async move {
        if request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch="))
        {
            return std::future::pending().await;
        }
        let (status, body) = answer(user, request.uri().path());
        let response = Response::builder().status(status);
        let response = response.body(Body::from(body.to_string().into_bytes()));
        Ok::<_, Infallible>(response.expect("a response"))
    });
    let mut changes = live.changes();
    start(&Client::new(service, "default"), "team-a", &live);
    while document(&live)["isComplete"] != true {
        changes.changed().await.expect("the state changes");
    }
    live
}

fn document(live: &Live) -> Value {
    serde_json::from_slice(&live.document()).expect("JSON")
}

#[tokio::test]
async fn reads_all_kinds() {
    let live = follow(User::Administrator).await;
    assert_eq!(document(&live)["notices"], json!([]));
    assert_eq!(
        document(&live)["limits"],
        json!({"hidden": [], "details": []})
    );
    let pods = Mutex::new(0);
    live.change(|snapshot| *pods.lock().unwrap() = snapshot.pods.len());
    assert_eq!(pods.into_inner().unwrap(), 1);
}

#[tokio::test]
async fn falls_back_to_namespace_of_tenant() {
    let live = follow(User::Tenant).await;
    let limits = &document(&live)["limits"];
    assert_eq!(limits["namespace"], "team-a");
    let details = limits["details"].to_string();
    for text in [
        "only pods of namespace team-a are shown",
        "only resourceclaims of namespace team-a are shown",
        "you may not list resourceslices: no GPU can be shown",
        "you may not list nodes",
        "reasons of pending pods are those that the controller wrote last",
    ] {
        assert!(details.contains(text), "{text}: {details}");
    }
    // Not served, so nothing is hidden.
    assert!(!details.contains("gpuquotas"), "{details}");
    assert_eq!(details.matches("devicetaintrules:").count(), 1, "{details}");
    let mut pods = 0;
    live.change(|snapshot| pods = snapshot.pods.len());
    assert_eq!(pods, 1);
}

#[test]
fn removes_objects_deleted_while_disconnected() {
    let live = Arc::new(Live::new("test".to_owned(), DecisionOptions::default()));
    let mut follower = Follower::<Pod>::new(&live);
    let pod = |name: &str, uid: &str| -> Listed<Pod> {
        let pod = json!({"metadata": {"name": name, "namespace": "n", "uid": uid}, "spec": {"containers": []}});
        serde_json::from_value(pod).expect("a pod")
    };
    let names = |live: &Live| {
        let mut names = Vec::new();
        live.change(|snapshot| {
            let pods = snapshot.pods.iter();
            names = pods.filter_map(|pod| pod.metadata.name.clone()).collect();
        });
        names
    };
    assert!(!follower.apply(watcher::Event::Init));
    for name in ["c", "a", "b"] {
        follower.apply(watcher::Event::InitApply(pod(name, name)));
    }
    assert!(follower.apply(watcher::Event::InitDone));
    assert_eq!(names(&live), ["a", "b", "c"]);
    follower.apply(watcher::Event::Delete(pod("b", "b")));
    follower.apply(watcher::Event::Apply(pod("d", "d")));
    assert_eq!(names(&live), ["a", "c", "d"]);
    follower.apply(watcher::Event::Init);
    follower.apply(watcher::Event::InitApply(pod("d", "new")));
    assert_eq!(
        names(&live),
        ["a", "c", "d"],
        "shown until the list is complete"
    );
    follower.apply(watcher::Event::InitDone);
    assert_eq!(names(&live), ["d"]);
}

#[test]
fn ends_watch_without_permission() {
    let api = |code: u16| {
        let status = json!({"kind": "Status", "status": "Failure", "code": code, "message": "", "reason": ""});
        kube::Error::Api(serde_json::from_value(status).expect("a status"))
    };
    let listing = |code| end_of(&watcher::Error::InitialListFailed(api(code)));
    assert_eq!(listing(403), Some(End::ListDenied));
    assert_eq!(listing(404), Some(End::NotServed));
    assert_eq!(listing(500), None);
    let watching = |code| end_of(&watcher::Error::WatchStartFailed(api(code)));
    assert_eq!(watching(403), Some(End::WatchDenied));
    assert_eq!(watching(410), None);
}

#[test]
fn follows_reservations_of_leader() {
    let live = Arc::new(Live::new("test".to_owned(), DecisionOptions::default()));
    let mut follower = Follower::<GpuControllerLeader>::new(&live);
    let leader = json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuControllerLeader",
        "metadata": {"name": "drava-controller", "uid": "u"}, "spec": {"holder": "p"},
        "status": {"settings": {"nodePolicy": "spread", "gpuPolicy": "binpack", "schedulerNames": ["volcano"]},
            "omittedReservations": 2, "reservations": [{
            "namespace": "x", "pod": "head", "claim": "head", "purpose": "HeadOfQueue",
            "devices": [{"request": "gpu", "pool": "n1/gpus", "device": "gpu-1"}],
        }]},
    });
    let leader: Listed<GpuControllerLeader> = serde_json::from_value(leader).expect("a leader");
    let reservations = |live: &Live| {
        let mut counts = (0, 0, 0);
        live.change(|snapshot| {
            let schedulers = snapshot.settings.as_ref();
            let schedulers = schedulers.map_or(0, |settings| settings.scheduler_names.len());
            counts = (
                snapshot.reservations.len(),
                snapshot.omitted_reservations,
                schedulers,
            );
        });
        counts
    };
    follower.apply(watcher::Event::Apply(leader.clone()));
    assert_eq!(reservations(&live), (1, 2, 1));
    follower.apply(watcher::Event::Delete(leader));
    assert_eq!(reservations(&live), (0, 0, 0));
}
