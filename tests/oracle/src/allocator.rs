//! Our allocator on a case.

use anyhow::Result;
use drava_allocator::cluster::Cluster;
use drava_allocator::placement::{Placement, Policies};
use drava_allocator::pod_request::PodRequest;
use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;

use crate::case::Case;

/// Decision for one node: a placement, or why there is none.
pub type Decision = Result<Placement, String>;

/// Decides on every node of the case, in their order.
///
/// # Errors
/// When the pod cannot be built.
pub fn decide(case: &Case) -> Result<Vec<Decision>> {
    let mut cluster = Cluster::default();
    for node in &case.nodes {
        cluster.upsert_node(node);
    }
    for class in &case.classes {
        cluster.upsert_class(class.clone());
    }
    for slice in &case.slices {
        cluster.upsert_slice(slice);
    }
    for claim in &case.allocated {
        cluster.upsert_claim(claim);
    }
    let claims: Vec<_> = case
        .claims
        .iter()
        .map(|claim| (claim.metadata.name.as_deref().unwrap_or_default(), claim))
        .collect();
    let policies = Policies {
        node: NodePlacementPolicy::Binpack,
        gpu: GpuPlacementPolicy::Binpack,
    };
    case.node_names()
        .map(|node| {
            let pod: Pod = serde_json::from_value(json!({
                "metadata": {"name": "pod", "namespace": "default", "uid": "pod"},
                "spec": {"nodeName": node, "containers": []},
            }))?;
            let request = match PodRequest::new(&pod, &claims, &cluster.classes, &cluster.selectors)
            {
                Ok(request) => request,
                Err(error) => return Ok(Err(error.to_string())),
            };
            if request.claims.len() != case.claims.len() {
                return Ok(Err("a claim is not for this driver".to_owned()));
            }
            Ok(cluster
                .decide(&request, policies)
                .map_err(|explanation| format!("{explanation:?}")))
        })
        .collect()
}
