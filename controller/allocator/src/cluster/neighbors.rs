//! The pods around a pending one: which nodes they exclude, and which it prefers because of them.

use super::{Cluster, PodAssignment};
use crate::node::NodeInfo;
use crate::node::PodDemand;
use crate::node::neighbors::{Exclusions, Neighbor, Surroundings};
use crate::node::preferences::Preferences;

impl Cluster {
    /// Returns which nodes the other pods exclude for a pod. Without rules of its own only those with anti-affinity matter.
    pub(crate) fn exclusions(&self, uid: &str, demand: &PodDemand) -> Exclusions {
        if demand.has_neighbor_rules() {
            return self.exclusions_by(demand, uid, self.pods.iter());
        }
        if self.with_anti_affinity.is_empty() {
            return Exclusions::default();
        }
        let with_anti_affinity = self.with_anti_affinity.iter();
        let pods = with_anti_affinity.filter_map(|uid| self.pods.get_key_value(uid));
        self.exclusions_by(demand, uid, pods)
    }

    fn exclusions_by<'a>(
        &'a self,
        demand: &PodDemand,
        uid: &str,
        pods: impl Iterator<Item = (&'a String, &'a PodAssignment)> + Clone,
    ) -> Exclusions {
        let others = pods
            .filter(|(other, _)| *other != uid && !self.gone.pods.contains(*other))
            .map(|(_, pod)| -> (&str, &Neighbor) { (&pod.node, &pod.neighbor) });
        demand.exclusions(&Surroundings {
            nodes: self.nodes.iter().map(|(name, node)| (name.as_str(), node)),
            pods: others,
            namespaces: self.quotas.namespace_labels(),
        })
    }

    /// Returns what the other pods mean to the preferences of a pod; `None` if it prefers no node to another one.
    pub(crate) fn preferences(&self, uid: &str, demand: &PodDemand) -> Option<Preferences> {
        let by_neighbors = match (
            demand.has_neighbor_preferences(),
            self.with_preferences.is_empty(),
        ) {
            (true, _) => self.preferences_by(demand, uid, self.pods.iter()),
            (false, false) => {
                let with_preferences = self.with_preferences.iter();
                let pods = with_preferences.filter_map(|uid| self.pods.get_key_value(uid));
                self.preferences_by(demand, uid, pods)
            }
            (false, true) => Preferences::default(),
        };
        let has_others = demand.has_node_preferences() || !self.softly_tainted.is_empty();
        (has_others || !by_neighbors.is_empty()).then_some(by_neighbors)
    }

    fn preferences_by<'a>(
        &'a self,
        demand: &PodDemand,
        uid: &str,
        pods: impl Iterator<Item = (&'a String, &'a PodAssignment)> + Clone,
    ) -> Preferences {
        let others = pods
            .filter(|(other, _)| *other != uid && !self.gone.pods.contains(*other))
            .map(|(_, pod)| -> (&str, &Neighbor) { (&pod.node, &pod.neighbor) });
        demand.preferences(&Surroundings {
            nodes: self
                .nodes
                .iter()
                .map(|(name, node)| -> (&str, &NodeInfo) { (name, node) }),
            pods: others,
            namespaces: self.quotas.namespace_labels(),
        })
    }

    /// Returns the scores of nodes by the preferences of a pod.
    pub(crate) fn scores_by_preferences(
        &self,
        demand: &PodDemand,
        preferences: &Preferences,
        nodes: &[&str],
    ) -> Vec<i64> {
        let unknown = NodeInfo::default();
        let nodes = nodes.iter();
        let nodes = nodes.map(|name| (*name, self.nodes.get(*name).unwrap_or(&unknown)));
        demand.node_scores(preferences, &nodes.collect::<Vec<_>>())
    }
}
