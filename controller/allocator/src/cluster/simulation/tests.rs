//! What is tried without some claims is what is decided without them, and changes nothing.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::fixture::{cluster, object, pod_request, quota, share};
use crate::placement::Policies;

const POLICIES: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Binpack,
};

fn key(name: &str) -> ObjectKey {
    ("default".to_owned(), name.to_owned())
}

/// Claim for a device of node n1 and its memory.
fn allocated(name: &str, device: &str, gib: u64) -> ResourceClaim {
    let mut claim = share(name, "1Gi", "0");
    let memory = format!("{gib}Gi");
    claim.status = Some(object(json!({"allocation": {"devices": {"results": [{
        "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device, "shareID": "s",
        "consumedCapacity": {"memory": memory, "cores": "10", "slots": "1"},
    }]}}})));
    claim
}

/// Allocated memory by GPU, charges, and the best node for a share of this size.
fn state(cluster: &Cluster, gib: u64) -> String {
    let usage: Vec<_> = cluster
        .usable_pools()
        .flat_map(|(name, pool, usage)| {
            let gpus = ["GPU-n1-0", "GPU-n1-1"].into_iter();
            gpus.map(move |gpu| (name, usage.gpu_memory(pool, gpu).allocated))
        })
        .collect();
    let charges: Vec<_> = cluster.namespace_charges().collect();
    let request = pod_request(cluster, &[share("wanted", &format!("{gib}Gi"), "0")]);
    let placement = cluster.decide(&request, POLICIES);
    let placement = placement.map(|placement| placement.node).ok();
    format!("{usage:?} {charges:?} {placement:?}")
}

proptest! {
    #[test]
    fn trial_finds_the_same_and_changes_nothing(
        claims in prop::collection::vec((0..3_usize, 1..60_u64), 1..6),
        gone in prop::collection::vec(0..3_u8, 6),
        gib in 1..90_u64,
        limit in 10..200_u64,
    ) {
        let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[40])]);
        let limit = json!({"namespaces": ["default"], "limit": {"memory": format!("{limit}Gi")}});
        cluster.upsert_quota(&quota("q", &limit));
        for (index, (device, gib)) in claims.iter().enumerate() {
            // The last one is not published, so its pool is excluded while it is allocated.
            let device = ["gpu-0-vgpu", "gpu-1-vgpu", "gpu-9-vgpu"][*device];
            cluster.upsert_claim(&allocated(&format!("c{index}"), device, *gib));
        }
        let of = |how: u8| -> BTreeSet<ObjectKey> {
            let indexes = (0..claims.len()).filter(|index| gone[*index] == how);
            indexes.map(|index| key(&format!("c{index}"))).collect()
        };
        let departure = Departure { claims: of(1), suspended: of(2), pods: BTreeSet::new() };
        let request = pod_request(&cluster, &[share("wanted", &format!("{gib}Gi"), "0")]);
        let find = |cluster: &Cluster| format!("{:?}", cluster.decide_on("n1", &request, POLICIES));
        let before = state(&cluster, gib);
        let tried = cluster.try_without(&departure, find);
        prop_assert_eq!(&before, &state(&cluster, gib));
        cluster.presume_gone(&departure);
        prop_assert_eq!(tried, find(&cluster));
        cluster.presume_gone(&Departure::default());
        prop_assert_eq!(before, state(&cluster, gib));
    }
}
