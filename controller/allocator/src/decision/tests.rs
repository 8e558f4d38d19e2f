//! Tables of decisions, and properties of all.

use drava_api::config::PlacementPolicy;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use crate::cluster::Cluster;
use crate::fixture::{ask, request};
use crate::placement::Policies;

mod exact;
mod policy;
mod refusal;
mod selection;
mod together;

const BINPACK: Policies = Policies {
    node: PlacementPolicy::Binpack,
    gpu: PlacementPolicy::Binpack,
};

const SPREAD: Policies = Policies {
    node: PlacementPolicy::Spread,
    gpu: PlacementPolicy::Spread,
};

/// Decides and assumes; `node/device` of every grant.
fn place(
    cluster: &mut Cluster,
    claims: &[ResourceClaim],
    policies: Policies,
) -> Result<Vec<String>, String> {
    let ask = ask(cluster, claims);
    let placement = cluster
        .decide(&ask, policies)
        .map_err(|explanation| explanation.summary())?;
    cluster.assume(&placement);
    Ok(placement
        .claims
        .iter()
        .flat_map(|claim| &claim.devices)
        .map(|grant| format!("{}/{}", placement.node, grant.device.name))
        .collect())
}

fn whole(name: &str) -> ResourceClaim {
    request(name, &json!({"deviceClassName": "gpu.drava.dev"}))
}
