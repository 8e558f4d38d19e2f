//! Publishes core/v1 Events and conditions of pods. A failure is logged and blocks nothing; an event that may succeed later
//! is returned, and the write of a condition is repeated.

use std::sync::Arc;

use drava_api::error::describe;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, EventSource, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::condition_retries::ConditionRetries;
use crate::event::PendingEvent;
use crate::metrics::Metrics;
use crate::pod_condition::PodConditionUpdate;
use crate::writes::FIELD_MANAGER;

mod condition_retries;
#[cfg(test)]
mod tests;

/// Maximum number of queued events.
const QUEUE_LENGTH: usize = 4096;
/// Maximum message length in the API.
const MAX_MESSAGE_BYTES: usize = 1024;
/// Maximum length of the object's name in the event's name.
const MAX_NAME_BYTES: usize = 200;

/// What is published.
#[derive(Debug)]
enum Report {
    Event(PendingEvent),
    Condition(PodConditionUpdate),
}

/// Queue of a task that publishes events and conditions.
#[derive(Debug)]
pub struct EventPublisher {
    queue: mpsc::Sender<Report>,
    failed: mpsc::Receiver<PendingEvent>,
}

impl EventPublisher {
    /// Starts the task; it ends when the publisher is dropped and the queue is empty. `metrics` show how long pods wait for
    /// their first condition.
    #[must_use]
    pub fn start(client: Client, metrics: Arc<Metrics>) -> Self {
        let (queue, mut reports) = mpsc::channel(QUEUE_LENGTH);
        let (failures, failed) = mpsc::channel(QUEUE_LENGTH);
        tokio::spawn(async move {
            let mut retries = ConditionRetries::default();
            loop {
                let report = tokio::select! {
                    report = reports.recv() => report,
                    () = at(retries.next_due()) => {
                        if let Some(update) = retries.start_due(Instant::now()) {
                            write_or_repeat(&client, update, &mut retries, &metrics).await;
                        }
                        continue;
                    }
                };
                match report {
                    Some(Report::Event(event)) => {
                        if let Some(event) = publish(&client, event).await {
                            // The channel is closed when the leader stops; the next leader publishes its own events.
                            let _ = failures.try_send(event);
                        }
                    }
                    Some(Report::Condition(update)) => {
                        retries.forget(&update);
                        write_or_repeat(&client, update, &mut retries, &metrics).await;
                    }
                    None => return,
                }
            }
        });
        Self { queue, failed }
    }

    /// Queues an event.
    ///
    /// # Errors
    /// Returns the event when the queue is full.
    pub fn publish(&self, event: PendingEvent) -> Result<(), Box<PendingEvent>> {
        match self.queue.try_reserve() {
            Ok(place) => {
                place.send(Report::Event(event));
                Ok(())
            }
            Err(_) => Err(Box::new(event)),
        }
    }

    /// Queues a condition; it is dropped when the queue is full, and written with a later event or change of the pod.
    pub(crate) fn write_condition(&self, update: PodConditionUpdate) {
        if self.queue.try_send(Report::Condition(update)).is_err() {
            tracing::warn!("too many reports are queued; the condition of a pod is written later");
        }
    }

    /// Returns the next event that could not be published and may be published later.
    pub async fn next_failed(&mut self) -> Option<PendingEvent> {
        self.failed.recv().await
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
    let Err(error) = api.create(&PostParams::default(), &event).await else {
        return None;
    };
    tracing::warn!(
        error = describe(&error),
        namespace,
        object,
        reason = event.reason,
        "cannot publish an event"
    );
    (!is_rejected(&error)).then_some(pending)
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
        if (400..500).contains(&status.code) && ![408, 429].contains(&status.code))
}

/// Writes a condition, and again later if the failure is temporary.
async fn write_or_repeat(
    client: &Client,
    update: PodConditionUpdate,
    retries: &mut ConditionRetries,
    metrics: &Metrics,
) {
    let Err(error) = write_condition(client, &update).await else {
        if let Some(created) = update.waits_since {
            metrics.explained(Timestamp::now().duration_since(created));
        }
        return retries.forget(&update);
    };
    let (namespace, pod) = (update.pod.namespace.clone(), update.pod.name.clone());
    let is_repeated = if is_rejected(&error) {
        retries.forget(&update);
        false
    } else {
        retries.failed(update, Instant::now())
    };
    let error = describe(&error);
    tracing::warn!(
        error,
        namespace,
        pod,
        is_repeated,
        "cannot write the condition of a pod"
    );
}

/// Writes a condition of the pod of this UID. The admission policy `drava-controller-pod-status` allows no other change.
async fn write_condition(client: &Client, update: &PodConditionUpdate) -> kube::Result<()> {
    let PodConditionUpdate { pod, condition, .. } = update;
    let namespace = pod.namespace.as_deref().unwrap_or("default");
    let name = pod.name.as_deref().unwrap_or_default();
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let patch = json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}});
    let parameters = PatchParams {
        field_manager: Some(FIELD_MANAGER.to_owned()),
        ..PatchParams::default()
    };
    let patch = Patch::Strategic(&patch);
    match pods.patch_status(name, &parameters, &patch).await {
        Ok(_) => Ok(()),
        // Deleted, or replaced by a pod of the same name.
        Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
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
