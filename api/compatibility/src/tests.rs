//! Each row of the table of resources and annotations, with the claim that results.

use serde_json::json;

use super::*;

mod refusals;
mod settings;

/// Settings in which pods without annotation get shares.
fn shares() -> Settings {
    Settings {
        share_class: ShareClass::Vgpu,
        ..Settings::default()
    }
}

fn pod(limits: Value) -> Value {
    let mut pod =
        json!({"metadata": {}, "spec": {"containers": [{"name": "app", "image": "my/app"}]}});
    pod["spec"]["containers"][0]["resources"]["limits"] = limits;
    pod
}

fn annotated(limits: Value, annotations: Value) -> Value {
    let mut pod = pod(limits);
    pod["metadata"]["annotations"] = annotations;
    pod
}

fn translated(pod: &Value) -> Translation {
    translate(pod, &shares())
        .expect("translatable")
        .expect("requests a GPU")
}

/// One line per request, constraint and config.
fn summary(translation: &Translation) -> Vec<String> {
    let devices = translation.claim.devices.as_ref().expect("devices");
    let mut lines = Vec::new();
    for request in devices.requests.iter().flatten() {
        let exactly = request.exactly.as_ref().expect("an exact request");
        let mut line = format!("{}: {}", request.name, exactly.device_class_name);
        if let Some(count) = exactly.count {
            line.push_str(&format!(" x{count}"));
        }
        let capacity = exactly.capacity.iter().flat_map(|c| &c.requests).flatten();
        for (name, amount) in capacity {
            line.push_str(&format!(" {name}={}", amount.0));
        }
        for selector in exactly.selectors.iter().flatten() {
            let expression = &selector.cel.as_ref().expect("CEL").expression;
            line.push_str(&format!(" if {expression}"));
        }
        lines.push(line);
    }
    for constraint in devices.constraints.iter().flatten() {
        let requests = constraint.requests.clone().unwrap_or_default().join(",");
        if let Some(attribute) = &constraint.distinct_attribute {
            lines.push(format!("{requests} distinct {attribute}"));
        }
        if let Some(attribute) = &constraint.match_attribute {
            lines.push(format!("{requests} match {attribute}"));
        }
    }
    for config in devices.config.iter().flatten() {
        let opaque = config.opaque.as_ref().expect("opaque");
        let document = drava_api::config::VgpuConfig::decode(&opaque.parameters.0).expect("valid");
        drava_api::config::Settings::default()
            .under(&document, drava_api::config::Layer::Claim)
            .expect("a claim may set it");
        let mut fields = opaque.parameters.0.clone();
        let map = fields.as_object_mut().expect("an object");
        map.remove("apiVersion");
        map.remove("kind");
        let requests = config.requests.clone().unwrap_or_default().join(",");
        lines.push(format!("{requests} config {fields}"));
    }
    lines
}

fn warnings(translation: &Translation) -> Vec<String> {
    translation
        .warnings
        .iter()
        .map(Warning::to_string)
        .collect()
}

fn refused(pod: &Value) -> String {
    translate(pod, &shares()).expect_err("refused").to_string()
}

const TYPE: &str = r#"device.attributes["gpu.drava.dev"].productName.lowerAscii()"#;

#[test]
fn translates_each_row_of_the_table() {
    let distinct = "app distinct gpu.drava.dev/uuid".to_owned();
    let fixed = r#"app config {"computePolicy":"fixed"}"#.to_owned();
    let rows: Vec<(Value, Value, Vec<String>)> = vec![
        (
            json!({"nvidia.com/gpu": 2}),
            json!({}),
            vec!["app: gpu.drava.dev x2".to_owned()],
        ),
        (
            json!({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "3000", "nvidia.com/gpucores": 30}),
            json!({}),
            vec![
                "app: vgpu.drava.dev x2 cores=30 memory=3000Mi".to_owned(),
                distinct.clone(),
                fixed.clone(),
            ],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50}),
            json!({}),
            vec![
                "app: vgpu.drava.dev".to_owned(),
                r#"app config {"memory":{"percent":50}}"#.to_owned(),
            ],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 100}),
            json!({}),
            vec!["app: vgpu.drava.dev".to_owned()],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 100}),
            json!({}),
            vec!["app: gpu.drava.dev".to_owned()],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024, "nvidia.com/priority": 1}),
            json!({}),
            vec![
                "app: vgpu.drava.dev memory=1Gi".to_owned(),
                r#"app config {"priority":-1}"#.to_owned(),
            ],
        ),
        (
            json!({"nvidia.com/mig-1g.10gb.me": 1}),
            json!({}),
            vec![
                r#"app: mig.drava.dev if device.attributes["gpu.drava.dev"].profile == "1g.10gb+me""#
                    .to_owned(),
            ],
        ),
        (
            json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 1000, "volcano.sh/vgpu-cores": 10}),
            json!({}),
            vec![
                "app: vgpu.drava.dev cores=10 memory=1000Mi".to_owned(),
                fixed.clone(),
            ],
        ),
        (
            json!({"volcano.sh/vgpu-memory": 3000}),
            json!({}),
            vec!["app: vgpu.drava.dev memory=3000Mi".to_owned()],
        ),
        (
            json!({"volcano.sh/vgpu-number": 1}),
            json!({}),
            vec!["app: vgpu.drava.dev".to_owned()],
        ),
        (
            json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory-percentage": 25}),
            json!({}),
            vec![
                "app: vgpu.drava.dev".to_owned(),
                r#"app config {"memory":{"percent":25}}"#.to_owned(),
            ],
        ),
        (
            json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000}),
            json!({"volcano.sh/vgpu-mode": "hami-core"}),
            vec!["app: vgpu.drava.dev memory=3000Mi".to_owned()],
        ),
        (
            json!({"volcano.sh/vgpu-number": 1, "volcano.sh/vgpu-memory": 3000, "volcano.sh/vgpu-cores": 10}),
            json!({"volcano.sh/vgpu-mode": "mig"}),
            vec!["app: mig.drava.dev cores=10 memory=3000Mi".to_owned()],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000}),
            json!({"nvidia.com/vgpu-mode": "mig", "nvidia.com/use-gputype": "A100, NVIDIA-H100"}),
            vec![format!(
                r#"app: mig.drava.dev memory=3000Mi if {TYPE}.contains("a100") || {TYPE}.contains("h100")"#
            )],
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"nvidia.com/nouse-gputype": "1080"}),
            vec![format!(
                r#"app: gpu.drava.dev if !({TYPE}.contains("1080"))"#
            )],
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"nvidia.com/use-gpuuuid": "GPU-a,GPU-b", "volcano.sh/vgpu-nouse-gpuuuid": "GPU-b"}),
            vec![
                r#"app: gpu.drava.dev if device.attributes["gpu.drava.dev"].uuid in ["GPU-a", "GPU-b"] if !(device.attributes["gpu.drava.dev"].uuid in ["GPU-b"])"#
                    .to_owned(),
            ],
        ),
        (
            json!({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 1024}),
            json!({"nvidia.com/numa-bind": "true"}),
            vec![
                "app: vgpu.drava.dev x2 memory=1Gi".to_owned(),
                distinct.clone(),
                "app match resource.kubernetes.io/numaNode".to_owned(),
            ],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024}),
            json!({"hami.io/node-scheduler-policy": "spread", "hami.io/gpu-scheduler-policy": "binpack"}),
            vec![
                "app: vgpu.drava.dev memory=1Gi".to_owned(),
                r#"app config {"placement":{"gpu":"binpack","node":"spread"}}"#.to_owned(),
            ],
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024}),
            json!({"hami.io/gpu-scheduler-policy": "topology-aware"}),
            vec![
                "app: vgpu.drava.dev memory=1Gi".to_owned(),
                r#"app config {"placement":{"gpu":"topology"}}"#.to_owned(),
            ],
        ),
    ];
    for (limits, annotations, expected) in rows {
        let pod = annotated(limits.clone(), annotations.clone());
        let translation = translated(&pod);
        assert_eq!(summary(&translation), expected, "{limits} {annotations}");
        assert_eq!(
            warnings(&translation),
            Vec::<String>::new(),
            "{limits} {annotations}"
        );
    }
}

#[test]
fn warns_about_changed_meaning() {
    let gpu = "spec.containers[0].resources.limits";
    for (limits, annotations, request, warning) in [
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 100}),
            json!({}),
            "app: gpu.drava.dev",
            format!(
                "{gpu}[nvidia.com/gpucores]: 100 cores are a whole GPU; the container can use all its memory, not only the requested amount"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 150}),
            json!({}),
            "app: gpu.drava.dev",
            format!("{gpu}[nvidia.com/gpucores]: 150 cores are reduced to 100, a whole GPU"),
        ),
        (
            json!({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024, "nvidia.com/gpumem-percentage": 5}),
            json!({}),
            "app: vgpu.drava.dev memory=1Gi",
            format!(
                "{gpu}[nvidia.com/gpumem-percentage]: the percentage is ignored, because the container also requests an amount of memory"
            ),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"hami.io/gpu-scheduler-policy": "binpack,topology-aware"}),
            "app: gpu.drava.dev",
            "metadata.annotations[hami.io/gpu-scheduler-policy]: policy \"topology-aware\" is ignored: the first policy of the list applies"
                .to_owned(),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"hami.io/node-scheduler-policy": "topology-aware"}),
            "app: gpu.drava.dev",
            "metadata.annotations[hami.io/node-scheduler-policy]: policy \"topology-aware\" has no equivalent and is ignored"
                .to_owned(),
        ),
        (
            json!({"nvidia.com/gpu": 1}),
            json!({"hami.io/device-scoring-weights": "slot=1"}),
            "app: gpu.drava.dev",
            "metadata.annotations[hami.io/device-scoring-weights]: the annotation has no equivalent and is ignored"
                .to_owned(),
        ),
    ] {
        let translation = translated(&annotated(limits.clone(), annotations));
        let summary = summary(&translation);
        assert_eq!(summary.first().map(String::as_str), Some(request));
        assert_eq!(warnings(&translation), [warning], "{limits}");
    }
}

#[test]
fn reads_requests_without_limits() {
    let mut pod = pod(json!({}));
    pod["spec"]["containers"][0]["resources"] =
        json!({"requests": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": "1k"}});
    assert_eq!(
        summary(&translated(&pod)),
        ["app: vgpu.drava.dev memory=1000Mi"]
    );
    pod["spec"]["containers"][0]["resources"]["limits"] = json!({"nvidia.com/gpu": 2});
    assert_eq!(
        refused(&pod),
        "spec.containers[0].resources.requests[nvidia.com/gpu]: limit 2 and request 1 differ; extended resources have one amount, remove the request"
    );
}

#[test]
fn leaves_other_pods_alone() {
    for limits in [
        json!({"cpu": "2", "amd.com/gpu": 1}),
        json!({"nvidia.com/gpu": 0}),
        json!({"nvidia.com/priority": 1}),
        Value::Null,
    ] {
        let pod = annotated(limits.clone(), json!({"volcano.sh/vgpu-mode": "mps"}));
        assert_eq!(translate(&pod, &shares()), Ok(None), "{limits}");
    }
    let bare = json!({"spec": {"containers": [{"name": "app"}]}});
    assert_eq!(translate(&bare, &shares()), Ok(None));
}

#[test]
fn requests_for_each_container() {
    let share = |memory: u32| json!({"limits": {"volcano.sh/vgpu-memory": memory}});
    let pod = json!({"spec": {
        "initContainers": [
            {"name": "warm-up", "resources": share(2048)},
            {"name": "download", "resources": {"limits": {"cpu": 1}}},
            {"name": "convert", "resources": share(4096)},
            {"name": "proxy", "restartPolicy": "Always", "resources": share(2048)},
        ],
        "containers": [
            {"name": "a", "resources": share(2048)},
            {"name": "b", "resources": share(1024)},
        ],
    }});
    let translation = translated(&pod);
    assert_eq!(
        summary(&translation),
        [
            "proxy: vgpu.drava.dev memory=2Gi",
            "a: vgpu.drava.dev memory=2Gi",
            "b: vgpu.drava.dev memory=1Gi",
            "convert: vgpu.drava.dev memory=4Gi",
        ],
    );
    assert_eq!(
        warnings(&translation),
        [
            "spec.initContainers[2].resources.limits[volcano.sh/vgpu-memory]: the GPU of the init container stays allocated while the pod runs; request the same amounts in a container to use one GPU for both"
        ]
    );
    let mut applied = pod;
    translation.apply(&mut applied, "gpu-1");
    let used = |list: &str, index: usize| {
        applied["spec"][list][index]["resources"]["claims"][0]["request"].clone()
    };
    assert_eq!(used("initContainers", 0), "proxy");
    assert_eq!(used("initContainers", 1), Value::Null);
    assert_eq!(used("initContainers", 2), "convert");
    assert_eq!(used("containers", 1), "b");
}

#[test]
fn sets_claim_in_pod() {
    let mut pod = json!({"metadata": {"name": "p"}, "spec": {
        "schedulerName": "hami-scheduler",
        "resourceClaims": [{"name": "gpu", "resourceClaimName": "other"}],
        "futureField": {"kept": true},
        "containers": [{
            "name": "app",
            "resources": {
                "limits": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": 1024, "cpu": 1},
                "requests": {"nvidia.com/gpu": 1, "nvidia.com/gpumem": "1024"},
                "claims": [{"name": "gpu"}],
            },
        }],
    }});
    let translation = translated(&pod);
    translation.apply(&mut pod, "template");
    assert_eq!(
        pod,
        json!({"metadata": {"name": "p"}, "spec": {
            "resourceClaims": [
                {"name": "gpu", "resourceClaimName": "other"},
                {"name": "gpu-1", "resourceClaimTemplateName": "template"},
            ],
            "futureField": {"kept": true},
            "containers": [{
                "name": "app",
                "resources": {
                    "limits": {"cpu": 1},
                    "claims": [{"name": "gpu"}, {"name": "gpu-1", "request": "app"}],
                },
            }],
        }})
    );
    assert_eq!(translate(&pod, &shares()), Ok(None), "once");
}

#[test]
fn reports_scheduler() {
    for (scheduler, settings, replaced, text) in [
        ("default-scheduler", shares(), false, None),
        (
            "volcano",
            shares(),
            false,
            Some(
                "spec.schedulerName: scheduler \"volcano\" is kept; its pods get GPUs only if scheduling.schedulerNames of the drava chart lists it",
            ),
        ),
        (
            "volcano",
            Settings {
                replaced_schedulers: vec!["volcano".to_owned()],
                ..shares()
            },
            true,
            Some("spec.schedulerName: scheduler \"volcano\" is replaced by the default scheduler"),
        ),
    ] {
        let mut pod = pod(json!({"nvidia.com/gpu": 1}));
        pod["spec"]["schedulerName"] = json!(scheduler);
        let translation = translate(&pod, &settings).unwrap().unwrap();
        assert_eq!(warnings(&translation), Vec::from_iter(text), "{scheduler}");
        translation.apply(&mut pod, "t");
        assert_eq!(pod["spec"].get("schedulerName").is_none(), replaced);
    }
}

#[test]
fn reports_fields_of_the_container() {
    let mut pod = pod(json!({"nvidia.com/gpu": 1, "nvidia.com/gpucores": 30}));
    let container = &mut pod["spec"]["containers"][0];
    container["securityContext"] = json!({"privileged": true});
    container["env"] = json!([
        {"name": "GPU_CORE_UTILIZATION_POLICY", "value": "disable"},
        {"name": "CUDA_TASK_PRIORITY", "value": "1"},
    ]);
    pod["spec"]["runtimeClassName"] = json!("nvidia");
    let translation = translated(&pod);
    assert_eq!(
        summary(&translation),
        [
            "app: vgpu.drava.dev cores=30",
            r#"app config {"priority":-1}"#
        ]
    );
    let fields: Vec<_> = translation
        .warnings
        .iter()
        .map(|w| w.field.as_str())
        .collect();
    assert_eq!(
        fields,
        [
            "spec.containers[0].securityContext.privileged",
            "spec.runtimeClassName",
            "spec.containers[0].env[GPU_CORE_UTILIZATION_POLICY]",
        ]
    );
}
