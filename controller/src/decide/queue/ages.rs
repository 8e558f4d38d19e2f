//! Ages of pods that were deleted while they waited: the next pod of the same controller waits on from there.
//!
//! Kueue deletes the pods of a job that is not ready in time (`waitForPodsReady`), and starts the job again later. Without
//! this, a job that waits for GPUs would be the youngest each time.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Most ages; of more, the first deleted pods are forgotten.
const MAX_AGES: usize = 10_000;

/// Namespace of a pod and UID of its controller. Users write owner references: without the namespace, pods of one could take
/// the ages of another.
type Owner = (String, String);

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Ages {
    /// Since when the deleted pods had waited, with the numbers of their deletions.
    by_owner: BTreeMap<Owner, BTreeSet<(Timestamp, u64)>>,
    /// By number of the deletion.
    deletions: BTreeMap<u64, (Owner, Timestamp)>,
    next: u64,
}

impl Ages {
    /// A pod that had waited since this time was deleted.
    pub(super) fn keep(&mut self, pod: &ObjectMeta, since: Timestamp) {
        let Some(owner) = owner(pod) else { return };
        let entry = (since, self.next);
        self.by_owner
            .entry(owner.clone())
            .or_default()
            .insert(entry);
        self.deletions.insert(self.next, (owner, since));
        self.next += 1;
        if self.deletions.len() > MAX_AGES
            && let Some((number, (owner, since))) = self.deletions.pop_first()
        {
            self.forget(&owner, (since, number));
        }
    }

    /// Returns since when a deleted pod had waited, the oldest of the same controller, for one new pod.
    pub(super) fn take(&mut self, pod: &ObjectMeta) -> Option<Timestamp> {
        let owner = owner(pod)?;
        let entry = *self.by_owner.get(&owner)?.first()?;
        self.deletions.remove(&entry.1);
        self.forget(&owner, entry);
        Some(entry.0)
    }

    fn forget(&mut self, owner: &Owner, entry: (Timestamp, u64)) {
        if let Some(entries) = self.by_owner.get_mut(owner) {
            entries.remove(&entry);
            if entries.is_empty() {
                self.by_owner.remove(owner);
            }
        }
    }
}

fn owner(pod: &ObjectMeta) -> Option<Owner> {
    let mut owners = pod.owner_references.iter().flatten();
    let controller = owners.find(|owner| owner.controller == Some(true))?;
    let namespace = pod.namespace.clone().unwrap_or_default();
    Some((namespace, controller.uid.clone()))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

    use super::*;

    fn pod(namespace: &str, job: &str) -> ObjectMeta {
        ObjectMeta {
            namespace: Some(namespace.to_owned()),
            owner_references: Some(vec![OwnerReference {
                uid: job.to_owned(),
                controller: Some(true),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        }
    }

    fn second(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn each_deleted_pod_gives_its_age_to_one_pod_of_its_controller() {
        let mut ages = Ages::default();
        ages.keep(&pod("a", "j"), second(5));
        ages.keep(&pod("a", "j"), second(3));
        ages.keep(&ObjectMeta::default(), second(1));
        for other in [pod("b", "j"), pod("a", "other"), ObjectMeta::default()] {
            assert_eq!(ages.take(&other), None, "{other:?}");
        }
        let taken = [0; 3].map(|_| ages.take(&pod("a", "j")));
        assert_eq!(taken, [Some(second(3)), Some(second(5)), None]);
        assert!(ages.by_owner.is_empty() && ages.deletions.is_empty());
    }

    #[test]
    fn forgets_the_first_of_too_many() {
        let mut ages = Ages::default();
        for number in 0..=MAX_AGES {
            let second = second(i64::try_from(number).unwrap());
            ages.keep(&pod("a", &format!("j{}", number % 7)), second);
        }
        assert_eq!(ages.deletions.len(), MAX_AGES);
        assert_eq!(ages.take(&pod("a", "j0")), Some(second(7)));
        assert_eq!(ages.take(&pod("a", "j1")), Some(second(1)));
    }
}
