//! The scheduling queue: all pods that are pending for devices, indexed by the claims that they reference.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::ObjectKey;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::pod;

pub(crate) mod pending_pod;

use pending_pod::{PendingPod, Phase};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct PodQueue {
    /// By UID.
    pods: BTreeMap<String, PendingPod>,
    /// UIDs of the pods that reference a claim.
    users: BTreeMap<ObjectKey, BTreeSet<String>>,
}

impl PodQueue {
    /// Adds a pod, or replaces its version and makes a decision due.
    pub(crate) fn upsert(&mut self, uid: &str, pod: Pod) {
        let keys = pod::claim_keys(&pod);
        match self.pods.get_mut(uid) {
            Some(pending) => {
                let before = pod::claim_keys(&pending.pod);
                pending.replace(pod);
                self.unlink(uid, &before);
            }
            None => {
                self.pods.insert(uid.to_owned(), PendingPod::new(pod));
            }
        }
        for key in keys {
            self.users.entry(key).or_default().insert(uid.to_owned());
        }
    }

    /// Removes a pod. Returns whether it was pending.
    pub(crate) fn remove(&mut self, uid: &str) -> bool {
        let Some(pending) = self.pods.remove(uid) else {
            return false;
        };
        self.unlink(uid, &pod::claim_keys(&pending.pod));
        true
    }

    fn unlink(&mut self, uid: &str, keys: &[ObjectKey]) {
        for key in keys {
            if let Some(users) = self.users.get_mut(key) {
                users.remove(uid);
                if users.is_empty() {
                    self.users.remove(key);
                }
            }
        }
    }

    /// Returns all pods.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &PendingPod> {
        self.pods.values()
    }

    pub(crate) fn get(&self, uid: &str) -> Option<&PendingPod> {
        self.pods.get(uid)
    }

    pub(crate) fn get_mut(&mut self, uid: &str) -> Option<&mut PendingPod> {
        self.pods.get_mut(uid)
    }

    /// Returns the UIDs of the pods that reference the claim.
    pub(crate) fn users_of(&self, key: &ObjectKey) -> Vec<String> {
        self.users.get(key).into_iter().flatten().cloned().collect()
    }

    pub(crate) fn has_users(&self, key: &ObjectKey) -> bool {
        self.users.contains_key(key)
    }

    /// Activates the pods that reference a changed claim.
    pub(crate) fn activate_users(&mut self, key: &ObjectKey) {
        for uid in self.users.get(key).into_iter().flatten() {
            if let Some(pending) = self.pods.get_mut(uid) {
                pending.activate();
            }
        }
    }

    /// Stops avoiding a node that has changed.
    pub(crate) fn node_changed(&mut self, node: &str) {
        for pending in self.pods.values_mut() {
            pending.node_changed(node);
        }
    }

    /// Activates the pods that a pod's end on the node can help.
    pub(crate) fn resources_freed(&mut self, node: &str) {
        for pending in self.pods.values_mut() {
            pending.resources_freed(node);
        }
    }

    /// Activates all pods after a change that may make any of them schedulable.
    pub(crate) fn activate_all(&mut self) {
        self.pods.values_mut().for_each(PendingPod::activate);
    }

    /// Returns the UIDs of the due pods in queue order.
    pub(crate) fn due(&self, now: Instant) -> Vec<String> {
        let mut due: Vec<_> = self
            .pods
            .iter()
            .filter(|(_, pending)| pending.is_due(now))
            .map(|(uid, pending)| (pending.order(), uid.clone()))
            .collect();
        due.sort();
        due.into_iter().map(|(_, uid)| uid).collect()
    }

    /// Returns when the first backoff ends.
    pub(crate) fn next_backoff_end(&self) -> Option<Instant> {
        self.pods
            .values()
            .filter_map(|pending| match pending.phase {
                Phase::Backoff(until) => Some(until),
                Phase::Active | Phase::Unschedulable | Phase::Allocating => None,
            })
            .min()
    }
}
