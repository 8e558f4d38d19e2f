//! Events, and `status.devices` of claims.
//!
//! Reports are queued and written by a task, so they neither delay nor fail the reported operation. [`queue`] decides what is
//! written when: a failed write delays only its object, and a status is repeated until it is written.

pub mod conditions;
pub mod pods;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drava_api::condition::{ConditionReason, ConditionType};
use drava_api::event::{Component, EventReason};
use drava_api::names;
use drava_api::node_profile::ProfileVersion;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter as EventReporter};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::gpu_health::HealthByGpu;
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::ClaimRef;
use crate::prepare::companion::Companion;
use crate::prepare::record::ClaimRecord;
use crate::report::pods::PodRef;

mod device_status;
mod queue;

use device_status::Observed;
pub use device_status::{GrantStatus, Injection, Violation};
use queue::{Attempt, Object, Queue, Report};

/// Field manager of `status.devices`, and reporting controller of events.
const COMPONENT: &str = Component::NodeDriver.as_str();

/// Manager of the condition `Suspended`.
const SUSPEND_MANAGER: &str = "drava-suspend";

/// Manager of the condition `Idle`.
const IDLE_MANAGER: &str = "drava-idle";

/// Maximum number of writes at a time.
const MAX_WRITES: usize = 8;

/// Longest time of a write: an admission webhook may not answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// Object of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// The node.
    Node,
    /// A claim.
    Claim(ClaimRef),
    /// A pod.
    Pod(PodRef),
    /// A node profile.
    Profile(ProfileVersion),
}

const fn event_type(reason: EventReason) -> EventType {
    match reason.event_type() {
        drava_api::event::EventType::Normal => EventType::Normal,
        drava_api::event::EventType::Warning => EventType::Warning,
    }
}

/// Sender of reports; clones share the queue.
#[derive(Debug, Clone)]
pub struct Reporter {
    queue: Arc<Mutex<Queue>>,
    /// Signals that a report was added, and the end when all clones are dropped.
    added: mpsc::Sender<()>,
    /// Health of the GPUs, part of the device statuses.
    health: watch::Receiver<Arc<HealthByGpu>>,
}

impl Reporter {
    /// Returns a reporter and its task, which ends when all clones are dropped.
    pub fn start(
        client: Client,
        node: String,
        health: watch::Receiver<Arc<HealthByGpu>>,
    ) -> (Self, impl Future<Output = ()> + Send + 'static) {
        let (added, bell) = mpsc::channel(1);
        let queue = Arc::<Mutex<Queue>>::default();
        let writer = Writer {
            recorder: Recorder::new(
                client.clone(),
                EventReporter {
                    controller: COMPONENT.to_owned(),
                    instance: Some(node.clone()),
                },
            ),
            client,
            node,
        };
        let task = write_all(Arc::clone(&queue), bell, writer);
        let reporter = Self {
            queue,
            added,
            health,
        };
        (reporter, task)
    }

    /// Logs and raises an event.
    pub fn event(&self, subject: Subject, reason: EventReason, note: String) {
        match event_type(reason) {
            EventType::Normal => tracing::info!(?subject, reason = reason.as_str(), note),
            EventType::Warning => tracing::warn!(?subject, reason = reason.as_str(), note),
        }
        let event = Report::Event {
            subject,
            reason,
            note,
        };
        match lock(&self.queue).add_event(event, Instant::now()) {
            true => self.signal(),
            false => tracing::warn!("report queue full; dropping an event"),
        }
    }

    /// Writes `status.devices` of the claim, unless the claim has the same content already. Returns whether it has.
    pub fn devices(
        &self,
        found: &ResourceClaim,
        record: &ClaimRecord,
        inventory: &NodeInventory,
        injection: &Injection,
    ) -> bool {
        let written = written(found);
        let health = Arc::clone(&self.health.borrow());
        let observed = Observed {
            inventory,
            health: &health,
            injection,
        };
        let devices = device_status::statuses(record, &observed, &written, Timestamp::now());
        self.send_changed(&record.claim, devices, &written)
    }

    /// Writes the condition `Granted` of a companion, unless the claim has the same content already. Returns whether it has.
    pub fn grant(
        &self,
        found: &ResourceClaim,
        companion: &Companion,
        pool: &str,
        status: &GrantStatus,
    ) -> bool {
        let written = written(found);
        let devices = device_status::granted(companion, pool, status, &written, Timestamp::now());
        self.send_changed(&companion.claim, devices, &written)
    }

    /// Sends device statuses that differ from the written ones and from those in the queue. Returns whether they are written.
    fn send_changed(&self, claim: &ClaimRef, devices: Vec<Value>, written: &Value) -> bool {
        let is_written = |device: &Value| {
            let mut written = written.as_array().into_iter().flatten();
            written.any(|written| written == device)
        };
        let are_written = devices.iter().all(is_written);
        let devices = Value::Array(devices);
        let status = Report::Status {
            claim: claim.clone(),
            devices,
        };
        if !are_written && lock(&self.queue).add_status(status, Instant::now()) {
            self.signal();
        }
        are_written
    }

    fn signal(&self) {
        // One signal is enough, and a task that has ended writes nothing any more.
        let _ = self.added.try_send(());
    }
}

fn lock(queue: &Mutex<Queue>) -> MutexGuard<'_, Queue> {
    // The queue is valid after a panic: it contains whole reports at every moment.
    queue.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes the reports of the queue until all reporters are dropped. Each report that waits then gets one more attempt.
async fn write_all(queue: Arc<Mutex<Queue>>, mut added: mpsc::Receiver<()>, writer: Writer) {
    let mut writes = FuturesUnordered::new();
    let mut is_closed = false;
    loop {
        let mut due = None;
        while writes.len() < MAX_WRITES {
            let started = lock(&queue).start(Instant::now());
            match started {
                Ok((object, report)) => writes.push(writer.write(object, report)),
                Err(next) => {
                    due = next;
                    break;
                }
            }
        }
        if is_closed && writes.is_empty() {
            return;
        }
        tokio::select! {
            Some((object, report, outcome)) = writes.next() => {
                let attempt = match &outcome {
                    Ok(()) => Attempt::Written,
                    Err(error) if is_closed || is_rejection(error) => Attempt::Rejected,
                    Err(_) => Attempt::Failed,
                };
                let is_logged = lock(&queue).finish(&object, attempt, Instant::now());
                if let (true, Err(error)) = (is_logged, outcome) {
                    tracing::warn!(%error, report = report.name(), "cannot report");
                }
            }
            signal = added.recv(), if !is_closed => if signal.is_none() {
                is_closed = true;
                lock(&queue).close(Instant::now());
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
    }
}

/// Returns whether no later attempt can succeed: the object is gone, another one has its name, or the report is invalid. An API
/// server that starts, or an admission policy, may deny a write for a while.
fn is_rejection(error: &WriteError) -> bool {
    let WriteError::Api(kube::Error::Api(status)) = error else {
        return false;
    };
    match status.code {
        400 | 404 | 405 | 410 | 413 | 415 | 422 => true,
        409 => status.reason == "AlreadyExists" || status.message.contains("Precondition failed"),
        _ => false,
    }
}

/// A report could not be written.
#[derive(Debug, thiserror::Error)]
enum WriteError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error("no answer within {} s", WRITE_TIMEOUT.as_secs())]
    Timeout,
}

/// Conditions that other managers own than the rest of the device statuses: [`write_suspended`] and [`write_idle`].
const APART: [ConditionType; 2] = [ConditionType::Suspended, ConditionType::Idle];

/// Returns `status.devices` of a claim as JSON, without the conditions of other managers.
fn written(claim: &ResourceClaim) -> Value {
    let mut devices = all_written(claim);
    let entries = devices.as_array_mut().into_iter().flatten();
    let conditions = entries.filter_map(|entry| entry.get_mut("conditions")?.as_array_mut());
    for conditions in conditions {
        conditions.retain(|condition| {
            let kind = condition.get("type").and_then(Value::as_str);
            APART.iter().all(|apart| kind != Some(apart.as_str()))
        });
    }
    devices
}

fn all_written(claim: &ResourceClaim) -> Value {
    let status = claim.status.as_ref();
    let devices = status.and_then(|status| status.devices.as_ref());
    serde_json::to_value(devices).unwrap_or(Value::Null)
}

/// Returns the reason of the condition `Suspended` of a claim.
#[must_use]
pub fn suspended(claim: &ResourceClaim) -> Option<ConditionReason> {
    device_status::reason_of(&all_written(claim), ConditionType::Suspended)
}

/// Writes the condition `Suspended` of a claim, if the claim is still as it was `found`.
///
/// The condition has a manager of its own, so no other report of the driver, which may wait in a queue, changes it. A write
/// that is late is refused, because it names the resource version.
///
/// # Errors
/// When the claim has changed, or the API server does not confirm the write. It may land nevertheless while the claim has this
/// resource version.
pub async fn write_suspended(
    client: &Client,
    found: &ResourceClaim,
    record: &ClaimRecord,
    reason: ConditionReason,
    message: &str,
) -> Result<(), kube::Error> {
    let written = all_written(found);
    let devices = device_status::alone(record, reason, message, &written, Timestamp::now());
    let claim = &record.claim;
    let patch = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": claim.name, "namespace": claim.namespace, "uid": claim.uid.as_str(),
            "resourceVersion": found.metadata.resource_version,
        },
        "status": {"devices": devices},
    });
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), &claim.namespace);
    let params = PatchParams::apply(SUSPEND_MANAGER).force();
    let patch = Patch::Apply(patch);
    let patched = claims.patch_status(&claim.name, &params, &patch).await;
    patched.map(drop)
}

/// Returns the reason of the condition `Idle` of a claim.
#[must_use]
pub fn idle(claim: &ResourceClaim) -> Option<ConditionReason> {
    device_status::reason_of(&all_written(claim), ConditionType::Idle)
}

/// Writes the condition `Idle` of a claim: since when its share has used no GPU time, or that it uses the GPU.
///
/// # Errors
/// When the API server does not confirm the write.
pub async fn write_idle(
    client: &Client,
    record: &ClaimRecord,
    since: Option<Timestamp>,
) -> Result<(), kube::Error> {
    // Without what was written before, so that the transition is the begin of the period.
    let devices = match since {
        Some(since) => {
            let (reason, message) = (
                ConditionReason::NoGpuTime,
                "no program of the share has used GPU time since lastTransitionTime",
            );
            device_status::alone(record, reason, message, &Value::Null, since)
        }
        None => {
            let (reason, message) = (ConditionReason::UsesGpu, "the share uses its GPU");
            device_status::alone(record, reason, message, &Value::Null, Timestamp::now())
        }
    };
    let claim = &record.claim;
    let patch = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid.as_str()},
        "status": {"devices": devices},
    });
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), &claim.namespace);
    let params = PatchParams::apply(IDLE_MANAGER).force();
    let patch = Patch::Apply(patch);
    let patched = claims.patch_status(&claim.name, &params, &patch).await;
    patched.map(drop)
}

struct Writer {
    client: Client,
    recorder: Recorder,
    node: String,
}

impl Writer {
    async fn write(
        &self,
        object: Object,
        report: Report,
    ) -> (Object, Report, Result<(), WriteError>) {
        let outcome = match tokio::time::timeout(WRITE_TIMEOUT, self.attempt(&report)).await {
            Ok(outcome) => outcome.map_err(WriteError::from),
            Err(_) => Err(WriteError::Timeout),
        };
        (object, report, outcome)
    }

    async fn attempt(&self, report: &Report) -> Result<(), kube::Error> {
        match report {
            Report::Event {
                subject,
                reason,
                note,
            } => {
                let event = Event {
                    type_: event_type(*reason),
                    reason: reason.as_str().to_owned(),
                    // The API server accepts 1 KiB.
                    note: Some(note.chars().take(1000).collect()),
                    // The recorder merges events of one reason and action and keeps the first note, so the action
                    // contains a hash of the note.
                    action: format!(
                        "{}-{:08x}",
                        reason.as_str(),
                        crc32fast::hash(note.as_bytes())
                    ),
                    secondary: None,
                };
                self.recorder
                    .publish(&event, &self.reference(subject))
                    .await
            }
            Report::Status { claim, devices } => {
                let claims: Api<ResourceClaim> =
                    Api::namespaced(self.client.clone(), &claim.namespace);
                // The UID makes the API server reject the patch for another claim of the same name.
                let patch = json!({
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceClaim",
                    "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid.as_str()},
                    "status": {"devices": devices},
                });
                let params = PatchParams::apply(COMPONENT).force();
                claims
                    .patch_status(&claim.name, &params, &Patch::Apply(patch))
                    .await
                    .map(drop)
            }
        }
    }

    fn reference(&self, subject: &Subject) -> ObjectReference {
        match subject {
            Subject::Node => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                name: Some(self.node.clone()),
                // As kubelet does: `kubectl describe node` selects events by this UID.
                uid: Some(self.node.clone()),
                ..ObjectReference::default()
            },
            Subject::Claim(claim) => ObjectReference {
                api_version: Some("resource.k8s.io/v1".to_owned()),
                kind: Some("ResourceClaim".to_owned()),
                name: Some(claim.name.clone()),
                namespace: Some(claim.namespace.clone()),
                uid: Some(claim.uid.to_string()),
                ..ObjectReference::default()
            },
            Subject::Profile(profile) => ObjectReference {
                api_version: Some(names::API_VERSION.to_owned()),
                kind: Some("GpuNodeProfile".to_owned()),
                name: Some(profile.name.clone()),
                uid: Some(profile.uid.clone()),
                ..ObjectReference::default()
            },
            Subject::Pod(pod) => ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: Some(pod.name.clone()),
                namespace: Some(pod.namespace.clone()),
                uid: Some(pod.uid.clone()),
                ..ObjectReference::default()
            },
        }
    }
}

#[cfg(test)]
mod tests;
