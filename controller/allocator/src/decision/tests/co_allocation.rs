//! Several devices, claims, containers and pods that are placed together.

use drava_api::Quantity;
use serde_json::json;

use super::{BINPACK, allocate};
use crate::capacity::Amounts;
use crate::fixture::{cluster, pod, pod_request, request, share};
use crate::pod_request::PodRequest;

/// `k8s.io/dynamic-resource-allocation` 0.37.2 may give both requests shares of one device.
#[test]
fn selects_different_gpus_for_one_container() {
    let mut one = cluster(&[("n1", &[80])]);
    let two = |name: &str| {
        request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "count": 2, "capacity": {"requests": {"memory": "10Gi"}}}),
        )
    };
    assert_eq!(
        allocate(&mut one, &[two("a")], BINPACK),
        Err("0/1 nodes: 1 InsufficientDevices (1 of 2 devices found on n1)".to_owned())
    );
    // Two claims of one container cannot use the same GPU.
    assert_eq!(
        allocate(
            &mut one,
            &[share("a", "10Gi", "0"), share("b", "10Gi", "0")],
            BINPACK
        ),
        Err(
            "0/1 nodes: 1 TopologyUnsatisfied (container main needs devices of different GPUs)"
                .to_owned()
        )
    );
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    assert_eq!(
        allocate(&mut cluster, &[two("a")], BINPACK).unwrap(),
        ["n1/gpu-0-vgpu", "n1/gpu-1-vgpu"]
    );
    assert_eq!(
        allocate(
            &mut cluster,
            &[share("b", "10Gi", "0"), share("c", "10Gi", "0")],
            BINPACK
        )
        .unwrap(),
        ["n1/gpu-0-vgpu", "n1/gpu-1-vgpu"]
    );
}

#[test]
fn shares_gpu_between_containers() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let claims = [share("a", "10Gi", "0"), share("b", "10Gi", "0")];
    let mut pod = pod("p", &["a"]);
    let spec = pod.spec.as_mut().unwrap();
    let mut other = spec.containers[0].clone();
    other.name = "other".to_owned();
    other.resources.as_mut().unwrap().claims.as_mut().unwrap()[0].name = "b".to_owned();
    spec.containers.push(other);
    let named = [("a", &claims[0]), ("b", &claims[1])];
    let request = PodRequest::new(&pod, &named, &cluster.classes, &cluster.selectors).unwrap();
    let placement = cluster.decide(&request, BINPACK).unwrap();
    cluster.assume(&placement);
    assert_eq!(placement.claims.len(), 2);
}

#[test]
fn avoids_gpus_that_container_already_has() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    let mut allocated = share("allocated", "10Gi", "0");
    allocated.status = Some(serde_json::from_value(json!({"allocation": {
        "devices": {"results": [{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
            "shareID": "s", "consumedCapacity": {"memory": "10Gi", "cores": "0", "slots": "1"},
        }]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}]},
    }})).unwrap());
    cluster.upsert_claim(&allocated);
    assert_eq!(
        allocate(&mut cluster, &[allocated, share("b", "10Gi", "0")], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
}

#[test]
fn places_pod_on_node_of_allocated_claim() {
    let cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    let mut allocated = share("allocated", "10Gi", "0");
    allocated.status = Some(serde_json::from_value(json!({"allocation": {
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n2"]}]}]},
    }})).unwrap());
    let request = pod_request(&cluster, &[allocated.clone(), share("b", "10Gi", "0")]);
    assert_eq!(cluster.decide(&request, BINPACK).unwrap().node, "n2");
    let mut elsewhere = request;
    elsewhere.demand.node_name = Some("n1".to_owned());
    assert_eq!(
        cluster.decide(&elsewhere, BINPACK).unwrap_err().summary(),
        "0/2 nodes: 2 NodeUnfit (claim default/allocated is allocated on another node; the pod specifies another node)"
    );
}

#[test]
fn places_pods_that_share_a_claim_together() {
    let mut cluster = cluster(&[("n1", &[80]), ("n2", &[80])]);
    let mut request = pod_request(&cluster, &[share("a", "10Gi", "0")]);
    let mut other = request.demand.clone();
    other.requests = Amounts::from([("cpu".to_owned(), Quantity::count(6))]);
    cluster.assume_pod("other", "n1", &other);
    assert_eq!(cluster.decide(&request, BINPACK).unwrap().node, "n1");
    request.sharers = vec![request.demand.clone(), request.demand.clone()];
    assert_eq!(cluster.decide(&request, BINPACK).unwrap().node, "n2");
}
