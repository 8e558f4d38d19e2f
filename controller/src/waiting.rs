//! Pods that wait for devices.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use tokio::time::Instant;

/// First pause after a failure.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Longest pause after failures.
const LONGEST_BACKOFF: Duration = Duration::from_secs(120);
/// Time for which a node on which a pod could not be bound is tried last.
const AVOID: Duration = Duration::from_secs(300);

/// A pod that waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    /// The pod, without what no decision needs.
    pub(crate) pod: Pod,
    /// What is to be done for it.
    pub(crate) phase: Phase,
    /// Failures in a row.
    failures: u32,
    /// Nodes on which it could not be bound, with the time until which they are tried last.
    avoid: BTreeMap<String, Instant>,
}

/// What is to be done for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A decision is due.
    Due,
    /// Nothing until something changes.
    Parked,
    /// Its allocations are being written.
    Writing,
    /// A decision is due at this time.
    Pausing(Instant),
}

/// Order in which pods are served: priority, then age, then name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    inverse_priority: i64,
    created: Timestamp,
    name: (String, String),
}

impl Waiting {
    pub(crate) fn new(pod: Pod) -> Self {
        Self {
            pod,
            phase: Phase::Due,
            failures: 0,
            avoid: BTreeMap::new(),
        }
    }

    pub(crate) fn rank(&self) -> Rank {
        let metadata = &self.pod.metadata;
        let priority = self
            .pod
            .spec
            .as_ref()
            .and_then(|spec| spec.priority)
            .unwrap_or_default();
        Rank {
            inverse_priority: -i64::from(priority),
            created: metadata
                .creation_timestamp
                .as_ref()
                .map_or(Timestamp::MIN, |created| created.0),
            name: (
                metadata.namespace.clone().unwrap_or_default(),
                metadata.name.clone().unwrap_or_default(),
            ),
        }
    }

    pub(crate) fn is_due(&self, now: Instant) -> bool {
        match self.phase {
            Phase::Due => true,
            Phase::Pausing(until) => now >= until,
            Phase::Parked | Phase::Writing => false,
        }
    }

    /// Makes a decision due after a change; a pause after a failure is kept.
    pub(crate) fn wake(&mut self) {
        if self.phase == Phase::Parked {
            self.phase = Phase::Due;
        }
    }

    /// Pauses after a failure, twice as long after each.
    pub(crate) fn pause(&mut self, now: Instant) {
        let pause = FIRST_BACKOFF.saturating_mul(1 << self.failures.min(7));
        self.failures = self.failures.saturating_add(1);
        self.phase = Phase::Pausing(now + pause.min(LONGEST_BACKOFF));
    }

    /// Tries `node` last for a while.
    pub(crate) fn avoid(&mut self, node: &str, now: Instant) {
        self.avoid.insert(node.to_owned(), now + AVOID);
    }

    pub(crate) fn avoided(&mut self, now: Instant) -> impl Iterator<Item = &String> {
        self.avoid.retain(|_, until| *until > now);
        self.avoid.keys()
    }

    pub(crate) fn reference(&self) -> ObjectReference {
        let metadata = &self.pod.metadata;
        ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            name: metadata.name.clone(),
            namespace: metadata.namespace.clone(),
            resource_version: metadata.resource_version.clone(),
            uid: metadata.uid.clone(),
            field_path: None,
        }
    }
}

/// Names of a pod's claims as the pod calls them, with the claim object's name where it is known. An entry for which
/// no claim is needed is left out.
pub(crate) fn claims(pod: &Pod) -> impl Iterator<Item = (&str, Option<&str>)> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.resource_claim_statuses.as_deref())
        .unwrap_or_default();
    let entries = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.resource_claims.as_deref())
        .unwrap_or_default();
    entries.iter().filter_map(move |entry| {
        if let Some(name) = &entry.resource_claim_name {
            return Some((entry.name.as_str(), Some(name.as_str())));
        }
        match statuses.iter().find(|status| status.name == entry.name) {
            // The claim controller found that the template asks for nothing.
            Some(status) if status.resource_claim_name.is_none() => None,
            Some(status) => Some((entry.name.as_str(), status.resource_claim_name.as_deref())),
            None => Some((entry.name.as_str(), None)),
        }
    })
}

/// Whether the pod can be waiting for devices that this controller allocates.
pub(crate) fn may_wait(pod: &Pod, schedulers: &[String]) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending");
    let scheduler = spec
        .scheduler_name
        .as_deref()
        .unwrap_or("default-scheduler");
    let gated = spec
        .scheduling_gates
        .as_ref()
        .is_some_and(|gates| !gates.is_empty());
    // Whoever named the node himself has bypassed every scheduler; kubelet waits for the claims.
    let named_node = spec.node_name.as_ref().is_some_and(|node| !node.is_empty());
    phase == "Pending"
        && pod.metadata.deletion_timestamp.is_none()
        && spec
            .resource_claims
            .as_ref()
            .is_some_and(|claims| !claims.is_empty())
        && !gated
        && (named_node || schedulers.iter().any(|served| served == scheduler))
}
