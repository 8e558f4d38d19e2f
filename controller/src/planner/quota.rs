//! Quotas: their changes, statuses and metrics.
//!
//! The allocator admits a pod only if all quotas of its namespace hold afterwards. It counts allocations in flight and
//! reserved devices, and the planner decides for one pod after the other, so no number of pods exceeds a quota.

use std::collections::BTreeMap;

use drava_allocator::cluster::QuotaUse;
use drava_api::listed::Change;
use drava_api::quota::{GpuQuota, QuotaResource};
use tokio::time::Instant;

use super::Planner;
use crate::action::Action;
use crate::metrics::QuotaMetrics;
use crate::planner::DecisionTime;
use crate::quota;
use crate::status::StatusOutcome;

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
            Some(quota::status(quota, known, &time.time))
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
            limit: amounts(&|resource| quota.spec.limit(resource)),
            guarantee: amounts(&|resource| quota.spec.guarantee(resource)),
            borrowed: amounts(&|resource| quota.borrowed(resource)),
            alert_threshold_ratio: quota.spec.alert_threshold_ratio(),
        }
    }
}
