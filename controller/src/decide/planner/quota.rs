//! Quotas: their changes, statuses and metrics.
//!
//! The allocator admits a pod only if all quotas of its namespace hold afterwards. It counts allocations in flight and
//! reserved devices, and the planner decides for one pod after the other, so no number of pods exceeds a quota.

use std::collections::BTreeMap;

use drava_allocator::cluster::QuotaUse;
use drava_allocator::reason::quota_amount;
use drava_api::condition_state::ConditionState;
use drava_api::listed::Change;
use drava_api::quota::{
    GpuQuota, GpuQuotaStatus, LIMIT_EXCEEDED, QuotaAmounts, QuotaResource, WITHIN_LIMIT,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tokio::time::Instant;

use super::Planner;
use crate::action::Action;
use crate::action::status::StatusOutcome;
use crate::decide::planner::DecisionTime;
use crate::operate::metrics::QuotaMetrics;

impl Planner {
    /// Observes a quota.
    pub fn quota(&mut self, change: Change<GpuQuota>) {
        self.backlog.wake(self.world.quota(&change));
        match change {
            Change::Applied(quota) => self.reporter.quota_statuses.observe(*quota),
            Change::Deleted(quota) => self.reporter.quota_statuses.remove(&quota.name),
        }
    }

    /// Observes the outcome of a write of a quota's status.
    pub fn quota_status_written(&mut self, outcome: StatusOutcome<GpuQuota>, now: Instant) {
        self.reporter.quota_statuses.written(outcome, now);
    }

    /// Adds the writes of changed statuses.
    pub(super) fn write_quota_statuses(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let uses: BTreeMap<&str, QuotaUse<'_>> = {
            let quotas = self.world.cluster.quotas();
            quotas.map(|quota| (quota.name, quota)).collect()
        };
        let due = self.reporter.quota_statuses.due(time.instant, |known| {
            let quota = uses.get(known.metadata.name.as_deref()?)?;
            Some(status(quota, known, &time.time))
        });
        actions.extend(due.into_iter().map(Action::WriteQuotaStatus));
    }

    /// Returns what the metrics show of the quotas.
    pub(super) fn quota_metrics(&self) -> Vec<QuotaMetrics> {
        self.world
            .cluster
            .quotas()
            .map(QuotaMetrics::from)
            .collect()
    }
}

impl From<QuotaUse<'_>> for QuotaMetrics {
    fn from(quota: QuotaUse<'_>) -> Self {
        let amounts = |amount: &dyn Fn(QuotaResource) -> Option<drava_api::Quantity>| {
            let amounts = QuotaResource::ALL.into_iter();
            let amounts =
                amounts.filter_map(|resource| Some((resource, amount(resource)?.to_f64_lossy())));
            amounts.collect()
        };
        Self {
            name: quota.name.to_owned(),
            used: amounts(&|resource| Some(quota.used.get(resource))),
            suspended: amounts(&|resource| Some(quota.suspended.get(resource))),
            limit: amounts(&|resource| quota.spec.limit(resource)),
            guarantee: amounts(&|resource| quota.spec.guarantee(resource)),
            borrowed: amounts(&|resource| quota.borrowed(resource)),
            alert_threshold_ratio: quota.spec.alert_threshold_ratio(),
        }
    }
}

/// Returns the status of a quota of which this version is known.
fn status(quota: &QuotaUse<'_>, known: &GpuQuota, time: &Time) -> GpuQuotaStatus {
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
        observed_generation: known.metadata.generation,
        namespaces: u32::try_from(quota.namespaces.len()).unwrap_or(u32::MAX),
        used: quota.used.amounts(),
        suspended: quota.suspended.amounts(),
        borrowed: amounts(&|resource| quota.borrowed(resource)),
        free: amounts(&|resource| quota.free(resource)),
        conditions: vec![within_limit(quota, known, time)],
    }
}

/// Returns the condition [`WITHIN_LIMIT`].
fn within_limit(quota: &QuotaUse<'_>, known: &GpuQuota, time: &Time) -> Condition {
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
    let state = if exceeded.is_empty() {
        ConditionState {
            is_true: true,
            reason: WITHIN_LIMIT,
            message: "the usage is within the limit".to_owned(),
        }
    } else {
        ConditionState {
            is_true: false,
            reason: LIMIT_EXCEEDED,
            message: format!(
                "{}: running pods keep their devices, and no claim is allocated until the usage is below the limit",
                exceeded.join(", ")
            ),
        }
    };
    let before = known.status.as_ref();
    let before = before.map_or(&[][..], |status| &status.conditions);
    state.condition(WITHIN_LIMIT, before, known.metadata.generation, time)
}
