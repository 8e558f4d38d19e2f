//! Allocations of this controller that no pod has reserved yet.
//!
//! kube-scheduler reserves an allocated claim when it binds the pod. One that stays unreserved holds devices in
//! vain: its pod cannot be bound on that node, or is gone.

use std::time::Duration;

use drava_allocator::usage::AllocatedDevice;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use crate::claim::{allocated_for, is_reserved};

/// Time in which a claim that no waiting pod names is left alone: the watches of pods and claims are not in step.
const GRACE: Duration = Duration::from_secs(2);
/// Pause after a release that failed.
const RETRY: Duration = Duration::from_secs(5);

/// An allocation that no pod has reserved.
#[derive(Debug, Clone)]
pub(crate) struct Unreserved {
    uid: String,
    /// Node on which the devices are.
    pub(crate) node: String,
    since: Instant,
    wanted: Option<String>,
    releasing: bool,
    not_before: Instant,
}

impl Unreserved {
    /// The entry for a claim in a new version, if it needs one.
    pub(crate) fn observe(
        claim: &ResourceClaim,
        known: Option<&Self>,
        now: Instant,
    ) -> Option<Self> {
        let allocation = claim.status.as_ref()?.allocation.as_ref()?;
        // An allocation by kube-scheduler or by hand is none of this controller's business.
        if is_reserved(claim)
            || allocated_for(claim).is_none()
            || AllocatedDevice::of_claim(claim).is_empty()
        {
            return None;
        }
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        if let Some(known) = known
            && known.uid == uid
        {
            return Some(known.clone());
        }
        let node = allocation
            .node_selector
            .iter()
            .flat_map(|selector| &selector.node_selector_terms)
            .flat_map(|term| term.match_fields.iter().flatten())
            .find(|field| field.key == "metadata.name")
            .and_then(|field| field.values.as_ref()?.first().cloned())
            .unwrap_or_default();
        Some(Self {
            uid,
            node,
            since: now,
            wanted: None,
            releasing: false,
            not_before: now,
        })
    }

    /// Makes the release due at once.
    pub(crate) fn release_now(&mut self, why: &str) {
        self.wanted.get_or_insert_with(|| why.to_owned());
    }

    pub(crate) fn release_started(&mut self) {
        self.releasing = true;
    }

    /// The release ended; if it had succeeded, there would soon be no entry.
    pub(crate) fn release_ended(&mut self, now: Instant) {
        self.releasing = false;
        self.not_before = now + RETRY;
    }

    /// Why the allocation is to be released now, if it is.
    pub(crate) fn due(
        &self,
        now: Instant,
        after: Duration,
        used: bool,
        node_exists: bool,
    ) -> Option<String> {
        if self.releasing || now < self.not_before {
            return None;
        }
        if let Some(why) = &self.wanted {
            return Some(why.clone());
        }
        let age = now.duration_since(self.since);
        if age >= after {
            return Some(format!(
                "no pod has reserved it within {} s: kube-scheduler did not bind the pod on node {}",
                after.as_secs(),
                self.node
            ));
        }
        if age >= GRACE && !used {
            return Some("no pod waits for it".to_owned());
        }
        (age >= GRACE && !node_exists).then(|| format!("node {} does not exist", self.node))
    }

    /// When the release may become due without a new observation.
    pub(crate) fn due_at(&self, after: Duration, used: bool) -> Option<Instant> {
        if self.releasing {
            return None;
        }
        let by_age = self.since + if used { after } else { GRACE.min(after) };
        let at = if self.wanted.is_some() {
            self.since
        } else {
            by_age
        };
        Some(at.max(self.not_before))
    }
}
