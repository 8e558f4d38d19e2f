//! Properties of a ResourceClaim.

use drava_api::condition::{ConditionReason, ConditionType};
use drava_api::placement_record::PlacementRecord;
pub(crate) use drava_explanation::growth::{base_uid as base, is_allocated};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};

use crate::pods::gang::GangName;
use crate::pods::gang::PodGroupApi;

/// Returns whether a pod has reserved the claim.
pub(crate) fn is_reserved(claim: &ResourceClaim) -> bool {
    claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref())
        .is_some_and(|consumers| !consumers.is_empty())
}

/// Returns the UIDs of the pods that have reserved the claim.
pub(crate) fn consumers(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let status = claim.status.iter();
    status
        .flat_map(|status| status.reserved_for.iter().flatten())
        .filter(|consumer| consumer.resource == "pods")
        .map(|consumer| consumer.uid.as_str())
}

/// Returns the gangs, as PodGroups of Kubernetes, that have reserved the claim: all their pods may use it.
pub(crate) fn consuming_gangs(claim: &ResourceClaim) -> impl Iterator<Item = GangName> {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let status = claim.status.iter();
    status
        .flat_map(|status| status.reserved_for.iter().flatten())
        .filter(|consumer| consumer.resource == "podgroups")
        .map(move |consumer| GangName::of_group(PodGroupApi::Kubernetes, namespace, &consumer.name))
}

/// Returns the UID of the pod for which this controller has allocated the claim.
pub(crate) fn allocated_for(claim: &ResourceClaim) -> Option<&str> {
    PlacementRecord::pod_uid(claim)
}

/// Returns whether the claim is a companion that is being deleted, and the node driver reports of each of its devices that the
/// shares of the base no longer have it.
pub(crate) fn is_given_back(claim: &ResourceClaim) -> bool {
    let Some(status) = &claim.status else {
        return false;
    };
    let allocation = status.allocation.as_ref();
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let mut results = devices
        .iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let is_released = |result: &DeviceRequestAllocationResult| {
        let mut reported = status.devices.iter().flatten();
        let reported = reported.find(|reported| {
            (
                &reported.driver,
                &reported.pool,
                &reported.device,
                &reported.share_id,
            ) == (
                &result.driver,
                &result.pool,
                &result.device,
                &result.share_id,
            )
        });
        let conditions = reported
            .iter()
            .flat_map(|reported| reported.conditions.iter().flatten());
        conditions.into_iter().any(|condition| {
            condition.type_ == ConditionType::Granted.as_str()
                && condition.reason == ConditionReason::Released.as_str()
        })
    };
    base(claim).is_some()
        && claim.metadata.deletion_timestamp.is_some()
        && devices.is_some()
        && results.all(is_released)
}

/// Returns an annotation of the claim.
pub(crate) fn annotation<'a>(claim: &'a ResourceClaim, name: &str) -> Option<&'a str> {
    claim
        .metadata
        .annotations
        .as_ref()?
        .get(name)
        .map(String::as_str)
}

/// Returns the device classes that the requests of the claim name.
pub(crate) fn classes(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let devices = claim.spec.iter().flat_map(|spec| &spec.devices);
    let requests = devices.flat_map(|devices| devices.requests.iter().flatten());
    requests.flat_map(|request| {
        let exactly = request
            .exactly
            .iter()
            .map(|exactly| &exactly.device_class_name);
        let alternatives = request.first_available.iter().flatten();
        exactly
            .chain(alternatives.map(|alternative| &alternative.device_class_name))
            .map(String::as_str)
    })
}

/// Returns whether `claim` is an older version than `known`; resource versions are ordered numbers (KEP-5504).
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

/// Returns a reference to a claim for events.
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

#[cfg(test)]
mod tests;
