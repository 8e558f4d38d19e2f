//! Simulations: decisions in a cluster without some of its claims and pods.

use std::collections::BTreeSet;

use super::{Cluster, pools_of};
use crate::node;
use crate::object::ObjectKey;

/// Claims and pods that a simulation presumes gone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Departure {
    /// Claims whose devices are free. Assumed allocations of these claims count.
    pub claims: BTreeSet<ObjectKey>,
    /// UIDs of pods whose requests are free.
    pub pods: BTreeSet<String>,
}

impl Cluster {
    /// Presumes that `gone` is gone, instead of the departure before. The default departure ends the simulation.
    pub fn presume_gone(&mut self, gone: Departure) {
        let before = std::mem::replace(&mut self.gone, gone);
        for uid in before.pods.symmetric_difference(&self.gone.pods) {
            if let Some(assignment) = self.pods.get(uid) {
                self.rankings.mark_requests_changed(&assignment.node);
                let gone = self.gone_requested.entry(assignment.node.clone());
                if self.gone.pods.contains(uid) {
                    node::add(gone.or_default(), &assignment.requests);
                } else {
                    node::subtract(gone.or_default(), &assignment.requests);
                }
            }
        }
        if self.gone.pods.is_empty() {
            self.gone_requested.clear();
        }
        let changed: Vec<ObjectKey> = before
            .claims
            .symmetric_difference(&self.gone.claims)
            .cloned()
            .collect();
        // A pool is counted once, however many of its claims change.
        let mut changed_pools = BTreeSet::new();
        for key in changed {
            let pools = self
                .claims
                .get(&key)
                .map(|claim| pools_of(&claim.allocated_devices))
                .unwrap_or_default();
            self.index_devices(&key, &pools);
            changed_pools.extend(pools);
        }
        for pool in &changed_pools {
            self.recount_pool(pool);
        }
    }
}
