//! Events and conditions to write. Pure.
//!
//! Of each pod and type only the newest condition is queued, so the number of pods bounds the queue, and no condition is dropped. A
//! condition whose write failed is written again with increasing delays, until it is written, rejected or replaced.
//!
//! Invariants: two writes of one object are never in flight together, and its events are written in order. Events and
//! conditions take turns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::action::event::PendingEvent;
use crate::pods::pod_condition::PodConditionUpdate;

/// Delay before the first repeated write of a condition; doubles with each.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Number of times that the delay doubles.
const MAX_DOUBLINGS: u32 = 6;
/// Events that are taken from the queue of the publisher before it is known that they can be written at once.
const MAX_EVENTS: usize = 64;

/// UID of a pod, and type of its condition.
type ConditionKey = (String, String);

/// A condition to write.
#[derive(Debug)]
pub(super) struct ConditionWrite {
    pub(super) update: PodConditionUpdate,
    /// Number of failed writes.
    failures: u32,
}

/// A report to write.
#[derive(Debug)]
pub(super) enum Report {
    Event(PendingEvent),
    Condition(ConditionWrite),
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct ReportQueue {
    events: VecDeque<PendingEvent>,
    /// Conditions that are not in flight, with the time of their write.
    conditions: BTreeMap<ConditionKey, (Instant, ConditionWrite)>,
    /// Their keys in the order of these times.
    due: BTreeSet<(Instant, ConditionKey)>,
    /// UIDs of the objects of the reports in flight.
    in_flight: BTreeSet<String>,
    is_event_next: bool,
}

impl Report {
    /// Returns the UID of the object.
    pub(super) fn uid(&self) -> String {
        let object = match self {
            Self::Event(event) => &event.regarding,
            Self::Condition(write) => &write.update.pod,
        };
        object.uid.clone().unwrap_or_default()
    }
}

impl ReportQueue {
    /// Returns whether another event can be queued. If not, a report is in flight.
    pub(super) fn has_place_for_event(&self) -> bool {
        self.events.len() < MAX_EVENTS
    }

    /// Queues an event.
    pub(super) fn push_event(&mut self, event: PendingEvent) {
        self.events.push_back(event);
    }

    /// Queues a condition. It takes the turn of an older one of its type.
    pub(super) fn push_condition(&mut self, update: PodConditionUpdate, now: Instant) {
        let key = key_of(&update);
        let before = self.conditions.get(&key).map(|(due, _)| *due);
        let due = before.map_or(now, |before| before.min(now));
        let failures = 0;
        self.insert(key, due, ConditionWrite { update, failures });
    }

    /// The write of a condition failed. It is repeated, unless a newer one of its type is queued.
    pub(super) fn repeat(&mut self, mut write: ConditionWrite, now: Instant) {
        let key = key_of(&write.update);
        if !self.conditions.contains_key(&key) {
            let due = now + FIRST_DELAY * 2u32.pow(write.failures.min(MAX_DOUBLINGS));
            write.failures += 1;
            self.insert(key, due, write);
        }
    }

    fn insert(&mut self, key: ConditionKey, due: Instant, write: ConditionWrite) {
        if let Some((before, _)) = self.conditions.insert(key.clone(), (due, write)) {
            self.due.remove(&(before, key.clone()));
        }
        self.due.insert((due, key));
    }

    /// Forgets the conditions.
    pub(super) fn drop_conditions(&mut self) {
        self.conditions.clear();
        self.due.clear();
    }

    /// Returns a report whose write is to start.
    pub(super) fn start_next(&mut self, now: Instant) -> Option<Report> {
        let report = if self.is_event_next {
            self.take_event().or_else(|| self.take_condition(now))?
        } else {
            self.take_condition(now).or_else(|| self.take_event())?
        };
        self.is_event_next = matches!(report, Report::Condition(_));
        self.in_flight.insert(report.uid());
        Some(report)
    }

    fn take_event(&mut self) -> Option<Report> {
        let mut events = self.events.iter();
        let is_free = |event: &PendingEvent| !self.is_in_flight(event.regarding.uid.as_deref());
        let position = events.position(is_free)?;
        self.events.remove(position).map(Report::Event)
    }

    fn take_condition(&mut self, now: Instant) -> Option<Report> {
        let first = self.first_condition().filter(|(due, _)| *due <= now)?;
        let first = first.clone();
        self.due.remove(&first);
        let (_, write) = self.conditions.remove(&first.1)?;
        Some(Report::Condition(write))
    }

    fn first_condition(&self) -> Option<&(Instant, ConditionKey)> {
        self.due
            .iter()
            .find(|(_, (uid, _))| !self.is_in_flight(Some(uid)))
    }

    fn is_in_flight(&self, uid: Option<&str>) -> bool {
        self.in_flight.contains(uid.unwrap_or_default())
    }

    /// Returns when the next condition is due that is not behind a report in flight.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.first_condition().map(|(due, _)| *due)
    }

    /// The write of a report of this object has ended.
    pub(super) fn ended(&mut self, uid: &str) {
        self.in_flight.remove(uid);
    }
}

fn key_of(update: &PodConditionUpdate) -> ConditionKey {
    let uid = update.pod.uid.clone().unwrap_or_default();
    (uid, update.condition.type_.clone())
}
