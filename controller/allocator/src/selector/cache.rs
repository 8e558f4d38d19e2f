//! Compiled selectors, limited for each owner.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Selector;

/// Maximum expressions of one namespace, and of all cluster-scoped objects.
pub(super) const OWNER_LIMIT: usize = 128;
/// Maximum owners.
const OWNERS_LIMIT: usize = 2048;

/// Selectors by owner and source, each with the time of its last use, in calls.
#[derive(Default)]
pub(super) struct Compiled {
    owners: BTreeMap<String, Owner>,
    calls: u64,
}

#[derive(Default)]
struct Owner {
    selectors: BTreeMap<String, (Arc<Selector>, u64)>,
    used: u64,
}

impl Compiled {
    /// Returns the selector of `source`, compiled if the cache lacks it.
    pub(super) fn get(
        &mut self,
        owner: &str,
        source: &str,
        compile: impl FnOnce() -> Selector,
    ) -> Arc<Selector> {
        self.calls += 1;
        if !self.owners.contains_key(owner) {
            if self.owners.len() >= OWNERS_LIMIT {
                remove_oldest(&mut self.owners, |owner| owner.used);
            }
            self.owners.insert(owner.to_owned(), Owner::default());
        }
        let known = self.owners.entry(owner.to_owned()).or_default();
        known.used = self.calls;
        if let Some((selector, used)) = known.selectors.get_mut(source) {
            *used = self.calls;
            return Arc::clone(selector);
        }
        if known.selectors.len() >= OWNER_LIMIT {
            remove_oldest(&mut known.selectors, |(_, used)| *used);
        }
        let selector = Arc::new(compile());
        let entry = (Arc::clone(&selector), self.calls);
        known.selectors.insert(source.to_owned(), entry);
        selector
    }

    /// Returns the number of selectors.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.owners
            .values()
            .map(|owner| owner.selectors.len())
            .sum()
    }
}

fn remove_oldest<V>(map: &mut BTreeMap<String, V>, used: impl Fn(&V) -> u64) {
    let oldest = map
        .iter()
        .min_by_key(|(_, value)| used(value))
        .map(|(key, _)| key.clone());
    if let Some(oldest) = oldest {
        map.remove(&oldest);
    }
}
