//! Gate removal: the last step of an allocation. kube-scheduler sees the pod only with all of its claims allocated, and a
//! member of a gang only when the gang is.
//!
//! kube-scheduler watches pods and claims separately. The gate stays until the watch of this controller has delivered the
//! allocations, so those of kube-scheduler have them before they have the pod without its gate.
//!
//! A pod of which only the gate is left is complete. It waits for no decision about others, and no time-out takes its
//! allocation. Completeness follows from the pod and its claims, so a new leader goes on where the previous one stopped.

use std::collections::BTreeSet;

use drava_allocator::explanation::Explanation;
use drava_api::reason::Reason;
use tokio::time::Instant;

use super::demand::Demand;
use super::{DecisionTime, Planner};
use crate::action::event::PendingEvent;
use crate::action::{Action, GateRemovalOutcome};
use crate::decide::queue::pending_pod::Phase;
use crate::pods::gang::{self, Gang, GangName};
use crate::pods::{pod, pod_condition};

/// Maximum number of gate removals in flight, beside the allocations.
const MAX_GATES_IN_FLIGHT: usize = 32;

impl Planner {
    /// Determines whether only the gate of a pending pod is left, after a change of the pod or of its claims.
    pub(super) fn review_gate(&mut self, uid: &str) {
        let is_complete = self.may_be_complete(uid);
        let before = self
            .backlog
            .queue
            .get(uid)
            .map(|pending| pending.is_complete);
        if before.is_some_and(|before| before != is_complete)
            && let Some(pending) = self.backlog.queue.get_mut(uid)
        {
            pending.is_complete = is_complete;
            if is_complete {
                pending.activate();
            }
        }
    }

    /// Returns whether the pod has the gate and its claims have what they need, as far as their states tell: those without
    /// allocation may be for other drivers.
    fn may_be_complete(&self, uid: &str) -> bool {
        let Some(pending) = self.backlog.queue.get(uid) else {
            return false;
        };
        if !pod::has_allocation_gate(&pending.pod) {
            return false;
        }
        let keys = pod::claim_keys(&pending.pod);
        if keys.is_empty() {
            return pending.is_placed;
        }
        let is_quiet = |key| {
            self.commitments.ledger.is_delivered(key) && !self.commitments.ledger.is_in_flight(key)
        };
        keys.iter().all(is_quiet)
            && keys
                .iter()
                .any(|key| self.commitments.ledger.is_settled(key))
    }

    /// Starts the removals of the gates of complete pods.
    pub(super) fn remove_due_gates(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let mut allocated_gangs = BTreeSet::new();
        while self.commitments.gates_in_flight.len() < MAX_GATES_IN_FLIGHT
            && let Some(uid) = self.backlog.queue.pop_complete(time.instant)
        {
            let is_complete =
                self.may_be_complete(&uid) && matches!(self.demand(&uid), Demand::Allocated);
            let Some(pending) = self.backlog.queue.get_mut(&uid) else {
                continue;
            };
            if is_complete {
                pending.phase = Phase::Unschedulable;
                self.pod_allocated(&uid, &mut allocated_gangs, time, actions);
            } else {
                // It is decided in its turn.
                pending.is_complete = false;
            }
        }
    }

    /// The claims of a pending pod are allocated, or for other drivers: kube-scheduler takes over, unless the gang of the pod
    /// is not allocated. `allocated_gangs` are known to be.
    pub(super) fn pod_allocated(
        &mut self,
        uid: &str,
        allocated_gangs: &mut BTreeSet<GangName>,
        time: &DecisionTime,
        actions: &mut Vec<Action>,
    ) {
        let Some(pending) = self.backlog.queue.get(uid) else {
            return;
        };
        if pod::has_allocation_gate(&pending.pod)
            && let Some(name) = pending.gang()
            && !allocated_gangs.contains(&name)
        {
            if let Err(explanation) = self.allocated_gang(uid) {
                if let Some(pending) = self.backlog.queue.get_mut(uid) {
                    pending.is_complete = false;
                }
                return self.report_unschedulable(uid, &explanation, &Vec::new(), time, actions);
            }
            self.complete_members(&name);
            allocated_gangs.insert(name);
        }
        if let Some(pending) = self.backlog.queue.get(uid) {
            let waiting = pod_condition::waiting(&pending.pod, self.reporter.conditions.get(uid));
            self.reporter.newly_allocated.extend(waiting);
        }
        actions.extend(self.remove_gate(uid));
    }

    /// Returns why the gang of the pod may not start, if too few of its members are allocated.
    fn allocated_gang(&self, uid: &str) -> Result<(), Explanation> {
        let pending = self.backlog.queue.get(uid);
        let gang = pending.map_or(Ok(None), |pending| gang::of(&pending.pod));
        let invalid =
            |error: gang::GangError| Explanation::rejected(Reason::InvalidGang, error.to_string());
        let Some(Gang { name, min }) = gang.map_err(invalid)? else {
            return Ok(());
        };
        if self.world.live_pods.has_started(&name) {
            return Ok(());
        }
        let members = self.world.live_pods.members(&name);
        let is_allocated = |uid: &str| match self.backlog.queue.get(uid) {
            Some(pending) => {
                let keys = pod::claim_keys(&pending.pod);
                let is_settled = |key| self.commitments.ledger.is_settled(key);
                !keys.is_empty() && keys.iter().all(is_settled)
                    || matches!(self.demand(uid), Demand::Allocated)
            }
            None => false,
        };
        let allocated = members
            .filter(|(uid, pod)| {
                let is_outside =
                    pod.is_bound || pod.claims.is_empty() && self.backlog.queue.get(uid).is_none();
                is_outside || is_allocated(uid)
            })
            .count();
        if allocated >= min {
            return Ok(());
        }
        let message = format!("gang {name}: {allocated} of {min} members are allocated");
        Err(Explanation::rejected(Reason::WaitingForGang, message))
    }

    /// Makes the members complete that waited for the rest of their gang.
    fn complete_members(&mut self, gang: &GangName) {
        let members: Vec<String> = self.backlog.queue.uids_of(gang).cloned().collect();
        for member in members {
            let waits = self.backlog.queue.get(&member).is_some_and(|pending| {
                !pending.is_complete && pending.phase == Phase::Unschedulable
            });
            if waits
                && self.may_be_complete(&member)
                && let Some(pending) = self.backlog.queue.get_mut(&member)
            {
                pending.is_complete = true;
                pending.activate();
            }
        }
    }

    /// Returns the removal of a pending pod's gate, if it has the gate and the watch has delivered its claims.
    fn remove_gate(&mut self, uid: &str) -> Option<Action> {
        let pending = self.backlog.queue.get_mut(uid)?;
        let mut claims = pod::claim_keys(&pending.pod).into_iter();
        if !pod::has_allocation_gate(&pending.pod)
            || !claims.all(|key| self.commitments.ledger.is_delivered(&key))
        {
            return None;
        }
        pending.phase = Phase::Allocating;
        let pod = pod::reference(&pending.pod);
        self.commitments.gates_in_flight.insert(uid.to_owned());
        Some(Action::RemoveGate(pod))
    }

    /// Observes the outcome of a gate removal. kube-scheduler may have rejected the pod meanwhile.
    pub fn gate_removed(&mut self, outcome: GateRemovalOutcome, now: Instant) {
        self.commitments.gates_in_flight.remove(&outcome.pod_uid);
        let Some(pending) = self.backlog.queue.get_mut(&outcome.pod_uid) else {
            return;
        };
        let is_waiting = pending.phase == Phase::Allocating;
        match outcome.failure {
            None => {
                pending.remove_gate();
                if is_waiting {
                    pending.phase = Phase::Unschedulable;
                }
                for key in pod::claim_keys(&pending.pod) {
                    self.commitments.ledger.restart_timeout(&key, now);
                }
            }
            Some(failure) => {
                if is_waiting {
                    pending.back_off(now);
                }
                if failure.is_reportable {
                    self.reporter
                        .state_events
                        .push(PendingEvent::allocation_failed(
                            pod::reference(&pending.pod),
                            failure.message,
                        ));
                }
            }
        }
    }
}
