//! Decisions for all due pods, in time slices.

use std::time::Duration;

use drava_allocator::turn::Turn;
use tokio::time::Instant;

use super::{DecisionTime, MAX_IN_FLIGHT, Planner};
use crate::action::Action;

/// The decisions of a round, over several time slices.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// Start of the slice that ended before the round.
    interrupted: Option<Instant>,
}

/// Time after which pods are decided again that a change cannot have helped, so that their reasons are up to date.
const REFRESH_AFTER: Duration = Duration::from_secs(30);

/// When all pods are decided again, only for their reasons.
#[derive(Debug, Default)]
pub(super) struct Refresh(Option<Instant>);

impl Refresh {
    /// Returns whether all are decided again now. `is_outdated` tells of a change since the last call.
    pub(super) fn is_due(&mut self, is_outdated: bool, now: Instant) -> bool {
        if is_outdated {
            self.0.get_or_insert(now + REFRESH_AFTER);
        }
        self.0.take_if(|due| *due <= now).is_some()
    }

    /// Returns when [`Self::is_due`] has to be called.
    pub(super) const fn next(&self) -> Option<Instant> {
        self.0
    }
}

/// Number of decisions, or turns of decisions, since the start, and their work.
#[derive(Debug, Default)]
pub(super) struct DecisionCount {
    decisions: u64,
    units: u64,
    node_checks: u64,
}

impl DecisionCount {
    pub(super) fn add(&mut self, turn: &Turn) {
        self.decisions += 1;
        self.units += turn.checked();
        self.node_checks += turn.node_checks();
    }
}

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
        self.backlog.decisions.decisions
    }

    /// Returns the units of work of the decisions so far.
    #[must_use]
    pub const fn work(&self) -> u64 {
        self.backlog.decisions.units
    }

    /// Returns how often the decisions so far have checked a node, or searched its devices.
    #[must_use]
    pub const fn node_checks(&self) -> u64 {
        self.backlog.decisions.node_checks
    }

    /// Decides for the due pods, and for all when a reservation has ended.
    pub(super) fn decide_due(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        self.world.start_round();
        self.decide_in_order(time, actions);
        if std::mem::take(&mut self.backlog.has_room_ended) {
            self.backlog.queue.activate_all();
            self.decide_in_order(time, actions);
        }
    }

    /// Decides for the due pods in queue order, until the time slice is over. A decision can make pods behind it due again,
    /// because it takes what was reserved for them.
    fn decide_in_order(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        self.decide_until_slice_ends(time, actions);
        self.restore_reservations(None);
    }

    fn decide_until_slice_ends(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        self.backlog.round.interrupted = None;
        let mut shares = self.shares_of_round(time.instant);
        let mut is_started = false;
        while self.commitments.in_flight.len() < MAX_IN_FLIGHT
            && self.backlog.queue.has_due(time.instant)
        {
            if is_started && (time.is_slice_over)(time.instant) {
                self.backlog.round.interrupted = Some(time.instant);
                return;
            }
            let Some(uid) = self.backlog.queue.pop_due(time.instant) else {
                return;
            };
            is_started = true;
            let priority = self.backlog.queue.order(&uid).map(|order| order.priority());
            while shares.front().is_some_and(|(of, _)| Some(*of) >= priority) {
                if let Some((_, key)) = shares.pop_front() {
                    self.decide_suspension(&key, time, actions);
                }
            }
            let mut turn = Turn::limited();
            self.schedule(&uid, time, &mut turn, actions);
            self.backlog.decisions.add(&turn);
        }
    }
}
