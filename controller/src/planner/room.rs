//! Room for a pod or gang that does not fit: which pods have to end, and the reservation of what is free until then.
//!
//! Pods that are being deleted cost nothing. A pod evicts pods of strictly lower priority, after a simulation has proved that
//! it fits then. The head of the queue waits for pods of any priority without evicting them.
//!
//! A pod that kube-scheduler did not bind where it was allocated evicts nothing until a node or the pod changes: otherwise
//! it could evict on one node after the other in vain.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use drava_allocator::cluster::{Departure, ObjectKey};
use drava_allocator::explanation::Explanation;
use drava_allocator::placement::Placement;
use drava_api::reason::Reason;
use jiff::{SignedDuration, Timestamp};

use super::decision::Group;
use super::demand::Request;
use super::{DecisionTime, Planner};
use crate::action::{Action, Eviction, EvictionCause, Preemptor, Victim};
use crate::ledger::{Owner, Purpose, Reservation};
use crate::live_pods::LivePod;
use crate::queue::QueueOrder;
use crate::victims::{self, Candidate, Cost};
use crate::{claim, pod};

/// Time after the grace period in which a pod that is being deleted is still expected to end.
const TERMINATION_MARGIN: SignedDuration = SignedDuration::from_secs(30);
/// Interval after which the owner of a reservation is decided again even without a change.
pub(super) const REVIEW_INTERVAL: Duration = Duration::from_secs(30);

/// Room for a group.
struct Room {
    /// Placements of its pods by UID.
    placements: Vec<(Request, Placement)>,
    /// UIDs of the pods that have to end, apart from those that are being deleted.
    victims: BTreeSet<String>,
}

/// Which pods hold what.
struct Holders {
    /// UIDs of the pods that use an allocated claim.
    consumers: BTreeMap<ObjectKey, BTreeSet<String>>,
    /// Pods that may end, by the node of their devices.
    candidates: BTreeMap<String, Vec<Candidate>>,
}

impl Planner {
    /// Ends the reservation of the pod or its gang, and those of pods behind it, which are decided again.
    pub(super) fn lift_reservations(&mut self, uid: &str, order: &QueueOrder) {
        let own = self.owner(uid);
        let lifted: Vec<Owner> = self
            .ledger
            .reservations()
            .filter(|(owner, reservation)| **owner == own || reservation.order >= *order)
            .map(|(owner, _)| owner.clone())
            .collect();
        for owner in lifted {
            self.end_reservation(&owner);
        }
    }

    /// Ends the reservation of a pod that is no longer pending. Others may reserve instead.
    pub(super) fn reservation_unneeded(&mut self, uid: &str) {
        let owner = self.owner(uid);
        self.activate_all |= self.end_reservation(&owner);
    }

    fn end_reservation(&mut self, owner: &Owner) -> bool {
        let Some(reservation) = self.ledger.end_reservation(owner) else {
            return false;
        };
        for key in reservation.claims() {
            self.cluster.forget(&key);
        }
        for (uid, _) in &reservation.placements {
            self.cluster.forget_pod(uid);
            if let Some(pending) = self.queue.get_mut(uid) {
                pending.activate();
            }
        }
        true
    }

    fn owner(&self, uid: &str) -> Owner {
        let gang = self.live_pods.get(uid).and_then(|pod| pod.gang.clone());
        gang.map_or_else(|| Owner::Pod(uid.to_owned()), Owner::Gang)
    }

    /// Reserves devices for a group that does not fit, and evicts pods for it if it may. Returns why it waits if it waits for
    /// pods that are being deleted.
    pub(super) fn make_room(
        &mut self,
        group: &Group,
        order: &QueueOrder,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) -> Option<Explanation> {
        let ending = self.ending_pods(time);
        let pending = |request: &Request| self.queue.get(&request.pod_request.uid);
        let may_preempt = self.settings.preemption
            && group.requests.iter().filter_map(pending).all(|pending| {
                pod::may_preempt(&pending.pod) && pending.avoided_nodes().is_empty()
            });
        let priority = order.priority();
        let lowest = self.live_pods.lowest_priority();
        let may_preempt = may_preempt && lowest.is_some_and(|lowest| lowest < priority);
        let below =
            |pod: &LivePod| (may_preempt && pod.priority < priority).then_some(pod.priority);
        if (may_preempt || !ending.is_empty())
            && let Some(room) = self.find_room(group, &ending, below, time)
        {
            let nodes: BTreeSet<&str> = room
                .placements
                .iter()
                .map(|(_, placement)| placement.node.as_str())
                .collect();
            let nodes: Vec<&str> = nodes.into_iter().collect();
            let waiting = Explanation::rejected(
                Reason::WaitingForPreemption,
                format!(
                    "the pod fits on {} when the pods that are being deleted there have ended",
                    nodes.join(", ")
                ),
            );
            self.evict(group, &room.victims, time, actions);
            self.reserve(group, room, Purpose::Preemption, order, time);
            return Some(waiting);
        }
        let has_head = self
            .ledger
            .reservations()
            .any(|(_, reservation)| reservation.purpose == Purpose::HeadOfQueue);
        if !has_head && let Some(room) = self.find_room(group, &ending, |_| Some(0), time) {
            let head = room.placements.first();
            let head = head.and_then(|(head, _)| self.queue.get_mut(&head.pod_request.uid));
            if head.is_some_and(|head| head.may_reserve(room.victims.len(), time.instant)) {
                self.reserve(group, room, Purpose::HeadOfQueue, order, time);
            }
        }
        None
    }

    fn reserve(
        &mut self,
        group: &Group,
        room: Room,
        purpose: Purpose,
        order: &QueueOrder,
        time: &DecisionTime,
    ) {
        let Some((first, _)) = room.placements.first() else {
            return;
        };
        let owner = group
            .gang
            .clone()
            .map_or_else(|| Owner::Pod(first.pod_request.uid.clone()), Owner::Gang);
        for (request, placement) in &room.placements {
            self.assume(request, placement);
        }
        let placements = room.placements.into_iter();
        let reservation = Reservation {
            purpose,
            order: order.clone(),
            placements: placements
                .map(|(request, placement)| (request.pod_request.uid, placement))
                .collect(),
            review_at: time.instant + REVIEW_INTERVAL,
        };
        self.ledger.reserve(owner, reservation);
    }

    /// Starts the eviction of the victims.
    fn evict(
        &mut self,
        group: &Group,
        victims: &BTreeSet<String>,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let preemptor = group
            .requests
            .first()
            .map(|request| &request.pod_request.uid);
        let Some((uid, preemptor)) =
            preemptor.and_then(|uid| Some((uid, self.live_pods.get(uid)?)))
        else {
            return;
        };
        let victims: Vec<Victim> = victims
            .iter()
            .filter_map(|uid| self.live_pods.get(uid))
            .map(|pod| Victim {
                pod: pod.reference.clone(),
                priority: pod.priority,
            })
            .collect();
        if victims.is_empty() {
            return;
        }
        for victim in &victims {
            let uid = victim.pod.uid.clone().unwrap_or_default();
            self.evicted.insert(uid, time.instant + REVIEW_INTERVAL);
        }
        actions.push(Action::Evict(Eviction {
            cause: EvictionCause::Preemption(Preemptor {
                uid: uid.clone(),
                pod: preemptor.reference.clone(),
                priority: preemptor.priority,
            }),
            victims,
        }));
    }

    /// Returns the UIDs of the pods that are being deleted or evicted and are expected to end.
    fn ending_pods(&self, time: &DecisionTime) -> BTreeSet<String> {
        let now: Timestamp = time.time.0;
        let is_expected = |end: Timestamp| {
            end.saturating_add(TERMINATION_MARGIN)
                .is_ok_and(|end| now < end)
        };
        let deleted = self
            .live_pods
            .deleting()
            .filter(|(_, pod)| pod.grace_period_end.is_some_and(is_expected))
            .map(|(uid, _)| uid.to_owned());
        let evicted = self
            .evicted
            .iter()
            .filter(|(_, until)| time.instant < **until)
            .map(|(uid, _)| uid.clone());
        deleted.chain(evicted).collect()
    }

    /// Returns room for the required pods of the group: each is placed, on the node where the best set of pods has to end.
    /// `priority_of` returns the priority of a pod that may end.
    fn find_room(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        priority_of: impl Fn(&LivePod) -> Option<i32>,
        time: &DecisionTime,
    ) -> Option<Room> {
        let holders = self.holders(group, ending, priority_of, time);
        let mut ended = ending.clone();
        let mut placements: Vec<(Request, Placement)> = Vec::new();
        let mut covered = 0;
        for request in &group.requests {
            if placements.len() + covered == group.required {
                break;
            }
            if request.shares_claim(placements.iter().map(|(other, _)| other)) {
                covered += 1;
                continue;
            }
            self.presume_ended(&holders, &ended);
            let placement = self.decide(&request.pod_request).ok().or_else(|| {
                let (node, victims) = self.best_victims(request, &holders, &ended)?;
                ended.extend(victims);
                self.presume_ended(&holders, &ended);
                self.cluster
                    .decide_on(&node, &request.pod_request, self.settings.policies)
                    .ok()
            });
            if let Some(placement) = placement {
                self.assume(request, &placement);
                placements.push((request.clone(), placement));
            }
        }
        for (request, placement) in &placements {
            self.forget(request, placement);
        }
        self.cluster.presume_gone(Departure::default());
        (placements.len() + covered >= group.required).then(|| Room {
            placements,
            victims: &ended - ending,
        })
    }

    /// Returns the best set of pods of one node whose end makes room for the pod, and the node.
    fn best_victims(
        &mut self,
        request: &Request,
        holders: &Holders,
        ended: &BTreeSet<String>,
    ) -> Option<(String, BTreeSet<String>)> {
        let mut best: Option<(String, Cost)> = None;
        for (node, candidates) in &holders.candidates {
            let bound = best.as_ref().map(|(_, cost)| cost);
            let found = victims::search(candidates, bound, |victims| {
                self.presume_ended(holders, &(ended | victims));
                let placement =
                    self.cluster
                        .decide_on(node, &request.pod_request, self.settings.policies);
                placement.is_ok()
            });
            if let Some(cost) = found {
                best = Some((node.clone(), cost));
            }
        }
        best.map(|(node, cost)| (node, cost.into_uids()))
    }

    /// Presumes that pods have ended: a claim is released when all pods that use it have.
    fn presume_ended(&mut self, holders: &Holders, ended: &BTreeSet<String>) {
        let claims = ended
            .iter()
            .filter_map(|uid| self.live_pods.get(uid))
            .flat_map(|pod| &pod.claims)
            .filter(|key| {
                let consumers = holders.consumers.get(*key);
                consumers.is_some_and(|consumers| consumers.is_subset(ended))
            });
        let gone = Departure {
            claims: claims.cloned().collect(),
            pods: ended.clone(),
        };
        self.cluster.presume_gone(gone);
    }

    /// Returns which pods use the allocated claims, and which of them may end.
    fn holders(
        &self,
        group: &Group,
        ending: &BTreeSet<String>,
        priority_of: impl Fn(&LivePod) -> Option<i32>,
        time: &DecisionTime,
    ) -> Holders {
        let mut consumers: BTreeMap<ObjectKey, BTreeSet<String>> = BTreeMap::new();
        let mut pods_on: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
        for (key, claim) in self.ledger.claims() {
            let nodes: BTreeSet<&str> = self.cluster.nodes_of(key).collect();
            if nodes.is_empty() {
                continue;
            }
            let mut uids: BTreeSet<String> = claim::consumers(claim).map(str::to_owned).collect();
            if uids.is_empty() {
                uids.extend(claim::allocated_for(claim).map(str::to_owned));
                uids.extend(self.queue.users_of(key));
            }
            for node in nodes {
                pods_on
                    .entry(node)
                    .or_default()
                    .extend(uids.iter().cloned());
            }
            consumers.insert(key.clone(), uids);
        }
        // Members of gangs without claims hold the other resources of their nodes.
        let members = self.live_pods.iter();
        for (uid, _) in members.filter(|(_, pod)| pod.is_bound && pod.claims.is_empty()) {
            if let Some(node) = self.cluster.node_of_pod(uid) {
                pods_on.entry(node).or_default().insert(uid.to_owned());
            }
        }
        let own = |uid: &str| {
            let mut requests = group.requests.iter();
            requests.any(|request| request.pod_request.uid == uid)
        };
        let is_protected = |uid: &str| {
            let until = self.protected.get(uid);
            until.is_some_and(|until| time.instant < *until)
        };
        let mut candidates: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
        for (node, uids) in pods_on {
            let mut seen: BTreeSet<Vec<&str>> = BTreeSet::new();
            for uid in &uids {
                let unit = self.unit(uid);
                let is_deleted = |(_, pod): &(&str, &LivePod)| pod.grace_period_end.is_some();
                if ending.contains(uid)
                    || unit.iter().any(is_deleted)
                    || unit.iter().any(|(uid, _)| own(uid) || is_protected(uid))
                    || !seen.insert(unit.iter().map(|(uid, _)| *uid).collect())
                {
                    continue;
                }
                let priorities: Option<Vec<i32>> =
                    unit.iter().map(|(_, pod)| priority_of(pod)).collect();
                if let Some(priority) = priorities.and_then(|all| all.into_iter().max()) {
                    candidates
                        .entry(node.to_owned())
                        .or_default()
                        .push(Candidate {
                            pods: unit
                                .iter()
                                .map(|(uid, pod)| ((*uid).to_owned(), pod.created))
                                .collect(),
                            priority,
                        });
                }
            }
        }
        Holders {
            consumers,
            candidates,
        }
    }

    /// Returns the pods that end with this one: the members of its gang that hold devices or are bound. The newest members
    /// beyond the number that the gang needs end alone.
    fn unit(&self, uid: &str) -> Vec<(&str, &LivePod)> {
        let Some((uid, pod)) = self.live_pods.get_key_value(uid) else {
            return Vec::new();
        };
        match &pod.gang {
            None => vec![(uid, pod)],
            Some(gang) => {
                let members = self.live_pods.members(gang);
                let mut members: Vec<_> = members
                    .filter(|(uid, pod)| pod.is_bound || self.holds_devices(uid, pod))
                    .collect();
                members.sort_by_key(|(uid, pod)| (pod.created, *uid));
                let mut elastic = members.iter().skip(pod.gang_min);
                if elastic.any(|(member, _)| *member == uid) {
                    return vec![(uid, pod)];
                }
                members
            }
        }
    }

    fn holds_devices(&self, uid: &str, pod: &LivePod) -> bool {
        let mut claims = pod.claims.iter().filter_map(|key| self.ledger.claim(key));
        claims.any(|claim| {
            let is_consumer = claim::consumers(claim).any(|consumer| consumer == uid);
            claim::is_allocated(claim) && (is_consumer || claim::allocated_for(claim) == Some(uid))
        })
    }
}
