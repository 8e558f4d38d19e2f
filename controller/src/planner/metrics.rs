//! What the metrics show of the cluster and the queue.

use std::collections::{BTreeMap, BTreeSet};

use super::Planner;
use crate::metrics::{ClusterMetrics, DeviceMetrics};

impl Planner {
    /// Returns what the metrics show of the cluster and the queue.
    #[must_use]
    pub fn metrics(&self) -> ClusterMetrics {
        let overcommitted: BTreeSet<(String, String)> = self
            .world
            .cluster
            .overcommits()
            .into_iter()
            .map(|overcommit| (overcommit.node, overcommit.gpu))
            .collect();
        let devices = self.world.cluster.shared_devices().map(|shared| {
            let (node, device, _) = shared;
            DeviceMetrics {
                is_gpu_overcommitted: overcommitted
                    .contains(&(node.to_owned(), device.gpu.to_string())),
                ..DeviceMetrics::from(shared)
            }
        });
        let mut pending = BTreeMap::new();
        for pod in self.backlog.queue.iter() {
            *pending.entry(pod.reason).or_default() += 1;
        }
        ClusterMetrics {
            devices: devices.collect(),
            pending,
            gangs: self.world.live_pods.count_gangs(),
            in_flight: self.commitments.in_flight.len(),
            free_memory: self
                .world
                .cluster
                .free_memory()
                .into_iter()
                .map(|(node, free)| (node.to_owned(), free))
                .collect(),
            oldest_undelivered: self.commitments.ledger.oldest_undelivered(),
            scheduler_releases: self.reporter.scheduler_releases,
            unreadable: self.count_unreadable(),
            excluded_pools: self.world.cluster.excluded_pools().count(),
            quotas: self.quota_metrics(),
            namespaces: self
                .world
                .cluster
                .namespace_charges()
                .map(|(namespace, charge)| (namespace.to_owned(), charge.into()))
                .collect(),
        }
    }
}
