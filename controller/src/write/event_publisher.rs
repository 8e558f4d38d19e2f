//! Publishes core/v1 Events and conditions of pods. A failure is logged and blocks nothing; an event that may succeed later
//! is returned, and the write of a condition is repeated.
//!
//! The write of a condition names the version of the pod for which it was decided. So a write that is executed late, after
//! another replica leads, changes no pod that this one has changed. After a conflict the newer version is read, within the term.

use std::sync::Arc;
use std::time::Duration;

use drava_api::error::describe;
use drava_api::listed::Listed;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::report_queue::{ConditionWrite, Report, ReportQueue};
use crate::action::event::PendingEvent;
use crate::operate::metrics::Metrics;
use crate::pods::pod_condition::PodConditionUpdate;
use crate::write::lease::Term;
use crate::write::metadata_answer;
use crate::write::writes::FIELD_MANAGER;

mod report_queue;
#[cfg(test)]
mod tests;

/// Maximum number of queued events.
const QUEUE_LENGTH: usize = 4096;
/// Maximum number of requests in flight: reports leave most of the API server to allocations.
const MAX_IN_FLIGHT: usize = 8;
/// Maximum attempts of a write after conflicts.
const CONFLICT_LIMIT: u32 = 5;
/// Time-out of one request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Cause of a failure without a response.
const TIMED_OUT: &str = "request timed out";
/// Maximum message length in the API.
const MAX_MESSAGE_BYTES: usize = 1024;
/// Maximum length of the object's name in the event's name.
const MAX_NAME_BYTES: usize = 200;

/// Queues of a task that publishes events and conditions.
#[derive(Debug)]
pub struct EventPublisher {
    events: mpsc::Sender<PendingEvent>,
    /// Without a limit: the task moves the conditions to its [`ReportQueue`] at once.
    conditions: mpsc::UnboundedSender<PodConditionUpdate>,
    failed: mpsc::Receiver<PendingEvent>,
}

/// The task.
struct Task {
    client: Client,
    term: Arc<Term>,
    metrics: Arc<Metrics>,
    events: mpsc::Receiver<PendingEvent>,
    conditions: mpsc::UnboundedReceiver<PodConditionUpdate>,
    failures: mpsc::Sender<PendingEvent>,
    queue: ReportQueue,
}

/// What is to be repeated after a write.
enum Outcome {
    Ended,
    EventFailed(PendingEvent),
    ConditionFailed(ConditionWrite),
}

impl EventPublisher {
    /// Starts the task. When the publisher is dropped, the task publishes the queued events and ends; the next leader writes
    /// the conditions, of which none is sent after `term`. `metrics` show how long pods wait for their first condition.
    #[must_use]
    pub fn start(client: Client, term: Arc<Term>, metrics: Arc<Metrics>) -> Self {
        let (events, queued_events) = mpsc::channel(QUEUE_LENGTH);
        let (conditions, queued_conditions) = mpsc::unbounded_channel();
        let (failures, failed) = mpsc::channel(QUEUE_LENGTH);
        let task = Task {
            client,
            term,
            metrics,
            events: queued_events,
            conditions: queued_conditions,
            failures,
            queue: ReportQueue::default(),
        };
        tokio::spawn(task.run());
        Self {
            events,
            conditions,
            failed,
        }
    }

    /// Queues an event.
    ///
    /// # Errors
    /// Returns the event when the queue is full.
    pub fn publish(&self, event: PendingEvent) -> Result<(), Box<PendingEvent>> {
        self.events
            .try_send(event)
            .map_err(|error| Box::new(error.into_inner()))
    }

    /// Queues a condition. It replaces an older one of the pod and type that is not written yet.
    pub(crate) fn write_condition(&self, update: PodConditionUpdate) {
        // The task runs as long as the publisher exists.
        let _ = self.conditions.send(update);
    }

    /// Returns the next event that could not be published and may be published later.
    pub async fn next_failed(&mut self) -> Option<PendingEvent> {
        self.failed.recv().await
    }
}

impl Task {
    async fn run(mut self) {
        let mut writes = FuturesUnordered::new();
        let mut is_open = true;
        loop {
            while writes.len() < MAX_IN_FLIGHT
                && let Some(report) = self.queue.start_next(Instant::now())
            {
                let (client, term) = (self.client.clone(), Arc::clone(&self.term));
                let metrics = Arc::clone(&self.metrics);
                writes.push(async move {
                    let uid = report.uid();
                    (uid, write(&client, &term, report, &metrics).await)
                });
            }
            let due = self.queue.next_due();
            tokio::select! {
                update = self.conditions.recv(), if is_open => match update {
                    Some(update) => self.queue_conditions(update),
                    None => {
                        is_open = false;
                        self.queue.drop_conditions();
                    }
                },
                Some(event) = self.events.recv(), if self.queue.has_place_for_event() => {
                    self.queue.push_event(event);
                }
                Some((uid, outcome)) = writes.next() => {
                    self.queue.ended(&uid);
                    match outcome {
                        Outcome::ConditionFailed(write) if is_open => {
                            self.queue.repeat(write, Instant::now());
                        }
                        Outcome::EventFailed(event) => {
                            // The channel is closed when the leader stops; the next leader publishes its own events.
                            let _ = self.failures.try_send(event);
                        }
                        Outcome::Ended | Outcome::ConditionFailed(_) => {}
                    }
                }
                () = at(due), if due.is_some() && writes.len() < MAX_IN_FLIGHT => {}
                else => return,
            }
        }
    }

    /// Queues this condition and all others that have been sent, before the next write.
    fn queue_conditions(&mut self, update: PodConditionUpdate) {
        let now = Instant::now();
        self.queue.push_condition(update, now);
        while let Ok(update) = self.conditions.try_recv() {
            self.queue.push_condition(update, now);
        }
    }
}

/// Writes a report.
async fn write(client: &Client, term: &Term, report: Report, metrics: &Metrics) -> Outcome {
    match report {
        Report::Event(event) => match publish(client, event).await {
            Some(event) => Outcome::EventFailed(event),
            None => Outcome::Ended,
        },
        Report::Condition(write) => match in_time(write_condition(client, term, &write.update))
            .await
        {
            Some(Ok(is_written)) => {
                if is_written && let Some(created) = write.update.waits_since {
                    metrics.explained(Timestamp::now().duration_since(created));
                }
                Outcome::Ended
            }
            failure => {
                let error = failure.and_then(Result::err);
                let is_rejected = error.as_ref().is_some_and(is_rejected);
                let cause = error.map_or_else(|| TIMED_OUT.to_owned(), |error| describe(&error));
                let pod = &write.update.pod;
                tracing::warn!(
                    error = cause,
                    namespace = pod.namespace,
                    pod = pod.name,
                    is_rejected,
                    "cannot write the condition of a pod"
                );
                if is_rejected {
                    Outcome::Ended
                } else {
                    Outcome::ConditionFailed(write)
                }
            }
        },
    }
}

/// Publishes an event; returns it if the failure is temporary.
async fn publish(client: &Client, pending: PendingEvent) -> Option<PendingEvent> {
    let namespace = pending
        .regarding
        .namespace
        .clone()
        .unwrap_or_else(|| "default".to_owned());
    let object = pending.regarding.name.clone().unwrap_or_default();
    let event = event(pending.clone(), &namespace, Timestamp::now());
    let api: Api<Event> = Api::namespaced(client.clone(), &namespace);
    let parameters = PostParams::default();
    let (cause, is_rejected) = match in_time(api.create(&parameters, &event)).await {
        Some(Ok(_)) => return None,
        Some(Err(error)) => (describe(&error), is_rejected(&error)),
        None => (TIMED_OUT.to_owned(), false),
    };
    tracing::warn!(
        error = cause,
        namespace,
        object,
        reason = event.reason,
        "cannot publish an event"
    );
    (!is_rejected).then_some(pending)
}

/// Returns the response; `None` if there is none in time. A request that is never answered must not occupy a place for ever.
async fn in_time<T>(request: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(REQUEST_TIMEOUT, request).await.ok()
}

/// Waits until this time; forever without a time.
async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// Returns whether the API server would reject the request again, for example of a deleted namespace.
fn is_rejected(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status)
        if (400..500).contains(&status.code) && ![408, 409, 429].contains(&status.code))
}

/// Writes a condition of the pod of this UID. Returns whether it is written: not after the term, nor to a deleted pod. The
/// admission policy `drava-controller-pod-status` allows no other change.
async fn write_condition(
    client: &Client,
    term: &Term,
    update: &PodConditionUpdate,
) -> kube::Result<bool> {
    let PodConditionUpdate { pod, condition, .. } = update;
    let namespace = pod.namespace.as_deref().unwrap_or("default");
    let name = pod.name.as_deref().unwrap_or_default();
    let pods: Api<Listed<Pod>> = Api::namespaced(client.clone(), namespace);
    let parameters = PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let mut version = pod.resource_version.clone();
    for attempt in 1.. {
        if !term.is_valid() {
            return Ok(false);
        }
        let patch = json!({
            "metadata": {"uid": pod.uid, "resourceVersion": version},
            "status": {"conditions": [condition]},
        });
        let patch = Patch::Strategic(&patch);
        match metadata_answer::patch_status(&pods, name, &parameters, &patch).await {
            Ok(_) => return Ok(true),
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(false),
            Err(kube::Error::Api(status)) if status.code == 409 && attempt < CONFLICT_LIMIT => {}
            Err(error) => return Err(error),
        }
        match pods.get_opt(name).await? {
            Some(found) if found.uid() == pod.uid => version = found.resource_version(),
            // Deleted, or replaced by a pod of the same name.
            Some(_) | None => return Ok(false),
        }
    }
    Ok(false)
}

fn event(pending: PendingEvent, namespace: &str, now: Timestamp) -> Event {
    let object = pending.regarding.name.as_deref().unwrap_or_default();
    let time = Time(now);
    let component = pending.reason.component().as_str().to_owned();
    Event {
        metadata: ObjectMeta {
            name: Some(format!(
                "{}.{:x}",
                truncate(object, MAX_NAME_BYTES),
                now.as_nanosecond()
            )),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        type_: Some(pending.reason.event_type().as_str().to_owned()),
        reason: Some(pending.reason.as_str().to_owned()),
        message: Some(truncate(&pending.message, MAX_MESSAGE_BYTES).to_owned()),
        involved_object: pending.regarding,
        source: Some(EventSource {
            component: Some(component.clone()),
            host: None,
        }),
        reporting_component: Some(component),
        first_timestamp: Some(time.clone()),
        last_timestamp: Some(time),
        count: Some(1),
        ..Event::default()
    }
}

/// Returns at most `limit` bytes, cut at a character boundary.
fn truncate(text: &str, limit: usize) -> &str {
    let mut end = text.len().min(limit);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}
