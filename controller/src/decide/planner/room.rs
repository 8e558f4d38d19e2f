//! Room for a pod or gang that does not fit: which pods have to end, and the reservation of what is free until then.
//!
//! Pods that are being deleted cost nothing, nor do those that have ended and whose claims are about to be released. A pod
//! evicts pods of strictly lower priority, after a simulation has proved that it fits then; if it fits when only shares are
//! suspended that may be, they are, and no pod ends. A pod within the guarantee of its
//! quota evicts pods of tenants that use more than theirs. No eviction takes another tenant below its guarantee. The head of
//! the queue waits for pods of any priority without evicting them, and reserves devices only while pods end for it.
//!
//! A pod that kube-scheduler did not bind where it was allocated evicts nothing until a node or the pod changes: otherwise
//! it could evict on one node after the other in vain.

use std::cell::RefCell;
use std::collections::BTreeSet;

use drava_allocator::cluster::{Departure, Floors};
use drava_allocator::explanation::Explanation;
use drava_allocator::placement::Placement;
use drava_allocator::searched::Suspended;
use drava_allocator::turn::Turn;
use drava_api::reason::Reason;
use drava_explanation::owner::{name_for, names_for};
use jiff::{SignedDuration, Timestamp};

use super::decision::Group;
use super::demand::Request;
use super::{DecisionTime, Planner};
use crate::action::event::ReleaseReason;
use crate::action::{Action, Eviction, EvictionCause, Precedence, Preemptor, Victim};
use crate::decide::ledger::{Owner, Purpose, REVIEW_INTERVAL, Reservation, ReservedPod};
use crate::decide::queue::QueueOrder;
use crate::pods::live_pods::LivePod;
use crate::pods::pod::{self, qualified_name};

mod holder_costs;
mod holders;
mod known_victims;
mod limits;
mod placing;
mod reserved;
mod rollout;

pub(super) use holder_costs::HolderCosts;
use holders::MembersOfGangs;
use placing::FoundSoFar;
pub(super) use rollout::Rollout;

/// Time after the grace period in which a pod that is being deleted is still expected to end.
const TERMINATION_MARGIN: SignedDuration = SignedDuration::from_secs(30);

/// Why pods may end for a group, in the order of the searches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RoomCause {
    /// Their shares are suspended.
    Suspension,
    /// They are evicted.
    Eviction(Precedence),
    /// The group waits for their end.
    Wait,
}

/// How far the search for room for a group has come in earlier turns. The searches for causes before are over.
#[derive(Debug)]
pub(super) struct RoomProgress {
    cause: RoomCause,
    found: Box<FoundSoFar>,
}

/// Cause of a room, and the priority below which pods may end for it; `None` if priority does not decide.
pub(super) type RoomKind = (RoomCause, Option<i32>);

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
    /// UIDs of its pods.
    own: BTreeSet<&'a str>,
    /// Guaranteed usage of other tenants, which no eviction lowers.
    floors: Floors,
    /// UIDs of the pods that end in any case.
    ending: &'a BTreeSet<String>,
    /// UIDs of the pods whose shares are being suspended.
    suspending: BTreeSet<String>,
    cause: RoomCause,
    /// Returns the priority of a pod that may end.
    priority_of: &'a dyn Fn(&LivePod) -> Option<i32>,
    time: &'a DecisionTime,
    /// The gangs that have been asked for.
    gangs: RefCell<MembersOfGangs>,
}

/// The reservations of a pod that is decided, or of its gang.
#[derive(Default)]
pub(super) struct OwnReservations {
    taken: Vec<(Owner, Reservation)>,
    /// Owners of those that ended earlier in this round.
    outdated: Vec<Owner>,
}

impl Planner {
    /// Ends the reservations of the pod or its gang, before it is decided. Returns them.
    pub(super) fn take_own_reservations(&mut self, uid: &str) -> OwnReservations {
        let mut own = OwnReservations::default();
        for owner in self.owners(uid) {
            if self.commitments.outdated.remove(&owner) {
                own.outdated.push(owner.clone());
            }
            let lifted = self
                .commitments
                .lifted
                .extract_if(.., |(of, _)| *of == owner);
            own.taken.extend(lifted);
            if let Some(reservation) = self.take_reservation(&owner) {
                own.taken.push((owner, reservation));
            }
        }
        own
    }

    /// Keeps the reservations of a pod whose decision goes on later. Notes whether the pod reserves nothing any longer.
    pub(super) fn renew_reservations(&mut self, uid: &str, own: OwnReservations) {
        if self.backlog.queue.is_suspended(uid) {
            self.commitments.lifted.extend(own.taken);
            self.commitments.outdated.extend(own.outdated);
        } else if !own.taken.is_empty() || !own.outdated.is_empty() {
            let owners = self.owners(uid);
            let is_renewed = self
                .commitments
                .ledger
                .owners()
                .any(|owner| owners.contains(owner));
            self.backlog.has_room_ended |= !is_renewed;
        }
    }

    /// Lifts the reservations of the pods behind one that is decided.
    pub(super) fn lift_reservations(&mut self, order: &QueueOrder) {
        let behind: Vec<Owner> = self
            .commitments
            .ledger
            .reservations()
            .filter(|(_, reservation)| reservation.order >= *order)
            .map(|(owner, _)| owner.clone())
            .collect();
        for owner in behind {
            if let Some(reservation) = self.take_reservation(&owner) {
                self.commitments.lifted.push((owner, reservation));
            }
        }
    }

    /// Restores the lifted reservations, before a pod of this order is decided: those ahead of it. Less is free then, so what
    /// was rejected stays rejected.
    pub(super) fn restore_reservations(&mut self, before: Option<&QueueOrder>) {
        let lifted = std::mem::take(&mut self.commitments.lifted);
        for (owner, reservation) in lifted {
            if before.is_some_and(|order| reservation.order >= *order) {
                self.commitments.lifted.push((owner, reservation));
                continue;
            }
            self.world.keep_again(&reservation);
            self.commitments.ledger.reserve(owner, reservation);
        }
    }

    /// Ends the lifted reservations on the nodes of new placements, and that of the head of the queue if there is another
    /// one now. Their owners are decided before the pods behind them.
    pub(super) fn outdate_reservations<'a>(
        &mut self,
        placements: impl Iterator<Item = &'a Placement>,
        purpose: Option<Purpose>,
    ) {
        if self.commitments.lifted.is_empty() {
            return;
        }
        let nodes: BTreeSet<&str> = placements
            .map(|placement| placement.node.as_str())
            .collect();
        let is_outdated = |reservation: &Reservation| {
            let mut reserved = reservation.pods.iter();
            reserved.any(|pod| nodes.contains(pod.placement.node.as_str()))
                || purpose == Some(Purpose::HeadOfQueue)
                    && reservation.purpose == Purpose::HeadOfQueue
        };
        let lifted = std::mem::take(&mut self.commitments.lifted).into_iter();
        let (outdated, kept): (Vec<_>, Vec<_>) =
            lifted.partition(|(_, reservation)| is_outdated(reservation));
        self.commitments.lifted = kept;
        for (owner, reservation) in outdated {
            for pod in &reservation.pods {
                self.backlog.queue.decide_again(&pod.uid);
            }
            self.commitments.outdated.insert(owner);
        }
    }

    /// Ends the reservation of a pod that is no longer pending. Others may reserve instead.
    pub(super) fn reservation_unneeded(&mut self, uid: &str) {
        for owner in self.owners(uid) {
            self.backlog.activate_all |= self.end_reservation(&owner);
        }
    }

    fn end_reservation(&mut self, owner: &Owner) -> bool {
        let was_outdated = self.commitments.outdated.remove(owner);
        let Some(reservation) = self.take_reservation(owner) else {
            return was_outdated;
        };
        for pod in &reservation.pods {
            if let Some(pending) = self.backlog.queue.get_mut(&pod.uid) {
                pending.activate();
            }
        }
        true
    }

    fn take_reservation(&mut self, owner: &Owner) -> Option<Reservation> {
        let reservation = self.commitments.ledger.end_reservation(owner)?;
        for pod in &reservation.pods {
            self.world.forget(&pod.uid, &pod.placement);
        }
        Some(reservation)
    }

    pub(super) fn namespace_of(&self, uid: &str) -> String {
        let pod = self.world.live_pods.get(uid);
        let namespace = pod.and_then(|pod| pod.reference.namespace.clone());
        namespace.unwrap_or_default()
    }

    /// Returns the possible owners of a pod's reservation: its gang, or the pod itself, also as an elastic member.
    fn owners(&self, uid: &str) -> Vec<Owner> {
        let gang = self
            .world
            .live_pods
            .get(uid)
            .and_then(|pod| pod.gang.clone());
        let pod = Owner::Pod(uid.to_owned());
        gang.map(Owner::Gang).into_iter().chain([pod]).collect()
    }

    /// Reserves devices for a group that does not fit, and evicts pods for it if it may. Returns why it waits if it waits for
    /// pods that are being deleted. A group that waits for its quota reserves nothing as the head of the queue.
    ///
    /// # Errors
    /// When the turn is too short.
    pub(super) fn make_room(
        &mut self,
        group: &Group,
        waits_for_quota: bool,
        order: &QueueOrder,
        time: &DecisionTime,
        turn: &mut Turn,
        actions: &mut Vec<Action>,
    ) -> Result<Option<Explanation>, Suspended> {
        self.set_reclaiming(group, false);
        let suspending = self.suspending_pods();
        let ending = &self.ending_pods(time) | &suspending;
        let pending = |request: &Request| self.backlog.queue.get(&request.pod_request.uid);
        let mut preemptors = group.requests.iter();
        let is_evicting = preemptors.any(|request| {
            self.commitments
                .preemptors
                .contains(&request.pod_request.uid)
        });
        let may_evict = self.world.settings.preemption
            && !is_evicting
            && group.requests.iter().filter_map(pending).all(|pending| {
                pod::may_preempt(&pending.pod) && pending.avoided_nodes().is_empty()
            })
            && self.has_waited(group, time);
        let priority = order.priority();
        let lowest = self.world.live_pods.lowest_priority();
        let may_preempt = may_evict && lowest.is_some_and(|lowest| lowest < priority);
        let below =
            |pod: &LivePod| (may_preempt && pod.priority < priority).then_some(pod.priority);
        let mut room = None;
        let can = match may_preempt {
            true => self.suspendable_for(group, priority),
            false => BTreeSet::new(),
        };
        if !can.is_empty() {
            turn.count(u64::try_from(can.len()).unwrap_or(u64::MAX));
            let of_suspendable = |pod: &LivePod| {
                let uid = pod.reference.uid.as_ref();
                uid.is_some_and(|uid| can.contains(uid))
                    .then_some(pod.priority)
            };
            let kind = (RoomCause::Suspension, Some(priority));
            let found = self.find_room_once(group, &ending, kind, of_suspendable, time, turn)?;
            // What was found in an earlier turn may not be possible any more.
            let found = found
                .filter(|room| room.victims.is_subset(&can) && self.has_host_memory(&room.victims));
            room = found.map(|room| (room, RoomCause::Suspension));
        }
        if room.is_none() && (may_preempt || !ending.is_empty()) {
            let cause = RoomCause::Eviction(Precedence::Priority);
            let kind = (cause, may_preempt.then_some(priority));
            let found = self.find_room_once(group, &ending, kind, below, time, turn)?;
            room = found.map(|room| (room, cause));
        }
        if room.is_none() && may_evict {
            let found = self.find_guaranteed_room(group, &ending, time, turn)?;
            room = found.map(|room| (room, RoomCause::Eviction(Precedence::Guarantee)));
        }
        if let Some((room, cause)) = room {
            let nodes: BTreeSet<&str> = room
                .placements
                .iter()
                .map(|(_, placement)| placement.node.as_str())
                .collect();
            let nodes: Vec<&str> = nodes.into_iter().collect();
            let is_on_them = |uid: &String| {
                let node = self.world.cluster.node_of_pod(uid);
                node.is_some_and(|node| nodes.contains(&node))
            };
            let awaits_suspension = cause == RoomCause::Suspension && !room.victims.is_empty()
                || suspending.iter().any(is_on_them);
            let (reason, what) = match awaits_suspension {
                true => {
                    let mut uids: BTreeSet<&String> =
                        suspending.iter().filter(|uid| is_on_them(uid)).collect();
                    if cause == RoomCause::Suspension {
                        uids.extend(&room.victims);
                    }
                    let what = format!("shares of {} are suspended", self.pods_for(group, &uids));
                    (Reason::WaitingForSuspension, what)
                }
                false => (
                    Reason::WaitingForDeletion,
                    "pods that are being deleted there have ended".to_owned(),
                ),
            };
            let message = format!("the pod fits on {} when the {what}", nodes.join(", "));
            let waiting = Explanation::rejected(reason, message);
            match cause {
                RoomCause::Suspension => self.suspend_victims(group, &room.victims, time, actions),
                RoomCause::Eviction(precedence) => {
                    self.evict(group, &room.victims, precedence, time, actions);
                }
                RoomCause::Wait => {}
            }
            self.reserve(group, room, Purpose::Preemption, order, time);
            return Ok(Some(waiting));
        }
        if let Some(blocked) = self.own_rollout(group, &ending, time, turn)? {
            return Ok(Some(blocked));
        }
        let has_head = self
            .commitments
            .ledger
            .reservations()
            .any(|(_, reservation)| reservation.purpose == Purpose::HeadOfQueue);
        if !has_head
            && !waits_for_quota
            && let kind = (RoomCause::Wait, None)
            && let Some(room) =
                self.find_room_once(group, &ending, kind, |_| Some(0), time, turn)?
        {
            let awaited = room.victims.iter();
            let awaited = awaited.filter_map(|uid| self.world.live_pods.get(uid));
            let end_by_themselves = awaited.clone().all(|pod| pod.ends_by_itself);
            let head = room.placements.first();
            let head = head.and_then(|(head, _)| self.backlog.queue.get_mut(&head.pod_request.uid));
            let count = room.victims.len();
            if head.is_some_and(|head| head.may_reserve(count, end_by_themselves, time.instant)) {
                self.reserve(group, room, Purpose::HeadOfQueue, order, time);
            }
        }
        Ok(None)
    }

    /// Returns room that pods of borrowing tenants make for a group within the guarantee of its quota.
    fn find_guaranteed_room(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        time: &DecisionTime,
        turn: &mut Turn,
    ) -> Result<Option<Room>, Suspended> {
        let Some(first) = group.requests.first() else {
            return Ok(None);
        };
        let borrowers = self
            .world
            .cluster
            .borrowers(&self.namespace_of(&first.pod_request.uid));
        if borrowers.is_empty() {
            return Ok(None);
        }
        let cause = RoomCause::Eviction(Precedence::Guarantee);
        let of_borrower = |pod: &LivePod| {
            let namespace = pod.reference.namespace.as_deref().unwrap_or_default();
            borrowers.contains(namespace).then_some(pod.priority)
        };
        self.find_room_once(group, ending, (cause, None), of_borrower, time, turn)
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
        let placements = room.placements.iter().map(|(_, placement)| placement);
        self.outdate_reservations(placements, Some(purpose));
        let reserved = room.placements.into_iter();
        let reserved = reserved.map(|(request, placement)| ReservedPod {
            uid: request.pod_request.uid,
            demand: request.pod_request.demand,
            placement,
        });
        let pods: Vec<ReservedPod> = reserved.collect();
        let mut is_guaranteed = purpose == Purpose::Preemption;
        for pod in &pods {
            is_guaranteed &= self.world.cluster.is_guaranteed(&pod.placement);
            self.world.keep(pod, purpose);
        }
        if is_guaranteed {
            self.set_reclaiming(group, true);
        }
        let reservation = Reservation {
            purpose,
            order: self
                .backlog
                .queue
                .order(&uid)
                .unwrap_or_else(|| order.clone()),
            pods,
            review_at: time.instant + REVIEW_INTERVAL,
        };
        self.commitments.ledger.reserve(owner, reservation);
    }

    /// Sets whether the pods of the group get back the guarantee of their tenant: then they precede all others, so that no
    /// borrower takes the devices again.
    fn set_reclaiming(&mut self, group: &Group, is_reclaiming: bool) {
        for request in &group.requests {
            if let Some(pending) = self.backlog.queue.get_mut(&request.pod_request.uid) {
                pending.is_reclaiming = is_reclaiming;
            }
        }
    }

    /// Names pods in an event of a group's pod.
    fn pods_for(&self, group: &Group, uids: &BTreeSet<&String>) -> String {
        let first = group.requests.first();
        let reader = first.map(|first| self.namespace_of(&first.pod_request.uid));
        let pods = uids.iter().filter_map(|uid| self.world.live_pods.get(uid));
        let names: BTreeSet<String> = pods.map(|pod| qualified_name(&pod.reference)).collect();
        names_for(
            &reader.unwrap_or_default(),
            "pod",
            names.iter().map(String::as_str),
        )
        .join(", ")
    }

    /// Returns the first pod of a group as the one for which others make room.
    fn preemptor(&self, group: &Group, precedence: Precedence) -> Option<Preemptor> {
        let uid = &group.requests.first()?.pod_request.uid;
        let pod = self.world.live_pods.get(uid)?;
        Some(Preemptor {
            uid: uid.clone(),
            pod: pod.reference.clone(),
            priority: pod.priority,
            precedence,
        })
    }

    /// Starts the suspension of the victims' shares.
    fn suspend_victims(
        &mut self,
        group: &Group,
        victims: &BTreeSet<String>,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        if let Some(preemptor) = self.preemptor(group, Precedence::Priority) {
            self.suspend_for(&preemptor, victims, time, actions);
        }
    }

    /// Starts the eviction of the victims. One that is not bound loses its allocation instead, and waits again.
    fn evict(
        &mut self,
        group: &Group,
        victims: &BTreeSet<String>,
        precedence: Precedence,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let Some(preemptor) = self.preemptor(group, precedence) else {
            return;
        };
        self.report_not_suspended(&preemptor, victims, time, actions);
        let victims = victims.iter().filter_map(|uid| {
            let (uid, pod) = self.world.live_pods.get_key_value(uid)?;
            Some((uid.to_owned(), pod.clone()))
        });
        let (bound, unbound): (Vec<_>, Vec<_>) = victims.partition(|(_, pod)| pod.is_bound);
        for (uid, pod) in unbound {
            for key in &pod.claims {
                let reason = ReleaseReason::Preempted {
                    by: name_for(&key.0, "pod", &qualified_name(&preemptor.pod)),
                    why: preemptor.why(),
                };
                self.commitments.ledger.release_now(key, reason);
            }
            self.commitments
                .evicted
                .insert(uid, Some(time.instant + REVIEW_INTERVAL));
        }
        if bound.is_empty() {
            return;
        }
        self.commitments
            .evicted
            .extend(bound.iter().map(|(uid, _)| (uid.clone(), None)));
        self.commitments.preemptors.insert(preemptor.uid.clone());
        let victims = bound.into_iter().map(|(_, pod)| Victim {
            pod: pod.reference,
            priority: pod.priority,
        });
        actions.push(Action::Evict(Eviction {
            cause: EvictionCause::Preemption(preemptor),
            victims: victims.collect(),
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
            .world
            .live_pods
            .deleting()
            .filter(|(_, pod)| pod.grace_period_end.is_some_and(is_expected))
            .map(|(uid, _)| uid.to_owned());
        let evicted = self
            .commitments
            .evicted
            .iter()
            .filter(|(_, until)| until.is_none_or(|until| time.instant < until))
            .map(|(uid, _)| uid.clone());
        let ended = self.world.ended_pods.uids().cloned();
        deleted.chain(evicted).chain(ended).collect()
    }

    /// Returns room like [`Self::find_room`]; for a request equal to one without such room, at once.
    fn find_room_once(
        &mut self,
        group: &Group,
        ending: &BTreeSet<String>,
        kind: RoomKind,
        priority_of: impl Fn(&LivePod) -> Option<i32>,
        time: &DecisionTime,
        turn: &mut Turn,
    ) -> Result<Option<Room>, Suspended> {
        let single = match (&group.gang, &group.requests[..]) {
            (None, [request]) => Some(&request.pod_request),
            _ => None,
        };
        let first = group
            .requests
            .first()
            .map(|request| &request.pod_request.uid);
        let progress = first.and_then(|first| self.backlog.suspended_decisions.room(first));
        let progress = progress.map(|progress| progress.cause);
        if progress.is_some_and(|reached| kind.0 < reached)
            || single.is_some_and(|request| {
                let without_room = &self.backlog.rejections.at(&self.world).without_room;
                without_room.of(request).any(|of| *of == kind)
            })
        {
            return Ok(None);
        }
        let room = self.find_room(group, ending, kind.0, priority_of, time, turn)?;
        if room.is_none()
            // What was searched in earlier turns may have changed for others.
            && progress.is_none()
            && let Some(request) = single
        {
            let rejections = self.backlog.rejections.at(&self.world);
            rejections.without_room.add(request, kind);
        }
        Ok(room)
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
        turn: &mut Turn,
    ) -> Result<Option<Room>, Suspended> {
        let mut search = self.search(group, ending, cause, &priority_of, time);
        // What is suspended still counts against the quotas.
        if let RoomCause::Eviction(_) = cause {
            search.floors = self.floors(&search);
        }
        let room = self.place_by_ends(&search, turn);
        self.world.cluster.presume_gone(&Departure::default());
        room
    }

    /// Starts a search without floors.
    fn search<'a>(
        &self,
        group: &'a Group,
        ending: &'a BTreeSet<String>,
        cause: RoomCause,
        priority_of: &'a dyn Fn(&LivePod) -> Option<i32>,
        time: &'a DecisionTime,
    ) -> Search<'a> {
        let requests = group.requests.iter();
        Search {
            group,
            own: requests.map(|request| &*request.pod_request.uid).collect(),
            floors: Floors::default(),
            ending,
            suspending: self.suspending_pods(),
            cause,
            priority_of,
            time,
            gangs: RefCell::default(),
        }
    }
}
