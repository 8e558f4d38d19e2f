//! Pods of the cluster: where they count, and what they request there.

use std::borrow::Cow;

use k8s_openapi::api::core::v1::Pod;

use super::{Cluster, PodAssignment};
use crate::capacity::Amounts;
use crate::node::neighbors::Neighbor;
use crate::node::{self, PodDemand};

impl Cluster {
    /// Returns the node on which a pod counts.
    #[must_use]
    pub fn node_of_pod(&self, uid: &str) -> Option<&str> {
        self.pods.get(uid).map(|pod| pod.node.as_str())
    }

    /// Adds or replaces a pod. A bound pod counts on its node until it has finished. Returns whether the pod is newly bound.
    pub fn upsert_pod(&mut self, pod: &Pod) -> bool {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let node = pod
            .spec
            .as_ref()
            .and_then(|spec| spec.node_name.as_deref())
            .unwrap_or_default();
        if is_finished(pod) {
            self.remove_pod(uid);
            return false;
        }
        if node.is_empty() {
            return false;
        }
        let was_bound = self.is_bound(uid);
        self.assign_pod(
            uid,
            PodAssignment {
                node: node.to_owned(),
                requests: node::held(pod),
                neighbor: Neighbor::of(pod),
                is_bound: true,
            },
        );
        !was_bound
    }

    fn is_bound(&self, uid: &str) -> bool {
        self.pods
            .get(uid)
            .is_some_and(|assignment| assignment.is_bound)
    }

    /// Assumes that a pod will be bound to `node`.
    pub fn assume_pod(&mut self, uid: &str, node: &str, demand: &PodDemand) {
        if !self.is_bound(uid) {
            self.assign_pod(
                uid,
                PodAssignment {
                    node: node.to_owned(),
                    requests: demand.requests.clone(),
                    neighbor: demand.neighbor.clone(),
                    is_bound: false,
                },
            );
        }
    }

    /// Forgets an assumed pod.
    pub fn forget_pod(&mut self, uid: &str) {
        if self
            .pods
            .get(uid)
            .is_some_and(|assignment| !assignment.is_bound)
        {
            self.remove_pod(uid);
        }
    }

    /// Removes a pod. Returns the node on which it counted.
    pub fn remove_pod(&mut self, uid: &str) -> Option<String> {
        let assignment = self.pods.remove(uid)?;
        self.rankings.mark_requests_changed(&assignment.node);
        let info = self.nodes.get(&assignment.node);
        self.anti_affinity
            .remove(&assignment.neighbor, &assignment.node, info);
        self.with_preferences.remove(uid);
        if let Some(requested) = self.requested.get_mut(&assignment.node) {
            node::subtract(requested, &assignment.requests);
            // Names of nodes that are gone are not kept.
            if requested.iter().all(|(_, amount)| amount.is_zero()) {
                self.requested.remove(&assignment.node);
            }
        }
        if self.gone.pods.contains(uid)
            && let Some(gone) = self.gone_requested.get_mut(&assignment.node)
        {
            node::subtract(gone, &assignment.requests);
        }
        Some(assignment.node)
    }

    fn assign_pod(&mut self, uid: &str, assignment: PodAssignment) {
        // Most versions of a running pod change its status only.
        if self.pods.get(uid) == Some(&assignment) {
            return;
        }
        self.remove_pod(uid);
        self.rankings.mark_requests_changed(&assignment.node);
        let requested = self.requested.entry(assignment.node.clone()).or_default();
        node::add(requested, &assignment.requests);
        if self.gone.pods.contains(uid) {
            let gone = self.gone_requested.entry(assignment.node.clone());
            node::add(gone.or_default(), &assignment.requests);
        }
        let info = self.nodes.get(&assignment.node);
        self.anti_affinity
            .add(&assignment.neighbor, &assignment.node, info);
        if assignment.neighbor.has_preferences() {
            self.with_preferences.insert(uid.to_owned());
        }
        self.pods.insert(uid.to_owned(), assignment);
    }

    /// Returns the sum of the requests of a node's pods, without the pod `except` and those that are presumed gone.
    pub(crate) fn requested_on(&self, node: &str, except: &str) -> Cow<'_, Amounts> {
        let Some(requested) = self.requested.get(node) else {
            return Cow::default();
        };
        let mut requested = Cow::Borrowed(requested);
        if let Some(gone) = self.gone_requested.get(node) {
            node::subtract(requested.to_mut(), gone);
        }
        if let Some(assignment) = self.pods.get(except)
            && assignment.node == node
            && !self.gone.pods.contains(except)
        {
            node::subtract(requested.to_mut(), &assignment.requests);
        }
        requested
    }
}

/// Returns whether all containers of the pod have terminated for good.
#[must_use]
pub fn is_finished(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}
