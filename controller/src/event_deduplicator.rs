//! Deduplicates events: a repeated text is suppressed, a text that keeps changing is rate limited, and all events share a
//! budget.
//!
//! Invariant: only an event that was handed out counts as published. Events beyond a limit are delayed, and of each object
//! and reason only the newest text is; an event that could not be published comes back by [`EventDeduplicator::failed`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_api::event::EventReason;
use tokio::time::Instant;

use crate::event::PendingEvent;

/// Minimum time between two events of the same object and reason.
const MIN_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum time if only figures have changed: most of them change with every allocation in the cluster.
const FIGURES_INTERVAL: Duration = Duration::from_secs(60);
/// Time after which an unchanged text is published again; shorter than the API server's event lifetime.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30 * 60);
/// Time before an event that could not be published is published again.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Events of the whole cluster that can be published at once.
const BURST: u32 = 500;
/// Time in which the budget grows by one event: an event costs the API server half as much as an allocation. The condition
/// of a waiting pod does not wait for its event.
const EVENT_PERIOD: Duration = Duration::from_millis(100);

/// By UID of the object and reason.
type Key = (String, EventReason);

/// The last event of an object and reason.
#[derive(Debug, Default)]
struct Entry {
    /// The published text, and when it was published.
    published: Option<(String, Instant)>,
    /// A newer text, delayed.
    delayed: Option<Delayed>,
}

#[derive(Debug)]
struct Delayed {
    event: PendingEvent,
    /// Earliest time, without regard to the budget.
    due: Instant,
}

/// Events that can be published.
#[derive(Debug)]
struct Budget {
    events: u32,
    /// Until when the growth is counted.
    counted: Option<Instant>,
}

/// See the [module](self).
#[derive(Debug)]
pub struct EventDeduplicator {
    entries: BTreeMap<Key, Entry>,
    /// Keys of the entries with a delayed event, by when it is due.
    delayed: BTreeSet<(Instant, Key)>,
    budget: Budget,
    /// Namespaces with delayed events, each with the number of its last turn.
    turns: BTreeMap<Option<String>, u64>,
    next_turn: u64,
}

impl Default for EventDeduplicator {
    fn default() -> Self {
        let budget = Budget {
            events: BURST,
            counted: None,
        };
        Self {
            entries: BTreeMap::new(),
            delayed: BTreeSet::new(),
            budget,
            turns: BTreeMap::new(),
            next_turn: 1,
        }
    }
}

impl Budget {
    fn grow(&mut self, now: Instant) {
        let counted = *self.counted.get_or_insert(now);
        let periods = now.saturating_duration_since(counted).as_nanos() / EVENT_PERIOD.as_nanos();
        let periods = u32::try_from(periods).unwrap_or(BURST).min(BURST);
        if periods > 0 {
            self.events = self.events.saturating_add(periods).min(BURST);
            self.counted = Some(if self.events == BURST {
                now
            } else {
                counted + EVENT_PERIOD * periods
            });
        }
    }

    fn take(&mut self) -> bool {
        let is_left = self.events > 0;
        self.events = self.events.saturating_sub(1);
        is_left
    }

    /// Returns when an event can be published, at the earliest.
    fn next(&self, due: Instant) -> Instant {
        match self.counted {
            Some(counted) if self.events == 0 => due.max(counted + EVENT_PERIOD),
            _ => due,
        }
    }
}

impl EventDeduplicator {
    /// Returns the event if it is to be published now.
    pub fn filter(&mut self, event: PendingEvent, now: Instant) -> Option<PendingEvent> {
        self.budget.grow(now);
        let key = key_of(&event);
        let entry = self.entries.entry(key.clone()).or_default();
        let delayed = entry.delayed.take();
        if let Some(delayed) = &delayed {
            self.delayed.remove(&(delayed.due, key.clone()));
        }
        let due = match &entry.published {
            Some((text, at)) if *text == event.message && now < *at + REPEAT_INTERVAL => {
                return None;
            }
            Some((text, at)) if differ_in_figures_only(text, &event.message) => {
                *at + FIGURES_INTERVAL
            }
            Some((_, at)) => *at + MIN_INTERVAL,
            None => now,
        };
        // A delayed event keeps its turn.
        let due = delayed.map_or(due, |delayed| delayed.due.min(due));
        if due <= now && self.budget.take() {
            entry.published = Some((event.message.clone(), now));
            return Some(event);
        }
        entry.delayed = Some(Delayed { event, due });
        self.delayed.insert((due, key));
        None
    }

    /// Returns the delayed events that are due, as far as the budget allows: in turn by namespace, so that a tenant with
    /// many events does not delay those of the others, and the oldest first.
    pub fn due(&mut self, now: Instant) -> Vec<PendingEvent> {
        self.budget.grow(now);
        if self.budget.events == 0 {
            return Vec::new();
        }
        let due = self.delayed.iter().take_while(|(due, _)| *due <= now);
        let delayed: Vec<(Option<String>, Key)> = due
            .filter_map(|(_, key)| {
                let delayed = self.entries.get(key)?.delayed.as_ref()?;
                Some((delayed.event.regarding.namespace.clone(), key.clone()))
            })
            .collect();
        let mut queued: BTreeMap<Option<String>, usize> = BTreeMap::new();
        let mut in_turn: Vec<_> = delayed
            .into_iter()
            .map(|(namespace, key)| {
                let position = queued.entry(namespace.clone()).or_default();
                *position += 1;
                let last_turn = self.turns.get(&namespace).copied().unwrap_or_default();
                (*position, last_turn, namespace, key)
            })
            .collect();
        in_turn.sort_by_key(|(position, last_turn, ..)| (*position, *last_turn));
        self.turns
            .retain(|namespace, _| queued.contains_key(namespace));
        let mut events = Vec::new();
        for (_, _, namespace, key) in in_turn {
            self.turns.insert(namespace, self.next_turn);
            self.next_turn += 1;
            let delayed = self.take_delayed(&key);
            events.extend(delayed.and_then(|delayed| self.filter(delayed.event, now)));
            if self.budget.events == 0 {
                break;
            }
        }
        events
    }

    fn take_delayed(&mut self, key: &Key) -> Option<Delayed> {
        let delayed = self.entries.get_mut(key)?.delayed.take()?;
        self.delayed.remove(&(delayed.due, key.clone()));
        Some(delayed)
    }

    /// Returns when the next delayed event is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let first = self.delayed.first().map(|(due, _)| *due)?;
        Some(self.budget.next(first))
    }

    /// An event could not be published. It is delayed, unless a newer one is or its text is outdated.
    pub fn failed(&mut self, event: PendingEvent, now: Instant) {
        let key = key_of(&event);
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        let is_last = matches!(&entry.published, Some((text, _)) if *text == event.message);
        if is_last {
            entry.published = None;
            let due = now + RETRY_INTERVAL;
            let due = entry.delayed.get_or_insert(Delayed { event, due }).due;
            self.delayed.insert((due, key));
        }
    }

    /// Forgets the events of an object that is deleted or schedulable again.
    pub fn forget(&mut self, uid: &str) {
        let first = (uid.to_owned(), EventReason::Allocated);
        let keys = self.entries.range(first..).map(|(key, _)| key);
        let keys: Vec<Key> = keys.take_while(|(of, _)| of == uid).cloned().collect();
        for key in keys {
            self.take_delayed(&key);
            self.entries.remove(&key);
        }
    }
}

fn key_of(event: &PendingEvent) -> Key {
    (
        event.regarding.uid.clone().unwrap_or_default(),
        event.reason,
    )
}

fn differ_in_figures_only(left: &str, right: &str) -> bool {
    fn without_figures(text: &str) -> impl Iterator<Item = char> {
        let is_figure = |c: &char| !c.is_ascii_digit() && *c != '.';
        text.chars().filter(is_figure)
    }
    without_figures(left).eq(without_figures(right))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;

    use super::*;

    fn event(message: &str) -> PendingEvent {
        PendingEvent {
            regarding: ObjectReference {
                uid: Some("u".to_owned()),
                ..ObjectReference::default()
            },
            reason: EventReason::GpuUnschedulable,
            message: message.to_owned(),
        }
    }

    #[test]
    fn suppresses_repeated_text_and_delays_changed_text() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        assert!(events.filter(event("a"), start).is_some());
        assert!(
            events
                .filter(event("a"), start + MIN_INTERVAL * 2)
                .is_none(),
            "unchanged text"
        );
        assert!(
            events
                .filter(event("b"), start + MIN_INTERVAL / 2)
                .is_none(),
            "within the minimum interval"
        );
        assert!(
            events
                .filter(event("c"), start + MIN_INTERVAL / 2)
                .is_none(),
            "within the minimum interval"
        );
        assert_eq!(events.next_due(), Some(start + MIN_INTERVAL));
        assert_eq!(
            events.due(start + MIN_INTERVAL),
            [event("c")],
            "only the newest text"
        );
        assert_eq!(events.next_due(), None);
        assert!(
            events
                .filter(event("c"), start + MIN_INTERVAL * 3)
                .is_none()
        );
        assert!(
            events
                .filter(event("c"), start + REPEAT_INTERVAL * 2)
                .is_some(),
            "before the event expires"
        );
    }

    #[test]
    fn drops_delayed_text_that_changes_back() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        assert!(events.filter(event("a"), start).is_some());
        assert!(events.filter(event("b"), start).is_none());
        assert!(events.filter(event("a"), start).is_none());
        assert_eq!(events.next_due(), None);
    }

    #[test]
    fn publishes_forgotten_text_again() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        assert!(events.filter(event("a"), start).is_some());
        events.forget("u");
        assert!(events.filter(event("a"), start).is_some());
    }

    fn event_of(uid: &str, namespace: &str) -> PendingEvent {
        let mut event = event("a");
        event.regarding.uid = Some(uid.to_owned());
        event.regarding.namespace = Some(namespace.to_owned());
        event
    }

    #[test]
    fn delays_text_longer_if_only_figures_changed() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        assert!(events.filter(event("6 GiB on n3/gpu-2"), start).is_some());
        let later = start + MIN_INTERVAL;
        assert!(
            events
                .filter(event("4.5 GiB on n12/gpu-0"), later)
                .is_none()
        );
        assert_eq!(events.next_due(), Some(start + FIGURES_INTERVAL));
        assert!(
            events
                .filter(event("2 GPUs are unhealthy"), later)
                .is_some()
        );
    }

    #[test]
    fn publishes_all_events_within_cluster_budget() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        let count = BURST + 100;
        let passed = (0..count)
            .filter(|index| {
                events
                    .filter(event_of(&format!("{index:05}"), "ns"), start)
                    .is_some()
            })
            .count();
        assert_eq!(passed, BURST as usize);
        assert!(
            events.filter(event_of("00000", "ns"), start).is_none(),
            "published"
        );
        let other = event_of("z", "other");
        assert!(events.filter(other.clone(), start).is_none());
        let mut delayed = Vec::new();
        let mut now = start;
        while let Some(next) = events.next_due() {
            assert!(next > now, "the budget grows first");
            now = next;
            delayed.extend(events.due(now));
        }
        assert!(delayed[..2].contains(&other), "namespaces take turns");
        assert_eq!(delayed.len(), 101, "no event is lost");
        assert_eq!(now, start + EVENT_PERIOD * 101);
    }

    #[test]
    fn publishes_failed_event_again() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        let first = events.filter(event("a"), start).unwrap();
        events.failed(first, start);
        assert_eq!(events.next_due(), Some(start + RETRY_INTERVAL));
        assert_eq!(events.due(start + RETRY_INTERVAL), [event("a")]);
        let newer = events
            .filter(event("b"), start + RETRY_INTERVAL * 2)
            .unwrap();
        events.failed(event("a"), start + RETRY_INTERVAL * 2);
        assert_eq!(events.next_due(), None, "an outdated text");
        events.forget("u");
        events.failed(newer, start);
        assert_eq!(events.next_due(), None, "a schedulable pod");
    }
}
