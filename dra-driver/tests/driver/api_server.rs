//! An in-memory API server with the requests of the driver: claims; slices, nodes and node profiles with watches; events.
//!
//! It stores objects by path, counts resource versions, rejects stale updates, and sets the UID of new objects and the
//! time of new taints. Tests can make it drop fields (a disabled feature gate) or fail.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Method, Request, StatusCode, Uri};
use axum::response::{IntoResponse as _, Response};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::sync::broadcast;
use tokio_stream::wrappers::BroadcastStream;

use admission::admit;
use selector::{is_labelled, is_selected};

mod admission;
mod other_owners;
mod profiles;
mod selector;

/// A running server; clones share it.
#[derive(Clone)]
pub(crate) struct ApiServer {
    state: Arc<Mutex<Objects>>,
    changes: broadcast::Sender<Change>,
    address: std::net::SocketAddr,
}

/// Objects by path, such as `/apis/resource.k8s.io/v1/resourceslices/a`.
#[derive(Default)]
struct Objects {
    by_path: BTreeMap<String, Value>,
    version: u64,
    down: bool,
    dropped: Vec<&'static str>,
    /// Number of writes of a claim's status that fail.
    failing_statuses: usize,
    /// Paths of which reads are not answered.
    stalled: BTreeSet<String>,
    /// Manager whose writes fail; `None` if those of all do.
    failing_manager: Option<&'static str>,
    writes: Vec<String>,
    /// Number of reads of each object or collection, by path.
    reads: BTreeMap<String, usize>,
    /// Path and query of all lists.
    lists: Vec<(String, String)>,
    /// Paths of all watches.
    watched: Vec<String>,
    /// All changes, in order.
    changes: Vec<Change>,
    /// Whether the API server has the resource definition of node profiles.
    has_profiles: bool,
    /// What happens on the node while the API server answers the next read of an object, by path.
    on_read: BTreeMap<String, Box<dyn FnOnce() + Send>>,
}

impl Objects {
    /// Returns whether the present write of a status, by this manager, fails.
    fn fails_status(&mut self, manager: Option<&str>) -> bool {
        if self.failing_manager.is_some() && self.failing_manager != manager {
            return false;
        }
        let left = self.failing_statuses.checked_sub(1);
        self.failing_statuses = left.unwrap_or_default();
        left.is_some()
    }
}

#[derive(Clone)]
struct Change {
    version: u64,
    collection: String,
    event: Value,
}

pub(crate) const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";
pub(crate) const CLAIMS: &str = "/apis/resource.k8s.io/v1/resourceclaims";
pub(crate) const PROFILES: &str = "/apis/gpu.drava.dev/v1alpha1/gpunodeprofiles";
const NODES: &str = "/api/v1/nodes";
const CLAIMS_OF_DEFAULT: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";

impl ApiServer {
    /// Starts on a free port, with a Node object.
    pub(crate) async fn start(node: &str) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Self {
            state: Arc::default(),
            changes: broadcast::channel(1024).0,
            address,
        };
        server.objects().by_path.insert(
            format!("/api/v1/nodes/{node}"),
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node, "uid": "node-uid"}}),
        );
        let router = Router::new().fallback(handle).with_state(server.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        server
    }

    pub(crate) fn client(&self) -> kube::Client {
        let config = kube::Config::new(format!("http://{}", self.address).parse().unwrap());
        kube::Client::try_from(config).unwrap()
    }

    /// Returns the configuration of a client in another process.
    pub(crate) fn kubeconfig(&self) -> String {
        let cluster =
            json!({"name": "test", "cluster": {"server": format!("http://{}", self.address)}});
        let context = json!({"name": "test", "context": {"cluster": "test", "user": "test"}});
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [cluster], "contexts": [context], "users": [{"name": "test", "user": {}}],
        })
        .to_string()
    }

    fn objects(&self) -> MutexGuard<'_, Objects> {
        self.state.lock().unwrap()
    }

    /// Answers all requests with 503 while `down`.
    pub(crate) fn set_down(&self, down: bool) {
        self.objects().down = down;
    }

    /// Never answers reads of these claims.
    pub(crate) fn stall_reads(&self, claims: impl IntoIterator<Item = String>) {
        let paths = claims.into_iter();
        let paths = paths.map(|claim| format!("{CLAIMS_OF_DEFAULT}/{claim}"));
        self.objects().stalled = paths.collect();
    }

    fn is_stalled(&self, path: &str) -> bool {
        self.objects().stalled.contains(path)
    }

    /// Answers the next `count` writes of a claim's status with 500.
    pub(crate) fn fail_statuses(&self, count: usize) {
        self.objects().failing_statuses = count;
    }

    /// As [`Self::fail_statuses`], for the writes of one manager.
    pub(crate) fn fail_statuses_of(&self, manager: &'static str, count: usize) {
        let mut objects = self.objects();
        (objects.failing_manager, objects.failing_statuses) = (Some(manager), count);
    }

    /// Drops these fields from all objects written from now on.
    pub(crate) fn drop_fields(&self, fields: &[&'static str]) {
        self.objects().dropped = fields.to_vec();
    }

    /// Stores a claim.
    pub(crate) fn put_claim(&self, claim: &k8s_openapi::api::resource::v1::ResourceClaim) {
        self.put_claim_json(&serde_json::to_value(claim).unwrap());
    }

    /// Stores a claim that the types may refuse.
    pub(crate) fn put_claim_json(&self, claim: &Value) {
        self.store(&claim_path(claim), claim.clone());
    }

    /// Calls `change` before the next read of this pod is answered, as a change of the node during a slow answer.
    pub(crate) fn on_read_of_pod(&self, name: &str, change: impl FnOnce() + Send + 'static) {
        let path = format!("/api/v1/namespaces/default/pods/{name}");
        self.objects().on_read.insert(path, Box::new(change));
    }

    /// Stores a pod.
    pub(crate) fn put_pod(&self, pod: &Value) {
        let name = pod["metadata"]["name"].as_str().unwrap();
        self.store(
            &format!("/api/v1/namespaces/default/pods/{name}"),
            pod.clone(),
        );
    }

    /// Stores a RuntimeClass.
    pub(crate) fn put_runtime_class(&self, name: &str, handler: &str) {
        let class = json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": handler,
        });
        self.store(
            &format!("/apis/node.k8s.io/v1/runtimeclasses/{name}"),
            class,
        );
    }

    /// Deletes a claim.
    pub(crate) fn delete_claim(&self, claim: &k8s_openapi::api::resource::v1::ResourceClaim) {
        let path = claim_path(&serde_json::to_value(claim).unwrap());
        self.objects().by_path.remove(&path);
    }

    /// Deletes a claim, as the last finalizer does: watches see it.
    pub(crate) fn remove_claim(&self, name: &str) {
        self.remove(&format!("{CLAIMS_OF_DEFAULT}/{name}"));
    }

    /// Changes a claim, as another client would.
    pub(crate) fn edit_claim(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let path = format!("{CLAIMS_OF_DEFAULT}/{name}");
        let mut objects = self.objects();
        let mut claim = objects.by_path[&path].clone();
        edit(&mut claim);
        self.store_in(&mut objects, &path, claim);
    }

    /// Returns all claims.
    pub(crate) fn claims(&self) -> Vec<Value> {
        let objects = self.objects();
        let claims = objects.by_path.range(CLAIMS_OF_DEFAULT.to_owned()..);
        let claims = claims.take_while(|(path, _)| path.starts_with(CLAIMS_OF_DEFAULT));
        claims.map(|(_, claim)| claim.clone()).collect()
    }

    /// Returns the stored claim.
    pub(crate) fn claim(&self, name: &str) -> Value {
        self.objects().by_path[&format!("{CLAIMS_OF_DEFAULT}/{name}")].clone()
    }

    /// Returns whether a claim is stored.
    pub(crate) fn has_claim(&self, name: &str) -> bool {
        let path = format!("{CLAIMS_OF_DEFAULT}/{name}");
        self.objects().by_path.contains_key(&path)
    }

    /// Returns the slices by name.
    pub(crate) fn slices(&self) -> BTreeMap<String, Value> {
        let objects = self.objects();
        let slices = objects.by_path.iter().filter_map(|(path, slice)| {
            Some((
                path.strip_prefix(SLICES)?.strip_prefix('/')?.to_owned(),
                slice.clone(),
            ))
        });
        slices.collect()
    }

    /// Returns a condition of the first device in a claim's status.
    pub(crate) fn condition(&self, claim: &str, kind: &str) -> Option<Value> {
        let claim = self.claim(claim);
        let conditions = claim["status"]["devices"][0]["conditions"].as_array()?;
        let mut conditions = conditions.iter();
        conditions
            .find(|condition| condition["type"] == kind)
            .cloned()
    }

    /// Returns the devices of all slices, in the order of the slices.
    pub(crate) fn devices(&self) -> Vec<Value> {
        let slices = self.slices();
        let devices = slices
            .values()
            .filter_map(|slice| slice["spec"]["devices"].as_array());
        devices.flatten().cloned().collect()
    }

    /// Deletes all slices, as kubelet does when it restarts.
    pub(crate) fn wipe_slices(&self) {
        for name in self.slices().into_keys() {
            self.remove(&format!("{SLICES}/{name}"));
        }
    }

    /// Stores a slice, as an earlier version of the driver would.
    pub(crate) fn put_slice(&self, name: &str, mut slice: Value) {
        slice["metadata"] = json!({"name": name});
        self.store(&format!("{SLICES}/{name}"), slice);
    }

    /// Changes a slice, as another client would.
    pub(crate) fn edit_slice(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        let mut slice = self.slices().remove(name).unwrap();
        edit(&mut slice);
        self.store(&format!("{SLICES}/{name}"), slice);
    }

    /// Returns reason, note and object kind of all events.
    pub(crate) fn events_with_kind(&self) -> Vec<(String, String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let objects = self.objects();
        let events = objects
            .by_path
            .iter()
            .filter(|(path, _)| path.contains("/events/"));
        let fields = |event: &Value| {
            (
                text(&event["reason"]),
                text(&event["note"]),
                text(&event["regarding"]["kind"]),
            )
        };
        events.map(|(_, event)| fields(event)).collect()
    }

    /// Returns reason and note of all events.
    pub(crate) fn events(&self) -> Vec<(String, String)> {
        let events = self.events_with_kind().into_iter();
        events.map(|(reason, note, _)| (reason, note)).collect()
    }

    /// Returns all writes as `METHOD path`.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.objects().writes.clone()
    }

    /// Returns how often a claim was read.
    pub(crate) fn reads(&self, claim: &str) -> usize {
        let path = format!("{CLAIMS_OF_DEFAULT}/{claim}");
        self.objects().reads.get(&path).copied().unwrap_or(0)
    }

    /// Returns how often a collection was listed, by other lists than those of a label.
    pub(crate) fn lists(&self, collection: &str) -> usize {
        let queries = self.list_queries(collection).into_iter();
        let of_all = queries.filter(|query| !query.contains("labelSelector"));
        of_all.count()
    }

    /// Returns the paths of all watches that were started.
    pub(crate) fn watched(&self) -> Vec<String> {
        self.objects().watched.clone()
    }

    /// Returns the queries of all lists of a collection.
    pub(crate) fn list_queries(&self, collection: &str) -> Vec<String> {
        let objects = self.objects();
        let lists = objects.lists.iter().filter(|(path, _)| path == collection);
        lists.map(|(_, query)| query.clone()).collect()
    }

    fn store(&self, path: &str, object: Value) -> Value {
        self.store_in(&mut self.objects(), path, object)
    }

    fn store_in(&self, objects: &mut Objects, path: &str, mut object: Value) -> Value {
        objects.version += 1;
        let is_new = !objects.by_path.contains_key(path);
        object["metadata"]["resourceVersion"] = json!(objects.version.to_string());
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{}", objects.version));
        }
        let dropped = objects.dropped.clone();
        admit(&mut object, &dropped);
        objects.by_path.insert(path.to_owned(), object.clone());
        let kind = if is_new { "ADDED" } else { "MODIFIED" };
        self.notify_watches(objects, path, kind, &object);
        object
    }

    fn remove(&self, path: &str) -> Option<Value> {
        let mut objects = self.objects();
        let object = objects.by_path.remove(path)?;
        objects.version += 1;
        self.notify_watches(&mut objects, path, "DELETED", &object);
        Some(object)
    }

    fn notify_watches(&self, objects: &mut Objects, path: &str, kind: &str, object: &Value) {
        let (collection, _) = path.rsplit_once('/').unwrap();
        let change = Change {
            version: objects.version,
            collection: collection.to_owned(),
            event: json!({"type": kind, "object": object}),
        };
        objects.changes.push(change.clone());
        // Fails without watchers.
        let _ = self.changes.send(change);
    }

    fn answer(&self, method: &Method, uri: &Uri, body: &Value) -> Response {
        let path = uri.path();
        if self.objects().down {
            return status(StatusCode::SERVICE_UNAVAILABLE, "server is down");
        }
        if parameter(uri.query().unwrap_or_default(), "dryRun") == Some("All") {
            return self.dry_run(body);
        }
        if *method != Method::GET {
            self.objects().writes.push(format!("{method} {path}"));
        }
        match *method {
            Method::GET
                if uri
                    .query()
                    .is_some_and(|query| query.contains("watch=true")) =>
            {
                self.watch(path, uri.query().unwrap_or_default())
            }
            Method::GET => {
                let mut objects = self.objects();
                *objects.reads.entry(path.to_owned()).or_default() += 1;
                let is_collection = [SLICES, CLAIMS, NODES, PROFILES].contains(&path)
                    || path.ends_with("/resourceclaims");
                let query = uri.query().unwrap_or_default();
                if is_collection {
                    objects.lists.push((path.to_owned(), query.to_owned()));
                }
                if is_collection && (path != PROFILES || objects.has_profiles) {
                    return list(&objects, path, query);
                }
                match objects.by_path.get(path).cloned() {
                    Some(object) => {
                        if let Some(change) = objects.on_read.remove(path) {
                            change();
                        }
                        axum::Json(object).into_response()
                    }
                    None => status(StatusCode::NOT_FOUND, path),
                }
            }
            Method::POST => {
                let generated = || format!("generated-{}", self.objects().by_path.len());
                let name = body["metadata"]["name"]
                    .as_str()
                    .map_or_else(generated, str::to_owned);
                let path = format!("{path}/{name}");
                if self.objects().by_path.contains_key(&path) {
                    return status(StatusCode::CONFLICT, "already exists");
                }
                (
                    StatusCode::CREATED,
                    axum::Json(self.store(&path, body.clone())),
                )
                    .into_response()
            }
            Method::PUT => {
                let present = self.objects().by_path.get(path).cloned();
                match present {
                    Some(present)
                        if present["metadata"]["resourceVersion"]
                            == body["metadata"]["resourceVersion"] =>
                    {
                        let mut body = body.clone();
                        body["metadata"]["uid"] = present["metadata"]["uid"].clone();
                        axum::Json(self.store(path, body)).into_response()
                    }
                    Some(_) => status(StatusCode::CONFLICT, "stale resource version"),
                    None => status(StatusCode::NOT_FOUND, path),
                }
            }
            Method::PATCH
                if path.ends_with("/status")
                    && self.objects().fails_status(parameter(
                        uri.query().unwrap_or_default(),
                        "fieldManager",
                    )) =>
            {
                status(StatusCode::INTERNAL_SERVER_ERROR, path)
            }
            Method::PATCH => self.patch(path, uri.query().unwrap_or_default(), body),
            Method::DELETE => {
                // Without a UID precondition, a delete could hit another object of the same name.
                let present = self.objects().by_path.get(path).cloned();
                let has_uid =
                    |present: Value| present["metadata"]["uid"] == body["preconditions"]["uid"];
                if present.is_some_and(|present| !has_uid(present)) {
                    return status(StatusCode::CONFLICT, path);
                }
                match self.remove(path) {
                    Some(object) => axum::Json(object).into_response(),
                    None => status(StatusCode::NOT_FOUND, path),
                }
            }
            _ => status(StatusCode::METHOD_NOT_ALLOWED, path),
        }
    }

    /// Applies `status.devices` of a claim, the status of a profile, or a whole event.
    fn patch(&self, path: &str, query: &str, body: &Value) -> Response {
        let object_path = path.trim_end_matches("/status");
        // Under one lock, so that no change is lost.
        let mut objects = self.objects();
        let Some(mut present) = objects.by_path.get(object_path).cloned() else {
            return status(StatusCode::NOT_FOUND, path);
        };
        if object_path == path {
            present = body.clone();
        } else if path.starts_with(PROFILES) {
            if body["metadata"]["resourceVersion"] != present["metadata"]["resourceVersion"] {
                return status(StatusCode::CONFLICT, "stale resource version");
            }
            present["status"] = body["status"].clone();
        } else {
            if body["metadata"]["uid"] != present["metadata"]["uid"] {
                return status(StatusCode::CONFLICT, "wrong uid");
            }
            let version = &body["metadata"]["resourceVersion"];
            if !version.is_null() && *version != present["metadata"]["resourceVersion"] {
                return status(StatusCode::CONFLICT, "stale resource version");
            }
            let devices = &body["status"]["devices"];
            let manager = parameter(query, "fieldManager");
            let merged = merged(&present["status"]["devices"], devices, manager);
            present["status"]["devices"] = merged;
        }
        axum::Json(self.store_in(&mut objects, object_path, present)).into_response()
    }

    fn watch(&self, path: &str, query: &str) -> Response {
        let (of, path, selector) = (path, path.to_owned(), query.to_owned());
        let since = parameter(query, "resourceVersion").and_then(|version| version.parse().ok());
        let since: u64 = since.unwrap_or(0);
        // A collection of claims of one namespace, or of all.
        let is_in = move |collection: &str| {
            collection == path || path == CLAIMS && collection.ends_with("/resourceclaims")
        };
        // Under one lock, so that no change is between both.
        let (missed, later) = {
            let mut objects = self.objects();
            objects.watched.push(of.to_owned());
            let missed = objects
                .changes
                .iter()
                .filter(|change| change.version > since);
            let missed: Vec<_> = missed.cloned().map(Ok).collect();
            (missed, BroadcastStream::new(self.changes.subscribe()))
        };
        let events = futures::stream::iter(missed)
            .chain(later)
            .filter_map(move |change| {
                let change = change.ok().filter(|change| {
                    is_in(&change.collection) && is_selected(&change.event["object"], &selector)
                });
                // The type comes first, as from the API server.
                let line = |Change { event, .. }: Change| {
                    let object = &event["object"];
                    let kind = match is_labelled(object, &selector) {
                        true => event["type"].clone(),
                        false => json!("DELETED"),
                    };
                    Ok::<_, Infallible>(format!("{{\"type\":{kind},\"object\":{object}}}\n"))
                };
                futures::future::ready(change.map(line))
            });
        Body::from_stream(events).into_response()
    }
}

fn parameter<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    let mut parameters = query
        .split('&')
        .filter_map(|parameter| parameter.split_once('='));
    parameters
        .find(|(key, _)| *key == name)
        .map(|(_, value)| value)
}

fn list(objects: &Objects, path: &str, query: &str) -> Response {
    let resource = path.rsplit_once('/').unwrap().1;
    let group = path.trim_end_matches(resource);
    let wanted = |key: &str| {
        // Those of a namespace, or of all.
        key.starts_with(group) && key.split('/').rev().nth(1) == Some(resource)
    };
    let items: Vec<_> = objects
        .by_path
        .iter()
        .filter(|(key, _)| wanted(key))
        .map(|(_, object)| object)
        .filter(|object| is_selected(object, query) && is_labelled(object, query))
        .collect();
    axum::Json(json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "List",
        "metadata": {"resourceVersion": objects.version.to_string()}, "items": items,
    }))
    .into_response()
}

/// Returns device statuses after a manager has applied `applied`: that of the condition `Suspended`, that of the condition `Idle`, or
/// that of the rest.
fn merged(present: &Value, applied: &Value, manager: Option<&str>) -> Value {
    let own = match manager {
        Some("drava-suspend") => Some("Suspended"),
        Some("drava-idle") => Some("Idle"),
        _ => None,
    };
    let conditions = |entry: &Value| entry["conditions"].as_array().cloned().unwrap_or_default();
    let is_owned = |condition: &Value| match own {
        Some(own) => condition["type"] == own,
        None => condition["type"] != "Suspended" && condition["type"] != "Idle",
    };
    let merge = |entry: &Value| {
        let mut entries = present.as_array().into_iter().flatten();
        let before = entries.find(|before| {
            let mut fields = ["driver", "pool", "device", "shareID"].iter();
            fields.all(|field| before[field] == entry[field])
        });
        let kept = before.map(conditions).unwrap_or_default().into_iter();
        let kept = kept.filter(|condition| !is_owned(condition));
        let all = kept.chain(conditions(entry)).collect();
        // The manager of a condition has nothing else of the entry.
        let before = before.filter(|_| own.is_some());
        let mut merged = before.unwrap_or(entry).clone();
        merged["conditions"] = Value::Array(all);
        merged
    };
    let applied = applied.as_array().into_iter().flatten();
    Value::Array(applied.map(merge).collect())
}

fn claim_path(claim: &Value) -> String {
    let name = |field: &str| claim["metadata"][field].as_str().unwrap().to_owned();
    format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}",
        name("namespace"),
        name("name")
    )
}

fn status(code: StatusCode, message: &str) -> Response {
    let reason = code.canonical_reason().unwrap_or_default().replace(' ', "");
    let body = json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure",
        "message": message, "reason": reason, "code": code.as_u16(),
    });
    (code, axum::Json(body)).into_response()
}

async fn handle(State(server): State<ApiServer>, request: Request<Body>) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = axum::body::to_bytes(body, 16 << 20).await.unwrap();
    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    let is_stalled = parts.method == Method::GET && server.is_stalled(parts.uri.path());
    if is_stalled {
        return std::future::pending().await;
    }
    server.answer(&parts.method, &parts.uri, &body)
}

/// Waits until `condition` returns a value.
pub(crate) async fn eventually<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    poll(what, async || condition().ok_or_else(String::new)).await
}

/// Waits until `condition` returns a value. Its error is what there is instead.
pub(crate) async fn poll<T>(
    what: &str,
    mut condition: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    // Only ends a test that hangs: a busy host takes long.
    let deadline = tokio::time::Instant::now() + Duration::from_secs(120);
    loop {
        let instead = match condition().await {
            Ok(value) => return value,
            Err(instead) => instead,
        };
        assert!(
            tokio::time::Instant::now() < deadline,
            "timed out waiting for {what}: {instead}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
