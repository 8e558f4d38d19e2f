//! Texts of explanations.

use std::sync::Arc;

use drava_api::config::{GpuPlacementPolicy, NodePlacementPolicy};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim};
use serde_json::json;

use super::{BINPACK, allocate, whole};
use crate::cluster::{Cluster, Departure};
use crate::explanation::Explanation;
use crate::fixture::{claim, class, classes, cluster, node, object, pod, request, share, slices};
use crate::placement::{Placement, Policies};
use crate::pod_request::PodRequest;
use crate::searched::{SearchedNodes, Undecided};
use crate::turn::Turn;

#[test]
fn rejects_whole_request_on_shared_gpu() {
    let mut cluster = cluster(&[("n1", &[80])]);
    allocate(&mut cluster, &[share("a", "1Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[whole("w")], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 is shared by other claims)".to_owned())
    );
    cluster.forget(&("default".to_owned(), "a".to_owned()));
    assert_eq!(
        allocate(&mut cluster, &[whole("w")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
    assert_eq!(
        allocate(&mut cluster, &[share("b", "1Gi", "0")], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 is allocated exclusively)".to_owned())
    );
    assert_eq!(
        allocate(&mut cluster, &[whole("w2")], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 is allocated exclusively)".to_owned())
    );
}

/// A rule that taints one device of node n1.
fn rule(device: &str) -> DeviceTaintRule {
    object(json!({"metadata": {"name": "maintenance"}, "spec": {
        "deviceSelector": {"driver": "gpu.drava.dev", "pool": "n1/gpus", "device": device},
        "taint": {"key": "example.com/maintenance", "effect": "NoSchedule"},
    }}))
}

#[test]
fn rejects_devices_tainted_by_rule() {
    let mut cluster = cluster(&[("n1", &[80])]);
    assert!(cluster.upsert_taint_rule(&rule("gpu-0")));
    assert!(!cluster.upsert_taint_rule(&rule("gpu-0")), "unchanged");
    let rejected = Err("0/1 nodes: 1 Tainted (example.com/maintenance:NoSchedule)".to_owned());
    assert_eq!(allocate(&mut cluster, &[whole("w")], BINPACK), rejected);
    for slice in slices("n1", &[80]) {
        cluster.upsert_slice(&slice);
    }
    assert_eq!(
        allocate(&mut cluster, &[whole("w")], BINPACK),
        rejected,
        "a new slice has the taint too"
    );
    let tolerating = request(
        "t",
        &json!({"deviceClassName": "gpu.drava.dev", "tolerations": [{"key": "example.com/maintenance", "operator": "Exists"}]}),
    );
    assert!(allocate(&mut cluster, &[tolerating], BINPACK).is_ok());
    cluster.forget(&("default".to_owned(), "t".to_owned()));
    assert!(cluster.remove_taint_rule("maintenance"));
    assert!(allocate(&mut cluster, &[whole("w")], BINPACK).is_ok());
}

#[test]
fn rejects_all_mode_with_tainted_device() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    let all = request(
        "all",
        &json!({"deviceClassName": "gpu.drava.dev", "allocationMode": "All"}),
    );
    cluster.upsert_taint_rule(&rule("gpu-1"));
    assert_eq!(
        allocate(&mut cluster, std::slice::from_ref(&all), BINPACK),
        Err(
            "0/1 nodes: 1 Tainted (1 of 2 devices found on n1; example.com/maintenance:NoSchedule)"
                .to_owned()
        )
    );
    cluster.remove_taint_rule("maintenance");
    assert_eq!(
        allocate(&mut cluster, &[all], BINPACK).unwrap(),
        ["n1/gpu-0", "n1/gpu-1"]
    );
}

#[test]
fn reports_number_of_devices_found() {
    let mut cluster = cluster(&[("n1", &[80, 80, 80, 80, 80])]);
    let whole = |name: &str, count: u64| {
        request(
            name,
            &json!({"deviceClassName": "gpu.drava.dev", "count": count}),
        )
    };
    allocate(&mut cluster, &[share("a", "1Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[whole("w", 5)], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (4 of 5 devices found on n1; gpu-0 is shared by other claims)".to_owned())
    );
    allocate(&mut cluster, &[whole("x", 3)], BINPACK).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[whole("y", 2)], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (1 of 2 devices found on n1; gpu-0 is shared by other claims, gpu-1 is \
             allocated exclusively and 2 more)"
            .to_owned())
    );
    let shares = request(
        "s",
        &json!({"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "79.5Gi"}}}),
    );
    assert_eq!(
        allocate(&mut cluster, &[shares], BINPACK),
        Err("0/1 nodes: 1 InsufficientMemory (1 of 2 devices found on n1; most free memory 79 GiB on gpu-0)".to_owned())
    );
}

#[test]
fn quotes_closest_rejection_of_several_nodes() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80, 80])]);
    for (name, gib) in [("a", "80Gi"), ("b", "80Gi"), ("c", "80Gi")] {
        allocate(&mut cluster, &[share(name, gib, "0")], BINPACK).unwrap();
    }
    let three = request(
        "w",
        &json!({"deviceClassName": "gpu.drava.dev", "count": 3}),
    );
    assert_eq!(
        allocate(&mut cluster, &[three], BINPACK),
        Err("0/2 nodes: 2 ExclusiveConflict (2 of 3 devices found on n2; gpu-0 is shared by other claims)".to_owned())
    );
}

#[test]
fn reports_most_free_memory() {
    let mut cluster = cluster(&[("n1", &[16]), ("n2", &[80, 80])]);
    for (name, memory) in [("a", "74Gi"), ("b", "77Gi"), ("c", "14Gi")] {
        allocate(&mut cluster, &[share(name, memory, "0")], BINPACK).unwrap();
    }
    assert_eq!(
        allocate(&mut cluster, &[share("d", "8Gi", "0")], BINPACK),
        Err("0/2 nodes: 2 InsufficientMemory (most free memory 6 GiB on n2/gpu-0)".to_owned())
    );
    assert_eq!(
        allocate(&mut cluster, &[share("e", "200Gi", "0")], BINPACK),
        Err("0/2 nodes: 2 InsufficientMemory (requested memory 200 GiB exceeds the largest GPU, 80 GiB on n2/gpu-0)".to_owned())
    );
}

#[test]
fn reports_exhausted_cores_and_slots() {
    let mut cluster = cluster(&[("n1", &[80])]);
    allocate(&mut cluster, &[share("a", "1Gi", "70")], BINPACK).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[share("b", "1Gi", "40")], BINPACK),
        Err("0/1 nodes: 1 InsufficientCores (most free cores 30% on n1/gpu-0)".to_owned())
    );
    for index in 0..9 {
        allocate(
            &mut cluster,
            &[share(&format!("s{index}"), "1Gi", "0")],
            BINPACK,
        )
        .unwrap();
    }
    assert_eq!(
        allocate(&mut cluster, &[share("z", "1Gi", "0")], BINPACK),
        Err("0/1 nodes: 1 SlotsExhausted (every GPU has its maximum number of shares)".to_owned())
    );
}

#[test]
fn hints_at_node_driver_without_devices() {
    let mut empty = Cluster::default();
    for class in classes() {
        empty.upsert_class(class);
    }
    empty.upsert_node(&node("n1"));
    assert_eq!(
        allocate(&mut empty, &[share("a", "1Gi", "0")], BINPACK),
        Err("NoDevices: no node publishes devices of gpu.drava.dev; check that the node driver is running".to_owned())
    );
}

#[test]
fn explains_invalid_claims() {
    let cluster = cluster(&[("n1", &[80])]);
    let mut classes = cluster.classes.clone();
    let other = class(
        "other.example.com",
        r#"device.driver == "other.example.com""#,
    );
    classes.insert("other.example.com".to_owned(), other);
    let explain = |claim: &ResourceClaim| {
        PodRequest::new(
            &pod("p", &["c"]),
            &[("c", claim)],
            &classes,
            &cluster.selectors,
        )
        .map(|request| format!("{} claims", request.claims.len()))
        .unwrap_or_else(|error| Explanation::from(error).summary())
    };
    let of_class = |class: &str| request("c", &json!({"deviceClassName": class}));
    assert_eq!(
        explain(&of_class("other.example.com")),
        "0 claims",
        "claims for other drivers are ignored"
    );
    assert_eq!(explain(&of_class("unknown.example.com")), "0 claims");
    assert_eq!(
        explain(&of_class("fraction.drava.dev")),
        "UnknownClass: claim default/c: request gpu: device class fraction.drava.dev does not exist"
    );
    assert_eq!(
        explain(&claim(
            "c",
            &json!({"requests": [
                {"name": "a", "exactly": {"deviceClassName": "vgpu.drava.dev"}},
                {"name": "b", "exactly": {"deviceClassName": "other.example.com"}},
            ]})
        )),
        "MixedDrivers: claim default/c: request a is for gpu.drava.dev, request b for another driver; use \
         one claim per driver"
    );
    assert_eq!(
        explain(&share("c", "1Gi", "101")),
        "InvalidRequest: claim default/c: request gpu: capacity cores: 101 exceeds 100; cores are percent of one \
         GPU; use count for several devices"
    );
    assert_eq!(
        explain(&request(
            "c",
            &json!({"deviceClassName": "vgpu.drava.dev", "count": 40})
        )),
        "Unsupported: claim default/c: count 40 in request gpu (1 to 32 devices) is not supported"
    );
}

#[test]
fn names_missing_type_and_what_provides_it() {
    let explain = |class: &str| {
        let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
        cluster.upsert_class(crate::fixture::class(
            "other.example.com",
            "device.driver == 'gpu.drava.dev' && false",
        ));
        allocate(
            &mut cluster,
            &[request("c", &json!({"deviceClassName": class}))],
            BINPACK,
        )
        .unwrap_err()
    };
    assert_eq!(
        explain("mig.drava.dev"),
        "0/2 nodes: 2 TypeMismatch (no GPU is in MIG mode; set mode mig or dynamic in a GpuNodeProfile, or use class \
         fraction.drava.dev)"
    );
    assert_eq!(
        explain("other.example.com"),
        "0/2 nodes: 2 TypeMismatch (no device is of class other.example.com; use another class, or another mode in a \
         GpuNodeProfile)"
    );
    let mut partitions = super::partition::partitioned(1);
    assert_eq!(
        allocate(&mut partitions, &[whole("w")], BINPACK),
        Err("0/1 nodes: 1 TypeMismatch (no GPU is published as a whole; set mode auto or exclusive in a GpuNodeProfile)".to_owned())
    );
}

const GAVE_UP: &str = "SearchLimit (the devices can be combined in too many ways to try all; request fewer devices, or put \
                       equal requests into one with a count)";

/// A request that does not fit on 16 GPUs of 80 GiB, which only a search of all combinations shows: 17 shares of more than half
/// a GPU, and a small one, so that the amounts do not tell.
fn hard_to_reject(cluster: &Cluster) -> PodRequest {
    let requests: Vec<_> = (0..18)
        .map(|index| {
            let memory = if index == 17 { "1Mi" } else { "41Gi" };
            json!({"name": format!("r{index}"), "exactly": {
                "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": memory}},
            }})
        })
        .collect();
    let claim = claim("h", &json!({"requests": requests}));
    let pod = object(json!({"metadata": {"uid": "p"}, "spec": {"containers": []}}));
    let named = [("h", &claim)];
    PodRequest::new(&pod, &named, &cluster.classes, &cluster.selectors).unwrap()
}

#[test]
fn costly_searches_take_turns() {
    let nodes = ["n1", "n2", "n3", "n4"].map(|name| (name, &[80; 16][..]));
    let cluster = cluster(&nodes);
    let mut pod_request = hard_to_reject(&cluster);
    pod_request.searched = Some(Arc::default());
    let mut turns = 1;
    let explanation = loop {
        match cluster.decide_in(&pod_request, BINPACK, &mut Turn::limited()) {
            Ok(placement) => panic!("{placement:?}"),
            Err(Undecided::Rejected(explanation)) => break explanation,
            Err(Undecided::Suspended(_)) => turns += 1,
        }
        assert!(turns < 20, "the decision ends");
    };
    assert_eq!(turns, 4, "a node in each");
    assert_eq!(explanation.summary(), format!("0/4 nodes: 4 {GAVE_UP}"));
}

#[test]
fn searches_of_changing_nodes_end_with_any_policy() {
    const LEAST_FRAGMENTATION: Policies = Policies {
        node: NodePlacementPolicy::LeastFragmentation,
        gpu: GpuPlacementPolicy::LeastFragmentation,
    };
    let nodes = ["n1", "n2", "n3", "n4"].map(|name| (name, &[80; 16][..]));
    for policies in [BINPACK, LEAST_FRAGMENTATION] {
        let mut cluster = cluster(&nodes);
        let mut pod_request = hard_to_reject(&cluster);
        let member = crate::fixture::pod_request(&cluster, &[share("m", "1Gi", "0")]);
        let mut searched = SearchedNodes::default();
        let mut turns = 1;
        loop {
            pod_request.searched = Some(Arc::new(searched.clone()));
            match cluster.decide_in(&pod_request, policies, &mut Turn::limited()) {
                Ok(placement) => panic!("{placement:?}"),
                Err(Undecided::Rejected(_)) => break,
                Err(Undecided::Suspended(suspended)) => searched.extend(suspended.searched),
            }
            turns += 1;
            assert!(turns < 20, "the decision ends with {policies:?}");
            // As the members of a gang that each turn places anew.
            for (name, _) in nodes {
                let placement = cluster.decide_on(name, &member, policies).unwrap();
                cluster.assume(&placement);
                cluster.forget(&("default".to_owned(), "m".to_owned()));
            }
        }
        assert!(turns > 1);
    }
}

#[test]
fn end_of_simulation_forgets_searches_that_gave_up_early() {
    let mut cluster = cluster(&["n1", "n2"].map(|name| (name, &[80; 16][..])));
    let pod_request = hard_to_reject(&cluster);
    cluster.presume_gone(&Departure {
        pods: ["other".to_owned()].into(),
        ..Departure::default()
    });
    let mut turn = Turn::limited();
    let _ = cluster.decide_in(&pod_request, BINPACK, &mut turn);
    assert!(turn.is_out_of_searches());
    cluster.presume_gone(&Departure::default());
    let mut turn = Turn::limited();
    let _ = cluster.decide_in(&pod_request, BINPACK, &mut turn);
    assert!(turn.is_out_of_searches(), "the second node is searched");
}

#[test]
fn stops_search_at_limit() {
    let mut cluster = cluster(&[("n1", &[80; 16])]);
    let mut pod_request = hard_to_reject(&cluster);
    let summary = |decision: Result<_, Explanation>| decision.map(|_| ()).unwrap_err().summary();
    let gave_up = format!("0/1 nodes: 1 {GAVE_UP}");
    assert_eq!(summary(cluster.decide(&pod_request, BINPACK)), gave_up);
    // A decision that cannot go on later has one limit for all nodes and simulations.
    let others: Vec<String> = (2..8).map(|number| format!("n{number}")).collect();
    for node in &others {
        cluster.upsert_node(&crate::fixture::node(node));
        for slice in crate::fixture::slices(node, &[80; 16]) {
            cluster.upsert_slice(&slice);
        }
    }
    let mut turn = Turn::limited();
    let explained = cluster.explain_in(&pod_request, BINPACK, &mut turn);
    assert_eq!(
        rejected(explained).summary(),
        gave_up.replace("0/1 nodes: 1", "0/7 nodes: 7")
    );
    assert!(turn.is_out_of_searches());
    let before = turn.checked();
    pod_request.demand.node_name = Some("n1".to_owned());
    let on_node = cluster.decide_on_in("n1", &pod_request, BINPACK, &mut turn);
    assert_eq!(rejected(on_node).summary(), gave_up);
    assert!(turn.checked() - before < 2_000, "the first path only");
}

fn rejected(decision: Result<Placement, Undecided>) -> Explanation {
    match decision {
        Err(Undecided::Rejected(explanation)) => explanation,
        other => panic!("{other:?}"),
    }
}

#[test]
fn claim_has_32_devices_at_most() {
    let mut cluster = cluster(&[("n1", &[80; 40])]);
    let requests = |counts: [u32; 2]| {
        let request = |name: &str, count: u32| json!({"name": name, "exactly": {"deviceClassName": "gpu.drava.dev", "count": count}});
        let [first, second] = counts;
        claim(
            "c",
            &json!({"requests": [request("a", first), request("b", second)]}),
        )
    };
    let pod = pod("p", &["c"]);
    let too_many = requests([20, 13]);
    let claims = [("c", &too_many)];
    let error = PodRequest::new(&pod, &claims, &cluster.classes, &cluster.selectors);
    assert_eq!(
        Explanation::from(error.unwrap_err()).summary(),
        "Unsupported: claim default/c: a claim for 33 devices (at most 32 devices) is not supported"
    );
    let devices = allocate(&mut cluster, &[requests([20, 12])], BINPACK);
    assert_eq!(devices.unwrap().len(), 32);
}
