//! Status of the quotas: computed from the cluster, written when it changes, and not more often than once in a second for a
//! quota.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_allocator::cluster::{Cluster, QuotaUse};
use drava_allocator::reason::quota_amount;
use drava_api::quota::{
    GpuQuota, GpuQuotaStatus, LIMIT_EXCEEDED, QuotaAmounts, QuotaResource, WITHIN_LIMIT,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tokio::time::Instant;

use crate::action::{QuotaStatusOutcome, QuotaStatusUpdate};

/// Minimum time between two writes of a status.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);
/// Time after a failed write.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// A quota in its newest known version.
#[derive(Debug)]
struct Known {
    uid: String,
    resource_version: String,
    generation: Option<i64>,
    status: GpuQuotaStatus,
    /// When it may be written again.
    not_before: Option<Instant>,
    is_in_flight: bool,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct QuotaStatuses {
    quotas: BTreeMap<String, Known>,
    /// When the next changed status may be written.
    next_due: Option<Instant>,
}

impl QuotaStatuses {
    /// Observes a version of a quota.
    pub(crate) fn observe(&mut self, quota: &GpuQuota) {
        let metadata = &quota.metadata;
        let name = metadata.name.clone().unwrap_or_default();
        let uid = metadata.uid.clone().unwrap_or_default();
        let before = self.quotas.remove(&name).filter(|before| before.uid == uid);
        let known = Known {
            uid,
            resource_version: metadata.resource_version.clone().unwrap_or_default(),
            generation: metadata.generation,
            status: quota.status.clone().unwrap_or_default(),
            not_before: before.as_ref().and_then(|before| before.not_before),
            is_in_flight: before.is_some_and(|before| before.is_in_flight),
        };
        self.quotas.insert(name, known);
    }

    /// Removes a deleted quota.
    pub(crate) fn remove(&mut self, name: &str) {
        self.quotas.remove(name);
    }

    /// Observes the outcome of a write.
    pub(crate) fn written(&mut self, outcome: QuotaStatusOutcome, now: Instant) {
        if let Some(known) = self.quotas.get_mut(&outcome.name) {
            known.is_in_flight = false;
            if outcome.quota.is_none() {
                known.not_before = Some(now + RETRY_INTERVAL);
            }
        }
        if let Some(quota) = outcome.quota {
            let known = self.quotas.get(&outcome.name);
            if known.is_some_and(|known| Some(&known.uid) == quota.metadata.uid.as_ref()) {
                self.observe(&quota);
            }
        }
    }

    /// Returns the statuses to write now.
    pub(crate) fn due(
        &mut self,
        cluster: &Cluster,
        now: Instant,
        time: &Time,
    ) -> Vec<QuotaStatusUpdate> {
        self.next_due = None;
        let mut updates = Vec::new();
        for quota in cluster.quotas() {
            let Some(known) = self.quotas.get_mut(quota.name) else {
                continue;
            };
            let status = status(&quota, known, time);
            if status == known.status || known.is_in_flight {
                continue;
            }
            if let Some(due) = known.not_before.filter(|due| now < *due) {
                self.next_due = Some(self.next_due.map_or(due, |next| next.min(due)));
                continue;
            }
            known.not_before = Some(now + WRITE_INTERVAL);
            known.is_in_flight = true;
            updates.push(QuotaStatusUpdate {
                name: quota.name.to_owned(),
                uid: known.uid.clone(),
                resource_version: known.resource_version.clone(),
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

/// Returns the status of a quota.
fn status(quota: &QuotaUse<'_>, known: &Known, time: &Time) -> GpuQuotaStatus {
    let amounts = |amount: &dyn Fn(QuotaResource) -> Option<drava_api::Quantity>| {
        let mut amounts = QuotaAmounts::default();
        for resource in QuotaResource::ALL {
            if let Some(amount) = amount(resource) {
                amounts.set(resource, amount);
            }
        }
        amounts
    };
    GpuQuotaStatus {
        observed_generation: known.generation,
        namespaces: u32::try_from(quota.namespaces.len()).unwrap_or(u32::MAX),
        used: quota.used.amounts(),
        borrowed: amounts(&|resource| quota.borrowed(resource)),
        free: amounts(&|resource| quota.free(resource)),
        conditions: vec![within_limit(quota, known, time)],
    }
}

/// Returns the condition [`WITHIN_LIMIT`]; its transition time changes with its status.
fn within_limit(quota: &QuotaUse<'_>, known: &Known, time: &Time) -> Condition {
    let exceeded: Vec<String> = QuotaResource::ALL
        .into_iter()
        .filter(|resource| quota.free(*resource).is_some_and(|free| free.is_negative()))
        .filter_map(|resource| {
            let limit = quota.spec.limit(resource)?;
            Some(format!(
                "{} {} of {} used",
                resource.as_str(),
                quota_amount(resource, quota.used.get(resource)),
                quota_amount(resource, limit)
            ))
        })
        .collect();
    let (status, reason, message) = if exceeded.is_empty() {
        (
            "True",
            WITHIN_LIMIT,
            "the usage is within the limit".to_owned(),
        )
    } else {
        let message = format!(
            "{}: running pods keep their devices, and no claim is allocated until the usage is below the limit",
            exceeded.join(", ")
        );
        ("False", LIMIT_EXCEEDED, message)
    };
    let mut before = known.status.conditions.iter();
    let before = before.find(|before| before.type_ == WITHIN_LIMIT && before.status == status);
    Condition {
        last_transition_time: before.map_or_else(
            || time.clone(),
            |before| before.last_transition_time.clone(),
        ),
        message,
        observed_generation: known.generation,
        reason: reason.to_owned(),
        status: status.to_owned(),
        type_: WITHIN_LIMIT.to_owned(),
    }
}
