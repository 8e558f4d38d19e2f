//! What is promised: allocations, reservations, evictions, and the writes in flight.
//!
//! Commitments follow from the world. They know nothing of the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::event::PendingEvent;
use crate::ledger::{Ledger, Owner, Reservation};

/// See the [module](self).
pub(super) struct Commitments {
    pub(super) ledger: Ledger,
    /// Reservations that are lifted while pods ahead of their owners are decided.
    pub(super) lifted: Vec<(Owner, Reservation)>,
    /// Owners whose lifted reservation was taken by a pod ahead, until they are decided again.
    pub(super) outdated: BTreeSet<Owner>,
    /// Events to publish when the job in flight succeeds, by the UID of its first pod.
    pub(super) in_flight: BTreeMap<String, Vec<PendingEvent>>,
    /// UIDs of the pods whose gate is being removed.
    pub(super) gates_in_flight: BTreeSet<String>,
    /// Pods whose eviction or release for another pod was started, until they are observed to be deleted, or this time;
    /// `None` while the eviction is in flight.
    pub(super) evicted: BTreeMap<String, Option<Instant>>,
    /// UIDs of the pods for which an eviction is in flight: they choose no other victims.
    pub(super) preemptors: BTreeSet<String>,
    /// Whether kube-scheduler has shown a sign of life since the last decisions.
    pub(super) is_scheduler_active: bool,
}

impl Commitments {
    /// Unreserved allocations are released after this time.
    pub(super) fn new(release_after: Duration) -> Self {
        Self {
            ledger: Ledger::new(release_after),
            lifted: Vec::new(),
            outdated: BTreeSet::new(),
            in_flight: BTreeMap::new(),
            gates_in_flight: BTreeSet::new(),
            evicted: BTreeMap::new(),
            preemptors: BTreeSet::new(),
            is_scheduler_active: false,
        }
    }
}
