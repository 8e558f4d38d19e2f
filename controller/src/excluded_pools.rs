//! Pools that are excluded from allocation, and the events that report them.

use std::collections::BTreeMap;

use drava_allocator::cluster::Cluster;
use drava_allocator::pool::PoolProblem;

use crate::event::PendingEvent;

/// Problems by pool, as reported last.
#[derive(Debug, Default)]
pub(crate) struct ExcludedPools(BTreeMap<String, PoolProblem>);

impl ExcludedPools {
    /// Returns events for the problems that are not reported yet. A problem that was solved is reported again when it
    /// recurs.
    pub(crate) fn new_events(&mut self, cluster: &Cluster) -> Vec<PendingEvent> {
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
