//! Decoding errors name the field; a tenant can only tighten.

use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde_json::json;

use super::*;

fn document(fields: Value) -> Value {
    let mut document = json!({"apiVersion": names::API_VERSION, "kind": KIND});
    if let (Some(document), Value::Object(fields)) = (document.as_object_mut(), fields) {
        document.extend(fields);
    }
    document
}

fn allocation_config(
    source: &str,
    requests: &[&str],
    fields: Value,
) -> DeviceAllocationConfiguration {
    DeviceAllocationConfiguration {
        source: source.to_owned(),
        requests: Some(requests.iter().map(|r| (*r).to_owned()).collect()),
        opaque: Some(OpaqueDeviceConfiguration {
            driver: names::DRIVER.to_owned(),
            parameters: RawExtension(document(fields)),
        }),
    }
}

fn decode_error(parameters: &Value) -> String {
    VgpuConfig::decode(parameters).map_or_else(
        |error| error.to_string(),
        |config| format!("decoded {config:?}"),
    )
}

#[test]
fn errors_name_the_field() {
    let cases = [
        (
            document(json!({"memroy": {}})),
            "config field memroy: unknown field `memroy`, expected one of `apiVersion`, `kind`, `computePolicy`, `priority`, `maxPriority`, `memory`, `enforcement`, `placement`, `unmetered`",
        ),
        (
            document(json!({"memory": {"percnt": 5}})),
            "config field memory.percnt: unknown field `percnt`, expected `percent` or `policy`",
        ),
        (
            document(json!({"memory": {"percent": 101}})),
            "config field memory.percent: 101 is out of range, use 1 to 100",
        ),
        (
            document(json!({"memory": {"percent": 0}})),
            "config field memory.percent: 0 is out of range, use 1 to 100",
        ),
        (
            document(json!({"priority": 300})),
            "config field priority: 300 is out of range, use -100 to 100",
        ),
        (
            document(json!({"computePolicy": "turbo"})),
            "config field computePolicy: unknown variant `turbo`, expected one of `balance`, `fixed`, `none`, `token`",
        ),
        (
            json!({"apiVersion": "gpu.nvidia.com/v1", "kind": "GpuConfig"}),
            "config is gpu.nvidia.com/v1 GpuConfig, this driver reads gpu.drava.dev/v1alpha1 VgpuConfig",
        ),
        (
            json!({}),
            "config is without apiVersion without kind, this driver reads gpu.drava.dev/v1alpha1 VgpuConfig",
        ),
    ];
    for (parameters, expected) in cases {
        assert_eq!(decode_error(&parameters), expected);
    }
    assert!(
        decode_error(&json!("text")).starts_with("config field (document): invalid type: string")
    );
    assert!(
        decode_error(&document(json!({"unmetered": "yes"})))
            .starts_with("config field unmetered: invalid type")
    );
}

#[test]
fn nothing_set_means_defaults() {
    let settings = resolve(&[], "gpu").unwrap();
    assert_eq!(settings, Settings::default());
    assert_eq!(settings.compute_policy, ComputePolicy::Balance);
    assert_eq!(settings.enforcement, Enforcement::Report);
}

#[test]
fn the_claim_is_laid_over_the_class_whatever_the_order() {
    let configs = [
        allocation_config(
            "FromClaim",
            &[],
            json!({"computePolicy": "fixed", "priority": -5, "memory": {"percent": 25}}),
        ),
        allocation_config(
            "FromClass",
            &[],
            json!({"computePolicy": "none", "priority": 10, "memory": {"policy": "spill"}, "placement": {"gpu": "spread"}}),
        ),
    ];
    let settings = resolve(&configs, "gpu").unwrap();
    assert_eq!(settings.compute_policy, ComputePolicy::Fixed);
    assert_eq!(settings.priority.get(), -5);
    assert_eq!(settings.memory_policy, MemoryPolicy::Spill);
    assert_eq!(settings.memory_percent.map(Percent::get), Some(25));
    assert_eq!(settings.placement.gpu, Some(PlacementPolicy::Spread));
}

#[test]
fn a_tenant_can_only_tighten() {
    for (fields, message) in [
        (
            json!({"computePolicy": "none"}),
            "config field computePolicy: a claim may not set it (it may only choose fixed)",
        ),
        (
            json!({"computePolicy": "balance"}),
            "config field computePolicy: a claim may not set it (it may only choose fixed)",
        ),
        (
            json!({"priority": 1}),
            "config field priority: a claim may not set it (1 is above the class's maximum of 0)",
        ),
        (
            json!({"maxPriority": 100}),
            "config field maxPriority: a claim may not set it (only a device class may)",
        ),
        (
            json!({"memory": {"policy": "hard"}}),
            "config field memory.policy: a claim may not set it (only a device class may)",
        ),
        (
            json!({"enforcement": "report"}),
            "config field enforcement: a claim may not set it (only a device class may)",
        ),
        (
            json!({"unmetered": true}),
            "config field unmetered: a claim may not set it (only a device class may)",
        ),
    ] {
        let error = resolve(&[allocation_config("FromClaim", &[], fields)], "gpu").unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let class = allocation_config("FromClass", &[], json!({"memory": {"percent": 50}}));
    assert_eq!(
        resolve(&[class], "gpu").unwrap_err().to_string(),
        "config field memory.percent: a device class may not set it (only a claim may)"
    );
}

#[test]
fn priority_is_bounded_by_the_class() {
    let class = allocation_config("FromClass", &[], json!({"priority": 10, "maxPriority": 50}));
    let claim = |priority: i64| allocation_config("FromClaim", &[], json!({"priority": priority}));
    assert_eq!(
        resolve(&[class.clone(), claim(50)], "gpu")
            .unwrap()
            .priority
            .get(),
        50
    );
    assert!(resolve(&[class.clone(), claim(51)], "gpu").is_err());
    // A second document is measured against the class, not against the first one.
    assert_eq!(
        resolve(&[class, claim(-5), claim(50)], "gpu")
            .unwrap()
            .priority
            .get(),
        50
    );
    let plain = allocation_config("FromClass", &[], json!({"priority": 10}));
    assert!(resolve(&[plain.clone(), claim(11)], "gpu").is_err());
    assert!(resolve(&[plain, claim(-20), claim(11)], "gpu").is_err());
}

#[test]
fn a_config_applies_to_the_requests_it_names() {
    let configs = [allocation_config(
        "FromClaim",
        &["a"],
        json!({"computePolicy": "fixed"}),
    )];
    assert_eq!(
        resolve(&configs, "a").unwrap().compute_policy,
        ComputePolicy::Fixed
    );
    assert_eq!(
        resolve(&configs, "a/first").unwrap().compute_policy,
        ComputePolicy::Fixed
    );
    assert_eq!(
        resolve(&configs, "b").unwrap().compute_policy,
        ComputePolicy::Balance
    );
    let alternative = [allocation_config(
        "FromClaim",
        &["a/first"],
        json!({"computePolicy": "fixed"}),
    )];
    assert_eq!(
        resolve(&alternative, "a/second").unwrap().compute_policy,
        ComputePolicy::Balance
    );
    // A broken document for another request does not stop this one.
    let other = [allocation_config(
        "FromClaim",
        &["b"],
        json!({"nonsense": 1}),
    )];
    assert!(resolve(&other, "a").is_ok());
    assert!(resolve(&other, "b").is_err());
}

#[test]
fn other_drivers_config_is_not_ours() {
    let mut config = allocation_config("FromClaim", &[], json!({"nonsense": 1}));
    if let Some(opaque) = config.opaque.as_mut() {
        opaque.driver = "gpu.example.com".to_owned();
    }
    assert!(resolve(&[config], "gpu").is_ok());
}

#[test]
fn every_field_is_in_the_documentation() {
    let page = include_str!("../../../docs/config.md");
    let everything = VgpuConfig::decode(&document(json!({
        "computePolicy": "fixed", "priority": 1, "maxPriority": 2,
        "memory": {"percent": 50, "policy": "spill"}, "enforcement": "required",
        "placement": {"node": "spread", "gpu": "binpack"}, "unmetered": true,
    })))
    .unwrap();
    // Breaks when a field is added and not set above.
    let VgpuConfig {
        api_version: _,
        kind: _,
        compute_policy: Some(_),
        priority: Some(_),
        max_priority: Some(_),
        memory:
            Some(MemoryConfig {
                percent: Some(_),
                policy: Some(_),
            }),
        enforcement: Some(_),
        placement: Some(Placement {
            node: Some(_),
            gpu: Some(_),
        }),
        unmetered: Some(_),
    } = &everything
    else {
        panic!("{everything:?}");
    };
    let written = serde_json::to_value(&everything).unwrap();
    for (field, value) in written.as_object().unwrap() {
        let names: Vec<String> = match value {
            Value::Object(parts) => parts.keys().map(|part| format!("{field}.{part}")).collect(),
            _ if field == "apiVersion" || field == "kind" => continue,
            _ => vec![field.clone()],
        };
        for name in names {
            assert!(page.contains(&format!("`{name}`")), "{name}");
        }
    }
}
