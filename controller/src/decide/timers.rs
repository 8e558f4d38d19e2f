//! Times at which something is due, by key.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

/// See the [module](self). Every operation takes O(log keys), for each key that it returns.
#[derive(Debug)]
pub(crate) struct Timers<K> {
    times: BTreeMap<K, Instant>,
    order: BTreeSet<(Instant, K)>,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Self {
            times: BTreeMap::new(),
            order: BTreeSet::new(),
        }
    }
}

impl<K: Ord + Clone> Timers<K> {
    /// Sets when the key is due.
    pub(crate) fn set(&mut self, key: K, at: Instant) {
        self.remove(&key);
        self.order.insert((at, key.clone()));
        self.times.insert(key, at);
    }

    /// The key is never due.
    pub(crate) fn remove<Q: Ord + ?Sized>(&mut self, key: &Q)
    where
        K: Borrow<Q>,
    {
        if let Some((key, at)) = self.times.remove_entry(key) {
            self.order.remove(&(at, key));
        }
    }

    /// Returns whether the key is going to be due.
    pub(crate) fn contains<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.times.contains_key(key)
    }

    /// Removes and returns the keys that are due.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Vec<K> {
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

    /// Returns when the first key is due.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }
}
