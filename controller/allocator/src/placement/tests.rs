//! Tables of decisions, and properties that hold for any cluster and any sequence of claims.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::fixture::{ask, claim, class, cluster, node, pod, request, share, slices};

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
    claims: &[ResourceClaimOf],
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

type ResourceClaimOf = k8s_openapi::api::resource::v1::ResourceClaim;

fn whole(name: &str) -> ResourceClaimOf {
    request(name, &json!({"deviceClassName": "gpu.drava.dev"}))
}

#[test]
fn binpack_fills_a_card_before_the_next() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80])]);
    let mut places = Vec::new();
    for (name, memory) in [("a", "30Gi"), ("b", "30Gi"), ("c", "30Gi"), ("d", "20Gi")] {
        places.extend(place(&mut cluster, &[share(name, memory, "0")], BINPACK).unwrap());
    }
    assert_eq!(
        places,
        [
            "n1/gpu-0-vgpu",
            "n1/gpu-0-vgpu",
            "n1/gpu-1-vgpu",
            "n1/gpu-0-vgpu"
        ]
    );
}

#[test]
fn spread_takes_the_emptiest_node_and_card() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80])]);
    let places: Vec<_> = ["a", "b", "c", "d", "e"]
        .iter()
        .flat_map(|name| place(&mut cluster, &[share(name, "10Gi", "0")], SPREAD).unwrap())
        .collect();
    assert_eq!(
        places,
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
fn node_and_card_policies_are_independent() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80])]);
    let policies = Policies {
        node: PlacementPolicy::Spread,
        gpu: PlacementPolicy::Binpack,
    };
    let places: Vec<_> = ["a", "b", "c"]
        .iter()
        .flat_map(|name| place(&mut cluster, &[share(name, "10Gi", "0")], policies).unwrap())
        .collect();
    assert_eq!(places, ["n1/gpu-0-vgpu", "n2/gpu-0-vgpu", "n1/gpu-0-vgpu"]);
}

#[test]
fn a_claim_may_choose_its_policy() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    place(&mut cluster, &[share("a", "10Gi", "0")], BINPACK).unwrap();
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
        place(&mut cluster, &[own], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
}

#[test]
fn a_card_is_whole_or_shared() {
    let mut cluster = cluster(&[("n1", &[80])]);
    place(&mut cluster, &[share("a", "1Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        place(&mut cluster, &[whole("w")], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 is shared by other claims)".to_owned())
    );
    cluster.forget(&("default".to_owned(), "a".to_owned()));
    assert_eq!(
        place(&mut cluster, &[whole("w")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
    assert_eq!(
        place(&mut cluster, &[share("b", "1Gi", "0")], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 is taken whole)".to_owned())
    );
    assert_eq!(
        place(&mut cluster, &[whole("w2")], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (n1/gpu-0 is taken whole)".to_owned())
    );
}

#[test]
fn a_claim_for_several_cards_says_how_many_were_found() {
    let mut cluster = cluster(&[("n1", &[80, 80, 80, 80, 80])]);
    let whole = |name: &str, count: u64| {
        request(
            name,
            &json!({"deviceClassName": "gpu.drava.dev", "count": count}),
        )
    };
    place(&mut cluster, &[share("a", "1Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        place(&mut cluster, &[whole("w", 5)], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (4 of 5 devices found on n1; gpu-0 is shared by other claims)".to_owned())
    );
    place(&mut cluster, &[whole("x", 3)], BINPACK).unwrap();
    assert_eq!(
        place(&mut cluster, &[whole("y", 2)], BINPACK),
        Err("0/1 nodes: 1 ExclusiveConflict (1 of 2 devices found on n1; gpu-0 is shared by other claims, gpu-1 is \
             taken whole and 2 more)"
            .to_owned())
    );
    let shares = request(
        "s",
        &json!({"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "79.5Gi"}}}),
    );
    assert_eq!(
        place(&mut cluster, &[shares], BINPACK),
        Err("0/1 nodes: 1 InsufficientMemory (1 of 2 devices found on n1; largest free piece 79 GiB on gpu-0)".to_owned())
    );
}

#[test]
fn of_several_nodes_the_nearest_is_quoted() {
    let mut cluster = cluster(&[("n1", &[80, 80]), ("n2", &[80, 80, 80])]);
    for (name, gib) in [("a", "80Gi"), ("b", "80Gi"), ("c", "80Gi")] {
        place(&mut cluster, &[share(name, gib, "0")], BINPACK).unwrap();
    }
    let three = request(
        "w",
        &json!({"deviceClassName": "gpu.drava.dev", "count": 3}),
    );
    assert_eq!(
        place(&mut cluster, &[three], BINPACK),
        Err("0/2 nodes: 2 ExclusiveConflict (2 of 3 devices found on n2; gpu-0 is shared by other claims)".to_owned())
    );
}

#[test]
fn shortage_names_the_largest_piece() {
    let mut cluster = cluster(&[("n1", &[16]), ("n2", &[80, 80])]);
    for (name, memory) in [("a", "74Gi"), ("b", "77Gi"), ("c", "14Gi")] {
        place(&mut cluster, &[share(name, memory, "0")], BINPACK).unwrap();
    }
    assert_eq!(
        place(&mut cluster, &[share("d", "8Gi", "0")], BINPACK),
        Err("0/2 nodes: 2 InsufficientMemory (largest free piece 6 GiB on n2/gpu-0)".to_owned())
    );
    assert_eq!(
        place(&mut cluster, &[share("e", "200Gi", "0")], BINPACK),
        Err("0/2 nodes: 2 InsufficientMemory (200 GiB is more than any card has: the largest has 80 GiB, n2/gpu-0)".to_owned())
    );
}

#[test]
fn cores_and_slots_run_out() {
    let mut cluster = cluster(&[("n1", &[80])]);
    place(&mut cluster, &[share("a", "1Gi", "70")], BINPACK).unwrap();
    assert_eq!(
        place(&mut cluster, &[share("b", "1Gi", "40")], BINPACK),
        Err("0/1 nodes: 1 InsufficientCores (most free cores 30 on n1/gpu-0)".to_owned())
    );
    for index in 0..9 {
        place(
            &mut cluster,
            &[share(&format!("s{index}"), "1Gi", "0")],
            BINPACK,
        )
        .unwrap();
    }
    assert_eq!(
        place(&mut cluster, &[share("z", "1Gi", "0")], BINPACK),
        Err("0/1 nodes: 1 SlotsExhausted".to_owned())
    );
}

#[test]
fn several_devices_come_from_different_cards() {
    let mut one = cluster(&[("n1", &[80])]);
    let two = |name: &str| {
        request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "10Gi"}}}),
        )
    };
    assert_eq!(
        place(&mut one, &[two("a")], BINPACK),
        Err("0/1 nodes: 1 InsufficientDevices (1 of 2 devices found on n1)".to_owned())
    );
    // Two claims for one container: on a single card it would see one device.
    assert_eq!(
        place(
            &mut one,
            &[share("a", "10Gi", "0"), share("b", "10Gi", "0")],
            BINPACK
        ),
        Err(
            "0/1 nodes: 1 TopologyUnsatisfied (container main needs devices of different cards)"
                .to_owned()
        )
    );
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    assert_eq!(
        place(&mut cluster, &[two("a")], BINPACK).unwrap(),
        ["n1/gpu-0-vgpu", "n1/gpu-1-vgpu"]
    );
    assert_eq!(
        place(
            &mut cluster,
            &[share("b", "10Gi", "0"), share("c", "10Gi", "0")],
            BINPACK
        )
        .unwrap(),
        ["n1/gpu-0-vgpu", "n1/gpu-1-vgpu"]
    );
}

#[test]
fn different_containers_may_share_a_card() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let claims = [share("a", "10Gi", "0"), share("b", "10Gi", "0")];
    let mut pod = pod("p", &["a"]);
    let spec = pod.spec.as_mut().unwrap();
    let mut other = spec.containers[0].clone();
    other.name = "other".to_owned();
    other.resources.as_mut().unwrap().claims.as_mut().unwrap()[0].name = "b".to_owned();
    spec.containers.push(other);
    let named = [("a", &claims[0]), ("b", &claims[1])];
    let ask = PodAsk::new(&pod, &named, &cluster.classes, &cluster.selectors).unwrap();
    let placement = cluster.decide(&ask, BINPACK).unwrap();
    cluster.assume(&placement);
    assert_eq!(placement.claims.len(), 2);
}

#[test]
fn a_container_avoids_the_cards_it_holds_already() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    let mut held = share("held", "10Gi", "0");
    held.status = Some(serde_json::from_value(json!({"allocation": {
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
            "shareID": "s", "consumedCapacity": {"memory": "10Gi", "cores": "0", "slots": "1"},
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
    }})).unwrap());
    cluster.upsert_claim(&held);
    assert_eq!(
        place(&mut cluster, &[held, share("b", "10Gi", "0")], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
}

#[test]
fn an_allocated_claim_pins_the_pod() {
    let cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    let mut held = share("held", "10Gi", "0");
    held.status = Some(serde_json::from_value(json!({"allocation": {
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]},
    }})).unwrap());
    let ask = ask(&cluster, &[held.clone(), share("b", "10Gi", "0")]);
    assert_eq!(cluster.decide(&ask, BINPACK).unwrap().node, "n2");
    let mut elsewhere = ask;
    elsewhere.demand.node_name = Some("n1".to_owned());
    assert_eq!(
        cluster.decide(&elsewhere, BINPACK).unwrap_err().summary(),
        "0/2 nodes: 2 NodeUnfit (claim default/held is allocated elsewhere; the pod names another node)"
    );
}

#[test]
fn nominated_and_avoided_nodes() {
    let cluster = cluster(&[("n1", &[80]), ("n2", &[80]), ("n3", &[80])]);
    let mut wanted = ask(&cluster, &[share("a", "10Gi", "0")]);
    wanted.demand.nominated_node = Some("n3".to_owned());
    assert_eq!(cluster.decide(&wanted, BINPACK).unwrap().node, "n3");
    wanted.avoid = ["n1".to_owned(), "n3".to_owned()].into();
    assert_eq!(cluster.decide(&wanted, BINPACK).unwrap().node, "n2");
    wanted.avoid.insert("n2".to_owned());
    assert_eq!(
        cluster.decide(&wanted, BINPACK).unwrap().node,
        "n3",
        "tried last, not never"
    );
}

#[test]
fn companions_of_a_shared_claim_must_fit_too() {
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    cluster.assume_pod(
        "other",
        "n1",
        BTreeMap::from([("cpu".to_owned(), Quantity::count(6))]),
    );
    let mut ask = ask(&cluster, &[share("a", "10Gi", "0")]);
    assert_eq!(cluster.decide(&ask, BINPACK).unwrap().node, "n1");
    ask.companions = vec![ask.demand.clone(), ask.demand.clone()];
    assert_eq!(cluster.decide(&ask, BINPACK).unwrap().node, "n2");
}

#[test]
fn selectors_constraints_and_alternatives() {
    let mut cluster = cluster(&[("n1", &[16, 80, 80])]);
    let h100 = r#"device.attributes["gpu.drava.dev"].productName.endsWith("H100")"#;
    let selected = |name: &str, expression: &str| {
        request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "selectors": [{"cel": {"expression": expression}}],
            "capacity": {"requests": {"memory": "1Gi"}}}),
        )
    };
    assert_eq!(
        place(&mut cluster, &[selected("a", h100)], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
    assert_eq!(
        place(&mut cluster, &[selected("b", "false")], BINPACK),
        Err("0/1 nodes: 1 SelectorMismatch".to_owned())
    );
    let error = place(
        &mut cluster,
        &[selected(
            "c",
            r#"device.attributes["gpu.drava.dev"].nope == 1"#,
        )],
        BINPACK,
    )
    .unwrap_err();
    assert!(
        error.starts_with("SelectorError: claim default/c: selector #0 on device gpu.drava.dev/n1/gpus/gpu-0-vgpu: CEL runtime error: no such key: nope."),
        "{error}"
    );
    let constrained = |name: &str, constraint: serde_json::Value| {
        claim(
            name,
            &json!({
                "requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "1Gi"}}}}],
                "constraints": [constraint],
            }),
        )
    };
    assert_eq!(
        place(
            &mut cluster,
            &[constrained(
                "m",
                json!({"matchAttribute": "gpu.drava.dev/productName"})
            )],
            BINPACK
        )
        .unwrap(),
        ["n1/gpu-1-vgpu", "n1/gpu-2-vgpu"]
    );
    assert_eq!(
        place(
            &mut cluster,
            &[constrained(
                "d",
                json!({"distinctAttribute": "gpu.drava.dev/productName"})
            )],
            BINPACK
        )
        .unwrap(),
        ["n1/gpu-1-vgpu", "n1/gpu-0-vgpu"]
    );
    assert_eq!(
        place(
            &mut cluster,
            &[constrained(
                "x",
                json!({"matchAttribute": "gpu.drava.dev/uuid"})
            )],
            BINPACK
        ),
        Err("0/1 nodes: 1 TopologyUnsatisfied (1 of 2 devices found on n1; constraint on gpu.drava.dev/uuid)".to_owned())
    );
    let alternatives = claim(
        "f",
        &json!({"requests": [{"name": "gpu", "firstAvailable": [
            {"name": "huge", "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "100Gi"}}},
            {"name": "small", "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "16Gi"}}},
        ]}]}),
    );
    let placement = cluster
        .decide(&ask(&cluster, &[alternatives]), BINPACK)
        .unwrap();
    assert_eq!(placement.claims[0].devices[0].request, "gpu/small");
}

#[test]
fn all_devices_means_all_that_could_serve() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    let all = |name: &str, memory: &str| {
        request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "allocationMode": "All", "capacity": {"requests": {"memory": memory}}}),
        )
    };
    assert_eq!(
        place(&mut cluster, &[all("a", "50Gi")], BINPACK).unwrap(),
        ["n1/gpu-0-vgpu", "n1/gpu-1-vgpu"]
    );
    place(&mut cluster, &[share("b", "20Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        place(&mut cluster, &[all("c", "20Gi")], BINPACK),
        Err("0/1 nodes: 1 InsufficientMemory (1 of 2 devices found on n1; largest free piece 10 GiB on gpu-0)".to_owned())
    );
    assert!(
        place(&mut cluster, &[all("d", "200Gi")], BINPACK).is_err(),
        "at least one"
    );
}

#[test]
fn administrators_look_at_busy_cards_and_are_charged_nothing() {
    let mut cluster = cluster(&[("n1", &[80])]);
    place(&mut cluster, &[whole("w")], BINPACK).unwrap();
    let admin = |name: &str| {
        request(
            name,
            &json!({"deviceClassName": "gpu.drava.dev", "adminAccess": true}),
        )
    };
    assert_eq!(
        place(&mut cluster, &[admin("m1")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
    assert_eq!(
        place(&mut cluster, &[admin("m2")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
    cluster.forget(&("default".to_owned(), "w".to_owned()));
    assert_eq!(
        place(&mut cluster, &[whole("w2")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
}

#[test]
fn taints_keep_devices_from_those_who_do_not_tolerate_them() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut tainted = slices("n1", &[80]);
    tainted[1].metadata.resource_version = Some("2".to_owned());
    for device in tainted[1].spec.devices.iter_mut().flatten() {
        device.taints.get_or_insert_default().push(
            serde_json::from_value(
                json!({"key": "gpu.drava.dev/unhealthy", "value": "xid-79", "effect": "NoExecute"}),
            )
            .unwrap(),
        );
    }
    cluster.upsert_slice(&tainted[1]);
    assert_eq!(
        place(&mut cluster, &[share("a", "1Gi", "0")], BINPACK),
        Err("0/1 nodes: 1 Unhealthy (xid-79)".to_owned())
    );
    let tolerant = request(
        "t",
        &json!({"deviceClassName": "vgpu.drava.dev", "tolerations": [{"operator": "Exists"}]}),
    );
    assert_eq!(
        place(&mut cluster, &[tolerant], BINPACK).unwrap(),
        ["n1/gpu-0-vgpu"]
    );
}

#[test]
fn without_devices_the_driver_is_asked_about() {
    let mut empty = Cluster::default();
    for class in crate::fixture::classes() {
        empty.upsert_class(class);
    }
    empty.upsert_node(&node("n1"));
    assert_eq!(
        place(&mut empty, &[share("a", "1Gi", "0")], BINPACK),
        Err("NoDevices: no node publishes devices of gpu.drava.dev; is the node driver running there?".to_owned())
    );
}

#[test]
fn claims_that_cannot_be_served_say_why() {
    let cluster = cluster(&[("n1", &[80])]);
    let mut classes = cluster.classes.clone();
    let other = class(
        "other.example.com",
        r#"device.driver == "other.example.com""#,
    );
    classes.insert("other.example.com".to_owned(), other);
    let refusal = |claim: &ResourceClaimOf| {
        PodAsk::new(
            &pod("p", &["c"]),
            &[("c", claim)],
            &classes,
            &cluster.selectors,
        )
        .map(|ask| format!("{} claims", ask.claims.len()))
        .unwrap_or_else(|error| Explanation::from(error).summary())
    };
    let of_class = |class: &str| request("c", &json!({"deviceClassName": class}));
    assert_eq!(
        refusal(&of_class("other.example.com")),
        "0 claims",
        "another driver's claim is none of ours"
    );
    assert_eq!(refusal(&of_class("nobody.example.com")), "0 claims");
    assert_eq!(
        refusal(&of_class("mig.drava.dev")),
        "UnknownClass: claim default/c: request gpu: device class mig.drava.dev does not exist"
    );
    assert_eq!(
        refusal(&claim(
            "c",
            &json!({"requests": [
                {"name": "a", "exactly": {"deviceClassName": "vgpu.drava.dev"}},
                {"name": "b", "exactly": {"deviceClassName": "other.example.com"}},
            ]})
        )),
        "MixedDrivers: claim default/c: request a is for gpu.drava.dev, request b for another driver; one claim is \
         allocated by one driver, use a claim for each"
    );
    assert_eq!(
        refusal(&share("c", "1Gi", "101")),
        "InvalidRequest: claim default/c: request gpu: capacity cores: 101 is above 100; cores are percent of one \
         card, ask for several devices with count"
    );
    assert_eq!(
        refusal(&request(
            "c",
            &json!({"deviceClassName": "vgpu.drava.dev", "count": 40})
        )),
        "Unsupported: claim default/c: count 40 in request gpu (1 to 32 devices) is not supported by this version"
    );
}

#[test]
fn the_search_gives_up_in_bounded_time() {
    let mut cluster = cluster(&[("n1", &[80; 24])]);
    // No two of 24 cards share a UUID, so no combination works; there are millions.
    let hopeless = claim(
        "h",
        &json!({
            "requests": [
                {"name": "a", "exactly": {"deviceClassName": "vgpu.drava.dev", "count": 8, "capacity": {"requests": {"memory": "1Gi"}}}},
                {"name": "b", "exactly": {"deviceClassName": "vgpu.drava.dev", "count": 8, "capacity": {"requests": {"memory": "1Gi"}}}},
            ],
            "constraints": [{"requests": ["b"], "matchAttribute": "gpu.drava.dev/uuid"}],
        }),
    );
    assert_eq!(
        place(&mut cluster, &[hopeless], BINPACK),
        Err("0/1 nodes: 1 SearchLimit (too many combinations)".to_owned())
    );
}

/// A claim of the properties below.
#[derive(Debug, Clone)]
enum Wish {
    Share {
        memory_gib: u64,
        cores: u64,
        count: u64,
    },
    Whole {
        count: u64,
    },
    /// Frees the claim at this position among those held.
    Free(prop::sample::Index),
}

fn wishes() -> impl Strategy<Value = Vec<Wish>> {
    let wish = prop_oneof![
        4 => (1..50_u64, 0..60_u64, 1..3_u64).prop_map(|(memory_gib, cores, count)| Wish::Share { memory_gib, cores, count }),
        1 => (1..3_u64).prop_map(|count| Wish::Whole { count }),
        2 => any::<prop::sample::Index>().prop_map(Wish::Free),
    ];
    prop::collection::vec(wish, 1..40)
}

fn nodes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    prop::collection::vec(
        prop::collection::vec(prop_oneof![Just(16_u64), Just(80_u64)], 1..4),
        1..4,
    )
}

/// What one claim holds, as (card, memory, cores; none of both for a whole card): written from the results, without
/// the allocator's book-keeping.
type Held = Vec<(String, Option<(u64, u64)>)>;

fn held(placement: &Placement) -> Held {
    let whole_units = |amounts: &BTreeMap<String, Quantity>, name: &str| {
        amounts
            .get(name)
            .and_then(|amount| amount.to_u64_rounded_up())
            .unwrap_or_default()
    };
    placement.claims[0]
        .devices
        .iter()
        .map(|grant| {
            let amounts = match &grant.grant {
                Grant::Share(amounts) => Some((
                    whole_units(amounts, "memory"),
                    whole_units(amounts, "cores"),
                )),
                Grant::Exclusive | Grant::Admin(_) => None,
            };
            (grant.device.card.to_string(), amounts)
        })
        .collect()
}

/// The rules of a card, from scratch: whole for one claim, or shares that fit.
fn check(all: &BTreeMap<String, Held>, cards: &BTreeMap<String, u64>) -> Result<(), TestCaseError> {
    let mut by_card: BTreeMap<&str, Vec<Option<(u64, u64)>>> = BTreeMap::new();
    for (card, amounts) in all.values().flatten() {
        by_card.entry(card).or_default().push(*amounts);
    }
    for (card, holders) in by_card {
        let whole = holders.iter().filter(|holder| holder.is_none()).count();
        prop_assert!(
            whole == 0 || holders.len() == 1,
            "{card} is held whole and otherwise"
        );
        let (memory, cores) = holders
            .iter()
            .flatten()
            .fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1));
        prop_assert!(memory <= cards[card] << 30, "{card}: {memory} bytes");
        prop_assert!(cores <= 100, "{card}: {cores} cores");
        prop_assert!(holders.len() <= 10, "{card}: {} tenants", holders.len());
    }
    Ok(())
}

/// Whether some node has room by the same rules: for one device, some card; for two, two cards of one node.
fn has_room(wish: &Wish, all: &BTreeMap<String, Held>, cards: &BTreeMap<String, u64>) -> bool {
    let mut free_by_node: BTreeMap<&str, u64> = BTreeMap::new();
    for (card, gib) in cards {
        let holders: Vec<_> = all
            .values()
            .flatten()
            .filter(|(held, _)| held == card)
            .map(|(_, amounts)| amounts)
            .collect();
        let (memory, cores) = holders
            .iter()
            .copied()
            .flatten()
            .fold((0, 0), |sum, held| (sum.0 + held.0, sum.1 + held.1));
        let fits = match wish {
            Wish::Share {
                memory_gib,
                cores: wanted,
                ..
            } => {
                holders.iter().all(|holder| holder.is_some())
                    && holders.len() < 10
                    && memory + (memory_gib << 30) <= gib << 30
                    && cores + wanted <= 100
            }
            Wish::Whole { .. } => holders.is_empty(),
            Wish::Free(_) => false,
        };
        let node = card.split('-').nth(1).unwrap_or_default();
        *free_by_node.entry(node).or_default() += u64::from(fits);
    }
    let count = match wish {
        Wish::Share { count, .. } | Wish::Whole { count } => *count,
        Wish::Free(_) => return false,
    };
    free_by_node.values().any(|free| *free >= count)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Never more than a card has, and never a refusal while there is room, whatever comes and goes.
    #[test]
    fn exact(shape in nodes(), wishes in wishes(), spread in any::<bool>()) {
        let policies = if spread { SPREAD } else { BINPACK };
        let named: Vec<(String, Vec<u64>)> =
            shape.into_iter().enumerate().map(|(index, cards)| (format!("n{index}"), cards)).collect();
        let borrowed: Vec<(&str, &[u64])> = named.iter().map(|(name, cards)| (name.as_str(), cards.as_slice())).collect();
        let mut cluster = cluster(&borrowed);
        let cards: BTreeMap<String, u64> = named
            .iter()
            .flat_map(|(node, cards)| cards.iter().enumerate().map(move |(card, gib)| (format!("GPU-{node}-{card}"), *gib)))
            .collect();
        let mut all: BTreeMap<String, Held> = BTreeMap::new();
        for (index, wish) in wishes.iter().enumerate() {
            let name = format!("c{index}");
            let claim = match wish {
                Wish::Free(which) => {
                    if !all.is_empty() {
                        let name = which.get(&all.keys().cloned().collect::<Vec<_>>()).clone();
                        all.remove(&name);
                        cluster.forget(&("default".to_owned(), name));
                    }
                    continue;
                }
                Wish::Share { memory_gib, cores, count } => request(&name, &json!({"deviceClassName": "vgpu.drava.dev", "count": count,
                    "capacity": {"requests": {"memory": format!("{memory_gib}Gi"), "cores": cores.to_string()}}})),
                Wish::Whole { count } => request(&name, &json!({"deviceClassName": "gpu.drava.dev", "count": count})),
            };
            let ask = ask(&cluster, &[claim]);
            let decision = cluster.decide(&ask, policies);
            let again = cluster.decide(&ask, policies);
            prop_assert_eq!(decision.as_ref().map(held).ok(), again.as_ref().map(held).ok(), "not deterministic");
            match decision {
                Ok(placement) => {
                    cluster.assume(&placement);
                    all.insert(name, held(&placement));
                    check(&all, &cards)?;
                }
                Err(explanation) => {
                    prop_assert!(!has_room(wish, &all, &cards), "refused with room left: {}", explanation.summary());
                    let nodes = named.len();
                    let prefix = format!("0/{nodes} nodes: ");
                    prop_assert!(explanation.summary().starts_with(&prefix));
                }
            }
        }
    }

    /// The order in which objects arrive does not matter.
    #[test]
    fn arrival_order(seed in any::<prop::sample::Index>(), memory in 1..90_u64) {
        let straight = cluster(&[("n1", &[80, 16]), ("n2", &[80]), ("n3", &[16])]);
        let mut shuffled = Cluster::default();
        let mut objects: Vec<_> = [("n1", &[80, 16][..]), ("n2", &[80]), ("n3", &[16])]
            .iter()
            .flat_map(|(name, cards)| slices(name, cards))
            .collect();
        let by = seed.index(objects.len());
        objects.rotate_left(by);
        objects.reverse();
        for slice in &objects {
            shuffled.upsert_slice(slice);
        }
        for name in ["n3", "n1", "n2"] {
            shuffled.upsert_node(&node(name));
        }
        for class in crate::fixture::classes() {
            shuffled.upsert_class(class);
        }
        let claim = share("a", &format!("{memory}Gi"), "10");
        let outcome = |cluster: &Cluster| {
            cluster
                .decide(&ask(cluster, std::slice::from_ref(&claim)), BINPACK)
                .map(|placement| (placement.node.clone(), held(&placement)))
                .map_err(|explanation| explanation.summary())
        };
        prop_assert_eq!(outcome(&straight), outcome(&shuffled));
    }
}
