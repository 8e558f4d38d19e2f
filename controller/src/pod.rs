//! Properties of a Pod.

use drava_allocator::cluster::ObjectKey;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};

/// Returns the claims of a pod: the name in the pod, and the name of the claim object if it is known. Entries that need
/// no claim are skipped.
pub(crate) fn claims(pod: &Pod) -> impl Iterator<Item = (&str, Option<&str>)> {
    let statuses = pod
        .status
        .as_ref()
        .and_then(|status| status.resource_claim_statuses.as_deref())
        .unwrap_or_default();
    let entries = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.resource_claims.as_deref())
        .unwrap_or_default();
    entries.iter().filter_map(move |entry| {
        if let Some(name) = &entry.resource_claim_name {
            return Some((entry.name.as_str(), Some(name.as_str())));
        }
        match statuses.iter().find(|status| status.name == entry.name) {
            // The template generates no claim.
            Some(status) if status.resource_claim_name.is_none() => None,
            Some(status) => Some((entry.name.as_str(), status.resource_claim_name.as_deref())),
            None => Some((entry.name.as_str(), None)),
        }
    })
}

/// Returns whether this controller allocates the claims of the pod.
pub(crate) fn is_eligible(pod: &Pod, schedulers: &[String]) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Pending");
    let scheduler = spec
        .scheduler_name
        .as_deref()
        .unwrap_or("default-scheduler");
    let is_gated = spec
        .scheduling_gates
        .as_ref()
        .is_some_and(|gates| !gates.is_empty());
    // A pod with spec.nodeName bypasses all schedulers; kubelet waits for its claims.
    let has_node = spec.node_name.as_ref().is_some_and(|node| !node.is_empty());
    phase == "Pending"
        && pod.metadata.deletion_timestamp.is_none()
        && spec
            .resource_claims
            .as_ref()
            .is_some_and(|claims| !claims.is_empty())
        && !is_gated
        && (has_node || schedulers.iter().any(|served| served == scheduler))
}

/// Returns namespace and name of the known claim objects of the pod.
pub(crate) fn claim_keys(pod: &Pod) -> Vec<ObjectKey> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    claims(pod)
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
