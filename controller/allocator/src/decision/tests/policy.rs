//! Scores of nodes and GPUs.

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use super::{BINPACK, SPREAD, allocate, whole};
use crate::cluster::Cluster;
use crate::fixture::{claim, cluster, pod_request, request, share};
use crate::placement::Policies;
use crate::turn::Turn;

#[test]
fn fills_gpu_before_next_with_binpack() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80])]);
    let mut devices = Vec::new();
    for (name, memory) in [("a", "30Gi"), ("b", "30Gi"), ("c", "30Gi"), ("d", "20Gi")] {
        devices.extend(allocate(&mut cluster, &[share(name, memory, "0")], BINPACK).unwrap());
    }
    assert_eq!(
        devices,
        [
            "n1/gpu-0-vgpu",
            "n1/gpu-0-vgpu",
            "n1/gpu-1-vgpu",
            "n1/gpu-0-vgpu"
        ]
    );
}

#[test]
fn selects_emptiest_node_and_gpu_with_spread() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80])]);
    let devices: Vec<_> = ["a", "b", "c", "d", "e"]
        .iter()
        .flat_map(|name| allocate(&mut cluster, &[share(name, "10Gi", "0")], SPREAD).unwrap())
        .collect();
    assert_eq!(
        devices,
        [
            "n1/gpu-0-vgpu",
            "n2/gpu-0-vgpu",
            "n1/gpu-1-vgpu",
            "n2/gpu-1-vgpu",
            "n1/gpu-0-vgpu"
        ]
    );
}

#[test]
fn scores_nodes_and_gpus_independently() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80])]);
    let policies = Policies {
        node: NodePlacementPolicy::Spread,
        gpu: GpuPlacementPolicy::Binpack,
    };
    let devices: Vec<_> = ["a", "b", "c"]
        .iter()
        .flat_map(|name| allocate(&mut cluster, &[share(name, "10Gi", "0")], policies).unwrap())
        .collect();
    assert_eq!(devices, ["n1/gpu-0-vgpu", "n2/gpu-0-vgpu", "n1/gpu-0-vgpu"]);
}

#[test]
fn uses_policy_of_claim() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    allocate(&mut cluster, &[share("a", "10Gi", "0")], BINPACK).unwrap();
    let mut own = share("b", "10Gi", "0");
    let spec = own
        .spec
        .as_mut()
        .and_then(|spec| spec.devices.as_mut())
        .unwrap();
    spec.config = Some(vec![serde_json::from_value(json!({"opaque": {"driver": "gpu.drava.dev", "parameters": {
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "placement": {"gpu": "spread"},
    }}})).unwrap()]);
    assert_eq!(
        allocate(&mut cluster, &[own], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
}

#[test]
fn prefers_nominated_and_avoids_failed_nodes() {
    let cluster = cluster(&[("n1", &[80]), ("n2", &[80]), ("n3", &[80])]);
    let mut request = pod_request(&cluster, &[share("a", "10Gi", "0")]);
    request.demand.nominated_node = Some("n3".to_owned());
    assert_eq!(cluster.decide(&request, BINPACK).unwrap().node, "n3");
    request.avoided_nodes = ["n1".to_owned(), "n3".to_owned()].into();
    assert_eq!(cluster.decide(&request, BINPACK).unwrap().node, "n2");
    request.avoided_nodes.insert("n2".to_owned());
    assert_eq!(
        cluster.decide(&request, BINPACK).unwrap().node,
        "n3",
        "avoided nodes are selected last, not never"
    );
}

/// Places a claim and returns the reason.
fn reason(cluster: &Cluster, claim: ResourceClaim, policies: Policies) -> String {
    let placement = cluster
        .decide(&pod_request(cluster, &[claim]), policies)
        .unwrap();
    placement.reason(&placement.claims[0])
}

#[test]
fn explains_placement_with_scores_of_runners_up() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80])]);
    assert_eq!(
        reason(&cluster, share("a", "20Gi", "0"), BINPACK),
        "node n1: binpack: 0% of GPU memory allocated, n2 0%, first by name; \
         gpu-0: binpack: 0% of memory allocated, gpu-1 0%, first by index"
    );
    allocate(&mut cluster, &[share("a", "20Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        reason(&cluster, share("b", "20Gi", "0"), BINPACK),
        "node n1: binpack: 12% of GPU memory allocated, n2 0%; \
         gpu-0: binpack: 25% of memory allocated, gpu-1 0%"
    );
    assert_eq!(
        reason(&cluster, share("b", "20Gi", "0"), SPREAD),
        "node n2: spread: 0% of GPU memory allocated, n1 12%; gpu-0: only feasible GPU"
    );
    let both = request(
        "c",
        &json!({"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "10Gi"}}}),
    );
    assert_eq!(
        reason(&cluster, both, BINPACK),
        "node n1: only feasible node; gpu-0: binpack: 25% of memory allocated, gpu-1 0%; gpu-1: only feasible GPU"
    );
    allocate(&mut cluster, &[whole("w")], BINPACK).unwrap();
    assert_eq!(
        reason(&cluster, share("d", "20Gi", "0"), BINPACK),
        "node n1: binpack: 62% of GPU memory allocated, n2 0%; gpu-0: only feasible GPU"
    );
}

#[test]
fn explains_backtracking_with_better_scored_runner_up() {
    let mut cluster = cluster(&[("n1", &[16, 80, 80])]);
    allocate(&mut cluster, &[share("a", "2Gi", "0")], BINPACK).unwrap();
    let matching = claim(
        "b",
        &json!({
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "1Gi"}}}}],
            "constraints": [{"matchAttribute": "gpu.drava.dev/productName"}],
        }),
    );
    assert_eq!(
        reason(&cluster, matching, BINPACK),
        "node n1: only feasible node; \
         gpu-1: binpack: 0% of memory allocated, gpu-0 12%, which cannot serve all requests of the pod; \
         gpu-2: only feasible GPU"
    );
}

#[test]
fn keeps_free_memory_usable_with_least_fragmentation() {
    let policies = Policies {
        node: NodePlacementPolicy::LeastFragmentation,
        gpu: GpuPlacementPolicy::LeastFragmentation,
    };
    let place = |policies: Policies| {
        let mut cluster = cluster(&[("n1", &[80, 80])]);
        allocate(&mut cluster, &[share("a", "30Gi", "0")], BINPACK).unwrap();
        allocate(&mut cluster, &[share("b", "40Gi", "0")], SPREAD).unwrap();
        // Usual pods request 50 GiB: 10 GiB on the first GPU cost no such place, on the second one none is there.
        for _ in 0..16 {
            let usual = pod_request(&cluster, &[share("u", "50Gi", "0")]);
            cluster.observe_request(&usual);
        }
        allocate(&mut cluster, &[share("c", "10Gi", "0")], policies).unwrap()
    };
    assert_eq!(place(SPREAD), ["n1/gpu-0-vgpu"], "the emptiest GPU");
    assert_eq!(place(policies), ["n1/gpu-1-vgpu"], "of no use for 50 GiB");
}

#[test]
fn costly_selectors_of_one_tenant_suspend_no_other_pod_for_ever() {
    let policies = Policies {
        node: NodePlacementPolicy::LeastFragmentation,
        gpu: GpuPlacementPolicy::LeastFragmentation,
    };
    let list = format!("[{}]", vec!["1"; 400].join(","));
    // The last one fails.
    for result in [
        "true",
        "false",
        "device.attributes['gpu.drava.dev'].none == 1",
    ] {
        let mut cluster = cluster(&[("n1", &[80; 8])]);
        for pod in 0..16 {
            let selectors: Vec<_> = (0..5)
                .map(|index| {
                    let of_gpu = "device.attributes['gpu.drava.dev'].uuid != ''";
                    let expression =
                        format!("{list}.all(x, x != 1{pod}{index}7) && {of_gpu} && {result}");
                    json!({"cel": {"expression": expression}})
                })
                .collect();
            let claim = request(
                &format!("c{pod}"),
                &json!({"deviceClassName": "gpu.drava.dev", "selectors": selectors}),
            );
            let costly = pod_request(&cluster, &[claim]);
            cluster.observe_request(&costly);
        }
        let other = pod_request(&cluster, &[share("other", "10Gi", "0")]);
        let mut turns = 1;
        while cluster
            .decide_in(&other, policies, &mut Turn::limited())
            .is_err()
        {
            turns += 1;
            assert!(turns < 50, "the decision ends: {result}");
        }
    }
}

#[test]
fn keeps_cpus_with_free_gpus_with_least_fragmentation() {
    let policies = Policies {
        node: NodePlacementPolicy::LeastFragmentation,
        gpu: GpuPlacementPolicy::Binpack,
    };
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[])]);
    let mut usual = pod_request(&cluster, &[whole("u")]);
    usual
        .demand
        .requests
        .insert("cpu".to_owned(), drava_api::Quantity::count(8));
    cluster.observe_request(&usual);
    // A pod without claims leaves the CPUs of n1 to pods with GPUs.
    let mut cpu_only = pod_request(&cluster, &[]);
    cpu_only
        .demand
        .requests
        .insert("cpu".to_owned(), drava_api::Quantity::count(4));
    let placement = cluster.decide(&cpu_only, policies).unwrap();
    assert_eq!(placement.node, "n2");
}

#[test]
fn rankings_follow_cpus_and_mix() {
    let policies = Policies {
        node: NodePlacementPolicy::LeastFragmentation,
        gpu: GpuPlacementPolicy::LeastFragmentation,
    };
    let mut cluster = cluster(&[("n1", &[80, 24]), ("n2", &[80, 80]), ("n3", &[24, 24])]);
    let mut random = random_numbers(7);
    for round in 0..200 {
        let memory = format!("{}Gi", [4, 10, 20, 40, 70][random() % 5]);
        let name = format!("p{round}");
        let mut request = pod_request(&cluster, &[share(&name, &memory, "0")]);
        request.uid = name.clone();
        let cpus = (random() % 3) as u64;
        request
            .demand
            .requests
            .insert("cpu".to_owned(), drava_api::Quantity::count(cpus));
        cluster.observe_request(&request);
        let by_ranking = cluster
            .decide(&request, policies)
            .map(|placement| placement.node);
        let by_all = cluster
            .explain(&request, policies)
            .map(|placement| placement.node);
        assert_eq!(by_ranking.ok(), by_all.ok(), "round {round}");
        if let Ok(placement) = cluster.decide(&request, policies) {
            cluster.assume(&placement);
            cluster.assume_pod(&name, &placement.node, &request.demand);
        }
        if random().is_multiple_of(3) && round > 0 {
            let gone = format!("p{}", random() % round);
            cluster.forget(&("default".to_owned(), gone.clone()));
            cluster.forget_pod(&gone);
        }
    }
}

/// A small generator of pseudo-random numbers.
fn random_numbers(seed: usize) -> impl FnMut() -> usize {
    let mut state = seed;
    move || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    }
}
