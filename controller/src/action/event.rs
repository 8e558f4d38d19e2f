//! Events of the controller. Every event text and every release reason is defined here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use drava_allocator::capacity::Amounts;
use drava_allocator::division::Division;
use drava_allocator::explanation::Explanation;
use drava_allocator::object::ObjectKey;
use drava_allocator::placement::{ClaimPlacement, DevicePlacement, Placement};
use drava_allocator::pool::PoolProblem;
use drava_allocator::reason::bytes;
use drava_allocator::usage::DeviceAccess;
use drava_api::event::EventReason;
use drava_api::listed::Unreadable;
use drava_api::names;
use drava_explanation::owner::{is_known, name_for, names_for};
use k8s_openapi::api::core::v1::ObjectReference;

use crate::action::OwnCause;
use crate::watch::Kind;

/// Maximum number of pods that an event names.
const MAX_NAMES: usize = 5;

/// Maximum number of companions whose reasons an event quotes: its message is limited to 1 KiB.
const MAX_COMPANIONS: usize = 2;

/// An event to publish.
#[derive(Debug, Clone, PartialEq)]
pub struct PendingEvent {
    /// The object that the event regards.
    pub regarding: ObjectReference,
    /// Reason; determines the type.
    pub reason: EventReason,
    /// Text for the user.
    pub message: String,
}

/// Why an allocation is released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReleaseReason {
    /// No pod reserved the claim in time.
    Unreserved {
        /// Node of the devices.
        node: String,
        /// Time since the allocation was observed.
        after: Duration,
    },
    /// Other claims of the gated pod, or of its gang, were not allocated in time.
    Incomplete {
        /// Node of the devices.
        node: String,
        /// Time since the allocation was observed.
        after: Duration,
    },
    /// Another pod needs the devices, and the pod was not bound.
    Preempted {
        /// The other pod, as a text for readers of the claim's namespace.
        by: String,
        /// Why it precedes.
        why: String,
    },
    /// No pending pod references the claim.
    NoPendingPod,
    /// The node of the devices does not exist.
    NodeDeleted {
        /// The node.
        node: String,
    },
    /// Another claim of the pod lost its allocation; the pod needs a common node for all claims.
    SiblingReleased,
    /// The claim is a companion that is being deleted, and its base no longer has its capacity.
    GivenBack,
    /// More of the GPU is allocated than it has, and this is the newest unreserved allocation.
    Overcommitted {
        /// UUID of the GPU.
        gpu: String,
    },
}

impl fmt::Display for ReleaseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreserved { node, after } => write!(
                f,
                "not reserved within {} s: kube-scheduler did not bind the pod to node {node}",
                after.as_secs()
            ),
            Self::Incomplete { node, after } => write!(
                f,
                "the rest of the pod or its gang was not allocated within {} s after this claim on node {node}",
                after.as_secs()
            ),
            Self::Preempted { by, why } => write!(f, "{by} needs the devices ({why})"),
            Self::NoPendingPod => f.write_str("no pending pod references the claim"),
            Self::NodeDeleted { node } => write!(f, "node {node} does not exist"),
            Self::SiblingReleased => {
                f.write_str("the allocation of another claim of the pod was released")
            }
            Self::GivenBack => {
                f.write_str("the share of its base claim has given the capacity back")
            }
            Self::Overcommitted { gpu } => write!(f, "GPU {gpu} is over-committed"),
        }
    }
}

impl PendingEvent {
    /// A pod, or one of its claims, is unschedulable.
    #[must_use]
    pub fn unschedulable(regarding: ObjectReference, explanation: &Explanation) -> Self {
        Self {
            regarding,
            reason: EventReason::GpuUnschedulable,
            message: explanation.summary(),
        }
    }

    /// Companions of a pod have no allocation: the names of the first ones, each with the reason, and how many there are.
    #[must_use]
    pub fn growth_waits<'a>(
        pod: ObjectReference,
        companions: impl Iterator<Item = (&'a str, &'a str)>,
        count: usize,
    ) -> Self {
        let first = companions.take(MAX_COMPANIONS);
        let mut texts: Vec<String> = first
            .map(|(name, why)| format!("claim {name} does not add to the pod's share: {why}"))
            .collect();
        let others = count.saturating_sub(texts.len());
        if others > 0 {
            texts.push(format!("{others} more"));
        }
        Self {
            regarding: pod,
            reason: EventReason::GrowthWaits,
            message: texts.join("; "),
        }
    }

    /// The claims of a pod were allocated.
    #[must_use]
    pub fn allocated(
        pod: ObjectReference,
        placement: &Placement,
        claims: &[(&str, &ClaimPlacement)],
    ) -> Self {
        let node = &placement.node;
        let of_claim = |(name, claim): &(&str, &ClaimPlacement)| {
            let devices = claim.devices.iter().map(|placed| {
                let device = placed.device.display_name();
                format!("{} on {node}/{device}", amounts(placed))
            });
            let devices = devices.collect::<Vec<_>>().join(", ");
            format!("claim {name}: {devices}; {}", placement.reason(claim))
        };
        let claims: Vec<String> = claims.iter().map(of_claim).collect();
        Self {
            regarding: pod,
            reason: EventReason::Allocated,
            message: claims.join(". "),
        }
    }

    /// The writes of an allocation failed.
    #[must_use]
    pub fn allocation_failed(pod: ObjectReference, message: String) -> Self {
        Self {
            regarding: pod,
            reason: EventReason::AllocationFailed,
            message,
        }
    }

    /// The controller released the allocation of a claim.
    #[must_use]
    pub fn released(claim: ObjectReference, reason: &ReleaseReason) -> Self {
        Self {
            regarding: claim,
            reason: EventReason::Released,
            message: format!("released the allocation: {reason}"),
        }
    }

    /// A pending pod lost an allocation.
    #[must_use]
    pub fn allocation_lost(pod: ObjectReference, claim: &str, node: &str) -> Self {
        Self {
            regarding: pod,
            reason: EventReason::Released,
            message: format!(
                "claim {claim}: the allocation on node {node} was released, because the pod was not bound there; \
                 allocating again, node {node} last"
            ),
        }
    }

    /// A pending pod lost an allocation to another pod, as a text; `why` says why that one precedes it.
    #[must_use]
    pub fn allocation_preempted(
        pod: ObjectReference,
        claim: &str,
        node: &str,
        (by, why): (&str, &str),
    ) -> Self {
        Self {
            regarding: pod,
            reason: EventReason::Preempted,
            message: format!(
                "the allocation of claim {claim} on {node} was released for {by} ({why}); the pod waits again"
            ),
        }
    }

    /// Pods, each with its priority, were evicted for a pod.
    #[must_use]
    pub fn preempting(preemptor: ObjectReference, evicted: &[(String, i32)]) -> Self {
        let names = evicted.iter().map(|(name, _)| name.as_str());
        let priorities: BTreeMap<&str, i32> = evicted
            .iter()
            .map(|(name, priority)| (name.as_str(), *priority))
            .collect();
        let names = names_for(reader(&preemptor), "pod", names).into_iter();
        let names = names.map(|name| match priorities.get(name.as_str()) {
            Some(priority) => format!("{name} (priority {priority})"),
            None => name,
        });
        Self {
            message: format!("evicted {}", listed(names.collect())),
            regarding: preemptor,
            reason: EventReason::Preempting,
        }
    }

    /// A pod was evicted for another one; `why` says why that one precedes it.
    #[must_use]
    pub fn preempted(victim: ObjectReference, preemptor: &str, why: &str) -> Self {
        let by = pod_for(&victim, preemptor);
        Self {
            regarding: victim,
            reason: EventReason::Preempted,
            message: format!("evicted for {by} ({why})"),
        }
    }

    /// A pod cannot be evicted for another one. The cause may name a budget of the victim's namespace.
    #[must_use]
    pub fn preemption_blocked(preemptor: ObjectReference, victim: &str, cause: &str) -> Self {
        let name = pod_for(&preemptor, victim);
        let cause = match is_known(reader(&preemptor), victim) {
            true => cause,
            false => "its eviction is refused",
        };
        Self {
            regarding: preemptor,
            reason: EventReason::PreemptionBlocked,
            message: format!("cannot evict {name}: {cause}"),
        }
    }

    /// A pod was evicted, for no other pod.
    #[must_use]
    pub fn evicted(pod: ObjectReference, cause: OwnCause, state: &str) -> Self {
        Self {
            regarding: pod,
            reason: cause.reason(),
            message: format!("evicted: {state}"),
        }
    }

    /// A pod cannot be evicted, `why`, as it should for no other pod.
    #[must_use]
    pub fn not_evicted(pod: ObjectReference, cause: OwnCause, state: &str, why: &str) -> Self {
        Self {
            regarding: pod,
            reason: cause.reason(),
            message: format!("cannot evict this pod: {why}; {state}"),
        }
    }

    /// A claim shares a GPU of which more is allocated than it has. `user` is a pod that has reserved the claim, or the claim.
    #[must_use]
    pub fn overcommitted(
        user: ObjectReference,
        node: &str,
        gpu: &str,
        claims: &BTreeSet<ObjectKey>,
    ) -> Self {
        let names = claims.iter();
        let names: Vec<String> = names
            .map(|(namespace, name)| format!("{namespace}/{name}"))
            .collect();
        let names = names_for(reader(&user), "claim", names.iter().map(String::as_str));
        Self {
            regarding: user,
            reason: EventReason::GpuOvercommitted,
            message: format!(
                "GPU {gpu} on node {node}: more is allocated than the GPU has, to claims {}",
                listed(names)
            ),
        }
    }

    /// An object cannot be read.
    #[must_use]
    pub fn unreadable(kind: Kind, object: &Unreadable) -> Self {
        let (api_version, object_kind) = kind.object_type();
        let effect = match kind {
            Kind::Claims => {
                "its devices count as taken, and no other device of their pools is allocated"
            }
            _ => "it works without the object, or with the version that it read last",
        };
        Self {
            regarding: ObjectReference {
                api_version: Some(api_version.to_owned()),
                kind: Some(object_kind.to_owned()),
                namespace: object.metadata.namespace.clone(),
                name: object.metadata.name.clone(),
                uid: object.metadata.uid.clone(),
                ..ObjectReference::default()
            },
            reason: EventReason::ObjectUnreadable,
            message: format!(
                "the controller cannot read the object: {}; {effect}; repair or delete it",
                object.cause
            ),
        }
    }

    /// The pool of a node is excluded from allocation.
    #[must_use]
    pub fn pool_excluded(node: &str, pool: &str, problem: &PoolProblem) -> Self {
        Self {
            // As kubelet references a node: with the name as UID.
            regarding: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Node".to_owned()),
                uid: Some(node.to_owned()),
                name: Some(node.to_owned()),
                ..ObjectReference::default()
            },
            reason: EventReason::GpuPoolExcluded,
            message: format!("pool {pool} is excluded from allocation: {problem}"),
        }
    }
}

/// Returns the namespace whose readers see an event of the object.
fn reader(regarding: &ObjectReference) -> &str {
    regarding.namespace.as_deref().unwrap_or_default()
}

/// Returns how an event of the object names a pod, `namespace/name`.
fn pod_for(regarding: &ObjectReference, pod: &str) -> String {
    name_for(reader(regarding), "pod", pod)
}

/// Joins names, of which the first few are listed.
fn listed(mut names: Vec<String>) -> String {
    let more = match names.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    names.truncate(MAX_NAMES);
    format!("{}{more}", names.join(", "))
}

/// Formats the amounts of a share of what is divided.
fn share_amounts(amounts: &Amounts, what: &str) -> String {
    use names::capacity::{CORES, MEMORY};
    let memory = amounts.get(MEMORY).copied().unwrap_or_default();
    match amounts.get(CORES).filter(|cores| !cores.is_zero()) {
        Some(cores) => format!("{} of memory and {cores}% of {what}", bytes(memory)),
        None => format!("{} of memory and best-effort {what}", bytes(memory)),
    }
}

/// Formats the amounts of an allocated device.
fn amounts(placed: &DevicePlacement) -> String {
    use names::capacity::MEMORY;
    match &placed.access {
        DeviceAccess::Exclusive => {
            let memory = placed
                .device
                .amount(MEMORY)
                .map(|amount| format!(" with {} of memory", bytes(amount)));
            format!(
                "device {}{}",
                placed.device.name,
                memory.unwrap_or_default()
            )
        }
        DeviceAccess::Admin(_) => format!("admin access to {}", placed.device.name),
        DeviceAccess::Share(amounts, division) => {
            let what = match division {
                Division::Time => "GPU time",
                Division::Multiprocessors(_) => "multiprocessors",
            };
            share_amounts(amounts, what)
        }
        DeviceAccess::Suspended(amounts) => share_amounts(amounts, "GPU time"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod() -> ObjectReference {
        ObjectReference {
            namespace: Some("team-a".to_owned()),
            name: Some("own".to_owned()),
            ..ObjectReference::default()
        }
    }

    #[test]
    fn names_own_cause_of_eviction() {
        for (cause, reason) in [
            (OwnCause::IncompleteGang, EventReason::GangIncomplete),
            (OwnCause::SuspensionExpired, EventReason::SuspensionExpired),
            (OwnCause::Idle, EventReason::IdleEvicted),
        ] {
            let evicted = PendingEvent::evicted(pod(), cause, "its state");
            let refused = PendingEvent::not_evicted(pod(), cause, "its state", "a budget");
            let events = [evicted, refused].map(|event| (event.reason, event.message));
            let messages = [
                "evicted: its state",
                "cannot evict this pod: a budget; its state",
            ];
            assert_eq!(events, messages.map(|message| (reason, message.to_owned())));
        }
    }

    /// A tenant can create thousands, each of which is tried again and again.
    #[test]
    fn formats_first_companions_only() {
        let mut formatted = 0;
        let names: Vec<String> = (0..5000).map(|number| format!("c-{number}")).collect();
        let companions = names.iter().map(|name| {
            formatted += 1;
            (name.as_str(), "no room")
        });
        let event = PendingEvent::growth_waits(pod(), companions, names.len());
        assert_eq!(
            event.message,
            "claim c-0 does not add to the pod's share: no room; claim c-1 does not add to the pod's share: no room; 4998 more"
        );
        assert_eq!(formatted, MAX_COMPANIONS);
    }

    /// Those who may read events of one namespace learn no name of another.
    #[test]
    fn names_no_object_of_another_namespace() {
        let evicted =
            ["team-b/secret", "team-a/x", "team-c/secret"].map(|name| (name.to_owned(), 7));
        let claims = [("team-a", "x"), ("team-b", "secret")];
        let claims = claims.map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
        let quota = "budget secret allows no disruption";
        for (event, message) in [
            (
                PendingEvent::preempted(pod(), "team-b/secret", "priority 10"),
                "evicted for a pod of another namespace (priority 10)",
            ),
            (
                PendingEvent::preempting(pod(), &evicted),
                "evicted team-a/x (priority 7), 2 pods of other namespaces",
            ),
            (
                PendingEvent::preemption_blocked(pod(), "team-b/secret", quota),
                "cannot evict a pod of another namespace: its eviction is refused",
            ),
            (
                PendingEvent::preemption_blocked(pod(), "team-a/x", "no disruption"),
                "cannot evict pod team-a/x: no disruption",
            ),
            (
                PendingEvent::overcommitted(pod(), "n1", "GPU-0", &claims.into()),
                "GPU GPU-0 on node n1: more is allocated than the GPU has, to claims team-a/x, a claim of another namespace",
            ),
        ] {
            assert_eq!(event.message, message);
        }
    }

    #[test]
    fn lists_the_first_names() {
        let evicted: Vec<_> = (1..8)
            .map(|number| (format!("team-a/{number}"), 0))
            .collect();
        let event = PendingEvent::preempting(pod(), &evicted);
        assert!(
            event.message.ends_with("team-a/5 (priority 0) and 2 more"),
            "{}",
            event.message
        );
    }
}
