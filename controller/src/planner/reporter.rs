//! What is said: events, conditions of pods, and statuses of quotas and policies.

use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use k8s_openapi::api::core::v1::ObjectReference;

use super::overcommit::Overcommits;
use super::pod_conditions::ConditionsInFlight;
use crate::event::PendingEvent;
use crate::event_deduplicator::EventDeduplicator;
use crate::excluded_pools::ExcludedPools;
use crate::status::Statuses;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Reporter {
    pub(super) deduplicator: EventDeduplicator,
    /// Events of the current state; they pass the deduplicator.
    pub(super) state_events: Vec<PendingEvent>,
    /// Events of finished writes; also those that end last are published.
    pub(super) write_events: Vec<PendingEvent>,
    pub(super) conditions: ConditionsInFlight,
    /// Pods whose condition says that their claims are not allocated, although they are.
    pub(super) newly_allocated: Vec<ObjectReference>,
    pub(super) excluded_pools: ExcludedPools,
    pub(super) overcommits: Overcommits,
    pub(super) quota_statuses: Statuses<GpuQuota>,
    pub(super) policy_statuses: Statuses<GpuPolicy>,
    /// Number of unreserved allocations of this controller that kube-scheduler has released.
    pub(super) scheduler_releases: u64,
}
