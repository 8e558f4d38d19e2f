//! What a ResourceClaim says of itself: facts that several decisions ask for.

use drava_api::names;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

/// Whether the claim has devices.
pub(crate) fn is_allocated(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .is_some_and(|status| status.allocation.is_some())
}

/// Whether a pod has reserved the claim.
pub(crate) fn is_reserved(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref())
        .is_some_and(|consumers| !consumers.is_empty())
}

/// UID of the pod for which this controller has allocated the claim.
pub(crate) fn allocated_for(claim: &ResourceClaim) -> Option<&str> {
    claim
        .metadata
        .annotations
        .as_ref()?
        .get(names::ALLOCATED_FOR_ANNOTATION)
        .map(String::as_str)
}

/// A claim that was made for a pod is for that pod alone; others are for whoever names them.
pub(crate) fn belongs_to(claim: &ResourceClaim, pod: &Pod) -> bool {
    let owners = claim
        .metadata
        .owner_references
        .as_deref()
        .unwrap_or_default();
    owners
        .iter()
        .filter(|owner| owner.kind == "Pod" && owner.controller == Some(true))
        .all(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref())
}

/// Whether `claim` is an older version than `known`; resource versions are ordered numbers (KEP-5504).
pub(crate) fn is_older(claim: &ResourceClaim, known: &ResourceClaim) -> bool {
    let version = |claim: &ResourceClaim| {
        claim
            .metadata
            .resource_version
            .as_deref()?
            .parse::<u64>()
            .ok()
    };
    matches!((version(claim), version(known)), (Some(new), Some(old)) if new < old)
}

/// Reference to a claim for an event.
pub(crate) fn reference(claim: &ResourceClaim) -> ObjectReference {
    ObjectReference {
        api_version: Some("resource.k8s.io/v1".to_owned()),
        kind: Some("ResourceClaim".to_owned()),
        name: claim.metadata.name.clone(),
        namespace: claim.metadata.namespace.clone(),
        uid: claim.metadata.uid.clone(),
        resource_version: claim.metadata.resource_version.clone(),
        field_path: None,
    }
}
