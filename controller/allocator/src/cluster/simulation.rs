//! Simulations: decisions in a cluster without some of its claims and pods.

use std::collections::BTreeSet;

use super::{Cluster, pools_of};
use crate::node;
use crate::object::ObjectKey;
use crate::usage::AllocatedDevice;

/// Claims and pods that a simulation presumes gone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Departure {
    /// Claims whose devices are free. Assumed allocations of these claims count.
    pub claims: BTreeSet<ObjectKey>,
    /// UIDs of pods whose requests are free.
    pub pods: BTreeSet<String>,
    /// Claims whose shares are suspended: their memory and GPU time are free.
    pub suspended: BTreeSet<ObjectKey>,
}

impl Departure {
    fn without(&self, other: &Self) -> Self {
        Self {
            claims: &self.claims - &other.claims,
            pods: &self.pods - &other.pods,
            suspended: &self.suspended - &other.suspended,
        }
    }
}

impl Cluster {
    /// Presumes that `gone` is gone, instead of the departure before. The default departure ends the simulation.
    pub fn presume_gone(&mut self, gone: &Departure) {
        let back = self.gone.without(gone);
        let also = gone.without(&self.gone);
        self.presume_back(&back);
        self.presume_also_gone(&also);
    }

    /// Presumes that `also` is gone as well. Nothing of it may be presumed gone already.
    pub fn presume_also_gone(&mut self, also: &Departure) {
        for uid in &also.pods {
            self.gone.pods.insert(uid.clone());
            if let Some(assignment) = self.pods.get(uid) {
                self.rankings.mark_requests_changed(&assignment.node);
                let gone = self.gone_requested.entry(assignment.node.clone());
                node::add(gone.or_default(), &assignment.requests);
            }
        }
        self.gone.claims.extend(also.claims.iter().cloned());
        for key in &also.claims {
            self.lift_charges(key);
        }
        for key in &also.suspended {
            let devices = self.claims.get(key).into_iter();
            let devices = devices.flat_map(|state| state.allocated_devices.iter().cloned());
            let devices = devices.map(AllocatedDevice::suspended).collect();
            self.presumed_suspended.insert(key.clone(), devices);
            self.gone.suspended.insert(key.clone());
        }
        self.recount_claims(&(&also.claims | &also.suspended));
    }

    /// Presumes that `back` is not gone any more. All of it must be presumed gone.
    pub fn presume_back(&mut self, back: &Departure) {
        for uid in &back.pods {
            self.gone.pods.remove(uid);
            if let Some(assignment) = self.pods.get(uid) {
                self.rankings.mark_requests_changed(&assignment.node);
                let gone = self.gone_requested.entry(assignment.node.clone());
                node::subtract(gone.or_default(), &assignment.requests);
            }
        }
        if self.gone.pods.is_empty() {
            self.gone_requested.clear();
        }
        for key in &back.claims {
            self.gone.claims.remove(key);
            self.charge_again(key);
        }
        for key in &back.suspended {
            self.gone.suspended.remove(key);
            self.presumed_suspended.remove(key);
        }
        self.recount_claims(&(&back.claims | &back.suspended));
    }

    /// Returns what is presumed gone.
    #[must_use]
    pub const fn presumed_gone(&self) -> &Departure {
        &self.gone
    }

    /// Counts the pools of these claims anew, each once, however many of its claims change. A suspended share is charged as
    /// before.
    fn recount_claims(&mut self, claims: &BTreeSet<ObjectKey>) {
        let mut changed_pools = BTreeSet::new();
        for key in claims {
            let pools = self
                .claims
                .get(key)
                .map(|claim| pools_of(&claim.allocated_devices))
                .unwrap_or_default();
            self.index_devices(key, &pools);
            changed_pools.extend(pools);
        }
        for pool in &changed_pools {
            self.recount_pool(pool);
        }
    }
}
