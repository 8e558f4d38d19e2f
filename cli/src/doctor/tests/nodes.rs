//! Faults of nodes, GPUs and pods.

use super::*;

#[test]
fn finds_driver_that_is_missing_or_not_ready() {
    assert_eq!(
        text(|state| {
            state.pods.remove(0);
        }),
        "node n1: no pod of the node driver runs on the node; tolerate the taints of the node with driver.tolerations of the drava chart, or see kubectl describe daemonset -n drava-system drava-dra-driver\n"
    );
    let not_ready = |cause: &str| {
        format!(
            "node n1: node driver drava-system/drava-dra-driver-x is not ready: {cause}; see kubectl logs -n drava-system drava-dra-driver-x\n"
        )
    };
    let mut pod = driver_pod();
    pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    assert_eq!(
        text(|state| {
            state.pods[0] = object(pod.clone());
            let reported = |message, time| object(event("Node", "n1", "NotReady", message, time));
            state.events = Some(vec![
                reported("gpus: no /dev/nvidia-uvm", "2026-01-01T00:00:02.000000Z"),
                reported("older", "2026-01-01T00:00:01.000000Z"),
            ]);
        }),
        not_ready("gpus: no /dev/nvidia-uvm")
    );
    pod["status"]["containerStatuses"] = json!([{
        "name": "driver", "image": "", "imageID": "", "ready": false, "restartCount": 3,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": {"exitCode": 1, "message": "record of version 9\n"}},
    }]);
    assert_eq!(
        text(|state| state.pods[0] = object(pod)),
        not_ready("CrashLoopBackOff: record of version 9")
    );
}

#[test]
fn accepts_second_driver_pod_during_update() {
    let mut pod = driver_pod();
    pod["status"] = json!({"phase": "Pending"});
    assert_eq!(
        text(|state| state.pods.push(object(pod))),
        "no problems found\n"
    );
}

#[test]
fn finds_node_without_slice() {
    assert_eq!(
        text(|state| state.slices.clear()),
        "node n1: the node driver is ready and publishes no device; see kubectl logs -n drava-system drava-dra-driver-x\n"
    );
}

#[test]
fn finds_other_owners_of_gpus() {
    for resource in [
        "nvidia.com/gpu",
        "volcano.sh/vgpu-number",
        "nvidia.com/mig-1g.5gb",
    ] {
        assert_eq!(
            text(|state| {
                let mut offering = node();
                offering["status"]["allocatable"][resource] = json!("8");
                state.nodes = vec![object(offering)];
            }),
            format!(
                "node n1: a device plugin offers {resource}: 8, the GPUs of drava; remove the device plugin from the node; a GPU has one owner\n"
            )
        );
    }
    let other = |uuid: &str| {
        let attributes = json!({"gpu.nvidia.com/uuid": {"string": uuid}});
        object(slice(
            "gpu.nvidia.com",
            json!({"name": "gpu-0", "attributes": attributes}),
        ))
    };
    assert_eq!(
        text(|state| state.slices.push(other("GPU-1"))),
        "node n1: DRA driver gpu.nvidia.com publishes GPUs of drava; remove gpu.nvidia.com from the node, or remove the label gpu.drava.dev/enabled of the node\n"
    );
    assert_eq!(
        text(|state| state.slices.push(other("GPU-2"))),
        "no problems found\n",
        "another GPU"
    );
}

#[test]
fn finds_driver_that_destroys_partitions() {
    let partition = |driver: &str, uuid: &str, has_counters: bool| {
        let attributes = json!({"type": {"string": "mig"}, "uuid": {"string": uuid}});
        let mut partition = json!({"name": "gpu-1-mig", "attributes": attributes});
        if has_counters {
            let counters = json!({"memory-slice-0": {"value": "1"}});
            partition["consumesCounters"] = json!([{"counterSet": "gpu-1", "counters": counters}]);
        }
        object(slice(driver, partition))
    };
    let found = |own: bool, has_counters: bool| {
        text(|state| {
            state
                .slices
                .push(partition("gpu.nvidia.com", "GPU-8", has_counters));
            if own {
                state.slices.push(partition("gpu.drava.dev", "GPU-9", true));
            }
        })
    };
    assert!(
        found(true, true).contains(
            "node n1: DRA driver gpu.nvidia.com creates MIG partitions by claim, and destroys those of drava when it starts; turn its \
             feature gate DynamicMIG off"
        ),
        "{}",
        found(true, true)
    );
    assert!(
        !found(false, true).contains("DynamicMIG"),
        "drava has no partitions"
    );
    assert!(
        !found(true, false).contains("DynamicMIG"),
        "of instances that exist"
    );
}

#[test]
fn finds_dropped_fields() {
    for (field, gate) in [
        ("allowMultipleAllocations", "DRAConsumableCapacity"),
        ("consumesCounters", "DRAPartitionableDevices"),
        ("taints", "DRADeviceTaints"),
    ] {
        let found = text(|state| {
            let mut device = device();
            device.as_object_mut().expect("an object").remove(field);
            state.slices = vec![object(slice("gpu.drava.dev", device))];
        });
        assert_eq!(found.lines().count(), 1, "{found}");
        assert!(
            found.starts_with(&format!(
                "API server: devices of drava have no field {field}, because the feature gate {gate} is off; "
            )),
            "{found}"
        );
    }
}

#[test]
fn finds_claims_without_enforcement() {
    let enforced = |reason: &str| {
        text(|state| {
            let devices = json!([{
                "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
                "conditions": [condition("False", reason)],
            }]);
            state.claims = vec![object(json!({
                "metadata": {"name": "c", "namespace": "team"}, "spec": {}, "status": {"devices": devices},
            }))];
        })
    };
    assert_eq!(
        enforced("CdiIgnored"),
        "resourceclaim team/c: limits are not enforced: CdiIgnored: text; set enable_cdi = true in containerd's config; restart containerd and the pod\n"
    );
    assert_eq!(
        enforced("OtherGpuUsed"),
        "resourceclaim team/c: limits are not enforced: OtherGpuUsed: text; run the pod without privileges and volumes of /dev, or request the GPU in a claim\n"
    );
    assert_eq!(
        enforced("AdminAccess"),
        "no problems found\n",
        "by intention"
    );
}

#[test]
fn finds_missing_state_of_claim_until_repaired() {
    let problem =
        "claim team/c: the CDI spec is missing on the node, and cannot be recreated: disk full";
    let found = |repaired: &str| {
        text(|state| {
            state.claims = vec![object(json!({
                "metadata": {"name": "c", "namespace": "team"}, "spec": {},
                "status": {"allocation": {}},
            }))];
            let event = |reason, time| object(event("ResourceClaim", "c", reason, problem, time));
            state.events = Some(vec![
                event("ClaimStateMissing", "2026-01-01T00:00:02.000000Z"),
                event("ClaimStateRepaired", repaired),
            ]);
        })
    };
    assert_eq!(
        found("2026-01-01T00:00:01.000000Z"),
        format!(
            "resourceclaim team/c: {problem}; remove the cause; the node driver repeats the repair every few seconds\n"
        )
    );
    assert_eq!(found("2026-01-01T00:00:03.000000Z"), "no problems found\n");
}

#[test]
fn events_of_other_objects_of_the_name_do_not_count() {
    let found = |field: &str, value: &str| {
        text(|state| {
            state.claims = vec![object(json!({
                "metadata": {"name": "c", "namespace": "team", "uid": "new"}, "spec": {},
                "status": {"allocation": {}},
            }))];
            let time = "2026-01-01T00:00:02.000000Z";
            let mut event = event("ResourceClaim", "c", "ClaimStateMissing", "gone", time);
            event["involvedObject"][field] = json!(value);
            state.events = Some(vec![object(event)]);
        })
    };
    for (field, value) in [("namespace", "other"), ("uid", "old")] {
        assert_eq!(found(field, value), "no problems found\n", "{field}");
    }
    assert!(found("uid", "new").starts_with("resourceclaim team/c: gone"));
}

#[test]
fn finds_failed_prepare_of_pending_pods() {
    let message = "failed to prepare dynamic resources: DRA driver gpu.drava.dev is not registered";
    let failed = |phase: &str, message: &str, driver: &str| {
        text(|state| {
            state.claims = vec![object(json!({
                "metadata": {"name": "c", "namespace": "team"}, "spec": {},
                "status": {"allocation": {"devices": {"results": [
                    {"request": "gpu", "driver": driver, "pool": "n1/gpus", "device": "gpu-0"},
                ]}}},
            }))];
            let mut pod = user_pod();
            pod["status"]["phase"] = json!(phase);
            state.pods.push(object(pod));
            let time = "2026-01-01T00:00:02.000000Z";
            state.events = Some(vec![object(event(
                "Pod",
                "p",
                "FailedPrepareDynamicResources",
                message,
                time,
            ))]);
        })
    };
    assert_eq!(
        failed("Pending", message, "gpu.drava.dev"),
        format!(
            "pod team/p: the kubelet of node n1 cannot prepare the claims: {message}; restart the node driver of the node: kubectl delete pod -n drava-system --field-selector spec.nodeName=n1 -l app.kubernetes.io/component=driver\n"
        )
    );
    assert_eq!(
        failed("Running", message, "gpu.drava.dev"),
        "no problems found\n",
        "a later attempt succeeded"
    );
    let rejected =
        "NodePrepareResources failed for ResourceClaim c: claim team/c: device gpu-0: the cause";
    // Walls that the node lacks: the causes have their remedies.
    let walls = [
        "claim team/c: request gpu: the device class requires computePolicy: spatial, which device gpu-0-vgpu cannot have: the driver \
         root has no nvidia-cuda-mps-control or no nvidia-cuda-mps-server; install it; or add the selector \
         device.attributes[\"gpu.drava.dev\"].spatialObstacle == \"none\" to the class",
        "claim team/c: the directory /run/drava/mps of MPS belongs to user 1000 with mode 755; remove it",
    ];
    for rejected in [&[rejected][..], &walls].concat() {
        assert_eq!(
            failed("Pending", rejected, "gpu.drava.dev"),
            format!(
                "pod team/p: the kubelet of node n1 cannot prepare the claims: {rejected}; see kubectl describe pod p, and remove the cause; the kubelet repeats the call\n"
            )
        );
    }
    assert_eq!(
        failed("Pending", rejected, "gpu.example.com"),
        "no problems found\n",
        "another driver has rejected the claim"
    );
}

#[test]
fn finds_pods_that_see_gpus_without_claim() {
    let found = |change: fn(&mut Value)| {
        text(|state| {
            let mut pod = user_pod();
            pod["spec"]["resourceClaims"] = json!([]);
            change(&mut pod);
            state.pods[1] = object(pod);
        })
    };
    let finding = |cause: &str| {
        format!(
            "pod team/p: the pod has no claim and can see the GPUs of node n1: {cause}; give the pod a claim, or set NVIDIA_VISIBLE_DEVICES=void; make runc the default runtime\n"
        )
    };
    assert_eq!(found(|_| {}), finding("NVIDIA_VISIBLE_DEVICES is set"));
    assert_eq!(
        found(|pod| pod["spec"]["containers"][0]["env"] = json!([])),
        finding("its runtime class is nvidia")
    );
    for healthy in [
        |pod: &mut Value| {
            pod["metadata"]["ownerReferences"] =
                json!([{"kind": "DaemonSet", "name": "e", "apiVersion": "apps/v1", "uid": "u"}])
        },
        |pod: &mut Value| pod["spec"]["nodeName"] = json!("cpu-node"),
        |pod: &mut Value| {
            pod["spec"]["runtimeClassName"] = Value::Null;
            pod["spec"]["containers"][0]["env"][0]["value"] = json!("void");
        },
    ] {
        assert_eq!(found(healthy), "no problems found\n");
    }
}

#[test]
fn names_cause_of_driver_that_is_not_ready() {
    let at = |second: u32| format!("2026-01-01T00:{second:02}:00.000000Z");
    for (cause, fault, fix) in [
        (
            "records: cannot read the records of claim c",
            Fault::RecordsNewer,
            "run the version of drava that wrote the records",
        ),
        (
            "gpus: cannot find libnvidia-ml.so.1",
            Fault::DriverRootWrong,
            "set driver.driverRoot",
        ),
        (
            "artifacts: /var/lib/drava is mounted noexec on the node: the container runtime cannot run the CDI hook",
            Fault::StateDirNoexec,
            "set driver.stateDir of the drava chart",
        ),
    ] {
        let mut state = healthy();
        let mut pod = driver_pod();
        pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:20:00Z"}]);
        state.pods[0] = object(pod);
        let reported =
            |message: &str, time: u32| object(event("Node", "n1", "NotReady", message, &at(time)));
        state.events = Some(vec![
            // Before the pod became not ready.
            reported("records: solved long ago", 1),
            reported(cause, 20),
            reported("published: the API server is down", 21),
            reported("published: not yet", 22),
        ]);
        let findings = diagnose(&state).findings;
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert_eq!(findings[0].fault, fault);
        assert!(findings[0].problem.contains(cause) && findings[0].fix.contains(fix));
    }
}

#[test]
fn ignores_solved_causes_of_driver_that_is_not_ready() {
    let at = |second: u32| format!("2026-01-01T00:20:{second:02}.000000Z");
    let reported =
        |message: &str, time: u32| object(event("Node", "n1", "NotReady", message, &at(time)));
    let found = |created: Option<&str>, causes: &[(&str, u32)]| {
        let mut state = healthy();
        let mut pod = driver_pod();
        pod["metadata"]["creationTimestamp"] = json!(created);
        pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:20:50Z"}]);
        state.pods[0] = object(pod);
        let events = causes.iter().map(|(cause, time)| reported(cause, *time));
        state.events = Some(events.collect());
        diagnose(&state).findings[0].fault
    };
    let (records, root) = ("records: newer", "gpus: cannot find libnvidia-ml.so.1");
    assert_eq!(
        found(None, &[(records, 5), (root, 45)]),
        Fault::DriverRootWrong,
        "the newest report counts"
    );
    let created = Some("2026-01-01T00:20:30Z");
    assert_eq!(
        found(created, &[(records, 25), ("published: forbidden", 45)]),
        Fault::DriverNotReady,
        "the report of a pod before"
    );
}

#[test]
fn finds_runtime_until_it_is_corrected() {
    let problem = "/etc/containerd/config.toml makes \"nvidia\" the default runtime; set default_runtime_name = \"runc\"";
    let events = |corrected: &str| {
        text(|state| {
            state.events = Some(vec![
                object(event(
                    "Node",
                    "n1",
                    "RuntimeMisconfigured",
                    problem,
                    "2026-01-01T00:00:02.000000Z",
                )),
                object(event("Node", "n1", "RuntimeCorrected", "gone", corrected)),
            ]);
        })
    };
    assert_eq!(
        events("2026-01-01T00:00:01.000000Z"),
        format!("node n1: {problem}\n")
    );
    assert_eq!(events("2026-01-01T00:00:03.000000Z"), "no problems found\n");
}

#[test]
fn says_that_runtime_could_not_be_checked() {
    let problem = "cannot check the container runtime, because the node has no configuration at a known path; make sure that CDI is on";
    let found = text(|state| {
        let time = "2026-01-01T00:00:02.000000Z";
        state.events = Some(vec![object(event(
            "Node",
            "n1",
            "RuntimeUnchecked",
            problem,
            time,
        ))]);
    });
    assert_eq!(found, format!("node n1: {problem}\n"));
}

#[test]
fn finds_unserved_socket_and_missing_device_file() {
    let failed = |message: &str| {
        let mut state = healthy();
        let mut pod = user_pod();
        pod["status"]["phase"] = json!("Pending");
        state.pods[1] = object(pod);
        let time = "2026-01-01T00:00:01.000000Z";
        let reason = "FailedPrepareDynamicResources";
        state.events = Some(vec![object(event("Pod", "p", reason, message, time))]);
        let findings = diagnose(&state).findings;
        assert_eq!(findings.len(), 1, "{findings:?}");
        (findings[0].fault, findings[0].fix.clone())
    };
    let (fault, fix) = failed(
        "DRA driver gpu.drava.dev: NodePrepareResources: rpc error: code = Unavailable desc = connection error: desc = \
         \"transport: Error while dialing: dial unix /var/lib/kubelet/plugins/gpu.drava.dev/dra.sock: connect: connection refused\"",
    );
    assert_eq!(fault, Fault::StaleSocket);
    assert!(fix.starts_with("restart the node driver"), "{fix}");
    let (fault, fix) = failed("claim team/c: /driver-root/dev/nvidia-uvm is missing");
    assert_eq!(fault, Fault::UvmMissing);
    assert!(fix.contains("nvidia-modprobe -u -c 0"), "{fix}");
}

#[test]
fn finds_driver_of_gpus_that_drava_does_not_publish() {
    let mut state = healthy();
    let mut pod = driver_pod();
    pod["status"]["conditions"] = json!([{"type": "Ready", "status": "False"}]);
    state.pods[0] = object(pod);
    let mut other = device();
    other["attributes"] = json!({"uuid": {"string": "GPU-7"}});
    state.slices = vec![object(slice("gpu.nvidia.com", other))];
    let findings = diagnose(&state).findings;
    assert_eq!(
        findings.len(),
        1,
        "not ready because of the other driver: {findings:?}"
    );
    assert_eq!(findings[0].fault, Fault::OtherDriver);
}

#[test]
fn checks_nodes_of_the_affinity_of_the_driver() {
    let terms = json!([
        {"matchExpressions": [{"key": "gpu.drava.dev/enabled", "operator": "In", "values": ["true"]}]},
        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["on"]}]},
    ]);
    let on = |labels: Value| {
        let mut state = healthy();
        let mut driver = workload("driver", "drava-dra-driver", "drava-dra-driver");
        let spec = &mut driver["spec"]["template"]["spec"];
        spec["nodeSelector"] = Value::Null;
        spec["affinity"] = json!({"nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms.clone()},
        }});
        state.daemon_sets = vec![object(driver)];
        let mut node = node();
        node["metadata"]["labels"] = labels;
        state.nodes = vec![object(node)];
        state.gpu_nodes().count()
    };
    assert_eq!(on(json!({"gpu": "on"})), 1);
    assert_eq!(on(json!({"gpu.drava.dev/enabled": "true"})), 1);
    assert_eq!(on(json!({"gpu": "off"})), 0);
}

#[test]
fn finds_devices_that_containerd_cannot_inject() {
    let failed = |message: &str| {
        let mut state = healthy();
        let mut pod = user_pod();
        pod["status"]["phase"] = json!("Pending");
        state.pods[1] = object(pod);
        let time = "2026-01-01T00:00:01.000000Z";
        state.events = Some(vec![object(event("Pod", "p", "Failed", message, time))]);
        let findings = diagnose(&state).findings;
        findings.first().map(|finding| finding.fault)
    };
    // The texts of containerd 2.3.
    assert_eq!(
        failed(
            "Error: failed to create containerd container: CDI device injection failed: failed to inject devices: failed to stat CDI host device \"/dev/nvidia-uvm\""
        ),
        Some(Fault::UvmMissing)
    );
    assert_eq!(
        failed("Error: CDI support is explicitly disabled"),
        Some(Fault::CdiOff)
    );
    assert_eq!(failed("Error: ImagePullBackOff"), None);
}
