//! Unfinished pods that have claims or belong to a gang, pending and running.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use drava_allocator::object::ObjectKey;
use drava_allocator::pod::node;
use drava_explanation::suspension::HostTraits;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, PodCondition};
use tokio::time::Instant;

use crate::pods::gang::{self, GangName};
use crate::pods::pod::{self, Revision};
use crate::pods::pod_condition;
use crate::pods::pod_group::{self, Disruption, GroupSpec};

/// An unfinished pod.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LivePod {
    /// Reference to the pod.
    pub(crate) reference: ObjectReference,
    /// Its priority: that of its PodGroup, or its own.
    pub(crate) priority: i32,
    /// `spec.priority`.
    own_priority: i32,
    /// Time of creation.
    pub(crate) created: Timestamp,
    /// Its node, if it is bound.
    node: Option<String>,
    /// Whether it is bound to a node.
    pub(crate) is_bound: bool,
    /// When it was bound, if the condition `PodScheduled` says so.
    pub(crate) bound_at: Option<Timestamp>,
    /// Since when it is ready; `None` if it is not.
    pub(crate) ready_since: Option<Timestamp>,
    /// Its gang.
    pub(crate) gang: Option<GangName>,
    /// Number of pods that its gang needs; `None` while that is unknown, for instance before its PodGroup is observed.
    pub(crate) gang_min: Option<usize>,
    /// Which pods of its gang end together.
    pub(crate) disruption: Disruption,
    /// Its claims.
    pub(crate) claims: Vec<ObjectKey>,
    /// End of the grace period of a pod that is being deleted.
    pub(crate) grace_period_end: Option<Timestamp>,
    /// Whether it ends without being deleted.
    pub(crate) ends_by_itself: bool,
    /// What decides on the node whether its share may be suspended.
    pub(crate) host_traits: HostTraits,
    /// Its version of the template of a Deployment.
    pub(crate) revision: Option<Revision>,
    /// Its condition of whether its programs run.
    pub(crate) running: Option<PodCondition>,
    /// Whether it is ready only while they run.
    pub(crate) is_running_gate: bool,
}

impl LivePod {
    fn of(pod: &Pod) -> Self {
        let metadata = &pod.metadata;
        Self {
            reference: pod::reference(pod),
            priority: pod::priority(pod),
            own_priority: pod::own_priority(pod),
            created: metadata
                .creation_timestamp
                .as_ref()
                .map_or(Timestamp::MIN, |created| created.0),
            node: node(pod).map(str::to_owned),
            is_bound: node(pod).is_some(),
            bound_at: pod::bound_at(pod),
            ready_since: pod::ready_since(pod),
            gang: gang::name_of(pod),
            gang_min: gang::of(pod).ok().flatten().map(|gang| gang.min),
            disruption: pod_group::disruption(pod),
            claims: pod::claim_keys(pod),
            grace_period_end: metadata.deletion_timestamp.as_ref().map(|time| time.0),
            ends_by_itself: pod::ends_by_itself(pod),
            host_traits: HostTraits::of(pod),
            revision: pod::revision(pod),
            running: pod_condition::observed_running(pod).cloned(),
            is_running_gate: pod_condition::is_running_gate(pod),
        }
    }
}

/// Members of a gang.
#[derive(Debug, Default)]
struct GangMembers {
    uids: BTreeSet<String>,
    /// Whether as many members as the gang needs were bound at the same time, and some still are.
    has_started: bool,
    /// Whether members that existed when the first one was bound are gone, although some are still bound.
    has_lost: bool,
}

/// Removes one pod of this priority from the numbers.
fn uncount(priorities: &mut BTreeMap<i32, usize>, priority: i32) {
    if let Some(count) = priorities.get_mut(&priority) {
        *count -= 1;
        if *count == 0 {
            priorities.remove(&priority);
        }
    }
}

/// Number of gangs with unfinished members.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GangCounts {
    /// A member is not bound.
    pub pending: usize,
    /// All members are bound.
    pub running: usize,
}

/// A gang of which too few members were bound in time.
#[derive(Debug)]
pub(crate) struct IncompleteGang {
    /// Its name.
    pub(crate) name: GangName,
    /// Number of pods that it needs.
    pub(crate) min: usize,
    /// Its bound members.
    pub(crate) bound: Vec<LivePod>,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(crate) struct LivePods {
    /// By UID. Boxed: the nodes of the map have room for twice as many.
    pods: BTreeMap<String, Box<LivePod>>,
    /// The gangs of the pods.
    gangs: BTreeMap<GangName, GangMembers>,
    /// Gangs of which some members are bound, but too few to start, each with the time since when this is known.
    incomplete: BTreeMap<GangName, Option<Instant>>,
    /// UIDs of the pods that are being deleted.
    deleting: BTreeSet<String>,
    /// The bound pods without claims, by node.
    without_claims: BTreeSet<(String, String)>,
    /// Number of pods by priority.
    priorities: BTreeMap<i32, usize>,
}

impl LivePods {
    /// Adds or replaces a pod.
    pub(crate) fn upsert(&mut self, uid: &str, pod: &Pod) {
        let pod = LivePod::of(pod);
        let gang = pod.gang.clone();
        if let Some(gang) = &gang {
            let members = self.gangs.entry(gang.clone()).or_default();
            members.uids.insert(uid.to_owned());
        }
        let before = self.unlist(uid);
        if let Some(left) = before.filter(|before| *before != gang).flatten() {
            self.leave(uid, &left);
        }
        if gang.is_none() && pod.claims.is_empty() {
            return;
        }
        if pod.grace_period_end.is_some() {
            self.deleting.insert(uid.to_owned());
        }
        if let Some(node) = pod.node.clone().filter(|_| pod.claims.is_empty()) {
            self.without_claims.insert((node, uid.to_owned()));
        }
        *self.priorities.entry(pod.priority).or_default() += 1;
        self.pods.insert(uid.to_owned(), Box::new(pod));
        if let Some(gang) = &gang {
            self.review_gang(gang);
        }
    }

    /// Removes a pod.
    pub(crate) fn remove(&mut self, uid: &str) {
        if let Some(gang) = self.unlist(uid).flatten() {
            self.leave(uid, &gang);
        }
    }

    /// Removes a pod from all lists but that of its gang. Returns its gang if the pod was known.
    fn unlist(&mut self, uid: &str) -> Option<Option<GangName>> {
        let pod = *self.pods.remove(uid)?;
        self.deleting.remove(uid);
        if let Some(node) = pod.node {
            self.without_claims.remove(&(node, uid.to_owned()));
        }
        uncount(&mut self.priorities, pod.priority);
        Some(pod.gang)
    }

    fn leave(&mut self, uid: &str, gang: &GangName) {
        if let Some(members) = self.gangs.get_mut(gang) {
            members.uids.remove(uid);
            if members.uids.is_empty() {
                self.gangs.remove(gang);
            }
        }
        self.review_gang(gang);
    }

    /// Determines whether a gang is incomplete, after a change of its members. Nothing changes while its minimum is unknown.
    ///
    /// A gang that has started and lost a member is not incomplete. A new leader has not seen the start, but sees that too
    /// few of the members existed when the first one was bound: a gang is allocated when all members that it needs exist.
    /// That is not known of members without claims, which nothing holds back: they tell of the start only if no member has one.
    fn review_gang(&mut self, gang: &GangName) {
        let members: Vec<&LivePod> = self.members(gang).map(|(_, pod)| pod).collect();
        let known = members.iter().filter_map(|pod| pod.gang_min).max();
        let Some(min) = known.or_else(|| members.is_empty().then_some(1)) else {
            return;
        };
        let bound = members.iter().filter(|pod| pod.is_bound).count();
        let has_claims = members.iter().any(|pod| !pod.claims.is_empty());
        let held_back = || {
            let members = members.iter();
            members.filter(move |pod| !has_claims || !pod.claims.is_empty())
        };
        let is_running = held_back().any(|pod| pod.is_bound);
        let first_bound_at = held_back().filter_map(|pod| pod.bound_at).min();
        let candidates = first_bound_at.map_or(min, |time| {
            let existed = |pod: &&&LivePod| pod.created <= time;
            members.iter().filter(existed).count()
        });
        let has_started = match self.gangs.get_mut(gang) {
            Some(members) => {
                members.has_started = bound >= min || members.has_started && is_running;
                members.has_lost = is_running && candidates < min;
                members.has_started || members.has_lost
            }
            None => false,
        };
        if 0 < bound && bound < min && !has_started {
            self.incomplete.entry(gang.clone()).or_default();
        } else {
            self.incomplete.remove(gang);
        }
    }

    /// Returns whether the gang has started: members that it needed may have ended since.
    pub(crate) fn has_started(&self, gang: &GangName) -> bool {
        let members = self.gangs.get(gang);
        members.is_some_and(|members| members.has_started || members.has_lost)
    }

    /// Returns the gangs that have been incomplete for this time. They are due again after the same time.
    pub(crate) fn due_incomplete(&mut self, now: Instant, after: Duration) -> Vec<IncompleteGang> {
        let mut due = Vec::new();
        for (gang, since) in &mut self.incomplete {
            if *since.get_or_insert(now) + after <= now {
                *since = Some(now);
                due.push(gang.clone());
            }
        }
        due.into_iter()
            .map(|name| {
                let members = self.members(&name);
                let bound: Vec<LivePod> = members
                    .filter(|(_, pod)| pod.is_bound)
                    .map(|(_, pod)| pod.clone())
                    .collect();
                let min = bound.iter().filter_map(|pod| pod.gang_min).max();
                let min = min.unwrap_or(1);
                IncompleteGang { name, min, bound }
            })
            .collect()
    }

    /// Returns when [`Self::due_incomplete`] is due.
    pub(crate) fn next_incomplete(&self, after: Duration) -> Option<Instant> {
        let since = self.incomplete.values().flatten();
        since.map(|since| *since + after).min()
    }

    /// Returns all pods with their UIDs.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &LivePod)> {
        self.pods.iter().map(|(uid, pod)| (uid.as_str(), &**pod))
    }

    /// Sets what the PodGroup of a gang says; `None` for a group that does not exist. Returns the lowest priority that a member
    /// has instead of a higher one.
    pub(crate) fn set_group(&mut self, gang: &GangName, spec: Option<&GroupSpec>) -> Option<i32> {
        let (priority, disruption) =
            spec.map_or_else(Default::default, |spec| (spec.priority, spec.disruption));
        let mut lowered: Option<i32> = None;
        let members = self.gangs.get(gang).into_iter();
        for uid in members.flat_map(|members| &members.uids) {
            let Some(pod) = self.pods.get_mut(uid) else {
                continue;
            };
            pod.gang_min = spec.map(|spec| spec.min);
            pod.disruption = disruption;
            let priority = priority.unwrap_or(pod.own_priority);
            let before = std::mem::replace(&mut pod.priority, priority);
            if priority < before {
                lowered = Some(lowered.map_or(priority, |lowered| lowered.min(priority)));
            }
            uncount(&mut self.priorities, before);
            *self.priorities.entry(priority).or_default() += 1;
        }
        self.review_gang(gang);
        lowered
    }

    /// Returns a pod by UID.
    pub(crate) fn get(&self, uid: &str) -> Option<&LivePod> {
        self.pods.get(uid).map(Box::as_ref)
    }

    /// Returns a pod with its UID.
    pub(crate) fn get_key_value(&self, uid: &str) -> Option<(&str, &LivePod)> {
        let (uid, pod) = self.pods.get_key_value(uid)?;
        Some((uid.as_str(), &**pod))
    }

    /// Returns the pods that are being deleted, with their UIDs.
    pub(crate) fn deleting(&self) -> impl Iterator<Item = (&str, &LivePod)> {
        let uids = self.deleting.iter();
        uids.filter_map(|uid| Some((uid.as_str(), self.get(uid)?)))
    }

    /// Returns the UIDs of the pods on a node that have no claims.
    pub(crate) fn without_claims_on(&self, node: &str) -> impl Iterator<Item = &str> {
        let pods = self
            .without_claims
            .range((node.to_owned(), String::new())..);
        let pods = pods.take_while(move |(of, _)| of == node);
        pods.map(|(_, uid)| uid.as_str())
    }

    /// Returns the node of a pod without claims, if it is bound.
    pub(crate) fn node_without_claims(&self, uid: &str) -> Option<&str> {
        let pod = self.pods.get(uid)?;
        pod.node.as_deref().filter(|_| pod.claims.is_empty())
    }

    /// Returns the first node from there on with a pod without claims, by name.
    pub(crate) fn next_node_without_claims(&self, from: Bound<&str>) -> Option<&str> {
        let from = match from {
            Bound::Included(node) => (node.to_owned(), String::new()),
            // No name has this character, so none is between the node and this one.
            Bound::Excluded(node) => (format!("{node}\0"), String::new()),
            Bound::Unbounded => Default::default(),
        };
        let next = self.without_claims.range(from..).next();
        next.map(|(node, _)| node.as_str())
    }

    /// Returns the lowest priority of all pods.
    pub(crate) fn lowest_priority(&self) -> Option<i32> {
        self.priorities.keys().next().copied()
    }

    /// Returns the number of gangs with unbound members, and of those without.
    pub(crate) fn count_gangs(&self) -> GangCounts {
        let is_pending = |gang: &&GangName| self.members(gang).any(|(_, pod)| !pod.is_bound);
        let pending = self.gangs.keys().filter(is_pending).count();
        GangCounts {
            pending,
            running: self.gangs.len() - pending,
        }
    }

    /// Returns the pods of a gang that are not being deleted, with their UIDs.
    pub(crate) fn members(&self, gang: &GangName) -> impl Iterator<Item = (&str, &LivePod)> {
        let gang = self.gangs.get(gang).into_iter();
        let uids = gang.flat_map(|members| &members.uids);
        uids.filter_map(|uid| Some((uid.as_str(), self.get(uid)?)))
            .filter(|(_, pod)| pod.grace_period_end.is_none())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::object;
    use crate::pods::gang::{COSCHEDULING_LABEL, PodGroupApi};

    #[test]
    fn gang_with_unknown_minimum_has_not_started() {
        let mut live = LivePods::default();
        for (name, node) in [("a", Some("n1")), ("b", None), ("c", None)] {
            let pod: Pod = object(json!({
                "metadata": {
                    "name": name, "namespace": "default", "uid": name,
                    "annotations": {"gpu.drava.dev/gang": "g"}, "labels": {COSCHEDULING_LABEL: "g"},
                },
                "spec": {
                    "containers": [], "nodeName": node,
                    "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                },
            }));
            live.upsert(name, &pod);
        }
        let gang = GangName::of_group(PodGroupApi::Coscheduling, "default", "g");
        assert!(!live.has_started(&gang));
        let spec = GroupSpec {
            min: 3,
            ..GroupSpec::default()
        };
        live.set_group(&gang, Some(&spec));
        assert!(!live.has_started(&gang));
        let now = Instant::now();
        assert_eq!(live.due_incomplete(now, Duration::ZERO).len(), 1);
        // It is deleted and created again.
        live.set_group(&gang, None);
        live.set_group(&gang, Some(&spec));
        assert!(!live.has_started(&gang));
    }
}
