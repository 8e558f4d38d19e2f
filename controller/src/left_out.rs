//! Pools whose devices are not used, and what of them has been told.

use std::collections::BTreeMap;

use drava_allocator::cluster::Cluster;
use drava_allocator::pool::PoolProblem;
use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::ObjectReference;

use crate::notice::Notice;

/// Problems by pool, as they were told last.
#[derive(Debug, Default)]
pub(crate) struct LeftOut(BTreeMap<String, String>);

impl LeftOut {
    /// What is to be told of the cluster's pools: each problem once, and again when it has been away.
    pub(crate) fn news(&mut self, cluster: &Cluster) -> Vec<Notice> {
        let problems: BTreeMap<&str, (Option<&str>, String)> = cluster
            .excluded_pools()
            // While a driver publishes, its pool is incomplete for a moment.
            .filter(|(_, _, problem)| !matches!(problem, PoolProblem::Incomplete { .. }))
            .map(|(pool, node, problem)| (pool, (node, problem.to_string())))
            .collect();
        self.0
            .retain(|pool, _| problems.contains_key(pool.as_str()));
        let mut news = Vec::new();
        for (pool, (node, problem)) in problems {
            if self.0.get(pool) == Some(&problem) {
                continue;
            }
            tracing::warn!(pool, node, problem, "the devices of a pool are left out");
            news.extend(node.map(|node| Notice {
                regarding: node_reference(node),
                reason: EventReason::GpuPoolExcluded,
                message: format!("pool {pool} is excluded from allocation: {problem}"),
            }));
            self.0.insert(pool.to_owned(), problem);
        }
        news
    }
}

/// Reference to a node for an event; as kubelet writes it, with the name for the UID.
fn node_reference(node: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        uid: Some(node.to_owned()),
        name: Some(node.to_owned()),
        ..ObjectReference::default()
    }
}
