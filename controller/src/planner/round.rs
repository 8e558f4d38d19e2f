//! Decisions for all due pods, in time slices.

use std::collections::BTreeSet;

use drava_allocator::selector::in_turn;
use tokio::time::Instant;

use super::{DecisionTime, MAX_IN_FLIGHT, Planner};
use crate::action::Action;

/// The decisions of a round, over several time slices.
#[derive(Debug, Default)]
pub(super) struct Round {
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
        self.rejections.clear();
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
        self.round.interrupted = None;
        let mut is_started = false;
        while self.in_flight.len() + self.gates_in_flight.len() < MAX_IN_FLIGHT
            && self.queue.has_due(time.instant)
        {
            if is_started && (time.is_slice_over)(time.instant) {
                self.round.interrupted = Some(time.instant);
                return;
            }
            let Some(uid) = self.queue.pop_due(time.instant) else {
                return;
            };
            is_started = true;
            self.decisions.0 += 1;
            in_turn(|| self.schedule(&uid, time, actions));
        }
    }
}
