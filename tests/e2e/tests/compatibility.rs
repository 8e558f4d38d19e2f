//! Pods that request GPUs by the extended resources of other systems.

use anyhow::{Context, Result, ensure};
use drava_e2e::{Namespace, TestCluster, wait};
use serde_json::Value;

const TRANSLATED: &str = "gpu.drava.dev/translated=true";

fn enabled<'c>(cluster: &'c TestCluster, name: &str) -> Result<Namespace<'c>> {
    let tenant = cluster.namespace(name)?;
    let label = ["label", "namespace", tenant.name()];
    cluster.kubectl(
        label
            .into_iter()
            .chain(["gpu.drava.dev/compatibility=true"]),
    )?;
    Ok(tenant)
}

/// Spec of a sleeping pod whose container has these limits.
fn spec(limits: &str) -> String {
    format!(
        "{{terminationGracePeriodSeconds: 1, containers: [{{name: app, image: 'localhost/drava-demo:dev', \
         imagePullPolicy: IfNotPresent, command: [sleep, infinity], resources: {{limits: {{{limits}}}}}}}]}}"
    )
}

fn pod(name: &str, limits: &str) -> String {
    let spec = spec(limits);
    format!("{{apiVersion: v1, kind: Pod, metadata: {{name: {name}}}, spec: {spec}}}")
}

/// Returns the memory of each GPU in MiB, as nvidia-smi reports it.
fn totals(tenant: &Namespace<'_>, pod: &str) -> Result<Vec<String>> {
    let query = "--query-gpu=memory.total";
    let query = ["nvidia-smi", query, "--format=csv,noheader,nounits"];
    let output = tenant.exec(pod, "app", &query)?.success()?;
    Ok(output.split_whitespace().map(str::to_owned).collect())
}

#[test]
fn runs_volcano_vgpu_pod_unchanged() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "volcano-vgpu")?;
    let limits =
        "volcano.sh/vgpu-number: 1, volcano.sh/vgpu-memory: 1000, volcano.sh/vgpu-cores: 10";
    tenant.apply(&pod("a", limits))?;
    tenant.running("a")?;
    let screen = tenant.exec("a", "app", &["nvidia-smi"])?.success()?;
    let plain = screen.replace(' ', "");
    ensure!(plain.contains("0MiB/1000MiB"), "{screen}");
    // The same request uses the same template.
    tenant.apply(&pod("b", limits))?;
    tenant.running("b")?;
    let templates = tenant.kubectl(&[
        "get",
        "resourceclaimtemplates",
        "-l",
        TRANSLATED,
        "-o",
        "name",
    ])?;
    ensure!(templates.lines().count() == 1, "{templates}");
    let failure = tenant.events("b")?;
    ensure!(
        !failure
            .iter()
            .any(|event| event.starts_with("FailedScheduling")),
        "{failure:?}"
    );
    Ok(())
}

#[test]
fn runs_deployment_with_several_gpus() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "volcano-two")?;
    let limits =
        "volcano.sh/vgpu-number: 2, volcano.sh/vgpu-memory: 3000, volcano.sh/vgpu-cores: 50";
    let spec = spec(limits);
    tenant.apply(&format!(
        "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: a}}, spec: {{selector: {{matchLabels: {{app: a}}}}, \
         template: {{metadata: {{labels: {{app: a}}}}, spec: {spec}}}}}}}"
    ))?;
    let name = wait("the pod of the deployment", || {
        let pods = tenant.list("pods")?;
        let name = pods
            .first()
            .and_then(|pod| pod["metadata"]["name"].as_str());
        Ok(name.map(str::to_owned))
    })?;
    tenant.running(&name)?;
    let totals = totals(&tenant, &name)?;
    ensure!(totals == ["3000", "3000"], "{totals:?}");
    tenant.kubectl(&["delete", "deployment", "a", "--timeout=60s"])?;
    Ok(())
}

#[test]
fn rejects_pod_that_cannot_be_translated() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "untranslatable")?;
    let limits = "volcano.sh/vgpu-number: 1, nvidia.com/gpumem: 1000";
    let rejection = tenant.apply(&pod("a", limits)).err().context("accepted")?;
    let text = format!("{rejection:#}");
    ensure!(text.contains("one device plugin per container"), "{text}");
    // A limit that a translation would lose.
    tenant.apply(
        "{apiVersion: v1, kind: ResourceQuota, metadata: {name: gpus}, spec: {hard: {requests.nvidia.com/gpu: 1}}}",
    )?;
    let text = wait("the quota is respected", || {
        Ok(match tenant.apply(&pod("b", "nvidia.com/gpu: 1")) {
            Err(rejection) => Some(format!("{rejection:#}")),
            Ok(()) => {
                tenant.delete_pods(&["b"])?;
                None
            }
        })
    })?;
    ensure!(text.contains("ResourceQuota gpus limits"), "{text}");
    Ok(())
}

#[test]
fn leaves_pods_of_other_namespaces_unchanged() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("device-plugin")?;
    let created: Value = tenant.dry_run(&pod("a", "nvidia.com/gpu: 2"))?;
    ensure!(created["spec"]["resourceClaims"].is_null(), "{created}");
    let limits = &created["spec"]["containers"][0]["resources"]["limits"];
    ensure!(limits["nvidia.com/gpu"] == "2", "{created}");
    Ok(())
}

#[test]
fn translated_pod_shows_no_failed_creation_of_its_claim() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "template-first")?;
    // Amounts that no other test requests, so that the template is new.
    tenant.apply(&pod("new", "nvidia.com/gpu: 1, nvidia.com/gpumem: 1237"))?;
    tenant.running("new")?;
    let events = tenant.events("new")?;
    ensure!(
        !events
            .iter()
            .any(|event| event.starts_with("FailedResourceClaimCreation")),
        "{events:?}"
    );
    Ok(())
}

#[test]
fn workload_names_the_unit_of_memory() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = enabled(&cluster, "unit")?;
    let spec = spec("nvidia.com/gpu: 1, nvidia.com/gpumem: 16Gi");
    tenant.apply(&format!(
        "{{apiVersion: apps/v1, kind: Deployment, metadata: {{name: model}}, spec: {{selector: {{matchLabels: {{app: model}}}}, \
         template: {{metadata: {{labels: {{app: model}}}}, spec: {spec}}}}}}}"
    ))?;
    let text = wait("the condition of the Deployment", || {
        let found = tenant.find("deployment", "model")?;
        let conditions = found.and_then(|found| found["status"]["conditions"].as_array().cloned());
        let failure = conditions
            .into_iter()
            .flatten()
            .find(|condition| condition["type"] == "ReplicaFailure");
        Ok(failure.and_then(|failure| failure["message"].as_str().map(str::to_owned)))
    })?;
    ensure!(
        text.contains(
            "16Gi is more memory than a GPU has, because the resource counts in MiB; use 16384"
        ),
        "{text}"
    );
    Ok(())
}
