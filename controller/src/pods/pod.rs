//! Properties of a Pod.

use drava_allocator::object::ObjectKey;
use drava_allocator::pod;
use drava_api::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};

use crate::pods::{gang, pod_group};

/// `preemptionPolicy` of a pod or PodGroup that preempts no other pods.
pub(crate) const NEVER: &str = "Never";

/// Returns whether the pod is pending and requests devices or belongs to a gang. Its scheduler may be one that this
/// controller does not serve.
/// A pod with a gate of another controller is not pending: that controller decides first.
pub(crate) fn is_pending(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending");
    let has_foreign_gate = gates(pod).any(|gate| gate != names::ALLOCATION_GATE);
    let has_claims = spec
        .resource_claims
        .as_ref()
        .is_some_and(|claims| !claims.is_empty());
    phase == "Pending"
        && pod.metadata.deletion_timestamp.is_none()
        && !has_foreign_gate
        && (has_claims
            || pod::node(pod).is_none()
                && (pod::extended_resources(pod).next().is_some() || gang::name_of(pod).is_some()))
}

/// Returns whether the pod has the gate that this controller removes after the allocation.
pub(crate) fn has_allocation_gate(pod: &Pod) -> bool {
    gates(pod).any(|gate| gate == names::ALLOCATION_GATE)
}

/// Returns the names of the scheduling gates.
fn gates(pod: &Pod) -> impl Iterator<Item = &str> {
    let spec = pod.spec.iter();
    spec.flat_map(|spec| spec.scheduling_gates.iter().flatten())
        .map(|gate| gate.name.as_str())
}

/// Returns namespace and name of the known claim objects of the pod.
pub(crate) fn claim_keys(pod: &Pod) -> Vec<ObjectKey> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    pod::claims(pod)
        .filter_map(|(_, object)| Some((namespace.clone(), object?.to_owned())))
        .collect()
}

/// Returns a reference to a pod for events.
pub(crate) fn reference(pod: &Pod) -> ObjectReference {
    let metadata = &pod.metadata;
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        resource_version: metadata.resource_version.clone(),
        uid: metadata.uid.clone(),
        field_path: None,
    }
}

/// Returns when the pod was bound to its node, from the condition `PodScheduled`.
pub(crate) fn bound_at(pod: &Pod) -> Option<Timestamp> {
    true_since(pod, "PodScheduled")
}

/// Returns since when the pod is ready; `None` if it is not.
pub(crate) fn ready_since(pod: &Pod) -> Option<Timestamp> {
    true_since(pod, "Ready")
}

fn true_since(pod: &Pod, kind: &str) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let mut own = conditions
        .iter()
        .filter(|condition| condition.type_ == kind && condition.status == "True");
    Some(own.next()?.last_transition_time.as_ref()?.0)
}

/// Returns when a finished pod ended: when its conditions changed last. Its containers are no longer ready then.
pub(crate) fn ended_at(pod: &Pod) -> Option<Timestamp> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let changes = conditions
        .iter()
        .filter_map(|condition| Some(condition.last_transition_time.as_ref()?.0));
    changes.max()
}

/// Returns the priority of the pod: that of its PodGroup, or its own.
pub(crate) fn priority(pod: &Pod) -> i32 {
    pod_group::priority(pod).unwrap_or_else(|| own_priority(pod))
}

/// Returns `spec.priority`, which the API server sets from the PriorityClass.
pub(crate) fn own_priority(pod: &Pod) -> i32 {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.priority).unwrap_or_default()
}

/// Returns whether the pod ends without being deleted. The API server sets `Always` if the pod says nothing.
pub(crate) fn ends_by_itself(pod: &Pod) -> bool {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.restart_policy.as_deref()) != Some("Always")
}

/// A version of the pod template of a Deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Revision {
    /// Name of the Deployment.
    pub(crate) deployment: String,
    /// Hash of the template.
    pub(crate) template_hash: String,
}

/// Returns the revision of a Deployment's pod, from the name of its ReplicaSet.
pub(crate) fn revision(pod: &Pod) -> Option<Revision> {
    let hash = pod.metadata.labels.as_ref()?.get("pod-template-hash")?;
    let mut owners = pod.metadata.owner_references.iter().flatten();
    let owner =
        owners.find(|owner| owner.kind == "ReplicaSet" && owner.controller == Some(true))?;
    let deployment = owner.name.strip_suffix(hash)?.strip_suffix('-')?;
    Some(Revision {
        deployment: deployment.to_owned(),
        template_hash: hash.clone(),
    })
}

/// Returns whether the pod may preempt pods of lower priority: its PodGroup says so, or the pod.
pub(crate) fn may_preempt(pod: &Pod) -> bool {
    if let Some(may_preempt) = pod_group::may_preempt(pod) {
        return may_preempt;
    }
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.preemption_policy.as_deref()) != Some(NEVER)
}

/// Returns `namespace/name`.
pub(crate) fn qualified_name(reference: &ObjectReference) -> String {
    let part = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("{}/{}", part(&reference.namespace), part(&reference.name))
}
