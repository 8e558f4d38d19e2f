//! The policies `topology` and `numa`: GPUs of a pod that are close together.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use drava_api::names;
use k8s_openapi::api::resource::v1::{DeviceAttribute, ResourceClaim, ResourceSlice};
use serde_json::json;

use super::{Policies, allocate, request, whole};
use crate::cluster::Cluster;
use crate::fixture::{cluster, pod_request, share, slices};

const TOPOLOGY: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Topology,
};

const NUMA: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Numa,
};

/// Slices of a node whose GPUs are on these NUMA nodes.
fn slices_on(node: &str, numa_nodes: &[i64]) -> Vec<ResourceSlice> {
    let mut slices = slices(node, &vec![80; numa_nodes.len()]);
    let devices = slices
        .iter_mut()
        .filter_map(|slice| slice.spec.devices.as_mut());
    for device in devices.flatten() {
        let attributes = device.attributes.get_or_insert_default();
        let index = attributes.get("index").and_then(|index| index.int);
        let numa = usize::try_from(index.unwrap()).map(|index| numa_nodes[index]);
        let attribute = DeviceAttribute {
            int: numa.ok(),
            ..Default::default()
        };
        attributes.insert(names::attribute::NUMA_NODE.to_owned(), attribute);
    }
    slices
}

fn cluster_on(nodes: &[(&str, &[i64])]) -> Cluster {
    let gpus: Vec<_> = nodes
        .iter()
        .map(|(node, gpus)| (*node, vec![80; gpus.len()]))
        .collect();
    let gpus: Vec<_> = gpus.iter().map(|(node, gpus)| (*node, &gpus[..])).collect();
    let mut cluster = cluster(&gpus);
    for (node, numa_nodes) in nodes {
        for slice in slices_on(node, numa_nodes) {
            cluster.upsert_slice(&slice);
        }
    }
    cluster
}

fn gpus(name: &str, count: u32) -> ResourceClaim {
    request(
        name,
        &json!({"deviceClassName": "gpu.drava.dev", "count": count}),
    )
}

#[test]
fn places_gpus_of_claim_on_one_numa_node() {
    let nodes: &[(&str, &[i64])] = &[("n1", &[0, 1, 1, 0])];
    let mut with_binpack = cluster_on(nodes);
    assert_eq!(
        allocate(&mut with_binpack, &[gpus("a", 2)], super::BINPACK).unwrap(),
        ["n1/gpu-0", "n1/gpu-1"]
    );
    let mut cluster = cluster_on(nodes);
    assert_eq!(
        allocate(&mut cluster, &[gpus("a", 2)], TOPOLOGY).unwrap(),
        ["n1/gpu-0", "n1/gpu-3"]
    );
    // What is left is one NUMA node.
    assert_eq!(
        allocate(&mut cluster, &[gpus("b", 2)], TOPOLOGY).unwrap(),
        ["n1/gpu-1", "n1/gpu-2"]
    );
}

#[test]
fn keeps_larger_group_for_later_pods() {
    let mut cluster = cluster_on(&[("n1", &[0, 0, 1, 1])]);
    allocate(&mut cluster, &[whole("a")], TOPOLOGY).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[whole("b")], TOPOLOGY).unwrap(),
        ["n1/gpu-1"],
        "beside the GPU in use"
    );
}

#[test]
fn counts_gpus_of_all_claims_of_pod() {
    // NUMA node 0 has one GPU only; two claims of one GPU each fit on NUMA node 1.
    let mut cluster = cluster_on(&[("n1", &[0, 1, 1, 1])]);
    assert_eq!(
        allocate(&mut cluster, &[whole("a"), whole("b")], TOPOLOGY).unwrap(),
        ["n1/gpu-1", "n1/gpu-2"]
    );
}

#[test]
fn prefers_node_with_closer_gpus() {
    let mut cluster = cluster_on(&[("n1", &[0, 1]), ("n2", &[0, 0])]);
    let placement = cluster.decide(&pod_request(&cluster, &[gpus("a", 2)]), TOPOLOGY);
    let placement = placement.unwrap();
    assert_eq!(
        placement.reason(&placement.claims[0]),
        "node n2: topology: the GPUs share a NUMA node, on n1 the GPUs share the node only; \
         gpu-0: topology: the GPUs share a NUMA node; gpu-1: only feasible GPU"
    );
    // A pod is never rejected for its topology.
    allocate(&mut cluster, &[whole("w1"), whole("w2")], TOPOLOGY).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[gpus("b", 2)], TOPOLOGY).unwrap(),
        ["n1/gpu-0", "n1/gpu-1"]
    );
}

#[test]
fn packs_shares_within_group() {
    let mut cluster = cluster_on(&[("n1", &[0, 0, 0, 0])]);
    allocate(&mut cluster, &[share("a", "10Gi", "0")], TOPOLOGY).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[share("b", "10Gi", "0")], TOPOLOGY).unwrap(),
        ["n1/gpu-0-vgpu"]
    );
}

/// A cluster with a node whose GPUs are on two NUMA nodes; two GPUs of different NUMA nodes share an NVLink domain.
fn cluster_with_nvlink_across_numa_nodes() -> Cluster {
    let mut cluster = cluster_on(&[("n1", &[0, 1, 1, 0])]);
    let mut slices = slices_on("n1", &[0, 1, 1, 0]);
    let devices = slices
        .iter_mut()
        .filter_map(|slice| slice.spec.devices.as_mut());
    for device in devices.flatten() {
        let attributes = device.attributes.get_or_insert_default();
        let index = attributes.get("index").and_then(|index| index.int);
        let domain = if index < Some(2) { "a" } else { "none" };
        let attribute = DeviceAttribute {
            string: Some(domain.to_owned()),
            ..Default::default()
        };
        attributes.insert(names::attribute::NVLINK_DOMAIN.to_owned(), attribute);
    }
    for slice in slices {
        cluster.upsert_slice(&slice);
    }
    cluster
}

#[test]
fn numa_ignores_other_connections() {
    let mut by_topology = cluster_with_nvlink_across_numa_nodes();
    assert_eq!(
        allocate(&mut by_topology, &[gpus("a", 2)], TOPOLOGY).unwrap(),
        ["n1/gpu-0", "n1/gpu-1"],
        "one NVLink domain"
    );
    let mut by_numa = cluster_with_nvlink_across_numa_nodes();
    assert_eq!(
        allocate(&mut by_numa, &[gpus("a", 2)], NUMA).unwrap(),
        ["n1/gpu-0", "n1/gpu-3"],
        "one NUMA node"
    );
}

#[test]
fn numa_prefers_node_with_gpus_on_one_numa_node() {
    let mut cluster = cluster_on(&[("n1", &[0, 1]), ("n2", &[1, 1])]);
    assert_eq!(
        allocate(&mut cluster, &[gpus("a", 2)], NUMA).unwrap(),
        ["n2/gpu-0", "n2/gpu-1"]
    );
    assert_eq!(
        allocate(&mut cluster, &[gpus("b", 2)], NUMA).unwrap(),
        ["n1/gpu-0", "n1/gpu-1"],
        "no pod is rejected for its NUMA nodes"
    );
}
