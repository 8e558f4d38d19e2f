//! Pods that have ended, until kube-controller-manager has released their claims.
//!
//! Their devices become free without an eviction: a group that needs them waits instead of evicting other pods.

use std::collections::BTreeMap;

use drava_allocator::object::ObjectKey;
use tokio::time::Instant;

use super::room::REVIEW_INTERVAL;
use crate::claim;
use crate::ledger::Ledger;

/// A pod that has ended.
#[derive(Debug)]
struct EndedPod {
    claims: Vec<ObjectKey>,
    /// When the release is no longer expected; known from the first review on.
    until: Option<Instant>,
}

/// See the [module](self). By UID.
#[derive(Debug, Default)]
pub(super) struct EndedPods(BTreeMap<String, EndedPod>);

impl EndedPods {
    /// Adds a pod that has ended.
    pub(super) fn insert(&mut self, uid: &str, claims: Vec<ObjectKey>) {
        let until = None;
        self.0.insert(uid.to_owned(), EndedPod { claims, until });
    }

    /// Removes the pods that have reserved no claim any longer, and those whose release is overdue.
    pub(super) fn review(&mut self, ledger: &Ledger, now: Instant) {
        self.0.retain(|uid, pod| {
            let until = *pod.until.get_or_insert(now + REVIEW_INTERVAL);
            let mut claims = pod.claims.iter().filter_map(|key| ledger.claim(key));
            now < until && claims.any(|claim| claim::consumers(claim).any(|each| each == uid))
        });
    }

    /// Returns the UIDs of the pods.
    pub(super) fn uids(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    /// Returns the claims of a pod.
    pub(super) fn claims(&self, uid: &str) -> Option<&[ObjectKey]> {
        self.0.get(uid).map(|pod| pod.claims.as_slice())
    }
}
