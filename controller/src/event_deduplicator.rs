//! Deduplicates events: a repeated text is suppressed, and a text that keeps changing is rate limited.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_api::event::EventReason;
use tokio::time::Instant;

use crate::event::PendingEvent;

/// Minimum time between two events of the same object and reason.
const MIN_INTERVAL: Duration = Duration::from_secs(5);
/// Time after which an unchanged text is published again; shorter than the API server's event lifetime.
const REPEAT_INTERVAL: Duration = Duration::from_secs(30 * 60);

/// The last event of an object and reason.
#[derive(Debug)]
struct Published {
    message: String,
    at: Instant,
    /// A newer text, delayed until [`MIN_INTERVAL`] has passed.
    delayed: Option<PendingEvent>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct EventDeduplicator {
    /// By UID of the object and reason.
    published: BTreeMap<(String, EventReason), Published>,
}

impl EventDeduplicator {
    /// Returns the event if it is to be published now.
    pub fn filter(&mut self, event: PendingEvent, now: Instant) -> Option<PendingEvent> {
        let key = (
            event.regarding.uid.clone().unwrap_or_default(),
            event.reason,
        );
        match self.published.get_mut(&key) {
            Some(last) if last.message == event.message && now < last.at + REPEAT_INTERVAL => {
                last.delayed = None;
                None
            }
            Some(last) if now < last.at + MIN_INTERVAL => {
                last.delayed = Some(event);
                None
            }
            _ => {
                let published = Published {
                    message: event.message.clone(),
                    at: now,
                    delayed: None,
                };
                self.published.insert(key, published);
                Some(event)
            }
        }
    }

    /// Returns the delayed events that are due.
    pub fn due(&mut self, now: Instant) -> Vec<PendingEvent> {
        let due: Vec<PendingEvent> = self
            .published
            .values_mut()
            .filter(|last| now >= last.at + MIN_INTERVAL)
            .filter_map(|last| last.delayed.take())
            .collect();
        due.into_iter()
            .filter_map(|event| self.filter(event, now))
            .collect()
    }

    /// Returns when the next delayed event is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.published
            .values()
            .filter(|last| last.delayed.is_some())
            .map(|last| last.at + MIN_INTERVAL)
            .min()
    }

    /// Forgets the events of an object that is deleted or schedulable again.
    pub fn forget(&mut self, uid: &str) {
        self.published.retain(|(of, _), _| of != uid);
    }
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
}
