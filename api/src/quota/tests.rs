use std::collections::BTreeMap;

use serde_json::json;

use super::*;

fn spec(value: serde_json::Value) -> GpuQuotaSpec {
    serde_json::from_value(value).expect("a spec")
}

#[test]
fn reads_amounts_of_all_forms() {
    let spec = spec(json!({
        "namespaces": ["a"],
        "limit": {"memory": "40Gi", "cores": 200, "devices": 4},
        "guarantee": {"memory": 1_073_741_824},
        "claim": {"default": {"memory": "4Gi"}, "max": {"devices": 2}},
    }));
    assert_eq!(
        spec.limit(QuotaResource::Memory),
        Some(Quantity::bytes(40 << 30))
    );
    assert_eq!(spec.limit(QuotaResource::Cores), Some(Quantity::count(200)));
    assert_eq!(
        spec.guarantee(QuotaResource::Memory),
        Some(Quantity::bytes(1 << 30))
    );
    assert_eq!(spec.guarantee(QuotaResource::Devices), None);
    assert_eq!(
        spec.claim_maximum(QuotaResource::Devices),
        Some(Quantity::count(2))
    );
    assert_eq!(spec.share_default().memory, Some(Quantity::bytes(4 << 30)));
    assert!((spec.alert_threshold_ratio() - 0.9).abs() < 1e-9);
}

#[test]
fn selects_devices_by_model_and_type() {
    let h100 = Some("NVIDIA H100");
    let all = GpuQuotaSpec::default();
    assert!(all.selects_device(None, None));
    let shares =
        spec(json!({"deviceSelector": {"productNames": ["NVIDIA H100"], "types": ["vgpu"]}}));
    assert!(shares.selects_device(h100, Some(DeviceType::Vgpu)));
    assert!(!shares.selects_device(h100, Some(DeviceType::Gpu)));
    assert!(!shares.selects_device(Some("Tesla T4"), Some(DeviceType::Vgpu)));
    assert!(!shares.selects_device(h100, None));
    let models = spec(json!({"deviceSelector": {"productNames": ["NVIDIA H100"]}}));
    assert!(models.selects_device(h100, Some(DeviceType::Mig)));
}

#[test]
fn selects_namespaces_by_label() {
    let labels: BTreeMap<String, String> = [("team".to_owned(), "a".to_owned())].into();
    let matches = |selector: serde_json::Value| {
        let selector: LabelSelector = serde_json::from_value(selector).expect("a selector");
        labels_match(&selector, &labels)
    };
    let expression = |operator: &str, key: &str, values: &[&str]| {
        matches(json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]}))
    };
    assert!(matches(json!({})), "an empty selector selects all");
    assert!(matches(json!({"matchLabels": {"team": "a"}})));
    assert!(!matches(
        json!({"matchLabels": {"team": "a", "stage": "dev"}})
    ));
    assert!(expression("In", "team", &["a", "b"]));
    assert!(!expression("In", "stage", &["dev"]));
    assert!(expression("NotIn", "stage", &["dev"]), "an absent label");
    assert!(!expression("NotIn", "team", &["a"]));
    assert!(expression("Exists", "team", &[]));
    assert!(!expression("DoesNotExist", "team", &[]));
    assert!(!expression("Like", "team", &["a"]), "an unknown operator");
}

#[test]
fn rounds_amounts_of_status() {
    let mut amounts = QuotaAmounts::default();
    amounts.set(QuotaResource::Memory, "-1Gi".parse().expect("a quantity"));
    amounts.set(QuotaResource::Cores, "1500m".parse().expect("a quantity"));
    amounts.set(QuotaResource::Devices, Quantity::count(u64::MAX));
    assert_eq!(amounts.memory, Some(Quantity::ZERO));
    assert_eq!((amounts.cores, amounts.devices), (Some(2), Some(u32::MAX)));
}
