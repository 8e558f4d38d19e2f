//! GpuPolicies: changes, and the condition that says whether a policy applies.

use std::collections::BTreeMap;
use std::time::Duration;

use drava_api::listed::Change;
use drava_api::policy::{APPLIED, CONFLICT, GpuPolicy, GpuPolicyStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use tokio::time::Instant;

use super::{DecisionTime, Planner};
use crate::action::{Action, PolicyStatusOutcome, PolicyStatusUpdate};

/// Time after a failed write.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// The policies in their newest known versions.
#[derive(Debug, Default)]
pub(super) struct PolicyStatuses(BTreeMap<String, Known>);

#[derive(Debug)]
struct Known {
    policy: GpuPolicy,
    is_in_flight: bool,
    /// When the status may be written again after a failure.
    not_before: Option<Instant>,
}

impl PolicyStatuses {
    /// Returns when a failed write is repeated.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.0.values().filter_map(|known| known.not_before).min()
    }

    fn observe(&mut self, policy: GpuPolicy) {
        let name = policy.metadata.name.clone().unwrap_or_default();
        let before = self.0.get(&name);
        let known = Known {
            is_in_flight: before.is_some_and(|before| before.is_in_flight),
            not_before: before.and_then(|before| before.not_before),
            policy,
        };
        self.0.insert(name, known);
    }
}

impl Planner {
    /// Observes a policy.
    pub fn policy(&mut self, change: Change<GpuPolicy>) {
        match change {
            Change::Applied(policy) => {
                self.backlog.activate_all |= self.world.cluster.upsert_policy(&policy);
                self.reporter.policy_statuses.observe(*policy);
            }
            Change::Deleted(policy) => {
                self.world.cluster.remove_policy(&policy.name);
                self.reporter.policy_statuses.0.remove(&policy.name);
                self.backlog.activate_all = true;
            }
        }
    }

    /// Observes the outcome of a write of a policy's status.
    pub fn policy_status_written(&mut self, outcome: PolicyStatusOutcome, now: Instant) {
        let Some(known) = self.reporter.policy_statuses.0.get_mut(&outcome.name) else {
            return;
        };
        known.is_in_flight = false;
        known.not_before = None;
        match outcome.policy {
            Some(policy) if policy.metadata.uid == known.policy.metadata.uid => {
                known.policy = *policy;
            }
            Some(_) => {}
            None => known.not_before = Some(now + RETRY_INTERVAL),
        }
    }

    /// Adds the writes of changed statuses.
    pub(super) fn write_policy_statuses(&mut self, time: &DecisionTime, actions: &mut Vec<Action>) {
        if self.reporter.policy_statuses.0.is_empty() {
            return;
        }
        let conflicts = self.world.cluster.policy_conflicts();
        for (name, known) in &mut self.reporter.policy_statuses.0 {
            let status = status(
                &known.policy,
                conflicts.get(name.as_str()).copied(),
                &time.time,
            );
            let is_delayed = known.not_before.is_some_and(|until| time.instant < until);
            if known.is_in_flight || is_delayed || known.policy.status.as_ref() == Some(&status) {
                continue;
            }
            known.is_in_flight = true;
            known.not_before = None;
            let metadata = &known.policy.metadata;
            actions.push(Action::WritePolicyStatus(PolicyStatusUpdate {
                name: name.clone(),
                uid: metadata.uid.clone().unwrap_or_default(),
                resource_version: metadata.resource_version.clone().unwrap_or_default(),
                status,
            }));
        }
    }
}

/// Returns the status of a policy; `winner` is the policy that applies instead. The transition time changes with the
/// condition's status.
fn status(policy: &GpuPolicy, winner: Option<&str>, time: &Time) -> GpuPolicyStatus {
    let (status, reason, message) = match winner {
        None => (
            "True",
            APPLIED,
            "no other policy of the same level precedes".to_owned(),
        ),
        Some(winner) => (
            "False",
            CONFLICT,
            format!(
                "GpuPolicy {winner} selects some of the same claims with other settings and applies to them, because its \
                 name is first; change the selector of one of them"
            ),
        ),
    };
    let mut before = policy.status.iter().flat_map(|status| &status.conditions);
    let before = before.find(|before| before.type_ == APPLIED && before.status == status);
    let generation = policy.metadata.generation;
    GpuPolicyStatus {
        observed_generation: generation,
        conditions: vec![Condition {
            last_transition_time: before.map_or_else(
                || time.clone(),
                |before| before.last_transition_time.clone(),
            ),
            message,
            observed_generation: generation,
            reason: reason.to_owned(),
            status: status.to_owned(),
            type_: APPLIED.to_owned(),
        }],
    }
}
