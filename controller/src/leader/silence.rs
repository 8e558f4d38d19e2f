//! Watches that fail without an answer of the API server: the leader is blind.
//!
//! A failed watch is repeated, and every attempt ends, because silence has a limit on each connection. A watch that works and
//! delivers nothing reports nothing, so a run of failures ends when no further one follows.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::watch::{Kind, Observation};

/// Longest time between two failures of a watch that works in no attempt: time-out and pause.
const MAX_GAP: Duration = Duration::from_secs(120);

/// Least number of failures of a run. Two can be those of two restarts of API servers, with a quiet watch between them.
const LEAST_FAILURES: u32 = 3;

/// A run of failures.
#[derive(Debug, Clone, Copy)]
struct Failing {
    since: Instant,
    last: Instant,
    failures: u32,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Silence(BTreeMap<Kind, Failing>);

impl Silence {
    /// Observes what a watch has delivered, or that it has failed.
    pub(super) fn observe(&mut self, observation: &Observation, now: Instant) {
        if let Some(kind) = observation.delivered_kind() {
            self.delivered(kind);
        }
        if let Observation::WatchFailed(kind, failure) = observation
            && !failure.is_answered
        {
            self.failed(*kind, now);
        }
    }

    /// A watch has failed without an answer.
    fn failed(&mut self, kind: Kind, now: Instant) {
        let run = self.0.get(&kind).filter(|run| now < run.last + MAX_GAP);
        let failing = Failing {
            since: run.map_or(now, |run| run.since),
            last: now,
            failures: run.map_or(1, |run| run.failures.saturating_add(1)),
        };
        self.0.insert(kind, failing);
    }

    /// A watch has delivered something.
    fn delivered(&mut self, kind: Kind) {
        self.0.remove(&kind);
    }

    /// Returns the length of the longest run of failures that goes on.
    pub(super) fn longest(&self, now: Instant) -> Duration {
        let runs = self
            .0
            .values()
            .filter(|run| now < run.last + MAX_GAP && run.failures >= LEAST_FAILURES);
        let lengths = runs.map(|run| run.last - run.since);
        lengths.max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_failures_of_a_watch_without_progress() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut silence = Silence::default();
        for seconds in [0, 40, 90] {
            silence.failed(Kind::Pods, at(seconds));
        }
        silence.failed(Kind::Nodes, at(80));
        assert_eq!(silence.longest(at(95)), Duration::from_secs(90));
        assert_eq!(
            silence.longest(at(300)),
            Duration::ZERO,
            "no failure follows, so the watches work"
        );
        silence.failed(Kind::Pods, at(301));
        assert_eq!(silence.longest(at(302)), Duration::ZERO, "a new run");
        silence.failed(Kind::Pods, at(391));
        assert_eq!(silence.longest(at(392)), Duration::ZERO, "two restarts");
        silence.failed(Kind::Pods, at(401));
        assert_eq!(silence.longest(at(402)), Duration::from_secs(100));
        silence.delivered(Kind::Pods);
        assert_eq!(silence.longest(at(402)), Duration::ZERO);
    }
}
