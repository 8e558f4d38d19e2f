//! Decisions for all due pods, in time slices.
//!
//! A round ends before the next one starts, so that frequent changes, which activate every pod, do not starve those at the
//! end of the queue.

use std::collections::{BTreeSet, VecDeque};

use tokio::time::Instant;

use super::{DecisionTime, MAX_IN_FLIGHT, Planner};
use crate::action::Action;

/// What is left of a round.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// UIDs of pods in queue order.
    left: VecDeque<String>,
    /// Start of the slice that ended before the round.
    interrupted: Option<Instant>,
}

/// Number of decisions since the start.
#[derive(Debug, Default)]
pub(super) struct DecisionCount(u64);

impl Round {
    /// Returns when the round goes on; `None` if it has ended.
    pub(super) const fn resumes_at(&self) -> Option<Instant> {
        self.interrupted
    }
}

impl Planner {
    /// Returns the number of decisions so far: for pods, or for gangs.
    #[must_use]
    pub const fn decisions(&self) -> u64 {
        self.decisions.0
    }

    /// Decides for the due pods, and for all when a reservation has ended.
    pub(super) fn decide_due(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let owners: BTreeSet<_> = self.ledger.owners().cloned().collect();
        self.decide_in_order(time, actions);
        if !owners.is_subset(&self.ledger.owners().cloned().collect()) {
            self.queue.activate_all();
            self.decide_in_order(time, actions);
        }
    }

    /// Decides for the due pods in queue order, until the time slice is over. A decision can make pods behind it due again,
    /// because it ends their reservations.
    fn decide_in_order(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let mut round = std::mem::take(&mut self.round).left;
        let mut is_started = false;
        loop {
            if round.is_empty() {
                round = self.queue.due(time.instant).into();
            }
            let Some(uid) = round.pop_front() else {
                return;
            };
            if self.in_flight.len() + self.gates_in_flight.len() >= MAX_IN_FLIGHT {
                return;
            }
            // A decision for another member of its gang included the pod, or the pod has changed since the round started.
            let pending = self.queue.get(&uid);
            if !pending.is_some_and(|pending| pending.is_due(time.instant)) {
                continue;
            }
            if is_started && (time.is_slice_over)(time.instant) {
                round.push_front(uid);
                self.round = Round {
                    left: round,
                    interrupted: Some(time.instant),
                };
                return;
            }
            is_started = true;
            self.decisions.0 += 1;
            self.schedule(&uid, time, actions);
        }
    }
}
