//! What has changed between two lists of a kind, and while a watch runs.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

use kube_core::{Resource, ResourceExt};

use super::{Listed, Unreadable};

/// A change of an object.
#[derive(Debug, Clone)]
pub enum Change<K> {
    /// The object exists in this version.
    Applied(Box<K>),
    /// The object does not exist.
    Deleted(DeletedObject),
}

/// Identity of a deleted object.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeletedObject {
    /// Namespace; empty for a cluster-scoped kind.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// What a [`Tracker`] reports.
#[derive(Debug, Clone)]
pub enum Tracked<K> {
    /// An object changed.
    Changed(Change<K>),
    /// An object exists in a version that this build cannot read. The last readable version is not reported as deleted.
    Unreadable(Box<Unreadable>),
    /// An object that could not be read can be read by now, or is deleted.
    Readable {
        /// Namespace; empty for a cluster-scoped kind.
        namespace: String,
        /// Name.
        name: String,
    },
}

/// Namespace and name.
type Key = (String, String);

/// Tracks the existing objects of a kind, to report those that are deleted while no watch runs.
///
/// After a failed watch the new list is compared with the known objects: one that the list lacks is deleted, and one with
/// another UID was deleted and created again.
#[derive(Debug)]
pub struct Tracker<K> {
    /// UIDs of the known objects.
    known: BTreeMap<Key, String>,
    /// Known objects that the current list has not contained so far.
    missing: BTreeMap<Key, String>,
    /// Known objects that cannot be read.
    unreadable: BTreeSet<Key>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Default for Tracker<K> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            missing: BTreeMap::new(),
            unreadable: BTreeSet::new(),
            kind: PhantomData,
        }
    }
}

impl<K: Resource<DynamicType = ()>> Tracker<K> {
    /// A list begins. One that began before and has not ended counts for nothing.
    pub fn begin_list(&mut self) {
        self.missing.clone_from(&self.known);
    }

    /// A list or a watch has this object.
    pub fn applied(&mut self, object: Listed<K>) -> Vec<Tracked<K>> {
        let key = key_of(&object);
        let uid = object.uid().unwrap_or_default();
        self.missing.remove(&key);
        let before = self.known.insert(key.clone(), uid.clone());
        let replaced = before.filter(|before| *before != uid);
        let mut tracked: Vec<_> = replaced
            .map(|before| deleted(key.clone(), before))
            .into_iter()
            .collect();
        match object {
            Listed::Object(object) => {
                tracked.extend(self.readable(&key));
                tracked.push(Tracked::Changed(Change::Applied(object)));
            }
            Listed::Unreadable(object) => {
                self.unreadable.insert(key);
                tracked.push(Tracked::Unreadable(object));
            }
        }
        tracked
    }

    /// A watch reports this object as deleted.
    pub fn deleted(&mut self, object: &Listed<K>) -> Vec<Tracked<K>> {
        self.forget(key_of(object), object.uid().unwrap_or_default())
    }

    /// The list is complete.
    pub fn end_list(&mut self) -> Vec<Tracked<K>> {
        let missing = std::mem::take(&mut self.missing).into_iter();
        missing
            .flat_map(|(key, uid)| self.forget(key, uid))
            .collect()
    }

    fn forget(&mut self, key: Key, uid: String) -> Vec<Tracked<K>> {
        self.known.remove(&key);
        let readable = self.readable(&key);
        readable.into_iter().chain([deleted(key, uid)]).collect()
    }

    fn readable(&mut self, key: &Key) -> Option<Tracked<K>> {
        let (namespace, name) = key.clone();
        let was_unreadable = self.unreadable.remove(key);
        was_unreadable.then_some(Tracked::Readable { namespace, name })
    }
}

fn key_of(object: &impl ResourceExt) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn deleted<K>((namespace, name): Key, uid: String) -> Tracked<K> {
    Tracked::Changed(Change::Deleted(DeletedObject {
        namespace,
        name,
        uid,
    }))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Node;
    use serde_json::json;

    use super::*;

    fn node(name: &str, uid: &str) -> Listed<Node> {
        serde_json::from_str(&json!({"metadata": {"name": name, "uid": uid}}).to_string()).unwrap()
    }

    /// A node with a time that no decoder of times reads.
    fn odd_node(name: &str, uid: &str) -> Listed<Node> {
        let taint = json!({"key": "k", "effect": "NoExecute", "timeAdded": "9999-12-31T23:59:59Z"});
        let node = json!({"metadata": {"name": name, "uid": uid}, "spec": {"taints": [taint]}})
            .to_string();
        serde_json::from_str(&node).unwrap()
    }

    fn texts(tracked: Vec<Tracked<Node>>) -> Vec<String> {
        let text = |tracked: Tracked<Node>| match tracked {
            Tracked::Changed(Change::Applied(node)) => format!("+{}", node.uid().unwrap()),
            Tracked::Changed(Change::Deleted(node)) => format!("-{}", node.uid),
            Tracked::Unreadable(node) => format!("?{}", node.metadata.uid.unwrap()),
            Tracked::Readable { name, .. } => format!("!{name}"),
        };
        tracked.into_iter().map(text).collect()
    }

    #[test]
    fn reports_objects_deleted_between_lists() {
        let mut tracker = Tracker::default();
        tracker.begin_list();
        assert_eq!(texts(tracker.applied(node("a", "a1"))), ["+a1"]);
        assert_eq!(texts(tracker.applied(node("b", "b1"))), ["+b1"]);
        assert!(tracker.end_list().is_empty());
        assert_eq!(texts(tracker.applied(node("c", "c1"))), ["+c1"]);
        assert_eq!(texts(tracker.deleted(&node("c", "c1"))), ["-c1"]);
        // The watch fails; b is deleted, and a is deleted and recreated.
        tracker.begin_list();
        assert_eq!(texts(tracker.applied(node("a", "a2"))), ["-a1", "+a2"]);
        assert_eq!(texts(tracker.end_list()), ["-b1"]);
    }

    #[test]
    fn reports_no_deletion_after_incomplete_list() {
        let mut tracker = Tracker::default();
        tracker.applied(node("a", "a1"));
        tracker.applied(node("b", "b1"));
        tracker.end_list();
        tracker.begin_list();
        tracker.applied(node("a", "a1"));
        tracker.begin_list();
        tracker.applied(node("b", "b1"));
        assert_eq!(texts(tracker.end_list()), ["-a1"]);
    }

    #[test]
    fn reports_unreadable_objects_beside_the_others() {
        let mut tracker = Tracker::default();
        tracker.begin_list();
        assert_eq!(texts(tracker.applied(odd_node("a", "a1"))), ["?a1"]);
        assert_eq!(texts(tracker.applied(node("b", "b1"))), ["+b1"]);
        assert!(tracker.end_list().is_empty());
        assert_eq!(texts(tracker.applied(node("a", "a1"))), ["!a", "+a1"]);
        assert_eq!(texts(tracker.applied(odd_node("a", "a1"))), ["?a1"]);
        assert_eq!(texts(tracker.applied(odd_node("b", "b2"))), ["-b1", "?b2"]);
        assert_eq!(texts(tracker.deleted(&odd_node("a", "a1"))), ["!a", "-a1"]);
        tracker.begin_list();
        assert_eq!(texts(tracker.end_list()), ["!b", "-b2"]);
    }
}
