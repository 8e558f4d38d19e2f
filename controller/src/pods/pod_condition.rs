//! Conditions of pods. `gpu.drava.dev/Allocated`: why the pod waits for its GPUs, as long as it does; the event with the same text
//! ends after an hour. `gpu.drava.dev/Running`: whether its programs stand still, because its share is suspended. Its True is ready,
//! so that a readiness gate can name it.

use drava_api::names::{ALLOCATED_CONDITION, RUNNING_CONDITION};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::pods::pod;

/// Reason of the condition when the claims of the pod are allocated.
const ALLOCATED: &str = "Allocated";

/// Reasons of the other condition.
const RUNNING: &str = "Running";
const SUSPENDED: &str = "Suspended";

/// A condition to write.
#[derive(Debug, Clone, PartialEq)]
pub struct PodConditionUpdate {
    /// The pod.
    pub pod: ObjectReference,
    /// Its new condition.
    pub condition: PodCondition,
    /// Creation of a pod whose first condition this is: why it waits.
    pub waits_since: Option<Timestamp>,
}

fn observed(pod: &Pod) -> Option<&PodCondition> {
    of_type(pod, ALLOCATED_CONDITION)
}

fn of_type<'a>(pod: &'a Pod, name: &str) -> Option<&'a PodCondition> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == name)
}

/// Returns the condition of whether the programs of the pod run.
pub(crate) fn observed_running(pod: &Pod) -> Option<&PodCondition> {
    of_type(pod, RUNNING_CONDITION)
}

/// Returns whether the pod is ready only while its programs run.
pub(crate) fn is_running_gate(pod: &Pod) -> bool {
    let gates = pod.spec.iter().flat_map(|spec| &spec.readiness_gates);
    let mut gates = gates.flatten();
    gates.any(|gate| gate.condition_type == RUNNING_CONDITION)
}

/// Returns the pod if its condition says that its claims are not allocated. A condition in flight replaces the observed one.
pub(crate) fn waiting(pod: &Pod, in_flight: Option<&PodCondition>) -> Option<ObjectReference> {
    let is_false = in_flight.or_else(|| observed(pod))?.status == "False";
    is_false.then(|| pod::reference(pod))
}

/// Returns whether two conditions say the same.
pub(crate) fn is_same(left: &PodCondition, right: &PodCondition) -> bool {
    left.status == right.status && left.reason == right.reason && left.message == right.message
}

/// Returns whether the pod has this condition.
pub(crate) fn has(pod: &Pod, condition: &PodCondition) -> bool {
    of_type(pod, &condition.type_).is_some_and(|observed| is_same(observed, condition))
}

/// Returns whether two versions of a pod differ in these conditions only.
pub(crate) fn is_only_change(before: &Pod, after: &Pod) -> bool {
    let without = |pod: &Pod| {
        let mut pod = pod.clone();
        pod.metadata.resource_version = None;
        pod.metadata.managed_fields = None;
        let status = pod.status.get_or_insert_default();
        let conditions = status.conditions.get_or_insert_default();
        let own = [ALLOCATED_CONDITION, RUNNING_CONDITION];
        conditions.retain(|condition| !own.contains(&condition.type_.as_str()));
        pod
    };
    let own = |pod| (observed(pod), observed_running(pod));
    own(before) != own(after) && without(before) == without(after)
}

/// Returns the condition of a pod that waits for this reason; `None` if it has this condition, or it is in flight.
pub(crate) fn unallocated(
    pod: &Pod,
    in_flight: Option<&PodCondition>,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Option<PodConditionUpdate> {
    let before = in_flight.or_else(|| observed(pod));
    let since = match before {
        Some(before) if before.status == "False" => {
            if before.message.as_deref() == Some(message) {
                return None;
            }
            before.last_transition_time.clone()
        }
        Some(_) => None,
        // It was never allocated.
        None => pod.metadata.creation_timestamp.clone(),
    };
    let condition = PodCondition {
        type_: ALLOCATED_CONDITION.to_owned(),
        status: "False".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_transition_time: Some(since.unwrap_or(Time(now))),
        ..PodCondition::default()
    };
    let created = pod.metadata.creation_timestamp.as_ref();
    Some(PodConditionUpdate {
        pod: pod::reference(pod),
        condition,
        waits_since: created
            .filter(|_| observed(pod).is_none())
            .map(|time| time.0),
    })
}

/// Returns the condition of a pod that waits, with the time of this check alone changed. The change makes other controllers
/// look at the pod again.
pub(crate) fn probed(
    pod: &Pod,
    in_flight: Option<&PodCondition>,
    now: Timestamp,
) -> Option<PodConditionUpdate> {
    let before = in_flight.or_else(|| observed(pod))?;
    Some(PodConditionUpdate {
        pod: pod::reference(pod),
        condition: PodCondition {
            last_probe_time: Some(Time(now)),
            ..before.clone()
        },
        waits_since: None,
    })
}

/// Returns the condition of a pod whose claims are allocated.
pub(crate) fn allocated(pod: ObjectReference, now: Timestamp) -> PodConditionUpdate {
    let condition = PodCondition {
        type_: ALLOCATED_CONDITION.to_owned(),
        status: "True".to_owned(),
        reason: Some(ALLOCATED.to_owned()),
        // Replaces that of the wait.
        message: Some(String::new()),
        last_transition_time: Some(Time(now)),
        ..PodCondition::default()
    };
    PodConditionUpdate {
        pod,
        condition,
        waits_since: None,
    }
}

/// Returns the condition of whether the programs of a pod run; `None` if `before` says the same. `suspended` says for what its
/// share is suspended.
pub(crate) fn running(
    pod: ObjectReference,
    before: Option<&PodCondition>,
    suspended: Option<&str>,
    now: Timestamp,
) -> Option<PodConditionUpdate> {
    let (status, reason) = match suspended {
        Some(_) => ("False", SUSPENDED),
        None => ("True", RUNNING),
    };
    let same_status = before.filter(|before| before.status == status);
    let since = same_status.and_then(|before| before.last_transition_time.clone());
    let condition = PodCondition {
        type_: RUNNING_CONDITION.to_owned(),
        status: status.to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(suspended.unwrap_or_default().to_owned()),
        last_transition_time: Some(since.unwrap_or(Time(now))),
        ..PodCondition::default()
    };
    let is_said = before.is_some_and(|before| is_same(before, &condition));
    (!is_said).then_some(PodConditionUpdate {
        pod,
        condition,
        waits_since: None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::fixture::object;

    fn pod_with(conditions: &serde_json::Value) -> Pod {
        object(json!({
            "metadata": {"name": "p", "uid": "p", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "status": {"phase": "Pending", "conditions": conditions},
        }))
    }

    fn condition(status: &str, message: &str) -> serde_json::Value {
        json!({
            "type": ALLOCATED_CONDITION, "status": status, "message": message,
            "lastTransitionTime": "2026-01-01T00:00:10Z",
        })
    }

    #[test]
    fn transition_time_changes_with_the_status_only() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let update = |conditions: &serde_json::Value| {
            unallocated(&pod_with(conditions), None, "GpuUnschedulable", "full", now)
        };
        let since = |conditions: &serde_json::Value| {
            let update = update(conditions)?;
            Some(update.condition.last_transition_time?.0.to_string())
        };
        let at = |time: &str| Some(time.to_owned());
        assert_eq!(since(&json!([])), at("2026-01-01T00:00:00Z"), "creation");
        assert_eq!(
            since(&json!([condition("False", "another reason")])),
            at("2026-01-01T00:00:10Z")
        );
        assert_eq!(since(&json!([condition("False", "full")])), None);
        assert_eq!(
            since(&json!([condition("True", "")])),
            at("2026-01-01T00:01:00Z"),
            "the allocation was lost"
        );
    }

    #[test]
    fn first_condition_has_the_start_of_the_wait() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let waits_since = |conditions: &serde_json::Value| {
            unallocated(&pod_with(conditions), None, "GpuUnschedulable", "full", now)?.waits_since
        };
        let created = "2026-01-01T00:00:00Z".parse().unwrap();
        assert_eq!(waits_since(&json!([])), Some(created));
        assert_eq!(waits_since(&json!([condition("False", "other")])), None);
        assert_eq!(waits_since(&json!([condition("True", "")])), None);
    }

    #[test]
    fn distinguishes_own_change_from_others() {
        let scheduled = json!({"type": "PodScheduled", "status": "False"});
        let before = pod_with(&json!([scheduled]));
        let mut own = pod_with(&json!([scheduled, condition("False", "full")]));
        own.metadata.resource_version = Some("2".to_owned());
        assert!(is_only_change(&before, &own));
        assert!(!is_only_change(&before, &before), "a repeated version");
        assert!(!is_only_change(
            &before,
            &pod_with(&json!([condition("False", "full")]))
        ));
        own.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        assert!(!is_only_change(&before, &own));
    }
}
