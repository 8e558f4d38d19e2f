//! The condition `gpu.drava.dev/Allocated` of a pod: why the pod waits for its GPUs, as long as it does. The event with the
//! same text ends after an hour.

use drava_api::names::ALLOCATED_CONDITION;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::pod;

/// Reason of the condition when the claims of the pod are allocated.
const ALLOCATED: &str = "Allocated";

/// A condition to write.
#[derive(Debug, Clone, PartialEq)]
pub struct PodConditionUpdate {
    /// The pod.
    pub pod: ObjectReference,
    /// Its new condition.
    pub condition: PodCondition,
}

fn observed(pod: &Pod) -> Option<&PodCondition> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let mut own = conditions
        .iter()
        .filter(|condition| condition.type_ == ALLOCATED_CONDITION);
    own.next()
}

/// Returns whether the pod has the condition with status `False`.
pub(crate) fn is_false(pod: &Pod) -> bool {
    observed(pod).is_some_and(|condition| condition.status == "False")
}

/// Returns the condition of a pod that waits for this reason; `None` if it has this condition.
pub(crate) fn unallocated(
    pod: &Pod,
    reason: &str,
    message: &str,
    now: Timestamp,
) -> Option<PodConditionUpdate> {
    let before = observed(pod);
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
    let pod = pod::reference(pod);
    Some(PodConditionUpdate { pod, condition })
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
    PodConditionUpdate { pod, condition }
}
