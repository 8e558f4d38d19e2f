//! A pod that is pending for devices.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use drava_allocator::known::Known;
use drava_allocator::node::PodDemand;
use drava_allocator::object::{ObjectKey, object_key};
use drava_allocator::turn::Work;
use drava_api::names::ALLOCATION_GATE;
use drava_api::reason::Reason;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::node_set::NodeSet;
use super::wake_index::{UnfitNodes, WakeKey};
use crate::pods::gang::{self, GangName};
use crate::pods::{pod, pod_condition};

/// Backoff after the first failure; doubles with each failure.
const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum time for which a pod is not allocated again where it was not bound in time.
const MAX_HOLD: Duration = Duration::from_secs(300);
/// Maximum backoff.
const MAX_BACKOFF: Duration = Duration::from_secs(120);
/// Time for which the head of the queue reserves devices although no pod ends for which it waits, and for which it then
/// leaves them to others. Devices must not stay idle for a pod that waits for pods that never end.
pub(crate) const HEAD_PATIENCE: Duration = Duration::from_secs(300);

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct PendingPod {
    /// The pod, reduced to the fields that decisions need.
    pub(crate) pod: Pod,
    /// Since when a deleted pod of its controller had waited, whose age it has.
    inherited: Option<Timestamp>,
    /// See [`Self::new`].
    arrival: u64,
    /// Phase of its scheduling.
    pub(crate) phase: Phase,
    /// The work for which the last decision was suspended, or that of the decision to which it yields.
    pub(super) suspended_by: Option<Work>,
    /// Whether something has changed since the first turn of the suspended decision that could help the pod.
    is_outdated: bool,
    /// Reason of the last rejection; `None` before the first decision and after an allocation.
    pub(crate) reason: Option<Reason>,
    /// Whether the last decision rejected the pod only because of its quota.
    pub(crate) waits_for_quota: bool,
    /// Whether devices are being freed for the pod to restore the guarantee of its tenant.
    pub(crate) is_reclaiming: bool,
    /// Whether other pods decide where the pod can run, by its affinity for instance.
    has_neighbor_rules: bool,
    /// Consecutive failures.
    failures: u32,
    /// How often it was not bound in time where it was allocated.
    timeouts: u32,
    /// The time that it had for that at last.
    timeout: Duration,
    /// Until when it is not allocated again on the nodes that it avoids.
    held_until: Option<Instant>,
    /// Whether it waits behind the others of its priority, because it was not bound in time on any node that it fits.
    is_behind: bool,
    /// Nodes to which kube-scheduler did not bind the pod; selected last until the node or the pod changes.
    avoided_nodes: BTreeSet<String>,
    /// Nodes that the last decision rejected regardless of devices.
    unfit_nodes: Arc<NodeSet>,
    head_wait: Option<HeadWait>,
    /// Whether its request counts in the mix of requests.
    pub(crate) is_counted: bool,
    /// Whether a node is planned for the pod, as a member of its gang without claims. Claims carry their own state.
    pub(crate) is_placed: bool,
    /// Whether only the gate of this controller is left: the claims of the pod are allocated, and the watch has delivered
    /// them.
    pub(crate) is_complete: bool,
}

/// Wait of the head of the queue for the end of other pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadWait {
    /// Nothing is reserved: this number of pods has to end, and none is known to end.
    Watching { awaited: usize },
    /// Devices are reserved; since this time this number of pods has to end.
    Reserving { since: Instant, awaited: usize },
    /// Nothing is reserved before this time.
    Paused(Instant),
}

/// Phase of a pending pod, as in the scheduling queue of kube-scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A decision is due.
    Active,
    /// No decision until something changes.
    Unschedulable,
    /// Allocations are being written, or the gate is being removed.
    Allocating,
    /// A decision is due at this time.
    Backoff(Instant),
    /// A decision is due when something changes, or at this time.
    Behind(Instant),
}

/// Sort key of pending pods: those that restore the guarantee of their tenant first, then by priority, then those that a
/// scheduler does not bind last, then the age of the gang, then the age of the pod. A gang has the priority of its member with
/// the lowest one, and the age of its oldest one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueOrder {
    is_reclaiming: Reverse<bool>,
    priority: Reverse<i32>,
    is_behind: bool,
    /// Of the gang; of the pod if it belongs to none.
    group_age: Age,
    group: ObjectKey,
    age: Age,
    name: ObjectKey,
}

/// Sort key of pods by their age, the oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Age {
    /// A full second: the pods of a manifest have the same one.
    since: Timestamp,
    /// See [`PendingPod::new`].
    arrival: u64,
}

impl QueueOrder {
    /// Returns the priority of the pod or its gang.
    pub(crate) const fn priority(&self) -> i32 {
        self.priority.0
    }

    /// Returns the order of the pod as a member of a gang with this order.
    pub(crate) fn in_gang(self, gang: &Self) -> Self {
        Self {
            is_reclaiming: gang.is_reclaiming,
            priority: gang.priority,
            is_behind: gang.is_behind,
            group_age: gang.group_age,
            group: gang.group.clone(),
            ..self
        }
    }

    /// Returns the order of the gang to which pods with both orders belong.
    pub(crate) fn joined(self, other: &Self) -> Self {
        let group_age = self.group_age.min(other.group_age);
        Self {
            is_reclaiming: self.is_reclaiming.min(other.is_reclaiming),
            priority: self.priority.max(other.priority),
            is_behind: self.is_behind || other.is_behind,
            group_age,
            ..self
        }
    }
}

/// Returns how long a pod does not use a node again where it was not bound within `after`; `timeouts` have preceded.
pub(crate) fn hold(after: Duration, timeouts: u32) -> Duration {
    after.saturating_mul(1 << timeouts.min(7)).min(MAX_HOLD)
}

impl PendingPod {
    /// A new pod, which has the age of a deleted one that had waited since `inherited`. It came after the pods of a lower
    /// `arrival`, which orders those that were created in the same second.
    pub(crate) fn new(pod: Pod, inherited: Option<Timestamp>, arrival: u64) -> Self {
        Self {
            inherited,
            arrival,
            has_neighbor_rules: PodDemand::of(&pod).has_neighbor_rules(),
            pod,
            phase: Phase::Active,
            suspended_by: None,
            is_outdated: false,
            reason: None,
            waits_for_quota: false,
            is_reclaiming: false,
            failures: 0,
            timeouts: 0,
            timeout: Duration::ZERO,
            held_until: None,
            is_behind: false,
            avoided_nodes: BTreeSet::new(),
            unfit_nodes: Arc::default(),
            head_wait: None,
            is_counted: false,
            is_placed: false,
            is_complete: false,
        }
    }

    /// Returns whether the pod, as the head of the queue, may reserve devices while it waits for the end of `awaited` pods.
    /// Those that `end_by_themselves` may end at any time; for others it reserves from the first end on that brings it closer.
    pub(crate) fn may_reserve(
        &mut self,
        awaited: usize,
        end_by_themselves: bool,
        now: Instant,
    ) -> bool {
        match self.head_wait {
            Some(HeadWait::Paused(until)) if now < until => false,
            None | Some(HeadWait::Paused(_)) if !end_by_themselves => {
                self.head_wait = Some(HeadWait::Watching { awaited });
                false
            }
            Some(HeadWait::Watching { awaited: before })
                if awaited >= before && !end_by_themselves =>
            {
                self.head_wait = Some(HeadWait::Watching { awaited });
                false
            }
            Some(HeadWait::Reserving {
                since,
                awaited: before,
            }) if awaited >= before => {
                let is_patient = now < since + HEAD_PATIENCE;
                if !is_patient {
                    self.head_wait = Some(HeadWait::Paused(now + HEAD_PATIENCE));
                }
                is_patient
            }
            Some(_) | None => {
                let since = now;
                self.head_wait = Some(HeadWait::Reserving { since, awaited });
                true
            }
        }
    }

    /// Returns the time that is the age of the pod in the queue: its creation, or since when a pod had waited whose age it has.
    pub(super) fn since(&self) -> Timestamp {
        let created = self.pod.metadata.creation_timestamp.as_ref();
        let created = created.map_or(Timestamp::MIN, |created| created.0);
        self.inherited.map_or(created, |since| since.min(created))
    }

    /// Returns the order of the pod alone.
    pub(crate) fn order(&self) -> QueueOrder {
        let age = Age {
            since: self.since(),
            arrival: self.arrival,
        };
        let name = object_key(&self.pod.metadata);
        QueueOrder {
            is_reclaiming: Reverse(self.is_reclaiming),
            priority: Reverse(pod::priority(&self.pod)),
            is_behind: self.is_behind,
            group_age: age,
            group: self
                .gang()
                .map_or_else(|| name.clone(), |gang| (name.0.clone(), gang.to_string())),
            age,
            name,
        }
    }

    /// Returns the namespace of the pod.
    pub(crate) fn namespace(&self) -> &str {
        self.pod.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// Removes the gate of this controller, as a finished write has done.
    pub(crate) fn remove_gate(&mut self) {
        self.is_complete = false;
        if let Some(spec) = &mut self.pod.spec {
            let gates = spec.scheduling_gates.take().into_iter().flatten();
            let left: Vec<_> = gates.filter(|gate| gate.name != ALLOCATION_GATE).collect();
            spec.scheduling_gates = (!left.is_empty()).then_some(left);
        }
    }

    /// Returns the gang of the pod.
    pub(crate) fn gang(&self) -> Option<GangName> {
        gang::name_of(&self.pod)
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Active => true,
            Phase::Backoff(until) | Phase::Behind(until) => now >= until,
            Phase::Unschedulable | Phase::Allocating => false,
        }
    }

    /// Makes a decision due after a change; does not shorten a backoff. Returns whether the phase has changed.
    pub(crate) fn activate(&mut self) -> bool {
        self.is_outdated |= self.suspended_by.is_some();
        let is_changed = matches!(self.phase, Phase::Unschedulable | Phase::Behind(_));
        if is_changed {
            self.phase = Phase::Active;
        }
        is_changed
    }

    /// Ends a decision of one or more turns: it is repeated from the start if something has changed meanwhile.
    pub(crate) fn decided(&mut self) {
        if std::mem::take(&mut self.is_outdated) {
            self.activate();
        }
    }

    /// Returns the end of a backoff that goes on.
    pub(crate) fn back_off_end(&self) -> Option<Instant> {
        match self.phase {
            Phase::Backoff(until) => Some(until),
            _ => None,
        }
    }

    /// Records the nodes that a decision rejected regardless of devices.
    pub(crate) fn set_unfit_nodes(&mut self, nodes: Arc<NodeSet>) {
        self.unfit_nodes = nodes;
    }

    /// Returns what decides whether a change helps the pod; `None` if no change wakes it.
    pub(super) fn wake_key(&self) -> Option<WakeKey> {
        // A decision that goes on is repeated after a change, which one change is enough for.
        let is_repeated = self.suspended_by.is_some() && !self.is_outdated;
        let is_asleep = matches!(self.phase, Phase::Unschedulable | Phase::Behind(_));
        (is_asleep || is_repeated).then(|| WakeKey {
            namespace: self.namespace().to_owned(),
            priority: pod::priority(&self.pod),
            has_neighbor_rules: self.has_neighbor_rules,
            waits_for_quota: self.waits_for_quota,
            unfit: UnfitNodes {
                nodes: Arc::clone(&self.unfit_nodes),
                // A pod that waits behind others tells of no node, and the nodes that a decision rejects are not known before
                // its end.
                are_unknown: matches!(self.phase, Phase::Behind(_)) || self.suspended_by.is_some(),
            },
        })
    }

    /// Forgets a deleted node by its number. Returns whether the last decision rejected it.
    pub(super) fn forget_node(&mut self, number: usize, known: &mut Known<NodeSet>) -> bool {
        let was_unfit = self.unfit_nodes.contains(number);
        if was_unfit {
            let mut left = NodeSet::clone(&self.unfit_nodes);
            left.remove(number);
            self.unfit_nodes = known.shared(&Arc::new(left));
        }
        was_unfit
    }

    /// A pod has ended on a node.
    pub(super) fn resources_freed(&mut self, node: &str) {
        // Others may have the devices of a node at least as long as the pod had them.
        if self.held_until.is_none() {
            self.stop_avoiding(node);
        }
    }

    /// Stops avoiding a node where something has changed: its scheduler may bind the pod there now. Returns whether the pod
    /// avoided it.
    pub(super) fn stop_avoiding(&mut self, node: &str) -> bool {
        let was_avoided = self.avoided_nodes.remove(node);
        if was_avoided {
            self.held_until = None;
            self.is_behind = false;
        }
        was_avoided
    }

    /// Selects a node last where the pod was not bound in time, and is not allocated there for a while: so long that others
    /// can have the devices at least as long as it had them, and doubled each time.
    pub(crate) fn not_bound(&mut self, node: &str, after: Duration, now: Instant) {
        self.avoided_nodes.insert(node.to_owned());
        let hold = hold(after, self.timeouts);
        self.timeouts = self.timeouts.saturating_add(1);
        self.timeout = after;
        self.held_until = Some(now + hold);
        self.phase = Phase::Backoff(now + INITIAL_BACKOFF);
    }

    /// Returns within which time the pod was not bound at last.
    pub(crate) const fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns until when the pod is not allocated on the node.
    pub(crate) fn held_on(&self, node: &str, now: Instant) -> Option<Instant> {
        let until = self.held_until.filter(|until| now < *until)?;
        self.avoided_nodes.contains(node).then_some(until)
    }

    /// Ends the time in which the pod is not allocated where it was not bound, if it is over.
    pub(crate) fn end_hold(&mut self, now: Instant) {
        self.held_until.take_if(|until| *until <= now);
    }

    /// Makes the pod wait behind others until this time, or until something changes elsewhere.
    pub(crate) fn wait_behind(&mut self, until: Instant) {
        self.is_behind = true;
        self.unfit_nodes = Arc::default();
        self.phase = Phase::Behind(until);
    }

    /// Starts a backoff after a failure.
    pub(crate) fn back_off(&mut self, now: Instant) {
        let backoff = INITIAL_BACKOFF.saturating_mul(1 << self.failures.min(7));
        self.failures = self.failures.saturating_add(1);
        self.phase = Phase::Backoff(now + backoff.min(MAX_BACKOFF));
    }

    /// Starts a backoff after the pod could not be bound to `node`, and selects the node last. The backoff grows only if the
    /// node was avoided before, so the pod soon reaches the nodes that it has not tried.
    pub(crate) fn avoid(&mut self, node: &str, now: Instant) {
        if self.avoided_nodes.insert(node.to_owned()) {
            self.phase = Phase::Backoff(now + INITIAL_BACKOFF);
        } else {
            self.back_off(now);
        }
    }

    pub(crate) const fn avoided_nodes(&self) -> &BTreeSet<String> {
        &self.avoided_nodes
    }

    /// Replaces the pod by its new version. A changed specification may fit on nodes that were avoided. The condition that
    /// the controller itself writes makes no decision due.
    pub(crate) fn replace(&mut self, pod: Pod) {
        let is_own_change = pod_condition::is_only_change(&self.pod, &pod);
        if self.pod.spec != pod.spec {
            self.avoided_nodes.clear();
            self.held_until = None;
            self.is_behind = false;
        }
        self.has_neighbor_rules = PodDemand::of(&pod).has_neighbor_rules();
        self.pod = pod;
        if !is_own_change {
            self.activate();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::queue::node_set::NodeNumbers;
    use crate::fixture::pod;

    #[test]
    fn stops_avoiding_node_after_hold_when_pod_ends_there() {
        let mut pending = PendingPod::new(pod("a", &[]), None, 0);
        let now = Instant::now();
        pending.not_bound("n1", Duration::from_secs(60), now);
        pending.resources_freed("n1");
        assert!(pending.avoided_nodes().contains("n1"), "others come first");
        pending.end_hold(now + Duration::from_secs(59));
        pending.resources_freed("n1");
        assert!(pending.avoided_nodes().contains("n1"));
        pending.end_hold(now + Duration::from_secs(60));
        pending.resources_freed("n1");
        assert!(pending.avoided_nodes().is_empty());
    }

    #[test]
    fn decides_again_for_node_that_becomes_fit_meanwhile() {
        let mut suspended = PendingPod::new(pod("a", &[]), None, 0);
        suspended.phase = Phase::Unschedulable;
        suspended.suspended_by = Some(Work::Searches);
        assert!(suspended.wake_key().unwrap().unfit.may_contain(Some(0)));
        suspended.activate();
        assert!(suspended.wake_key().is_none(), "it is repeated in any case");
        suspended.suspended_by = None;
        suspended.phase = Phase::Unschedulable;
        suspended.decided();
        assert_eq!(suspended.phase, Phase::Active);

        let mut behind = PendingPod::new(pod("b", &[]), None, 0);
        let unfit = NodeNumbers::default().set(["n1"].into_iter());
        behind.set_unfit_nodes(Arc::new(unfit));
        behind.wait_behind(Instant::now() + MAX_HOLD);
        let unfit = behind.wake_key().unwrap().unfit;
        assert!(!unfit.contains(Some(0)) && unfit.may_contain(Some(0)));
    }

    #[test]
    fn pods_share_what_is_left_of_their_unfit_nodes() {
        let unfit = NodeNumbers::default().set(["n1", "n2"].into_iter());
        let unfit = Arc::new(unfit);
        let mut known = Known::default();
        let left = ["a", "b"].map(|name| {
            let mut pending = PendingPod::new(pod(name, &[]), None, 0);
            pending.set_unfit_nodes(Arc::clone(&unfit));
            assert!(pending.forget_node(0, &mut known));
            assert!(!pending.forget_node(0, &mut known));
            pending.unfit_nodes
        });
        assert!(Arc::ptr_eq(&left[0], &left[1]));
        assert!(!left[0].contains(0) && left[0].contains(1));
    }
}
