use std::fs;
use std::sync::Mutex;

use drava_api::listed::Unreadable;
use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};

use super::change::tests::{POOL, TestNode, grant};
use super::*;
use crate::driver::labelled::Labelled;
use crate::kubelet::claims::HeldInstances;
use crate::node::options::Delivery;
use crate::prepare::effects::NodeEffects;
use crate::report::Reporter;

const BASE: &str = "00000000-0000-4000-8000-000000000001";
const ADDED: &str = "00000000-0000-4000-8000-000000000002";

/// Answers of the API server by the names of claims: code and body.
type Answers = Arc<Mutex<BTreeMap<String, (u16, Value)>>>;

/// The task on a node, with an API server that knows the claims in `answers`.
struct Fixture {
    node: TestNode,
    task: Task<NodeEffects>,
    labelled: Labelled<Known>,
    answers: Answers,
    /// Paths of the claims whose status was written.
    written: Arc<Mutex<Vec<String>>>,
    /// What was written.
    bodies: Arc<Mutex<Vec<String>>>,
    _gpus: watch::Sender<State>,
}

impl Fixture {
    fn new() -> Self {
        let (answers, written) = (Answers::default(), Arc::<Mutex<Vec<String>>>::default());
        let bodies = Arc::<Mutex<Vec<String>>>::default();
        let client = client(
            Arc::clone(&answers),
            Arc::clone(&written),
            Arc::clone(&bodies),
        );
        let node = TestNode::new();
        let health = watch::Sender::new(Arc::default());
        let (reporter, reports) =
            Reporter::start(client.clone(), "node-1".to_owned(), health.subscribe());
        tokio::spawn(reports);
        let gpus = watch::Sender::new(State::Pending);
        let claims = ClaimService {
            pool: POOL.to_owned(),
            applier: Arc::clone(&node.applier),
            client,
            gpus: gpus.subscribe(),
            installed: watch::Sender::new(None).subscribe(),
            delivery: Delivery::Preload,
            runtime_classes: Vec::new(),
            reporter,
            reconcile: Arc::new(Notify::new()),
            release_wait: Duration::ZERO,
            missed_reclaims: crate::prepare::apply::MissedReclaims::default(),
            held: Arc::new(HeldInstances::default()),
        };
        let mut task = Task::new(
            Arc::new(claims),
            node.layout.clone(),
            FollowedRecords::default(),
        );
        let mut labelled = Labelled::of_namespace("default");
        labelled.apply("default", Event::Init, &mut task);
        labelled.apply("default", Event::InitDone, &mut task);
        Self {
            node,
            task,
            labelled,
            answers,
            written,
            bodies,
            _gpus: gpus,
        }
    }

    fn answer(&self, code: u16, body: Value) {
        let mut answers = self.answers.lock().unwrap();
        answers.insert("claim-2".to_owned(), (code, body));
    }

    /// Observes the companion, changed at a JSON pointer.
    fn observe(&mut self, pointer: &str, value: Value) -> bool {
        self.apply(applied(companion(pointer, value)))
    }

    fn apply(&mut self, event: Event<Listed<ResourceClaim>>) -> bool {
        self.labelled.apply("default", event, &mut self.task)
    }

    async fn review(&mut self) -> Option<Instant> {
        self.task.review(self.labelled.found()).await
    }

    async fn unknown(&self) -> Result<usize, String> {
        let record = self.node.prepare(1, [grant(2, 4)]);
        let unknown = self.task.find_unknown(&record, &[]).await;
        unknown.map(|unknown| unknown.len())
    }
}

fn client(
    answers: Answers,
    written: Arc<Mutex<Vec<String>>>,
    bodies: Arc<Mutex<Vec<String>>>,
) -> Client {
    let service = tower::service_fn(move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        let name = path.trim_end_matches("/status").rsplit('/').next();
        let answer = answers.lock().unwrap().get(name.unwrap()).cloned();
        let (code, body) = answer.unwrap_or_else(|| (404, failure(404)));
        let (written, bodies) = (Arc::clone(&written), Arc::clone(&bodies));
        async move {
            if *request.method() == Method::PATCH {
                let sent = request.into_body().collect_bytes().await?;
                bodies
                    .lock()
                    .unwrap()
                    .push(String::from_utf8(sent.to_vec())?);
                written.lock().unwrap().push(path);
            }
            let body = Body::from(body.to_string().into_bytes());
            let response = Response::builder().status(code).body(body)?;
            Ok::<_, tower::BoxError>(response)
        }
    });
    Client::new(service, "default")
}

fn failure(code: u16) -> Value {
    let reason = if code == 404 {
        "NotFound"
    } else {
        "InternalError"
    };
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": "", "code": code})
}

/// Returns a companion of claim 1, changed at a JSON pointer.
fn companion(pointer: &str, value: Value) -> Value {
    let mut claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {
            "name": "claim-2", "namespace": "default", "uid": ADDED,
            "labels": {"gpu.drava.dev/companion-of": BASE},
            "deletionTimestamp": null,
        },
        "spec": {},
        "status": {
            "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-1"}],
            "allocation": {"devices": {"results": [{
                "driver": "gpu.drava.dev", "pool": POOL, "device": "gpu-0-vgpu", "request": "gpu",
                "shareID": ADDED,
                "consumedCapacity": {"memory": "4Gi", "cores": "10", "slots": "1"},
            }]}},
        },
    });
    if !pointer.is_empty() {
        *claim.pointer_mut(pointer).unwrap() = value;
    }
    claim
}

fn applied(claim: Value) -> Event<Listed<ResourceClaim>> {
    Event::Apply(Listed::Object(serde_json::from_value(claim).unwrap()))
}

/// The companion without the ID of its share, which this build cannot use.
const INCOMPLETE: &str = "/status/allocation/devices/results/0/shareID";

#[tokio::test]
async fn grant_ends_only_if_claim_is_known_to_be_no_companion() {
    let fixture = Fixture::new();
    for (pointer, value, expected) in [
        ("", json!(null), 1),
        (INCOMPLETE, json!(null), 1),
        // The claim cannot be read.
        ("/spec", json!("text"), 1),
        ("/metadata/uid", json!(BASE), 0),
        ("/metadata/labels", json!({}), 0),
        (
            "/metadata/labels",
            json!({"gpu.drava.dev/companion-of": ADDED}),
            0,
        ),
        ("/status", json!({}), 0),
    ] {
        fixture.answer(200, companion(pointer, value));
        assert_eq!(fixture.unknown().await, Ok(expected), "{pointer}");
    }
    fixture.answer(404, failure(404));
    assert_eq!(fixture.unknown().await, Ok(0));
    fixture.answer(500, failure(500));
    assert!(fixture.unknown().await.is_err());
}

/// Another record may have the grant, or files of the base may be left. Both may go without a change of the companion.
#[tokio::test]
async fn companion_without_base_is_released_when_nothing_has_its_capacity() {
    let mut fixture = Fixture::new();
    fixture.observe("/metadata/deletionTimestamp", json!("2026-11-28T00:00:00Z"));
    let base = ClaimUid::parse(BASE).unwrap();
    let limits = fixture.node.layout.claim(&base);
    fs::create_dir_all(&limits).unwrap();
    assert!(fixture.review().await.is_some());
    let release = async || {
        let known = fixture.labelled.found().unwrap();
        let found = known.values().map(|known| known.companion.clone());
        let found: Vec<Companion> = found.collect();
        let task = &fixture.task;
        task.release_without_base(known, &base, &found).await
    };
    let other = fixture.node.prepare(9, [grant(2, 4)]);
    fs::remove_dir_all(limits).unwrap();
    assert_eq!(release().await, Ok(Left::Open));
    assert_eq!(*fixture.written.lock().unwrap(), [] as [String; 0]);
    let store = fixture.node.applier.store();
    store.remove(&other.claim.uid).unwrap();
    assert_eq!(release().await, Ok(Left::Open), "it is not written");
    while fixture.written.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn companion_of_claim_that_is_not_prepared_says_so() {
    let mut fixture = Fixture::new();
    fixture.observe("", json!(null));
    assert!(fixture.review().await.is_some(), "it is not written");
    while fixture.written.lock().unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let bodies = fixture.bodies.lock().unwrap();
    let body = bodies.first().unwrap();
    assert!(body.contains("BaseNotPrepared"), "{body}");
}

#[tokio::test]
async fn companion_that_cannot_be_read_is_forgotten() {
    let unreadable = || {
        let mut claim = companion("", json!(null));
        let metadata = claim["metadata"].take();
        Box::new(Unreadable {
            metadata: serde_json::from_value(metadata).unwrap(),
            devices: Vec::new(),
            cause: String::new(),
        })
    };
    for event in [
        Event::Apply(Listed::Unreadable(unreadable())),
        Event::Delete(Listed::Unreadable(unreadable())),
        applied(companion(INCOMPLETE, json!(null))),
    ] {
        let mut fixture = Fixture::new();
        assert!(fixture.observe("", json!(null)));
        assert!(!fixture.observe("", json!(null)), "no change");
        assert!(fixture.apply(event));
        assert!(fixture.labelled.found().unwrap().is_empty());
    }
}

#[test]
fn looks_less_often_at_base_that_does_not_change() {
    let start = Instant::now();
    let reviewed = |uid: &str| -> Reviewed {
        let claim = companion("/metadata/uid", json!(uid));
        let claim = serde_json::from_value(claim).unwrap();
        (
            None,
            companion::read(&claim, POOL).unwrap().into_iter().collect(),
        )
    };
    let mut base = Base::new();
    assert!(base.is_due(&reviewed(ADDED), start));
    let mut waits = |uid: &str, left| {
        base.schedule(reviewed(uid), left, start);
        let due = base.due?;
        assert!(base.is_due(&reviewed(uid), due));
        assert!(!base.is_due(&reviewed(uid), due - Duration::from_millis(1)));
        Some((due - start).as_millis())
    };
    let open = |_| waits(ADDED, Left::Open).unwrap();
    assert_eq!([0; 6].map(open), [500, 1000, 2000, 4000, 4000, 4000]);
    assert_eq!(waits(ADDED, Left::Settling), Some(250));
    assert_eq!(waits(ADDED, Left::Open), Some(500));
    assert_eq!(waits(BASE, Left::Open), Some(500), "another companion");
    assert_eq!(waits(BASE, Left::Nothing), None);
    assert!(!base.is_due(&reviewed(BASE), start + Duration::from_secs(3600)));
    assert!(base.is_due(&reviewed(ADDED), start));
}

#[test]
fn warns_once_of_same_failure() {
    let mut failure = None;
    let mut warns = |error: &str| is_new(&mut failure, error);
    assert!(warns("a"));
    assert!(!warns("a"));
    assert!(warns("b"));
}
