//! GpuPolicies: changes, and the condition that says whether a policy applies.

use drava_api::condition_state::ConditionState;
use drava_api::listed::Change;
use drava_api::policy::{APPLIED, CONFLICT, GpuPolicy, GpuPolicyStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use tokio::time::Instant;

use super::{DecisionTime, Planner};
use crate::action::Action;
use crate::action::status::StatusOutcome;

impl Planner {
    /// Observes a policy.
    pub fn policy(&mut self, change: Change<GpuPolicy>) {
        self.backlog.wake(self.world.policy(&change));
        match change {
            Change::Applied(policy) => self.reporter.policy_statuses.observe(*policy),
            Change::Deleted(policy) => self.reporter.policy_statuses.remove(&policy.name),
        }
    }

    /// Observes the outcome of a write of a policy's status.
    pub fn policy_status_written(&mut self, outcome: StatusOutcome<GpuPolicy>, now: Instant) {
        self.reporter.policy_statuses.written(outcome, now);
    }

    /// Adds the writes of changed statuses.
    pub(super) fn write_policy_statuses(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        let conflicts = self.world.cluster.policy_conflicts();
        let due = self.reporter.policy_statuses.due(time.instant, |policy| {
            let name = policy.metadata.name.as_deref().unwrap_or_default();
            let winner = conflicts.get(name).map(String::as_str);
            Some(status(policy, winner, &time.time))
        });
        actions.extend(due.into_iter().map(Action::WritePolicyStatus));
    }
}

/// Returns the status of a policy; `winner` is the policy that applies instead.
fn status(policy: &GpuPolicy, winner: Option<&str>, time: &Time) -> GpuPolicyStatus {
    let state = match winner {
        None => ConditionState {
            is_true: true,
            reason: APPLIED,
            message: "no other policy of the same level precedes".to_owned(),
        },
        Some(winner) => ConditionState {
            is_true: false,
            reason: CONFLICT,
            message: format!(
                "GpuPolicy {winner} selects some of the same claims with other settings and applies to them, because its \
                 name is first; change the selector of one of them"
            ),
        },
    };
    let before = policy.status.as_ref();
    let before = before.map_or(&[][..], |status| &status.conditions);
    let generation = policy.metadata.generation;
    GpuPolicyStatus {
        observed_generation: generation,
        conditions: vec![state.condition(APPLIED, before, generation, time)],
    }
}
