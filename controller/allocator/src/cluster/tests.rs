//! State after events in any order, with assumed allocations.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use serde_json::json;

use super::*;
use crate::fixture::{cluster, node, pod_request, quota, request, share, slices};
use crate::placement::Policies;

const POLICIES: Policies = Policies {
    node: NodePlacementPolicy::Binpack,
    gpu: GpuPlacementPolicy::Binpack,
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

/// Allocated memory of the first GPU, GiB.
fn allocated_gib(cluster: &Cluster) -> Option<u64> {
    let (_, pool, usage) = cluster.usable_pools().next()?;
    Some(
        usage
            .gpu_memory(pool, "GPU-n1-0")
            .allocated
            .to_u64_rounded_up()?
            >> 30,
    )
}

#[test]
fn counts_newest_version_of_claim() {
    let mut cluster = cluster(&[("n1", &[80])]);
    assert!(
        !cluster.upsert_claim(&allocated("a", 5, &[("gpu-0-vgpu", "8Gi")])),
        "nothing is released"
    );
    cluster.upsert_claim(&allocated("b", 5, &[("gpu-0-vgpu", "20Gi")]));
    assert_eq!(allocated_gib(&cluster), Some(28));
    assert!(
        !cluster.upsert_claim(&unallocated("a", 4)),
        "an old version is ignored"
    );
    assert_eq!(allocated_gib(&cluster), Some(28));
    assert!(
        cluster.upsert_claim(&unallocated("a", 6)),
        "devices are released"
    );
    assert_eq!(allocated_gib(&cluster), Some(20));
    assert!(cluster.remove_claim(&("default".to_owned(), "b".to_owned())));
    assert_eq!(allocated_gib(&cluster), Some(0));
    assert_eq!(cluster.allocated_devices().count(), 0);
    assert!(cluster.claims_of.is_empty());
}

#[test]
fn excludes_pools_of_unreadable_claim() {
    let unreadable = |version: &str| Unreadable {
        metadata: ObjectMeta {
            name: Some("a".to_owned()),
            namespace: Some("default".to_owned()),
            resource_version: Some(version.to_owned()),
            ..ObjectMeta::default()
        },
        devices: vec![
            serde_json::from_value(
                json!({"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu"}),
            )
            .unwrap(),
        ],
        cause: "odd".to_owned(),
    };
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    let excluded = |cluster: &Cluster| -> Vec<String> {
        let excluded = cluster.excluded_pools();
        excluded
            .map(|(pool, _, problem)| format!("{pool}: {problem}"))
            .collect()
    };
    cluster.upsert_claim(&allocated("a", 5, &[("gpu-0-vgpu", "8Gi")]));
    assert!(
        !cluster.upsert_unreadable_claim(&unreadable("4")),
        "an old version"
    );
    assert!(excluded(&cluster).is_empty());
    cluster.upsert_unreadable_claim(&unreadable("6"));
    assert_eq!(
        excluded(&cluster),
        [
            "n1/gpus: claim default/a has devices of the pool and cannot be read (odd); repair or delete the claim"
        ]
    );
    cluster.upsert_claim(&allocated("a", 7, &[("gpu-0-vgpu", "8Gi")]));
    assert!(excluded(&cluster).is_empty());
    assert_eq!(allocated_gib(&cluster), Some(8));
    cluster.upsert_unreadable_claim(&unreadable("8"));
    assert!(cluster.remove_claim(&("default".to_owned(), "a".to_owned())));
    assert!(excluded(&cluster).is_empty());
    assert_eq!(allocated_gib(&cluster), Some(0));
}

#[test]
fn charges_whole_capacity_without_amounts() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut claim = allocated("a", 2, &[("gpu-0-vgpu", "8Gi")]);
    let results = claim
        .status
        .as_mut()
        .and_then(|s| s.allocation.as_mut())
        .and_then(|a| a.devices.as_mut());
    results.unwrap().results.as_mut().unwrap()[0].consumed_capacity = None;
    cluster.upsert_claim(&claim);
    assert_eq!(allocated_gib(&cluster), Some(80));
}

#[test]
fn counts_assumed_allocation_until_observed_or_forgotten() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let key = ("default".to_owned(), "a".to_owned());
    let claim = share("a", "30Gi", "0");
    let placement = cluster
        .decide(
            &pod_request(&cluster, std::slice::from_ref(&claim)),
            POLICIES,
        )
        .unwrap();
    cluster.assume(&placement);
    assert_eq!(allocated_gib(&cluster), Some(30));
    // The finalizer is written; the allocation is in flight.
    cluster.upsert_claim(&unallocated("a", 7));
    assert_eq!(allocated_gib(&cluster), Some(30));
    assert!(cluster.assumed.contains_key(&key));
    // The allocation is observed and counts once.
    cluster.upsert_claim(&allocated("a", 8, &[("gpu-0-vgpu", "30Gi")]));
    assert_eq!(allocated_gib(&cluster), Some(30));
    assert!(!cluster.assumed.contains_key(&key));

    let placement = cluster
        .decide(&pod_request(&cluster, &[share("b", "40Gi", "0")]), POLICIES)
        .unwrap();
    cluster.assume(&placement);
    assert_eq!(allocated_gib(&cluster), Some(70));
    cluster.forget(&("default".to_owned(), "b".to_owned()));
    assert_eq!(allocated_gib(&cluster), Some(30));

    // A new claim of the same name replaces the assumed one.
    let placement = cluster
        .decide(&pod_request(&cluster, &[share("c", "40Gi", "0")]), POLICIES)
        .unwrap();
    cluster.assume(&placement);
    let mut other = unallocated("c", 9);
    other.metadata.uid = Some("another".to_owned());
    cluster.upsert_claim(&other);
    assert_eq!(allocated_gib(&cluster), Some(30));
}

#[test]
fn uses_pool_when_newest_generation_is_complete() {
    let mut cluster = cluster(&[("n1", &[80])]);
    cluster.upsert_claim(&allocated("a", 5, &[("gpu-0-vgpu", "8Gi")]));
    let mut newer = slices("n1", &[80, 80]);
    for slice in &mut newer {
        slice.spec.pool.generation = 2;
        slice.metadata.resource_version = Some("2".to_owned());
    }
    cluster.upsert_slice(&newer[0]);
    assert_eq!(allocated_gib(&cluster), None);
    let problems: Vec<_> = cluster
        .excluded_pools()
        .map(|(pool, _, problem)| format!("{pool}: {problem}"))
        .collect();
    assert_eq!(
        problems,
        ["n1/gpus: generation 2 is incomplete: 1 of 2 slices"]
    );
    let explanation = cluster
        .decide(&pod_request(&cluster, &[share("b", "1Gi", "0")]), POLICIES)
        .unwrap_err();
    assert_eq!(
        explanation.summary(),
        "0/1 nodes: 1 PoolIncomplete (pool n1/gpus: generation 2 is incomplete: 1 of 2 slices)"
    );
    cluster.upsert_slice(&newer[1]);
    assert_eq!(
        allocated_gib(&cluster),
        Some(8),
        "allocations survive the change"
    );
    assert_eq!(cluster.excluded_pools().count(), 0);
    // A late event of the old generation is ignored.
    cluster.upsert_slice(&slices("n1", &[80])[1]);
    assert_eq!(allocated_gib(&cluster), Some(8));
    for slice in &newer {
        cluster.remove_slice(slice.metadata.name.as_deref().unwrap());
    }
    assert_eq!(
        cluster.usable_pools().count() + cluster.excluded_pools().count(),
        0
    );
}

#[test]
fn excludes_pool_with_unpublished_allocated_device() {
    let mut cluster = cluster(&[("n1", &[80])]);
    cluster.upsert_claim(&allocated("a", 5, &[("gpu-7-vgpu", "8Gi")]));
    let explanation = cluster
        .decide(&pod_request(&cluster, &[share("b", "1Gi", "0")]), POLICIES)
        .unwrap_err();
    assert_eq!(
        explanation.summary(),
        "0/1 nodes: 1 PoolIncomplete (pool n1/gpus: device gpu-7-vgpu is allocated to claim default/a but not published)"
    );
    cluster.upsert_claim(&unallocated("a", 6));
    assert!(
        cluster
            .decide(&pod_request(&cluster, &[share("b", "1Gi", "0")]), POLICIES)
            .is_ok()
    );
}

#[test]
fn uses_other_pools_beside_malformed_one() {
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
            .decide(&pod_request(&cluster, &[share("a", "1Gi", "0")]), POLICIES)
            .unwrap()
            .node,
        "n2"
    );
    let problems: Vec<_> = cluster
        .excluded_pools()
        .map(|(_, node, problem)| format!("{node:?} {problem}"))
        .collect();
    assert_eq!(
        problems,
        ["Some(\"n1\") slice (pool): device gpu-0 consumes unknown counter set nope"]
    );
}

#[test]
fn counts_pods_on_node_until_finished() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut bound = crate::fixture::pod("x", &[]);
    bound.spec.as_mut().unwrap().node_name = Some("n1".to_owned());
    bound.spec.as_mut().unwrap().containers[0].resources =
        Some(serde_json::from_value(json!({"requests": {"cpu": "7500m"}})).unwrap());
    cluster.upsert_pod(&bound);
    let request = pod_request(&cluster, &[share("a", "1Gi", "0")]);
    assert_eq!(
        cluster.decide(&request, POLICIES).unwrap_err().summary(),
        "0/1 nodes: 1 NodeUnfit (insufficient cpu)"
    );
    bound.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).unwrap());
    cluster.upsert_pod(&bound);
    assert!(cluster.decide(&request, POLICIES).is_ok());
    // An assumed pod counts, but not against itself.
    cluster.assume_pod(&request.uid, "n1", &request.demand);
    let mut other = request.demand.clone();
    other.requests = Amounts::from([("cpu".to_owned(), drava_api::Quantity::count(7))]);
    cluster.assume_pod("other", "n1", &other);
    assert!(cluster.decide(&request, POLICIES).is_ok());
    let mut another = request.clone();
    another.uid = "another".to_owned();
    assert!(cluster.decide(&another, POLICIES).is_err());
    cluster.forget_pod("other");
    assert!(cluster.decide(&another, POLICIES).is_ok());
}

#[test]
fn counts_equal_anti_affinity_terms_of_a_pod_once() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut host = node("n1");
    host.metadata.labels = Some([("host".to_owned(), "n1".to_owned())].into());
    cluster.upsert_node(&host);
    let term = json!({"topologyKey": "host", "labelSelector": {}, "namespaceSelector": {}});
    let mut alone = crate::fixture::pod("alone", &[]);
    let uid = alone.metadata.uid.clone().unwrap();
    let spec = alone.spec.as_mut().unwrap();
    spec.node_name = Some("n1".to_owned());
    spec.affinity = serde_json::from_value(json!({
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term, term]},
    }))
    .unwrap();
    cluster.upsert_pod(&alone);
    let request = pod_request(&cluster, &[share("a", "1Gi", "0")]);
    assert!(cluster.decide(&request, POLICIES).is_err());
    cluster.presume_gone(&Departure {
        pods: [uid].into(),
        ..Departure::default()
    });
    assert!(cluster.decide(&request, POLICIES).is_ok());
}

#[test]
fn anti_affinity_excludes_no_domain_that_its_node_has_left() {
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    let in_zone = |name: &str, zone: &str| {
        let mut node = node(name);
        node.metadata.labels = Some([("zone".to_owned(), zone.to_owned())].into());
        node
    };
    cluster.upsert_node(&in_zone("n1", "a"));
    cluster.upsert_node(&in_zone("n2", "a"));
    let mut alone = crate::fixture::pod("alone", &[]);
    let spec = alone.spec.as_mut().unwrap();
    spec.node_name = Some("n1".to_owned());
    spec.affinity = serde_json::from_value(json!({
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": "zone", "labelSelector": {}, "namespaceSelector": {}},
        ]},
    }))
    .unwrap();
    cluster.upsert_pod(&alone);
    let request = pod_request(&cluster, &[share("a", "1Gi", "0")]);
    let node_of = |cluster: &Cluster| {
        let placement = cluster.decide(&request, POLICIES).ok();
        placement.map(|placement| placement.node)
    };
    assert_eq!(node_of(&cluster), None);
    cluster.upsert_node(&in_zone("n1", "b"));
    assert_eq!(node_of(&cluster).as_deref(), Some("n2"));
    cluster.upsert_node(&in_zone("n1", "a"));
    assert_eq!(node_of(&cluster), None);
    cluster.remove_node("n1");
    assert_eq!(node_of(&cluster).as_deref(), Some("n2"));
    cluster.upsert_node(&in_zone("n1", "a"));
    assert_eq!(node_of(&cluster), None);
}

#[test]
fn ignores_irrelevant_node_changes() {
    let mut cluster = Cluster::default();
    assert!(cluster.upsert_node(&node("n1")));
    let mut heartbeat = node("n1");
    heartbeat.metadata.resource_version = Some("2".to_owned());
    assert!(!cluster.upsert_node(&heartbeat));
    heartbeat.spec = Some(serde_json::from_value(json!({"unschedulable": true})).unwrap());
    assert!(cluster.upsert_node(&heartbeat));
}

#[test]
fn excludes_pool_without_node_name() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut everywhere = slices("n9", &[80]);
    for slice in &mut everywhere {
        slice.spec.node_name = None;
        slice.spec.all_nodes = Some(true);
        cluster.upsert_slice(slice);
    }
    let problems: Vec<_> = cluster
        .excluded_pools()
        .map(|(pool, _, problem)| format!("{pool} {problem}"))
        .collect();
    assert_eq!(
        problems,
        ["n9/gpus slice 00000-n9: spec.nodeName is not set"]
    );
    let whole = request("w", &json!({"deviceClassName": "gpu.drava.dev"}));
    assert_eq!(
        cluster
            .decide(&pod_request(&cluster, &[whole]), POLICIES)
            .unwrap()
            .node,
        "n1"
    );
}

/// Returns a claim that is to be suspended, and of which the node driver has answered this.
fn suspended(name: &str, version: u64, status: &str) -> ResourceClaim {
    let mut claim = allocated(name, version, &[("gpu-0-vgpu", "60Gi")]);
    claim.metadata.labels = Some([("gpu.drava.dev/suspend".to_owned(), "true".to_owned())].into());
    claim.status.as_mut().unwrap().devices = Some(
        serde_json::from_value(json!([{
            "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
            "conditions": [{
                "type": "Suspended", "status": status, "reason": "Suspended", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        }]))
        .unwrap(),
    );
    claim
}

#[test]
fn quota_has_what_suspended_shares_get_back() {
    let mut cluster = cluster(&[("n1", &[80])]);
    cluster.upsert_quota(&quota("q", &json!({"namespaces": ["default"]})));
    let mut running = allocated("b", 1, &[("gpu-0-vgpu", "10Gi")]);
    running.metadata.uid = Some("other".to_owned());
    cluster.upsert_claim(&running);
    let amounts = |cluster: &Cluster| {
        let quotas = cluster.quotas().map(|quota| {
            let memory = [quota.used, quota.suspended].map(|charge| charge.memory);
            (memory, quota.suspended.devices)
        });
        quotas.collect::<Vec<_>>()
    };
    let gib = |gib: u64| Quantity::bytes(gib << 30);
    for (version, status, suspended_gib) in [(5, "False", 0), (6, "True", 60), (7, "False", 0)] {
        cluster.upsert_claim(&suspended("a", version, status));
        let devices = Quantity::count(u64::from(suspended_gib > 0));
        let expected = ([gib(70), gib(suspended_gib)], devices);
        assert_eq!(amounts(&cluster), [expected], "{status}");
    }
    // Also a quota that was created later, and without the claim.
    cluster.upsert_claim(&suspended("a", 8, "True"));
    cluster.remove_quota("q");
    cluster.upsert_quota(&quota("later", &json!({"namespaces": ["default"]})));
    let expected = ([gib(70), gib(60)], Quantity::count(1));
    assert_eq!(amounts(&cluster), [expected]);
    cluster.remove_claim(&("default".to_owned(), "a".to_owned()));
    let expected = ([gib(10), Quantity::ZERO], Quantity::ZERO);
    assert_eq!(amounts(&cluster), [expected]);
}

#[test]
fn suspended_share_uses_neither_memory_nor_gpu_time() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let key = ("default".to_owned(), "a".to_owned());
    cluster.upsert_claim(&suspended("a", 5, "False"));
    assert_eq!(allocated_gib(&cluster), Some(60));
    let others = pod_request(&cluster, &[share("b", "70Gi", "95")]);
    assert!(cluster.decide(&others, POLICIES).is_err());
    // A simulation presumes the same.
    let suspension = Departure {
        suspended: [key.clone()].into(),
        ..Departure::default()
    };
    cluster.presume_gone(&suspension);
    assert!(cluster.decide(&others, POLICIES).is_ok());
    cluster.presume_gone(&Departure::default());
    assert!(cluster.decide(&others, POLICIES).is_err());
    assert!(
        cluster.upsert_claim(&suspended("a", 6, "True")),
        "it gives its memory"
    );
    let placement = cluster.decide(&others, POLICIES).unwrap();
    assert_eq!(allocated_gib(&cluster), Some(0));
    assert_eq!(cluster.lacks_to_resume(&key), None);
    // The GPU is one with shares, so no whole GPU is allocated.
    let whole = request("whole", &json!({"deviceClassName": "gpu.drava.dev"}));
    let whole = pod_request(&cluster, &[whole]);
    assert!(cluster.decide(&whole, POLICIES).is_err());
    cluster.assume(&placement);
    let (device, lacking) = cluster.lacks_to_resume(&key).unwrap();
    assert_eq!(device, "device gpu-0-vgpu of pool n1/gpus");
    assert!(matches!(lacking, Rejection::Capacity { .. }), "{lacking:?}");
}
