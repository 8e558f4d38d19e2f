//! DeviceTaintRules of the cluster.

use k8s_openapi::api::resource::v1::DeviceTaintRule;

use super::Cluster;
use crate::taint::TaintRule;

impl Cluster {
    /// Adds or replaces a rule. Returns whether the taints of devices may have changed.
    pub fn upsert_taint_rule(&mut self, rule: &DeviceTaintRule) -> bool {
        let name = rule.metadata.name.clone().unwrap_or_default();
        let parsed = TaintRule::parse(rule);
        if self.taint_rules.get(&name) == parsed.as_ref() {
            return false;
        }
        match parsed {
            Some(parsed) => self.taint_rules.insert(name, parsed),
            None => self.taint_rules.remove(&name),
        };
        self.apply_taint_rules();
        true
    }

    /// Removes a rule. Returns whether the taints of devices may have changed.
    pub fn remove_taint_rule(&mut self, name: &str) -> bool {
        let is_known = self.taint_rules.remove(name).is_some();
        if is_known {
            self.apply_taint_rules();
        }
        is_known
    }

    fn apply_taint_rules(&mut self) {
        self.rankings.mark_all_changed();
        for (name, pool) in &mut self.pools {
            if let Ok((pool, _)) = &mut pool.state {
                pool.apply_rules(name, &self.taint_rules.values());
            }
        }
    }
}
