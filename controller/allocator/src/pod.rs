//! Properties of a Pod.

use k8s_openapi::api::core::v1::{Container, Pod};

/// Scheduler of a pod without `spec.schedulerName`.
pub const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Returns the claims of a pod: the name in the pod, and the name of the claim object if it is known. Entries that need
/// no claim are skipped.
pub fn claims(pod: &Pod) -> impl Iterator<Item = (&str, Option<&str>)> {
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

/// Returns the node to which the pod is bound.
#[must_use]
pub fn node(pod: &Pod) -> Option<&str> {
    let node = pod.spec.as_ref()?.node_name.as_deref()?;
    (!node.is_empty()).then_some(node)
}

/// Returns the name of the pod's scheduler.
#[must_use]
pub fn scheduler(pod: &Pod) -> &str {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.scheduler_name.as_deref())
        .unwrap_or(DEFAULT_SCHEDULER)
}

/// Returns whether this controller allocates for the pod's scheduler. A pod with `spec.nodeName` bypasses all schedulers;
/// kubelet waits for its claims.
#[must_use]
pub fn is_served(pod: &Pod, schedulers: &[String]) -> bool {
    node(pod).is_some() || schedulers.iter().any(|served| served == scheduler(pod))
}

/// Returns whether a scheduler has tried the pod and found no node.
#[must_use]
pub fn is_unschedulable(pod: &Pod) -> bool {
    rejection(pod).is_some_and(|(reason, _)| reason == "Unschedulable")
}

/// Returns reason and message with which a scheduler has rejected the pod.
#[must_use]
pub fn rejection(pod: &Pod) -> Option<(&str, &str)> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let rejected = conditions
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    // The API server itself sets the reason of a gated pod.
    let reason = rejected
        .reason
        .as_deref()
        .filter(|reason| *reason != "SchedulingGated")?;
    Some((reason, rejected.message.as_deref().unwrap_or_default()))
}

/// Returns the init containers and the containers.
pub(crate) fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.iter().flat_map(|spec| {
        spec.init_containers
            .iter()
            .flatten()
            .chain(&spec.containers)
    })
}

/// Returns the extended resources that the containers request, each with the name of the container.
pub fn extended_resources(pod: &Pod) -> impl Iterator<Item = (&str, &str)> {
    containers(pod).flat_map(|container| {
        let resources = container.resources.iter();
        resources
            .flat_map(|resources| [&resources.requests, &resources.limits])
            .flatten()
            .flat_map(|requests| requests.keys())
            .filter(|name| is_extended(name))
            .map(|name| (container.name.as_str(), name.as_str()))
    })
}

/// Returns whether a resource is an extended one: its name has a domain outside `kubernetes.io`, or belongs to a device
/// class (KEP-5004).
pub(crate) fn is_extended(resource: &str) -> bool {
    resource.starts_with(IMPLICIT_RESOURCE_PREFIX)
        || resource.split_once('/').is_some_and(|(domain, _)| {
            domain != "kubernetes.io"
                && !domain.ends_with(".kubernetes.io")
                && !domain.starts_with("requests.")
        })
}

/// Prefix of the implicit extended resource of a device class (KEP-5004).
pub(crate) const IMPLICIT_RESOURCE_PREFIX: &str = "deviceclass.resource.kubernetes.io/";
