//! Times at which unreserved allocations are checked for release.

use std::collections::{BTreeMap, BTreeSet};

use drava_allocator::object::ObjectKey;
use tokio::time::Instant;

/// See the [module](self). Every operation takes O(log claims).
#[derive(Debug, Default)]
pub(super) struct ReleaseTimers {
    times: BTreeMap<ObjectKey, Instant>,
    order: BTreeSet<(Instant, ObjectKey)>,
}

impl ReleaseTimers {
    /// Sets when the claim is checked; `None` for never.
    pub(super) fn set(&mut self, key: &ObjectKey, at: Option<Instant>) {
        let before = match at {
            Some(at) => self.times.insert(key.clone(), at),
            None => self.times.remove(key),
        };
        if before == at {
            return;
        }
        if let Some(before) = before {
            self.order.remove(&(before, key.clone()));
        }
        if let Some(at) = at {
            self.order.insert((at, key.clone()));
        }
    }

    /// Removes and returns the claims to check now.
    pub(super) fn pop_due(&mut self, now: Instant) -> Vec<ObjectKey> {
        let mut due = Vec::new();
        while let Some((at, _)) = self.order.first()
            && *at <= now
            && let Some((_, key)) = self.order.pop_first()
        {
            self.times.remove(&key);
            due.push(key);
        }
        due
    }

    /// Returns when the next claim is checked.
    pub(super) fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }
}
