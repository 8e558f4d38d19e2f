//! What the metrics show of the cluster and the queue.

use std::collections::BTreeMap;

use super::Planner;
use crate::metrics::{ClusterMetrics, DeviceMetrics};

impl Planner {
    /// Returns what the metrics show of the cluster and the queue.
    #[must_use]
    pub fn metrics(&self) -> ClusterMetrics {
        let devices = self.cluster.shared_devices();
        let mut pending = BTreeMap::new();
        for pod in self.queue.iter() {
            *pending.entry(pod.reason).or_default() += 1;
        }
        ClusterMetrics {
            devices: devices.map(DeviceMetrics::from).collect(),
            pending,
            gangs: self.live_pods.count_gangs(),
            in_flight: self.in_flight.len(),
            free_memory: self
                .cluster
                .free_memory()
                .into_iter()
                .map(|(node, free)| (node.to_owned(), free))
                .collect(),
            oldest_undelivered: self.ledger.oldest_undelivered(),
            scheduler_releases: self.scheduler_releases,
            excluded_pools: self.cluster.excluded_pools().count(),
            quotas: self.quota_metrics(),
            namespaces: self
                .cluster
                .namespace_charges()
                .map(|(namespace, charge)| (namespace.to_owned(), charge.into()))
                .collect(),
        }
    }
}
