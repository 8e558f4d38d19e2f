//! Events, and `status.devices` of claims.
//!
//! Reports are queued and written by a task, so they neither delay nor fail the reported operation. Failed writes are
//! retried a limited number of times and then logged.

pub mod conditions;
pub mod pods;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use drava_api::condition::{ConditionReason, ConditionType};
use drava_api::event::{Component, EventReason};
use drava_api::names;
use drava_api::node_profile::ProfileVersion;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter as EventReporter};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::gpu_health::HealthByGpu;
use crate::gpus::inventory::NodeInventory;
use crate::node::claim::{ClaimRef, ClaimUid};
use crate::prepare::companion::Companion;
use crate::prepare::record::ClaimRecord;
use crate::report::pods::PodRef;

mod device_status;

use device_status::Observed;
pub use device_status::{GrantStatus, Injection, Violation};

/// Field manager of `status.devices`, and reporting controller of events.
const COMPONENT: &str = Component::NodeDriver.as_str();

/// Manager of the condition `Suspended`.
const SUSPEND_MANAGER: &str = "drava-suspend";

/// Manager of the condition `Idle`.
const IDLE_MANAGER: &str = "drava-idle";

/// Length of the report queue.
const QUEUE: usize = 256;

/// Maximum number of attempts for one report. The delay doubles from 1 s.
const ATTEMPTS: u32 = 7;

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

enum Report {
    Event {
        subject: Subject,
        reason: EventReason,
        note: String,
    },
    Status {
        claim: ClaimRef,
        devices: Value,
    },
}

/// Device statuses in the queue, without their times, the last of each claim.
#[derive(Debug, Default)]
struct Queued(Mutex<BTreeMap<ClaimUid, Value>>);

impl Queued {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<ClaimUid, Value>> {
        // The map is valid after a panic: every change is one operation.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds device statuses. Returns whether the last ones of the claim differ.
    fn add(&self, claim: &ClaimUid, devices: &Value) -> bool {
        let content = without_times(devices.clone());
        let before = self.lock().insert(claim.clone(), content.clone());
        before.as_ref() != Some(&content)
    }

    /// Removes device statuses that were written, or that nothing writes any more.
    fn remove(&self, claim: &ClaimUid, devices: &Value) {
        let content = without_times(devices.clone());
        let mut queued = self.lock();
        if queued.get(claim) == Some(&content) {
            queued.remove(claim);
        }
    }
}

/// Returns device statuses without the times of their conditions.
fn without_times(mut devices: Value) -> Value {
    let all = devices.as_array_mut().into_iter().flatten();
    let conditions = all.filter_map(|device| device.get_mut("conditions")?.as_array_mut());
    for condition in conditions.flatten() {
        if let Some(condition) = condition.as_object_mut() {
            condition.remove("lastTransitionTime");
        }
    }
    devices
}

/// Sender of reports; clones share the queue.
#[derive(Debug, Clone)]
pub struct Reporter {
    reports: mpsc::Sender<Report>,
    queued: Arc<Queued>,
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
        let (sender, mut queue) = mpsc::channel(QUEUE);
        let queued = Arc::new(Queued::default());
        let written = Arc::clone(&queued);
        let task = async move {
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
            while let Some(report) = queue.recv().await {
                writer.write(&report).await;
                if let Report::Status { claim, devices } = &report {
                    written.remove(&claim.uid, devices);
                }
            }
        };
        let reporter = Self {
            reports: sender,
            queued,
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
        self.send(Report::Event {
            subject,
            reason,
            note,
        });
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
        if !are_written && self.queued.add(&claim.uid, &devices) {
            self.send(Report::Status {
                claim: claim.clone(),
                devices,
            });
        }
        are_written
    }

    fn send(&self, report: Report) {
        let Err(error) = self.reports.try_send(report) else {
            return;
        };
        tracing::warn!("report queue full; dropping a report");
        if let Report::Status { claim, devices } = error.into_inner() {
            self.queued.remove(&claim.uid, &devices);
        }
    }
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
    async fn write(&self, report: &Report) {
        let mut wait = Duration::from_secs(1);
        for attempt in 1..=ATTEMPTS {
            let error = match self.attempt(report).await {
                Ok(()) => return,
                Err(error) => error,
            };
            // A retry cannot help after a client error, such as a deleted claim.
            let is_final = matches!(&error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429);
            if is_final || attempt == ATTEMPTS {
                tracing::warn!(error = %error, report = report.name(), "cannot report");
                return;
            }
            tokio::time::sleep(wait).await;
            wait *= 2;
        }
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

impl Report {
    fn name(&self) -> String {
        match self {
            Self::Event { reason, .. } => format!("event {}", reason.as_str()),
            Self::Status { claim, .. } => format!("status.devices of claim {claim}"),
        }
    }
}

#[cfg(test)]
mod tests;
