//! Statuses of GpuQuotas, GpuPolicies and the GpuControllerLeader, written when they differ from the known ones.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use drava_api::leader::GpuControllerLeader;
use drava_api::policy::GpuPolicy;
use drava_api::quota::{GpuQuota, QuotaResource};
use kube::core::ClusterResourceScope;
use kube::core::object::HasStatus;
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

/// Time after a failed write.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A resource whose status the controller writes.
pub trait Reported:
    Resource<DynamicType = (), Scope = ClusterResourceScope>
    + HasStatus<Status: Clone + Debug + PartialEq + Serialize>
{
    /// Minimum time between two writes of the status of an object.
    const WRITE_INTERVAL: Duration;

    /// Returns the merge patch that results in this status.
    #[must_use]
    fn patch(status: &Self::Status) -> Value {
        json!(status)
    }
}

impl Reported for GpuPolicy {
    const WRITE_INTERVAL: Duration = Duration::ZERO;
}

impl Reported for GpuControllerLeader {
    /// The reservations change with every decision.
    const WRITE_INTERVAL: Duration = Duration::from_secs(1);
}

impl Reported for GpuQuota {
    /// The usage changes with every allocation.
    const WRITE_INTERVAL: Duration = Duration::from_secs(1);

    /// Absent amounts are removed.
    fn patch(status: &Self::Status) -> Value {
        let mut patch = json!(status);
        for amounts in ["used", "suspended", "borrowed", "free"] {
            if let Some(amounts) = patch.get_mut(amounts).and_then(Value::as_object_mut) {
                for resource in QuotaResource::ALL {
                    amounts.entry(resource.as_str()).or_insert(Value::Null);
                }
            }
        }
        patch
    }
}

/// A status to write.
#[derive(Debug, Clone, PartialEq)]
pub struct StatusUpdate<K: HasStatus> {
    /// Name of the object.
    pub name: String,
    /// UID of the object.
    pub uid: String,
    /// Version of the object on which the status is based.
    pub resource_version: String,
    /// The status.
    pub status: K::Status,
}

/// Outcome of a [`StatusUpdate`].
#[derive(Debug)]
pub struct StatusOutcome<K> {
    /// Name of the object.
    pub name: String,
    /// The written version; `None` if the write failed.
    pub written: Option<Box<K>>,
}

/// An object in its newest known version.
#[derive(Debug)]
struct Known<K: HasStatus<Status: Debug>> {
    object: K,
    /// The status that was sent last, and what the API server has of it: it drops fields that the CRD of another version lacks.
    sent: Option<Sent<K::Status>>,
    /// When its status may be written again.
    not_before: Option<Instant>,
    is_in_flight: bool,
}

/// A status that was sent.
#[derive(Debug)]
struct Sent<S> {
    status: S,
    /// What was stored; `None` until it is known.
    stored: Option<S>,
}

/// See the [module](self). By the names of the objects.
#[derive(Debug)]
pub(crate) struct Statuses<K: HasStatus<Status: Debug>> {
    known: BTreeMap<String, Known<K>>,
    /// When the next changed status may be written.
    next_due: Option<Instant>,
}

impl<K: HasStatus<Status: Debug>> Default for Statuses<K> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            next_due: None,
        }
    }
}

impl<K: Reported> Known<K> {
    /// Returns whether the object has a status, as far as its CRD does.
    fn has(&self, status: &K::Status) -> bool {
        let found = self.object.status();
        let is_stored = |sent: &Sent<K::Status>| {
            sent.status == *status && sent.stored.is_some() && sent.stored.as_ref() == found
        };
        found == Some(status) || self.sent.as_ref().is_some_and(is_stored)
    }
}

impl<K: Reported> Statuses<K> {
    /// Observes a version of an object.
    pub(crate) fn observe(&mut self, object: K) {
        let name = object.name_any();
        let before = self.known.remove(&name);
        let before = before.filter(|before| before.object.meta().uid == object.meta().uid);
        let known = match before {
            Some(before) => Known { object, ..before },
            None => Known {
                object,
                sent: None,
                not_before: None,
                is_in_flight: false,
            },
        };
        self.known.insert(name, known);
    }

    /// Removes a deleted object.
    pub(crate) fn remove(&mut self, name: &str) {
        self.known.remove(name);
    }

    /// Observes the outcome of a write.
    pub(crate) fn written(&mut self, outcome: StatusOutcome<K>, now: Instant) {
        let Some(known) = self.known.get_mut(&outcome.name) else {
            return;
        };
        known.is_in_flight = false;
        match outcome.written {
            Some(written) if written.meta().uid == known.object.meta().uid => {
                if let Some(sent) = &mut known.sent {
                    sent.stored = written.status().cloned();
                }
                known.object = *written;
            }
            Some(_) => {}
            None => known.not_before = Some(now + RETRY_INTERVAL),
        }
    }

    /// Returns the statuses to write now. `status_of` returns that of an object; `None` if it has none so far.
    pub(crate) fn due(
        &mut self,
        now: Instant,
        status_of: impl Fn(&K) -> Option<K::Status>,
    ) -> Vec<StatusUpdate<K>> {
        self.next_due = None;
        let mut updates = Vec::new();
        for (name, known) in &mut self.known {
            let status = status_of(&known.object);
            let Some(status) = status.filter(|status| !known.has(status)) else {
                continue;
            };
            if known.is_in_flight {
                continue;
            }
            if let Some(due) = known.not_before.filter(|due| now < *due) {
                self.next_due = Some(self.next_due.map_or(due, |next| next.min(due)));
                continue;
            }
            known.not_before = Some(now + K::WRITE_INTERVAL);
            known.is_in_flight = true;
            known.sent = Some(Sent {
                status: status.clone(),
                stored: None,
            });
            let metadata = known.object.meta();
            updates.push(StatusUpdate {
                name: name.clone(),
                uid: metadata.uid.clone().unwrap_or_default(),
                resource_version: metadata.resource_version.clone().unwrap_or_default(),
                status,
            });
        }
        updates
    }

    /// Returns when [`Self::due`] has to be called without a change.
    pub(crate) const fn next_due(&self) -> Option<Instant> {
        self.next_due
    }
}
