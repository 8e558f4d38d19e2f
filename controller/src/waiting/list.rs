//! All pods that wait, with the claims that they name.
//!
//! A pod is listed under each claim object that it names and that is known, so that a change of a claim finds the pods
//! that it concerns. Taking a pod on, changing it and letting it go keep both sides in step.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::cluster::ObjectKey;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::{Phase, Waiting};
use crate::pod;

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct WaitingList {
    /// By UID.
    pods: BTreeMap<String, Waiting>,
    /// UIDs of the pods that name a claim.
    users: BTreeMap<ObjectKey, BTreeSet<String>>,
}

impl WaitingList {
    /// Takes a pod on, or takes its new version and makes a decision due.
    pub(crate) fn put(&mut self, uid: &str, pod: Pod) {
        let keys = pod::claim_keys(&pod);
        match self.pods.get_mut(uid) {
            Some(waiting) => {
                let before = pod::claim_keys(&waiting.pod);
                waiting.pod = pod;
                waiting.wake();
                self.unlink(uid, &before);
            }
            None => {
                self.pods.insert(uid.to_owned(), Waiting::new(pod));
            }
        }
        for key in keys {
            self.users.entry(key).or_default().insert(uid.to_owned());
        }
    }

    /// Lets a pod go; whether it waited.
    pub(crate) fn remove(&mut self, uid: &str) -> bool {
        let Some(waiting) = self.pods.remove(uid) else {
            return false;
        };
        self.unlink(uid, &pod::claim_keys(&waiting.pod));
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

    pub(crate) fn get(&self, uid: &str) -> Option<&Waiting> {
        self.pods.get(uid)
    }

    pub(crate) fn get_mut(&mut self, uid: &str) -> Option<&mut Waiting> {
        self.pods.get_mut(uid)
    }

    /// UIDs of the pods that name the claim.
    pub(crate) fn users_of(&self, key: &ObjectKey) -> Vec<String> {
        self.users.get(key).into_iter().flatten().cloned().collect()
    }

    pub(crate) fn has_users(&self, key: &ObjectKey) -> bool {
        self.users.contains_key(key)
    }

    /// A claim changed: the pods that name it are due.
    pub(crate) fn wake_users(&mut self, key: &ObjectKey) {
        for uid in self.users.get(key).into_iter().flatten() {
            if let Some(waiting) = self.pods.get_mut(uid) {
                waiting.wake();
            }
        }
    }

    /// Something changed that may help anyone.
    pub(crate) fn wake_all(&mut self) {
        self.pods.values_mut().for_each(Waiting::wake);
    }

    /// UIDs of the pods that are due, in the order in which they are served.
    pub(crate) fn due(&self, now: Instant) -> Vec<String> {
        let mut due: Vec<_> = self
            .pods
            .iter()
            .filter(|(_, waiting)| waiting.is_due(now))
            .map(|(uid, waiting)| (waiting.rank(), uid.clone()))
            .collect();
        due.sort();
        due.into_iter().map(|(_, uid)| uid).collect()
    }

    /// When the first pause after a failure ends.
    pub(crate) fn first_pause_end(&self) -> Option<Instant> {
        self.pods
            .values()
            .filter_map(|waiting| match waiting.phase {
                Phase::Pausing(until) => Some(until),
                Phase::Due | Phase::Parked | Phase::Writing => None,
            })
            .min()
    }
}
