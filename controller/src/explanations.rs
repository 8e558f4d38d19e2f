//! PlacementExplanations: the leader writes the explanation of each, keeps it up to date, and deletes it after its time.
//!
//! They are decided on a snapshot that is read for them, apart from the planner: a request delays no allocation.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::explanation::{
    MAX_BLOCKERS, PlacementBlocker, PlacementExplanation, PlacementExplanationStatus,
};
use drava_api::listed::Listed;
use drava_explanation::changes::Change;
use drava_explanation::explain::{self, ExplainError, Report, Settings, State};
use drava_explanation::snapshot::{self, ListError, Objects};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use tokio::task::JoinError;
use tokio::time::Instant;

use crate::write::lease::Term;
use crate::write::writes::{FIELD_MANAGER, ignore_outdated};

/// Time between two readings of the requests.
const PERIOD: Duration = Duration::from_secs(2);
/// Time between two readings while the definition is not installed or cannot be read.
const RECHECK: Duration = Duration::from_secs(60);
/// Shortest time after which explanations are brought up to date.
const REFRESH: Duration = Duration::from_secs(10);
/// Rest after a reading of the cluster, relative to its time and that of its decisions: they take a fifth of the time at most.
const REST: u32 = 4;
/// The same before the explanations are brought up to date: that takes a twentieth of the time at most.
const REFRESH_REST: u32 = 20;
/// Maximum number of explanations: each is decided at every refresh.
const MAX_REQUESTS: usize = 100;

/// Why a pod is not explained.
#[derive(Debug, thiserror::Error)]
enum ExplanationError {
    /// The cluster cannot be read.
    #[error("cannot read the cluster")]
    List(#[from] ListError),
    /// The pod does not exist.
    #[error(transparent)]
    Explain(#[from] ExplainError),
    /// The decision panicked.
    #[error("the decision was aborted")]
    Aborted(#[from] JoinError),
}

/// The explanations of one reading of the requests, all of the same snapshot.
struct Round<'a> {
    client: &'a Client,
    settings: &'a Settings,
    /// Read for the first explanation.
    objects: Option<Arc<Objects>>,
    /// Whether the cluster cannot be read now.
    is_unreadable: bool,
}

impl Round<'_> {
    async fn explain(&mut self, namespace: &str, name: &str) -> Result<Report, ExplanationError> {
        let objects = match &self.objects {
            Some(objects) => Arc::clone(objects),
            None => {
                let read = Box::pin(snapshot::fetch(self.client)).await;
                self.is_unreadable = read.is_err();
                let objects = read?.trimmed();
                Arc::clone(self.objects.insert(Arc::new(objects)))
            }
        };
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        let settings = self.settings.clone();
        // Outside the tasks that must not wait.
        let decide = move || {
            let (mut snapshot, _) = objects.as_ref().clone().into_snapshot();
            explain::pod_with_changes(&mut snapshot, &namespace, &name, &settings)
        };
        Ok(tokio::task::spawn_blocking(decide).await??)
    }
}

/// Serves the requests during the term.
pub async fn maintain(client: Client, settings: &Settings, term: &Term) {
    let all: Api<Listed<PlacementExplanation>> = Api::all(client.clone());
    // From the cache of the API server.
    let cached = ListParams::default().match_any();
    let mut pace = Pace::new(Instant::now());
    for reading in 0.. {
        match all.list(&cached).await {
            Ok(list) => {
                let (requests, _) = Listed::split(list.items);
                let start = Instant::now();
                let mut round = Round {
                    client: &client,
                    settings,
                    objects: None,
                    is_unreadable: false,
                };
                for request in in_turn(requests, reading, MAX_REQUESTS) {
                    if !term.is_valid() {
                        return;
                    }
                    if round.is_unreadable {
                        break;
                    }
                    let is_due = pace.is_due(start, request.status.is_none());
                    if let Err(error) = serve(&mut round, &request, is_due).await {
                        tracing::warn!(
                            error = describe(&error),
                            namespace = request.namespace(),
                            name = request.name_any(),
                            "cannot write a PlacementExplanation"
                        );
                    }
                }
                if round.objects.is_some() || round.is_unreadable {
                    pace.worked(start, Instant::now());
                }
                tokio::time::sleep(PERIOD).await;
            }
            Err(error) => {
                let is_absent = matches!(&error, kube::Error::Api(status) if status.code == 404);
                if !is_absent {
                    tracing::warn!(
                        error = describe(&error),
                        "cannot list PlacementExplanations"
                    );
                }
                tokio::time::sleep(RECHECK).await;
            }
        }
    }
}

/// Keeps the work for explanations, which any tenant can request, a small part of the leader's time.
struct Pace {
    /// When the cluster may be read again for new requests.
    next: Instant,
    /// When it may be read again for all requests.
    refresh: Instant,
}

impl Pace {
    const fn new(now: Instant) -> Self {
        Self {
            next: now,
            refresh: now,
        }
    }

    fn is_due(&self, now: Instant, is_new: bool) -> bool {
        now >= self.refresh || is_new && now >= self.next
    }

    /// The cluster was read, and pods were decided, in this time.
    fn worked(&mut self, start: Instant, end: Instant) {
        let took = end.saturating_duration_since(start);
        if start >= self.refresh {
            self.refresh = end + REFRESH.max(took * REFRESH_REST);
        }
        self.next = end + took * REST;
    }
}

/// Returns the requests of a reading: the expired ones, which are deleted, and `max` others, as many of each namespace as there are.
/// New ones of a namespace come first. `reading` says which namespaces come first if there are too many.
fn in_turn(
    requests: Vec<PlacementExplanation>,
    reading: usize,
    max: usize,
) -> Vec<PlacementExplanation> {
    let now = Timestamp::now();
    let (mut chosen, others): (Vec<_>, Vec<_>) = requests
        .into_iter()
        .partition(|request| is_expired(request, now));
    let mut namespaces: BTreeMap<String, Vec<_>> = BTreeMap::new();
    for request in others {
        let namespace = request.namespace().unwrap_or_default();
        namespaces.entry(namespace).or_default().push(request);
    }
    let mut namespaces: VecDeque<_> = namespaces.into_values().collect();
    for requests in &mut namespaces {
        // The last one is the next one.
        requests.sort_by_key(|request| request.status.is_none());
    }
    if !namespaces.is_empty() {
        namespaces.rotate_left(reading % namespaces.len());
    }
    let most = chosen.len() + max;
    while chosen.len() < most
        && let Some(mut requests) = namespaces.pop_front()
    {
        if let Some(request) = requests.pop() {
            chosen.push(request);
            namespaces.push_back(requests);
        }
    }
    chosen
}

async fn serve(
    round: &mut Round<'_>,
    request: &PlacementExplanation,
    is_due: bool,
) -> kube::Result<()> {
    let namespace = request.namespace().unwrap_or_default();
    let requests: Api<PlacementExplanation> = Api::namespaced(round.client.clone(), &namespace);
    let name = request.name_any();
    let now = Timestamp::now();
    if is_expired(request, now) {
        let preconditions = Preconditions {
            uid: request.uid(),
            resource_version: None,
        };
        let delete = DeleteParams::default().preconditions(preconditions);
        return ignore_outdated(requests.delete(&name, &delete).await.map(drop));
    }
    if !is_due {
        return Ok(());
    }
    let explained = round.explain(&namespace, &request.spec.pod_name).await;
    let mut status = match explained {
        Ok(report) => status(report),
        Err(ExplanationError::Explain(ExplainError::PodMissing { .. })) => {
            PlacementExplanationStatus {
                state: State::POD_MISSING.to_owned(),
                summary: format!("pod {} does not exist", request.spec.pod_name),
                ..PlacementExplanationStatus::default()
            }
        }
        Err(error) => {
            tracing::warn!(
                error = describe(&error),
                namespace,
                name,
                "cannot explain a pod"
            );
            return Ok(());
        }
    };
    status.changed_at = request
        .status
        .as_ref()
        .and_then(|before| before.changed_at.clone());
    if request.status.as_ref() == Some(&status) {
        return Ok(());
    }
    let seconds = Timestamp::from_second(now.as_second()).unwrap_or(now);
    status.changed_at = Some(Time(seconds));
    let explained = PlacementExplanation {
        status: Some(status),
        ..request.clone()
    };
    let parameters = PostParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PostParams::default()
    };
    let written = requests
        .replace_status(&name, &parameters, &explained)
        .await;
    ignore_outdated(written.map(drop))
}

fn is_expired(request: &PlacementExplanation, now: Timestamp) -> bool {
    let created = request.metadata.creation_timestamp.as_ref();
    let ttl = SignedDuration::try_from(request.spec.ttl()).unwrap_or(SignedDuration::MAX);
    created.is_some_and(|created| now.duration_since(created.0) >= ttl)
}

fn status(mut report: Report) -> PlacementExplanationStatus {
    report.hide_other_namespaces();
    let blockers = report.blockers.iter().take(MAX_BLOCKERS);
    PlacementExplanationStatus {
        state: report.state.as_str().to_owned(),
        summary: report.summary.clone(),
        reasons: report
            .reasons
            .iter()
            .map(|(reason, nodes)| (reason.clone(), u32::try_from(*nodes).unwrap_or(u32::MAX)))
            .collect(),
        blockers: blockers
            .map(|blocker| PlacementBlocker {
                node: blocker.node.clone(),
                device: (!blocker.device.is_empty()).then(|| blocker.device.clone()),
                reason: blocker.reason.clone(),
                detail: blocker.detail.clone(),
            })
            .collect(),
        changes: report.changes.iter().map(Change::text).collect(),
        reserved: report.reserved,
        advice: report.advice,
        changed_at: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use drava_explanation::explain;
    use drava_explanation::fixture::{settings, snapshot};
    use kube::client::Body;
    use serde_json::json;
    use tokio::sync::Notify;

    use super::*;
    use crate::fixture::response;
    use crate::operate::clock::Clock;

    /// Returns the paths of the requests of one round to an API server with these requests for explanations. The cluster is
    /// readable or not.
    async fn paths_of_round(names: &[&str], readable: bool) -> Vec<String> {
        let requests: Vec<_> = names
            .iter()
            .map(|name| {
                let mut request = request(None);
                request.metadata.name = Some((*name).to_owned());
                request.metadata.namespace = Some("default".to_owned());
                request.metadata.creation_timestamp = Some(Time(Timestamp::now()));
                request
            })
            .collect();
        let paths = Arc::new(Mutex::new(Vec::new()));
        let served = Arc::clone(&paths);
        let next_round = Arc::new(Notify::new());
        let starts_next = Arc::clone(&next_round);
        let service = tower::service_fn(move |http: http::Request<Body>| {
            let path = format!("{} {}", http.method(), http.uri().path());
            let (code, body) = match path.as_str() {
                path if path.ends_with("/placementexplanations") => {
                    (200, json!({"metadata": {}, "items": requests}))
                }
                path if path.starts_with("PUT") => (200, json!(requests[0])),
                path if readable && path.contains("/gpucontrollerleaders/") => (
                    200,
                    json!({"metadata": {"name": "drava-controller"}, "spec": {"holder": "a"}}),
                ),
                _ if readable => (200, json!({"metadata": {}, "items": []})),
                _ => (
                    500,
                    json!({"metadata": {}, "code": 500, "reason": "InternalError"}),
                ),
            };
            let mut served = served.lock().expect("the paths");
            let is_next = served.contains(&path) && path.ends_with("/placementexplanations");
            served.push(path);
            let starts_next = Arc::clone(&starts_next);
            async move {
                if is_next {
                    starts_next.notify_one();
                    std::future::pending::<()>().await;
                }
                Ok::<_, std::convert::Infallible>(response(code, &body))
            }
        });
        let client = Client::new(service, "default");
        let term = Term::new(Clock::new(|| Duration::ZERO), Duration::MAX);
        let settings = settings();
        tokio::select! {
            () = maintain(client, &settings, &term) => {}
            () = next_round.notified() => {}
        }
        let paths = paths.lock().expect("the paths");
        paths.clone()
    }

    #[tokio::test(start_paused = true)]
    async fn reads_the_cluster_once_for_all_requests() {
        let paths = paths_of_round(&["a", "b", "c"], true).await;
        let count = |start: &str, end: &str| {
            let paths = paths.iter();
            let found = paths.filter(|path| path.starts_with(start) && path.ends_with(end));
            found.count()
        };
        assert_eq!(count("PUT", "/status"), 3, "{paths:?}");
        assert_eq!(count("GET", "/api/v1/pods"), 1, "{paths:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn leaves_a_cluster_that_cannot_be_read_alone_until_the_next_round() {
        let paths = paths_of_round(&["a", "b", "c"], false).await;
        let reads = paths.iter().filter(|path| path.ends_with("/nodes"));
        assert_eq!(reads.count(), 1, "{paths:?}");
        assert!(
            !paths.iter().any(|path| path.starts_with("PUT")),
            "{paths:?}"
        );
    }

    fn request(ttl: Option<u32>) -> PlacementExplanation {
        let spec = json!({"podName": "big", "ttlSeconds": ttl});
        let mut request =
            PlacementExplanation::new("why", serde_json::from_value(spec).expect("a spec"));
        let created = "2026-01-01T00:00:00Z".parse().expect("a time");
        request.metadata.creation_timestamp = Some(Time(created));
        request
    }

    #[test]
    fn no_namespace_shuts_out_another() {
        let of = |namespace: &str, name: usize, is_new: bool| {
            let mut request = request(Some(60));
            request.metadata.namespace = Some(namespace.to_owned());
            request.metadata.name = Some(format!("{name:03}"));
            request.metadata.creation_timestamp = Some(Time(Timestamp::now()));
            request.status = (!is_new).then(PlacementExplanationStatus::default);
            request
        };
        let mut requests: Vec<_> = (0..300).map(|name| of("a", name, name == 299)).collect();
        requests.push(of("b", 0, true));
        requests.push(request(Some(60)));
        let names = |reading| -> Vec<String> {
            let chosen = in_turn(requests.clone(), reading, 4).into_iter();
            chosen
                .map(|one| format!("{}/{}", one.namespace().unwrap_or_default(), one.name_any()))
                .collect()
        };
        // The expired one is deleted in any case.
        assert_eq!(names(0), ["/why", "a/299", "b/000", "a/298", "a/297"]);
        assert_eq!(names(1), ["/why", "b/000", "a/299", "a/298", "a/297"]);
        assert_eq!(in_turn(Vec::new(), 3, 4), []);
    }

    #[test]
    fn explanations_take_a_small_part_of_the_time() {
        let (start, seconds) = (Instant::now(), Duration::from_secs);
        let mut pace = Pace::new(start);
        assert!(pace.is_due(start, false));
        pace.worked(start, start + seconds(3));
        let due = |pace: &Pace, after, is_new| pace.is_due(start + seconds(after), is_new);
        assert!(!due(&pace, 14, true) && due(&pace, 15, true));
        assert!(!due(&pace, 62, false) && due(&pace, 63, false));
        // New requests do not put off the others.
        pace.worked(start + seconds(15), start + seconds(16));
        assert!(!due(&pace, 19, true) && due(&pace, 20, true));
        assert!(!due(&pace, 62, false) && due(&pace, 63, false));
        // A small cluster is read every ten seconds.
        pace.worked(start + seconds(63), start + seconds(63));
        assert!(!due(&pace, 72, false) && due(&pace, 73, false));
    }

    #[test]
    fn expires_after_its_time_or_an_hour() {
        let at = |text: &str| text.parse().expect("a time");
        let one = request(Some(60));
        assert!(!is_expired(&one, at("2026-01-01T00:00:59Z")));
        assert!(is_expired(&one, at("2026-01-01T00:01:00Z")));
        let default = request(None);
        assert!(!is_expired(&default, at("2026-01-01T00:59:59Z")));
        assert!(is_expired(&default, at("2026-01-01T01:00:00Z")));
    }

    #[test]
    fn status_has_what_the_report_has() {
        let mut cluster = snapshot();
        cluster.reservations.push(
            serde_json::from_value(json!({
                "namespace": "default", "pod": "big", "claim": "big", "purpose": "HeadOfQueue",
                "devices": [{"request": "gpu", "pool": "n1/gpus", "device": "gpu-0-vgpu"}],
            }))
            .expect("a reservation"),
        );
        let report = explain::pod_with_changes(&mut cluster, "default", "big", &settings());
        let mut report = report.expect("a report");
        report.advice.push("did you mean 8Gi?".to_owned());
        let (reserved, advice) = (report.reserved.clone(), report.advice.clone());
        let status = status(report);
        assert_eq!(reserved, ["gpu-0-vgpu of pool n1/gpus"]);
        assert_eq!((status.reserved, status.advice), (reserved, advice));
        assert_eq!(status.state, "Infeasible");
        assert!(
            status.summary.starts_with("0/1 nodes:"),
            "{}",
            status.summary
        );
        assert_eq!(status.reasons.values().sum::<u32>(), 1);
        assert!(!status.blockers.is_empty());
        assert!(
            status
                .changes
                .iter()
                .any(|change| change.contains("request at most")),
            "{:?}",
            status.changes
        );
    }
}
