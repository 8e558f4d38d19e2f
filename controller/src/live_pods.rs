//! Unfinished pods that have claims or belong to a gang, pending and running.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::ObjectKey;
use drava_allocator::pod::node;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};

use crate::gang::{self, GangName};
use crate::pod;

/// An unfinished pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LivePod {
    /// Reference to the pod.
    pub(crate) reference: ObjectReference,
    /// `spec.priority`.
    pub(crate) priority: i32,
    /// Time of creation.
    pub(crate) created: Timestamp,
    /// Whether it is bound to a node.
    pub(crate) is_bound: bool,
    /// Its gang.
    pub(crate) gang: Option<GangName>,
    /// Number of pods that its gang needs.
    pub(crate) gang_min: usize,
    /// Its claims.
    pub(crate) claims: Vec<ObjectKey>,
    /// End of the grace period of a pod that is being deleted.
    pub(crate) grace_period_end: Option<Timestamp>,
}

impl LivePod {
    fn of(pod: &Pod) -> Self {
        let metadata = &pod.metadata;
        Self {
            reference: pod::reference(pod),
            priority: pod::priority(pod),
            created: metadata
                .creation_timestamp
                .as_ref()
                .map_or(Timestamp::MIN, |created| created.0),
            is_bound: node(pod).is_some(),
            gang: gang::name_of(pod),
            gang_min: match gang::of(pod) {
                Ok(Some(gang)) => gang.min,
                Ok(None) | Err(_) => 1,
            },
            claims: pod::claim_keys(pod),
            grace_period_end: metadata.deletion_timestamp.as_ref().map(|time| time.0),
        }
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct LivePods {
    /// By UID.
    pods: BTreeMap<String, LivePod>,
    /// UIDs of the pods of a gang.
    gangs: BTreeMap<GangName, BTreeSet<String>>,
    /// UIDs of the pods that are being deleted.
    deleting: BTreeSet<String>,
    /// Number of pods by priority.
    priorities: BTreeMap<i32, usize>,
}

impl LivePods {
    /// Adds or replaces a pod.
    pub(crate) fn upsert(&mut self, uid: &str, pod: &Pod) {
        let pod = LivePod::of(pod);
        self.remove(uid);
        if let Some(gang) = &pod.gang {
            let members = self.gangs.entry(gang.clone()).or_default();
            members.insert(uid.to_owned());
        } else if pod.claims.is_empty() {
            return;
        }
        if pod.grace_period_end.is_some() {
            self.deleting.insert(uid.to_owned());
        }
        *self.priorities.entry(pod.priority).or_default() += 1;
        self.pods.insert(uid.to_owned(), pod);
    }

    /// Removes a pod.
    pub(crate) fn remove(&mut self, uid: &str) {
        let Some(pod) = self.pods.remove(uid) else {
            return;
        };
        self.deleting.remove(uid);
        if let Some(count) = self.priorities.get_mut(&pod.priority) {
            *count -= 1;
            if *count == 0 {
                self.priorities.remove(&pod.priority);
            }
        }
        let Some(gang) = pod.gang else {
            return;
        };
        if let Some(members) = self.gangs.get_mut(&gang) {
            members.remove(uid);
            if members.is_empty() {
                self.gangs.remove(&gang);
            }
        }
    }

    /// Returns a pod by UID.
    pub(crate) fn get(&self, uid: &str) -> Option<&LivePod> {
        self.pods.get(uid)
    }

    /// Returns a pod with its UID.
    pub(crate) fn get_key_value(&self, uid: &str) -> Option<(&str, &LivePod)> {
        let (uid, pod) = self.pods.get_key_value(uid)?;
        Some((uid.as_str(), pod))
    }

    /// Returns the pods that are being deleted, with their UIDs.
    pub(crate) fn deleting(&self) -> impl Iterator<Item = (&str, &LivePod)> {
        let uids = self.deleting.iter();
        uids.filter_map(|uid| Some((uid.as_str(), self.pods.get(uid)?)))
    }

    /// Returns the lowest priority of all pods.
    pub(crate) fn lowest_priority(&self) -> Option<i32> {
        self.priorities.keys().next().copied()
    }

    /// Returns the pods of a gang that are not being deleted, with their UIDs.
    pub(crate) fn members(&self, gang: &GangName) -> impl Iterator<Item = (&str, &LivePod)> {
        let uids = self.gangs.get(gang).into_iter().flatten();
        uids.filter_map(|uid| Some((uid.as_str(), self.pods.get(uid)?)))
            .filter(|(_, pod)| pod.grace_period_end.is_none())
    }
}
