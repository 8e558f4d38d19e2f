//! Selectors, constraints, alternatives, taints and allocation modes.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

use super::{BINPACK, allocate, whole};
use crate::fixture::{claim, cluster, pod, pod_request, request, share, slices};
use crate::pod_request::PodRequest;

#[test]
fn applies_selectors_constraints_and_alternatives() {
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
        allocate(&mut cluster, &[selected("a", h100)], BINPACK).unwrap(),
        ["n1/gpu-1-vgpu"]
    );
    assert_eq!(
        allocate(&mut cluster, &[selected("b", "false")], BINPACK),
        Err(
            "0/1 nodes: 1 SelectorMismatch (no device of class vgpu.drava.dev satisfies the selectors of request gpu)"
                .to_owned()
        )
    );
    let error = allocate(
        &mut cluster,
        &[selected(
            "c",
            r#"device.attributes["gpu.drava.dev"].nope == 1"#,
        )],
        BINPACK,
    )
    .unwrap_err();
    assert!(
        error.starts_with("SelectorError: claim default/c: cannot evaluate selector #0 on device gpu.drava.dev/n1/gpus/gpu-0-vgpu: CEL runtime error: no such key: nope."),
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
        allocate(
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
        allocate(
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
        allocate(
            &mut cluster,
            &[constrained(
                "x",
                json!({"matchAttribute": "gpu.drava.dev/uuid"})
            )],
            BINPACK
        ),
        Err("0/1 nodes: 1 TopologyUnsatisfied (1 of 2 devices found on n1; the free devices differ in gpu.drava.dev/uuid, by which the claim matches them)".to_owned())
    );
    let alternatives = claim(
        "f",
        &json!({"requests": [{"name": "gpu", "firstAvailable": [
            {"name": "huge", "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "100Gi"}}},
            {"name": "small", "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "16Gi"}}},
        ]}]}),
    );
    let placement = cluster
        .decide(&pod_request(&cluster, &[alternatives]), BINPACK)
        .unwrap();
    assert_eq!(placement.claims[0].devices[0].request, "gpu/small");
}

#[test]
fn allocates_all_devices_that_could_serve() {
    let mut cluster = cluster(&[("n1", &[80, 80])]);
    let all = |name: &str, memory: &str| {
        request(
            name,
            &json!({"deviceClassName": "vgpu.drava.dev", "allocationMode": "All", "capacity": {"requests": {"memory": memory}}}),
        )
    };
    assert_eq!(
        allocate(&mut cluster, &[all("a", "50Gi")], BINPACK).unwrap(),
        ["n1/gpu-0-vgpu", "n1/gpu-1-vgpu"]
    );
    allocate(&mut cluster, &[share("b", "20Gi", "0")], BINPACK).unwrap();
    assert_eq!(
        allocate(&mut cluster, &[all("c", "20Gi")], BINPACK),
        Err("0/1 nodes: 1 InsufficientMemory (1 of 2 devices found on n1; most free memory 10 GiB on gpu-0)".to_owned())
    );
    assert!(
        allocate(&mut cluster, &[all("d", "200Gi")], BINPACK).is_err(),
        "at least one device"
    );
}

#[test]
fn denies_all_while_a_pool_is_excluded() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut other = slices("n1", &[80]);
    for slice in &mut other {
        slice.metadata.name = slice.metadata.name.as_ref().map(|name| format!("{name}-b"));
        slice.spec.pool.name = "n1/other".to_owned();
        slice.spec.pool.resource_slice_count = 3;
        cluster.upsert_slice(slice);
    }
    let all = request(
        "a",
        &json!({"deviceClassName": "gpu.drava.dev", "allocationMode": "All"}),
    );
    assert_eq!(
        allocate(&mut cluster, &[all], BINPACK),
        Err("0/1 nodes: 1 PoolIncomplete (pool n1/other: generation 1 is incomplete: 2 of 3 slices)".to_owned())
    );
    assert!(allocate(&mut cluster, &[whole("b")], BINPACK).is_ok());
}

#[test]
fn charges_nothing_for_admin_access() {
    let mut cluster = cluster(&[("n1", &[80])]);
    allocate(&mut cluster, &[whole("w")], BINPACK).unwrap();
    let admin = |name: &str| {
        request(
            name,
            &json!({"deviceClassName": "gpu.drava.dev", "adminAccess": true}),
        )
    };
    assert_eq!(
        allocate(&mut cluster, &[admin("m1")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
    assert_eq!(
        allocate(&mut cluster, &[admin("m2")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
    cluster.forget(&("default".to_owned(), "w".to_owned()));
    assert_eq!(
        allocate(&mut cluster, &[whole("w2")], BINPACK).unwrap(),
        ["n1/gpu-0"]
    );
}

#[test]
fn rejects_untolerated_taints() {
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
        allocate(&mut cluster, &[share("a", "1Gi", "0")], BINPACK),
        Err("0/1 nodes: 1 Unhealthy (xid-79)".to_owned())
    );
    let tolerant = request(
        "t",
        &json!({"deviceClassName": "vgpu.drava.dev", "tolerations": [{"operator": "Exists"}]}),
    );
    assert_eq!(
        allocate(&mut cluster, &[tolerant], BINPACK).unwrap(),
        ["n1/gpu-0-vgpu"]
    );
}

/// Returns a claim for a percentage of a GPU's memory. `capacity` are its amounts.
fn fraction(name: &str, percent: u32, capacity: &serde_json::Value) -> ResourceClaim {
    claim(
        name,
        &json!({
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev", "capacity": {"requests": capacity}}}],
            "config": [{"opaque": {"driver": "gpu.drava.dev", "parameters": {
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "memory": {"percent": percent},
            }}}],
        }),
    )
}

#[test]
fn allocates_percentages_that_add_up_to_a_gpu() {
    let mut cluster = cluster(&[("n1", &[80])]);
    for (name, percent) in [("a", 33), ("b", 33), ("c", 34)] {
        let device = allocate(
            &mut cluster,
            &[fraction(name, percent, &json!({"cores": "10"}))],
            BINPACK,
        );
        assert_eq!(device.unwrap(), ["n1/gpu-0-vgpu"], "{name}");
    }
    assert_eq!(
        allocate(&mut cluster, &[fraction("d", 1, &json!({}))], BINPACK),
        Err("0/1 nodes: 1 InsufficientMemory (most free memory 2 MiB on n1/gpu-0)".to_owned())
    );
}

#[test]
fn rejects_percentage_of_whole_gpu() {
    let mut cluster = cluster(&[("n1", &[80])]);
    let mut whole = fraction("a", 50, &json!({}));
    let requests = whole
        .spec
        .as_mut()
        .and_then(|spec| spec.devices.as_mut()?.requests.as_mut())
        .unwrap();
    requests[0].exactly.as_mut().unwrap().device_class_name = "gpu.drava.dev".to_owned();
    assert_eq!(
        allocate(&mut cluster, &[whole], BINPACK),
        Err(
            "0/1 nodes: 1 TypeMismatch (n1/gpu-0 has no shares, and memory.percent is a share; use class vgpu.drava.dev or \
             fraction.drava.dev)"
                .to_owned()
        )
    );
}

#[test]
fn rejects_percentage_with_amount() {
    let cluster = cluster(&[("n1", &[80])]);
    let both = fraction("a", 50, &json!({"memory": "8Gi"}));
    let error = PodRequest::new(
        &pod("p", &["a"]),
        &[("a", &both)],
        &cluster.classes,
        &cluster.selectors,
    )
    .unwrap_err()
    .to_string();
    assert!(error.contains("memory.percent"), "{error}");
}
