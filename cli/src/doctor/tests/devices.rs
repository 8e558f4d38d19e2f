//! Faults of GPUs, and devices that are not available.

use drava_api::obstacle::{LimitObstacle, SpatialObstacle};
use drava_api::unavailable::UnavailableReason;

use super::*;

#[test]
fn finds_unhealthy_gpu_and_excluded_pool() {
    assert_eq!(
        text(|state| {
            let mut device = device();
            device["taints"] = json!([device["taints"][0], {
                "key": "gpu.drava.dev/unhealthy", "value": "xid-79", "effect": "NoSchedule",
            }]);
            state.slices = vec![object(slice("gpu.drava.dev", device))];
        }),
        "device gpu-0-vgpu of node n1: the GPU is unhealthy: xid-79; see kubectl get events --field-selector involvedObject.name=n1, and repair or reset the GPU\n"
    );
    assert_eq!(
        text(|state| {
            let partitions = ["gpu-0-mig-1g-5gb-0", "gpu-0-mig-7g-40gb-0"].map(|name| {
                let mut device = device();
                device["name"] = json!(name);
                device["attributes"]["type"] = json!({"string": "mig"});
                device["taints"] = json!([device["taints"][0], {
                    "key": "gpu.drava.dev/unhealthy", "value": "foreign-mig-instance", "effect": "NoSchedule",
                }]);
                object(slice("gpu.drava.dev", device))
            });
            state.slices = partitions.into();
        }),
        "gpu-0 of node n1: MIG instances that drava did not create exclude partitions; find them with nvidia-smi mig -lgi on the node, and destroy those that are not in use\n"
    );
    assert_eq!(
        text(|state| state.excluded_pools = vec!["pool n1/gpus is excluded".to_owned()]),
        "resourceslices: pool n1/gpus is excluded; restart the node driver of the node\n"
    );
}

#[test]
fn names_fabric_manager_and_broken_memory() {
    let found = |value: &str| {
        text(|state| {
            let mut device = device();
            device["taints"] = json!([device["taints"][0], {
                "key": "gpu.drava.dev/unhealthy", "value": value, "effect": "NoSchedule",
            }]);
            state.slices = vec![object(slice("gpu.drava.dev", device))];
        })
    };
    assert_eq!(
        found("fabric-not-ready"),
        "device gpu-0-vgpu of node n1: the GPU is unhealthy: fabric-not-ready; start the fabric manager of the NVIDIA driver's version on the node (nvidia-fabricmanager, with nvlsm on HGX B200 and later)\n"
    );
    assert!(found("memory-repair-failed").ends_with("memory-repair-failed; replace the GPU\n"));
}

/// Text of the findings about a device with this taint, held by a claim or not.
fn tainted(value: &str, is_held: bool) -> String {
    text(|state| {
        let mut device = device();
        device["taints"] = json!([device["taints"][0], {
            "key": "gpu.drava.dev/unhealthy", "value": value, "effect": "NoSchedule",
        }]);
        state.slices = vec![object(slice("gpu.drava.dev", device))];
        let results = json!([{
            "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
        }]);
        let allocation = is_held.then(|| json!({"devices": {"results": results}}));
        state.claims = vec![object(json!({
            "metadata": {"name": "c", "namespace": "team"}, "spec": {}, "status": {"allocation": allocation},
        }))];
    })
}

#[test]
fn ignores_devices_that_the_driver_withdraws_itself() {
    for value in [
        "mig-mode",
        "mig-mode-disabled",
        "profile-mode",
        "profile-amounts",
        "profile-excluded",
        "profile-mig-profiles",
        "profile-mig-layout",
        "device-plugin",
        "other-driver",
        "no-memory",
        "no-memory-figure",
        "confidential-computing",
    ] {
        assert_eq!(tainted(value, false), "no problems found\n", "{value}");
    }
}

#[test]
fn gives_each_unavailable_device_its_fix() {
    let device = "device gpu-0-vgpu of node n1: ";
    let pods = "delete the pods that use resourceclaim team/c";
    let held = |value: &str, problem: &str, fix: &str| {
        let expected = format!("{device}{problem}; {fix}\n").replace("PODS", pods);
        assert_eq!(tainted(value, true), expected);
    };
    held(
        "mig-mode-disabled",
        "MIG mode is disabled, so the GPU has no partitions",
        "run `nvidia-smi -mig 1` to partition it, or PODS",
    );
    held(
        "mig-mode",
        "MIG mode is enabled, so the GPU has partitions only",
        "run `nvidia-smi -mig 0` to use it whole or shared, or PODS",
    );
    held(
        "compute-mode-prohibited",
        "compute mode is Prohibited",
        "run `nvidia-smi -c DEFAULT` to use the GPU, or PODS",
    );
    held(
        "profile-mode",
        "the mode of the node profile excludes the device",
        "PODS",
    );
    held(
        "profile-amounts",
        "the node profile changes the amounts of the device",
        "PODS",
    );
    held(
        "confidential-computing",
        "confidential computing is on, which excludes shares",
        "PODS",
    );
    let reset = "drain the GPU, then run `nvidia-smi -mig 0 -i GPU-1` and `nvidia-smi --gpu-reset -i GPU-1`";
    held(
        "reset-for-shares",
        "the node profile needs MIG mode off, which this GPU changes at a reset only",
        reset,
    );
    for reason in UnavailableReason::ALL {
        let text = tainted(reason.as_str(), true);
        assert!(!text.contains("repair or reset"), "{reason:?}: {text}");
    }
    assert_eq!(
        tainted("mps", false),
        format!(
            "{device}processes use the GPU through MPS, which bypasses the limits of shares; stop the MPS control daemon \
             to allow shares\n"
        )
    );
}

#[test]
fn finds_selectors_with_placeholders() {
    let selector = |expression: &str| json!([{"cel": {"expression": expression}}]);
    let old = [
        r#"device.attributes["resource.kubernetes.io"].numaNode == -1"#,
        r#"device.attributes['gpu.drava.dev'].nvlinkDomain != 'none'"#,
    ];
    let fixed = [
        r#"device.attributes["resource.kubernetes.io"].?numaNode.orValue(-1) == -1"#,
        r#"device.attributes["gpu.drava.dev"].?nvlinkDomain.orValue("none") == "none""#,
        r#"device.attributes["resource.kubernetes.io"].numaNode == 1"#,
    ];
    let devices = |expression: &str| {
        json!({"devices": {"requests": [
            {"name": "a", "exactly": {"deviceClassName": "c", "selectors": selector(expression)}},
            {"name": "b", "firstAvailable": [{"name": "s", "deviceClassName": "c", "selectors": selector(expression)}]},
        ]}})
    };
    let with = |expression: &str| {
        text(|state| {
            state.classes.push(object(json!({
                "metadata": {"name": "c"}, "spec": {"selectors": selector(expression)},
            })));
            state.claims.push(object(json!({
                "metadata": {"name": "d", "namespace": "team"}, "spec": devices(expression),
            })));
            state.templates = Some(vec![object(json!({
                "metadata": {"name": "t", "namespace": "team"}, "spec": {"spec": devices(expression)},
            }))]);
        })
    };
    let numa = "a selector compares numaNode with -1, which no GPU publishes; use \
                device.attributes[\"resource.kubernetes.io\"].?numaNode.orValue(-1), or leave the selector out";
    let expected = format!(
        "deviceclass c: {numa}\nresourceclaim team/d: {numa}\nresourceclaimtemplate team/t: {numa}\n"
    );
    assert_eq!(with(old[0]), expected);
    assert!(
        with(old[1]).contains("compares nvlinkDomain with none"),
        "{}",
        with(old[1])
    );
    for expression in fixed {
        assert_eq!(with(expression), "no problems found\n", "{expression}");
    }
}

#[test]
fn names_objects_that_cannot_be_read() {
    let text = text(|state| {
        let claim = (
            "ResourceClaim".to_owned(),
            "n/odd: status.x: odd".to_owned(),
        );
        state.unreadable = vec![claim];
    });
    assert_eq!(
        text,
        "resourceclaim n/odd: the object cannot be read: status.x: odd; its devices count as taken, and no other device of their \
         pools is allocated; repair the field or delete the object; update drava if a newer release wrote it\n"
    );
}

/// The text of doctor for a device with these attributes, and a class with this config and selector.
fn with_class(attributes: &[(&str, &str)], config: &Value, selector: &str) -> String {
    with_devices(&[attributes], config, selector)
}

/// The same with several devices.
fn with_devices(devices: &[&[(&str, &str)]], config: &Value, selector: &str) -> String {
    text(|state| {
        state.slices.clear();
        for attributes in devices {
            let mut device = device();
            for (name, value) in *attributes {
                device["attributes"][name] = json!({"string": value});
            }
            let slice = slice("gpu.drava.dev", device);
            state.slices.push(object(slice));
        }
        let mut parameters = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig"});
        let fields = config.as_object().unwrap().clone();
        parameters.as_object_mut().unwrap().extend(fields);
        state.classes.push(object(json!({
            "metadata": {"name": "walled"},
            "spec": {
                "selectors": [{"cel": {"expression": selector}}],
                "config": [{"opaque": {"driver": "gpu.drava.dev", "parameters": parameters}}],
            },
        })));
    })
}

/// The text of doctor for a device with these attributes, and a class without options and with this selector.
fn noted(attributes: &[(&str, &str)], selector: &str) -> String {
    text(|state| {
        let mut device = device();
        for (name, value) in attributes {
            device["attributes"][name] = json!({"string": value});
        }
        state.slices = vec![object(slice("gpu.drava.dev", device))];
        state.classes.push(object(json!({
            "metadata": {"name": "bare"}, "spec": {"selectors": [{"cel": {"expression": selector}}]},
        })));
    })
}

#[test]
fn names_profile_that_requires_memory_limits_for_classes() {
    let of = |enforcement: Option<&str>, selected: &str| {
        text(|state| {
            let mut device = device();
            for (name, value) in [
                ("memoryEnforcement", "library"),
                ("memoryEnforcementObstacle", "driver-before-615"),
            ] {
                device["attributes"][name] = json!({"string": value});
            }
            state.slices = vec![object(slice("gpu.drava.dev", device))];
            state.profiles = Some(vec![object(json!({
                "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "GpuNodeProfile", "metadata": {"name": "walls"},
                "spec": {"nodeSelector": {"walls": selected}, "defaults": {"memory": {"enforcement": "driver"}}},
            }))]);
            let labels = state.nodes[0].metadata.labels.get_or_insert_default();
            labels.insert("walls".to_owned(), "yes".to_owned());
            let mut class = json!({
                "metadata": {"name": "walled"}, "spec": {"selectors": [{"cel": {"expression": ANY}}]},
            });
            if let Some(enforcement) = enforcement {
                class["spec"]["config"] = json!([{"opaque": {"driver": "gpu.drava.dev", "parameters": {
                    "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "memory": {"enforcement": enforcement},
                }}}]);
            }
            state.classes.push(object(class));
        })
    };
    let obstacle = LimitObstacle::OldDriver;
    let (problem, remedy) = (obstacle.problem(), obstacle.remedy());
    assert_eq!(
        of(None, "yes"),
        format!(
            "node n1: GpuNodeProfile walls requires memory.enforcement: driver for device class walled, and {problem}; {remedy}, or \
             change spec.defaults of the profile\n"
        )
    );
    // The class takes precedence, and the profile of another node does not matter.
    assert_eq!(of(Some("library"), "yes"), NOTHING);
    let note = format!(
        "{NOTHING}note: libvgpu alone limits the memory of shares on n1: {problem}; {remedy}\n"
    );
    assert_eq!(of(Some("auto"), "yes"), note);
    assert_eq!(of(None, "no"), note);
    let required = of(Some("driver"), "no");
    assert!(
        required.starts_with("node n1: device class walled requires"),
        "{required}"
    );
}

const ANY: &str = "device.driver == \"gpu.drava.dev\"";
const NOTHING: &str = "no problems found\n";

#[test]
fn names_what_lacks_for_memory_limits_that_a_class_requires() {
    let required = json!({"memory": {"enforcement": "driver"}});
    let able = [
        ("memoryEnforcement", "driver"),
        ("memoryEnforcementObstacle", "none"),
    ];
    for obstacle in LimitObstacle::ALL {
        let attributes = [
            ("memoryEnforcement", "library"),
            ("memoryEnforcementObstacle", obstacle.as_str()),
        ];
        let found = |config: &Value, selector: &str| with_class(&attributes, config, selector);
        assert_eq!(
            found(&required, ANY),
            format!(
                "node n1: device class walled requires memory.enforcement: driver, and {}; {}, or select devices with \
                 memoryEnforcement == \"driver\" in the class\n",
                obstacle.problem(),
                obstacle.remedy()
            )
        );
        let auto = json!({"memory": {"enforcement": "auto"}});
        assert_eq!(
            found(&auto, ANY),
            format!(
                "{NOTHING}note: libvgpu alone limits the memory of shares on n1: {}; {}\n",
                obstacle.problem(),
                obstacle.remedy()
            )
        );
        assert_eq!(
            found(&json!({"memory": {"enforcement": "library"}}), ANY),
            NOTHING
        );
        let whole = "device.driver == \"gpu.drava.dev\" && device.attributes[\"gpu.drava.dev\"].type == \"gpu\"";
        assert_eq!(noted(&attributes, whole), NOTHING);
        let selected = "device.attributes[\"gpu.drava.dev\"].memoryEnforcement == \"driver\"";
        let with_able = with_devices(&[&attributes, &able], &required, selected);
        assert_eq!(with_able, NOTHING);
        assert_eq!(found(&auto, selected), NOTHING);
        assert_eq!(
            found(&required, selected),
            format!(
                "node n1: device class walled selects memoryEnforcement == \"driver\", which no GPU of the cluster has: {}; {}\n",
                obstacle.problem(),
                obstacle.remedy()
            )
        );
    }
    assert_eq!(with_class(&able, &required, ANY), NOTHING);
    let newer = [
        ("memoryEnforcement", "library"),
        ("memoryEnforcementObstacle", "of-a-newer-driver"),
    ];
    let newer = with_class(&newer, &required, ANY);
    assert!(newer.contains("see the log of the node driver"), "{newer}");
}

#[test]
fn names_what_lacks_for_spatial_shares_that_a_class_requires() {
    let required = json!({"computePolicy": "spatial"});
    let able = [("type", "vgpu"), ("spatialObstacle", "none")];
    for obstacle in SpatialObstacle::ALL {
        for kind in ["vgpu", "gpu"] {
            let attributes = [
                ("type", kind),
                ("uuid", "GPU-7"),
                ("spatialObstacle", obstacle.as_str()),
            ];
            let found = |config: &Value, selector: &str| with_class(&attributes, config, selector);
            assert_eq!(
                found(&required, ANY),
                format!(
                    "node n1: device class walled requires computePolicy: spatial, and {}; {}, or select devices with \
                     spatialObstacle == \"none\" in the class\n",
                    obstacle.problem(),
                    obstacle.remedy().replace("UUID", "GPU-7")
                )
            );
            assert_eq!(found(&json!({"computePolicy": "balance"}), ANY), NOTHING);
            let selected = "device.attributes[\"gpu.drava.dev\"].spatialObstacle == \"none\"";
            let with_able = with_devices(&[&attributes, &able], &required, selected);
            assert_eq!(with_able, NOTHING);
            assert_eq!(
                found(&required, selected),
                format!(
                    "node n1: device class walled selects spatialObstacle == \"none\", which no GPU of the cluster has: {}; {}\n",
                    obstacle.problem(),
                    obstacle.remedy().replace("UUID", "GPU-7")
                )
            );
        }
    }
    assert_eq!(with_class(&able, &required, ANY), NOTHING);
}
