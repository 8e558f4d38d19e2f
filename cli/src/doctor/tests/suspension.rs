//! Config of device classes, and shares that cannot be suspended although they may be.

use super::*;

fn class(selector: &str, driver: &str, fields: Value) -> Value {
    let mut parameters = json!({"apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig"});
    if let (Some(all), Value::Object(fields)) = (parameters.as_object_mut(), fields) {
        all.extend(fields);
    }
    json!({"metadata": {"name": "team-gpu"}, "spec": {
        "selectors": [{"cel": {"expression": selector}}],
        "config": [{"opaque": {"driver": driver, "parameters": parameters}}],
    }})
}

#[test]
fn finds_invalid_config_of_class() {
    let own = "device.driver == \"gpu.drava.dev\"";
    let found = |class: Value| text(|state| state.classes.push(object(class)));
    let suspend = || json!({"suspend": {"allowed": true}});
    assert_eq!(
        found(class(
            own,
            "gpu.drava.dev",
            json!({"memory": {"maxLimit": "10GB"}})
        )),
        "deviceclass team-gpu: pods with claims of this class stay pending: config field memory.maxLimit: \"10GB\" is not a quantity: unknown suffix \"GB\", use one of n u m k M G T P E Ki Mi Gi Ti Pi Ei; correct spec.config of the class; the claims need no change\n"
    );
    assert_eq!(
        found(class(
            own,
            "gpu.drava.dev",
            json!({"memory": {"limit": "10Gi"}})
        )),
        "deviceclass team-gpu: pods with claims of this class stay pending: config field memory.limit: not allowed in a device class (only in a claim); correct spec.config of the class; the claims need no change\n"
    );
    assert_eq!(
        found(class(own, "gpu.drava.io", suspend())),
        "deviceclass team-gpu: its config for driver gpu.drava.io has no effect on devices of gpu.drava.dev; use driver: gpu.drava.dev\n"
    );
    for class in [
        class(own, "gpu.drava.dev", suspend()),
        class(
            "device.driver == \"gpu.example.com\"",
            "gpu.example.com",
            json!({"a": 1}),
        ),
    ] {
        assert_eq!(found(class), "no problems found\n");
    }
}

/// A claim of the pod of the healthy cluster that may be suspended.
fn claim() -> Value {
    let parameters = json!({
        "apiVersion": "gpu.drava.dev/v1alpha1", "kind": "VgpuConfig", "suspend": {"allowed": true},
    });
    json!({
        "metadata": {"name": "c", "namespace": "team"}, "spec": {},
        "status": {
            "allocation": {"devices": {
                "results": [{
                    "request": "gpu", "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
                    "consumedCapacity": {"memory": "8Gi"},
                }],
                "config": [{"source": "FromClaim", "opaque": {"driver": "gpu.drava.dev", "parameters": parameters}}],
            }},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": "uid-p"}],
        },
    })
}

#[test]
fn repeats_what_node_driver_says_of_share_that_is_to_be_suspended() {
    let found = |label: bool, status: &str, reason: &str| {
        text(|state| {
            let mut pod = user_pod();
            pod["metadata"]["uid"] = json!("uid-p");
            state.pods = vec![object(driver_pod()), object(pod)];
            let mut claim = claim();
            if label {
                claim["metadata"]["labels"] = json!({"gpu.drava.dev/suspend": "true"});
            }
            claim["status"]["devices"] = json!([{
                "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu", "shareID": "s",
                "conditions": [{
                    "type": "Suspended", "status": status, "reason": reason,
                    "message": "cannot lock process 7 of the node: a thread of it is in uninterruptible sleep",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }],
            }]);
            state.claims = vec![object(claim)];
        })
    };
    let expected = "pod team/p: the share of claim team/c is to be suspended, and is not: cannot lock process 7 of the node: a thread of it is in uninterruptible sleep; follow the message, or take the wish back with `kubectl drava resume`\n";
    assert_eq!(found(true, "False", "SuspendFailed"), expected);
    assert_eq!(found(true, "False", "SuspendRefused"), expected);
    for (label, status, reason) in [
        (false, "False", "SuspendFailed"),
        (true, "True", "Suspended"),
        (true, "False", "Resumed"),
    ] {
        let found = found(label, status, reason);
        assert_eq!(found, "no problems found\n", "{reason}");
    }
}

#[test]
fn finds_shares_that_cannot_be_suspended() {
    let found = |container: Value| {
        text(|state| {
            let mut pod = user_pod();
            pod["metadata"]["uid"] = json!("uid-p");
            pod["spec"]["containers"] = json!([container]);
            state.pods = vec![object(driver_pod()), object(pod)];
            state.claims = vec![object(claim())];
        })
    };
    let container = |limit: &str| json!({"name": "app", "resources": {"claims": [{"name": "gpu"}], "limits": {"memory": limit}}});
    let finding = |problem: &str| {
        format!(
            "pod team/p: claim c says suspend.allowed: true, and its share is never suspended: {problem}; raise the memory limit, or remove the probe, in the template of the pod; or remove suspend.allowed from the claim template: then the pod is evicted instead\n"
        )
    };
    assert_eq!(
        found(container("8Gi")),
        finding(
            "the memory of the share goes to the host memory of its container, which is limited to 8Gi; 8Gi and what the program needs itself are necessary"
        )
    );
    let mut probed = container("12Gi");
    probed["livenessProbe"] = json!({"tcpSocket": {"port": 80}});
    assert_eq!(
        found(probed),
        finding("its pod has a liveness or startup probe, so kubelet would restart the container")
    );
    assert_eq!(found(container("12Gi")), "no problems found\n");
}
