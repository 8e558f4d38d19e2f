//! Companions without an allocation: which one is tried next.
//!
//! Namespaces take turns, each with its oldest companion, so that no number of companions delays those of another namespace by more
//! than one attempt each. An attempt that fails is repeated after twice the time of the one before.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use jiff::Timestamp;
use tokio::time::Instant;

/// Time until the first repetition.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// Longest time until a repetition: a share grows so much later than it could.
pub(super) const MAX_RETRY: Duration = Duration::from_secs(8);

/// Companions that wait.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    companions: BTreeMap<ObjectKey, Companion>,
    /// Those that are tried later, by time.
    later: BTreeSet<(Instant, ObjectKey)>,
    /// Those that are tried as soon as it is their turn, the oldest first, by namespace.
    ready: BTreeMap<String, BTreeSet<(Option<Timestamp>, ObjectKey)>>,
    /// Namespace of the last attempt.
    last: String,
}

#[derive(Debug)]
struct Companion {
    created: Option<Timestamp>,
    /// Time of the next attempt.
    due: Instant,
    /// Time until the attempt after that.
    retry: Duration,
}

impl Waiting {
    /// Adds a companion, or tries a known one again at once, because it has changed.
    pub(super) fn insert(&mut self, key: ObjectKey, created: Option<Timestamp>, now: Instant) {
        self.remove(&key);
        let companion = Companion {
            created,
            due: now,
            retry: RETRY,
        };
        self.later.insert((now, key.clone()));
        self.companions.insert(key, companion);
    }

    /// Returns the number of companions.
    pub(super) fn len(&self) -> usize {
        self.companions.len()
    }

    /// Removes a companion.
    pub(super) fn remove(&mut self, key: &ObjectKey) {
        let Some(known) = self.companions.remove(key) else {
            return;
        };
        self.later.remove(&(known.due, key.clone()));
        self.take_ready(&(known.created, key.clone()));
    }

    fn take_ready(&mut self, entry: &(Option<Timestamp>, ObjectKey)) {
        let namespace = &entry.1.0;
        if let Some(ready) = self.ready.get_mut(namespace) {
            ready.remove(entry);
            if ready.is_empty() {
                self.ready.remove(namespace);
            }
        }
    }

    /// Returns when one is to be tried.
    pub(super) fn next_due(&self) -> Option<Instant> {
        let ready = self.ready.values().flatten();
        let mut ready = ready.filter_map(|(_, key)| Some(self.companions.get(key)?.due));
        let later = self.later.first().map(|(due, _)| *due);
        ready.next().or(later)
    }

    /// The attempt has not ended: the next one goes on, and is not one that failed.
    pub(super) fn go_on(&mut self, key: &ObjectKey, now: Instant) {
        if let Some(known) = self.companions.get_mut(key) {
            self.later.remove(&(known.due, key.clone()));
            (known.due, known.retry) = (now + RETRY, RETRY);
            self.later.insert((known.due, key.clone()));
        }
    }

    /// Returns the companion to try now, and sets its next attempt.
    pub(super) fn start_next(&mut self, now: Instant) -> Option<ObjectKey> {
        while self.later.first().is_some_and(|(due, _)| *due <= now) {
            if let Some((_, key)) = self.later.pop_first()
                && let Some(known) = self.companions.get(&key)
            {
                let ready = self.ready.entry(key.0.clone()).or_default();
                ready.insert((known.created, key));
            }
        }
        let after = (Bound::Excluded(self.last.as_str()), Bound::Unbounded);
        let mut next = self.ready.range::<str, _>(after).chain(&self.ready);
        let entry = next.next()?.1.first()?.clone();
        self.take_ready(&entry);
        let (_, key) = entry;
        self.last.clone_from(&key.0);
        let known = self.companions.get_mut(&key)?;
        known.due = now + known.retry;
        known.retry = (known.retry * 2).min(MAX_RETRY);
        self.later.insert((known.due, key.clone()));
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, name: &str) -> ObjectKey {
        (namespace.to_owned(), name.to_owned())
    }

    fn at(second: i64) -> Option<Timestamp> {
        Timestamp::from_second(second).ok()
    }

    #[test]
    fn namespaces_take_turns_with_their_oldest() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        for number in 0..5_000 {
            waiting.insert(key("a", &format!("{number:04}")), at(number), now);
        }
        waiting.insert(key("b", "young"), at(9_000), now);
        waiting.insert(key("b", "old"), at(8_000), now);
        waiting.insert(key("c", "only"), at(9_999), now);
        let tried: Vec<_> = std::iter::from_fn(|| waiting.start_next(now)).collect();
        assert_eq!(tried.len(), 5_003, "each once");
        let expected = [
            key("a", "0000"),
            key("b", "old"),
            key("c", "only"),
            key("a", "0001"),
            key("b", "young"),
            key("a", "0002"),
        ];
        assert_eq!(tried[..6], expected);
    }

    #[test]
    fn attempts_become_rare_until_the_companion_changes() {
        let mut now = Instant::now();
        let mut waiting = Waiting::default();
        waiting.insert(key("a", "x"), at(1), now);
        let mut pauses = Vec::new();
        for _ in 0..5 {
            assert_eq!(waiting.start_next(now), Some(key("a", "x")));
            assert_eq!(waiting.start_next(now), None);
            let due = waiting.next_due().expect("a time");
            pauses.push((due - now).as_secs());
            now = due;
        }
        assert_eq!(pauses, [1, 2, 4, 8, 8]);
        waiting.insert(key("a", "x"), at(1), now);
        assert_eq!(waiting.start_next(now), Some(key("a", "x")));
        assert_eq!(waiting.next_due(), Some(now + RETRY));
        waiting.remove(&key("a", "x"));
        assert_eq!(waiting.next_due(), None);
        assert_eq!(waiting.start_next(now + MAX_RETRY), None);
    }

    #[test]
    fn attempt_that_goes_on_is_none_that_failed() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        waiting.insert(key("a", "x"), at(1), now);
        for turn in 0..4 {
            let now = now + RETRY * turn;
            assert_eq!(waiting.start_next(now), Some(key("a", "x")), "{turn}");
            waiting.go_on(&key("a", "x"), now);
            assert_eq!(waiting.next_due(), Some(now + RETRY));
        }
    }

    #[test]
    fn what_is_ready_is_due() {
        let now = Instant::now();
        let mut waiting = Waiting::default();
        for name in ["x", "y"] {
            waiting.insert(key("a", name), at(1), now);
        }
        assert!(waiting.start_next(now).is_some());
        assert_eq!(waiting.next_due(), Some(now));
        waiting.remove(&key("a", "y"));
        assert_eq!(waiting.next_due(), Some(now + RETRY));
    }
}
