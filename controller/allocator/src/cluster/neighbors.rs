//! The pods around a pending one.

use super::{Cluster, PodAssignment};
use crate::node::PodDemand;
use crate::node::neighbors::{Exclusions, Neighbor, Surroundings};

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
}
