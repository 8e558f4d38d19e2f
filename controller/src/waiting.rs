//! Pods that wait for devices.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

pub(crate) mod list;

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
}
