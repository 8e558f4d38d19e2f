//! Index of the pods by when a decision is due: in queue order, or at the end of a backoff.
//!
//! Due pods are decided in rounds. A pod that is due again after its decision waits for the next round, so that frequent
//! changes, which make every pod due, do not starve those at the end of the queue. A new pod takes its place in the current
//! round.
//!
//! A complete pod, of which only the gate is left, takes no part in the rounds: what is allocated waits for no decision.
//!
//! A suspended decision goes on when a round is over: one turn of one decision. Namespaces take turns, and so do the pods of a
//! namespace, in queue order.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;

use tokio::time::Instant;

use super::QueueOrder;

/// When a decision for a pod is due.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Due {
    /// Now, in this order.
    Now(Arc<QueueOrder>),
    /// When a round is over, in this order in this namespace.
    Suspended(String, Arc<QueueOrder>),
    /// Before all decisions, in this order: the pod is complete.
    Complete(Arc<QueueOrder>),
    /// At the end of its backoff.
    At(Instant),
}

/// Position of a pod in the index.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Position {
    ThisRound(Arc<QueueOrder>),
    NextRound(Arc<QueueOrder>),
    Suspended(String, Arc<QueueOrder>),
    Complete(Arc<QueueOrder>),
    Backoff(Instant),
}

/// See the [module](self). Every operation takes O(log pods).
#[derive(Debug, Default)]
pub(super) struct DueIndex {
    /// By UID.
    positions: BTreeMap<String, Position>,
    this_round: BTreeSet<(Arc<QueueOrder>, String)>,
    next_round: BTreeSet<(Arc<QueueOrder>, String)>,
    complete: BTreeSet<(Arc<QueueOrder>, String)>,
    /// By namespace.
    suspended: BTreeMap<String, BTreeSet<(Arc<QueueOrder>, String)>>,
    /// Namespace of the last turn of a suspended decision.
    last_namespace: String,
    /// The pod of the last turn of each namespace with suspended decisions.
    last_suspended: BTreeMap<String, (Arc<QueueOrder>, String)>,
    /// Whether a suspended decision had its turn after this round.
    has_resumed: bool,
    backoffs: BTreeSet<(Instant, String)>,
    /// UIDs of the pods that were decided in this round.
    decided: BTreeSet<String>,
}

impl DueIndex {
    /// Sets when a decision is due; `None` for never.
    pub(super) fn set(&mut self, uid: &str, due: Option<Due>) {
        let position = due.map(|due| match due {
            Due::Now(order) if self.decided.contains(uid) => Position::NextRound(order),
            Due::Now(order) => Position::ThisRound(order),
            Due::Suspended(namespace, order) => Position::Suspended(namespace, order),
            Due::Complete(order) => Position::Complete(order),
            Due::At(until) => Position::Backoff(until),
        });
        if self.positions.get(uid) == position.as_ref() {
            return;
        }
        self.unlink(uid);
        let Some(position) = position else { return };
        let uid = uid.to_owned();
        match &position {
            Position::ThisRound(order) => {
                self.this_round.insert((Arc::clone(order), uid.clone()));
            }
            Position::NextRound(order) => {
                self.next_round.insert((Arc::clone(order), uid.clone()));
            }
            Position::Suspended(namespace, order) => {
                let pods = self.suspended.entry(namespace.clone()).or_default();
                pods.insert((Arc::clone(order), uid.clone()));
            }
            Position::Complete(order) => {
                self.complete.insert((Arc::clone(order), uid.clone()));
            }
            Position::Backoff(until) => {
                self.backoffs.insert((*until, uid.clone()));
            }
        }
        self.positions.insert(uid, position);
    }

    /// Removes a pod that is not pending.
    pub(super) fn remove(&mut self, uid: &str) {
        self.unlink(uid);
        self.decided.remove(uid);
    }

    fn unlink(&mut self, uid: &str) {
        match self.positions.remove(uid) {
            Some(Position::ThisRound(order)) => {
                self.this_round.remove(&(order, uid.to_owned()));
            }
            Some(Position::NextRound(order)) => {
                self.next_round.remove(&(order, uid.to_owned()));
            }
            Some(Position::Suspended(namespace, order)) => {
                if let Some(pods) = self.suspended.get_mut(&namespace) {
                    pods.remove(&(order, uid.to_owned()));
                    if pods.is_empty() {
                        self.suspended.remove(&namespace);
                    }
                }
            }
            Some(Position::Complete(order)) => {
                self.complete.remove(&(order, uid.to_owned()));
            }
            Some(Position::Backoff(until)) => {
                self.backoffs.remove(&(until, uid.to_owned()));
            }
            None => {}
        }
    }

    /// Lets the pod be decided once more in this round, before those behind it.
    pub(super) fn decide_again(&mut self, uid: &str) {
        self.decided.remove(uid);
    }

    /// Removes and returns the first complete pod.
    pub(super) fn pop_complete(&mut self) -> Option<String> {
        let (_, uid) = self.complete.pop_first()?;
        self.positions.remove(&uid);
        Some(uid)
    }

    /// Returns the UIDs of the pods whose backoff has ended.
    pub(super) fn ended_backoffs(&self, now: Instant) -> Vec<String> {
        let ended = self.backoffs.iter().take_while(|(until, _)| *until <= now);
        ended.map(|(_, uid)| uid.clone()).collect()
    }

    /// Returns when the first backoff ends.
    pub(super) fn next_backoff_end(&self) -> Option<Instant> {
        self.backoffs.first().map(|(until, _)| *until)
    }

    /// Returns whether a decision is due. Starts the next round when this one is over.
    pub(super) fn has_due(&mut self) -> bool {
        if self.this_round.is_empty() && (self.has_resumed || self.suspended.is_empty()) {
            self.has_resumed = false;
            let suspended = &self.suspended;
            self.last_suspended
                .retain(|namespace, _| suspended.contains_key(namespace));
            self.decided.clear();
            std::mem::swap(&mut self.this_round, &mut self.next_round);
            for (order, uid) in &self.this_round {
                let position = Position::ThisRound(Arc::clone(order));
                self.positions.insert(uid.clone(), position);
            }
        }
        !self.this_round.is_empty() || !self.suspended.is_empty()
    }

    /// Returns whether the decision for a pod of the namespace is suspended.
    pub(super) fn suspended(&self, namespace: &str) -> impl Iterator<Item = &String> {
        let pods = self.suspended.get(namespace).into_iter().flatten();
        pods.map(|(_, uid)| uid)
    }

    /// Removes and returns the suspended pod whose turn it is.
    fn pop_suspended(&mut self) -> Option<String> {
        let after = (
            Bound::Excluded(self.last_namespace.as_str()),
            Bound::Unbounded,
        );
        let next = self.suspended.range::<str, _>(after).next();
        let (namespace, pods) = next.or_else(|| self.suspended.iter().next())?;
        // A decision that is repeated because something has changed lets the others of its namespace go on.
        let last = self.last_suspended.get(namespace);
        let after =
            last.and_then(|last| pods.range((Bound::Excluded(last), Bound::Unbounded)).next());
        let popped = after.or_else(|| pods.first())?.clone();
        let uid = popped.1.clone();
        self.last_namespace = namespace.clone();
        let namespace = namespace.clone();
        self.has_resumed = true;
        self.unlink(&uid);
        // The pod may be the last one, and be suspended again.
        self.last_suspended.insert(namespace, popped);
        Some(uid)
    }

    /// Returns the due pods of this round, then those of the next one.
    #[cfg(test)]
    pub(super) fn uids(&self) -> Vec<String> {
        let due = self.this_round.iter().chain(&self.next_round);
        due.map(|(_, uid)| uid.clone()).collect()
    }

    /// Removes and returns the first pod whose decision is due.
    pub(super) fn pop(&mut self) -> Option<String> {
        if !self.has_due() {
            return None;
        }
        let uid = match self.this_round.pop_first() {
            Some((_, uid)) => {
                self.positions.remove(&uid);
                uid
            }
            None => self.pop_suspended()?,
        };
        self.decided.insert(uid.clone());
        Some(uid)
    }
}

#[cfg(test)]
mod tests {
    use crate::decide::queue::pending_pod::PendingPod;
    use crate::fixture::pod;

    use super::*;

    fn order(name: &str) -> Arc<QueueOrder> {
        Arc::new(PendingPod::new(pod(name, &[]), None, 0).order())
    }

    #[test]
    fn suspended_decisions_of_namespaces_take_turns_after_rounds() {
        let mut index = DueIndex::default();
        let suspended =
            |namespace: &str, name: &str| Due::Suspended(namespace.to_owned(), order(name));
        index.set("many-1", Some(suspended("many", "many-1")));
        index.set("many-2", Some(suspended("many", "many-2")));
        index.set("one", Some(suspended("one", "one")));
        index.set("usual", Some(Due::Now(order("usual"))));
        let mut popped = Vec::new();
        for _ in 0..9 {
            let uid = index.pop().unwrap();
            let due = match uid.as_str() {
                "usual" => Due::Now(order("usual")),
                "one" => suspended("one", "one"),
                _ => suspended("many", &uid),
            };
            index.set(&uid, Some(due));
            popped.push(uid);
        }
        let expected = [
            "usual", "many-1", "usual", "one", "usual", "many-2", "usual", "one", "usual",
        ];
        assert_eq!(popped, expected);
        for uid in ["usual", "many-1", "many-2", "one"] {
            index.remove(uid);
        }
        assert!(!index.has_due());
        assert_eq!(index.suspended("many").count(), 0);
    }
}
