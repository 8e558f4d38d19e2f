//! The admission webhook: gated pods, and what happens without it.

use anyhow::{Context, Result, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use drava_e2e::manifest::{pod, pod_with_request, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

const GATE: &str = "gpu.drava.dev/allocation";
const FOREIGN_GATE: &str = "example.com/quota";
const SYSTEM: &str = "drava-system";
const WEBHOOK: &str = "drava-webhook";

fn gates_of(pod: &Value) -> Vec<&str> {
    let gates = pod["spec"]["schedulingGates"].as_array();
    gates
        .into_iter()
        .flatten()
        .filter_map(|gate| gate["name"].as_str())
        .collect()
}

/// Creates a pod of the template `template` as a dry run, and returns whether the webhook gates it.
fn is_gated(tenant: &Namespace<'_>, template: &str) -> Result<bool> {
    let manifest = pod("probe", &format!("resourceClaimTemplateName: {template}"));
    Ok(gates_of(&tenant.dry_run(&manifest)?).contains(&GATE))
}

/// Creates the template and pod `a`, and waits until the webhook gates pods of the template.
fn with_gated_template(tenant: &Namespace<'_>) -> Result<()> {
    tenant.apply(&pod_with_share("a", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    wait("the webhook gates pods", || {
        Ok(is_gated(tenant, "a")?.then_some(()))
    })
}

/// Returns how many requests the API server has admitted without the answer of a webhook, which it awaits for 2 s.
fn failed_open(cluster: &TestCluster) -> Result<f64> {
    let metrics = cluster.kubectl(["get", "--raw", "/metrics"])?;
    let counts = metrics
        .lines()
        .filter(|line| line.starts_with("apiserver_admission_webhook_fail_open_count{"));
    let values = counts.map(|line| {
        let value = line.rsplit(' ').next().unwrap_or_default();
        value.parse::<f64>().with_context(|| line.to_owned())
    });
    values.sum()
}

#[test]
fn schedules_fitting_pods_without_failure() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("fits")?;
    with_gated_template(&tenant)?;
    let without_webhook = failed_open(&cluster)?;
    let pods: Vec<String> = (0..8).map(|index| format!("pod-{index}")).collect();
    for name in &pods {
        tenant.apply(&pod(name, "resourceClaimTemplateName: a"))?;
    }
    let without_webhook = failed_open(&cluster)? - without_webhook;
    let mut failures = Vec::new();
    for name in &pods {
        tenant.running(name)?;
        let mut events = tenant.events(name)?.into_iter();
        let failure = events.find(|event| event.starts_with("FailedScheduling"));
        failures.extend(failure.map(|event| format!("{name}: {event}")));
    }
    ensure!(
        failures.is_empty(),
        "{failures:#?}, {without_webhook} admitted without the webhook"
    );
    Ok(())
}

#[test]
fn waits_for_foreign_gate() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("foreign-gate")?;
    with_gated_template(&tenant)?;
    let manifest = pod("b", "resourceClaimTemplateName: a");
    let gates = format!("spec:\n  schedulingGates: [{{name: {FOREIGN_GATE}}}]\n");
    tenant.apply(&manifest.replacen("spec:\n", &gates, 1))?;
    // A pod that is created later is served first.
    tenant.apply(&pod("c", "resourceClaimTemplateName: a"))?;
    tenant.running("c")?;
    let found = tenant.find("pod", "b")?.context("the pod is gone")?;
    ensure!(gates_of(&found) == [FOREIGN_GATE, GATE], "{found}");
    let claim = tenant.claim_of("b")?;
    let claim = tenant.find("resourceclaim", &claim)?.context("no claim")?;
    ensure!(claim["status"]["allocation"].is_null(), "{claim}");

    let remove = json!({"spec": {"schedulingGates": [{"$patch": "delete", "name": FOREIGN_GATE}]}});
    tenant.kubectl(&["patch", "pod", "b", "-p", &remove.to_string()])?;
    tenant.running("b")
}

#[test]
fn serves_pods_without_webhook() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("no-webhook")?;
    with_gated_template(&tenant)?;
    let without_webhook = failed_open(&cluster)?;
    let select = |component: &str| {
        let selector = json!({"app.kubernetes.io/component": component});
        let patch = json!({"spec": {"selector": selector}}).to_string();
        cluster.kubectl(["-n", SYSTEM, "patch", "service", WEBHOOK, "-p", &patch])
    };
    select("none")?;
    // The API server keeps using its open connections to the replicas: new replicas have none.
    let restart = ["rollout", "restart", "deployment/drava-controller"];
    let served = cluster
        .kubectl(["-n", SYSTEM].iter().chain(&restart))
        .and_then(|_| cluster.drava_ready())
        .and_then(|()| {
            wait("pods are created without gate", || {
                Ok((!is_gated(&tenant, "a")?).then_some(()))
            })
        })
        .and_then(|()| tenant.apply(&pod("b", "resourceClaimTemplateName: a")))
        .and_then(|()| tenant.running("b"));
    select("controller")?;
    served?;
    ensure!(
        failed_open(&cluster)? > without_webhook,
        "the API server does not count requests without the webhook"
    );
    wait("the webhook gates pods again", || {
        Ok(is_gated(&tenant, "a")?.then_some(()))
    })
}

#[test]
fn rotates_certificate_under_load() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("rotation")?;
    with_gated_template(&tenant)?;
    let bundle = || -> Result<Value> {
        let secret = cluster.get(&["secret", WEBHOOK, "-n", SYSTEM])?;
        let data = &secret["data"];
        let is_complete = data["tls.crt"].is_string() && data["tls.key"].is_string();
        Ok(if is_complete {
            data["ca.crt"].clone()
        } else {
            Value::Null
        })
    };
    let first = bundle()?;
    ensure!(first.is_string(), "no certificate");
    // The controller replaces a certificate that is not usable; until then the replicas serve the one that they have read.
    let damage = json!({"data": {"tls.crt": null}}).to_string();
    cluster.kubectl(["-n", SYSTEM, "patch", "secret", WEBHOOK, "-p", &damage])?;
    let mut created = 0;
    wait("the certificate is rotated", || {
        created += 1;
        ensure!(is_gated(&tenant, "a")?, "pod {created} is not gated");
        let bundle = bundle()?;
        Ok((bundle.is_string() && bundle != first).then_some(()))
    })?;
    // The replicas read the new certificate meanwhile.
    for _ in 0..20 {
        created += 1;
        ensure!(is_gated(&tenant, "a")?, "pod {created} is not gated");
    }
    Ok(())
}

#[test]
fn repairs_trusted_certificates() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("trust")?;
    with_gated_template(&tenant)?;
    // A certificate of another authority.
    let config = cluster.get(&["configmap", "kube-root-ca.crt", "-n", SYSTEM])?;
    let other = config["data"]["ca.crt"].as_str().context("no authority")?;
    let name = json!("gate.gpu.drava.dev");
    let webhook = json!({"name": name, "clientConfig": {"caBundle": BASE64.encode(other)}});
    let patch = json!({"webhooks": [webhook]}).to_string();
    cluster.kubectl([
        "patch",
        "mutatingwebhookconfiguration",
        WEBHOOK,
        "-p",
        &patch,
    ])?;
    // Served with or without gate.
    tenant.apply(&pod("b", "resourceClaimTemplateName: a"))?;
    tenant.running("b")?;
    wait("the controller repairs the trusted certificates", || {
        Ok(is_gated(&tenant, "a")?.then_some(()))
    })
}

#[test]
fn removes_gates_after_controller_crashes() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("gate-crash")?;
    with_gated_template(&tenant)?;
    let pods: Vec<String> = (0..6).map(|index| format!("pod-{index}")).collect();
    let mut killed = 0;
    for (index, name) in pods.iter().enumerate() {
        tenant.apply(&pod(name, "resourceClaimTemplateName: a"))?;
        if index % 3 == 0 {
            // The second time Kubernetes may not have restarted the replicas yet.
            killed += cluster.kill_processes("drava-controller")?;
        }
    }
    ensure!(killed > 0, "no controller process on the node");
    for name in &pods {
        tenant.running(name)?;
    }
    cluster.drava_ready()
}

#[test]
fn denies_other_pod_changes_by_controller() -> Result<()> {
    const USER: &str = "--as=system:serviceaccount:drava-system:drava-controller";
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("gate-policy")?;
    let gates = format!("spec:\n  schedulingGates: [{{name: {FOREIGN_GATE}}}, {{name: {GATE}}}]\n");
    let manifest = drava_e2e::manifest::pod_without_claim("a");
    tenant.apply(&manifest.replacen("spec:\n", &gates, 1))?;
    let patch =
        |patch: &Value| tenant.kubectl(&["patch", "pod", "a", USER, "-p", &patch.to_string()]);
    let remove = |gate: &str| json!({"schedulingGates": [{"$patch": "delete", "name": gate}]});
    let image = json!({"containers": [{"name": "app", "image": "localhost/other"}]});
    for change in [
        json!({"metadata": {"labels": {"a": "b"}}}),
        json!({"metadata": {"finalizers": ["example.com/a"]}}),
        json!({"spec": image}),
        json!({"spec": remove(FOREIGN_GATE)}),
    ] {
        let rejection = patch(&change)
            .err()
            .with_context(|| format!("{change} was accepted"))?;
        let text = format!("{rejection:#}");
        ensure!(
            text.contains("may only remove the scheduling gate"),
            "{text}"
        );
    }
    // kubectl reads the status first, which the controller may not.
    let patch_status = |patch: &Value| {
        let patch = patch.to_string();
        let status = ["patch", "pod", "a", "--subresource=status", "-p", &patch];
        tenant.kubectl(&[&status[..], &[USER, "--as-group=system:masters"]].concat())
    };
    let condition = |name: &str| json!({"conditions": [{"type": name, "status": "False"}]});
    for status in [condition("Ready"), json!({"phase": "Failed"})] {
        let rejection = patch_status(&json!({"status": status}))
            .err()
            .with_context(|| format!("{status} was accepted"))?;
        let text = format!("{rejection:#}");
        ensure!(text.contains("may only write the conditions"), "{text}");
    }
    for own in ["gpu.drava.dev/Allocated", "gpu.drava.dev/Running"] {
        patch_status(&json!({"status": condition(own)}))?;
    }
    patch(&json!({"spec": remove(GATE)}))?;
    let found = tenant.find("pod", "a")?.context("the pod is gone")?;
    ensure!(gates_of(&found) == [FOREIGN_GATE], "{found}");
    Ok(())
}

#[test]
fn rejects_invalid_config_with_field_path() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("config-path")?;
    let manifest = |fields: &str| {
        let parameters = format!("apiVersion: gpu.drava.dev/v1alpha1, kind: VgpuConfig, {fields}");
        let config =
            format!("[{{opaque: {{driver: gpu.drava.dev, parameters: {{{parameters}}}}}}}]");
        pod_with_request("config", "{deviceClassName: vgpu.drava.dev}", &config)
    };
    for (fields, path) in [
        ("computPolicy: fixed", "computPolicy"),
        ("computePolicy: none", "computePolicy"),
        ("memory: {percent: 101}", "memory.percent"),
    ] {
        let rejection = tenant
            .apply(&manifest(fields))
            .err()
            .with_context(|| format!("{fields} was accepted"))?;
        let text = format!("{rejection:#}");
        ensure!(
            text.contains("spec.spec.devices.config[0].opaque.parameters") && text.contains(path),
            "{text}"
        );
    }
    tenant.apply(&manifest("memory: {percent: 10}"))
}
