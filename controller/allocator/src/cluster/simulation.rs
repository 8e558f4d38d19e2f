//! Simulations: decisions in a cluster without some of its claims and pods.

use std::collections::BTreeSet;

use super::{Cluster, PoolState, pools_of};
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

    /// Returns the claims whose devices count otherwise.
    fn changed_claims(&self) -> impl Iterator<Item = &ObjectKey> {
        self.claims.iter().chain(&self.suspended)
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
        self.mark_requests_changed(also);
        self.leave(also);
        for pool in self.index_claims(also) {
            self.recount_pool(&pool);
        }
    }

    /// Presumes that `back` is not gone any more. All of it must be presumed gone.
    pub fn presume_back(&mut self, back: &Departure) {
        self.mark_requests_changed(back);
        self.return_from(back);
        for pool in self.index_claims(back) {
            self.recount_pool(&pool);
        }
    }

    /// Returns what is found while `also` is gone as well, of which nothing may be presumed gone already. Everything is as
    /// before then, so no node counts as changed: `find` must not use the order of nodes for equal claims.
    pub fn try_without<T>(&mut self, also: &Departure, find: impl FnOnce(&Self) -> T) -> T {
        let pools = self.pools_with(also);
        let states = pools.iter().filter_map(|pool| self.pools.get(pool));
        if states.clone().any(|pool| pool.state.is_err()) {
            // The end of a claim can make the pool usable.
            self.presume_also_gone(also);
            let found = find(self);
            self.presume_back(also);
            return found;
        }
        self.leave(also);
        let mut before = Vec::new();
        for name in pools {
            let Some((pool, _)) = self
                .pools
                .get(&name)
                .and_then(|pool| pool.state.as_ref().ok())
            else {
                continue;
            };
            let usage = self.usage_of(&name, pool);
            if let Ok(usage) = usage
                && let Some(PoolState {
                    state: Ok((_, counted)),
                    ..
                }) = self.pools.get_mut(&name)
            {
                before.push((name, std::mem::replace(counted, usage)));
            }
        }
        let found = find(self);
        for (name, usage) in before {
            if let Some(PoolState {
                state: Ok((_, counted)),
                ..
            }) = self.pools.get_mut(&name)
            {
                *counted = usage;
            }
        }
        self.return_from(also);
        found
    }

    fn leave(&mut self, also: &Departure) {
        for uid in &also.pods {
            self.gone.pods.insert(uid.clone());
            if let Some(assignment) = self.pods.get(uid) {
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
    }

    fn return_from(&mut self, back: &Departure) {
        for uid in &back.pods {
            self.gone.pods.remove(uid);
            if let Some(assignment) = self.pods.get(uid) {
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
    }

    fn mark_requests_changed(&mut self, departure: &Departure) {
        for uid in &departure.pods {
            if let Some(assignment) = self.pods.get(uid) {
                self.rankings.mark_requests_changed(&assignment.node);
            }
        }
    }

    /// Returns what is presumed gone.
    #[must_use]
    pub const fn presumed_gone(&self) -> &Departure {
        &self.gone
    }

    /// Updates in which pools the claims of a departure have devices. Returns these pools. A suspended share is charged as
    /// before.
    fn index_claims(&mut self, departure: &Departure) -> BTreeSet<String> {
        for key in departure.changed_claims() {
            let pools = self
                .claims
                .get(key)
                .map(|claim| pools_of(&claim.allocated_devices));
            self.index_devices(key, &pools.unwrap_or_default());
        }
        self.pools_with(departure)
    }

    /// Returns the pools in which the claims of a departure have devices.
    fn pools_with(&self, departure: &Departure) -> BTreeSet<String> {
        let claims = departure.changed_claims();
        let claims = claims.filter_map(|key| self.claims.get(key));
        pools_of(claims.flat_map(|claim| &claim.allocated_devices))
    }
}

#[cfg(test)]
mod tests;
