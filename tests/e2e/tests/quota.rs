//! GpuQuotas: limits, defaults and status on the real API server.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod, pod_with_share};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::{Value, json};

/// A quota that is deleted with the value.
struct Quota<'c> {
    cluster: &'c TestCluster,
    name: String,
}

impl<'c> Quota<'c> {
    /// Creates or changes the quota of a namespace; `spec` is YAML in flow style without its braces.
    fn apply(cluster: &'c TestCluster, tenant: &Namespace<'_>, spec: &str) -> Result<Self> {
        let name = tenant.name().to_owned();
        tenant.apply(&manifest(&name, &format!("namespaces: [{name}], {spec}")))?;
        Ok(Self { cluster, name })
    }

    /// Returns the quota.
    fn get(&self) -> Result<Value> {
        self.cluster.get(&["gpuquota", &self.name])
    }

    /// Waits until a field of the status has this value.
    fn wait_for(&self, pointer: &str, value: &Value) -> Result<()> {
        wait(
            &format!("{pointer} of quota {} is {value}", self.name),
            || {
                let quota = self.get()?;
                Ok((quota.pointer(pointer) == Some(value)).then_some(()))
            },
        )
    }
}

impl Drop for Quota<'_> {
    fn drop(&mut self) {
        let delete = ["delete", "gpuquota", &self.name, "--ignore-not-found"];
        if let Err(error) = self.cluster.kubectl(delete) {
            eprintln!("cannot delete quota {}: {error:#}", self.name);
        }
    }
}

fn manifest(name: &str, spec: &str) -> String {
    format!(
        "{{apiVersion: gpu.drava.dev/v1alpha1, kind: GpuQuota, metadata: {{name: {name}}}, spec: {{{spec}}}}}"
    )
}

fn allocated_claims(tenant: &Namespace<'_>) -> Result<usize> {
    let claims = tenant.list("resourceclaims")?;
    let allocated = claims
        .iter()
        .filter(|claim| !claim["status"]["allocation"].is_null());
    Ok(allocated.count())
}

#[test]
fn quota_names_figures_and_admits_after_change() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quota")?;
    let quota = Quota::apply(&cluster, &tenant, "limit: {memory: 10Gi}")?;
    tenant.apply(&pod_with_share("first", "vgpu.drava.dev", "{memory: 8Gi}"))?;
    tenant.running("first")?;
    tenant.apply(&pod_with_share("second", "vgpu.drava.dev", "{memory: 4Gi}"))?;
    let figures = format!(
        "QuotaExceeded (quota {}: memory 8 GiB of 10 GiB used, 4 GiB requested)",
        tenant.name()
    );
    tenant.event("second", &figures)?;
    tenant.event(&tenant.claim_of("second")?, &figures)?;
    quota.wait_for("/status/used/memory", &json!("8Gi"))?;
    quota.wait_for("/status/free/memory", &json!("2Gi"))?;
    quota.wait_for("/status/conditions/0/status", &json!("True"))?;
    tenant.delete_pods(&["first"])?;
    tenant.running("second")?;
    // Below the usage: nothing is evicted, and the condition says so.
    let quota = Quota::apply(&cluster, &tenant, "limit: {memory: 1Gi}")?;
    quota.wait_for("/status/conditions/0/reason", &json!("LimitExceeded"))?;
    tenant.apply(&pod_with_share("third", "vgpu.drava.dev", "{memory: 1Gi}"))?;
    tenant.event("third", "memory 4 GiB of 1 GiB used, 1 GiB requested")?;
    tenant.running("second")?;
    let _quota = Quota::apply(&cluster, &tenant, "limit: {memory: 10Gi}")?;
    tenant.running("third")
}

#[test]
fn quota_holds_with_50_pods_at_once() -> Result<()> {
    const LIMIT: usize = 5;
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quota-parallel")?;
    let quota = Quota::apply(&cluster, &tenant, &format!("limit: {{devices: {LIMIT}}}"))?;
    let mut manifests = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: small}
spec:
  spec:
    devices:
      requests:
      - {name: gpu, exactly: {deviceClassName: vgpu.drava.dev, capacity: {requests: {memory: 256Mi}}}}
"
    .to_owned();
    let names: Vec<String> = (0..50).map(|index| format!("pod-{index:02}")).collect();
    for name in &names {
        manifests.push_str("---\n");
        manifests.push_str(&pod(name, "resourceClaimTemplateName: small"));
    }
    tenant.apply(&manifests)?;
    wait("all other pods wait for the quota", || {
        let allocated = allocated_claims(&tenant)?;
        ensure!(allocated <= LIMIT, "{allocated} claims are allocated");
        let events = tenant.list("events")?;
        let waiting = events.iter().filter(|event| {
            let message = event["message"].as_str().unwrap_or_default();
            event["involvedObject"]["kind"] == "Pod" && message.contains("QuotaExceeded")
        });
        Ok((allocated == LIMIT && waiting.count() >= names.len() - LIMIT).then_some(()))
    })?;
    quota.wait_for("/status/used/devices", &json!(LIMIT))?;
    let running = wait("the allocated pods run", || {
        let pods = tenant.list("pods")?;
        let running = pods
            .iter()
            .filter(|pod| pod["status"]["phase"] == "Running");
        let names: Vec<String> = running
            .filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned))
            .collect();
        Ok((names.len() == LIMIT).then_some(names))
    })?;
    // One pod ends, and exactly one other takes its place.
    tenant.delete_pods(&[&running[0]])?;
    wait("another pod is allocated", || {
        let allocated = allocated_claims(&tenant)?;
        ensure!(allocated <= LIMIT, "{allocated} claims are allocated");
        Ok((allocated == LIMIT).then_some(()))
    })
}

#[test]
fn quota_limits_and_defaults_each_claim() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quota-claim")?;
    let spec = "claim: {default: {memory: 2Gi}, max: {memory: 4Gi}}";
    let _quota = Quota::apply(&cluster, &tenant, spec)?;
    tenant.apply(&pod_with_share("default", "vgpu.drava.dev", ""))?;
    tenant.running("default")?;
    ensure!(tenant.total_mib("default")? == "2048", "the default amount");
    tenant.apply(&pod_with_share("large", "vgpu.drava.dev", "{memory: 5Gi}"))?;
    tenant.event(
        "large",
        "memory 5 GiB requested by one claim, 4 GiB allowed",
    )?;
    tenant.apply(&pod_with_share("whole", "gpu.drava.dev", ""))?;
    tenant.event("whole", "requested by one claim, 4 GiB allowed")?;
    Ok(())
}

#[test]
fn quota_with_contradictions_is_rejected() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quota-invalid")?;
    for (spec, message) in [
        (
            "limit: {devices: 1}",
            "set exactly one of namespaces and namespaceSelector",
        ),
        (
            "namespaces: [a], namespaceSelector: {}, limit: {devices: 1}",
            "set exactly one of namespaces and namespaceSelector",
        ),
        (
            "namespaces: [a]",
            "set at least one of limit, guarantee and claim",
        ),
        (
            "namespaces: [a], limit: {memory: 4Gi}, guarantee: {memory: 5Gi}",
            "guarantee.memory must not exceed limit.memory",
        ),
        (
            "namespaces: [a], limit: {cores: 10}, guarantee: {cores: 11}",
            "guarantee.cores must not exceed limit.cores",
        ),
        (
            "namespaces: [a], claim: {default: {memory: 1025Mi}, max: {memory: 1Gi}}",
            "claim.default.memory must not exceed claim.max.memory",
        ),
        ("namespaces: [a], limit: {memory: 4GB}", "spec.limit.memory"),
        (
            "namespaces: [a], limit: {memory: '-1Gi'}",
            "spec.limit.memory",
        ),
        (
            "namespaces: [a], limit: {devices: -1}",
            "spec.limit.devices",
        ),
        (
            "namespaces: [a], limit: {devices: 1}, deviceSelector: {}",
            "set productNames, types or both",
        ),
        (
            "namespaces: [a], limit: {devices: 1}, deviceSelector: {types: [fpga]}",
            "Unsupported value",
        ),
    ] {
        let error = tenant.dry_run(&manifest("invalid", spec));
        let error = error.err().with_context(|| format!("accepted: {spec}"))?;
        let text = format!("{error:#}");
        ensure!(text.contains(message), "{spec}: {text}");
    }
    let valid = "namespaceSelector: {matchLabels: {team: a}}, limit: {memory: 40Gi, cores: 200, devices: 4}, \
                 guarantee: {memory: 40Gi}, deviceSelector: {types: [vgpu]}, claim: {default: {memory: 1Gi, cores: 5}}";
    tenant.dry_run(&manifest("valid", valid))?;
    Ok(())
}

#[test]
fn quota_definition_may_be_missing() -> Result<()> {
    const DEFINITION: &str = "gpuquotas.gpu.drava.dev";
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("quota-missing")?;
    let mut definition = cluster.get(&["crd", DEFINITION])?;
    cluster.kubectl(["delete", "crd", DEFINITION, "--timeout=60s"])?;
    let restart = [
        "-n",
        "drava-system",
        "rollout",
        "restart",
        "deployment/drava-controller",
    ];
    let outcome = cluster.kubectl(restart).and_then(|_| {
        cluster.drava_ready()?;
        tenant.apply(&pod_with_share(
            "without",
            "vgpu.drava.dev",
            "{memory: 1Gi}",
        ))?;
        tenant.running("without")
    });
    for field in ["uid", "resourceVersion", "creationTimestamp", "generation"] {
        definition["metadata"][field].take();
    }
    definition["status"].take();
    tenant.apply(&definition.to_string())?;
    outcome?;
    cluster.wait_for_definition(&["crd", DEFINITION])?;
    let quota = Quota::apply(&cluster, &tenant, "limit: {memory: 1Gi}")?;
    quota.wait_for("/status/used/memory", &json!("1Gi"))
}
