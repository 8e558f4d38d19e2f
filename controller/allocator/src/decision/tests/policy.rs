//! Which node and which card is preferred.

use drava_api::config::PlacementPolicy;
use serde_json::json;

use super::{BINPACK, SPREAD, place};
use crate::fixture::{ask, cluster, share};
use crate::placement::Policies;

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
