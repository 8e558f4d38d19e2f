//! The state follows the newest version of each object, and counts what is being written.

use drava_api::config::PlacementPolicy;
use serde_json::json;

use super::*;
use crate::fixture::{ask, cluster, node, request, share, slices};
use crate::placement::Policies;

const POLICIES: Policies = Policies {
    node: PlacementPolicy::Binpack,
    gpu: PlacementPolicy::Binpack,
};

fn allocated(name: &str, version: u64, devices: &[(&str, &str)]) -> ResourceClaim {
    let mut claim = share(name, "1Gi", "0");
    claim.metadata.resource_version = Some(version.to_string());
    let results: Vec<_> = devices
        .iter()
        .map(|(device, memory)| {
            json!({"request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device, "shareID": "s",
                   "consumedCapacity": {"memory": memory, "cores": "10", "slots": "1"}})
        })
        .collect();
    claim.status = Some(
        serde_json::from_value(json!({"allocation": {"devices": {"results": results}}})).unwrap(),
    );
    claim
}

fn unallocated(name: &str, version: u64) -> ResourceClaim {
    let mut claim = share(name, "1Gi", "0");
    claim.metadata.resource_version = Some(version.to_string());
    claim
}

/// GiB of memory in use of the first card.
fn used(cluster: &Cluster) -> Option<u64> {
    let (_, pool, usage) = cluster.usable_pools().next()?;
    Some(
        usage
            .card_memory(pool, "GPU-n1-0")
            .used
            .to_u64_rounded_up()?
            >> 30,
    )
}

#[test]
fn claims_are_counted_by_their_newest_version() {
    let mut cluster = cluster(&[("n1", &[80])]);
    assert!(
        !cluster.upsert_claim(&allocated("a", 5, &[("gpu-0-vgpu", "8Gi")])),
        "nothing was let go"
    );
    cluster.upsert_claim(&allocated("b", 5, &[("gpu-0-vgpu", "20Gi")]));
    assert_eq!(used(&cluster), Some(28));
    assert!(
        !cluster.upsert_claim(&unallocated("a", 4)),
        "an old version changes nothing"
    );
    assert_eq!(used(&cluster), Some(28));
    assert!(
        cluster.upsert_claim(&unallocated("a", 6)),
        "devices were let go"
    );
    assert_eq!(used(&cluster), Some(20));
    assert!(cluster.remove_claim(&("default".to_owned(), "b".to_owned())));
    assert_eq!(used(&cluster), Some(0));
    assert_eq!(cluster.holdings().count(), 0);
    assert!(cluster.holders.is_empty());
}

#[test]
fn a_share_without_amounts_is_charged_in_full() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut claim = allocated("a", 2, &[("gpu-0-vgpu", "8Gi")]);
    let results = claim
        .status
        .as_mut()
        .and_then(|s| s.allocation.as_mut())
        .and_then(|a| a.devices.as_mut());
    results.unwrap().results.as_mut().unwrap()[0].consumed_capacity = None;
    cluster.upsert_claim(&claim);
    assert_eq!(used(&cluster), Some(80));
}

#[test]
fn what_is_being_written_counts_until_it_is_seen_or_forgotten() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let key = ("default".to_owned(), "a".to_owned());
    let wanted = share("a", "30Gi", "0");
    let placement = cluster
        .decide(&ask(&cluster, std::slice::from_ref(&wanted)), POLICIES)
        .unwrap();
    cluster.assume(&placement);
    assert_eq!(used(&cluster), Some(30));
    // The finalizer was written; the allocation is still on its way.
    cluster.upsert_claim(&unallocated("a", 7));
    assert_eq!(used(&cluster), Some(30));
    assert!(cluster.is_assumed(&key));
    // Now it is seen: counted once.
    cluster.upsert_claim(&allocated("a", 8, &[("gpu-0-vgpu", "30Gi")]));
    assert_eq!(used(&cluster), Some(30));
    assert!(!cluster.is_assumed(&key));

    let placement = cluster
        .decide(&ask(&cluster, &[share("b", "40Gi", "0")]), POLICIES)
        .unwrap();
    cluster.assume(&placement);
    assert_eq!(used(&cluster), Some(70));
    cluster.forget(&("default".to_owned(), "b".to_owned()));
    assert_eq!(used(&cluster), Some(30));

    // A new claim of the same name is not the one that was being written.
    let placement = cluster
        .decide(&ask(&cluster, &[share("c", "40Gi", "0")]), POLICIES)
        .unwrap();
    cluster.assume(&placement);
    let mut other = unallocated("c", 9);
    other.metadata.uid = Some("another".to_owned());
    cluster.upsert_claim(&other);
    assert_eq!(used(&cluster), Some(30));
}

#[test]
fn a_pool_is_used_when_its_newest_generation_is_complete() {
    let mut cluster = cluster(&[("n1", &[80])]);
    cluster.upsert_claim(&allocated("a", 5, &[("gpu-0-vgpu", "8Gi")]));
    let mut newer = slices("n1", &[80, 80]);
    for slice in &mut newer {
        slice.spec.pool.generation = 2;
        slice.metadata.resource_version = Some("2".to_owned());
    }
    cluster.upsert_slice(&newer[0]);
    assert_eq!(used(&cluster), None);
    let problems: Vec<_> = cluster
        .problems()
        .map(|(pool, _, problem)| format!("{pool}: {problem}"))
        .collect();
    assert_eq!(
        problems,
        ["n1/gpus: 1 of 2 slices of generation 2 are there"]
    );
    let refusal = cluster
        .decide(&ask(&cluster, &[share("b", "1Gi", "0")]), POLICIES)
        .unwrap_err();
    assert_eq!(
        refusal.summary(),
        "0/1 nodes: 1 PoolIncomplete (pool n1/gpus: 1 of 2 slices of generation 2 are there)"
    );
    cluster.upsert_slice(&newer[1]);
    assert_eq!(
        used(&cluster),
        Some(8),
        "what claims hold survives the change"
    );
    assert_eq!(cluster.problems().count(), 0);
    // A late event of the old generation is ignored.
    cluster.upsert_slice(&slices("n1", &[80])[1]);
    assert_eq!(used(&cluster), Some(8));
    for slice in &newer {
        cluster.remove_slice(slice.metadata.name.as_deref().unwrap());
    }
    assert_eq!(
        cluster.usable_pools().count() + cluster.problems().count(),
        0
    );
}

#[test]
fn a_held_device_that_is_no_longer_published_closes_the_pool() {
    let mut cluster = cluster(&[("n1", &[80])]);
    cluster.upsert_claim(&allocated("a", 5, &[("gpu-7-vgpu", "8Gi")]));
    let refusal = cluster
        .decide(&ask(&cluster, &[share("b", "1Gi", "0")]), POLICIES)
        .unwrap_err();
    assert_eq!(
        refusal.summary(),
        "0/1 nodes: 1 PoolIncomplete (pool n1/gpus: claim default/a holds device gpu-7-vgpu, which the pool no longer publishes)"
    );
    cluster.upsert_claim(&unallocated("a", 6));
    assert!(
        cluster
            .decide(&ask(&cluster, &[share("b", "1Gi", "0")]), POLICIES)
            .is_ok()
    );
}

#[test]
fn one_malformed_pool_does_not_stop_the_others() {
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    let mut broken = slices("n1", &[80]);
    broken[1].metadata.resource_version = Some("2".to_owned());
    broken[1].spec.devices.as_mut().unwrap()[0]
        .consumes_counters
        .as_mut()
        .unwrap()[0]
        .counter_set = "nope".to_owned();
    cluster.upsert_slice(&broken[1]);
    assert_eq!(
        cluster
            .decide(&ask(&cluster, &[share("a", "1Gi", "0")]), POLICIES)
            .unwrap()
            .node,
        "n2"
    );
    let problems: Vec<_> = cluster
        .problems()
        .map(|(_, node, problem)| format!("{node:?} {problem}"))
        .collect();
    assert_eq!(
        problems,
        ["Some(\"n1\") slice (pool): device gpu-0 consumes unknown counter set nope"]
    );
}

#[test]
fn pods_count_on_their_node_until_they_end() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut bound = crate::fixture::pod("x", &[]);
    bound.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
    bound.spec.as_mut().unwrap().containers[0].resources =
        Some(serde_json::from_value(json!({"requests": {"cpu": "7500m"}})).unwrap());
    cluster.upsert_pod(&bound);
    let wanted = ask(&cluster, &[share("a", "1Gi", "0")]);
    assert_eq!(
        cluster.decide(&wanted, POLICIES).unwrap_err().summary(),
        "0/1 nodes: 1 NodeUnfit (insufficient cpu)"
    );
    bound.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
    cluster.upsert_pod(&bound);
    assert!(cluster.decide(&wanted, POLICIES).is_ok());
    // A pod that was planned counts, but not against itself.
    cluster.assume_pod(&wanted.uid, "n1", wanted.demand.requests.clone());
    cluster.assume_pod(
        "other",
        "n1",
        Amounts::from([("cpu".to_owned(), drava_api::Quantity::count(7))]),
    );
    assert!(cluster.decide(&wanted, POLICIES).is_ok());
    let mut another = wanted.clone();
    another.uid = "another".to_owned();
    assert!(cluster.decide(&another, POLICIES).is_err());
    cluster.forget_pod("other");
    assert!(cluster.decide(&another, POLICIES).is_ok());
}

#[test]
fn only_changes_that_matter_are_reported() {
    let mut cluster = Cluster::default();
    assert!(cluster.upsert_node(&node("n1")));
    let mut heartbeat = node("n1");
    heartbeat.metadata.resource_version = Some("2".to_owned());
    assert!(!cluster.upsert_node(&heartbeat));
    heartbeat.spec = Some(serde_json::from_value(json!({"unschedulable": true})).unwrap());
    assert!(cluster.upsert_node(&heartbeat));
}

#[test]
fn unknown_shapes_of_nodes_are_left_out() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut everywhere = slices("n9", &[80]);
    for slice in &mut everywhere {
        slice.spec.node_name = None;
        slice.spec.all_nodes = Some(true);
        cluster.upsert_slice(slice);
    }
    let problems: Vec<_> = cluster
        .problems()
        .map(|(pool, _, problem)| format!("{pool} {problem}"))
        .collect();
    assert_eq!(
        problems,
        ["n9/gpus slice 00000-n9: spec.nodeName is not set"]
    );
    let whole = request("w", &json!({"deviceClassName": "gpu.drava.dev"}));
    assert_eq!(
        cluster
            .decide(&ask(&cluster, &[whole]), POLICIES)
            .unwrap()
            .node,
        "n1"
    );
}
