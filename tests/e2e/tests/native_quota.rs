//! ResourceQuota and LimitRange of Kubernetes, on the real API server.

use anyhow::{Context, Result, ensure};
use drava_e2e::manifest::{pod_with_share, pod_without_claim};
use drava_e2e::{Namespace, TestCluster, wait};

/// A claim for this number of devices of a class.
fn claim(name: &str, class: &str, count: u32) -> String {
    format!(
        "{{apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {{name: {name}}}, spec: {{devices: {{requests: [{{name: gpus, \
         exactly: {{deviceClassName: {class}, count: {count}}}}}]}}}}}}"
    )
}

/// A pod with this number of `nvidia.com/gpu`.
fn pod_with_gpus(name: &str, count: u32) -> String {
    let command = "command: [sleep, infinity]\n";
    let limits = format!("{command}    resources: {{limits: {{nvidia.com/gpu: {count}}}}}\n");
    pod_without_claim(name).replace(command, &limits)
}

fn with_quota<'c>(cluster: &'c TestCluster, name: &str) -> Result<Namespace<'c>> {
    let tenant = cluster.namespace(name)?;
    tenant.example("resource-quota")?;
    wait("the quota is counted", || {
        let quota = tenant.find("resourcequota", "gpus")?;
        Ok(quota.filter(|quota| quota["status"]["hard"].is_object()))
    })?;
    Ok(tenant)
}

/// Returns the API server's text for an object that it rejects.
fn rejection(tenant: &Namespace<'_>, manifest: &str) -> Result<String> {
    let rejected = tenant.apply(manifest).err();
    let rejected = rejected.with_context(|| format!("accepted: {manifest}"))?;
    Ok(format!("{rejected:#}"))
}

#[test]
fn resource_quota_rejects_third_share() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = with_quota(&cluster, "share-quota")?;
    for pod in ["first", "second", "third"] {
        tenant.apply(&pod_with_share(pod, "vgpu.drava.dev", "{memory: 1Gi}"))?;
        if pod != "third" {
            tenant.running(pod)?;
        }
    }
    let why = tenant.event("third", "exceeded quota: gpus")?;
    ensure!(
        why.contains("vgpu.drava.dev.deviceclass.resource.k8s.io/devices=2"),
        "{why}"
    );
    Ok(())
}

#[test]
fn resource_quota_rejects_17th_gpu() -> Result<()> {
    const RESOURCE: &str = "gpu.drava.dev.deviceclass.resource.k8s.io/devices";
    let cluster = TestCluster::attach()?;
    let tenant = with_quota(&cluster, "gpu-quota")?;
    tenant.apply(&claim("sixteen", "gpu.drava.dev", 16))?;
    let text = rejection(&tenant, &claim("another", "gpu.drava.dev", 1))?;
    let expected = format!(
        "exceeded quota: gpus, requested: {RESOURCE}=1, used: {RESOURCE}=16, limited: {RESOURCE}=16"
    );
    ensure!(text.contains(&expected), "{text}");
    tenant.kubectl(&["delete", "resourceclaim", "sixteen"])?;
    wait("the devices are free again", || {
        Ok(tenant.apply(&claim("another", "gpu.drava.dev", 1)).ok())
    })
}

#[test]
fn resource_quota_counts_extended_resource() -> Result<()> {
    const RESOURCE: &str = "requests.nvidia.com/gpu";
    const CLASS: &str = "e2e-extended";
    let cluster = TestCluster::attach()?;
    let expected = format!(
        "exceeded quota: gpus, requested: {RESOURCE}=1, used: {RESOURCE}=16, limited: {RESOURCE}=16"
    );
    let tenant = with_quota(&cluster, "extended-quota")?;
    tenant.apply(&pod_with_gpus("sixteen", 16))?;
    let text = rejection(&tenant, &pod_with_gpus("another", 1))?;
    ensure!(text.contains(&expected), "{text}");
    tenant.delete_pods(&["sixteen"])?;
    // Explicit claims of a class with that extended resource count, too.
    cluster.kubectl(["delete", "deviceclass", CLASS, "--ignore-not-found"])?;
    tenant.apply(&format!(
        "{{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {{name: {CLASS}}}, spec: {{extendedResourceName: nvidia.com/gpu, \
         selectors: [{{cel: {{expression: \"device.driver == 'gpu.drava.dev'\"}}}}]}}}}"
    ))?;
    let counted = wait("the API server knows the class", || {
        tenant.apply(&claim("probe", CLASS, 1))?;
        let quota = tenant.find("resourcequota", "gpus")?.context("no quota")?;
        let is_counted = quota["status"]["used"][RESOURCE] == "1";
        tenant.kubectl(&["delete", "resourceclaim", "probe"])?;
        Ok(is_counted.then_some(()))
    })
    .and_then(|()| {
        wait("the probe is not counted any more", || {
            let quota = tenant.find("resourcequota", "gpus")?.context("no quota")?;
            Ok((quota["status"]["used"][RESOURCE] == "0").then_some(()))
        })
    })
    .and_then(|()| tenant.apply(&claim("sixteen", CLASS, 16)))
    .and_then(|()| rejection(&tenant, &claim("another", CLASS, 1)));
    cluster.kubectl(["delete", "deviceclass", CLASS])?;
    let text = counted?;
    ensure!(text.contains(&expected), "{text}");
    Ok(())
}

#[test]
fn limit_range_rejects_second_gpu_of_container() -> Result<()> {
    let cluster = TestCluster::attach()?;
    let tenant = cluster.namespace("limit-range")?;
    tenant.example("limit-range")?;
    let text = wait("the API server applies the limit", || {
        let rejected = tenant.dry_run(&pod_with_gpus("two", 2)).err();
        Ok(rejected.map(|error| format!("{error:#}")))
    })?;
    ensure!(
        text.contains("maximum nvidia.com/gpu usage per Container is 1, but limit is 2"),
        "{text}"
    );
    tenant.dry_run(&pod_with_gpus("one", 1))?;
    Ok(())
}
