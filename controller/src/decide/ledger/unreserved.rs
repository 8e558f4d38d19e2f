//! Allocations of this controller that no pod has reserved.
//!
//! kube-scheduler reserves an allocated claim when it binds the pod. An allocation that stays unreserved blocks devices:
//! its pod cannot be bound to that node, or does not exist. The time-out of a gated pod starts when its gate is removed: no
//! scheduler has seen the pod. Until then the allocation times out only if the rest, of the pod or its gang, is missing.
//!
//! A pod that its scheduler has not rejected, as the condition `PodScheduled` says, may wait in a backlog. Its allocation has
//! [`MAX_TIMEOUTS`] times the time-out, so that it ends also if no scheduler ever tries the pod.
//!
//! While kube-scheduler shows no sign of life, nothing is released for the time-out, up to a bound: an allocation that waits
//! for a scheduler that is down blocks nothing that another allocation would not block, too.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use drava_allocator::steps;
use drava_allocator::taint::Taint;
use drava_allocator::usage::AllocatedDevice;
use drava_api::names;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::time::Instant;

use crate::action::event::ReleaseReason;
use crate::decide::timers::Timers;
use crate::pods::claim::allocated_for;

/// Grace period of a claim without pending pod: the watches of pods and claims are not synchronized.
const GRACE_PERIOD: Duration = Duration::from_secs(2);
/// Number of time-outs after which an allocation is released without a sign of life of kube-scheduler, or if it has not
/// rejected the pod.
const MAX_TIMEOUTS: u32 = 5;
/// Backoff after a failed release.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The pending pods that reference an allocated claim, in the order of their way to a scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Users {
    /// None.
    Gone,
    /// All have the gate of this controller; other claims of the pods, or of their gangs, are not allocated.
    Incomplete,
    /// All have the gate of this controller, and only the gate of one is left.
    Complete,
    /// One is visible to its scheduler, which has not rejected it so far.
    Untried,
    /// A scheduler has rejected one that is visible to it.
    Rejected,
}

/// An allocation that no pod has reserved.
#[derive(Debug, Clone)]
pub(crate) struct UnreservedAllocation {
    /// Node of the devices.
    pub(crate) node: String,
    since: Instant,
    /// Set when the release is due at once.
    release_reason: Option<ReleaseReason>,
    /// Why the last release was started.
    started_because: Option<ReleaseReason>,
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
        // An allocation with as much config as the API server accepts has no record.
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
            started_because: None,
            not_before: now,
        })
    }

    /// Starts the time-out again.
    pub(crate) fn restart(&mut self, now: Instant) {
        self.since = now;
    }

    /// Starts a release for this reason.
    pub(super) fn start_release(&mut self, reason: ReleaseReason) {
        self.started_because = Some(reason);
    }

    /// Returns why the last release was started, if one was.
    pub(crate) const fn release_reason(&self) -> Option<&ReleaseReason> {
        self.started_because.as_ref()
    }

    /// Makes the release due at once.
    pub(crate) fn release_now(&mut self, reason: ReleaseReason) {
        self.release_reason.get_or_insert(reason);
    }

    /// Delays the next attempt after a failed release.
    pub(crate) fn retry_later(&mut self, now: Instant) {
        self.not_before = now + RETRY_INTERVAL;
    }

    /// Returns when the allocation is checked for release at the earliest.
    pub(super) fn first_check(&self, times: &ReleaseTimes) -> Instant {
        let at = match &self.release_reason {
            Some(_) => self.since,
            None => self.since + GRACE_PERIOD.min(times.release_after),
        };
        at.max(self.not_before)
    }

    /// Checks whether the allocation is to be released now.
    pub(super) fn check(
        &self,
        now: Instant,
        times: &ReleaseTimes,
        users: Users,
        node_exists: bool,
    ) -> ReleaseCheck {
        if now < self.not_before {
            return ReleaseCheck::NotBefore(self.not_before);
        }
        if let Some(reason) = &self.release_reason {
            return ReleaseCheck::Due(reason.clone());
        }
        let age = now.duration_since(self.since);
        let bound = times.release_after.saturating_mul(MAX_TIMEOUTS);
        let after = match users {
            Users::Untried => bound,
            Users::Gone | Users::Complete | Users::Incomplete | Users::Rejected => {
                times.release_after
            }
        };
        let has_timed_out = users != Users::Complete && age >= after;
        if has_timed_out && users == Users::Incomplete {
            return ReleaseCheck::Due(ReleaseReason::Incomplete {
                node: self.node.clone(),
                after,
            });
        }
        if has_timed_out && (times.is_scheduler_active_since(self.since) || age >= bound) {
            return ReleaseCheck::Due(ReleaseReason::Unreserved {
                node: self.node.clone(),
                after,
            });
        }
        let grace_end = self.since + GRACE_PERIOD;
        if now < grace_end {
            let end = self.since + after;
            return ReleaseCheck::NotBefore(if has_timed_out {
                grace_end
            } else {
                grace_end.min(end)
            });
        }
        if users == Users::Gone {
            return ReleaseCheck::Due(ReleaseReason::NoPendingPod);
        }
        if !node_exists {
            return ReleaseCheck::Due(ReleaseReason::NodeDeleted {
                node: self.node.clone(),
            });
        }
        if has_timed_out {
            ReleaseCheck::Frozen(self.since + bound)
        } else {
            let end = self.since + after;
            // The removal of the gate starts the time-out again.
            ReleaseCheck::NotBefore(if end > now {
                end
            } else {
                now + times.release_after
            })
        }
    }
}

/// Result of a check.
#[derive(Debug)]
pub(super) enum ReleaseCheck {
    /// The allocation is to be released now.
    Due(ReleaseReason),
    /// It is checked again at this time.
    NotBefore(Instant),
    /// It has timed out, and is released at a sign of life of kube-scheduler and another time-out, or at this time.
    Frozen(Instant),
}

/// When unreserved allocations are released.
#[derive(Debug)]
pub(super) struct ReleaseTimes {
    release_after: Duration,
    /// Last sign of life of kube-scheduler.
    scheduler_active: Option<Instant>,
}

impl ReleaseTimes {
    pub(super) const fn new(release_after: Duration) -> Self {
        Self {
            release_after,
            scheduler_active: None,
        }
    }

    /// Notes a sign of life of kube-scheduler.
    pub(super) const fn scheduler_active(&mut self, now: Instant) {
        self.scheduler_active = Some(now);
    }

    fn is_scheduler_active_since(&self, since: Instant) -> bool {
        self.scheduler_active.is_some_and(|active| active >= since)
    }
}

/// When unreserved allocations are checked for release: each has a time.
#[derive(Debug, Default)]
pub(super) struct ReleaseTimers {
    times: Timers<ObjectKey>,
    nodes: BTreeMap<ObjectKey, String>,
    by_node: BTreeSet<(String, ObjectKey)>,
}

impl ReleaseTimers {
    /// Sets when the allocation of the claim on this node is checked.
    pub(super) fn set(&mut self, key: &ObjectKey, node: &str, at: Instant) {
        self.times.set(key.clone(), at);
        if self.nodes.get(key).map(String::as_str) != Some(node) {
            self.unlink(key);
            self.nodes.insert(key.clone(), node.to_owned());
            self.by_node.insert((node.to_owned(), key.clone()));
        }
    }

    /// The claim has no unreserved allocation.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        self.times.remove(key);
        self.unlink(key);
    }

    fn unlink(&mut self, key: &ObjectKey) {
        if let Some((key, node)) = self.nodes.remove_entry(key) {
            self.by_node.remove(&(node, key));
        }
    }

    /// Returns the claims with allocations on the node.
    pub(super) fn on_node(&self, node: &str) -> Vec<ObjectKey> {
        let first = (node.to_owned(), ObjectKey::default());
        let claims = steps::counted(self.by_node.range(first..));
        let of_node = claims.take_while(|(of, _)| of == node);
        of_node.map(|(_, key)| key.clone()).collect()
    }

    /// Returns the claims to check now. Each is to be set or removed.
    pub(super) fn pop_due(&mut self, now: Instant) -> Vec<ObjectKey> {
        self.times.pop_due(now)
    }

    /// Returns when the next claim is checked.
    pub(super) fn next(&self) -> Option<Instant> {
        self.times.next()
    }
}
