//! Gate removal: the last step of an allocation. kube-scheduler sees the pod only with all of its claims allocated.
//!
//! kube-scheduler watches pods and claims separately. The gate stays until the watch of this controller has delivered the
//! allocations, so those of kube-scheduler have them before they have the pod without its gate.
//!
//! The step is due whenever a gated pod needs no allocation, so a new leader repeats it for the pods of the previous one.

use tokio::time::Instant;

use super::Planner;
use crate::action::{Action, GateRemoval, GateRemovalOutcome};
use crate::event::PendingEvent;
use crate::pod;
use crate::queue::pending_pod::Phase;

impl Planner {
    /// Returns the removal of a pending pod's gate, if it has the gate and the watch has delivered its claims.
    pub(super) fn remove_gate(&mut self, uid: &str) -> Option<Action> {
        let pending = self.queue.get_mut(uid)?;
        let mut claims = pod::claim_keys(&pending.pod).into_iter();
        if !pod::has_allocation_gate(&pending.pod)
            || !claims.all(|key| self.ledger.is_delivered(&key))
        {
            return None;
        }
        pending.phase = Phase::Allocating;
        let pod = pod::reference(&pending.pod);
        self.gates_in_flight.insert(uid.to_owned());
        Some(Action::RemoveGate(GateRemoval { pod }))
    }

    /// Observes the outcome of a gate removal.
    pub fn gate_removed(&mut self, outcome: GateRemovalOutcome, now: Instant) {
        self.gates_in_flight.remove(&outcome.pod_uid);
        let Some(pending) = self.queue.get_mut(&outcome.pod_uid) else {
            return;
        };
        match outcome.failure {
            None => {
                pending.phase = Phase::Unschedulable;
                for key in pod::claim_keys(&pending.pod) {
                    self.ledger.restart_timeout(&key, now);
                }
            }
            Some(failure) => {
                pending.back_off(now);
                if failure.is_reportable {
                    self.state_events.push(PendingEvent::allocation_failed(
                        pod::reference(&pending.pod),
                        failure.message,
                    ));
                }
            }
        }
    }
}
