//! Allocations of this controller that no pod has reserved.
//!
//! kube-scheduler reserves an allocated claim when it binds the pod. An allocation that stays unreserved blocks devices:
//! its pod cannot be bound to that node, or does not exist. The time-out of a gated pod starts when its gate is removed.

use std::time::Duration;

use drava_allocator::taint::Taint;
use drava_allocator::usage::AllocatedDevice;
use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use crate::claim::allocated_for;
use crate::event::ReleaseReason;

/// Grace period of a claim without pending pod: the watches of pods and claims are not synchronized.
const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Backoff after a failed release.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// An allocation that no pod has reserved.
#[derive(Debug, Clone)]
pub(crate) struct UnreservedAllocation {
    /// Node of the devices.
    pub(crate) node: String,
    since: Instant,
    /// Set when the release is due at once.
    release_reason: Option<ReleaseReason>,
    not_before: Instant,
}

/// Returns whether a request of the claim tolerates the taint that reserves devices for this controller. Without that,
/// kube-scheduler cannot have allocated them.
fn tolerates_managed_taint(claim: &ResourceClaim) -> bool {
    let taint = Taint {
        key: names::MANAGED_TAINT.to_owned(),
        value: String::new(),
        effect: "NoSchedule".to_owned(),
    };
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    devices
        .into_iter()
        .flat_map(|devices| devices.results.iter().flatten())
        .any(|result| taint.tolerated_by(result.tolerations.as_deref().unwrap_or_default()))
}

impl UnreservedAllocation {
    /// Returns the entry for a claim that is allocated and not reserved; `None` if this controller does not manage the
    /// allocation: kube-scheduler or a user has written it.
    pub(crate) fn of(claim: &ResourceClaim, now: Instant) -> Option<Self> {
        let allocation = claim.status.as_ref()?.allocation.as_ref()?;
        // A tenant can delete the annotation.
        let is_managed = allocated_for(claim).is_some() || !tolerates_managed_taint(claim);
        if !is_managed || AllocatedDevice::of_claim(claim).is_empty() {
            return None;
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
            node,
            since: now,
            release_reason: None,
            not_before: now,
        })
    }

    /// Starts the time-out again.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.since = now;
    }

    /// Makes the release due at once.
    pub(crate) fn release_now(&mut self, reason: ReleaseReason) {
        self.release_reason.get_or_insert(reason);
    }

    /// Delays the next attempt after a failed release.
    pub(crate) fn retry_later(&mut self, now: Instant) {
        self.not_before = now + RETRY_INTERVAL;
    }

    /// Returns why the allocation is to be released now; `None` if it is not.
    pub(crate) fn due(
        &self,
        now: Instant,
        release_after: Duration,
        has_users: bool,
        node_exists: bool,
    ) -> Option<ReleaseReason> {
        if now < self.not_before {
            return None;
        }
        if let Some(reason) = &self.release_reason {
            return Some(reason.clone());
        }
        let age = now.duration_since(self.since);
        if age >= release_after {
            return Some(ReleaseReason::Unreserved {
                node: self.node.clone(),
                after: release_after,
            });
        }
        if age < GRACE_PERIOD {
            return None;
        }
        if !has_users {
            return Some(ReleaseReason::NoPendingPod);
        }
        (!node_exists).then(|| ReleaseReason::NodeDeleted {
            node: self.node.clone(),
        })
    }

    /// Returns when the release may become due without a new observation.
    pub(crate) fn due_at(&self, release_after: Duration, has_users: bool) -> Instant {
        let by_age = self.since
            + if has_users {
                release_after
            } else {
                GRACE_PERIOD.min(release_after)
            };
        let at = if self.release_reason.is_some() {
            self.since
        } else {
            by_age
        };
        at.max(self.not_before)
    }
}
