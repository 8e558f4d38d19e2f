//! What users are told, as Kubernetes events: what was said last is remembered, so that nothing is said twice in a
//! row and a text that keeps changing does not flood.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_api::event::EventReason;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

/// Time in which the same object gets no second event of the same reason.
const QUIET: Duration = Duration::from_secs(5);
/// Time after which the same text is said again, well before the API server forgets the event.
const REPEAT: Duration = Duration::from_secs(30 * 60);

/// Something to tell.
#[derive(Debug, Clone, PartialEq)]
pub struct Notice {
    /// The object that it is about.
    pub regarding: ObjectReference,
    /// Reason; determines the type.
    pub reason: EventReason,
    /// For the user.
    pub message: String,
}

#[derive(Debug)]
struct Said {
    message: String,
    at: Instant,
    /// A newer text that waits for the end of the quiet time.
    held_back: Option<Notice>,
}

/// Remembers what was said.
#[derive(Debug, Default)]
pub struct Notices {
    said: BTreeMap<(String, EventReason), Said>,
}

impl Notices {
    /// The notice, if it is to be said now.
    pub fn offer(&mut self, notice: Notice, now: Instant) -> Option<Notice> {
        let key = (
            notice.regarding.uid.clone().unwrap_or_default(),
            notice.reason,
        );
        match self.said.get_mut(&key) {
            Some(said) if said.message == notice.message && now < said.at + REPEAT => {
                said.held_back = None;
                None
            }
            Some(said) if now < said.at + QUIET => {
                said.held_back = Some(notice);
                None
            }
            _ => {
                let said = Said {
                    message: notice.message.clone(),
                    at: now,
                    held_back: None,
                };
                self.said.insert(key, said);
                Some(notice)
            }
        }
    }

    /// Notices whose quiet time has ended.
    pub fn due(&mut self, now: Instant) -> Vec<Notice> {
        let due: Vec<Notice> = self
            .said
            .values_mut()
            .filter(|said| now >= said.at + QUIET)
            .filter_map(|said| said.held_back.take())
            .collect();
        due.into_iter()
            .filter_map(|notice| self.offer(notice, now))
            .collect()
    }

    /// When the next held-back notice is due.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.said
            .values()
            .filter(|said| said.held_back.is_some())
            .map(|said| said.at + QUIET)
            .min()
    }

    /// Forgets an object that is gone, or whose trouble is over.
    pub fn forget(&mut self, uid: &str) {
        self.said.retain(|(of, _), _| of != uid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notice(message: &str) -> Notice {
        Notice {
            regarding: ObjectReference {
                uid: Some("u".to_owned()),
                ..ObjectReference::default()
            },
            reason: EventReason::GpuUnschedulable,
            message: message.to_owned(),
        }
    }

    #[test]
    fn nothing_is_said_twice_and_changes_are_not_lost() {
        let start = Instant::now();
        let mut notices = Notices::default();
        assert!(notices.offer(notice("a"), start).is_some());
        assert!(
            notices.offer(notice("a"), start + QUIET * 2).is_none(),
            "the same text"
        );
        assert!(
            notices.offer(notice("b"), start + QUIET / 2).is_none(),
            "too early"
        );
        assert!(
            notices.offer(notice("c"), start + QUIET / 2).is_none(),
            "too early"
        );
        assert_eq!(notices.next_due(), Some(start + QUIET));
        assert_eq!(
            notices.due(start + QUIET),
            [notice("c")],
            "only the newest text"
        );
        assert_eq!(notices.next_due(), None);
        assert!(notices.offer(notice("c"), start + QUIET * 3).is_none());
        assert!(
            notices.offer(notice("c"), start + REPEAT * 2).is_some(),
            "before the event expires"
        );
    }

    #[test]
    fn a_text_that_changes_back_is_not_repeated() {
        let start = Instant::now();
        let mut notices = Notices::default();
        assert!(notices.offer(notice("a"), start).is_some());
        assert!(notices.offer(notice("b"), start).is_none());
        assert!(notices.offer(notice("a"), start).is_none());
        assert_eq!(notices.next_due(), None);
    }

    #[test]
    fn what_is_forgotten_is_said_again() {
        let start = Instant::now();
        let mut notices = Notices::default();
        assert!(notices.offer(notice("a"), start).is_some());
        notices.forget("u");
        assert!(notices.offer(notice("a"), start).is_some());
    }
}
