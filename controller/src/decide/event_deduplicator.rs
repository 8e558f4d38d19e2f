//! Deduplicates events: a repeated text is suppressed, a text that keeps changing is rate limited, and all events share a
//! budget. Allocations leave a part of it to the events that ask for action. Evictions do not wait for it: each is published.
//!
//! Invariant: only an event that was handed out counts as published. Events beyond a limit are delayed, and of each object
//! and reason only the newest text is; an event that could not be published comes back by [`EventDeduplicator::failed`].

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use drava_allocator::steps;
use drava_api::event::EventReason;
use tokio::time::Instant;

use crate::action::OwnCause;
use crate::action::event::PendingEvent;

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
/// Part of the budget that allocations leave to other events.
const RESERVE: u32 = BURST / 2;
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

/// Who waits for a turn: a namespace, with its allocations or its other events.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    is_of_allocations: bool,
    namespace: Option<String>,
}

/// Delayed events that take turns with those of others.
#[derive(Debug, Default)]
struct Queue {
    /// Number of the last turn.
    last_turn: u64,
    /// Keys of the entries with a delayed event, by when it is due.
    delayed: BTreeSet<(Instant, Key)>,
}

/// See the [module](self). Handing out an event takes O(log events + namespaces).
#[derive(Debug)]
pub struct EventDeduplicator {
    entries: BTreeMap<Key, Entry>,
    queues: BTreeMap<Turn, Queue>,
    /// The keys of the queues, by their last turn.
    turns: BTreeSet<(u64, Turn)>,
    next_turn: u64,
    budget: Budget,
    /// Events of evictions that could not be published, in the order of the times at which they are published again.
    repeated: VecDeque<(Instant, PendingEvent)>,
}

impl Default for EventDeduplicator {
    fn default() -> Self {
        let budget = Budget {
            events: BURST,
            counted: None,
        };
        Self {
            entries: BTreeMap::new(),
            queues: BTreeMap::new(),
            turns: BTreeSet::new(),
            next_turn: 1,
            budget,
            repeated: VecDeque::new(),
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

    /// Takes an event if more than `reserve` are left.
    fn take(&mut self, reserve: u32) -> bool {
        let is_left = self.events > reserve;
        if is_left {
            self.events -= 1;
        }
        is_left
    }

    /// Returns when an event can be published that leaves `reserve`, at the earliest.
    fn next(&self, due: Instant, reserve: u32) -> Instant {
        match (self.counted, (reserve + 1).saturating_sub(self.events)) {
            (Some(counted), missing) if missing > 0 => due.max(counted + EVENT_PERIOD * missing),
            _ => due,
        }
    }
}

impl EventDeduplicator {
    /// Returns the event if it is to be published now.
    pub fn filter(&mut self, event: PendingEvent, now: Instant) -> Option<PendingEvent> {
        if is_of_eviction(event.reason) {
            return Some(event);
        }
        self.budget.grow(now);
        let key = key_of(&event);
        let delayed = self.take_delayed(&key);
        let entry = self.entries.entry(key.clone()).or_default();
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
        if due <= now && self.budget.take(reserve(event.reason)) {
            entry.published = Some((event.message.clone(), now));
            return Some(event);
        }
        self.delay(key, event, due);
        None
    }

    fn delay(&mut self, key: Key, event: PendingEvent, due: Instant) {
        let turn = turn_of(&event);
        let queue = self.queues.entry(turn.clone()).or_default();
        queue.delayed.insert((due, key.clone()));
        self.turns.insert((queue.last_turn, turn));
        self.entries.entry(key).or_default().delayed = Some(Delayed { event, due });
    }

    /// Returns the delayed events that are due, as far as the budget allows: in turn by namespace, so that a tenant with
    /// many events does not delay those of the others, and the oldest first.
    pub fn due(&mut self, now: Instant) -> Vec<PendingEvent> {
        self.budget.grow(now);
        let mut events = Vec::new();
        while let Some((due, _)) = self.repeated.front()
            && *due <= now
        {
            events.extend(self.repeated.pop_front().map(|(_, event)| event));
        }
        while let Some((key, turn)) = self.next_in_turn(now) {
            let delayed = self.take_delayed(&key);
            if let Some(queue) = self.queues.get_mut(&turn) {
                self.turns.remove(&(queue.last_turn, turn.clone()));
                queue.last_turn = self.next_turn;
                self.turns.insert((queue.last_turn, turn));
            }
            self.next_turn += 1;
            events.extend(delayed.and_then(|delayed| self.filter(delayed.event, now)));
        }
        events
    }

    /// Returns the due event whose turn it is, if the budget allows one.
    fn next_in_turn(&self, now: Instant) -> Option<(Key, Turn)> {
        let mut turns = steps::counted(&self.turns);
        turns.find_map(|(_, turn)| {
            let (due, key) = self.queues.get(turn)?.delayed.first()?;
            let is_allowed = self.budget.events > reserve(key.1);
            (is_allowed && *due <= now).then(|| (key.clone(), turn.clone()))
        })
    }

    fn take_delayed(&mut self, key: &Key) -> Option<Delayed> {
        let delayed = self.entries.get_mut(key)?.delayed.take()?;
        let turn = turn_of(&delayed.event);
        if let Some(queue) = self.queues.get_mut(&turn) {
            queue.delayed.remove(&(delayed.due, key.clone()));
            if queue.delayed.is_empty() {
                self.turns.remove(&(queue.last_turn, turn.clone()));
                self.queues.remove(&turn);
            }
        }
        Some(delayed)
    }

    /// Returns when the next delayed event is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        let queues = self.queues.values();
        let first = queues.filter_map(|queue| {
            let (due, key) = queue.delayed.first()?;
            Some(self.budget.next(*due, reserve(key.1)))
        });
        let repeated = self.repeated.front().map(|(due, _)| *due);
        first.chain(repeated).min()
    }

    /// An event could not be published. It is delayed, unless a newer one is or its text is outdated.
    pub fn failed(&mut self, event: PendingEvent, now: Instant) {
        let due = now + RETRY_INTERVAL;
        if is_of_eviction(event.reason) {
            self.repeated.push_back((due, event));
            return;
        }
        let key = key_of(&event);
        let Some(entry) = self.entries.get_mut(&key) else {
            return;
        };
        let is_last = matches!(&entry.published, Some((text, _)) if *text == event.message);
        if is_last {
            entry.published = None;
            if entry.delayed.is_none() {
                self.delay(key, event, due);
            }
        }
    }

    /// Returns the events of evictions that are not published.
    pub fn into_evictions(self) -> impl Iterator<Item = PendingEvent> {
        self.repeated.into_iter().map(|(_, event)| event)
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
    let reason = match event.reason {
        // The last of them is what is so: one is repeated when another came between.
        EventReason::ShareResumed | EventReason::SuspensionRefused => EventReason::ShareSuspended,
        other => other,
    };
    (event.regarding.uid.clone().unwrap_or_default(), reason)
}

fn turn_of(event: &PendingEvent) -> Turn {
    Turn {
        is_of_allocations: event.reason == EventReason::Allocated,
        namespace: event.regarding.namespace.clone(),
    }
}

/// Returns which part of the budget an event leaves to others.
fn reserve(reason: EventReason) -> u32 {
    if reason == EventReason::Allocated {
        RESERVE
    } else {
        0
    }
}

/// Returns whether the event tells of an eviction. Evictions limit the number of these events.
fn is_of_eviction(reason: EventReason) -> bool {
    matches!(reason, EventReason::Preempted | EventReason::Preempting)
        || OwnCause::ALL.iter().any(|cause| cause.reason() == reason)
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
    fn hands_out_event_without_visiting_those_behind_it() {
        let handed_out = |waiting: u32| {
            let start = Instant::now();
            let mut events = EventDeduplicator::default();
            for uid in 0..BURST + waiting {
                events.filter(event_of(&uid.to_string(), "a"), start);
            }
            let (steps, due) = steps::of(|| events.due(start + EVENT_PERIOD));
            (steps, due.len())
        };
        assert_eq!(handed_out(100), handed_out(200));
        assert_eq!(
            handed_out(100),
            (2, 1),
            "its namespace, also for the next one"
        );
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

    fn allocated(uid: &str) -> PendingEvent {
        PendingEvent {
            reason: EventReason::Allocated,
            ..event_of(uid, "ns")
        }
    }

    #[test]
    fn allocations_leave_budget_to_other_events() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        let allocations = (0..BURST).map(|index| allocated(&format!("{index:05}")));
        let passed = allocations
            .filter_map(|event| events.filter(event, start))
            .count();
        assert_eq!(passed, (BURST - RESERVE) as usize);
        assert!(events.filter(event_of("waiting", "ns"), start).is_some());
        let next = events.next_due().unwrap();
        assert_eq!(next, start + EVENT_PERIOD * 2, "the reserve comes first");
        assert_eq!(events.due(next), [allocated("00250")]);
        let mut now = next;
        let mut count = passed + 1;
        while let Some(next) = events.next_due() {
            assert!(next > now);
            now = next;
            count += events.due(now).len();
        }
        assert_eq!(count, BURST as usize, "none is lost");
    }

    #[test]
    fn repeats_every_failed_event_of_an_eviction() {
        let start = Instant::now();
        let mut events = EventDeduplicator::default();
        let of = |reason| PendingEvent {
            reason,
            ..event("evicted")
        };
        let reasons = [EventReason::Preempted, EventReason::Preempting];
        for reason in reasons {
            let event = events.filter(of(reason), start).unwrap();
            events.failed(event, start);
        }
        // The evicted pod is gone before its event is published.
        events.forget("u");
        let due = events.next_due().unwrap();
        assert_eq!(due, start + RETRY_INTERVAL);
        assert_eq!(events.due(due), reasons.map(of));
        assert_eq!(events.next_due(), None);
    }

    #[test]
    fn handing_out_takes_no_longer_with_many_delayed() {
        // The shortest of several batches of calls, each of which hands out one event.
        let time_of_calls = |count: u32| {
            let mut now = Instant::now();
            let mut events = EventDeduplicator::default();
            for index in 0..count + BURST {
                events.filter(event_of(&format!("{index:06}"), "ns"), now);
            }
            let batches = (0..20).map(|_| {
                let begin = std::time::Instant::now();
                for _ in 0..5 {
                    now = events.next_due().unwrap();
                    assert_eq!(events.due(now).len(), 1);
                }
                begin.elapsed()
            });
            batches.min().unwrap()
        };
        let (few, many) = (time_of_calls(2_000), time_of_calls(200_000));
        assert!(
            many < few * 20,
            "{few:?} with 2,000 and {many:?} with 200,000 delayed events"
        );
    }
}
