//! Outcomes of evictions, and the review of reservations.

use std::time::Duration;

use tokio::time::Instant;

use super::{DecisionTime, Planner};
use crate::action::event::PendingEvent;
use crate::action::{EvictionCause, EvictionOutcome, OwnCause, Victim};
use crate::decide::ledger::REVIEW_INTERVAL;
use crate::pods::pod::qualified_name;

/// Time for which a pod that could not be evicted is not tried again.
const PROTECTION: Duration = Duration::from_secs(60);

impl Planner {
    /// Observes the outcome of an eviction.
    pub fn eviction_finished(&mut self, outcome: EvictionOutcome, now: Instant) {
        let eviction = &outcome.eviction;
        self.report_evicted(&eviction.cause, &outcome.evicted);
        for victim in &outcome.evicted {
            let uid = victim.pod.uid.as_deref().unwrap_or_default();
            if let Some(until) = self.commitments.evicted.get_mut(uid) {
                *until = Some(now + REVIEW_INTERVAL);
            }
        }
        if let EvictionCause::Preemption(preemptor) = &eviction.cause {
            self.commitments.preemptors.remove(&preemptor.uid);
            self.backlog.activate(&preemptor.uid);
        }
        let Some(failure) = outcome.failure else {
            return;
        };
        for victim in &eviction.victims {
            if !outcome.evicted.contains(victim) {
                let uid = victim.pod.uid.as_deref().unwrap_or_default();
                self.commitments.evicted.remove(uid);
            }
        }
        let preemptor = match &eviction.cause {
            EvictionCause::Preemption(preemptor) => preemptor,
            EvictionCause::Own(cause, state) => {
                let pod = failure.victim.pod;
                let uid = pod.uid.as_deref().unwrap_or_default();
                match cause {
                    OwnCause::IncompleteGang => {}
                    OwnCause::SuspensionExpired => self.suspension_not_ended(uid, now),
                    OwnCause::Idle => self.idle_not_ended(uid, now),
                }
                let event = PendingEvent::not_evicted(pod, *cause, state, &failure.message);
                self.reporter.state_events.push(event);
                return;
            }
        };
        self.reporter
            .state_events
            .push(PendingEvent::preemption_blocked(
                preemptor.pod.clone(),
                &qualified_name(&failure.victim.pod),
                &failure.message,
            ));
        let protected = failure.victim.pod.uid.unwrap_or_default();
        self.backlog.protected.set(protected, now + PROTECTION);
        // The devices of evicted pods are given back, and other victims may be found.
        self.reservation_unneeded(&preemptor.uid);
        if let Some(pending) = self.backlog.queue.get_mut(&preemptor.uid) {
            pending.back_off(now);
        }
    }

    fn report_evicted(&mut self, cause: &EvictionCause, evicted: &[Victim]) {
        match cause {
            EvictionCause::Preemption(preemptor) => {
                let names: Vec<(String, i32)> = evicted
                    .iter()
                    .map(|victim| (qualified_name(&victim.pod), victim.priority))
                    .collect();
                if !names.is_empty() {
                    let event = PendingEvent::preempting(preemptor.pod.clone(), &names);
                    self.reporter.write_events.push(event);
                }
                let name = qualified_name(&preemptor.pod);
                for victim in evicted {
                    let why = preemptor.why();
                    let event = PendingEvent::preempted(victim.pod.clone(), &name, &why);
                    self.reporter.write_events.push(event);
                }
            }
            EvictionCause::Own(cause, state) => {
                for victim in evicted {
                    let event = PendingEvent::evicted(victim.pod.clone(), *cause, state);
                    self.reporter.write_events.push(event);
                }
            }
        }
    }

    /// Decides again for the owners of reservations that are due for review, for pods that have waited for their delay, and
    /// for all pods when a pod may be evicted again.
    pub(super) fn review_reservations(&mut self, time: &DecisionTime) {
        let now = time.instant;
        self.commitments
            .evicted
            .retain(|_, until| until.is_none_or(|until| now < until));
        self.world.ended_pods.review(&self.commitments.ledger, time);
        let evictable = [
            &mut self.backlog.protected,
            &mut self.backlog.in_minimum_runtime,
        ];
        let evictable = evictable.map(|timers| timers.pop_due(now));
        if evictable.iter().any(|uids| !uids.is_empty()) {
            self.backlog.queue.activate_all();
        }
        let over = self.backlog.eviction_delays.pop_due(now);
        let reviewed = self.commitments.ledger.start_due_reviews(now);
        for uid in over.into_iter().chain(reviewed) {
            self.backlog.activate(&uid);
        }
    }
}
