//! The pods that a change can wake, by what decides whether it helps them: a change visits the keys of these pods, of which there
//! are few, and the pods that it wakes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_allocator::steps;

use super::node_set::NodeSet;

/// What decides whether a change helps a pod and wakes it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WakeKey {
    pub(super) namespace: String,
    pub(super) priority: i32,
    /// Whether other pods decide where the pod can run.
    pub(super) has_neighbor_rules: bool,
    /// Whether only its quota is in the way.
    pub(super) waits_for_quota: bool,
    /// Nodes that were rejected regardless of devices.
    pub(super) unfit: UnfitNodes,
}

/// Nodes that a decision rejected regardless of devices.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
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
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct WakeIndex {
    uids: BTreeMap<Arc<WakeKey>, BTreeSet<String>>,
    /// The key of each pod by UID, and the nodes that it avoids.
    pods: BTreeMap<String, (Option<Arc<WakeKey>>, BTreeSet<String>)>,
    /// Nodes with the UIDs of the pods that avoid them.
    avoided: BTreeSet<(String, String)>,
}

impl WakeIndex {
    /// Sets the key of a pod, `None` if no change wakes it, and the nodes that it avoids.
    pub(super) fn set(&mut self, uid: &str, key: Option<WakeKey>, avoided: &BTreeSet<String>) {
        self.remove(uid);
        let key = key.map(|key| match self.uids.get_key_value(&key) {
            Some((known, _)) => Arc::clone(known),
            None => Arc::new(key),
        });
        if let Some(key) = &key {
            let uids = self.uids.entry(Arc::clone(key)).or_default();
            uids.insert(uid.to_owned());
        }
        let nodes = avoided.iter().map(|node| (node.clone(), uid.to_owned()));
        self.avoided.extend(nodes);
        if key.is_some() || !avoided.is_empty() {
            self.pods.insert(uid.to_owned(), (key, avoided.clone()));
        }
    }

    /// Removes a pod.
    pub(super) fn remove(&mut self, uid: &str) {
        let Some((key, avoided)) = self.pods.remove(uid) else {
            return;
        };
        if let Some(key) = key
            && let Some(uids) = self.uids.get_mut(&key)
        {
            uids.remove(uid);
            if uids.is_empty() {
                self.uids.remove(&key);
            }
        }
        for node in avoided {
            self.avoided.remove(&(node, uid.to_owned()));
        }
    }

    /// Returns the UIDs of the pods with these keys.
    pub(super) fn with_keys(&self, is_helped: impl Fn(&WakeKey) -> bool) -> Vec<String> {
        let helped = steps::counted(&self.uids).filter(|(key, _)| is_helped(key));
        steps::counted(helped.flat_map(|(_, uids)| uids))
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
