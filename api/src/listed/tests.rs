//! Lists and watches with objects that the API server accepts and typed decoding refuses.

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube_core::WatchEvent;
use kube_core::object::ObjectList;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::quota::GpuQuota;

const LAST_TIME: &str = "9999-12-31T23:59:59Z";

fn list<K: DeserializeOwned + Clone>(items: &[String]) -> Vec<Listed<K>> {
    let items = items.join(",");
    let json = format!(r#"{{"kind":"List","apiVersion":"v1","metadata":{{}},"items":[{items}]}}"#);
    let list: ObjectList<Listed<K>> = serde_json::from_str(&json).expect("a list");
    list.items
}

fn nested(levels: usize) -> String {
    format!("{}1{}", r#"{"a":"#.repeat(levels), "}".repeat(levels))
}

/// A claim with opaque parameters, allocated to a share of gpu-0.
fn claim_with_parameters(parameters: &str) -> String {
    let config = format!(r#"{{"opaque":{{"driver":"gpu.drava.dev","parameters":{parameters}}}}}"#);
    let result = r#"{"request":"gpu","driver":"gpu.drava.dev","pool":"node-0","device":"gpu-0"}"#;
    format!(
        r#"{{"metadata":{{"name":"odd","namespace":"n","uid":"u","resourceVersion":"7"}},
            "spec":{{"devices":{{"config":[{config}]}}}},
            "status":{{"allocation":{{"devices":{{"results":[{result}]}}}}}}}}"#
    )
}

#[test]
fn reads_object_whose_bookkeeping_has_an_extreme_time() {
    let pod = json!({
        "metadata": {
            "name": "p",
            "managedFields": [{"manager": "kubectl", "time": LAST_TIME, "fieldsV1": {"f:metadata": {}}}],
        },
    });
    let [Listed::Object(pod)] = &list::<Pod>(&[pod.to_string()])[..] else {
        panic!("unreadable");
    };
    assert_eq!(pod.metadata.name.as_deref(), Some("p"));
    assert_eq!(pod.metadata.managed_fields, None);
}

#[test]
fn keeps_text_that_only_mentions_bookkeeping() {
    let pod = json!({"metadata": {"name": "p", "annotations": {"managedFields": "managedFields"}}});
    let [Listed::Object(pod)] = &list::<Pod>(&[pod.to_string()])[..] else {
        panic!("unreadable");
    };
    let annotations = pod.metadata.annotations.as_ref().expect("annotations");
    assert_eq!(annotations["managedFields"], "managedFields");
}

#[test]
fn unreadable_claim_keeps_identity_devices_and_cause() {
    let odd = claim_with_parameters(&nested(200));
    let good = claim_with_parameters("{}").replace("odd", "good");
    let (claims, unreadable) = Listed::<ResourceClaim>::split(list(&[odd, good]));
    assert_eq!(claims[0].metadata.name.as_deref(), Some("good"));
    let [odd] = &unreadable[..] else {
        panic!("{unreadable:?}");
    };
    assert_eq!(odd.metadata.resource_version.as_deref(), Some("7"));
    let device = HeldDevice {
        driver: "gpu.drava.dev".to_owned(),
        pool: "node-0".to_owned(),
        device: "gpu-0".to_owned(),
    };
    assert_eq!(odd.devices, [device]);
    let text = odd.to_string();
    assert!(
        text.starts_with("n/odd: spec.devices.config[0].opaque.parameters")
            && text.ends_with("recursion limit exceeded"),
        "{text}"
    );
}

#[test]
fn watch_event_of_unreadable_object_keeps_its_version() {
    let odd = claim_with_parameters("1e400");
    let event = format!(r#"{{"type":"MODIFIED","object":{odd}}}"#);
    let event: WatchEvent<Listed<ResourceClaim>> = serde_json::from_str(&event).expect("an event");
    let WatchEvent::Modified(claim @ Listed::Unreadable(_)) = &event else {
        panic!("{event:?}");
    };
    assert_eq!(claim.meta().resource_version.as_deref(), Some("7"));
    let bookmark = r#"{"type":"BOOKMARK","object":{"kind":"Pod","apiVersion":"v1","metadata":{"resourceVersion":"9"}}}"#;
    let event: WatchEvent<Listed<Pod>> = serde_json::from_str(bookmark).expect("an event");
    assert!(matches!(event, WatchEvent::Bookmark(_)));
}

/// JSON text of values that the API server stores somewhere in an object.
fn odd_value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just(format!("{LAST_TIME:?}")),
        Just(r#""0000-01-01T00:00:00Z""#.to_owned()),
        Just(r#""-1000000000000000000000000""#.to_owned()),
        Just(r#""""#.to_owned()),
        Just("null".to_owned()),
        Just("[]".to_owned()),
        Just("{}".to_owned()),
        Just("true".to_owned()),
        Just("1e400".to_owned()),
        Just("99999999999999999999999999".to_owned()),
        Just("-0.0".to_owned()),
        (0_usize..400).prop_map(nested),
        "\\PC{0,8}".prop_map(|text| Value::from(text).to_string()),
    ];
    leaf.prop_recursive(3, 8, 3, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..3)
                .prop_map(|items| format!("[{}]", items.join(","))),
            (field(), inner).prop_map(|(name, value)| format!("{{{name:?}:{value}}}")),
        ]
    })
}

fn field() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "spec",
        "status",
        "devices",
        "allocation",
        "results",
        "conditions",
        "containers",
        "taints",
        "managedFields",
        "lastTransitionTime",
        "capacity",
        "hard",
        "unknown",
    ])
}

fn reads_neighbors<K>(odd: &str) -> Result<(), TestCaseError>
where
    K: DeserializeOwned + Resource<DynamicType = ()> + Clone,
{
    let good = json!({
        "apiVersion": K::api_version(&()), "kind": K::kind(&()), "metadata": {"name": "good"},
        // The fields that a kind cannot be without.
        "spec": {"containers": [], "devices": {}, "driver": "d", "nodeName": "n",
                 "pool": {"name": "p", "generation": 1, "resourceSliceCount": 1}},
    });
    let mut good = good;
    if K::kind(&()) == "ResourceSlice" {
        good["spec"]["devices"] = json!([]);
    }
    let good = good.to_string();
    let items = list::<K>(&[good.clone(), odd.to_owned(), good]);
    prop_assert_eq!(items.len(), 3);
    for index in [0, 2] {
        prop_assert!(
            matches!(&items[index], Listed::Object(object) if object.meta().name.as_deref() == Some("good"))
        );
    }
    prop_assert_eq!(items[1].meta().name.as_deref(), Some("odd"));
    prop_assert_eq!(items[1].meta().resource_version.as_deref(), Some("7"));
    if let Listed::Unreadable(odd) = &items[1] {
        prop_assert!(!odd.cause.is_empty());
    }
    Ok(())
}

proptest! {
    #[test]
    fn odd_objects_hide_no_other(spec in odd_value(), status in odd_value(), extra in odd_value(), name in field()) {
        let metadata = format!(
            r#"{{"name":"odd","namespace":"n","uid":"u","resourceVersion":"7","managedFields":[{{"time":"{LAST_TIME}"}}],{name:?}:{extra}}}"#
        );
        let odd = format!(r#"{{"metadata":{metadata},"spec":{spec},"status":{status},"data":{extra}}}"#);
        reads_neighbors::<Pod>(&odd)?;
        reads_neighbors::<ResourceClaim>(&odd)?;
        reads_neighbors::<ResourceSlice>(&odd)?;
        reads_neighbors::<DeviceClass>(&odd)?;
        reads_neighbors::<Node>(&odd)?;
        reads_neighbors::<Namespace>(&odd)?;
    }
}

#[test]
fn reads_quota_beside_one_of_a_newer_release() {
    let old = json!({"metadata": {"name": "old"}, "spec": {}});
    let new = json!({"metadata": {"name": "new"}, "spec": {"namespaceSelector": 5}});
    let (quotas, unreadable) = Listed::<GpuQuota>::split(list(&[old.to_string(), new.to_string()]));
    assert_eq!(quotas.len(), 1);
    assert_eq!(unreadable[0].metadata.name.as_deref(), Some("new"));
}
