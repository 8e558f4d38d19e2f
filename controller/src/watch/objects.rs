//! Objects of one kind by namespace and name, from the events of a watch.

use std::collections::BTreeMap;

use drava_allocator::object::{ObjectKey, object_key};
use drava_api::listed::Listed;
use kube::Resource;
use kube::runtime::watcher;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Objects<V> {
    known: BTreeMap<ObjectKey, V>,
    /// Objects of a list that is incomplete.
    listed: BTreeMap<ObjectKey, V>,
    is_complete: bool,
}

impl<V> Default for Objects<V> {
    fn default() -> Self {
        Self {
            known: BTreeMap::new(),
            listed: BTreeMap::new(),
            is_complete: false,
        }
    }
}

impl<V> Objects<V> {
    /// Returns whether the first list is complete.
    pub(crate) const fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Returns an object.
    pub(crate) fn get(&self, namespace: &str, name: &str) -> Option<&V> {
        self.known.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// Returns all objects.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&ObjectKey, &V)> {
        self.known.iter()
    }

    /// Applies an event; `value_of` returns `None` for an object that no decision needs.
    pub(crate) fn apply<K: Resource>(
        &mut self,
        event: watcher::Event<K>,
        value_of: impl FnOnce(K) -> Option<V>,
    ) {
        let key_of = |object: &K| object_key(object.meta());
        match event {
            watcher::Event::Init => self.listed.clear(),
            watcher::Event::InitApply(object) => {
                let key = key_of(&object);
                self.listed
                    .extend(value_of(object).map(|value| (key, value)));
            }
            watcher::Event::InitDone => {
                self.known = std::mem::take(&mut self.listed);
                self.is_complete = true;
            }
            watcher::Event::Apply(object) => {
                let key = key_of(&object);
                match value_of(object) {
                    Some(value) => self.known.insert(key, value),
                    None => self.known.remove(&key),
                };
            }
            watcher::Event::Delete(object) => {
                self.known.remove(&key_of(&object));
            }
        }
    }
}

/// Returns the event without an object that cannot be read: it is left out of a list, and stays as it was read last.
pub(crate) fn readable<K>(event: watcher::Event<Listed<K>>) -> Option<watcher::Event<K>>
where
    K: Resource<DynamicType = ()> + Default,
{
    let object = |listed| match listed {
        Listed::Object(object) => Some(*object),
        Listed::Unreadable(object) => {
            tracing::warn!(kind = %K::kind(&()), %object, "cannot read an object; ignoring it");
            None
        }
    };
    Some(match event {
        watcher::Event::Init => watcher::Event::Init,
        watcher::Event::InitApply(listed) => watcher::Event::InitApply(object(listed)?),
        watcher::Event::InitDone => watcher::Event::InitDone,
        watcher::Event::Apply(listed) => watcher::Event::Apply(object(listed)?),
        watcher::Event::Delete(listed) => {
            let mut deleted = K::default();
            *deleted.meta_mut() = listed.meta().clone();
            watcher::Event::Delete(deleted)
        }
    })
}
