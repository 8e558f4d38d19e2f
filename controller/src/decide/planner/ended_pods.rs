//! Pods that have ended, until kube-controller-manager has released their claims.
//!
//! Their devices become free without an eviction: a group that needs them waits instead of evicting other pods.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::DecisionTime;
use crate::decide::ledger::{Ledger, REVIEW_INTERVAL};
use crate::pods::{claim, pod};

/// A pod that has ended.
#[derive(Debug)]
struct EndedPod {
    claims: Vec<ObjectKey>,
    /// When it ended, if this leader has not seen it run.
    ended_before: Option<Timestamp>,
    /// When the release is no longer expected; known from the first review on.
    until: Option<Instant>,
}

/// See the [module](self). By UID.
#[derive(Debug, Default)]
pub(super) struct EndedPods(BTreeMap<String, EndedPod>);

impl EndedPods {
    /// Adds a pod that this leader has seen run.
    pub(super) fn insert(&mut self, uid: &str, claims: Vec<ObjectKey>) {
        let pod = EndedPod {
            claims,
            ended_before: None,
            until: None,
        };
        self.0.insert(uid.to_owned(), pod);
    }

    /// Adds a pod that had ended when this leader observed it first. Without a time in its status, no release is expected.
    pub(super) fn insert_finished(&mut self, uid: &str, pod: &Pod) {
        let claims = pod::claim_keys(pod);
        let Some(ended) = pod::ended_at(pod).filter(|_| !claims.is_empty()) else {
            return;
        };
        let pod = self.0.entry(uid.to_owned());
        pod.or_insert(EndedPod {
            claims,
            ended_before: Some(ended),
            until: None,
        });
    }

    /// Removes the pods that have reserved no claim any longer, and those whose release is overdue.
    pub(super) fn review(&mut self, ledger: &Ledger, time: &DecisionTime) {
        let now = time.instant;
        self.0.retain(|uid, pod| {
            let until = *pod.until.get_or_insert_with(|| {
                let passed = pod
                    .ended_before
                    .map(|ended| time.time.0.duration_since(ended));
                // Negative if the clock of the node is ahead.
                let passed = passed.and_then(|passed| Duration::try_from(passed).ok());
                now + REVIEW_INTERVAL.saturating_sub(passed.unwrap_or_default())
            });
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
