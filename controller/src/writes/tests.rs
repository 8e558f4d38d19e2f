//! The write protocol against a small API server that keeps one claim, checks versions, and can fail in every way.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use http::{Method, Request as HttpRequest, Response, StatusCode};
use http_body_util::BodyExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::client::Body;
use serde_json::Value;

use super::*;
use crate::fixture::{claim, object};

/// What happens to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It is served.
    None,
    /// It is carried out, but the answer is lost.
    AnswerLost,
    /// It is lost before anything happened.
    Lost,
    /// Somebody changes the claim just before.
    Overtaken,
    /// kube-scheduler reserves the claim just before.
    ReservedBefore,
    /// Another writer allocates the claim just before.
    AllocatedBefore,
    /// The claim is deleted and created again just before.
    ReplacedBefore,
    /// Refused with this status.
    Status(u16, &'static str),
}

#[derive(Debug, Default)]
struct Server {
    objects: std::collections::BTreeMap<String, Value>,
    version: u64,
    faults: VecDeque<Fault>,
    log: Vec<String>,
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
        body: &Value,
    ) -> Result<(StatusCode, Value), String> {
        let mut parts = path.rsplit('/');
        let last = parts.next().unwrap();
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
            Fault::None | Fault::AnswerLost => {}
            Fault::Lost => return Err("connection reset".to_owned()),
            Fault::Overtaken => self.put(name, |object| object["metadata"]["labels"] = json!({"a": "b"})),
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
            Fault::Status(code, message) => return Ok(failure(code, message)),
        }
        let answer = self.apply(method, name, status, body);
        if fault == Fault::AnswerLost {
            Err("connection reset".to_owned())
        } else {
            Ok(answer)
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
                "a write without {guard}: {body}"
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
                "allocated without the finalizer"
            );
            assert!(
                object["status"]["allocation"].is_null(),
                "an allocation was changed"
            );
            assert!(
                patch.get("reservedFor").is_none(),
                "reservations are kube-scheduler's"
            );
        }
        self.put(name, |object| merge(&mut object[part], &patch));
        (StatusCode::OK, self.objects[name].clone())
    }
}

/// JSON merge patch.
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

fn start(
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
        log: Vec::new(),
    }));
    let shared = Arc::clone(&server);
    let service = tower::service_fn(move |request: HttpRequest<Body>| {
        let server = Arc::clone(&shared);
        async move {
            let (head, body) = request.into_parts();
            let bytes = body.collect().await.unwrap().to_bytes();
            let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
            let (status, answer) =
                server
                    .lock()
                    .unwrap()
                    .serve(&head.method, head.uri.path(), &body)?;
            let response = Response::builder()
                .status(status)
                .body(Body::from(serde_json::to_vec(&answer).unwrap()));
            Ok::<_, tower::BoxError>(response.unwrap())
        }
    });
    let timing = Timing {
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(2),
        ..Timing::default()
    };
    (
        Writer::new(Client::new(service, "default"), stop.clone(), timing),
        server,
    )
}

fn write(claim: &ResourceClaim) -> ClaimWrite {
    ClaimWrite {
        claim: Arc::new(claim.clone()),
        allocation: object(json!({"devices": {"results": [{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
            "shareID": format!("ours-{}", claim.metadata.name.as_deref().unwrap()),
        }]}})),
        summary: String::new(),
    }
}

fn job(claims: &[ResourceClaim]) -> Job {
    Job {
        pod_uid: "pod-p".to_owned(),
        pod: ObjectReference::default(),
        node: "n1".to_owned(),
        writes: claims.iter().map(write).collect(),
    }
}

fn device_of(server: &Mutex<Server>, name: &str) -> Option<String> {
    let share = &server.lock().unwrap().objects[name]["status"]["allocation"]["devices"]["results"]
        [0]["shareID"];
    share.as_str().map(str::to_owned)
}

async fn allocate_with(faults: &[Fault]) -> (JobOutcome, Arc<Mutex<Server>>) {
    let claims = [claim("a", "1Gi")];
    let (writer, server) = start(&claims, faults, &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    (outcome, server)
}

#[tokio::test]
async fn finalizer_then_status() {
    let (outcome, server) = allocate_with(&[]).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(server.lock().unwrap().log, ["PATCH a", "PATCH a/status"]);
    assert_eq!(device_of(&server, "a").as_deref(), Some("ours-a"));
    assert_eq!(allocated_for(&outcome.claims[0]), Some("pod-p"));
    // The outcome is the newest version, so that the planner need not wait for the watch.
    assert_eq!(
        outcome.claims[0].metadata.resource_version.as_deref(),
        Some("102")
    );
}

#[tokio::test]
async fn whatever_is_lost_is_found_out_by_reading() {
    use Fault::{AnswerLost, Lost, Overtaken};
    for faults in [
        vec![Lost],
        vec![AnswerLost],
        vec![Fault::None, Lost],
        vec![Fault::None, AnswerLost],
        vec![AnswerLost, Lost, Lost, Fault::None, AnswerLost, Lost],
        vec![Overtaken],
        vec![Fault::None, Overtaken, Fault::None, Overtaken],
        vec![Fault::None, Fault::Status(500, "busy")],
        vec![
            Fault::None,
            Fault::Status(504, "timeout"),
            Fault::Status(500, "busy"),
        ],
    ] {
        let (outcome, server) = allocate_with(&faults).await;
        assert_eq!(outcome.failure, None, "{faults:?}");
        assert_eq!(
            device_of(&server, "a").as_deref(),
            Some("ours-a"),
            "{faults:?}"
        );
        assert_eq!(
            outcome.claims[0].metadata.resource_version.as_deref(),
            server.lock().unwrap().objects["a"]["metadata"]["resourceVersion"].as_str(),
            "{faults:?}"
        );
    }
}

#[tokio::test]
async fn others_are_never_overwritten() {
    let (outcome, server) = allocate_with(&[Fault::None, Fault::AllocatedBefore]).await;
    let failure = outcome.failure.unwrap();
    assert_eq!(
        failure.message,
        "claim default/a was allocated by somebody else"
    );
    assert!(!failure.tell);
    assert_eq!(device_of(&server, "a").as_deref(), Some("theirs"));
    assert!(
        is_allocated(&outcome.claims[0]),
        "the planner learns of it at once"
    );

    let (outcome, server) = allocate_with(&[Fault::None, Fault::ReplacedBefore]).await;
    assert_eq!(outcome.failure.unwrap().message, "claim default/a is gone");
    assert_eq!(device_of(&server, "a"), None);

    let (outcome, _) = allocate_with(&[Fault::Overtaken; 40]).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a keeps being changed by others"
    );
}

#[tokio::test]
async fn a_missing_permission_is_named() {
    let refusal = "ResourceClaim.resource.k8s.io \"a\" is invalid: status.allocation: Forbidden: changing \
                   status.allocation or status.reservedFor requires resource=\"resourceclaims/binding\"";
    let (outcome, _) = allocate_with(&[Fault::None, Fault::Status(422, refusal)]).await;
    let failure = outcome.failure.unwrap();
    assert!(failure.tell);
    assert!(
        failure.message.starts_with(
            "claim default/a: the ClusterRole of drava-controller lacks a permission: update and patch on \
             resourceclaims/binding of resource.k8s.io, cluster-wide"
        ),
        "{}",
        failure.message
    );
    let (outcome, _) = allocate_with(&[Fault::Status(
        403,
        "cannot patch resource \"resourceclaims\"",
    )])
    .await;
    assert!(
        outcome
            .failure
            .unwrap()
            .message
            .ends_with("lacks a permission: cannot patch resource \"resourceclaims\"")
    );
    let (outcome, _) = allocate_with(&[
        Fault::None,
        Fault::Status(422, "status.allocation: Invalid value"),
    ])
    .await;
    let failure = outcome.failure.unwrap();
    assert!(failure.tell);
    assert_eq!(
        failure.message,
        "claim default/a: the API server refuses the allocation: status.allocation: Invalid value"
    );
}

#[tokio::test]
async fn all_claims_of_a_pod_or_none() {
    let claims = [claim("a", "1Gi"), claim("b", "1Gi")];
    let (writer, server) = start(&claims, &[], &CancellationToken::new());
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(outcome.failure, None);
    assert_eq!(outcome.claims.len(), 2);
    assert_eq!(device_of(&server, "b").as_deref(), Some("ours-b"));

    // The second fails at each of its steps, and the roll-back meets trouble of its own.
    for faults in [
        vec![Fault::None, Fault::None, Fault::Status(403, "no")],
        vec![
            Fault::None,
            Fault::None,
            Fault::None,
            Fault::Status(422, "no"),
        ],
        vec![
            Fault::None,
            Fault::None,
            Fault::Status(403, "no"),
            Fault::AnswerLost,
        ],
        vec![
            Fault::None,
            Fault::None,
            Fault::Status(403, "no"),
            Fault::Lost,
            Fault::Lost,
            Fault::None,
            Fault::Overtaken,
        ],
    ] {
        let (writer, server) = start(&claims, &faults, &CancellationToken::new());
        let outcome = writer.allocate(job(&claims)).await;
        assert!(outcome.failure.is_some(), "{faults:?}");
        assert_eq!(device_of(&server, "a"), None, "{faults:?}");
        let server = server.lock().unwrap();
        assert_eq!(
            server.objects["a"]["metadata"]["finalizers"],
            json!([]),
            "{faults:?}"
        );
        assert!(
            outcome
                .claims
                .iter()
                .any(|claim| claim.metadata.name.as_deref() == Some("a") && !is_allocated(claim))
        );
    }
}

#[tokio::test]
async fn a_stop_ends_the_reading() {
    let claims = [claim("a", "1Gi")];
    let stop = CancellationToken::new();
    let (writer, server) = start(&claims, &[Fault::Lost; 100_000], &stop);
    tokio::spawn(async move {
        while server.lock().unwrap().log.len() < 10 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        stop.cancel();
    });
    let outcome = writer.allocate(job(&claims)).await;
    assert_eq!(
        outcome.failure.unwrap().message,
        "claim default/a was not written: this replica stops"
    );
}

fn allocated(reserved: bool) -> ResourceClaim {
    let mut claim = claim("a", "1Gi");
    claim.metadata.finalizers = Some(vec![
        "example.com/other".to_owned(),
        names::CLAIM_FINALIZER.to_owned(),
    ]);
    claim.metadata.annotations = Some(
        [(
            names::ALLOCATED_FOR_ANNOTATION.to_owned(),
            "pod-p".to_owned(),
        )]
        .into_iter()
        .collect(),
    );
    let mut status = json!({"allocation": write(&claim).allocation});
    if reserved {
        status["reservedFor"] = json!([{"resource": "pods", "name": "p", "uid": "u"}]);
    }
    claim.status = Some(object(status));
    claim
}

async fn release_with(
    claim: &ResourceClaim,
    faults: &[Fault],
) -> (Option<ResourceClaim>, Arc<Mutex<Server>>) {
    let (writer, server) = start(
        std::slice::from_ref(claim),
        faults,
        &CancellationToken::new(),
    );
    let wanted = Release {
        claim: Arc::new(claim.clone()),
        why: "test".to_owned(),
    };
    let released = writer.release(&wanted).await;
    (released, server)
}

#[tokio::test]
async fn a_release_takes_allocation_finalizer_and_mark() {
    for faults in [
        vec![],
        vec![Fault::AnswerLost],
        vec![Fault::Overtaken],
        vec![Fault::None, Fault::Overtaken],
        vec![Fault::None, Fault::AnswerLost],
    ] {
        let (released, server) = release_with(&allocated(false), &faults).await;
        let released = released.unwrap();
        assert!(!is_allocated(&released), "{faults:?}");
        assert_eq!(allocated_for(&released), None, "{faults:?}");
        let server = server.lock().unwrap();
        assert_eq!(
            server.objects["a"]["metadata"]["finalizers"],
            json!(["example.com/other"]),
            "{faults:?}"
        );
    }
}

#[tokio::test]
async fn a_reserved_claim_is_not_released() {
    let (newest, server) = release_with(&allocated(false), &[Fault::ReservedBefore]).await;
    assert!(
        is_reserved(&newest.unwrap()),
        "the planner learns of the reservation"
    );
    assert_eq!(device_of(&server, "a").as_deref(), Some("ours-a"));
}

#[tokio::test]
async fn releasing_what_is_gone_is_no_trouble() {
    let (writer, server) = start(&[], &[], &CancellationToken::new());
    let wanted = Release {
        claim: Arc::new(allocated(false)),
        why: "test".to_owned(),
    };
    assert_eq!(writer.release(&wanted).await, None);
    assert_eq!(server.lock().unwrap().log, ["PATCH a/status"]);
}
