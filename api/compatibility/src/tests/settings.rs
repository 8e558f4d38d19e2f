//! Settings: resource names, classes and the largest share; names of templates.

use super::*;

#[test]
fn reduces_memory_to_largest_share() {
    let settings = Settings {
        largest_share_bytes: Some(15_000 << 20),
        ..shares()
    };
    let pod = pod(json!({"volcano.sh/vgpu-memory": 20_000}));
    let translation = translate(&pod, &settings).unwrap().unwrap();
    assert_eq!(
        summary(&translation),
        ["app: vgpu.drava.dev memory=15000Mi"]
    );
    assert_eq!(
        warnings(&translation),
        [
            "spec.containers[0].resources.limits[volcano.sh/vgpu-memory]: 20000 MiB are reduced to 15000 MiB, the largest share of the cluster"
        ]
    );
}

#[test]
fn reduces_memory_to_largest_device_of_class() {
    let settings = Settings {
        largest_share_bytes: Some(15_000 << 20),
        largest_partition_bytes: Some(40_000 << 20),
        ..Settings::default()
    };
    for (mode, expected) in [
        (None, "app: fraction.drava.dev memory=40000Mi"),
        (Some("hami-core"), "app: vgpu.drava.dev memory=15000Mi"),
        (Some("mig"), "app: mig.drava.dev memory=40000Mi"),
    ] {
        let annotations = mode.map_or(json!({}), |mode| json!({"volcano.sh/vgpu-mode": mode}));
        let pod = annotated(json!({"volcano.sh/vgpu-memory": 50_000}), annotations);
        let translation = translate(&pod, &settings).unwrap().unwrap();
        assert_eq!(summary(&translation), [expected]);
        assert_eq!(warnings(&translation).len(), 1);
    }
}

#[test]
fn selects_fraction_class_for_one_amount() {
    let settings = Settings {
        share_class: ShareClass::Fraction,
        ..Settings::default()
    };
    for (limits, annotations, class) in [
        (
            json!({"volcano.sh/vgpu-memory": 1024}),
            json!({}),
            "fraction.drava.dev",
        ),
        (
            json!({"volcano.sh/vgpu-memory": 1024, "volcano.sh/vgpu-number": 2}),
            json!({}),
            "vgpu.drava.dev",
        ),
        (
            json!({"volcano.sh/vgpu-number": 1}),
            json!({}),
            "vgpu.drava.dev",
        ),
        (
            json!({"volcano.sh/vgpu-memory": 1024}),
            json!({"volcano.sh/vgpu-mode": "hami-core"}),
            "vgpu.drava.dev",
        ),
    ] {
        let pod = annotated(limits.clone(), annotations);
        let translation = translate(&pod, &settings).unwrap().unwrap();
        let devices = translation.claim.devices.expect("devices");
        let request = devices.requests.expect("requests")[0].exactly.clone();
        assert_eq!(request.expect("exact").device_class_name, class, "{limits}");
    }
}

#[test]
fn reads_resource_table_from_value() {
    let settings: Settings = serde_json::from_value(json!({"resources": {"families": [{
        "count": "example.com/gpus", "memory": "example.com/memory",
        "memoryPercentage": "example.com/memory-percent", "cores": "example.com/cores",
        "countAlone": "share", "memoryFactor": 256, "defaultCount": 2, "defaultMemory": 4, "defaultCores": 10,
    }]}}))
    .expect("valid settings");
    let requested = |limits: Value| {
        let translation = translate(&pod(limits), &settings).unwrap();
        translation.map(|translation| summary(&translation)[0].clone())
    };
    assert_eq!(requested(json!({"nvidia.com/gpu": 1})), None);
    assert_eq!(
        requested(json!({"example.com/memory": 8})).as_deref(),
        Some("app: vgpu.drava.dev x2 cores=10 memory=2Gi")
    );
    assert_eq!(
        requested(json!({"example.com/gpus": 1})).as_deref(),
        Some("app: fraction.drava.dev cores=10 memory=1Gi")
    );
    let typo = serde_json::from_value::<Settings>(json!({"resource": {}}));
    assert!(typo.is_err_and(|error| error.to_string().contains("resource")));
}

#[test]
fn escapes_values_in_selectors() {
    let pod = annotated(
        json!({"nvidia.com/gpu": 1}),
        json!({"nvidia.com/use-gputype": "a\") || true || (\"\\"}),
    );
    assert_eq!(
        summary(&translated(&pod)),
        [format!(
            r#"app: gpu.drava.dev if {TYPE}.contains("a\") || true || (\"\\")"#
        )]
    );
}

#[test]
fn names_templates_by_shape() {
    let name = |limits: Value| translated(&pod(limits)).template_name();
    let first = name(json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024}));
    assert_eq!(first.len(), "gpu-".len() + 16);
    assert_eq!(
        first,
        name(json!({"volcano.sh/vgpu-memory": 1024})),
        "equal claims"
    );
    assert_ne!(first, name(json!({"volcano.sh/vgpu-memory": 1025})));
}

#[test]
fn refuses_malformed_pods() {
    for (pod, message) in [
        (
            json!({"spec": {"containers": [{"image": "x"}]}}),
            "spec.containers[0]: ",
        ),
        (json!({"spec": {"containers": "x"}}), "spec.containers: "),
        (
            json!({"metadata": {"annotations": {"a": 1}}, "spec": {}}),
            "metadata.annotations.a: ",
        ),
        (json!([]), ""),
    ] {
        let text = refused(&pod);
        assert!(
            text.starts_with(&format!(
                "{message}{}",
                if message.is_empty() {
                    ""
                } else {
                    "the pod is malformed"
                }
            )),
            "{text}"
        );
    }
}
