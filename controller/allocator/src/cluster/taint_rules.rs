//! DeviceTaintRules of the cluster.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::DeviceTaintRule;

use super::{Cluster, PoolState};
use crate::steps;
use crate::taint::TaintRule;

impl Cluster {
    /// Adds or replaces a rule. Returns whether the taints of devices may have changed.
    pub fn upsert_taint_rule(&mut self, rule: &DeviceTaintRule) -> bool {
        let name = rule.metadata.name.clone().unwrap_or_default();
        let after = TaintRule::parse(rule);
        let before = match after.clone() {
            Some(after) => self.taint_rules.insert(name, after),
            None => self.taint_rules.remove(&name),
        };
        let is_changed = before != after;
        if is_changed {
            self.apply_taint_rules(&[before, after]);
        }
        is_changed
    }

    /// Removes a rule. Returns whether the taints of devices may have changed.
    pub fn remove_taint_rule(&mut self, name: &str) -> bool {
        let removed = self.taint_rules.remove(name);
        let is_known = removed.is_some();
        self.apply_taint_rules(&[removed]);
        is_known
    }

    /// Applies the rules to the devices that these versions of one select.
    fn apply_taint_rules(&mut self, changed: &[Option<TaintRule>]) {
        // `None` if one selects devices of every pool.
        let pools: Option<BTreeSet<&str>> = changed.iter().flatten().map(TaintRule::pool).collect();
        let pools: Vec<String> = match pools {
            Some(pools) => pools.into_iter().map(str::to_owned).collect(),
            None => self.pools.keys().cloned().collect(),
        };
        for name in steps::counted(pools) {
            if let Some(PoolState { node, state }) = self.pools.get_mut(&name)
                && let Ok((pool, _)) = state
                && pool.apply_rules(&name, &self.taint_rules.values())
            {
                let node = node.as_deref().unwrap_or(&name);
                self.rankings.mark_changed(node);
            }
        }
    }
}
