use std::convert::Infallible;
use std::fmt;
use std::sync::{Arc, Mutex};

use drava_api::metric::{driver as metric, exposition};
use drava_api::recommendation::{Confidence, Note};
use jiff::SignedDuration;
use kube::client::Body;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use serde_json::Value;

use super::*;
use crate::fixture::{metadata_of, object, response};
use crate::operate::clock::Clock;

const GIB: f64 = (1_u64 << 30) as f64;

const OBJECTS: &str = "/apis/gpu.drava.dev/v1alpha1/namespaces/a/gpusharerecommendations";

/// Figures of a share.
#[derive(Debug, Clone, Copy)]
struct Figures {
    used_gib: f64,
    peak_gib: f64,
    denials: f64,
    /// `None` where it is not measured.
    gpu_seconds: Option<f64>,
}

/// Metrics of a node driver with a share of claim `web-1-gpu` that has 10 GiB, of which 2 GiB are lent, and 40 cores.
#[derive(Debug)]
struct NodeDriver(Figures);

impl Collector for NodeDriver {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        let device = [
            "a",
            "web-1-gpu",
            "claim",
            "gpu",
            "gpu-0-vgpu",
            "GPU-0",
            "share",
            "s",
        ];
        let whole = ["a", "whole", "other", "gpu", "gpu-1", "GPU-1", "whole", ""];
        metric::CLAIM_DEVICE_INFO.encode(encoder, [(device, 1.0), (whole, 1.0)])?;
        let share = ["a", "web-1-gpu", "s"];
        for (metric, value) in [
            (metric::SHARE_MEMORY_USED_BYTES, self.0.used_gib * GIB),
            (metric::SHARE_MEMORY_PEAK_BYTES, self.0.peak_gib * GIB),
            (metric::SHARE_MEMORY_LIMIT_BYTES, 10.0 * GIB),
            (metric::SHARE_BURST_BYTES, 2.0 * GIB),
            (metric::SHARE_MEMORY_DENIALS, self.0.denials),
        ] {
            metric.encode(encoder, [(share, value)])?;
        }
        if let Some(seconds) = self.0.gpu_seconds {
            metric::SHARE_GUARANTEED_RATIO.encode(encoder, [(share, 0.4)])?;
            metric::SHARE_GPU_TIME_SECONDS.encode(encoder, [(share, seconds)])?;
        }
        Ok(())
    }
}

/// A cluster with a Deployment whose pod has the share.
struct TestCluster {
    state: Arc<Mutex<State>>,
    term: Term,
    instant: Instant,
    recommender: Recommender,
}

struct State {
    figures: Option<Figures>,
    replica_set: &'static str,
    claim_created: &'static str,
    object: Option<Value>,
    writes: Vec<String>,
}

impl State {
    fn answer(&mut self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        if method != "GET" {
            self.writes.push(format!("{method} {path}"));
        }
        let name = format!("{OBJECTS}/deployment.gpu.gpu.web");
        match (method, path) {
            ("GET", "/apis/gpu.drava.dev/v1alpha1/gpusharerecommendations") => {
                let items: Vec<_> = self.object.iter().collect();
                (200, json!({"metadata": {}, "items": items}))
            }
            ("GET", "/api/v1/namespaces/drava-system/pods") => {
                let pod = json!({
                    "metadata": {"name": "driver"},
                    "spec": {"containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 9394}]}]},
                    "status": {"phase": "Running", "podIP": "fd00::7"},
                });
                (
                    200,
                    json!({"metadata": {}, "items": [pod, {"metadata": {"name": "starts"}}]}),
                )
            }
            ("GET", "/apis/resource.k8s.io/v1/namespaces/a/resourceclaims/web-1-gpu") => {
                let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "web-1", "uid": "p", "controller": true});
                let metadata = json!({
                    "name": "web-1-gpu", "namespace": "a", "uid": "claim", "ownerReferences": [owner],
                    "creationTimestamp": self.claim_created,
                    "annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"},
                });
                (200, metadata_of(&json!({"metadata": metadata})))
            }
            ("GET", "/api/v1/namespaces/a/pods/web-1") => {
                let owner = json!({
                    "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("web-{}", self.replica_set),
                    "uid": self.replica_set, "controller": true, "blockOwnerDeletion": true,
                });
                let metadata = json!({
                    "name": "web-1", "namespace": "a", "uid": "p", "labels": {"pod-template-hash": self.replica_set},
                    "ownerReferences": [owner],
                });
                (200, metadata_of(&json!({"metadata": metadata})))
            }
            ("POST", OBJECTS) => {
                let mut object = body.clone();
                object["metadata"]["resourceVersion"] = json!("1");
                self.object = Some(object.clone());
                (200, object)
            }
            ("PUT", path) if path == format!("{name}/status") => {
                self.object = Some(body.clone());
                (200, body.clone())
            }
            ("PATCH", path) if path == name => {
                let mut object = self.object.clone().expect("an object");
                object["metadata"]["ownerReferences"] = body["metadata"]["ownerReferences"].clone();
                self.object = Some(object.clone());
                (200, object)
            }
            _ => (404, Value::Null),
        }
    }
}

impl TestCluster {
    fn new() -> Self {
        let figures = Figures {
            used_gib: 3.0,
            peak_gib: 4.0,
            denials: 0.0,
            gpu_seconds: Some(100.0),
        };
        let state = Arc::new(Mutex::new(State {
            figures: Some(figures),
            replica_set: "5d9c",
            claim_created: "2026-01-05T00:00:00Z",
            object: None,
            writes: Vec::new(),
        }));
        Self {
            recommender: recommender(&state),
            state,
            term: Term::new(Clock::new(|| Duration::ZERO), Duration::MAX),
            instant: Instant::now(),
        }
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().expect("the state"));
    }

    /// Another replica leads.
    fn restart(&mut self) {
        self.recommender = recommender(&self.state);
    }

    /// Reads and writes once, this many seconds after midnight. Returns the writes.
    async fn round(&mut self, seconds: u64) -> Vec<String> {
        let midnight: Timestamp = "2026-01-05T00:00:00Z".parse().expect("a time");
        let time = midnight + SignedDuration::from_secs(i64::try_from(seconds).expect("a time"));
        let now = (time, self.instant + Duration::from_secs(seconds));
        self.recommender
            .round(now, &self.term)
            .await
            .expect("a round");
        std::mem::take(&mut self.state.lock().expect("the state").writes)
    }

    fn object(&self) -> GpuShareRecommendation {
        let state = self.state.lock().expect("the state");
        object(state.object.clone().expect("an object"))
    }

    fn status(&self) -> GpuShareRecommendationStatus {
        self.object().status.expect("a status")
    }
}

fn recommender(state: &Arc<Mutex<State>>) -> Recommender {
    let served = Arc::clone(state);
    let api = tower::service_fn(move |http: http::Request<Body>| {
        let state = Arc::clone(&served);
        async move {
            let (parts, body) = http.into_parts();
            let body = body.collect_bytes().await.expect("a body");
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let mut state = state.lock().expect("the state");
            let (code, found) = state.answer(parts.method.as_str(), parts.uri.path(), &body);
            Ok::<_, Infallible>(response(code, &found))
        }
    });
    let served = Arc::clone(state);
    let metrics = tower::service_fn(move |http: http::Request<Body>| {
        assert_eq!(http.uri(), "http://[fd00::7]:9394/metrics");
        let figures = served.lock().expect("the state").figures;
        let (code, text) = match figures {
            Some(figures) => (200, exposition(NodeDriver(figures)).expect("text")),
            None => (503, String::new()),
        };
        let answer = http::Response::builder().status(code);
        let answer = answer
            .body(Body::from(text.into_bytes()))
            .expect("an answer");
        async { Ok::<_, Infallible>(answer) }
    });
    Recommender::new(
        Client::new(api, "default"),
        Client::new(metrics, "default"),
        "drava-system",
    )
}

fn mib(amounts: ShareAmounts) -> u64 {
    let memory = amounts.memory.expect("memory");
    memory.to_u64_rounded_up().expect("bytes") >> 20
}

#[tokio::test(start_paused = true)]
async fn writes_what_a_workload_needs() {
    let mut cluster = TestCluster::new();
    let writes = cluster.round(60).await;
    let status_path = format!("PUT {OBJECTS}/deployment.gpu.gpu.web/status");
    assert_eq!(writes, [format!("POST {OBJECTS}"), status_path.clone()]);
    let written = cluster.object();
    assert_eq!(
        json!(written.metadata.owner_references),
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-5d9c", "uid": "5d9c"}]),
    );
    let spec = json!({"kind": "Deployment", "name": "web", "claim": "gpu", "request": "gpu"});
    assert_eq!(json!(written.spec), spec);
    let status = cluster.status();
    assert_eq!((status.shares, status.confidence), (1, Confidence::Low));
    assert_eq!(
        (mib(status.current), status.current.cores),
        (8192, Some(40))
    );
    assert_eq!((mib(status.request), status.request.cores), (4736, None));

    // From the second reading on, the GPU time is known: 15 s in 300 s.
    cluster.set(|state| state.figures.as_mut().expect("figures").gpu_seconds = Some(115.0));
    assert_eq!(cluster.round(360).await, [status_path.as_str()]);
    assert_eq!(cluster.status().request.cores, Some(10));
    cluster.set(|state| state.figures.as_mut().expect("figures").gpu_seconds = Some(130.0));
    assert_eq!(cluster.round(660).await, [""; 0], "nothing has changed");
    // What is remembered is written after an hour.
    let mut writes = 0;
    for round in 3..16 {
        writes += cluster.round(60 + 300 * round).await.len();
    }
    assert_eq!(writes, 1);
}

#[tokio::test(start_paused = true)]
async fn another_leader_goes_on_from_the_status() {
    let mut cluster = TestCluster::new();
    cluster.round(60).await;
    let before = cluster.status();
    cluster.restart();
    cluster.set(|state| state.figures.as_mut().expect("figures").used_gib = 1.0);
    cluster.round(360).await;
    assert_eq!(
        cluster.status().history.memory_peaks,
        before.history.memory_peaks
    );
    // Two days later the share has used no more, so its peak is not that of the day.
    cluster.restart();
    cluster.round(2 * 86_400).await;
    let days = |cluster: &TestCluster| -> Vec<u64> {
        let days = cluster.status().history.memory_peaks.into_iter();
        days.map(|day| day.bytes >> 30).collect()
    };
    assert_eq!(days(&cluster), [4, 1]);
    // The first leader that sees a new maximum, or a new claim, counts it.
    cluster.restart();
    cluster.set(|state| state.figures.as_mut().expect("figures").peak_gib = 6.0);
    cluster.round(2 * 86_400 + 300).await;
    assert_eq!(days(&cluster), [4, 6]);
    cluster.restart();
    cluster.set(|state| {
        state.claim_created = "2026-01-09T00:00:00Z";
        state.figures = Some(Figures {
            used_gib: 1.0,
            peak_gib: 2.0,
            denials: 3.0,
            gpu_seconds: Some(0.0),
        });
    });
    cluster.round(5 * 86_400).await;
    // Denials at the limit of 10 GiB.
    assert_eq!(days(&cluster), [4, 6, 12]);
    assert!(cluster.status().notes.contains(&Note::MemoryWasDenied));
}

#[tokio::test(start_paused = true)]
async fn no_cores_are_recommended_where_time_is_not_measured() {
    let mut cluster = TestCluster::new();
    cluster.set(|state| state.figures.as_mut().expect("figures").gpu_seconds = None);
    for round in 1..=3 {
        cluster.round(round * 3600).await;
    }
    let status = cluster.status();
    assert_eq!((status.current.cores, status.request.cores), (None, None));
    assert_eq!(mib(status.request), 4736);
}

#[tokio::test(start_paused = true)]
async fn workload_without_shares_keeps_its_history() {
    let mut cluster = TestCluster::new();
    cluster.round(60).await;
    // The node driver does not answer, as if its node were gone.
    cluster.set(|state| state.figures = None);
    assert_eq!(cluster.round(360).await.len(), 1);
    let status = cluster.status();
    assert_eq!((status.shares, mib(status.request)), (0, 4736));
    assert_eq!(cluster.round(7200).await, [""; 0]);
    // The garbage collector has deleted the object with its owners.
    cluster.set(|state| state.object = None);
    assert_eq!(cluster.round(7500).await, [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn owners_are_those_of_all_revisions() {
    let mut cluster = TestCluster::new();
    cluster.round(60).await;
    cluster.restart();
    cluster.set(|state| state.replica_set = "7f00");
    let writes = cluster.round(360).await;
    assert!(writes[0].starts_with("PATCH"), "{writes:?}");
    let owners = cluster.object().metadata.owner_references.expect("owners");
    let uids: Vec<_> = owners.iter().map(|owner| owner.uid.as_str()).collect();
    assert_eq!(uids, ["5d9c", "7f00"]);
    let writes = cluster.round(660).await;
    assert!(
        !writes.iter().any(|write| write.starts_with("PATCH")),
        "{writes:?}"
    );
}

#[test]
fn claims_that_pods_name_are_workloads_of_their_own() {
    let metadata = |value: Value| -> k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta {
        object(value)
    };
    let named = metadata(json!({"name": "shared", "uid": "u"}));
    assert_eq!(pod_of(&named), None);
    let owner = owner_of(&named, None, None).expect("an owner");
    assert_eq!(
        format!("{owner:?}").matches("ResourceClaim").count(),
        2,
        "workload and owner: {owner:?}"
    );
    let controller =
        json!({"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "o", "controller": true});
    let foreign = metadata(json!({"name": "c", "uid": "u", "ownerReferences": [controller]}));
    assert_eq!(owner_of(&foreign, None, None), None);
    let pod = metadata(json!({"name": "alone", "uid": "p"}));
    let claim = metadata(json!({
        "name": "alone-gpu", "uid": "u", "annotations": {"resource.kubernetes.io/pod-claim-name": "gpu"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "alone", "uid": "p", "controller": true}],
    }));
    assert_eq!(pod_of(&claim), Some("alone"));
    let owner = owner_of(&claim, Some(&pod), None).expect("an owner");
    assert!(
        format!("{owner:?}").contains(r#"kind: "Pod", name: "alone", uid: "p""#),
        "{owner:?}"
    );
}

/// The Jobs of a CronJob come and go: they have one history.
#[test]
fn jobs_of_cron_job_are_one_workload() {
    let owned = |name: &str, uid: &str, (api, kind, owner): (&str, &str, &str)| {
        let owner = json!({"apiVersion": api, "kind": kind, "name": owner, "uid": owner, "controller": true});
        let metadata = json!({"name": name, "uid": uid, "ownerReferences": [owner]});
        object::<k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta>(metadata)
    };
    let mut claim = owned("nightly-29-x-gpu", "c", ("v1", "Pod", "nightly-29-x"));
    claim.annotations = Some(
        [(
            "resource.kubernetes.io/pod-claim-name".to_owned(),
            "gpu".to_owned(),
        )]
        .into(),
    );
    let pod = owned("nightly-29-x", "p", ("batch/v1", "Job", "nightly-29"));
    let job = owned(
        "nightly-29",
        "nightly-29",
        ("batch/v1", "CronJob", "nightly"),
    );
    let found = |job: Option<&_>| format!("{:?}", owner_of(&claim, Some(&pod), job));
    let of_cron_job = found(Some(&job));
    assert!(
        of_cron_job.contains(r#"kind: "CronJob", name: "nightly""#),
        "{of_cron_job}"
    );
    assert!(
        of_cron_job.contains(r#"name: "nightly", uid: "nightly""#),
        "{of_cron_job}"
    );
    // Another Job with that name, a Job by itself, and one that is gone.
    let another = owned("nightly-29", "later", ("batch/v1", "CronJob", "nightly"));
    let alone = owned(
        "nightly-29",
        "nightly-29",
        ("kueue.x-k8s.io/v1", "Workload", "w"),
    );
    for job in [Some(&another), Some(&alone), None] {
        let found = found(job);
        assert!(
            found.contains(r#"kind: "Job", name: "nightly-29""#),
            "{found}"
        );
    }
}
