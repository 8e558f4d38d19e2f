//! Objects that this build cannot read.
//!
//! An unreadable object is left out, or stays as it was read last. A claim is no exception to be skipped: its devices would be
//! allocated twice, so their pools are excluded.

use std::collections::BTreeMap;

use drava_allocator::object::{ObjectKey, object_key};
use drava_api::listed::Unreadable;

use super::Planner;
use crate::event::PendingEvent;
use crate::watches::Kind;

/// Unreadable objects with the cause.
pub(super) type UnreadableObjects = BTreeMap<(Kind, ObjectKey), String>;

impl Planner {
    /// Observes a version of an object that cannot be read.
    pub fn unreadable(&mut self, kind: Kind, object: &Unreadable) {
        let key = object_key(&object.metadata);
        self.reporter
            .state_events
            .push(PendingEvent::unreadable(kind, object));
        if kind == Kind::Claims {
            if self.world.cluster.upsert_unreadable_claim(object) {
                self.backlog.released_in.insert(key.0.clone());
            }
            self.commitments.ledger.remove(&key);
            self.backlog.queue.activate_users(&key);
            self.backlog.activate_all = true;
        }
        self.world
            .unreadable
            .insert((kind, key), object.cause.clone());
    }

    /// Observes that an object can be read by now, or is deleted.
    pub fn readable(&mut self, kind: Kind, key: ObjectKey) {
        self.world.unreadable.remove(&(kind, key));
        // The pools of a claim are usable again.
        self.backlog.activate_all |= kind == Kind::Claims;
    }

    /// Returns why a claim cannot be read; `None` for one that can.
    pub(super) fn unreadable_claim(&self, key: &ObjectKey) -> Option<&str> {
        let cause = self.world.unreadable.get(&(Kind::Claims, key.clone()));
        cause.map(String::as_str)
    }

    /// Returns the number of unreadable objects of each kind that has any.
    pub(super) fn count_unreadable(&self) -> BTreeMap<Kind, usize> {
        let mut counts = BTreeMap::new();
        for (kind, _) in self.world.unreadable.keys() {
            *counts.entry(*kind).or_default() += 1;
        }
        counts
    }
}
