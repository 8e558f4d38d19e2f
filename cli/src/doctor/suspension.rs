//! Shares whose config allows their suspension, and which cannot be suspended.

use drava_api::suspension::{is_intended, refusal};
use drava_explanation::printable;
use drava_explanation::suspension::{self, HostTraits};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;

use super::state::ClusterState;
use super::workload::object;
use super::{Fault, Finding};

pub(super) fn check(state: &ClusterState) -> Vec<Finding> {
    let mut findings = never_suspended(state);
    findings.extend(not_suspended_now(state));
    findings
}

/// Returns the shares that are to be suspended, and are not because of what the node driver has found.
fn not_suspended_now(state: &ClusterState) -> impl Iterator<Item = Finding> {
    state.claims.iter().filter_map(|claim| {
        if !is_intended(&claim.metadata) {
            return None;
        }
        let refusal = refusal(claim)?;
        let name = object(&claim.metadata);
        Some(Finding {
            fault: Fault::NotSuspendable,
            object: match user(state, claim) {
                Some(pod) => format!("pod {}", object(&pod.metadata)),
                None => format!("claim {name}"),
            },
            problem: format!(
                "the share of claim {name} is to be suspended, and is not: {}",
                printable(&refusal.message)
            ),
            fix: "follow the message, or take the wish back with `kubectl drava resume`".to_owned(),
        })
    })
}

fn never_suspended(state: &ClusterState) -> Vec<Finding> {
    let finding = |claim: &ResourceClaim| {
        let pod = user(state, claim)?;
        suspension::check(claim).ok()?;
        let problem = HostTraits::of(pod).problem(suspension::memory_of(claim))?;
        Some(Finding {
            fault: Fault::NotSuspendable,
            object: format!("pod {}", object(&pod.metadata)),
            problem: format!(
                "claim {} says suspend.allowed: true, and its share is never suspended: {problem}",
                claim.metadata.name.as_deref().unwrap_or_default()
            ),
            fix: "raise the memory limit, or remove the probe, in the template of the pod; or remove suspend.allowed from the claim \
                  template: then the pod is evicted instead"
                .to_owned(),
        })
    };
    state.claims.iter().filter_map(finding).collect()
}

/// Returns the only pod that has reserved the claim.
fn user<'a>(state: &'a ClusterState, claim: &ResourceClaim) -> Option<&'a Pod> {
    let consumers = claim.status.as_ref()?.reserved_for.as_deref()?;
    let [only] = consumers else {
        return None;
    };
    let mut pods = state.pods.iter();
    pods.find(|pod| pod.metadata.uid.as_ref() == Some(&only.uid))
}
