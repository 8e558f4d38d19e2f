//! Decisions by example, and properties of all decisions.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use crate::cluster::Cluster;
use crate::fixture::{pod_request, request};
use crate::placement::Policies;

mod by_ranking;
mod co_allocation;
mod division;
mod growth;
mod many_devices;
mod partition;
mod policy;
mod prefer;
mod preference;
mod properties;
mod quota;
mod rejection;
mod selection;
mod topology;

const BINPACK: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Binpack,
};

const SPREAD: Policies = Policies {
    node: NodePlacementPolicy::Spread,
    gpu: GpuPlacementPolicy::Spread,
};

/// Decides and assumes the placement; returns `node/device` of every device.
fn allocate(
    cluster: &mut Cluster,
    claims: &[ResourceClaim],
    policies: Policies,
) -> Result<Vec<String>, String> {
    let pod_request = pod_request(cluster, claims);
    let placement = cluster
        .decide(&pod_request, policies)
        .map_err(|explanation| explanation.summary())?;
    cluster.assume(&placement);
    Ok(placement
        .claims
        .iter()
        .flat_map(|claim| &claim.devices)
        .map(|placed| format!("{}/{}", placement.node, placed.device.name))
        .collect())
}

fn whole(name: &str) -> ResourceClaim {
    request(name, &json!({"deviceClassName": "gpu.drava.dev"}))
}
