use drava_api::names::API_VERSION;
use serde_json::{Value, json};

use super::*;
use crate::fixture::{class, object};

/// Errors of a claim with these documents; the class allows a priority up to 10.
fn errors_of(documents: &[Value]) -> Vec<String> {
    let configs: Vec<Value> = documents
        .iter()
        .map(|document| json!({"opaque": {"driver": "gpu.drava.dev", "parameters": document}}))
        .collect();
    let spec: ResourceClaimSpec = object(json!({"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}}],
        "config": configs,
    }}));
    let classes = [("vgpu.drava.dev".to_owned(), class())].into();
    errors(&spec, "spec.spec", &classes)
}

fn document(fields: &Value) -> Value {
    let mut document = json!({"apiVersion": API_VERSION, "kind": "VgpuConfig"});
    let fields = fields.as_object().unwrap().clone();
    document.as_object_mut().unwrap().extend(fields);
    document
}

#[test]
fn names_path_of_each_invalid_document() {
    let errors = errors_of(&[
        document(&json!({"computePolicy": "fixed"})),
        document(&json!({"computPolicy": "fixed"})),
        document(&json!({"memory": {"percent": 101}})),
        document(&json!({"priority": 11})),
    ]);
    let expected = [
        ("config[1].opaque.parameters: config field", "computPolicy"),
        (
            "config[2].opaque.parameters: config field memory.percent",
            "101",
        ),
        (
            "config[3].opaque.parameters: config field priority",
            "maximum of 10",
        ),
    ];
    assert_eq!(errors.len(), expected.len(), "{errors:?}");
    for (error, (path, text)) in errors.iter().zip(expected) {
        assert!(
            error.starts_with(&format!("spec.spec.devices.{path}")) && error.contains(text),
            "{error}"
        );
    }
}

#[test]
fn accepts_config_of_other_drivers() {
    let spec: ResourceClaimSpec = object(json!({"devices": {"config": [
        {"opaque": {"driver": "gpu.example.com", "parameters": {"any": "thing"}}},
    ]}}));
    assert!(errors(&spec, "spec", &BTreeMap::new()).is_empty());
}

#[test]
fn ignores_invalid_config_of_class() {
    let mut class = class();
    let parameters = document(&json!({"computPolicy": "fixed"}));
    let config = json!({"opaque": {"driver": "gpu.drava.dev", "parameters": parameters}});
    class.spec.get_or_insert_default().config = Some(vec![object(config)]);
    let spec: ResourceClaimSpec = object(json!({"devices": {
        "requests": [{"name": "gpu", "exactly": {"deviceClassName": "vgpu.drava.dev"}}],
        "config": [{"opaque": {
            "driver": "gpu.drava.dev", "parameters": document(&json!({"computePolicy": "fixed"})),
        }}],
    }}));
    let classes = [("vgpu.drava.dev".to_owned(), class)].into();
    assert_eq!(errors(&spec, "spec", &classes), Vec::<String>::new());
}

/// A class that allows a limit up to 16 GiB, and a claim for 4 GiB with these documents.
fn errors_of_burst(documents: &[Value]) -> Vec<String> {
    let mut class = class();
    let config = |parameters: &Value| json!({"opaque": {"driver": "gpu.drava.dev", "parameters": parameters}});
    let of_class = document(&json!({"memory": {"maxLimit": "16Gi"}}));
    class.spec.get_or_insert_default().config = Some(vec![object(config(&of_class))]);
    let spec: ResourceClaimSpec = object(json!({"devices": {
        "requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "vgpu.drava.dev", "capacity": {"requests": {"memory": "4Gi"}},
        }}],
        "config": documents.iter().map(config).collect::<Vec<Value>>(),
    }}));
    let classes = [("vgpu.drava.dev".to_owned(), class)].into();
    errors(&spec, "spec", &classes)
}

#[test]
fn names_wrong_fields_of_share_that_bursts() {
    for (memory, text) in [
        (
            json!({"limit": "12Gi"}),
            "config field memory.reclaim: missing",
        ),
        (
            json!({"limit": "2Gi", "reclaim": "kill"}),
            "config field memory.limit: 2Gi is less than the 4096 MiB",
        ),
        (
            json!({"limit": "17Gi", "reclaim": "kill"}),
            "17Gi exceeds the class's maximum of 16Gi",
        ),
        (
            json!({"limit": "12Gi", "reclaim": "kill", "burst": "idle"}),
            "the class has no memory.maxBurst: idle",
        ),
        (
            json!({"limit": "12Gi", "reclaim": "kill", "burst": "all"}),
            "config field memory.burst: unknown variant `all`",
        ),
    ] {
        let errors = errors_of_burst(&[document(&json!({"memory": memory}))]);
        let [error] = errors.as_slice() else {
            panic!("{memory}: {errors:?}");
        };
        assert!(
            error.starts_with("spec.devices.config[0].opaque.parameters: ") && error.contains(text),
            "{error}"
        );
    }
    let valid = json!({"memory": {"limit": "12Gi", "reclaim": "kill", "burst": "unallocated"}});
    assert_eq!(errors_of_burst(&[document(&valid)]), Vec::<String>::new());
    // In two documents.
    let split = ["limit", "reclaim"].map(|field| {
        let value = &valid["memory"][field];
        document(&json!({"memory": {field: value}}))
    });
    assert_eq!(errors_of_burst(&split), Vec::<String>::new());
}
