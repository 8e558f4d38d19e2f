use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drava_api::event::EventReason;
use http::Request;
use http_body_util::BodyExt;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::client::Body;
use serde_json::Value;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::*;
use crate::fixture::{response, wants_metadata};
use crate::operate::clock::Clock;
use crate::pods::pod_condition::{PodConditionUpdate, allocated};

#[test]
fn truncates_at_character_boundary() {
    assert_eq!(truncate("abc", 2), "ab");
    assert_eq!(truncate("aé", 2), "a");
    assert_eq!(truncate("a", 2), "a");
}

/// A request that the API server has served.
#[derive(Debug)]
struct Served {
    /// Name of the object.
    object: String,
    is_event: bool,
    text: String,
    start: Duration,
    end: Duration,
}

impl Served {
    fn overlaps(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end
    }
}

/// The requests that the API server receives.
struct Requests {
    started: UnboundedReceiver<()>,
    served: UnboundedReceiver<Served>,
}

impl Requests {
    /// Waits until one more request has started.
    async fn started(&mut self) {
        self.started.recv().await.unwrap();
    }

    /// Waits until one more request is served.
    async fn next(&mut self) -> Served {
        self.served.recv().await.unwrap()
    }

    /// Returns the requests until there is none for ten minutes.
    async fn rest(&mut self) -> Vec<Served> {
        let mut requests = Vec::new();
        let limit = Duration::from_secs(600);
        while let Ok(Some(request)) = tokio::time::timeout(limit, self.served.recv()).await {
            requests.push(request);
        }
        requests
    }

    /// As [`Self::rest`]; object, text and second of each.
    async fn all(&mut self) -> Vec<(String, String, u64)> {
        let requests = self.rest().await.into_iter();
        requests
            .map(|request| (request.object, request.text, request.end.as_secs()))
            .collect()
    }
}

/// Starts a publisher whose API server responds with these status codes, then with 200.
fn publisher(codes: &[u16]) -> (EventPublisher, Requests) {
    publisher_with(codes, |_| 0, Arc::default())
}

/// As [`publisher`]; the API server takes that time for the n-th request, in milliseconds.
fn publisher_with(
    codes: &[u16],
    latency_ms: fn(u64) -> u64,
    metrics: Arc<Metrics>,
) -> (EventPublisher, Requests) {
    let responses = Arc::new(Mutex::new((0, VecDeque::from(codes.to_vec()))));
    let (log, served) = unbounded_channel();
    let (starts, started) = unbounded_channel();
    let epoch = Instant::now();
    let service = tower::service_fn(move |request: Request<Body>| {
        let (log, responses) = (log.clone(), Arc::clone(&responses));
        starts.send(()).unwrap();
        async move {
            let start = epoch.elapsed();
            let (number, code) = {
                let mut responses = responses.lock().unwrap();
                responses.0 += 1;
                (responses.0, responses.1.pop_front().unwrap_or(200))
            };
            let wants_metadata = wants_metadata(request.headers());
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let body: Value = serde_json::from_slice(&body).unwrap();
            let is_event = body["message"].is_string();
            assert_eq!(
                wants_metadata, !is_event,
                "no pod is read again after the write of its condition"
            );
            let (uid, text) = if is_event {
                (&body["involvedObject"]["uid"], &body["message"])
            } else {
                let condition = &body["status"]["conditions"][0];
                (&body["metadata"]["uid"], &condition["message"])
            };
            tokio::time::sleep(Duration::from_millis(latency_ms(number))).await;
            let request = Served {
                object: uid.as_str().unwrap().trim_start_matches("uid-").to_owned(),
                is_event,
                text: text.as_str().unwrap().to_owned(),
                start,
                end: epoch.elapsed(),
            };
            log.send(request).unwrap();
            Ok::<_, tower::BoxError>(response(code, &json!({"metadata": {}})))
        }
    });
    let client = Client::new(service, "default");
    let publisher = EventPublisher::start(client, term(|| false), metrics);
    (publisher, Requests { started, served })
}

/// A term that has ended when `has_ended` says so.
fn term(has_ended: impl Fn() -> bool + Send + Sync + 'static) -> Arc<Term> {
    let clock = Clock::new(move || Duration::from_secs(has_ended().into()));
    Arc::new(Term::new(clock, Duration::from_secs(1)))
}

/// Writes a condition that was decided for version 1 of a pod, which another writer changes `changes` times: before each of so
/// many patches. Returns the requests; the term ends with the first one if `term_ends`, and `uid` is that of the pod by then.
async fn requests_after_changes(changes: usize, term_ends: bool, uid: &'static str) -> Vec<String> {
    let (log, mut requests) = unbounded_channel();
    let version = Arc::new(AtomicUsize::new(1));
    let has_started = Arc::new(AtomicBool::new(false));
    let started = Arc::clone(&has_started);
    let service = tower::service_fn(move |request: Request<Body>| {
        let (log, version) = (log.clone(), Arc::clone(&version));
        started.store(true, Ordering::Relaxed);
        async move {
            let method = request.method().to_string();
            let body = request.into_body().collect().await.unwrap().to_bytes();
            let body: Value = serde_json::from_slice(&body).unwrap_or_default();
            let sent = body["metadata"]["resourceVersion"].as_str();
            log.send(format!("{method} {}", sent.unwrap_or_default()))
                .unwrap();
            if sent.is_some() && version.load(Ordering::Relaxed) <= changes {
                version.fetch_add(1, Ordering::Relaxed);
            }
            let newest = version.load(Ordering::Relaxed).to_string();
            let code = match sent {
                Some(sent) if sent != newest => 409,
                _ => 200,
            };
            let pod = json!({"metadata": {"name": "a", "uid": uid, "resourceVersion": newest}});
            Ok::<_, tower::BoxError>(response(code, &pod))
        }
    });
    let client = Client::new(service, "default");
    let term = term(move || term_ends && has_started.load(Ordering::Relaxed));
    let publisher = EventPublisher::start(client, term, Arc::default());
    let mut update = update("a", "full");
    update.pod.resource_version = Some("1".to_owned());
    publisher.write_condition(update);
    let mut all = Vec::new();
    let limit = Duration::from_secs(600);
    while let Ok(Some(request)) = tokio::time::timeout(limit, requests.recv()).await {
        all.push(request);
    }
    all
}

#[tokio::test(start_paused = true)]
async fn condition_of_older_version_is_written_within_the_term_only() {
    let requests = requests_after_changes(0, false, "uid-a").await;
    assert_eq!(requests, ["PATCH 1"]);
    let requests = requests_after_changes(2, false, "uid-a").await;
    assert_eq!(requests, ["PATCH 1", "GET ", "PATCH 2", "GET ", "PATCH 3"]);
    let requests = requests_after_changes(1, true, "uid-a").await;
    assert_eq!(requests, ["PATCH 1", "GET "], "another replica leads");
    let requests = requests_after_changes(1, false, "uid-other").await;
    assert_eq!(requests, ["PATCH 1", "GET "], "another pod of that name");
}

fn reference(pod: &str) -> ObjectReference {
    ObjectReference {
        name: Some(pod.to_owned()),
        namespace: Some("default".to_owned()),
        uid: Some(format!("uid-{pod}")),
        ..ObjectReference::default()
    }
}

fn update(pod: &str, message: &str) -> PodConditionUpdate {
    let mut update = allocated(reference(pod), Timestamp::UNIX_EPOCH);
    update.condition.message = Some(message.to_owned());
    update
}

fn event(pod: &str, message: &str) -> PendingEvent {
    PendingEvent {
        regarding: reference(pod),
        reason: EventReason::GpuUnschedulable,
        message: message.to_owned(),
    }
}

fn each(conditions: &[(&str, &str, u64)]) -> Vec<(String, String, u64)> {
    let own = |(pod, message, at): &(&str, &str, u64)| ((*pod).into(), (*message).into(), *at);
    conditions.iter().map(own).collect()
}

#[tokio::test(start_paused = true)]
async fn repeats_failed_condition_until_it_is_written() {
    let (publisher, mut log) = publisher(&[500; 9]);
    publisher.write_condition(update("a", "full"));
    let times = [0, 1, 3, 7, 15, 31, 63, 127, 191, 255];
    assert_eq!(log.all().await, each(&times.map(|at| ("a", "full", at))));
}

#[tokio::test(start_paused = true)]
async fn repeats_only_newest_condition_of_each_pod() {
    let (publisher, mut log) = publisher(&[503, 503, 429, 500]);
    publisher.write_condition(update("a", "full"));
    publisher.write_condition(update("b", "full"));
    let mut written = Vec::new();
    for _ in 0..2 {
        written.push(log.next().await.text);
    }
    assert_eq!(written, ["full", "full"]);
    publisher.write_condition(update("a", "newer"));
    let expected = [
        ("a", "newer", 0),
        ("a", "newer", 1),
        ("b", "full", 1),
        ("a", "newer", 3),
    ];
    assert_eq!(log.all().await, each(&expected));
}

#[tokio::test(start_paused = true)]
async fn repeats_no_rejected_condition() {
    let (publisher, mut log) = publisher(&[403, 404]);
    publisher.write_condition(update("a", "denied"));
    publisher.write_condition(update("b", "deleted"));
    let expected = [("a", "denied", 0), ("b", "deleted", 0)];
    assert_eq!(log.all().await, each(&expected));
}

#[tokio::test(start_paused = true)]
async fn records_time_until_first_condition_is_written() {
    let metrics = Arc::new(Metrics::default());
    let (publisher, mut log) = publisher_with(&[503], |_| 0, Arc::clone(&metrics));
    let first = PodConditionUpdate {
        waits_since: Some(Timestamp::now()),
        ..update("a", "full")
    };
    publisher.write_condition(first);
    publisher.write_condition(update("b", "a later condition"));
    let expected = [
        ("a", "full", 0),
        ("b", "a later condition", 0),
        ("a", "full", 1),
    ];
    assert_eq!(log.all().await, each(&expected));
    let text = metrics.text().unwrap();
    let count = "drava_controller_pod_explanation_seconds_count";
    let count = text.lines().find(|line| line.starts_with(count)).unwrap();
    assert!(count.ends_with(" 1"), "{count}");
}

#[tokio::test(start_paused = true)]
async fn writes_all_conditions_of_burst_with_few_in_flight() {
    let (publisher, mut log) = publisher_with(&[], |_| 10, Arc::default());
    let pods: Vec<String> = (0..10_000).map(|index| format!("{index:05}")).collect();
    for pod in &pods {
        publisher.write_condition(update(pod, "full"));
    }
    let mut requests = log.rest().await;
    let last = requests.iter().map(|request| request.end).max().unwrap();
    let shortest = 0.01 * 10_000.0 / MAX_IN_FLIGHT as f64;
    let longest = 2.0 * shortest;
    assert!(
        (shortest..longest).contains(&last.as_secs_f64()),
        "{last:?}"
    );
    requests.sort_by(|left, right| left.object.cmp(&right.object));
    let written = requests.into_iter().map(|request| request.object);
    assert!(written.eq(pods), "each once");
}

#[tokio::test(start_paused = true)]
async fn newest_condition_waits_for_write_in_flight() {
    let (publisher, mut log) = publisher_with(&[500], |_| 1000, Arc::default());
    // Its write fails; the newest replaces it.
    publisher.write_condition(update("a", "old"));
    log.started().await;
    publisher.write_condition(update("a", "outdated"));
    publisher.write_condition(update("b", "other pod"));
    publisher.write_condition(update("a", "newest"));
    let requests = log.rest().await;
    let texts: Vec<&str> = requests
        .iter()
        .map(|request| request.text.as_str())
        .collect();
    assert_eq!(texts, ["old", "other pod", "newest"]);
    assert!(requests[0].overlaps(&requests[1]), "{requests:?}");
    assert!(!requests[0].overlaps(&requests[2]), "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn writes_of_one_pod_are_in_order() {
    let latency = |number: u64| number * 7919 % 1000;
    let codes: Vec<u16> = (0..300)
        .map(|number| if number % 3 == 1 { 500 } else { 200 })
        .collect();
    let (publisher, mut log) = publisher_with(&codes, latency, Arc::default());
    for number in 0..300_u64 {
        let (pod, text) = (format!("p{}", number % 7), format!("{number:03}"));
        publisher.write_condition(update(&pod, &text));
        publisher.publish(event(&pod, &text)).unwrap();
        log.started().await;
    }
    let mut requests = log.rest().await;
    requests.sort_by_key(|request| request.start);
    let mut of_pods: BTreeMap<_, Vec<&Served>> = BTreeMap::new();
    for request in &requests {
        of_pods.entry(&request.object).or_default().push(request);
    }
    assert_eq!(of_pods.len(), 7);
    for of_pod in of_pods.into_values() {
        for pair in of_pod.windows(2) {
            assert!(!pair[0].overlaps(pair[1]), "{pair:?}");
        }
        let (events, conditions): (Vec<&Served>, Vec<&Served>) =
            of_pod.into_iter().partition(|request| request.is_event);
        assert!(events.is_sorted_by_key(|event| &event.text), "{events:?}");
        assert!(
            conditions.is_sorted_by_key(|condition| &condition.text),
            "{conditions:?}"
        );
        let newest = conditions.last().map(|condition| &condition.text);
        assert_eq!(newest, events.last().map(|event| &event.text));
    }
    let events = requests.iter().filter(|request| request.is_event).count();
    assert_eq!(events, 300);
}

/// Publishes events and writes conditions of this number of objects each.
fn report_objects(publisher: &EventPublisher, count: usize) {
    for index in 0..count {
        let (object, pod) = (format!("e{index}"), format!("c{index}"));
        publisher.publish(event(&object, "full")).unwrap();
        publisher.write_condition(update(&pod, "full"));
    }
}

#[tokio::test(start_paused = true)]
async fn events_and_conditions_take_turns() {
    let (publisher, mut log) = publisher_with(&[], |_| 10, Arc::default());
    report_objects(&publisher, 100);
    let mut kinds = [0, 0];
    for _ in 0..100 {
        kinds[usize::from(log.next().await.is_event)] += 1;
    }
    assert!(
        kinds.iter().all(|count| (40..=60).contains(count)),
        "{kinds:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn returns_events_beyond_queue() {
    let (publisher, mut log) = publisher(&[]);
    let queued = (0..QUEUE_LENGTH + 10)
        .filter(|index| publisher.publish(event("a", &index.to_string())).is_ok())
        .count();
    assert_eq!(queued, QUEUE_LENGTH);
    assert_eq!(log.rest().await.len(), queued);
}

#[tokio::test(start_paused = true)]
async fn publishes_events_and_drops_conditions_after_term() {
    let (publisher, mut log) = publisher_with(&[], |_| 10, Arc::default());
    report_objects(&publisher, 100);
    log.started().await;
    drop(publisher);
    let requests = log.rest().await;
    let events = requests.iter().filter(|request| request.is_event).count();
    assert_eq!(events, 100);
    assert!(requests.len() - events <= MAX_IN_FLIGHT, "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn conditions_of_different_types_do_not_replace_each_other() {
    let (publisher, mut log) = publisher(&[503]);
    publisher.write_condition(update("a", "full"));
    let mut other = update("a", "stands still");
    other.condition.type_ = "other".to_owned();
    publisher.write_condition(other);
    let mut written = log.all().await;
    written.sort();
    let expected = [("a", "full", 0), ("a", "full", 1), ("a", "stands still", 0)];
    assert_eq!(written, each(&expected));
}
