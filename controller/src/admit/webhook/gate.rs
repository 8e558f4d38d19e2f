//! Adds the allocation gate to new pods, so that kube-scheduler does not try them before their claims are allocated.
//!
//! A pod is gated if a claim or a claim template that it names is for this driver, or if it belongs to a gang: its members
//! without claims wait with the others. An unknown template gates, too: it may have been created a moment ago. The controller
//! removes the gate of each pod that needs no allocation. A pod that is not gated waits in kube-scheduler until its claims are
//! allocated; the taint of the devices keeps them for the controller.

use drava_allocator::pod;
use drava_api::names;
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use serde_json::{Value, json};

use super::catalog::Catalog;
use crate::pods::gang;

/// Returns the JSON Patch operations that add the gate; none if the pod needs no gate.
pub(super) fn operations(
    pod: &Pod,
    namespace: &str,
    catalog: &Catalog,
    schedulers: &[String],
) -> Vec<Value> {
    let Some(spec) = &pod.spec else {
        return Vec::new();
    };
    let mut claims = spec.resource_claims.iter().flatten();
    let needs_gate =
        gang::name_of(pod).is_some() || claims.any(|claim| is_own(claim, namespace, catalog));
    // The API rejects gates of a pod with a node.
    let is_schedulable = pod::node(pod).is_none() && pod::is_served(pod, schedulers);
    if !is_schedulable || !needs_gate || crate::pods::pod::has_allocation_gate(pod) {
        return Vec::new();
    }
    vec![operation(spec.scheduling_gates.is_some())]
}

/// Returns the JSON Patch operation that adds the gate.
fn operation(has_gates: bool) -> Value {
    let gate = json!({"name": names::ALLOCATION_GATE});
    if has_gates {
        json!({"op": "add", "path": "/spec/schedulingGates/-", "value": gate})
    } else {
        json!({"op": "add", "path": "/spec/schedulingGates", "value": [gate]})
    }
}

fn is_own(claim: &PodResourceClaim, namespace: &str, catalog: &Catalog) -> bool {
    if let Some(template) = &claim.resource_claim_template_name {
        return catalog.template_is_own(namespace, template).unwrap_or(true);
    }
    // kube-scheduler reports a claim that does not exist.
    let claim = claim.resource_claim_name.as_deref();
    claim.is_some_and(|name| catalog.claim_is_own(namespace, name).unwrap_or(false))
}

#[cfg(test)]
mod tests;
