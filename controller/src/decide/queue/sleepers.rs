//! The pods that a change can wake, by what decides whether it helps them: a change looks at the kinds of these pods, of which
//! there are few, and at the pods that it wakes.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_allocator::steps;

use super::node_set::NodeSet;

/// What decides whether a change helps a pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Kind {
    pub(super) namespace: String,
    pub(super) priority: i32,
    /// Whether other pods decide where the pod can run.
    pub(super) has_neighbor_rules: bool,
    /// Whether only its quota is in the way.
    pub(super) waits_for_quota: bool,
    /// Nodes that were rejected regardless of devices.
    pub(super) unfit: UnfitNodes,
}

/// Nodes that a decision rejected regardless of devices. Pods with one explanation share them.
#[derive(Debug, Clone)]
pub(super) struct UnfitNodes {
    pub(super) nodes: Arc<NodeSet>,
    /// Whether others may be unfit, too.
    pub(super) are_unknown: bool,
}

impl UnfitNodes {
    /// Returns whether the node of that number may be one of them.
    pub(super) fn may_contain(&self, number: Option<usize>) -> bool {
        self.are_unknown || self.contains(number)
    }

    /// Returns whether the node of that number is one of them.
    pub(super) fn contains(&self, number: Option<usize>) -> bool {
        number.is_some_and(|number| self.nodes.contains(number))
    }

    fn key(&self) -> (usize, bool) {
        (Arc::as_ptr(&self.nodes).addr(), self.are_unknown)
    }
}

impl PartialEq for UnfitNodes {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for UnfitNodes {}

impl PartialOrd for UnfitNodes {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for UnfitNodes {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Sleepers {
    uids: BTreeMap<Arc<Kind>, BTreeSet<String>>,
    /// The kind of each pod by UID, and the nodes that it avoids.
    pods: BTreeMap<String, (Option<Arc<Kind>>, BTreeSet<String>)>,
    /// Nodes with the UIDs of the pods that avoid them.
    avoided: BTreeSet<(String, String)>,
}

impl Sleepers {
    /// Sets the kind of a pod, `None` if no change wakes it, and the nodes that it avoids.
    pub(super) fn set(&mut self, uid: &str, kind: Option<Kind>, avoided: &BTreeSet<String>) {
        self.remove(uid);
        let kind = kind.map(|kind| match self.uids.get_key_value(&kind) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::new(kind),
        });
        if let Some(kind) = &kind {
            let uids = self.uids.entry(Arc::clone(kind)).or_default();
            uids.insert(uid.to_owned());
        }
        let nodes = avoided.iter().map(|node| (node.clone(), uid.to_owned()));
        self.avoided.extend(nodes);
        if kind.is_some() || !avoided.is_empty() {
            self.pods.insert(uid.to_owned(), (kind, avoided.clone()));
        }
    }

    /// Removes a pod.
    pub(super) fn remove(&mut self, uid: &str) {
        let Some((kind, avoided)) = self.pods.remove(uid) else {
            return;
        };
        if let Some(kind) = kind
            && let Some(uids) = self.uids.get_mut(&kind)
        {
            uids.remove(uid);
            if uids.is_empty() {
                self.uids.remove(&kind);
            }
        }
        for node in avoided {
            self.avoided.remove(&(node, uid.to_owned()));
        }
    }

    /// Returns the UIDs of the pods of these kinds.
    pub(super) fn of_kinds(&self, is_helped: impl Fn(&Kind) -> bool) -> Vec<String> {
        let kinds = steps::counted(&self.uids).filter(|(kind, _)| is_helped(kind));
        steps::counted(kinds.flat_map(|(_, uids)| uids))
            .cloned()
            .collect()
    }

    /// Returns the UIDs of the pods that avoid the node.
    pub(super) fn avoiding(&self, node: &str) -> Vec<String> {
        let from = (node.to_owned(), String::new());
        let avoiding = self.avoided.range(from..).take_while(|(of, _)| of == node);
        steps::counted(avoiding.map(|(_, uid)| uid.clone())).collect()
    }
}
