//! What is said: events, conditions of pods, and statuses of quotas, policies and the leader.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::Cluster;
use drava_allocator::pool::PoolProblem;
use drava_api::leader::GpuControllerLeader;
use drava_api::policy::GpuPolicy;
use drava_api::quota::GpuQuota;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

use super::overcommit::Overcommits;
use super::pod_conditions::ConditionsInFlight;
use crate::action::event::PendingEvent;
use crate::action::status::Statuses;
use crate::decide::event_deduplicator::EventDeduplicator;

/// See the [module](self).
#[derive(Default)]
pub(super) struct Reporter {
    pub(super) deduplicator: EventDeduplicator,
    /// Events of the current state; they pass the deduplicator.
    pub(super) state_events: Vec<PendingEvent>,
    /// Events of finished writes; also those that end last are published.
    pub(super) write_events: Vec<PendingEvent>,
    pub(super) conditions: ConditionsInFlight,
    /// Conditions of whether the programs of pods run.
    pub(super) running: ConditionsInFlight,
    /// UIDs of the pods of which that may have changed.
    pub(super) running_changed: BTreeSet<String>,
    /// Pods whose condition says that their claims are not allocated, although they are.
    pub(super) newly_allocated: Vec<ObjectReference>,
    pub(super) excluded_pools: ExcludedPools,
    pub(super) overcommits: Overcommits,
    pub(super) quota_statuses: Statuses<GpuQuota>,
    pub(super) policy_statuses: Statuses<GpuPolicy>,
    pub(super) leader_statuses: Statuses<GpuControllerLeader>,
    /// Number of unreserved allocations of this controller that kube-scheduler has released.
    pub(super) scheduler_releases: u64,
}

impl Reporter {
    /// Returns when something is to be said without a change.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let delayed = self.deduplicator.next_due();
        delayed
            .into_iter()
            .chain(self.quota_statuses.next_due())
            .chain(self.policy_statuses.next_due())
            .chain(self.leader_statuses.next_due())
            .min()
    }
}

/// Problems of excluded pools, as reported last.
#[derive(Debug, Default)]
pub(super) struct ExcludedPools(BTreeMap<String, PoolProblem>);

impl ExcludedPools {
    /// Returns the events of the excluded pools that are not reported yet. A problem that was solved is reported again when it
    /// recurs.
    pub(super) fn new_events(&mut self, cluster: &Cluster) -> Vec<PendingEvent> {
        let problems: BTreeMap<&str, (Option<&str>, &PoolProblem)> = cluster
            .excluded_pools()
            // A pool is incomplete for a moment whenever the node driver publishes.
            .filter(|(_, _, problem)| !matches!(problem, PoolProblem::Incomplete { .. }))
            .map(|(pool, node, problem)| (pool, (node, problem)))
            .collect();
        self.0
            .retain(|pool, _| problems.contains_key(pool.as_str()));
        let mut events = Vec::new();
        for (pool, (node, problem)) in problems {
            if self.0.get(pool) == Some(problem) {
                continue;
            }
            match node {
                Some(node) => events.push(PendingEvent::pool_excluded(node, pool, problem)),
                // Without a node there is no object for an event.
                None => tracing::warn!(pool, %problem, "pool excluded from allocation"),
            }
            self.0.insert(pool.to_owned(), problem.clone());
        }
        events
    }
}
