//! Pods that use a claim. Pure.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;

/// A pod that uses a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// A container that uses a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Name of the container.
    pub container: String,
    /// Position in the pod: containers, then init containers.
    pub index: usize,
    /// Names of the requests of the claim that the container uses; empty for all.
    pub requests: Vec<String>,
}

/// Returns the pods that reserve a claim.
#[must_use]
pub fn reserving_pods(claim: &ResourceClaim) -> Vec<PodRef> {
    let status = claim.status.iter();
    let consumers = status.filter_map(|status| status.reserved_for.as_ref());
    let namespace = claim.metadata.namespace.clone().unwrap_or_default();
    consumers
        .flatten()
        .filter(|consumer| consumer.resource == "pods")
        .map(|consumer| PodRef {
            namespace: namespace.clone(),
            name: consumer.name.clone(),
            uid: consumer.uid.clone(),
        })
        .collect()
}

/// Returns the containers and init containers of a pod that use the claim with this name.
#[must_use]
pub fn users(pod: &Pod, claim: &str) -> Vec<User> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    // The spec names claims that exist already; the status names claims that were generated from a template.
    let status = pod.status.iter();
    let generated = status.flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let generated = generated
        .filter(|status| status.resource_claim_name.as_deref() == Some(claim))
        .map(|status| status.name.as_str());
    let direct = spec.resource_claims.iter().flatten();
    let direct = direct
        .filter(|entry| entry.resource_claim_name.as_deref() == Some(claim))
        .map(|entry| entry.name.as_str());
    let names: BTreeSet<&str> = direct.chain(generated).collect();
    let init_containers = spec.init_containers.iter().flatten();
    let containers = spec.containers.iter().chain(init_containers);
    containers
        .enumerate()
        .filter_map(|(index, container)| user(index, container, &names))
        .collect()
}

/// Returns the other claims of the containers that use the claim with this name, with the name of the container.
#[must_use]
pub fn beside(pod: &Pod, claim: &str) -> Vec<(String, String)> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let status = pod.status.iter();
    let generated = status.flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let generated = generated
        .filter_map(|status| Some((status.name.as_str(), status.resource_claim_name.as_deref()?)));
    let direct = spec.resource_claims.iter().flatten();
    let direct = direct
        .filter_map(|entry| Some((entry.name.as_str(), entry.resource_claim_name.as_deref()?)));
    let names: BTreeMap<&str, &str> = direct.chain(generated).collect();
    let init_containers = spec.init_containers.iter().flatten();
    let containers = spec.containers.iter().chain(init_containers);
    let beside = containers.flat_map(|container| {
        let resources = container.resources.iter();
        let claims = resources.flat_map(|resources| resources.claims.iter().flatten());
        let mut claims: BTreeSet<&str> = claims
            .filter_map(|used| names.get(used.name.as_str()).copied())
            .collect();
        let others = match claims.remove(claim) {
            true => claims,
            false => BTreeSet::new(),
        };
        let named = |other: &str| (container.name.clone(), other.to_owned());
        others.into_iter().map(named).collect::<Vec<_>>()
    });
    beside.collect()
}

/// Returns the use of the claims with these names in the pod by a container.
fn user(index: usize, container: &Container, names: &BTreeSet<&str>) -> Option<User> {
    let resources = container.resources.iter();
    let claims = resources.flat_map(|resources| resources.claims.iter().flatten());
    let used: BTreeSet<Option<&str>> = claims
        .filter(|used| names.contains(used.name.as_str()))
        .map(|used| used.request.as_deref())
        .collect();
    if used.is_empty() {
        return None;
    }
    // An entry without a request stands for all requests.
    let requests: Option<Vec<String>> = used
        .into_iter()
        .map(|name| Some(name?.to_owned()))
        .collect();
    Some(User {
        container: container.name.clone(),
        index,
        requests: requests.unwrap_or_default(),
    })
}

/// Beginnings of the names of runtimes with a kernel of their own, or without processes of the node.
const SANDBOXES: [&str; 8] = [
    "kata",
    "gvisor",
    "runsc",
    "firecracker",
    "edera",
    "krun",
    "wasm",
    "spin",
];

/// Returns whether the handler of a RuntimeClass is a known runtime that does not run programs on the kernel of the node.
#[must_use]
pub fn is_sandbox(handler: &str) -> bool {
    let handler = handler.to_ascii_lowercase();
    let mut words = handler.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| SANDBOXES.iter().any(|name| word.starts_with(name)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lists_containers_with_their_requests() {
        let pod = serde_json::from_value(json!({
            "metadata": {"name": "pod"},
            "spec": {
                "resourceClaims": [
                    {"name": "direct", "resourceClaimName": "wanted"},
                    {"name": "template", "resourceClaimTemplateName": "any"},
                    {"name": "other", "resourceClaimName": "other"},
                ],
                "initContainers": [{"name": "init", "resources": {"claims": [{"name": "template", "request": "a"}]}}],
                "containers": [
                    {"name": "all", "resources": {"claims": [{"name": "direct"}, {"name": "direct", "request": "a"}]}},
                    {"name": "some", "resources": {"claims": [
                        {"name": "direct", "request": "b"}, {"name": "template", "request": "a"},
                    ]}},
                    {"name": "none", "resources": {"claims": [{"name": "other"}]}},
                ],
            },
            "status": {"resourceClaimStatuses": [{"name": "template", "resourceClaimName": "wanted"}]},
        }));
        let users = users(&pod.unwrap(), "wanted");
        let users: Vec<_> = users
            .iter()
            .map(|user| (user.container.as_str(), user.requests.join(",")))
            .collect();
        let expected = [("all", ""), ("some", "a,b"), ("init", "a")];
        assert_eq!(
            users,
            expected.map(|(name, requests)| (name, requests.to_owned()))
        );
    }

    #[test]
    fn knows_handlers_of_sandboxes() {
        let sandboxes = [
            "kata-qemu",
            "kata",
            "io.containerd.kata-clh.v2",
            "runsc",
            "gvisor",
            "wasmtime",
        ];
        assert!(sandboxes.into_iter().all(is_sandbox));
        let others = [
            "runc",
            "crun",
            "nvidia",
            "nvidia-cdi",
            "high-performance",
            "sysbox-runc",
            "",
        ];
        assert!(!others.into_iter().any(is_sandbox));
    }
}
