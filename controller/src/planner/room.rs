//! Room for a pod or gang that does not fit: which pods have to end, and the reservation of what is free until then.
//!
//! Pods that are being deleted cost nothing, nor do those that have ended and whose claims are about to be released. A pod
//! evicts pods of strictly lower priority, after a simulation has proved that it fits then. A pod within the guarantee of its
//! quota evicts pods of tenants that use more than theirs. No eviction takes another tenant below its guarantee. The head of
//! the queue waits for pods of any priority without evicting them.
//!
//! A pod that kube-scheduler did not bind where it was allocated evicts nothing until a node or the pod changes: otherwise
//! it could evict on one node after the other in vain.

use std::collections::BTreeSet;
use std::time::Duration;

use drava_allocator::cluster::{Departure, Floors};
use drava_allocator::explanation::Explanation;
use drava_allocator::placement::Placement;
use drava_allocator::selector::is_suspended;
use drava_api::reason::Reason;
use jiff::{SignedDuration, Timestamp};

use super::decision::Group;
use super::demand::Request;
use super::{DecisionTime, Planner};
use crate::action::{Action, Eviction, EvictionCause, Precedence, Preemptor, Victim};
use crate::ledger::{Owner, Purpose, Reservation};
use crate::live_pods::LivePod;
use crate::pod;
use crate::queue::QueueOrder;

mod holders;
mod known_victims;
mod limits;
mod placing;

use holders::Holders;

/// Time after the grace period in which a pod that is being deleted is still expected to end.
const TERMINATION_MARGIN: SignedDuration = SignedDuration::from_secs(30);
/// Interval after which the owner of a reservation is decided again even without a change.
pub(super) const REVIEW_INTERVAL: Duration = Duration::from_secs(30);

/// Why pods may end for a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RoomCause {
    /// The group waits for their end.
    Wait,
    /// They are evicted.
    Eviction(Precedence),
}

/// Room for a group.
struct Room {
    /// Placements of its pods by UID.
    placements: Vec<(Request, Placement)>,
    /// UIDs of the pods that have to end, apart from those that are being deleted.
    victims: BTreeSet<String>,
}

/// A search for room.
struct Search<'a> {
    group: &'a Group,
    holders: Holders,
    /// Guaranteed usage of other tenants, which no eviction lowers.
    floors: Floors,
    /// UIDs of the pods that end in any case.
    ending: &'a BTreeSet<String>,
    cause: RoomCause,
}

impl Planner {
    /// Ends the reservation of the pod or its gang, and those of pods behind it, which are decided again.
    pub(super) fn lift_reservations(&mut self, uid: &str, order: &QueueOrder) {
        let own = self.owners(uid);
        let lifted: Vec<Owner> = self
            .ledger
            .reservations()
            .filter(|(owner, reservation)| own.contains(owner) || reservation.order >= *order)
            .map(|(owner, _)| owner.clone())
            .collect();
        for owner in lifted {
            self.end_reservation(&owner);
        }
    }

    /// Ends the reservation of a pod that is no longer pending. Others may reserve instead.
    pub(super) fn reservation_unneeded(&mut self, uid: &str) {
        for owner in self.owners(uid) {
            self.activate_all |= self.end_reservation(&owner);
        }
    }

    fn end_reservation(&mut self, owner: &Owner) -> bool {
        let Some(reservation) = self.ledger.end_reservation(owner) else {
            return false;
        };
        self.rejections.clear();
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

    fn namespace_of(&self, uid: &str) -> String {
        let pod = self.live_pods.get(uid);
        let namespace = pod.and_then(|pod| pod.reference.namespace.clone());
        namespace.unwrap_or_default()
    }

    /// Returns the possible owners of a pod's reservation: its gang, or the pod itself, also as an elastic member.
    fn owners(&self, uid: &str) -> Vec<Owner> {
        let gang = self.live_pods.get(uid).and_then(|pod| pod.gang.clone());
        let pod = Owner::Pod(uid.to_owned());
        gang.map(Owner::Gang).into_iter().chain([pod]).collect()
    }

    /// Reserves devices for a group that does not fit, and evicts pods for it if it may. Returns why it waits if it waits for
    /// pods that are being deleted. A group that waits for its quota reserves nothing as the head of the queue.
    pub(super) fn make_room(
        &mut self,
        group: &Group,
        waits_for_quota: bool,
        order: &QueueOrder,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) -> Option<Explanation> {
        self.set_reclaiming(group, false);
        let ending = self.ending_pods(time);
        let pending = |request: &Request| self.queue.get(&request.pod_request.uid);
        let may_evict = self.settings.preemption
            && group.requests.iter().filter_map(pending).all(|pending| {
                pod::may_preempt(&pending.pod) && pending.avoided_nodes().is_empty()
            })
            && self.has_waited(group, time);
        if may_evict {
            self.update_minimum_runtimes(time);
        }
        let priority = order.priority();
        let lowest = self.live_pods.lowest_priority();
        let may_preempt = may_evict && lowest.is_some_and(|lowest| lowest < priority);
        let below =
            |pod: &LivePod| (may_preempt && pod.priority < priority).then_some(pod.priority);
        let mut room = None;
        if may_preempt || !ending.is_empty() {
            let precedence = Precedence::Priority;
            let cause = RoomCause::Eviction(precedence);
            let found = self.find_room_once(group, &ending, (cause, priority), below, time);
            room = found.map(|room| (room, precedence));
        }
        if room.is_none() && may_evict {
            let found = self.find_guaranteed_room(group, &ending, priority, time);
            room = found.map(|room| (room, Precedence::Guarantee));
        }
        if let Some((room, precedence)) = room {
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
            self.evict(group, &room.victims, precedence, time, actions);
            self.reserve(group, room, Purpose::Preemption, order, time);
            return Some(waiting);
        }
        let has_head = self
            .ledger
            .reservations()
            .any(|(_, reservation)| reservation.purpose == Purpose::HeadOfQueue);
        if !has_head
            && !waits_for_quota
            && let Some(room) = self.find_room_once(
                group,
                &ending,
                (RoomCause::Wait, priority),
                |_| Some(0),
                time,
            )
        {
            let head = room.placements.first();
            let head = head.and_then(|(head, _)| self.queue.get_mut(&head.pod_request.uid));
            if head.is_some_and(|head| head.may_reserve(room.victims.len(), time.instant)) {
                self.reserve(group, room, Purpose::HeadOfQueue, order, time);
            }
        }
        None
    }

    /// Returns room that pods of borrowing tenants make for a group within the guarantee of its quota.
    fn find_guaranteed_room(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        priority: i32,
        time: &DecisionTime,
    ) -> Option<Room> {
        let first = group.requests.first()?;
        let borrowers = self
            .cluster
            .borrowers(&self.namespace_of(&first.pod_request.uid));
        if borrowers.is_empty() {
            return None;
        }
        let cause = RoomCause::Eviction(Precedence::Guarantee);
        let of_borrower = |pod: &LivePod| {
            let namespace = pod.reference.namespace.as_deref().unwrap_or_default();
            borrowers.contains(namespace).then_some(pod.priority)
        };
        self.find_room_once(group, ending, (cause, priority), of_borrower, time)
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
        let uid = first.pod_request.uid.clone();
        let mut is_guaranteed = purpose == Purpose::Preemption;
        for (request, placement) in &room.placements {
            is_guaranteed &= self.cluster.is_guaranteed(placement);
            self.assume(request, placement);
        }
        if is_guaranteed {
            self.set_reclaiming(group, true);
        }
        let placements = room.placements.into_iter();
        let reservation = Reservation {
            purpose,
            order: self.queue.order(&uid).unwrap_or_else(|| order.clone()),
            placements: placements
                .map(|(request, placement)| (request.pod_request.uid, placement))
                .collect(),
            review_at: time.instant + REVIEW_INTERVAL,
        };
        self.ledger.reserve(owner, reservation);
    }

    /// Sets whether the pods of the group get back the guarantee of their tenant: then they precede all others, so that no
    /// borrower takes the devices again.
    fn set_reclaiming(&mut self, group: &Group, is_reclaiming: bool) {
        for request in &group.requests {
            if let Some(pending) = self.queue.get_mut(&request.pod_request.uid) {
                pending.is_reclaiming = is_reclaiming;
            }
        }
    }

    /// Starts the eviction of the victims.
    fn evict(
        &mut self,
        group: &Group,
        victims: &BTreeSet<String>,
        precedence: Precedence,
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
                precedence,
            }),
            victims,
        }));
    }

    /// Returns the UIDs of the pods that are being deleted or evicted and are expected to end, and of those that have ended
    /// and whose claims are expected to be released.
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
        let ended = self.ended_pods.uids().cloned();
        deleted.chain(evicted).chain(ended).collect()
    }

    /// Returns room like [`Self::find_room`]; for a request equal to one without room, at once. The priority is that of the
    /// group.
    fn find_room_once(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        (cause, priority): (RoomCause, i32),
        priority_of: impl Fn(&LivePod) -> Option<i32>,
        time: &DecisionTime,
    ) -> Option<Room> {
        let single = match (&group.gang, &group.requests[..]) {
            (None, [request]) => Some(&request.pod_request),
            _ => None,
        };
        if single.is_some_and(|request| self.rejections.has_no_room(request, (cause, priority))) {
            return None;
        }
        let room = self
            .find_room(group, ending, cause, priority_of, time)
            .filter(|_| !is_suspended());
        if room.is_none()
            && !is_suspended()
            && let Some(request) = single
        {
            self.rejections.no_room(request, (cause, priority));
        }
        room
    }

    /// Returns room for the required pods of the group: each is placed, on the node where the best set of pods has to end.
    /// `priority_of` returns the priority of a pod that may end.
    fn find_room(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        cause: RoomCause,
        priority_of: impl Fn(&LivePod) -> Option<i32>,
        time: &DecisionTime,
    ) -> Option<Room> {
        let mut holders = self.holders(group, ending, cause, priority_of, time);
        let floors = match cause {
            RoomCause::Wait => Floors::default(),
            RoomCause::Eviction(_) => self.protect_guarantees(group, ending, &mut holders),
        };
        let search = Search {
            group,
            holders,
            floors,
            ending,
            cause,
        };
        let found = self.place_by_ends(&search);
        let room =
            found.map(|(placements, ended)| self.without_unnecessary(&search, placements, ended));
        self.cluster.presume_gone(&Departure::default());
        room
    }
}
