//! A fake API server that stores claims, checks versions and injects faults.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::names;
use http::{Method, Request as HttpRequest, Response, StatusCode};
use http_body_util::BodyExt;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::action::{AllocationJob, ClaimWrite, PodAllocation};
use crate::fixture::{metadata_of, object, wants_metadata};
use crate::operate::clock::Clock;
use crate::write::lease::Term;
use crate::write::writes::{Timing, Writer};

/// Fault of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// No fault.
    None,
    /// The request is executed, but the response is lost.
    ResponseLost,
    /// The write is executed, its response is lost, and the claim is released before it is read back.
    ReleasedAfter,
    /// The request is lost.
    RequestLost,
    /// The response is lost, and the request is executed after the last one of the test.
    Late,
    /// Another writer changes the claim before the request.
    ChangedBefore,
    /// kube-scheduler reserves the claim before the request.
    ReservedBefore,
    /// Another writer allocates the claim before the request.
    AllocatedBefore,
    /// The claim is deleted and recreated before the request.
    ReplacedBefore,
    /// The claim is deleted before the request, and its finalizer keeps it.
    DeletedBefore,
    /// The request is rejected with this status.
    Status(u16, &'static str),
}

#[derive(Debug, Default)]
pub(super) struct Server {
    pub(super) objects: BTreeMap<String, Value>,
    version: u64,
    faults: VecDeque<Fault>,
    /// Faults of dry runs.
    pub(super) dry_run_faults: VecDeque<Fault>,
    /// Writes without response, executed late.
    late: Vec<(Method, String, bool, Value)>,
    /// Time until the response to a request.
    pub(super) latency: Duration,
    pub(super) log: Vec<String>,
}

impl Server {
    fn put(&mut self, name: &str, change: impl FnOnce(&mut Value)) {
        self.version += 1;
        let object = self.objects.get_mut(name).unwrap();
        change(object);
        object["metadata"]["resourceVersion"] = self.version.to_string().into();
    }

    fn serve(
        &mut self,
        method: &Method,
        path: &str,
        is_dry_run: bool,
        body: &Value,
    ) -> Result<(StatusCode, Value), String> {
        if is_dry_run {
            return match self.dry_run_faults.pop_front() {
                Some(Fault::Status(code, message)) => Ok(failure(code, message)),
                _ => Ok(self.dry_run(path)),
            };
        }
        let mut parts = path.rsplit('/');
        let last = parts.next().unwrap();
        if last == "resourceclaims" {
            let items: Vec<&Value> = self.objects.values().collect();
            return Ok((StatusCode::OK, json!({"metadata": {}, "items": items})));
        }
        let (name, status) = if last == "status" {
            (parts.next().unwrap(), true)
        } else {
            (last, false)
        };
        let fault = self.faults.pop_front().unwrap_or(Fault::None);
        self.log.push(format!(
            "{method} {name}{}",
            if status { "/status" } else { "" }
        ));
        match fault {
            Fault::None | Fault::ResponseLost | Fault::ReleasedAfter => {}
            Fault::RequestLost => return Err("connection reset".to_owned()),
            Fault::Late => {
                self.late
                    .push((method.clone(), name.to_owned(), status, body.clone()));
                return Err("request timed out".to_owned());
            }
            Fault::ChangedBefore => self.put(name, |object| object["metadata"]["labels"]["a"] = "b".into()),
            Fault::ReservedBefore => {
                self.put(name, |object| object["status"]["reservedFor"] = json!([{"resource": "pods", "name": "p", "uid": "u"}]));
            }
            Fault::AllocatedBefore => self.put(name, |object| {
                object["status"] = json!({"allocation": {"devices": {"results": [
                    {"request": "gpu", "driver": "gpu.drava.dev", "pool": "n9/gpus", "device": "gpu-9-vgpu", "shareID": "theirs"},
                ]}}});
            }),
            Fault::ReplacedBefore => self.put(name, |object| {
                object["metadata"]["uid"] = "another".into();
                object["status"] = json!({});
            }),
            Fault::DeletedBefore => self.put(name, |object| {
                object["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
            }),
            Fault::Status(code, message) => return Ok(failure(code, message)),
        }
        let response = self.apply(method, name, status, body);
        if fault == Fault::ReleasedAfter {
            self.put(name, |object| object["status"] = json!({}));
        }
        if matches!(fault, Fault::ResponseLost | Fault::ReleasedAfter) {
            Err("connection reset".to_owned())
        } else {
            Ok(response)
        }
    }

    fn dry_run(&self, path: &str) -> (StatusCode, Value) {
        let name = path.rsplit('/').find(|part| *part != "status").unwrap();
        match self.objects.get(name) {
            Some(object) => (StatusCode::OK, object.clone()),
            None => failure(404, "not found"),
        }
    }

    /// Executes the late writes.
    pub(super) fn execute_late(&mut self) {
        for (method, name, status, body) in std::mem::take(&mut self.late) {
            self.apply(&method, &name, status, &body);
        }
    }

    fn apply(
        &mut self,
        method: &Method,
        name: &str,
        status: bool,
        body: &Value,
    ) -> (StatusCode, Value) {
        let Some(object) = self.objects.get(name) else {
            return failure(404, "not found");
        };
        if method == Method::GET {
            return (StatusCode::OK, object.clone());
        }
        for guard in ["uid", "resourceVersion"] {
            assert!(
                body["metadata"][guard].is_string(),
                "{guard} is missing: {body}"
            );
            if body["metadata"][guard] != object["metadata"][guard] {
                return failure(409, "the object has been modified");
            }
        }
        let part = if status { "status" } else { "metadata" };
        let patch = body[part].clone();
        if status && patch["allocation"].is_object() {
            let finalizers = object["metadata"]["finalizers"].to_string();
            assert!(
                finalizers.contains(names::CLAIM_FINALIZER),
                "the finalizer precedes the allocation"
            );
            assert!(
                object["status"]["allocation"].is_null(),
                "an allocation is immutable"
            );
            let is_companion = object["metadata"]["labels"][names::COMPANION_LABEL].is_string();
            assert_eq!(
                patch["reservedFor"].is_array(),
                is_companion,
                "kube-scheduler writes the reservations of all claims but companions"
            );
        }
        self.put(name, |object| merge(&mut object[part], &patch));
        (StatusCode::OK, self.objects[name].clone())
    }
}

/// Applies a JSON merge patch.
fn merge(target: &mut Value, patch: &Value) {
    match patch.as_object() {
        None => *target = patch.clone(),
        Some(fields) => {
            if !target.is_object() {
                *target = json!({});
            }
            for (key, value) in fields {
                if value.is_null() {
                    target.as_object_mut().unwrap().remove(key);
                } else {
                    merge(&mut target[key], value);
                }
            }
        }
    }
}

fn failure(code: u16, message: &str) -> (StatusCode, Value) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message, "reason": ""});
    (StatusCode::from_u16(code).unwrap(), status)
}

pub(super) fn start(
    claims: &[ResourceClaim],
    faults: &[Fault],
    stop: &CancellationToken,
) -> (Writer, Arc<Mutex<Server>>) {
    start_in(term_until(Duration::MAX), claims, faults, stop)
}

/// Term at time zero.
pub(super) fn term_until(valid_until: Duration) -> Arc<Term> {
    Arc::new(Term::new(Clock::new(|| Duration::ZERO), valid_until))
}

pub(super) fn start_in(
    term: Arc<Term>,
    claims: &[ResourceClaim],
    faults: &[Fault],
    stop: &CancellationToken,
) -> (Writer, Arc<Mutex<Server>>) {
    let server = Arc::new(Mutex::new(Server {
        objects: claims
            .iter()
            .map(|claim| {
                (
                    claim.metadata.name.clone().unwrap(),
                    serde_json::to_value(claim).unwrap(),
                )
            })
            .collect(),
        version: 100,
        faults: faults.iter().copied().collect(),
        dry_run_faults: VecDeque::new(),
        late: Vec::new(),
        latency: Duration::ZERO,
        log: Vec::new(),
    }));
    let shared = Arc::clone(&server);
    let service = tower::service_fn(move |request: HttpRequest<Body>| {
        let server = Arc::clone(&shared);
        async move {
            let (head, body) = request.into_parts();
            let wants_metadata = wants_metadata(&head.headers);
            assert_eq!(
                wants_metadata,
                head.method == Method::PATCH,
                "a write is answered with the metadata alone, and nothing else is"
            );
            let bytes = body.collect().await.unwrap().to_bytes();
            let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            let is_dry_run = head
                .uri
                .query()
                .is_some_and(|query| query.contains("dryRun=All"));
            let latency = server.lock().unwrap().latency;
            tokio::time::sleep(latency).await;
            let (status, mut body) =
                server
                    .lock()
                    .unwrap()
                    .serve(&head.method, head.uri.path(), is_dry_run, &body)?;
            if wants_metadata && status.is_success() {
                body = metadata_of(&body);
            }
            let response = Response::builder()
                .status(status)
                .body(Body::from(serde_json::to_vec(&body).unwrap()));
            Ok::<_, tower::BoxError>(response.unwrap())
        }
    });
    let timing = Timing {
        first_retry: Duration::from_millis(1),
        max_retry: Duration::from_millis(2),
        ..Timing::default()
    };
    let client = Client::new(service, "default");
    (Writer::new(client, term, stop.clone(), timing), server)
}

pub(super) fn write(claim: &ResourceClaim) -> ClaimWrite {
    ClaimWrite {
        claim: Arc::new(claim.clone()),
        allocation: object(json!({"devices": {"results": [{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
            "shareID": format!("ours-{}", claim.metadata.name.as_deref().unwrap()),
        }]}})),
        consumer: None,
    }
}

pub(super) fn job(claims: &[ResourceClaim]) -> AllocationJob {
    let pod = PodAllocation {
        uid: "pod-p".to_owned(),
        pod: ObjectReference::default(),
        node: "n1".to_owned(),
        writes: claims.iter().map(write).collect(),
    };
    AllocationJob { pods: vec![pod] }
}

pub(super) fn device_of(server: &Mutex<Server>, name: &str) -> Option<String> {
    let share = &server.lock().unwrap().objects[name]["status"]["allocation"]["devices"]["results"]
        [0]["shareID"];
    share.as_str().map(str::to_owned)
}
