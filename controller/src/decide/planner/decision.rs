//! The decision for a pending pod or gang: devices for its claims, or the explanation of why it stays pending.

use std::collections::BTreeSet;
use std::sync::Arc;

use drava_allocator::explanation::Explanation;
use drava_allocator::node::PodDemand;
use drava_allocator::object::object_key;
use drava_allocator::placement::Placement;
use drava_allocator::pod::scheduler;
use drava_allocator::pod_request::PodRequest;
use drava_allocator::searched::{Suspended, Undecided};
use drava_allocator::turn::{Turn, Work};
use drava_api::placement_record::PlacementRecord;
use drava_api::reason::Reason;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::time::Instant;

use super::demand::{Demand, NamedClaims, Request};
use super::{DecisionTime, Planner};
use crate::action::event::PendingEvent;
use crate::action::{Action, AllocationJob, ClaimWrite, PodAllocation};
use crate::decide::allocation;
use crate::decide::queue::QueueOrder;
use crate::decide::queue::pending_pod::{PendingPod, Phase};
use crate::pods::gang::{self, GangName};
use crate::pods::{claim, pod};

/// Pods that are decided together: one pod, or the pending members of a gang.
pub(super) struct Group {
    pub(super) requests: Vec<Request>,
    /// How many of them must be placed.
    pub(super) required: usize,
    /// Members of the gang that are placed already.
    placed: usize,
    pub(super) gang: Option<GangName>,
}

/// Placements of a group, assumed in the cluster.
#[derive(Default)]
struct Plan {
    placed: Vec<(Request, Placement)>,
    /// Members whose claims other members allocate.
    covered: usize,
    rejected: Vec<(Request, Explanation)>,
}

impl Planner {
    /// Decides for one pending pod and its gang, and adds the resulting actions.
    pub(super) fn schedule(
        &mut self,
        uid: &str,
        time: &DecisionTime,
        turn: &mut Turn,
        actions: &mut Vec<Action>,
    ) {
        let Some(order) = self.backlog.queue.order(uid) else {
            return;
        };
        self.restore_reservations(Some(&order));
        if !self.backlog.queue.resume(uid) && self.yields(uid) {
            return self.suspend_pod(uid, Work::Selectors, time, actions);
        }
        let own = self.take_own_reservations(uid);
        self.decide_without_own(uid, &order, time, turn, actions);
        if !self.backlog.queue.is_suspended(uid) {
            self.end_decision(uid);
        }
        self.renew_reservations(uid, own);
    }

    /// Decides like [`Self::schedule`] while nothing is reserved for the pod.
    fn decide_without_own(
        &mut self,
        uid: &str,
        order: &QueueOrder,
        time: &DecisionTime,
        turn: &mut Turn,
        actions: &mut Vec<Action>,
    ) {
        if let Some(pending) = self.backlog.queue.get_mut(uid) {
            pending.phase = Phase::Unschedulable;
            pending.waits_for_quota = false;
            pending.end_hold(time.instant);
        }
        let demand = self.demand(uid);
        if let Demand::Unusable(problem) = &demand {
            return self.report_claim_problem(uid, problem, time, actions);
        }
        self.backlog.missing_claims.remove(uid);
        let (explanation, claims) = match demand {
            Demand::Nothing | Demand::Unusable(_) => return,
            Demand::Allocated => {
                return self.pod_allocated(uid, &mut BTreeSet::new(), time, actions);
            }
            Demand::Unservable(explanation, claims) => (explanation, claims),
            Demand::Devices(request) => {
                let claims = request.claims.clone();
                if let Some(pending) = self.backlog.queue.get_mut(uid)
                    && !std::mem::replace(&mut pending.is_counted, true)
                {
                    self.world.cluster.observe_request(&request.pod_request);
                }
                self.lift_reservations(order);
                match self.group(*request, time.instant) {
                    Ok(group) => return self.schedule_group(&group, order, time, turn, actions),
                    Err(explanation) => (explanation, claims),
                }
            }
        };
        self.report_unschedulable(uid, &explanation, &claims, time, actions);
    }

    /// Returns whether the pod waits behind the others without a decision: it has selectors of its own, like a pod of its
    /// namespace that is suspended because of them. Otherwise each of a tenant's costly selectors would delay all other pods once.
    fn yields(&self, uid: &str) -> bool {
        let namespace = self.backlog.queue.get(uid).map(PendingPod::namespace);
        namespace
            .is_some_and(|namespace| self.backlog.queue.has_suspended(namespace, Work::Selectors))
            && matches!(self.demand(uid), Demand::Devices(request) if request.has_selectors())
    }

    /// Decides for a group, or goes on with its decision.
    fn schedule_group(
        &mut self,
        group: &Group,
        order: &QueueOrder,
        time: &DecisionTime,
        turn: &mut Turn,
        actions: &mut Vec<Action>,
    ) {
        let uids = || {
            group
                .requests
                .iter()
                .map(|request| &request.pod_request.uid)
        };
        for uid in uids() {
            self.backlog.queue.resume(uid);
        }
        match self.decide_group(group, order, time, turn, actions) {
            Ok(()) => {
                for uid in uids() {
                    self.end_decision(uid);
                }
            }
            Err(Suspended { work, .. }) => {
                for uid in uids() {
                    self.suspend_pod(uid, work, time, actions);
                }
            }
        }
    }

    /// Starts the allocation of a group, or makes room for it, and reports members that stay pending.
    ///
    /// # Errors
    /// When the turn is too short. What was found is kept for the next one.
    fn decide_group(
        &mut self,
        group: &Group,
        order: &QueueOrder,
        time: &DecisionTime,
        turn: &mut Turn,
        actions: &mut Vec<Action>,
    ) -> Result<(), Suspended> {
        let plan = self.plan(group, turn)?;
        if plan.placed.len() + plan.covered >= group.required {
            if let Some(until) = self.held_until(&plan, time.instant) {
                self.wait_behind(group, &plan, until, time, actions);
                return Ok(());
            }
            for (request, explanation) in plan.rejected {
                let uid = &request.pod_request.uid;
                self.report_unschedulable(uid, &explanation, &request.claims, time, actions);
            }
            let placements = plan.placed.iter().map(|(_, placement)| placement);
            self.outdate_reservations(placements, None);
            actions.extend(self.start_job(&plan.placed, time));
            return Ok(());
        }
        for (request, placement) in &plan.placed {
            self.world.forget(&request.pod_request.uid, placement);
        }
        let waits_for_quota = plan
            .rejected
            .iter()
            .any(|(_, explanation)| explanation.reason() == Reason::QuotaExceeded);
        let mut rejected = plan.rejected.iter();
        // The simulations would give up, too.
        let gave_up = rejected.any(|(_, explanation)| explanation.gave_up());
        let waiting = match gave_up {
            true => Ok(None),
            false => self.make_room_in_turns(group, waits_for_quota, order, time, turn, actions),
        };
        let waiting = match waiting {
            Ok(waiting) => waiting,
            Err(suspended) => {
                // The same plan would cost the next turn what the search for room needs.
                if let [first, _, ..] = &group.requests[..] {
                    let decided = plan.into_decided().collect();
                    let uid = &first.pod_request.uid;
                    self.backlog.suspended_decisions.set_members(uid, decided);
                }
                return Err(suspended);
            }
        };
        let explanation = waiting.unwrap_or_else(|| group.explanation(&plan));
        let unfit_nodes = match &plan.rejected[..] {
            [(_, only)] => self.unfit_nodes(only),
            rejected => {
                let rejected = rejected.iter();
                let unfit = rejected.flat_map(|(_, explanation)| explanation.unfit_nodes());
                self.backlog.queue.node_set(unfit)
            }
        };
        for request in &group.requests {
            let uid = &request.pod_request.uid;
            self.report_unschedulable(uid, &explanation, &request.claims, time, actions);
            if let Some(pending) = self.backlog.queue.get_mut(uid) {
                pending.set_unfit_nodes(Arc::clone(&unfit_nodes));
                pending.waits_for_quota =
                    request.pod_request.is_single() && explanation.is_quota_only();
            }
        }
        Ok(())
    }

    /// Makes room for a group that does not fit, in a turn that has not searched so far. Returns why it waits for room.
    fn make_room_in_turns(
        &mut self,
        group: &Group,
        waits_for_quota: bool,
        order: &QueueOrder,
        time: &DecisionTime,
        turn: &mut Turn,
        actions: &mut Vec<Action>,
    ) -> Result<Option<Explanation>, Suspended> {
        let decisions = &mut self.backlog.suspended_decisions;
        let first = group.requests.first();
        if let Some(first) = first
            && let Some(work) = decisions.starts_room_later(&first.pod_request.uid, turn)
        {
            return Err(work.into());
        }
        let waiting = self.make_room(group, waits_for_quota, order, time, turn, actions)?;
        match waiting {
            None => self.reserved_room(group, turn),
            waiting => Ok(waiting),
        }
    }

    /// Returns until when the plan waits, because it has a node where its pod was not bound in time.
    fn held_until(&self, plan: &Plan, now: Instant) -> Option<Instant> {
        let held = plan.placed.iter().filter_map(|(request, placement)| {
            let pending = self.backlog.queue.get(&request.pod_request.uid)?;
            pending.held_on(&placement.node, now)
        });
        held.max()
    }

    /// Gives up a plan on nodes where the pods were not bound in time, and lets the group wait behind others.
    fn wait_behind(
        &mut self,
        group: &Group,
        plan: &Plan,
        until: Instant,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        for (request, placement) in &plan.placed {
            self.world.forget(&request.pod_request.uid, placement);
        }
        for request in &group.requests {
            let uid = &request.pod_request.uid;
            let Some(pending) = self.backlog.queue.get_mut(uid) else {
                continue;
            };
            let nodes: Vec<&str> = pending.avoided_nodes().iter().map(String::as_str).collect();
            let message = format!(
                "scheduler {} did not bind the pod to {} within {} s; the pod waits behind others and is tried there again \
                 later: see in the events of the pod and of its group or queue why it is not admitted",
                scheduler(&pending.pod),
                nodes.join(", "),
                pending.timeout().as_secs()
            );
            pending.wait_behind(until);
            let explanation = Explanation::rejected(Reason::NotBound, message);
            self.report_unschedulable(uid, &explanation, &request.claims, time, actions);
        }
    }

    /// Returns the pods to decide together with this one.
    fn group(&mut self, request: Request, now: Instant) -> Result<Group, Explanation> {
        let invalid =
            |error: gang::GangError| Explanation::rejected(Reason::InvalidGang, error.to_string());
        let uid = request.pod_request.uid.clone();
        let pending = self.backlog.queue.get(&uid);
        let gang = pending.map_or(Ok(None), |pending| gang::of(&pending.pod));
        let Some(gang) = gang.map_err(invalid)? else {
            return Ok(Group::of_pod(request));
        };
        let waiting = |count: usize, verb: &str, min: usize| {
            Explanation::rejected(
                Reason::WaitingForGang,
                format!("gang {}: {count} of {min} members {verb}", gang.name),
            )
        };
        let members: Vec<String> = self.backlog.queue.members(&gang.name);
        let pending = members
            .iter()
            .filter_map(|member| self.backlog.queue.get(member));
        let other = pending
            .filter_map(|pending| gang::of(&pending.pod).ok().flatten())
            .find(|other| other.min != gang.min);
        if let Some(other) = other {
            let (one, other) = (gang.min, other.min);
            return Err(invalid(gang::GangError::contradictory(
                gang.name, one, other,
            )));
        }
        if self.world.live_pods.has_started(&gang.name) {
            // This member is elastic, or replaces one: others may have succeeded.
            return Ok(Group::of_pod(request));
        }
        let existing = self.world.live_pods.members(&gang.name).count();
        if existing < gang.min {
            return Err(waiting(existing, "exist", gang.min));
        }
        let is_pending = |uid: &str| members.iter().any(|member| member == uid);
        let live = self.world.live_pods.members(&gang.name);
        let mut placed = live
            .filter(|(uid, pod)| !is_pending(uid) && (pod.is_bound || pod.claims.is_empty()))
            .count();
        let mut requests = Vec::new();
        for member in &members {
            let Some(pending) = self.backlog.queue.get(member) else {
                continue;
            };
            let is_in_backoff = matches!(pending.phase, Phase::Backoff(until) if now < until);
            match self.demand(member) {
                Demand::Nothing | Demand::Allocated => placed += 1,
                Demand::Devices(request) if !is_in_backoff => requests.push(*request),
                Demand::Devices(_) | Demand::Unusable(_) | Demand::Unservable(..) => {}
            }
        }
        if placed >= gang.min {
            // The others are allocated, and not bound so far; this member is elastic.
            return Ok(Group::of_pod(request));
        }
        let required = gang.min - placed;
        if requests.len() < required {
            return Err(waiting(placed + requests.len(), "are ready", gang.min));
        }
        // Members without claims fit on more nodes than the others.
        requests.sort_by_key(|request| request.pod_request.claims.is_empty());
        for request in &requests {
            if let Some(pending) = self.backlog.queue.get_mut(&request.pod_request.uid) {
                pending.phase = Phase::Unschedulable;
            }
        }
        Ok(Group {
            requests,
            required,
            placed,
            gang: Some(gang.name),
        })
    }

    /// Places as many pods of the group as fit at the same time.
    ///
    /// # Errors
    /// When the turn is too short. What was decided for the pods before is kept for the next one.
    fn plan(&mut self, group: &Group, turn: &mut Turn) -> Result<Plan, Suspended> {
        let mut plan = Plan::default();
        let first = group
            .requests
            .first()
            .map(|request| &request.pod_request.uid);
        let mut known = first
            .map(|first| self.backlog.suspended_decisions.take_members(first))
            .unwrap_or_default();
        let mut has_progress = false;
        for request in &group.requests {
            let uid = &request.pod_request.uid;
            let decided = match self.beside(request, &plan.placed) {
                Ok(None) => {
                    plan.covered += 1;
                    continue;
                }
                Ok(Some(request)) => match known.remove(uid) {
                    Some(Err(explanation)) => Err(explanation.into()),
                    Some(Ok(placement)) if self.still_fits(&request, &placement, turn) => {
                        Ok((request, placement))
                    }
                    Some(Ok(_)) | None if has_progress && turn.is_out_of_checks() => {
                        Err(Suspended::from(Work::Checks).into())
                    }
                    Some(Ok(_)) | None => {
                        has_progress = true;
                        self.decide_member(request, turn)
                    }
                },
                Err(explanation) => Err(explanation.into()),
            };
            match decided {
                Ok((request, placement)) => {
                    self.world.assume(&request, &placement);
                    plan.placed.push((request, placement));
                }
                Err(Undecided::Rejected(explanation)) => {
                    plan.rejected.push((request.clone(), explanation));
                }
                Err(Undecided::Suspended(suspended)) => {
                    for (request, placement) in &plan.placed {
                        self.world.forget(&request.pod_request.uid, placement);
                    }
                    if let Some(first) = first {
                        known.extend(plan.into_decided());
                        self.backlog.suspended_decisions.set_members(first, known);
                    }
                    return Err(suspended);
                }
            }
        }
        Ok(plan)
    }

    /// Decides for a pod beside those of its gang that are placed.
    fn decide_member(
        &mut self,
        mut request: Request,
        turn: &mut Turn,
    ) -> Result<(Request, Placement), Undecided> {
        let uid = &request.pod_request.uid;
        request.pod_request.searched = Some(self.backlog.suspended_decisions.searched(uid));
        let decided = self.decide_once(&request.pod_request, turn);
        request.pod_request.searched = None;
        match decided {
            Ok(placement) => Ok((request, placement)),
            Err(Undecided::Suspended(mut suspended)) => {
                let found = std::mem::take(&mut suspended.searched);
                let uid = &request.pod_request.uid;
                self.backlog.suspended_decisions.add_searched(uid, found);
                Err(suspended.into())
            }
            Err(rejected) => Err(rejected),
        }
    }

    /// Returns whether the pod still has room where an earlier turn has placed it.
    pub(super) fn still_fits(
        &self,
        request: &Request,
        placement: &Placement,
        turn: &mut Turn,
    ) -> bool {
        let policies = self.world.settings.policies;
        self.world
            .cluster
            .still_fits(&request.pod_request, placement, policies, turn)
    }

    /// Decides for the pod. Prefers a node on which all pending pods that share its claims fit.
    pub(super) fn decide(
        &self,
        pod_request: &PodRequest,
        turn: &mut Turn,
    ) -> Result<Placement, Undecided> {
        let policies = self.world.settings.policies;
        match self.place_with_sharers(pod_request, turn)? {
            Some(placement) => Ok(placement),
            None => self.world.cluster.decide_in(pod_request, policies, turn),
        }
    }

    /// Decides like [`Self::decide`], without an explanation.
    pub(super) fn place(
        &self,
        pod_request: &PodRequest,
        turn: &mut Turn,
    ) -> Result<Option<Placement>, Suspended> {
        let policies = self.world.settings.policies;
        match self.place_with_sharers(pod_request, turn)? {
            Some(placement) => Ok(Some(placement)),
            None => self.world.cluster.place_in(pod_request, policies, turn),
        }
    }

    fn place_with_sharers(
        &self,
        pod_request: &PodRequest,
        turn: &mut Turn,
    ) -> Result<Option<Placement>, Suspended> {
        let sharers = self.sharers(pod_request);
        if sharers.is_empty() {
            return Ok(None);
        }
        let mut joint = pod_request.clone();
        joint.sharers = sharers;
        joint.searched = None;
        self.world
            .cluster
            .place_in(&joint, self.world.settings.policies, turn)
    }

    /// Returns the demand of the other pending pods that share a claim with this one.
    fn sharers(&self, pod_request: &PodRequest) -> Vec<PodDemand> {
        let others: BTreeSet<String> = pod_request
            .claims
            .iter()
            .flat_map(|claim| {
                self.backlog
                    .queue
                    .users_of(&(claim.id.namespace.clone(), claim.id.name.clone()))
            })
            .filter(|other| *other != pod_request.uid)
            .collect();
        others
            .iter()
            .filter_map(|other| self.backlog.queue.get(other))
            .map(|pending| PodDemand::of(&pending.pod))
            .collect()
    }

    fn start_job(
        &mut self,
        placed: &[(Request, Placement)],
        time: &DecisionTime,
    ) -> Option<Action> {
        let mut events = Vec::new();
        let mut pods = Vec::new();
        for (request, placement) in placed {
            let uid = &request.pod_request.uid;
            let Some(pending) = self.backlog.queue.get_mut(uid) else {
                continue;
            };
            pending.phase = Phase::Allocating;
            pending.reason = None;
            pending.is_placed = true;
            let pod = pod::reference(&pending.pod);
            let writes = self.writes(request, placement, pod.clone(), time, &mut events);
            self.commitments
                .ledger
                .writing_started(writes.iter().map(|write| object_key(&write.claim.metadata)));
            self.reporter.deduplicator.forget(uid);
            pods.push(PodAllocation {
                uid: uid.clone(),
                pod,
                node: placement.node.clone(),
                writes,
            });
        }
        let first = pods.first()?;
        self.commitments.in_flight.insert(first.uid.clone(), events);
        Some(Action::Allocate(AllocationJob { pods }))
    }

    /// Returns the allocations to write for a pod, and adds the event of their success.
    fn writes(
        &mut self,
        request: &Request,
        placement: &Placement,
        pod: ObjectReference,
        time: &DecisionTime,
        events: &mut Vec<PendingEvent>,
    ) -> Vec<ClaimWrite> {
        let mut writes = Vec::new();
        let mut placed_claims = Vec::new();
        for placed in &placement.claims {
            let Some((_, claim)) = request
                .claims
                .iter()
                .find(|(_, claim)| claim.metadata.uid.as_deref() == Some(&placed.claim.uid))
            else {
                continue;
            };
            let reason = placement.reason(placed);
            placed_claims.push((claim.metadata.name.as_deref().unwrap_or_default(), placed));
            let mut allocation = allocation::build(
                claim,
                placed,
                &placement.node,
                &self.world.cluster.classes,
                time.time.clone(),
                &mut self.share_ids,
            );
            let pod_uid = request.pod_request.uid.clone();
            PlacementRecord { pod_uid, reason }.add_to(&mut allocation);
            writes.push(ClaimWrite {
                claim: claim.clone(),
                allocation,
                consumer: None,
            });
        }
        if !placed_claims.is_empty() {
            events.push(PendingEvent::allocated(pod, placement, &placed_claims));
        }
        writes
    }

    /// Reports the explanation on the pod and on its unallocated claims.
    pub(super) fn report_unschedulable(
        &mut self,
        uid: &str,
        explanation: &Explanation,
        claims: &NamedClaims,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let unfit_nodes = self.unfit_nodes(explanation);
        let Some(pending) = self.backlog.queue.get_mut(uid) else {
            return;
        };
        pending.set_unfit_nodes(unfit_nodes);
        pending.reason = Some(explanation.reason());
        let unallocated = claims
            .iter()
            .map(|(_, claim)| claim)
            .filter(|claim| !claim::is_allocated(claim))
            .map(|claim| claim::reference(claim));
        for regarding in std::iter::once(pod::reference(&pending.pod)).chain(unallocated) {
            let event = PendingEvent::unschedulable(regarding, explanation);
            actions.extend(
                self.reporter
                    .deduplicator
                    .filter(event, time.instant)
                    .map(Action::PublishEvent),
            );
        }
        self.write_first_condition(uid, explanation, time, actions);
    }
}

impl Plan {
    /// Returns what was decided for each pod.
    fn into_decided(self) -> impl Iterator<Item = (String, Result<Placement, Explanation>)> {
        let uid = |request: Request| request.pod_request.uid;
        let placed = self.placed.into_iter();
        let placed = placed.map(move |(request, placement)| (uid(request), Ok(placement)));
        let rejected = self.rejected.into_iter();
        placed.chain(rejected.map(move |(request, why)| (uid(request), Err(why))))
    }
}

impl Group {
    fn of_pod(request: Request) -> Self {
        Self {
            requests: vec![request],
            required: 1,
            placed: 0,
            gang: None,
        }
    }

    /// Returns why too few pods of the group fit.
    fn explanation(&self, plan: &Plan) -> Explanation {
        let Some((request, explanation)) = plan.rejected.first() else {
            // Unreachable: a plan without rejections places every pod.
            return Explanation::of_nodes(Vec::new());
        };
        match &self.gang {
            None => explanation.clone(),
            Some(gang) => Explanation::rejected(
                Reason::WaitingForGang,
                format!(
                    "gang {gang}: {} of {} members fit; pod {}: {}",
                    self.placed + plan.placed.len() + plan.covered,
                    self.placed + self.required,
                    request.name,
                    explanation.summary()
                ),
            ),
        }
    }
}
