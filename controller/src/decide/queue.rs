//! The scheduling queue: all pods that are pending for devices, indexed by the claims that they reference and by when their
//! decisions are due.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use drava_allocator::known::Known;
use drava_allocator::object::ObjectKey;
use drava_allocator::turn::Work;
use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use crate::pods::gang::GangName;
use crate::pods::pod;

mod ages;
mod due_index;
mod node_set;
pub(crate) mod pending_pod;
mod wake_index;

use ages::Ages;
use due_index::{Due, DueIndex};
use node_set::NodeNumbers;
pub(crate) use node_set::NodeSet;
pub(crate) use pending_pod::QueueOrder;
use pending_pod::{PendingPod, Phase};
use wake_index::{WakeIndex, WakeKey};

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct PodQueue {
    /// By UID.
    pods: BTreeMap<String, PendingPod>,
    /// UIDs of the pods that reference a claim.
    users: BTreeMap<ObjectKey, BTreeSet<String>>,
    /// UIDs of the pending pods of a gang.
    gangs: BTreeMap<GangName, BTreeSet<String>>,
    due: DueIndex,
    /// UIDs of the pods that may have changed since they were indexed by when they are due.
    changed: BTreeSet<String>,
    wake_index: WakeIndex,
    /// UIDs of the pods that may have changed since they were indexed by what wakes them.
    touched: BTreeSet<String>,
    nodes: NodeNumbers,
    /// Thousands of pods have few different sets.
    node_sets: Known<NodeSet>,
    ages: Ages,
    /// Pods that were added so far.
    arrivals: u64,
}

impl PodQueue {
    /// Adds a pod, or replaces its version and makes a decision due.
    pub(crate) fn upsert(&mut self, uid: &str, pod: Pod) {
        let keys = pod::claim_keys(&pod);
        self.unlink_gang(uid);
        match self.pods.get_mut(uid) {
            Some(pending) => {
                let before = pod::claim_keys(&pending.pod);
                pending.replace(pod);
                self.unlink(uid, &before);
            }
            None => {
                let since = self.ages.take(&pod.metadata);
                self.arrivals += 1;
                let pending = PendingPod::new(pod, since, self.arrivals);
                self.pods.insert(uid.to_owned(), pending);
            }
        }
        for key in keys {
            self.users.entry(key).or_default().insert(uid.to_owned());
        }
        if let Some(gang) = self.pods.get(uid).and_then(PendingPod::gang) {
            self.gangs.entry(gang).or_default().insert(uid.to_owned());
        }
        self.touch(uid);
    }

    /// A pod may be due at another time, and be woken by other changes.
    fn touch(&mut self, uid: &str) {
        self.changed.insert(uid.to_owned());
        self.touched.insert(uid.to_owned());
    }

    /// A pod is deleted. If it has waited so far, the next pod of its controller has its age.
    pub(crate) fn keep_age(&mut self, uid: &str) {
        if let Some(pending) = self.pods.get(uid) {
            self.ages.keep(&pending.pod.metadata, pending.since());
        }
    }

    /// Removes a pod. Returns whether it was pending.
    pub(crate) fn remove(&mut self, uid: &str) -> bool {
        self.unlink_gang(uid);
        let Some(pending) = self.pods.remove(uid) else {
            return false;
        };
        self.due.remove(uid);
        self.changed.remove(uid);
        self.wake_index.remove(uid);
        self.touched.remove(uid);
        self.unlink(uid, &pod::claim_keys(&pending.pod));
        true
    }

    fn unlink(&mut self, uid: &str, keys: &[ObjectKey]) {
        for key in keys {
            if let Some(users) = self.users.get_mut(key) {
                users.remove(uid);
                if users.is_empty() {
                    self.users.remove(key);
                }
            }
        }
    }

    /// Returns all pods.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &PendingPod> {
        self.pods.values()
    }

    fn unlink_gang(&mut self, uid: &str) {
        if let Some(gang) = self.pods.get(uid).and_then(PendingPod::gang)
            && let Some(members) = self.gangs.get_mut(&gang)
        {
            members.remove(uid);
            // The order of a gang follows from its members.
            self.changed.extend(members.iter().cloned());
            if members.is_empty() {
                self.gangs.remove(&gang);
            }
        }
    }

    pub(crate) fn get(&self, uid: &str) -> Option<&PendingPod> {
        self.pods.get(uid)
    }

    pub(crate) fn get_mut(&mut self, uid: &str) -> Option<&mut PendingPod> {
        if self.pods.contains_key(uid) {
            self.touch(uid);
        }
        self.pods.get_mut(uid)
    }

    /// Returns the UIDs of the pods that reference the claim.
    pub(crate) fn users_of(&self, key: &ObjectKey) -> Vec<String> {
        self.users.get(key).into_iter().flatten().cloned().collect()
    }

    /// Makes the decision for a pod due at the ends of rounds.
    pub(crate) fn suspend(&mut self, uid: &str, work: Work) {
        if let Some(pending) = self.get_mut(uid) {
            pending.phase = Phase::Active;
            pending.suspended_by = Some(work);
        }
    }

    /// Ends the suspension of the decision for a pod. Returns whether it was suspended.
    pub(crate) fn resume(&mut self, uid: &str) -> bool {
        let pending = self.get_mut(uid);
        pending.is_some_and(|pending| pending.suspended_by.take().is_some())
    }

    /// Returns whether the decision for a pod is suspended.
    pub(crate) fn is_suspended(&self, uid: &str) -> bool {
        self.pods
            .get(uid)
            .is_some_and(|pending| pending.suspended_by.is_some())
    }

    /// Returns whether a decision for a pod of the namespace is suspended because of this work.
    pub(crate) fn has_suspended(&self, namespace: &str, work: Work) -> bool {
        let mut suspended = self.due.suspended(namespace);
        suspended.any(|uid| {
            let pending = self.pods.get(uid);
            pending.is_some_and(|pending| pending.suspended_by == Some(work))
        })
    }

    /// Activates the pods that reference a changed claim.
    pub(crate) fn activate_users(&mut self, key: &ObjectKey) {
        let users = self.users_of(key);
        self.activate_pods(users);
    }

    /// Activates the pending pods of a gang whose members changed.
    pub(crate) fn activate_gang(&mut self, gang: &GangName) {
        let members: Vec<String> = self.uids_of(gang).cloned().collect();
        self.activate_pods(members);
    }

    fn activate_pods(&mut self, uids: Vec<String>) {
        for uid in uids {
            if let Some(pending) = self.pods.get_mut(&uid) {
                pending.activate();
                self.touch(&uid);
            }
        }
    }

    /// Activates the pods with these keys.
    fn wake(&mut self, is_helped: impl Fn(&WakeKey) -> bool) {
        self.index_touched();
        let woken = self.wake_index.with_keys(is_helped);
        self.activate_pods(woken);
        // Those that are awake are not woken by the next change.
        self.index_touched();
    }

    /// Lets the pods that avoid a node stop that, if `update` does. Activates those for which it returns true.
    fn update_avoiding(&mut self, node: &str, update: impl Fn(&mut PendingPod) -> bool) {
        self.index_touched();
        for uid in self.wake_index.avoiding(node) {
            if let Some(pending) = self.pods.get_mut(&uid) {
                if update(pending) {
                    pending.activate();
                }
                self.touch(&uid);
            }
        }
    }

    fn index_touched(&mut self) {
        for uid in std::mem::take(&mut self.touched) {
            if let Some(pending) = self.pods.get(&uid) {
                let avoided = pending.avoided_nodes();
                self.wake_index.set(&uid, pending.wake_key(), avoided);
            }
        }
    }

    /// Activates the pods that a change of the node can help: all if it is new.
    pub(crate) fn node_changed(&mut self, node: &str, is_new: bool) {
        let number = self.nodes.get(node);
        self.update_avoiding(node, |pending| pending.stop_avoiding(node));
        self.wake(|key| is_new || key.has_neighbor_rules || key.unfit.may_contain(number));
    }

    /// Activates the pods that a change of the node's devices can help.
    pub(crate) fn devices_changed(&mut self, node: &str) {
        let number = self.nodes.get(node);
        self.wake(|key| !key.unfit.contains(number));
    }

    /// Forgets a deleted node.
    pub(crate) fn node_deleted(&mut self, node: &str) {
        let number = self.nodes.remove(node);
        self.update_avoiding(node, |pending| {
            pending.stop_avoiding(node);
            false
        });
        for (uid, pending) in &mut self.pods {
            if number.is_some_and(|number| pending.forget_node(number, &mut self.node_sets)) {
                self.touched.insert(uid.clone());
            }
        }
        self.wake(|key| key.has_neighbor_rules);
    }

    /// Returns the set of these nodes.
    pub(crate) fn node_set<'a>(&mut self, nodes: impl Iterator<Item = &'a str>) -> Arc<NodeSet> {
        let set = Arc::new(self.nodes.set(nodes));
        self.node_sets.shared(&set)
    }

    /// Activates the pods that a pod's end on the node can help.
    pub(crate) fn resources_freed(&mut self, node: &str) {
        let number = self.nodes.get(node);
        self.update_avoiding(node, |pending| {
            pending.resources_freed(node);
            false
        });
        self.wake(|key| key.unfit.may_contain(number));
    }

    /// Activates the pods with rules about other pods, after one was bound or has ended.
    pub(crate) fn neighbors_changed(&mut self) {
        self.wake(|key| key.has_neighbor_rules);
    }

    /// Activates the pods of a higher priority, for which a bound pod of this priority can be evicted.
    pub(crate) fn activate_above(&mut self, priority: i32) {
        self.wake(|key| key.priority > priority);
    }

    /// Activates the pods of these namespaces.
    pub(crate) fn activate_namespaces(&mut self, namespaces: &BTreeSet<String>) {
        self.wake(|key| namespaces.contains(&key.namespace));
    }

    /// Activates the pods that a release of devices can help; of those that wait for their quota only the ones in a
    /// namespace for which `is_affected`.
    pub(crate) fn activate_after_release(&mut self, is_affected: impl Fn(&str) -> bool) {
        self.wake(|key| !key.waits_for_quota || is_affected(&key.namespace));
    }

    /// Activates all pods after a change that may make any of them schedulable.
    pub(crate) fn activate_all(&mut self) {
        self.wake(|_| true);
    }

    /// Returns whether a decision is due.
    pub(crate) fn has_due(&mut self, now: Instant) -> bool {
        self.index_changed(now);
        self.due.has_due()
    }

    /// Returns the UID of the first pod in queue order of which only the gate is left.
    pub(crate) fn pop_complete(&mut self, now: Instant) -> Option<String> {
        self.index_changed(now);
        self.due.pop_complete()
    }

    /// Makes a decision due for a pod, in this round also if it was decided in this round: before the pods behind it.
    pub(crate) fn decide_again(&mut self, uid: &str) {
        if let Some(pending) = self.get_mut(uid) {
            pending.activate();
            self.due.decide_again(uid);
        }
    }

    /// Returns the UID of the first pod in queue order whose decision is due, which counts as decided in this round.
    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<String> {
        self.index_changed(now);
        self.due.pop()
    }

    /// Returns the UIDs of the due pods in queue order.
    #[cfg(test)]
    pub(crate) fn due(&mut self, now: Instant) -> Vec<String> {
        self.index_changed(now);
        self.due.uids()
    }

    /// Indexes the changed pods by when their decisions are due.
    fn index_changed(&mut self, now: Instant) {
        self.changed.extend(self.due.ended_backoffs(now));
        if self.changed.is_empty() {
            return;
        }
        let changed = std::mem::take(&mut self.changed);
        let gangs: BTreeSet<GangName> = changed
            .iter()
            .filter_map(|uid| self.pods.get(uid)?.gang())
            .collect();
        let mut orders = BTreeMap::new();
        let mut members = BTreeSet::new();
        for gang in gangs {
            let order = self.gang_order(&gang);
            members.extend(self.gangs.get(&gang).into_iter().flatten().cloned());
            orders.insert(gang, order);
        }
        for uid in changed.union(&members) {
            let Some(pending) = self.pods.get(uid) else {
                continue;
            };
            let due = match pending.phase {
                _ if pending.is_due(now) => {
                    let gang = pending.gang().and_then(|gang| orders.get(&gang)?.as_ref());
                    let order = pending.order();
                    let order = match gang {
                        Some(gang) => order.in_gang(gang),
                        None => order,
                    };
                    let order = Arc::new(order);
                    Some(
                        match (pending.is_complete, pending.suspended_by.is_some()) {
                            (true, _) => Due::Complete(order),
                            (false, true) => Due::Suspended(pending.namespace().to_owned(), order),
                            (false, false) => Due::Now(order),
                        },
                    )
                }
                Phase::Backoff(until) | Phase::Behind(until) => Some(Due::At(until)),
                Phase::Active | Phase::Unschedulable | Phase::Allocating => None,
            };
            self.due.set(uid, due);
        }
    }

    /// Returns the order of a pod, as a member of its gang.
    pub(crate) fn order(&self, uid: &str) -> Option<QueueOrder> {
        let pending = self.pods.get(uid)?;
        match pending.gang().and_then(|gang| self.gang_order(&gang)) {
            Some(gang) => Some(pending.order().in_gang(&gang)),
            None => Some(pending.order()),
        }
    }

    fn gang_order(&self, gang: &GangName) -> Option<QueueOrder> {
        let members = self.gangs.get(gang)?.iter();
        members
            .filter_map(|uid| self.pods.get(uid))
            .map(PendingPod::order)
            .reduce(|order, member| order.joined(&member))
    }

    /// Returns the UIDs of the pending pods of a gang.
    pub(crate) fn uids_of(&self, gang: &GangName) -> impl Iterator<Item = &String> {
        self.gangs.get(gang).into_iter().flatten()
    }

    /// Returns the UIDs of the pending pods of a gang, the oldest first.
    pub(crate) fn members(&self, gang: &GangName) -> Vec<String> {
        let uids = self.gangs.get(gang).into_iter().flatten();
        let mut members: Vec<_> = uids
            .filter_map(|uid| Some((self.pods.get(uid)?.order(), uid.clone())))
            .collect();
        members.sort();
        members.into_iter().map(|(_, uid)| uid).collect()
    }

    /// Returns when the first backoff ends.
    pub(crate) fn next_backoff_end(&self) -> Option<Instant> {
        let changed = self.changed.iter().filter_map(|uid| self.pods.get(uid));
        let changed = changed.filter_map(|pending| match pending.phase {
            Phase::Backoff(until) | Phase::Behind(until) => Some(until),
            Phase::Active | Phase::Unschedulable | Phase::Allocating => None,
        });
        changed.chain(self.due.next_backoff_end()).min()
    }
}

#[cfg(test)]
mod tests {
    use drava_allocator::steps;
    use jiff::Timestamp;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

    use super::*;
    use crate::fixture::pod;

    /// A queue of pods that wait, all rejected by one node regardless of devices.
    fn waiting(pods: usize) -> PodQueue {
        let mut queue = PodQueue::default();
        let unfit = queue.node_set(["unfit"].into_iter());
        for index in 0..pods {
            let name = format!("p{index}");
            queue.upsert(&name, pod(&name, &[]));
            let pending = queue.get_mut(&name).unwrap();
            pending.phase = Phase::Unschedulable;
            pending.set_unfit_nodes(Arc::clone(&unfit));
        }
        queue.wake(|_| false);
        queue
    }

    /// Returns the steps of a change, and the number of pods that it wakes.
    fn woken_by(pods: usize, change: fn(&mut PodQueue)) -> (u64, usize) {
        let mut queue = waiting(pods);
        let (steps, ()) = steps::of(|| change(&mut queue));
        (steps, queue.due(Instant::now()).len())
    }

    #[test]
    fn pods_of_one_second_are_in_the_order_in_which_they_came() {
        let mut queue = PodQueue::default();
        for name in ["inference", "training", "distributed", "inference"] {
            let mut pod = pod(name, &[]);
            pod.metadata.creation_timestamp = Some(Time(Timestamp::UNIX_EPOCH));
            queue.upsert(name, pod);
        }
        let due = queue.due(Instant::now());
        assert_eq!(due, ["inference", "training", "distributed"]);
        let mut older = pod("older", &[]);
        older.metadata.creation_timestamp = Some(Time(Timestamp::MIN));
        queue.upsert("older", older);
        assert_eq!(queue.due(Instant::now())[0], "older");
    }

    #[test]
    fn change_looks_at_no_pod_that_it_does_not_help() {
        let changes: [fn(&mut PodQueue); 5] = [
            |queue| queue.resources_freed("other"),
            PodQueue::neighbors_changed,
            |queue| queue.activate_above(0),
            |queue| queue.devices_changed("unfit"),
            |queue| queue.node_changed("other", false),
        ];
        for change in changes {
            assert_eq!(woken_by(1000, change), woken_by(2000, change));
            assert_eq!(woken_by(1000, change), (1, 0));
        }
    }

    #[test]
    fn change_wakes_each_pod_that_it_helps_once() {
        let changes: [fn(&mut PodQueue); 5] = [
            |queue| queue.resources_freed("unfit"),
            |queue| queue.activate_above(-1),
            |queue| queue.devices_changed("other"),
            |queue| queue.node_changed("unfit", false),
            |queue| queue.node_changed("new", true),
        ];
        for change in changes {
            let mut queue = waiting(1000);
            let (steps, ()) = steps::of(|| change(&mut queue));
            assert_eq!(steps, 1001, "the key, and each of its pods");
            let (steps, ()) = steps::of(|| change(&mut queue));
            assert_eq!(steps, 0, "nothing is left to wake");
            assert_eq!(queue.due(Instant::now()).len(), 1000);
        }
    }
}
