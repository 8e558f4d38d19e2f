//! A healthy cluster, and each fault injected into it.

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use serde_json::{Value, json};

use super::state::{Permission, Version, Webhook};
use super::*;
use crate::kueue::{self, Kueue};

mod devices;
mod nodes;
mod suspension;

fn object<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("valid fixture")
}

fn node() -> Value {
    json!({
        "metadata": {"name": "n1", "labels": {"gpu.drava.dev/enabled": "true"}},
        "status": {
            "nodeInfo": {
                "kubeletVersion": "v1.37.1", "architecture": "", "bootID": "", "containerRuntimeVersion": "",
                "kernelVersion": "", "kubeProxyVersion": "", "machineID": "", "operatingSystem": "", "osImage": "",
                "systemUUID": "",
            },
            "allocatable": {"cpu": "8", "nvidia.com/gpu": "0"},
        },
    })
}

fn driver_pod() -> Value {
    json!({
        "metadata": {"name": "drava-dra-driver-x", "namespace": "drava-system", "labels": {"component": "driver"}},
        "spec": {"nodeName": "n1", "containers": []},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

fn device() -> Value {
    json!({
        "name": "gpu-0-vgpu",
        "attributes": {"type": {"string": "vgpu"}, "uuid": {"string": "GPU-1"}},
        "allowMultipleAllocations": true,
        "consumesCounters": [{"counterSet": "gpu-0", "counters": {"gpu": {"value": "1"}}}],
        "taints": [{"key": "gpu.drava.dev/managed", "effect": "NoSchedule"}],
    })
}

fn slice(driver: &str, device: Value) -> Value {
    let mut slice = json!({"spec": {
        "driver": driver, "nodeName": "n1",
        "pool": {"name": "n1/gpus", "generation": 1, "resourceSliceCount": 1},
    }});
    slice["spec"]["devices"] = Value::Array(vec![device]);
    slice
}

fn workload(component: &str, account: &str, image: &str) -> Value {
    json!({
        "metadata": {
            "name": account, "namespace": "drava-system",
            "labels": {
                "app.kubernetes.io/component": component,
                "app.kubernetes.io/version": env!("CARGO_PKG_VERSION"),
            },
        },
        "spec": {
            "selector": {"matchLabels": {"component": component}},
            "template": {"spec": {
                "serviceAccountName": account,
                "nodeSelector": {"gpu.drava.dev/enabled": "true"},
                "containers": [{
                    "name": component, "image": format!("registry.example.com:5000/{image}:1"),
                    "args": ["--scheduling=managed"],
                }],
            }},
        },
    })
}

fn lease(namespace: &str, name: &str, renewed: &str) -> Value {
    json!({
        "metadata": {
            "name": name, "namespace": namespace,
            "managedFields": [{"time": "2026-01-01T00:00:10Z"}],
        },
        "spec": {"holderIdentity": "holder", "renewTime": renewed},
    })
}

fn policy(name: &str) -> (ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding) {
    (
        object(json!({"metadata": {"name": name}, "spec": {}})),
        object(json!({"metadata": {"name": name}, "spec": {"policyName": name}})),
    )
}

pub(crate) fn healthy() -> ClusterState {
    let mut controller = workload("controller", "drava-controller", "drava-controller");
    controller["status"] = json!({"availableReplicas": 2});
    let (policies, bindings) = ["drava-driver-own-node", "drava-controller-lease"]
        .map(policy)
        .into_iter()
        .unzip();
    let claim = json!({
        "metadata": {"name": "c", "namespace": "team"}, "spec": {},
        "status": {"devices": [{
            "driver": "gpu.drava.dev", "pool": "n1/gpus", "device": "gpu-0-vgpu",
            "conditions": [condition("True", "Interposed")],
        }]},
    });
    ClusterState {
        server: Some(Version(1, 37)),
        now: Some("2026-01-01T00:00:12Z".parse().expect("a time")),
        nodes: vec![object(node())],
        pods: vec![object(driver_pod()), object(user_pod())],
        slices: vec![object(slice("gpu.drava.dev", device()))],
        classes: [
            "gpu.drava.dev",
            "vgpu.drava.dev",
            "mig.drava.dev",
            "fraction.drava.dev",
        ]
        .map(|name| object(json!({"metadata": {"name": name}, "spec": {}})))
        .into(),
        claims: vec![object(claim)],
        daemon_sets: vec![object(workload(
            "driver",
            "drava-dra-driver",
            "drava-dra-driver",
        ))],
        deployments: vec![object(controller)],
        leases: Some(vec![
            object(lease(
                "drava-system",
                "drava-controller",
                "2026-01-01T00:00:10.5Z",
            )),
            object(lease("kube-node-lease", "n1", "2026-01-01T00:00:09.9Z")),
        ]),
        events: Some(Vec::new()),
        policies: Some(policies),
        bindings: Some(bindings),
        webhooks: Some(vec![webhook()]),
        endpoints: Some(vec![object(endpoints(true))]),
        ..ClusterState::default()
    }
}

fn condition(status: &str, reason: &str) -> Value {
    json!({
        "type": "Enforced", "status": status, "reason": reason, "message": "text",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    })
}

fn user_pod() -> Value {
    json!({
        "metadata": {"name": "p", "namespace": "team"},
        "spec": {
            "nodeName": "n1", "runtimeClassName": "nvidia",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "c"}],
            "containers": [{"name": "app", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}],
        },
        "status": {"phase": "Running"},
    })
}

fn webhook() -> Webhook {
    Webhook {
        configuration: "mutatingwebhookconfiguration drava".to_owned(),
        name: "gate.gpu.drava.dev".to_owned(),
        service: ("drava-system".to_owned(), "drava-webhook".to_owned()),
        trusted_until: Some("2026-02-01T00:00:00Z".parse().expect("a time")),
    }
}

fn endpoints(ready: bool) -> Value {
    json!({
        "metadata": {
            "name": "drava-webhook-1", "namespace": "drava-system",
            "labels": {"kubernetes.io/service-name": "drava-webhook"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}],
    })
}

fn event(kind: &str, name: &str, reason: &str, message: &str, time: &str) -> Value {
    let mut object = json!({"kind": kind, "name": name});
    if kind != "Node" {
        object["namespace"] = json!("team");
    }
    json!({
        "metadata": {}, "involvedObject": object,
        "reason": reason, "message": message, "eventTime": time,
    })
}

/// Text of the findings after a change of the healthy cluster.
fn text(change: impl FnOnce(&mut ClusterState)) -> String {
    let mut state = healthy();
    change(&mut state);
    diagnose(&state).text()
}

#[test]
fn finds_nothing_in_healthy_cluster() {
    let diagnosis = diagnose(&healthy());
    assert_eq!(diagnosis.text(), "no problems found\n");
    assert!(diagnosis.is_healthy());
}

#[test]
fn reports_missing_installation_alone() {
    assert_eq!(
        diagnose(&ClusterState::default()).text(),
        "cluster: no DaemonSet of the drava node driver exists; install the drava chart\n"
    );
}

#[test]
fn finds_old_versions() {
    assert_eq!(
        text(|state| state.server = Some(Version(1, 35))),
        "API server: Kubernetes 1.35 is older than 1.36; upgrade Kubernetes, or set scheduling.mode=native in the drava chart\n"
    );
    assert_eq!(
        text(|state| {
            let mut old = node();
            old["status"]["nodeInfo"]["kubeletVersion"] = json!("v1.33.5-gke.1");
            state.nodes = vec![object(old)];
        }),
        "node n1: kubelet v1.33.5-gke.1 is older than 1.34 and cannot connect to the node driver; upgrade the kubelet\n"
    );
}

#[test]
fn finds_version_mismatch() {
    assert_eq!(
        text(|state| {
            let mut driver = workload("driver", "drava-dra-driver", "drava-dra-driver");
            driver["metadata"]["labels"]["app.kubernetes.io/version"] = json!("9.9.9");
            driver["spec"]["template"]["spec"]["containers"][0]["image"] =
                json!("drava-dra-driver:2");
            state.daemon_sets = vec![object(driver)];
        }),
        format!(
            "deployment drava-system/drava-controller: image tag 1 differs from tag 2 of the node driver; run helm upgrade with the drava chart; Helm 4 needs --force-conflicts to undo a change by kubectl\n\
             kubectl-drava: version {} differs from version 9.9.9 of the cluster; install kubectl-drava 9.9.9\n",
            env!("CARGO_PKG_VERSION")
        )
    );
}

#[test]
fn finds_missing_class_and_policy() {
    assert_eq!(
        text(|state| {
            state.classes.pop();
        }),
        "deviceclass fraction.drava.dev: the device class does not exist; run helm upgrade with the drava chart\n"
    );
    assert_eq!(
        text(|state| {
            state.policies.as_mut().expect("policies").pop();
        }),
        "validatingadmissionpolicy drava-controller-lease: the policy does not exist; run helm upgrade with the drava chart\n"
    );
    assert_eq!(
        text(|state| {
            state.bindings.as_mut().expect("bindings").pop();
        }),
        "validatingadmissionpolicy drava-controller-lease: no binding puts the policy into force; run helm upgrade with the drava chart\n"
    );
}

#[test]
fn finds_unavailable_controller() {
    let unavailable = "no replica is available, so that no claim is allocated";
    assert_eq!(
        text(|state| {
            let controller = workload("controller", "drava-controller", "drava-controller");
            state.deployments = vec![object(controller)];
            state.leases = Some(Vec::new());
        }),
        format!(
            "deployment drava-system/drava-controller: {unavailable}; see kubectl describe pods -n drava-system -l app.kubernetes.io/component=controller\n"
        )
    );
    let no_leader = "lease drava-system/drava-controller: no replica of the controller leads; see kubectl logs -n drava-system deployment/drava-controller\n";
    assert_eq!(text(|state| state.leases = Some(Vec::new())), no_leader);
    assert_eq!(
        text(|state| state.now = Some("2026-01-01T00:01:00Z".parse().expect("a time"))),
        no_leader.replace(
            "no replica of the controller leads",
            "holder has not renewed the lease for 50 s"
        )
    );
}

#[test]
fn finds_missing_permission() {
    let state = healthy();
    let required = access::required(&state);
    let denied: Permission = required
        .iter()
        .find(|permission| permission.resource == "resourceclaims/binding")
        .expect("the controller binds claims")
        .clone();
    assert_eq!(
        text(|state| state.denied = vec![denied]),
        "serviceaccount drava-system/drava-controller: may not patch resourceclaims/binding.resource.k8s.io; run helm upgrade with the drava chart, which restores its ClusterRoles and bindings; Helm 4 needs --force-conflicts to undo a change by kubectl\n"
    );
    let accounts: std::collections::BTreeSet<_> = required
        .iter()
        .map(|permission| permission.account.1.as_str())
        .collect();
    assert_eq!(
        Vec::from_iter(accounts),
        ["drava-controller", "drava-dra-driver"]
    );
    // The node driver follows the companion claims.
    assert!(required.iter().any(|permission| {
        (permission.account.1.as_str(), permission.verb) == ("drava-dra-driver", "watch")
            && permission.resource == "resourceclaims"
    }));
}

#[test]
fn requires_permissions_of_enabled_features() {
    let resources = |flags: &[&str]| {
        let mut controller = workload("controller", "drava-controller", "drava-controller");
        controller["spec"]["template"]["spec"]["containers"][0]["args"] = json!(flags);
        let mut state = healthy();
        state.deployments = vec![object(controller)];
        let required = access::required(&state).into_iter();
        required
            .map(|permission| permission.resource)
            .collect::<Vec<_>>()
    };
    assert!(!resources(&["--preemption=false"]).contains(&"pods/eviction"));
    assert!(resources(&["--preemption=true"]).contains(&"pods/eviction"));
    let webhook = ["--webhook-listen=:1", "--webhook-certificate-lifetime=1h"];
    for resource in ["secrets", "mutatingwebhookconfigurations"] {
        assert!(!resources(&webhook[..1]).contains(&resource));
        assert!(resources(&webhook).contains(&resource));
    }
}

#[test]
fn ignores_workloads_of_tenants_with_labels_of_drava() {
    let mut imitation = workload("driver", "imitation", "imitation");
    imitation["metadata"]["namespace"] = json!("a");
    assert_eq!(
        text(|state| {
            let class = json!({
                "metadata": {"name": "gpu.drava.dev", "annotations": {"gpu.drava.dev/namespace": "drava-system"}},
                "spec": {},
            });
            state.classes[0] = object(class);
            state.daemon_sets.insert(0, object(imitation));
        }),
        "no problems found\n"
    );
}

#[test]
fn finds_that_webhook_is_not_called() {
    let found = |listens: bool, webhooks: Vec<Webhook>| {
        text(|state| {
            state.webhooks = Some(webhooks);
            if listens {
                let mut controller = workload("controller", "drava-controller", "drava-controller");
                controller["status"] = json!({"availableReplicas": 2});
                controller["spec"]["template"]["spec"]["containers"][0]["args"] =
                    json!(["--scheduling=managed", "--webhook-listen=:9443"]);
                state.deployments = vec![object(controller)];
            }
        })
    };
    assert_eq!(found(false, Vec::new()), "no problems found\n");
    let mutating = "mutatingwebhookconfiguration drava-webhook: it does not exist, so that new pods are neither gated nor translated; run \
                    helm upgrade with the drava chart\n";
    let validating = "validatingwebhookconfiguration drava-webhook: it does not exist, so that configs of claims are not checked when they \
                      are written; run helm upgrade with the drava chart\n";
    assert_eq!(found(true, Vec::new()), format!("{mutating}{validating}"));
    // Of the two kinds, the healthy cluster has one here.
    assert_eq!(found(true, vec![webhook()]), validating);
    let validating = Webhook {
        configuration: "validatingwebhookconfiguration drava".to_owned(),
        ..webhook()
    };
    let both = vec![webhook(), validating];
    assert_eq!(found(true, both), "no problems found\n");
}

#[test]
fn finds_webhook_without_endpoint() {
    for endpoints in [Vec::new(), vec![object(endpoints(false))]] {
        assert_eq!(
            text(|state| state.endpoints = Some(endpoints)),
            "mutatingwebhookconfiguration drava: webhook gate.gpu.drava.dev is down: service drava-system/drava-webhook has no ready endpoint; see kubectl get pods -n drava-system\n"
        );
    }
}

#[test]
fn finds_expired_certificate_of_webhook() {
    let trusting = |until: Option<&str>| {
        text(|state| {
            state.webhooks = Some(vec![Webhook {
                trusted_until: until.map(|until| until.parse().expect("a time")),
                ..webhook()
            }]);
        })
    };
    let finding = |problem: &str| {
        format!(
            "mutatingwebhookconfiguration drava: webhook gate.gpu.drava.dev {problem}, so that the API server cannot call it; see kubectl logs -n drava-system deployment/drava-controller\n"
        )
    };
    assert_eq!(
        trusting(Some("2026-01-01T00:00:12Z")),
        finding("trusts certificates that expired at 2026-01-01T00:00:12Z")
    );
    assert_eq!(
        trusting(Some("2026-01-01T00:00:13Z")),
        "no problems found\n"
    );
    assert_eq!(trusting(None), finding("has no trusted certificate"));
}

#[test]
fn reads_validity_of_newest_certificate() {
    let certificate = |year| {
        let mut params = rcgen::CertificateParams::new(vec!["drava".to_owned()]).expect("a name");
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let key = rcgen::KeyPair::generate().expect("a key");
        params.self_signed(&key).expect("a certificate").pem()
    };
    let bundle = certificate(2031) + &certificate(2030);
    assert_eq!(
        admission::trusted_until(bundle.as_bytes()),
        Some("2031-01-01T00:00:00Z".parse().expect("a time"))
    );
    assert_eq!(admission::trusted_until(b"no certificate"), None);
}

#[test]
fn finds_clock_skew() {
    for (renewed, text_of_skew) in [
        ("2026-01-01T00:00:16Z", "6 s ahead of"),
        ("2026-01-01T00:00:04Z", "6 s behind"),
    ] {
        assert_eq!(
            text(|state| state.leases.as_mut().expect("leases")[1] =
                object(lease("kube-node-lease", "n1", renewed))),
            format!(
                "node n1: the clock of the node is {text_of_skew} the clock of the API server; synchronize the clocks with NTP\n"
            )
        );
    }
}

#[test]
fn lists_what_was_not_checked() {
    assert_eq!(
        text(|state| {
            state.leases = None;
            state.events = None;
            state.policies = None;
            state.webhooks = None;
            state.unchecked = vec!["cannot list leases".to_owned()];
        }),
        "no problems found\nnot checked: cannot list leases\n"
    );
}

#[test]
fn parses_versions_of_distributions() {
    for (text, version) in [
        ("v1.37.1", Some(Version(1, 37))),
        ("1.36+", Some(Version(1, 36))),
        ("v1.34.2-eks-1", Some(Version(1, 34))),
        ("master", None),
    ] {
        assert_eq!(Version::parse(text), version, "{text}");
    }
}

#[test]
fn finds_class_that_kueue_does_not_count() {
    let waiting = |class: &str, namespace: &str, name: &str| {
        let message = format!(
            "spec.podSets[0].template.spec.resourceClaims[0].resourceClaimTemplateName: Not found: \"DeviceClass {class} is not mapped in DRA configuration for podset main\""
        );
        let condition = json!([{"type": "QuotaReserved", "status": "False", "message": message}]);
        kueue::tests::workload(namespace, name, "uid", true, &condition)
    };
    let quota = json!([{"type": "QuotaReserved", "status": "False", "message": "insufficient unused quota"}]);
    assert_eq!(
        text(|state| {
            let selector = json!({"cel": {"expression": "device.driver == \"gpu.drava.dev\""}});
            state.classes.push(object(
                json!({"metadata": {"name": "team-gpu"}, "spec": {"selectors": [selector]}}),
            ));
            state.kueue = Kueue::Installed(vec![
                waiting("fraction.drava.dev", "a", "job-x"),
                waiting("fraction.drava.dev", "b", "job-y"),
                waiting("team-gpu", "a", "job-z"),
                waiting("gpu.example.com", "a", "job-other"),
                kueue::tests::workload("a", "job-q", "uid", true, &quota),
            ]);
        }),
        "\
deviceclass fraction.drava.dev: Kueue does not count the class, and admits no workload that requests it: a/job-x, b/job-y; add the class to deviceClassMappings of Kueue's configuration, as in deploy/examples/kueue
deviceclass team-gpu: Kueue does not count the class, and admits no workload that requests it: a/job-z; add the class to deviceClassMappings of Kueue's configuration, as in deploy/examples/kueue
"
    );
}

#[test]
fn finds_pod_that_waits_for_missing_kueue() {
    let gated = || {
        let mut pod = user_pod();
        pod["spec"]["schedulingGates"] = json!([{"name": "kueue.x-k8s.io/admission"}]);
        pod["spec"]["nodeName"] = Value::Null;
        pod["status"]["phase"] = json!("Pending");
        vec![object(driver_pod()), object(pod)]
    };
    let with = |kueue: Kueue| {
        text(|state| {
            state.pods = gated();
            state.kueue = kueue;
        })
    };
    assert_eq!(
        with(Kueue::NotInstalled),
        "pod team/p: the pod waits for its admission by Kueue, which is not installed; install Kueue, or create the pod without its label kueue.x-k8s.io/queue-name\n"
    );
    for kueue in [Kueue::Unknown, Kueue::Installed(Vec::new())] {
        assert_eq!(with(kueue), "no problems found\n");
    }
}
