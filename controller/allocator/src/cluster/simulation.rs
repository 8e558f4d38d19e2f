//! Simulations: decisions in a cluster without some of its claims and pods.

use std::borrow::Cow;
use std::collections::BTreeSet;

use super::{Cluster, pools_of};
use crate::capacity::Amounts;
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
            }
        }
        let changed: Vec<ObjectKey> = before
            .claims
            .symmetric_difference(&self.gone.claims)
            .cloned()
            .collect();
        for key in changed {
            let pools = self
                .claims
                .get(&key)
                .map(|claim| pools_of(&claim.allocated_devices))
                .unwrap_or_default();
            self.recount(&key, &pools);
        }
    }

    /// Subtracts the requests of the node's pods that are presumed gone, apart from `except`.
    pub(super) fn subtract_gone(&self, node: &str, except: &str, requested: &mut Cow<'_, Amounts>) {
        for uid in &self.gone.pods {
            if let Some(assignment) = self.pods.get(uid)
                && assignment.node == node
                && uid != except
            {
                node::subtract(requested.to_mut(), &assignment.requests);
            }
        }
    }
}
