//! Pods that would wait for ever without a word: each gets its reason.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim};
use serde_json::json;

use super::cluster::{TestCluster, applied};
use crate::fixture::{claim, object, pod};

/// A class with these selectors.
fn class(name: &str, expressions: &[&str]) -> DeviceClass {
    let selectors: Vec<_> = expressions
        .iter()
        .map(|expression| json!({"cel": {"expression": expression}}))
        .collect();
    object(json!({"metadata": {"name": name}, "spec": {"selectors": selectors}}))
}

fn claim_of_class(name: &str, classes: &[&str]) -> ResourceClaim {
    let mut claim = claim(name, "1Gi");
    let requests: Vec<_> = classes
        .iter()
        .enumerate()
        .map(|(index, class)| json!({"name": format!("r{index}"), "exactly": {"deviceClassName": class}}))
        .collect();
    claim.spec = object(json!({"devices": {"requests": requests}}));
    claim
}

/// The pod after a scheduler has found no node.
fn unschedulable(mut pod: Pod) -> Pod {
    pod.status.as_mut().unwrap().conditions = Some(vec![object(
        json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}),
    )]);
    pod
}

fn extended(resource: &str) -> Pod {
    let mut pod = pod("p", &[]);
    pod.spec.as_mut().unwrap().containers[0].resources =
        Some(object(json!({"requests": {resource: "1"}})));
    pod
}

#[track_caller]
fn assert_reason(cluster: &mut TestCluster, object: &str, reason: &str) {
    assert!(cluster.settle().is_empty());
    let messages = cluster.messages_of(object);
    assert!(
        messages.len() == 1 && messages[0].starts_with(reason),
        "{messages:?}"
    );
}

#[test]
fn reports_class_without_driver_once_unschedulable() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.class(applied(class("any", &[])));
    cluster.add_claim(claim_of_class("p", &["any"]));
    cluster.add_pod(pod("p", &["p"]));
    assert!(cluster.settle().is_empty());
    assert!(
        cluster.events.is_empty(),
        "kube-scheduler may find devices of another driver"
    );
    cluster.add_pod(unschedulable(pod("p", &["p"])));
    assert_reason(
        &mut cluster,
        "Pod/p",
        "DriverUnspecified: claim default/p: request r0",
    );
    assert_eq!(cluster.messages_of("ResourceClaim/p").len(), 1);
}

#[test]
fn reports_container_with_spatial_and_other_claim() {
    let mut cluster = TestCluster::new(&["n1", "n2"]);
    let mut spatial = class("spatial", &["device.driver == \"gpu.drava.dev\""]);
    spatial.spec.as_mut().unwrap().config = Some(object(json!([{"opaque": {
        "driver": "gpu.drava.dev", "parameters": {
            "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "computePolicy": "spatial",
        },
    }}])));
    cluster.planner.class(applied(spatial));
    cluster.add_claim(claim_of_class("spatial", &["spatial"]));
    cluster.add_claim(claim("other", "1Gi"));
    let mut refused = pod("p", &["spatial", "other"]);
    refused.spec.as_mut().unwrap().containers[0].resources = Some(object(
        json!({"claims": [{"name": "spatial"}, {"name": "other"}]}),
    ));
    cluster.add_pod(refused);
    assert_reason(
        &mut cluster,
        "Pod/p",
        "IncompatibleClaims: claim default/spatial: the container \"main\" has the claim default/other too",
    );
    for claim in ["spatial", "other"] {
        assert_eq!(
            cluster.messages_of(&format!("ResourceClaim/{claim}")).len(),
            1
        );
    }
    // Each alone is served.
    for claim in ["spatial", "other"] {
        cluster.add_pod(pod(&format!("{claim}-alone"), &[claim]));
    }
    assert_eq!(cluster.settle().len(), 2);
}

#[test]
fn reports_class_that_does_not_compile() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, expressions) in [
        (
            "own",
            &["device.driver == \"gpu.drava.dev\" && future()"][..],
        ),
        ("open", &["future()"]),
    ] {
        cluster.planner.class(applied(class(name, expressions)));
        cluster.add_claim(claim_of_class(name, &[name]));
        cluster.add_pod(unschedulable(pod(name, &[name])));
    }
    assert_reason(&mut cluster, "Pod/own", "SelectorError: ");
    assert_reason(&mut cluster, "Pod/open", "DriverUnspecified: ");
    assert!(cluster.messages_of("Pod/open")[0].contains("undeclared reference to 'future'"));
}

#[test]
fn ignores_classes_of_other_drivers() {
    let mut cluster = TestCluster::new(&["n1"]);
    for (name, expression) in [
        ("driver", "device.driver == \"gpu.nvidia.com\""),
        (
            "attribute",
            "device.attributes[\"gpu.nvidia.com\"].type == \"gpu\"",
        ),
        ("future", "device.driver == \"gpu.nvidia.com\" && future()"),
    ] {
        cluster.planner.class(applied(class(name, &[expression])));
        cluster.add_claim(claim_of_class(name, &[name]));
        cluster.add_pod(unschedulable(pod(name, &[name])));
    }
    cluster.add_pod(unschedulable(extended("nvidia.com/gpu")));
    assert!(cluster.settle().is_empty());
    assert!(cluster.events.is_empty(), "{:?}", cluster.events);
}

#[test]
fn allocates_requests_without_driver_next_to_own() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.class(applied(class("any", &[])));
    cluster.add_claim(claim_of_class("p", &["vgpu.drava.dev", "any"]));
    cluster.add_pod(pod("p", &["p"]));
    assert!(
        cluster.settle().is_empty(),
        "the share takes the memory of the only GPU"
    );
    cluster.planner.node(applied(crate::fixture::node("n2")));
    let mut two = crate::fixture::slice("n2");
    let devices = two.spec.devices.as_mut().unwrap();
    let mut second = devices[0].clone();
    second.name = "gpu-1-vgpu".to_owned();
    devices.push(second);
    cluster.planner.slice(applied(two));
    assert_eq!(cluster.settle(), ["p → n2"]);
}

#[test]
fn leaves_undetermined_claim_to_kube_scheduler() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.planner.class(applied(class("any", &[])));
    cluster.add_claim(claim("ours", "1Gi"));
    cluster.add_claim(claim_of_class("any", &["any"]));
    cluster.add_pod(unschedulable(pod("p", &["any", "ours"])));
    assert_eq!(cluster.settle(), ["p → n1"], "its other claim is allocated");
}

#[test]
fn reports_mixed_drivers_in_one_claim() {
    let mut cluster = TestCluster::new(&["n1"]);
    let other = class("other", &["device.driver == \"other.example.com\""]);
    cluster.planner.class(applied(other));
    cluster.add_claim(claim_of_class("p", &["vgpu.drava.dev", "other"]));
    cluster.add_pod(pod("p", &["p"]));
    assert_reason(&mut cluster, "Pod/p", "MixedDrivers: ");
}

#[test]
fn reports_extended_resources_of_own_classes() {
    let mut named = crate::fixture::class();
    named.metadata.name = Some("named".to_owned());
    named.spec.as_mut().unwrap().extended_resource_name = Some("example.com/gpu".to_owned());
    for resource in [
        "example.com/gpu",
        "deviceclass.resource.kubernetes.io/vgpu.drava.dev",
    ] {
        let mut cluster = TestCluster::new(&["n1"]);
        cluster.planner.class(applied(named.clone()));
        cluster.add_pod(extended(resource));
        assert!(cluster.settle().is_empty());
        assert!(cluster.events.is_empty(), "a device plugin may offer it");
        cluster.add_pod(unschedulable(extended(resource)));
        assert_reason(
            &mut cluster,
            "Pod/p",
            &format!("ExtendedResource: container main requests {resource}: "),
        );
    }
}

#[test]
fn reports_pods_of_other_schedulers() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_claim(claim("p", "1Gi"));
    let mut volcano = pod("p", &["p"]);
    volcano.spec.as_mut().unwrap().scheduler_name = Some("volcano".to_owned());
    cluster.add_pod(volcano);
    assert_reason(
        &mut cluster,
        "Pod/p",
        "SchedulerNotServed: the controller allocates for pods of default-scheduler, this pod has schedulerName volcano",
    );
}

#[test]
fn reports_deleted_claim_at_its_pod() {
    let mut cluster = TestCluster::new(&["n1"]);
    cluster.add_pod_with_claim("a", "100Gi");
    assert!(cluster.settle().is_empty());
    cluster.events.clear();
    cluster.delete_claim("a");
    assert!(cluster.settle().is_empty());
    // The claim may come back at once, and a changed reason follows the last one after a while.
    for _ in 0..3 {
        cluster.now = cluster.planner.next_deadline().unwrap();
        assert!(cluster.settle().is_empty());
    }
    assert_eq!(
        cluster.messages_of("Pod/a"),
        ["ClaimMissing: claim a does not exist; create it, or delete the pod"]
    );
    cluster.add_claim(claim("a", "10Gi"));
    assert_eq!(cluster.settle(), ["a → n1"]);
}
