//! What is promised: allocations, reservations, evictions, suspensions, and the writes in flight.
//!
//! Commitments follow from the world. They know nothing of the queue.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use tokio::time::Instant;

use super::suspension::Suspensions;
use super::world::World;
use crate::action::Release;
use crate::action::event::PendingEvent;
use crate::decide::ledger::{Ledger, Owner, Reservation, Users};

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
    pub(super) suspensions: Suspensions,
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
            suspensions: Suspensions::default(),
            is_scheduler_active: false,
        }
    }

    /// Returns when a promise is to be reviewed without a change.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let release = self.ledger.next_release();
        let review = self.ledger.next_review();
        let suspension = self.suspensions.next_due();
        [release, review, suspension].into_iter().flatten().min()
    }

    /// Starts the releases that are due.
    pub(super) fn start_releases(
        &mut self,
        world: &World,
        now: Instant,
        users_of: impl Fn(&ObjectKey) -> Users,
    ) -> impl Iterator<Item = Release> {
        if std::mem::take(&mut self.is_scheduler_active) {
            self.ledger.scheduler_active(now);
        }
        let due = self.ledger.start_due_releases(now, |key, node| {
            (users_of(key), world.cluster.node(node).is_some())
        });
        due.into_iter()
            .map(|(claim, reason)| Release { claim, reason })
    }
}
