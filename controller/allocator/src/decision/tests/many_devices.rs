//! Requests for many devices of one GPU, and requests whose devices others could take first.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use super::partition::partitioned;
use super::{BINPACK, allocate};
use crate::cluster::Cluster;
use crate::fixture::{claim, cluster, object, request};
use crate::pod_request::PodRequest;

const UUID: &str = "gpu.drava.dev/uuid";

fn partition(name: &str, profile: &str) -> Value {
    json!({"name": name, "exactly": of_profile(profile, 1)})
}

fn of_profile(profile: &str, count: usize) -> Value {
    let expression = format!(r#"device.attributes["gpu.drava.dev"].profile == "{profile}""#);
    json!({
        "deviceClassName": "mig.drava.dev", "allocationMode": "ExactCount", "count": count,
        "selectors": [{"cel": {"expression": expression}}],
    })
}

fn of_one_gpu(requests: &[Value]) -> ResourceClaim {
    claim(
        "c",
        &json!({"requests": requests, "constraints": [{"matchAttribute": UUID}]}),
    )
}

/// Requests `w0`, `w1`, ... for one partition of the profile each, all of one GPU.
fn several(profile: &str, count: usize) -> ResourceClaim {
    let requests: Vec<Value> = (0..count)
        .map(|index| partition(&format!("w{index}"), profile))
        .collect();
    of_one_gpu(&requests)
}

/// A pod with one container for each request of the claim.
fn one_container_each(claim: &ResourceClaim) -> Pod {
    let devices = claim.spec.as_ref().unwrap().devices.as_ref().unwrap();
    let requests = devices.requests.iter().flatten();
    let containers: Vec<Value> = requests
        .map(|request| {
            let name = &request.name;
            json!({"name": name, "resources": {"claims": [{"name": "c", "request": name}]}})
        })
        .collect();
    object(json!({
        "metadata": {"name": "p", "namespace": "default", "uid": "pod-p"},
        "spec": {"resourceClaims": [{"name": "c", "resourceClaimName": "c"}], "containers": containers},
    }))
}

/// Returns the names of the selected devices, or the explanation.
fn decide(cluster: &Cluster, pod: &Pod, claim: &ResourceClaim) -> Result<Vec<String>, String> {
    let named = [("c", claim)];
    let request = PodRequest::new(pod, &named, &cluster.classes, &cluster.selectors).unwrap();
    let placement = cluster
        .decide(&request, BINPACK)
        .map_err(|explanation| explanation.summary())?;
    let devices = placement.claims.iter().flat_map(|claim| &claim.devices);
    Ok(devices
        .map(|placed| placed.device.name.to_string())
        .collect())
}

fn of_containers(cluster: &Cluster, claim: &ResourceClaim) -> Result<Vec<String>, String> {
    decide(cluster, &one_container_each(claim), claim)
}

/// Returns the decision for a pod whose containers use no claim.
fn without_containers(cluster: &Cluster, claim: &ResourceClaim) -> Result<Vec<String>, String> {
    let pod =
        object(json!({"metadata": {"name": "p", "uid": "pod-p"}, "spec": {"containers": []}}));
    decide(cluster, &pod, claim)
}

/// A node of partitioned GPUs; on each, the given number of partitions of the smallest profile is in use.
fn with_used_slices(used: &[usize]) -> Cluster {
    let mut cluster = partitioned(used.len());
    for (gpu, count) in used.iter().enumerate() {
        for index in 0..*count {
            let mut exactly = of_profile("1g.5gb", 1);
            let expression =
                format!(r#"device.attributes["gpu.drava.dev"].uuid == "GPU-n1-{gpu}""#);
            let selectors = exactly["selectors"].as_array_mut().unwrap();
            selectors.push(json!({"cel": {"expression": expression}}));
            let held = request(&format!("held-{gpu}-{index}"), &exactly);
            allocate(&mut cluster, &[held], BINPACK).unwrap();
        }
    }
    cluster
}

fn all_on(gpu: usize, devices: &Result<Vec<String>, String>) -> bool {
    let prefix = format!("gpu-{gpu}-mig-");
    let devices = devices.as_ref();
    devices.is_ok_and(|devices| devices.iter().all(|device| device.starts_with(&prefix)))
}

#[test]
fn finds_only_gpu_with_enough_partitions() {
    for (used, requests, gpu) in [
        (vec![2, 2, 2, 2, 2, 2, 2, 0], 6, 7),
        (vec![1, 0], 7, 1),
        (vec![1, 1, 1, 1, 1, 1, 1, 0], 7, 7),
        (vec![2, 0], 6, 1),
    ] {
        let cluster = with_used_slices(&used);
        let found = of_containers(&cluster, &several("1g.5gb", requests));
        assert!(all_on(gpu, &found), "{used:?} {requests} {found:?}");
        let one_request = json!({"name": "w", "exactly": of_profile("1g.5gb", requests)});
        let found = without_containers(&cluster, &of_one_gpu(&[one_request]));
        assert!(all_on(gpu, &found), "count {requests}: {found:?}");
    }
}

#[test]
fn explains_partitions_that_no_gpu_has() {
    let cluster = with_used_slices(&[2; 8]);
    let reason = of_containers(&cluster, &several("1g.5gb", 6)).unwrap_err();
    assert!(!reason.contains("SearchLimit"), "{reason}");
    // 7 + 2 slices of 7.
    let mut mixed: Vec<Value> = (0..7)
        .map(|index| partition(&format!("w{index}"), "1g.5gb"))
        .collect();
    mixed.push(partition("large", "2g.10gb"));
    let reason = of_containers(&with_used_slices(&[0; 8]), &of_one_gpu(&mixed)).unwrap_err();
    assert!(!reason.contains("SearchLimit"), "{reason}");
}

#[test]
fn reaches_later_alternative() {
    let alternative = |name: &str, profile: &str, count: usize| {
        let mut body = of_profile(profile, count);
        body["name"] = json!(name);
        body
    };
    let claim = of_one_gpu(&[json!({
        "name": "w",
        "firstAvailable": [alternative("small", "1g.5gb", 7), alternative("half", "3g.20gb", 1)],
    })]);
    let found = without_containers(&with_used_slices(&[1; 8]), &claim).unwrap();
    assert!(
        found.len() == 1 && found[0].contains("3g-20gb"),
        "{found:?}"
    );
}

#[test]
fn partitions_fit_in_any_order() {
    let cluster = with_used_slices(&[1, 0]);
    let mut profiles = ["4g.20gb", "2g.10gb", "1g.5gb"];
    for _ in 0..2 {
        let requests: Vec<Value> = profiles
            .iter()
            .map(|profile| partition(&format!("w{}", &profile[..2]), profile))
            .collect();
        let found = of_containers(&cluster, &of_one_gpu(&requests));
        assert!(found.is_ok(), "{profiles:?} {found:?}");
        profiles.reverse();
    }
}

/// `k8s.io/dynamic-resource-allocation` 0.37.2 finds the devices, too.
#[test]
fn leaves_device_for_selective_request() {
    let mut cluster = cluster(&[("n1", &[80; 16])]);
    let with = |late: &Value| {
        claim(
            "c",
            &json!({"requests": [
                {"name": "a", "exactly": {"deviceClassName": "gpu.drava.dev", "count": 8}},
                {"name": "b", "exactly": late},
            ]}),
        )
    };
    let late = |class: &str, expression: &str| json!({"deviceClassName": class, "selectors": [{"cel": {"expression": expression}}]});
    let first = r#"device.attributes["gpu.drava.dev"].index == 0"#;
    let found = without_containers(&cluster, &with(&late("gpu.drava.dev", first))).unwrap();
    assert_eq!(found.len(), 9);
    assert_eq!(found[8], "gpu-0");
    let reason = without_containers(&cluster, &with(&late("gpu.drava.dev", "false"))).unwrap_err();
    assert!(reason.contains("SelectorMismatch"), "{reason}");
    // Shares of more than half a GPU: two of them exclude each other.
    let share = |name: &str, count: usize, expression: &str| {
        json!({"name": name, "exactly": {
            "deviceClassName": "vgpu.drava.dev", "count": count,
            "capacity": {"requests": {"memory": "41Gi"}},
            "selectors": [{"cel": {"expression": expression}}],
        }})
    };
    let low = r#"device.attributes["gpu.drava.dev"].index < 2"#;
    let shares = claim(
        "c",
        &json!({"requests": [share("a", 8, "true"), share("b", 1, low), share("d", 1, low)]}),
    );
    let found = without_containers(&cluster, &shares).unwrap();
    assert_eq!(found[8..], ["gpu-0-vgpu", "gpu-1-vgpu"]);
    let taken = request("taken", &late("gpu.drava.dev", first));
    allocate(&mut cluster, &[taken], BINPACK).unwrap();
    let reason = without_containers(&cluster, &shares).unwrap_err();
    assert!(!reason.contains("SearchLimit"), "{reason}");
}
