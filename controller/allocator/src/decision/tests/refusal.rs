//! What is refused, and in which words.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use super::{BINPACK, place, whole};
use crate::ask::PodAsk;
use crate::cluster::Cluster;
use crate::explanation::Explanation;
use crate::fixture::{claim, class, classes, cluster, node, pod, request, share};

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
fn without_devices_the_driver_is_asked_about() {
    let mut empty = Cluster::default();
    for class in classes() {
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
    let refusal = |claim: &ResourceClaim| {
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
        "InvalidRequest: claim default/c: request gpu: capacity cores: 101 exceeds 100; cores are percent of one \
         GPU; use count for several devices"
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
