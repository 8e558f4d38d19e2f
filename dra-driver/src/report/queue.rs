//! Reports that wait, by the object that they are about. Pure: no I/O, no clock.
//!
//! An object whose writes fail waits by itself, with a growing delay. Of a claim's statuses only the last one counts: it waits
//! until it is written or the API server rejects it for good, and is never dropped. Events are limited in number and attempts.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use drava_api::event::EventReason;
use serde_json::Value;
use tokio::time::Instant;

use super::Subject;
use crate::node::claim::{ClaimRef, ClaimUid};

/// Maximum number of events that wait.
const MAX_EVENTS: usize = 256;

/// Attempts after which an event is given up, and the failure of a status is logged.
const MAX_ATTEMPTS: u32 = 7;

/// First delay after a failed attempt; it doubles up to [`LONGEST_DELAY`].
const DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// A report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Report {
    Event {
        subject: Subject,
        reason: EventReason,
        note: String,
    },
    Status {
        claim: ClaimRef,
        devices: Value,
    },
}

impl Report {
    pub(super) fn name(&self) -> String {
        match self {
            Self::Event { reason, .. } => format!("event {}", reason.as_str()),
            Self::Status { claim, .. } => format!("status.devices of claim {claim}"),
        }
    }

    fn object(&self) -> Object {
        match self {
            Self::Status { claim, .. } => Object::Status(claim.uid.clone()),
            Self::Event { subject, .. } => Object::Events(match subject {
                Subject::Node => String::new(),
                Subject::Claim(claim) => claim.uid.to_string(),
                Subject::Pod(pod) => pod.uid.clone(),
                Subject::Profile(profile) => profile.uid.clone(),
            }),
        }
    }
}

/// What is written in order: the status of a claim, or the events of an object by its UID (empty for the node).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Object {
    Status(ClaimUid),
    Events(String),
}

/// Outcome of an attempt to write a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The report was written.
    Written,
    /// The API server rejects the report for good, as for an object that is gone.
    Rejected,
    /// The attempt may be repeated.
    Failed,
}

#[derive(Debug)]
struct Line {
    reports: VecDeque<Report>,
    /// Whether the first report is being written.
    is_written: bool,
    /// Failed attempts since the last success.
    failures: u32,
    due: Instant,
}

/// The queue.
#[derive(Debug, Default)]
pub(super) struct Queue(BTreeMap<Object, Line>);

impl Queue {
    /// Adds an event. Returns false if too many wait.
    pub(super) fn add_event(&mut self, event: Report, now: Instant) -> bool {
        let lines = self
            .0
            .iter()
            .filter(|(object, _)| matches!(object, Object::Events(_)));
        let waiting: usize = lines.map(|(_, line)| line.reports.len()).sum();
        let has_room = waiting < MAX_EVENTS;
        if has_room {
            self.line(&event, now).reports.push_back(event);
        }
        has_room
    }

    /// Adds device statuses in the place of those of the claim that wait. Returns false if the last ones of the claim have the
    /// same content.
    pub(super) fn add_status(&mut self, status: Report, now: Instant) -> bool {
        let line = self.line(&status, now);
        let is_new = line.reports.back().map(content) != Some(content(&status));
        if is_new {
            line.reports.truncate(usize::from(line.is_written));
            line.reports.push_back(status);
        }
        is_new
    }

    fn line(&mut self, report: &Report, now: Instant) -> &mut Line {
        self.0.entry(report.object()).or_insert_with(|| Line {
            reports: VecDeque::new(),
            is_written: false,
            failures: 0,
            due: now,
        })
    }

    /// Returns the report that is due first, which is then being written. Otherwise returns when one is due, if one waits.
    pub(super) fn start(&mut self, now: Instant) -> Result<(Object, Report), Option<Instant>> {
        let waiting = self.0.iter_mut().filter(|(_, line)| !line.is_written);
        let Some((object, line)) = waiting.min_by_key(|(_, line)| line.due) else {
            return Err(None);
        };
        match line.reports.front() {
            Some(report) if line.due <= now => {
                line.is_written = true;
                Ok((object.clone(), report.clone()))
            }
            _ => Err(Some(line.due)),
        }
    }

    /// Ends an attempt. Returns whether its failure is worth a log line: the report is given up, or fails for long.
    pub(super) fn finish(&mut self, object: &Object, attempt: Attempt, now: Instant) -> bool {
        let Some(line) = self.0.get_mut(object) else {
            return false;
        };
        line.is_written = false;
        let is_status = matches!(object, Object::Status(_));
        let is_repeated = match attempt {
            Attempt::Written | Attempt::Rejected => false,
            Attempt::Failed => {
                line.fail(now);
                is_status || line.failures < MAX_ATTEMPTS
            }
        };
        if is_repeated {
            let fails_long = line.failures == MAX_ATTEMPTS;
            // A newer status is written instead.
            if is_status && line.reports.len() > 1 {
                line.reports.pop_front();
            }
            return fails_long;
        }
        line.failures = 0;
        line.reports.pop_front();
        if line.reports.is_empty() {
            self.0.remove(object);
        }
        attempt != Attempt::Written
    }

    /// Makes all reports due: the queue ends, and each gets one more attempt.
    pub(super) fn close(&mut self, now: Instant) {
        self.0.values_mut().for_each(|line| line.due = now);
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Line {
    fn fail(&mut self, now: Instant) {
        let doubled = DELAY.saturating_mul(1 << self.failures.min(6));
        self.failures = self.failures.saturating_add(1);
        self.due = now + doubled.min(LONGEST_DELAY);
    }
}

/// Returns device statuses without the times of their conditions.
fn content(report: &Report) -> Value {
    let Report::Status { devices, .. } = report else {
        return Value::Null;
    };
    let mut devices = devices.clone();
    let all = devices.as_array_mut().into_iter().flatten();
    let conditions = all.filter_map(|device| device.get_mut("conditions")?.as_array_mut());
    for condition in conditions.flatten() {
        if let Some(condition) = condition.as_object_mut() {
            condition.remove("lastTransitionTime");
        }
    }
    devices
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn claim(number: u32) -> ClaimRef {
        ClaimRef {
            namespace: "default".to_owned(),
            name: format!("claim-{number}"),
            uid: ClaimUid::parse(&format!("uid-{number}")).unwrap(),
        }
    }

    fn status(number: u32, content: &str) -> Report {
        Report::Status {
            claim: claim(number),
            devices: json!([{"data": content}]),
        }
    }

    fn event(subject: Subject, note: &str) -> Report {
        Report::Event {
            subject,
            reason: EventReason::GpuUnhealthy,
            note: note.to_owned(),
        }
    }

    /// Starts a report that must be this one, and ends the attempt.
    fn attempt(queue: &mut Queue, expected: &Report, attempt: Attempt, now: Instant) -> bool {
        let (object, report) = queue.start(now).unwrap();
        assert_eq!(report, *expected);
        queue.finish(&object, attempt, now)
    }

    #[test]
    fn failing_object_delays_no_other() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        assert!(queue.add_status(status(1, "a"), now));
        assert!(!attempt(&mut queue, &status(1, "a"), Attempt::Failed, now));
        // Events of the same claim neither.
        let of_claim = event(Subject::Claim(claim(1)), "of the claim");
        assert!(queue.add_event(of_claim.clone(), now));
        assert!(queue.add_status(status(2, "b"), now));
        attempt(&mut queue, &status(2, "b"), Attempt::Written, now);
        attempt(&mut queue, &of_claim, Attempt::Written, now);
        let due = now + DELAY;
        assert_eq!(queue.start(now).unwrap_err(), Some(due));
        attempt(&mut queue, &status(1, "a"), Attempt::Written, due);
        assert!(queue.is_empty());
    }

    #[test]
    fn status_fails_for_hours_until_it_is_written() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        queue.add_status(status(1, "a"), now);
        let mut logged = 0;
        for _ in 0..200 {
            logged += u32::from(attempt(&mut queue, &status(1, "a"), Attempt::Failed, now));
            let due = queue.start(now).unwrap_err().unwrap();
            assert!(due - now <= LONGEST_DELAY);
            now = due;
        }
        assert_eq!(logged, 1);
        // The delay stays, and the newer status is written.
        assert!(queue.add_status(status(1, "b"), now));
        attempt(&mut queue, &status(1, "b"), Attempt::Failed, now);
        let due = now + LONGEST_DELAY;
        assert_eq!(queue.start(now).unwrap_err(), Some(due));
        queue.close(now);
        attempt(&mut queue, &status(1, "b"), Attempt::Written, now);
        assert!(queue.is_empty());
    }

    #[test]
    fn last_status_of_claim_is_written_last() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        assert!(queue.add_status(status(1, "a"), now));
        assert!(!queue.add_status(status(1, "a"), now), "waits already");
        let (object, _) = queue.start(now).unwrap();
        assert!(!queue.add_status(status(1, "a"), now), "is being written");
        for content in ["b", "c", "a", "b"] {
            assert!(queue.add_status(status(1, content), now));
        }
        assert_eq!(queue.start(now).unwrap_err(), None, "two writes of a claim");
        queue.finish(&object, Attempt::Failed, now);
        let due = now + DELAY;
        attempt(&mut queue, &status(1, "b"), Attempt::Rejected, due);
        assert!(queue.is_empty());
        assert!(queue.add_status(status(1, "b"), now), "may be sent again");
    }

    #[test]
    fn full_queue_drops_events_only() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for number in 0..MAX_EVENTS {
            let note = number.to_string();
            assert!(queue.add_event(event(Subject::Node, &note), now));
        }
        let one_more = event(Subject::Claim(claim(1)), "one more");
        assert!(!queue.add_event(one_more, now));
        for number in 0..1000 {
            assert!(queue.add_status(status(number, "a"), now));
        }
    }

    #[test]
    fn event_is_given_up_before_the_next() {
        let (mut queue, mut now) = (Queue::default(), Instant::now());
        let [first, second] = ["first", "second"].map(|note| event(Subject::Node, note));
        for event in [&first, &second] {
            assert!(queue.add_event(event.clone(), now));
        }
        for number in 1..=MAX_ATTEMPTS {
            let is_given_up = attempt(&mut queue, &first, Attempt::Failed, now);
            assert_eq!(is_given_up, number == MAX_ATTEMPTS);
            now += LONGEST_DELAY;
        }
        attempt(&mut queue, &second, Attempt::Written, now);
        assert!(queue.is_empty());
    }
}
