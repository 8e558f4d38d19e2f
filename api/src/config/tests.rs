//! Decoding errors name the field; a claim can only be stricter than its class.

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
fn names_field_in_errors() {
    let cases = [
        (
            document(json!({"memroy": {}})),
            "config field memroy: unknown field `memroy`, expected one of `apiVersion`, `kind`, `computePolicy`, `priority`, `maxPriority`, `memory`, `enforcement`, `placement`, `unmetered`, `suspend`",
        ),
        (
            document(json!({"memory": {"percnt": 5}})),
            "config field memory.percnt: unknown field `percnt`, expected one of `percent`, `policy`, `enforcement`, `limit`, `maxLimit`, `burst`, `maxBurst`, `lendIdle`, `reclaim`",
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
            "config field computePolicy: unknown variant `turbo`, expected one of `balance`, `fixed`, `spatial`, `none`",
        ),
        (
            document(json!({"computePolicy": "token"})),
            "config field computePolicy: `token` does not exist; use `balance` (cores are guaranteed, idle time of other shares \
             is added) or `fixed` (never more than cores)",
        ),
        (
            json!({"apiVersion": "gpu.nvidia.com/v1", "kind": "GpuConfig"}),
            "config is gpu.nvidia.com/v1 GpuConfig; expected gpu.drava.dev/v1alpha1 VgpuConfig",
        ),
        (
            json!({}),
            "config is without apiVersion without kind; expected gpu.drava.dev/v1alpha1 VgpuConfig",
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
    assert_eq!(
        decode_error(&document(json!({"suspend": true}))),
        "config field suspend: invalid type: boolean `true`, expected an object; use suspend: {allowed: true}"
    );
}

#[test]
fn allows_suspend_by_class_or_by_claim_unless_the_class_denies_it() {
    let class = |fields| allocation_config("FromClass", &[], fields);
    let claim = |fields| allocation_config("FromClaim", &[], fields);
    let (yes, no) = (
        json!({"suspend": {"allowed": true}}),
        json!({"suspend": {"allowed": false}}),
    );
    let cases = [
        (vec![], false),
        (vec![class(yes.clone())], true),
        (vec![claim(yes.clone())], true),
        (
            vec![class(json!({"suspend": {}})), claim(yes.clone())],
            true,
        ),
        (vec![class(yes.clone()), claim(no.clone())], false),
        (
            vec![
                class(json!({"suspend": {"allowed": true}, "memory": {"maxLimit": "16Gi"}})),
                claim(json!({"memory": {"limit": "12Gi", "reclaim": "kill"}})),
            ],
            false,
        ),
        (vec![class(no.clone())], false),
    ];
    for (configs, expected) in cases {
        let settings = resolve(&configs, "gpu").unwrap();
        assert_eq!(settings.allows_suspend(), expected, "{configs:?}");
    }
    let error = resolve(&[class(no), claim(yes)], "gpu").unwrap_err();
    assert_eq!(
        error.to_string(),
        "config field suspend.allowed: not allowed in a claim (only false: the device class denies it)"
    );
}

#[test]
fn proposes_unit_of_limit_without_one() {
    let message = |limit: &str, guarantee_mib: u64| {
        let limit = limit.parse().unwrap();
        BurstError::BelowGuarantee {
            limit,
            guarantee_mib,
        }
        .to_string()
    };
    for (limit, guarantee_mib, remedy) in [
        ("8000", 4096, "did you mean 8000Mi?"),
        ("12", 4096, "did you mean 12Gi?"),
        ("2", 4096, "use more, or remove it"),
        ("2Gi", 4096, "use more, or remove it"),
    ] {
        let message = message(limit, guarantee_mib);
        assert!(message.ends_with(remedy), "{message}");
    }
}

#[test]
fn names_class_that_decides() {
    let class = |fields| allocation_config("FromClass", &[], fields);
    let claim = |fields| allocation_config("FromClaim", &[], fields);
    let error = |configs: &[DeviceAllocationConfiguration]| {
        resolve(configs, "gpu").unwrap_err().for_class("small")
    };
    let limit = |seconds: i64| json!({"suspend": {"maxSuspendSeconds": seconds}});
    assert!(error(&[class(limit(60)), claim(limit(90))]).ends_with("; device class small"));
    assert!(!error(&[claim(json!({"priority": "high"}))]).contains("small"));
}

#[test]
fn limits_suspension_by_the_class_or_by_less_of_the_claim() {
    let class = |fields| allocation_config("FromClass", &[], fields);
    let claim = |fields| allocation_config("FromClaim", &[], fields);
    let limit = |seconds: i64| json!({"suspend": {"maxSuspendSeconds": seconds}});
    let cases = [
        (vec![], None),
        (vec![class(limit(600))], Some(600)),
        (vec![claim(limit(900))], Some(900)),
        (vec![class(limit(600)), claim(limit(60))], Some(60)),
        (
            vec![
                class(limit(600)),
                claim(json!({"suspend": {"allowed": true}})),
            ],
            Some(600),
        ),
    ];
    for (configs, expected) in cases {
        let settings = resolve(&configs, "gpu").unwrap();
        let seconds = settings.max_suspend.map(|limit| limit.duration().as_secs());
        assert_eq!(seconds, expected, "{configs:?}");
    }
    let error = |configs: &[DeviceAllocationConfiguration]| {
        resolve(configs, "gpu").unwrap_err().to_string()
    };
    assert_eq!(
        error(&[class(limit(600)), claim(limit(601))]),
        "config field suspend.maxSuspendSeconds: not allowed in a claim (601 s exceeds the class's maximum of 600 s)"
    );
    for seconds in [0, -1, 1 << 32] {
        let message = error(&[claim(limit(seconds))]);
        let expected = format!("{seconds} is out of range, use 1 to 4294967295");
        assert!(message.contains(&expected), "{message}");
    }
}

#[test]
fn uses_defaults_without_config() {
    let settings = resolve(&[], "gpu").unwrap();
    assert_eq!(settings, Settings::default());
    assert_eq!(settings.compute_policy, ComputePolicy::Balance);
    assert_eq!(settings.enforcement, Enforcement::Report);
}

#[test]
fn applies_claim_config_after_class_config() {
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
    assert_eq!(settings.placement.gpu, Some(GpuPlacementPolicy::Spread));
}

#[test]
fn rejects_fields_that_relax_the_class() {
    for (fields, message) in [
        (
            json!({"computePolicy": "none"}),
            "config field computePolicy: not allowed in a claim (only fixed)",
        ),
        (
            json!({"computePolicy": "balance"}),
            "config field computePolicy: not allowed in a claim (only fixed)",
        ),
        (
            json!({"priority": 1}),
            "config field priority: not allowed in a claim (1 exceeds the class's maximum of 0)",
        ),
        (
            json!({"maxPriority": 100}),
            "config field maxPriority: not allowed in a claim (only in a device class)",
        ),
        (
            json!({"memory": {"policy": "hard"}}),
            "config field memory.policy: not allowed in a claim (only in a device class)",
        ),
        (
            json!({"memory": {"enforcement": "library"}}),
            "config field memory.enforcement: not allowed in a claim (only in a device class)",
        ),
        (
            json!({"enforcement": "report"}),
            "config field enforcement: not allowed in a claim (only in a device class)",
        ),
        (
            json!({"unmetered": true}),
            "config field unmetered: not allowed in a claim (only in a device class)",
        ),
    ] {
        let error = resolve(&[allocation_config("FromClaim", &[], fields)], "gpu").unwrap_err();
        assert_eq!(error.to_string(), message);
    }
    let class = allocation_config("FromClass", &[], json!({"memory": {"percent": 50}}));
    assert_eq!(
        resolve(&[class], "gpu").unwrap_err().to_string(),
        "config field memory.percent: not allowed in a device class (only in a claim)"
    );
}

#[test]
fn divides_multiprocessors_by_class_only() {
    let class = allocation_config("FromClass", &[], json!({"computePolicy": "spatial"}));
    assert!(
        resolve(std::slice::from_ref(&class), "gpu")
            .unwrap()
            .is_spatial()
    );
    let refused = |class: Option<&DeviceAllocationConfiguration>, fields: Value| {
        let claim = allocation_config("FromClaim", &[], fields);
        let configs: Vec<_> = class.cloned().into_iter().chain([claim]).collect();
        resolve(&configs, "gpu").unwrap_err().to_string()
    };
    assert_eq!(
        refused(None, json!({"computePolicy": "spatial"})),
        "config field computePolicy: not allowed in a claim (only in a device class)"
    );
    assert_eq!(
        refused(Some(&class), json!({"computePolicy": "fixed"})),
        "config field computePolicy: not allowed in a claim (the class divides multiprocessors)"
    );
    assert_eq!(
        refused(Some(&class), json!({"suspend": {"allowed": true}})),
        "config field suspend.allowed: not together with computePolicy: spatial; the NVIDIA driver cannot checkpoint clients of MPS"
    );
    let class = allocation_config(
        "FromClass",
        &[],
        json!({"computePolicy": "spatial", "memory": {"maxLimit": "16Gi"}}),
    );
    let limit = json!({"memory": {"limit": "16Gi", "burst": "unallocated", "reclaim": "kill"}});
    assert_eq!(
        refused(Some(&class), limit),
        "config field memory.limit: not together with computePolicy: spatial; memory is taken back by ending programs, which disturbs \
         the others of the same MPS server"
    );
}

/// Node profiles set defaults of shares whose classes do not know them, and the controller must know the division of a share.
#[test]
fn node_profiles_cannot_divide_multiprocessors() {
    let schema = serde_json::to_string(&schemars::schema_for!(ComputePolicy)).unwrap();
    assert!(
        schema.contains("balance") && !schema.contains("spatial"),
        "{schema}"
    );
}

#[test]
fn limits_burst_to_class_maximum() {
    let class = allocation_config("FromClass", &[], json!({"memory": {"maxLimit": "16Gi"}}));
    let claim = |limit: &str| {
        let fields = json!({"memory": {"limit": limit, "burst": "unallocated", "reclaim": "kill"}});
        allocation_config("FromClaim", &[], fields)
    };
    let settings = resolve(&[claim("16Gi"), class.clone()], "gpu").unwrap();
    assert_eq!(settings.burst_limit(4 << 30), Ok(Some(16 << 30)));
    let message = |configs: &[DeviceAllocationConfiguration]| {
        resolve(configs, "gpu").unwrap_err().to_string()
    };
    assert_eq!(
        message(&[claim("17Gi"), class.clone()]),
        "config field memory.limit: not allowed in a claim (17Gi exceeds the class's maximum of 16Gi)"
    );
    assert_eq!(
        message(&[claim("5Gi")]),
        "config field memory.limit: not allowed in a claim (the class has no memory.maxLimit)"
    );
    let raised = allocation_config("FromClaim", &[], json!({"memory": {"maxLimit": "20Gi"}}));
    assert_eq!(
        message(&[raised, class]),
        "config field memory.maxLimit: not allowed in a claim (only in a device class)"
    );
    for (field, value) in [("maxBurst", json!("idle")), ("lendIdle", json!(true))] {
        let raised = allocation_config("FromClaim", &[], json!({"memory": {field: value}}));
        assert_eq!(
            message(&[raised]),
            format!("config field memory.{field}: not allowed in a claim (only in a device class)")
        );
    }
    for (field, value) in [
        ("limit", "12Gi"),
        ("burst", "unallocated"),
        ("reclaim", "kill"),
    ] {
        let class = allocation_config("FromClass", &[], json!({"memory": {field: value}}));
        assert_eq!(
            message(&[class]),
            format!("config field memory.{field}: not allowed in a device class (only in a claim)")
        );
    }
}

#[test]
fn refuses_burst_that_cannot_be_given_back() {
    const GIB: u64 = 1 << 30;
    let limit = |fields: Value, guarantee_bytes: u64| {
        let class = allocation_config("FromClass", &[], json!({"memory": {"maxLimit": "16Gi"}}));
        let claim = allocation_config("FromClaim", &[], json!({"memory": fields}));
        let limit = resolve(&[class, claim], "gpu")?.burst_limit(guarantee_bytes)?;
        Ok::<_, ConfigError>(limit)
    };
    let message = |fields, guarantee| limit(fields, guarantee).unwrap_err().to_string();
    assert_eq!(
        message(json!({"limit": "12Gi"}), 4 * GIB),
        "config field memory.reclaim: missing; a share with a memory.limit above its request must say how it gives memory back \
         when another claim needs it: use `kill` (processes that do not free it at once are killed)"
    );
    assert_eq!(
        message(json!({"limit": "2Gi", "reclaim": "kill"}), 4 * GIB),
        "config field memory.limit: 2Gi is less than the 4096 MiB that the request guarantees; use more, or remove it"
    );
    assert_eq!(
        message(json!({"limit": "-1", "reclaim": "kill"}), 4 * GIB),
        "config field memory.limit: -1 is no amount of memory; use for example 12Gi"
    );
    assert_eq!(
        message(
            json!({"limit": "12Gi", "burst": "idle", "reclaim": "kill"}),
            GIB
        ),
        "config field memory.burst: not allowed in a claim (the class has no memory.maxBurst: idle)"
    );
    assert!(
        message(json!({"limit": "12Gi", "reclaim": "suspend"}), GIB)
            .starts_with("config field memory.reclaim: unknown variant `suspend`")
    );
    // No more than the guarantee needs nothing.
    assert_eq!(limit(json!({"limit": "4Gi"}), 4 * GIB).unwrap(), None);
    assert_eq!(limit(json!({"reclaim": "kill"}), 4 * GIB).unwrap(), None);
}

#[test]
fn bursts_into_idle_guarantees_as_class_allows() {
    let burst = |max: Value, chosen: Value| {
        let class = json!({"memory": {"maxLimit": "16Gi", "maxBurst": max}});
        let claim = json!({"memory": {"limit": "12Gi", "burst": chosen, "reclaim": "kill"}});
        let configs = [
            allocation_config("FromClass", &[], class),
            allocation_config("FromClaim", &[], claim),
        ];
        let settings = resolve(&configs, "gpu");
        settings.ok().map(|settings| settings.memory_burst)
    };
    let (idle, unallocated) = (json!("idle"), json!("unallocated"));
    let cases = [
        (&idle, &idle, Some(MemoryBurst::Idle)),
        (&idle, &unallocated, Some(MemoryBurst::Unallocated)),
        (&idle, &Value::Null, Some(MemoryBurst::Unallocated)),
        (&unallocated, &idle, None),
        (&Value::Null, &idle, None),
    ];
    for (max, chosen, expected) in cases {
        let found = burst(max.clone(), chosen.clone());
        assert_eq!(found, expected, "{chosen} of {max}");
    }
}

#[test]
fn lends_idle_guarantee_only_where_it_can_be_given_back() {
    let lends = |class: Value, claim: Value| {
        let configs = [
            allocation_config("FromClass", &[], class),
            allocation_config("FromClaim", &[], claim),
        ];
        resolve(&configs, "gpu").unwrap().lends_idle()
    };
    let class = |lend: bool, other: Value| {
        let mut fields = json!({"memory": {"lendIdle": lend, "maxLimit": "16Gi"}});
        if let (Some(fields), Value::Object(other)) = (fields.as_object_mut(), other) {
            fields.extend(other);
        }
        fields
    };
    assert!(lends(class(true, json!({})), json!({})));
    assert!(!lends(class(false, json!({})), json!({})));
    assert!(!lends(json!({}), json!({})));
    let limit = json!({"memory": {"limit": "12Gi", "reclaim": "kill"}});
    assert!(!lends(class(true, json!({})), limit));
    let suspend = json!({"suspend": {"allowed": true}});
    assert!(!lends(class(true, json!({})), suspend));
    assert!(!lends(
        class(true, json!({"computePolicy": "spatial"})),
        json!({})
    ));
}

#[test]
fn limits_priority_to_class_maximum() {
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
    // The class limits the second document too, not the first document.
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
fn applies_config_to_named_requests() {
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
    // An invalid document of another request has no effect.
    let other = [allocation_config(
        "FromClaim",
        &["b"],
        json!({"nonsense": 1}),
    )];
    assert!(resolve(&other, "a").is_ok());
    assert!(resolve(&other, "b").is_err());
}

#[test]
fn ignores_config_of_other_drivers() {
    let mut config = allocation_config("FromClaim", &[], json!({"nonsense": 1}));
    if let Some(opaque) = config.opaque.as_mut() {
        opaque.driver = "gpu.example.com".to_owned();
    }
    assert!(resolve(&[config], "gpu").is_ok());
}

#[test]
fn documents_every_field() {
    let page = include_str!("../../../docs/config.md");
    let everything = VgpuConfig::decode(&document(json!({
        "computePolicy": "fixed", "priority": 1, "maxPriority": 2,
        "memory": {
            "percent": 50, "policy": "spill", "limit": "12Gi", "maxLimit": "16Gi", "burst": "unallocated", "reclaim": "kill",
            "maxBurst": "idle", "lendIdle": true, "enforcement": "driver",
        },
        "enforcement": "required",
        "placement": {"node": "spread", "gpu": "binpack"}, "unmetered": true, "suspend": {"allowed": true, "maxSuspendSeconds": 600},
    })))
    .unwrap();
    // Fails to match when a new field is not set above.
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
                limit: Some(_),
                max_limit: Some(_),
                burst: Some(_),
                max_burst: Some(_),
                lend_idle: Some(_),
                reclaim: Some(_),
                enforcement: Some(_),
            }),
        enforcement: Some(_),
        placement: Some(Placement {
            node: Some(_),
            gpu: Some(_),
        }),
        unmetered: Some(_),
        suspend:
            Some(SuspendConfig {
                allowed: Some(_),
                max_suspend_seconds: Some(_),
            }),
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

#[test]
fn ignores_record_of_the_controller_in_an_allocation() {
    let mut allocation = k8s_openapi::api::resource::v1::AllocationResult::default();
    let record = crate::placement_record::PlacementRecord {
        pod_uid: "u".to_owned(),
        reason: "only feasible node".to_owned(),
    };
    record.add_to(&mut allocation);
    let config = allocation.devices.unwrap().config.unwrap();
    assert_eq!(resolve(&config, "gpu").unwrap(), Settings::default());
    // Builds without the record ignore it for its driver.
    assert_ne!(config[0].opaque.as_ref().unwrap().driver, names::DRIVER);
}
