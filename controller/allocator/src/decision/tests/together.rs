//! Devices, claims, containers and pods that must fit together.

use std::collections::BTreeMap;

use drava_api::Quantity;
use serde_json::json;

use super::{BINPACK, place};
use crate::ask::PodAsk;
use crate::fixture::{ask, cluster, pod, request, share};

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
